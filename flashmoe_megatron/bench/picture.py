"""Draws what was measured; matplotlib is imported here alone."""

from pathlib import Path

from flashmoe_megatron.bench.measure import GIB, Row
from flashmoe_megatron.bench.style import FUSED, UNFUSED, new_figure
from flashmoe_megatron.bench.timer import Timing


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Writes bars of times, with their spread, and of kept memory.

    Args:
        rows: The implementations; those without times are left out.
        title: Says what was measured, and where.
        path: The file; its ending says its kind.
    """
    timed = [row for row in rows if row.forward and row.both]
    names = [row.name for row in timed]
    colors = [FUSED if name.startswith("flashmoe") else UNFUSED for name in names]
    times = {
        "forward, ms": [row.forward for row in timed],
        "forward + backward, ms": [row.both for row in timed],
    }
    kept = [row.kept for row in timed]
    panels = len(times) + any(kept)
    with new_figure(3.2 * panels + 2.4, 0.5 * len(timed) + 2.3) as figure:
        every = figure.subplots(1, panels, sharey=True)
        for axes, (label, timings) in zip(every, times.items(), strict=False):
            found = [timing for timing in timings if isinstance(timing, Timing)]
            medians = [timing.median_ms for timing in found]
            spread = [
                [timing.median_ms - timing.min_ms for timing in found],
                [timing.max_ms - timing.median_ms for timing in found],
            ]
            axes.barh(names, medians, xerr=spread, color=colors, ecolor="#374151")
            for name, timing in zip(names, found, strict=True):
                axes.text(timing.max_ms, name, f"  {timing.median_ms:.3g}", va="center")
            axes.margins(x=0.22)
            axes.set_xlabel(f"{label}\nmedian; the line is min to max")
        if any(kept):
            gib = [(value or 0) / GIB for value in kept]
            every[-1].barh(names, gib, color=colors)
            for name, value in zip(names, kept, strict=True):
                known = "not known" if value is None else f"{value / GIB:.3g}"
                every[-1].text((value or 0) / GIB, name, f"  {known}", va="center")
            every[-1].margins(x=0.22)
            every[-1].set_xlabel("GiB that a forward keeps\nfor its backward")
        every[0].invert_yaxis()
        for axes in every:
            axes.set_xlim(left=0)
            axes.grid(visible=False, axis="y")
        figure.suptitle(title, fontsize=12)
        figure.savefig(path, dpi=150, facecolor="white")
