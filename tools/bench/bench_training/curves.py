"""Tells whether two loss curves are one as far as rounding goes, and draws them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools.bench.common import log

BF16_UNIT = 2.0**-8
WARM = 5
"""Iterations that medians leave out."""

WINDOW = 10
"""Iterations that the thick lines average over."""

AHEAD = 20
"""A run may drift so many iterations sooner than the noise."""


def band_of_noise(noises: list[float], *, ahead: int = 0) -> list[float]:
    """The largest distance that rounding explains, at each iteration.

    Args:
        noises: Relative distance of the noise run at each iteration, the largest of several runs'.
        ahead: How many iterations sooner than these a run may drift. Runs drift apart
            exponentially, so that one which begins a little further away, because it rounds in
            other places and not only in another order, is as far a few iterations earlier.

    Returns:
        One unit of bfloat16, or twice the largest noise up to there.
    """
    largest, band = 0.0, []
    for index in range(len(noises)):
        largest = max([largest, *noises[index : index + ahead + 1]])
        band.append(max(BF16_UNIT, 2 * largest))
    return band


def apart(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """The relative distances of two curves; NaN where the reference is 0."""
    pairs = zip(losses, reference, strict=True)
    return [abs(a - b) / abs(b) if b else math.nan for a, b in pairs]


def noise_of(noise_runs: Sequence[Sequence[float]], reference: Sequence[float]) -> list[float]:
    """The largest of several runs' distances from one, at each iteration."""
    distances = (apart(losses, reference) for losses in noise_runs)
    return [max(column) for column in zip(*distances, strict=True)]


def mean_of_last(losses: Sequence[float]) -> float:
    """The mean of the last tenth of a curve."""
    return float(np.mean(losses[-max(len(losses) // 10, 1) :]))


def within_noise(distances: list[float], noises: list[float], *, ahead: int = 0) -> list[bool]:
    """Tells for each iteration if rounding explains its distance, see :func:`band_of_noise`."""
    band = band_of_noise(noises, ahead=ahead)
    return [distance <= bound for distance, bound in zip(distances, band, strict=True)]


def judge(
    ours: Sequence[float], theirs: Sequence[float], *noise_runs: Sequence[float]
) -> list[str]:
    """Says what is wrong with our curve; nothing if rounding explains its distance from theirs."""
    failures = []
    distances, noise = apart(ours, theirs), noise_of(noise_runs, theirs)
    inside = within_noise(distances, noise, ahead=AHEAD)
    log(f"within the band of noise at {sum(inside)} of {len(inside)} iterations")
    if not all(inside):
        first = inside.index(False)
        failures.append(
            f"iteration {first + 1}: flashmoe is {distances[first]:.2e} from alltoall, other "
            f"orders of summation at most {max(noise[: first + AHEAD + 1]):.2e} so far"
        )
    end = [mean_of_last(theirs)]
    (distance,) = apart([mean_of_last(ours)], end)
    allowed = max(BF16_UNIT, 2 * max(noise_of([[mean_of_last(run)] for run in noise_runs], end)))
    log(f"mean of the last tenth: {distance:.2e} apart (allowed: {allowed:.2e})")
    if not distance <= allowed:
        failures.append(
            f"the mean of the last tenth is {distance:.2e} apart, allowed {allowed:.2e}"
        )
    if not mean_of_last(ours) < ours[0]:
        failures.append("the loss did not fall")
    return failures


def draw(record: Path) -> list[Path]:
    """Draws a record of flashmoe, alltoall and at least one more run of alltoall.

    Above are the losses, below how far each run is from alltoall's, with the band of noise.

    Args:
        record: JSON lines with the keys ``run`` and ``losses``.

    Returns:
        The files written.
    """
    from flashmoe_megatron.bench.style import ACCENT, FUSED, NEUTRAL, UNFUSED, new_figure, save

    lines = [json.loads(line) for line in record.read_text().splitlines()]
    losses = {line["run"]: line["losses"] for line in lines}
    stock = losses["alltoall"]
    noise_runs = {name: losses[name] for name in losses if name not in ("flashmoe", "alltoall")}
    band = band_of_noise(noise_of(list(noise_runs.values()), stock), ahead=AHEAD)
    iterations = range(1, len(stock) + 1)
    with new_figure(8, 7) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for name, style, color in (("alltoall", "-", UNFUSED), ("flashmoe", "--", FUSED)):
            above.plot(iterations, losses[name], style, color=color, alpha=0.25, linewidth=0.8)
            above.plot(iterations, smooth(losses[name]), style, color=color, label=name)
        above.set_ylabel("language-model loss, nats per byte")
        above.legend()
        above.set_title(f"thin: every iteration; thick: mean of {WINDOW}")

        below.fill_between(iterations, band, 1e-7, color="0.9", label="band of noise")
        shown = {**noise_runs, "flashmoe": losses["flashmoe"]}
        for index, (name, values) in enumerate(shown.items()):
            color = FUSED if name == "flashmoe" else (NEUTRAL, ACCENT)[index % 2]
            below.plot(iterations, apart(values, stock), color=color, linewidth=0.8, label=name)
        below.set_yscale("log")
        below.set_ylim(1e-7, 2 * max(band))
        below.set_ylabel("relative distance from alltoall's loss")
        below.set_xlabel("iteration")
        below.legend()
        return save(figure, record.with_suffix(""))


def smooth(values: Sequence[float]) -> np.ndarray:
    """The mean of the :data:`WINDOW` values around each, of fewer at the ends."""
    ones = np.ones(min(WINDOW, len(values)))
    sums = np.convolve(values, ones, mode="same")
    return sums / np.convolve(np.ones(len(values)), ones, mode="same")
