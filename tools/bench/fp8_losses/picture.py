"""Draws the losses of all runs, and how far they are from those of ``alltoall`` in FP8."""

from pathlib import Path

import numpy as np

from flashmoe_megatron.bench.style import ACCENT, FUSED, NEUTRAL, UNFUSED, new_figure, save
from tools.bench.bench_training.curves import smooth
from tools.bench.fp8_losses.judge import Records, ends_apart
from tools.bench.fp8_losses.runs import BF16, BF16_AGAIN, OURS, THEIRS

COLORS = {
    BF16.name: NEUTRAL,
    BF16_AGAIN.name: "#b8bdc6",
    THEIRS.name: UNFUSED,
    **dict(zip((run.name for run in OURS), (FUSED, ACCENT), strict=True)),
}
"""Each run's, in the order of the legend."""
MEAN_OF = 50
"""Iterations that a mean in the lower part covers. The judged tenth of 500 has as many."""


def draw(records: Records, path: Path) -> list[Path]:
    """Draws runs that all have ended.

    Above are the losses, below the means of :data:`MEAN_OF` iterations, relatively to those of
    ``alltoall`` in FP8, with what is allowed at the end.

    Args:
        records: As :func:`~tools.bench.fp8_losses.judge.judge` takes them, without a complaint.
        path: Path of the picture, without an ending.

    Returns:
        The files written.
    """
    losses = {name: np.asarray(records[name]["losses"]) for name in COLORS}
    reference = means(losses[THEIRS.name])
    ends = np.arange(len(losses[THEIRS.name]) - len(reference), len(losses[THEIRS.name])) + 1
    allowed = 100 * ends_apart(records)[1]
    with new_figure(8, 6.5) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for name, color in COLORS.items():
            iterations = range(1, len(losses[name]) + 1)
            above.plot(iterations, smooth(losses[name]), color=color, label=name)
            apart = 100 * (means(losses[name]) / reference - 1)
            below.plot(ends, apart, color=color, linewidth=1.5)
        above.set_ylabel("language-model loss, nats per byte")
        above.legend()
        below.axhspan(-allowed, allowed, color="0.93", zorder=0)
        below.set_ylabel(f"apart from {THEIRS.name}, %")
        below.set_xlabel(f"iteration; below the mean of the last {MEAN_OF}, grey what is allowed")
        return save(figure, path)


def means(losses: np.ndarray) -> np.ndarray:
    """Returns the mean of each :data:`MEAN_OF` losses in a row, or of all if there are fewer."""
    count = min(MEAN_OF, len(losses))
    return np.convolve(losses, np.ones(count) / count, mode="valid")
