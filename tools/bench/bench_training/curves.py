"""When two loss curves are one as far as rounding goes, and a picture of them."""

import json
from pathlib import Path

import numpy as np

BF16_UNIT = 2.0**-8
WARM = 5
"""Iterations that medians leave out."""

WINDOW = 10
"""Iterations that the thick lines average over."""

AHEAD = 20
"""Iterations by which a run may drift sooner than the noise."""


def band_of_noise(noises: list[float], *, ahead: int = 0) -> list[float]:
    """The largest distance that rounding explains, at each iteration.

    Args:
        noises: Relative distance of the noise run at each iteration, the largest of several runs'.
        ahead: Iterations by which a run may drift sooner than these. Runs drift apart
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


def within_noise(distances: list[float], noises: list[float], *, ahead: int = 0) -> list[bool]:
    """Whether each iteration's distance is explained by rounding, see :func:`band_of_noise`."""
    band = band_of_noise(noises, ahead=ahead)
    return [distance <= bound for distance, bound in zip(distances, band, strict=True)]


def draw(record: Path) -> list[Path]:
    """Draws a record of flashmoe, alltoall and at least one more run of alltoall.

    Above are the losses, below how far each run is from alltoall's, with the band of noise.

    Args:
        record: JSON lines with the keys ``run`` and ``losses``.

    Returns:
        The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in record.read_text().splitlines()]
    losses = {line["run"]: np.array(line["losses"]) for line in lines}
    stock = losses["alltoall"]
    others = [name for name in losses if name not in ("flashmoe", "alltoall")]
    iterations = np.arange(1, len(stock) + 1)
    matplotlib.rcParams["svg.hashsalt"] = "flashmoe"  # the same bytes for the same curves
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2), constrained_layout=True
    )

    for name, style in (("alltoall", "C1-"), ("flashmoe", "C0--")):
        above.plot(iterations, losses[name], style[:2], alpha=0.25, linewidth=0.8)
        above.plot(iterations, smooth(losses[name]), style, linewidth=1.6, label=name)
    above.set_ylabel("language-model loss, nats per byte")
    above.legend()
    above.set_title(f"thin: every iteration; thick: mean of {WINDOW}", fontsize="small")

    def apart(name: str) -> np.ndarray:
        return np.abs(losses[name] - stock) / stock

    noise = np.max([apart(name) for name in others], axis=0)
    band = np.array(band_of_noise(noise.tolist(), ahead=AHEAD))
    below.fill_between(iterations, band, 1e-7, color="0.9", label="band of noise")
    for index, name in enumerate(others):
        below.plot(iterations, apart(name), color=f"C{index + 2}", linewidth=0.8, label=name)
    below.plot(iterations, apart("flashmoe"), "C0", linewidth=0.8, label="flashmoe")
    below.set_yscale("log")
    below.set_ylim(1e-7, 2 * band.max())
    below.set_ylabel("relative distance from alltoall's loss")
    below.set_xlabel("iteration")
    below.legend(fontsize="small")

    written = [record.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in written:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    pyplot.close(figure)
    return written


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the :data:`WINDOW` values around each, of fewer at the ends."""
    ones = np.ones(min(WINDOW, len(values)))
    sums = np.convolve(values, ones, mode="same")
    return sums / np.convolve(np.ones(len(values)), ones, mode="same")
