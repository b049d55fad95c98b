"""Fits the model's efficiencies to measured times, and shows how well it does on others."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tools import markdown
from tools.simulate.figures import Figures, Fitted
from tools.simulate.measured import Measurement, PointError
from tools.simulate.model import simulate, with_run

PEAK = 1.3
"""The best rate of the tensor cores, relative to cuBLAS'."""

BOUNDS = {
    "product_efficiency": (0.6, PEAK),
    "tile_us": (0.0, 20.0),
    "derivative_us": (0.0, 10.0),
    "wgrad_efficiency": (0.4, PEAK),
    "wgrad_tile_us": (0.0, 40.0),
    "link_efficiency": (0.3, 1.0),
    "forward_us": (5.0, 150.0),
    "backward_us": (5.0, 150.0),
    "forward_slowing": (0.0, 0.4),
    "backward_slowing": (0.0, 0.4),
}
PRIOR_WEIGHT = 0.03
"""How strongly a parameter is held where it was, per part of its range: what the points do not tell
apart stays where it is."""


@dataclass(frozen=True)
class Comparison:
    """One measured time and the simulated one."""

    point: Measurement
    simulated_ms: float

    @property
    def error(self) -> float:
        """Relative to the measured time."""
        return self.simulated_ms / self.point.kernel_ms - 1.0


def compare(points: list[Measurement], figures: Figures, fitted: Fitted) -> list[Comparison]:
    """Simulates every point."""
    return [Comparison(point, _simulated_ms(point, figures, fitted)) for point in points]


def fit(points: list[Measurement], figures: Figures) -> Fitted:
    """Finds the efficiencies from the points that may be seen.

    Raises:
        PointError: None of them may be.
    """
    seen = [point for point in points if point.is_fitted]
    if not seen:
        raise PointError("none of the points is of a shape that the model is fitted to")
    names = [name for name in BOUNDS if any(p.backward for p in seen) or not _is_backward(name)]
    start = Fitted(link_efficiency=min(figures.nvlink_row_gbps / figures.nvlink_gbps, 1.0))
    low, high = (np.array(side) for side in zip(*(BOUNDS[name] for name in names), strict=True))
    guess = np.array([getattr(start, name) for name in names])

    def fitted_of(values: NDArray[np.float64]) -> Fitted:
        found = dict(zip(names, map(float, values), strict=True))
        return replace(start, **found)  # type: ignore[arg-type]

    def residuals(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        values = low + scaled * (high - low)
        fitted = fitted_of(values)
        errors = [np.log(_simulated_ms(point, figures, fitted) / point.kernel_ms) for point in seen]
        prior = PRIOR_WEIGHT * (values - guess) / (high - low)
        return np.array([*errors, *prior])

    found = least_squares(
        residuals, (guess - low) / (high - low), bounds=(0.0, 1.0), diff_step=0.02, max_nfev=30
    )
    fitted = fitted_of(low + found.x * (high - low))
    described = tuple(f"{p.run}: {p.title} on {p.num_gpus}" for p in seen)
    return replace(fitted, fitted_to=described)


def table(comparisons: list[Comparison], tolerance: float) -> list[str]:
    """The comparison as Markdown, fitted points first, with a summary of each kind."""
    ordered = sorted(
        comparisons,
        key=lambda c: (not c.point.is_fitted, c.point.run, c.point.title, c.point.num_gpus),
    )
    rows = [
        (
            *(c.point.run, c.point.title, c.point.num_gpus, f"{c.point.kernel_ms:.3f}"),
            *(f"{c.simulated_ms:.3f}", f"{c.error:+.1%}"),
            "fitted" if c.point.is_fitted else "held out",
        )
        for c in ordered
    ]
    titles = ("run", "point", "GPUs", "measured, ms", "simulated, ms", "error", "")
    lines = [*markdown.table(titles, rows), ""]
    for name, is_fitted in (("fitted", True), ("held out", False)):
        errors = [abs(c.error) for c in comparisons if c.point.is_fitted is is_fitted]
        if errors:
            within = sum(error <= tolerance for error in errors)
            lines.append(
                f"{name}: {within} of {len(errors)} within {tolerance:.0%}, mean "
                f"{np.mean(errors):.1%}, largest {max(errors):.1%}"
            )
    return lines


def _simulated_ms(point: Measurement, figures: Figures, fitted: Fitted) -> float:
    of_run = with_run(figures, point.cublas_tflops, point.link_gbps)
    of_run = replace(of_run, domain=max(of_run.domain, point.num_gpus))
    times = simulate(point.shape, point.num_gpus, of_run, fitted, backward=point.backward)
    return times.total / 1e3


def _is_backward(name: str) -> bool:
    return name.startswith(("derivative", "wgrad", "backward"))
