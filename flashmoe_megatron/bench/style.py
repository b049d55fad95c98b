"""How all figures look, and how they are saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FUSED, UNFUSED, NEUTRAL, ACCENT = "#1b6ca8", "#d1495b", "#6b7280", "#e09f3e"
COLORS = {"fused": FUSED, "unfused": UNFUSED}

_STYLE: Any = {
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.labelsize": 12,
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "flashmoe",  # the same file from the same data
}


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """An empty figure in the common style, without a window.

    Args:
        width: In inches; 9 fill a README.
        height: In inches.
    """
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height))


def legend_below(figure: Figure, ax: Axes) -> None:
    """One legend for all axes, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def save(figure: Figure, path: Path) -> list[Path]:
    """Writes a picture with .png and .svg added to ``path``, also where its name has a dot.

    Returns:
        Both.
    """
    png, svg = (path.with_name(path.name + ending) for ending in (".png", ".svg"))
    figure.savefig(png, dpi=150, facecolor="white")
    figure.savefig(svg, facecolor="white", metadata={"Date": None})
    return [png, svg]


def tokens_label(tokens: int) -> str:
    """1024 as "1K"."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
