"""Draws the README's picture: model TFLOP/s of a GPU in whole trainings, from the kept cards."""

import io
import re
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from flashmoe_megatron.bench.style import ACCENT, FUSED, UNFUSED, new_figure
from tools.bench.cards.card import NOT_RUN
from tools.bench.cards.kept import Comparison, KeptCard, Side, comparisons, shown

BAR, GAP = 0.34, 0.26
"""Inches of a bar, and between the bars of two models."""
ROUTINGS = {False: "natural routing", True: "forced balance"}
LABEL = re.compile(r"<!-- (.*?) -->")
"""Matplotlib writes each text as a comment over the shapes of its letters."""


@dataclass(frozen=True)
class Kind:
    """One way to train, as the legend has it."""

    label: str
    color: str


OURS = {
    ("whole", ""): Kind("flashmoe, one CUDA graph of the iteration", FUSED),
    ("pieces", ""): Kind("flashmoe, graphs of attention and router", "#8ab6d6"),
    ("whole", "fp8-dgrad"): Kind("flashmoe in blockwise FP8, dgrad too, one graph", "#0b3d63"),
    ("whole", "fp8"): Kind("flashmoe in blockwise FP8, one graph", "#2f6f9f"),
    ("pieces", "fp8-dgrad"): Kind("flashmoe in blockwise FP8, graphs of the router", "#5b8db0"),
}
THEIRS = {
    False: Kind("alltoall, graphs of attention and router", UNFUSED),
    True: Kind("alltoall in blockwise FP8, graphs of the router", ACCENT),
}
KINDS = (*OURS.values(), *THEIRS.values())
"""In the order of the bars of a model."""

Bars = dict[tuple[bool, Kind], Side]
"""The runs of a card, by whether balance is forced, and how they were trained."""


def bars_of(card: KeptCard) -> Bars:
    """Sorts the runs of a card, except those with spare slots."""
    bars: Bars = {}
    for row in comparisons(card):
        if row.has_slots:
            continue
        bars |= {(row.arm.is_forced, kind): side for kind, side in sides(row)}
    return bars


def sides(row: Comparison) -> list[tuple[Kind, Side]]:
    """Both sides of a comparison, with their kinds."""
    ours = OURS[row.arm.graph, row.arm.variant]
    return [(ours, row.ours), (THEIRS[row.other.in_fp8], row.theirs)]


def draw(cards: list[KeptCard]) -> str:
    """Draws the cards that are shown and have a run of flashmoe, as the text of an SVG file.

    A kind of run has a bar for each routing, or the reason why there is none; where neither routing
    has been tried, it is left out.
    """
    chosen = [
        card for card in shown(cards) if any(row.ours.line is not None for row in comparisons(card))
    ]
    machines = sorted({card.machine for card in chosen})
    with new_figure(10.5, 1) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        at, middles, names, drawn = 0.0, [], [], set()
        for card in chosen:
            bars = bars_of(card)
            tried = {kind for (_, kind), side in bars.items() if side.why != NOT_RUN}
            kinds = [kind for kind in KINDS if kind in tried]
            for i, kind in enumerate(kinds):
                for ax, is_forced in zip(axes, ROUTINGS, strict=True):
                    if (is_forced, kind) in bars:
                        draw_bar(ax, at + BAR * i, kind, bars[is_forced, kind])
            middles.append(at + BAR * (len(kinds) - 1) / 2)
            names.append(card.model.title + (f"\n{card.machine}" if len(machines) > 1 else ""))
            drawn.update(kinds)
            at += BAR * len(kinds) + GAP
        figure.set_size_inches(10.5, 1.9 + at)
        for ax, routing in zip(axes, ROUTINGS.values(), strict=True):
            ax.set(title=routing, xlim=(0, 1.35 * fastest(chosen)))
            ax.set_xlabel("model TFLOP/s of each GPU (ms an iteration)")
            ax.set_yticks(middles, names)
            ax.set_ylim(at - GAP - BAR / 2 + 0.1, -BAR / 2 - 0.1)
            ax.grid(visible=False, axis="y")
            ax.tick_params(axis="y", length=0)
        title = f"Pretraining with Megatron-Core, end to end, on {' and '.join(machines)}"
        figure.suptitle(title, weight="bold")
        legend = figure.legend(
            handles=[Patch(color=kind.color, label=kind.label) for kind in KINDS if kind in drawn],
            loc="outside lower center",
            ncols=2,
        )
        legend.set_title("stock pretrain_gpt.py in bf16, models cut in layers and vocabulary")
        written = io.StringIO()
        figure.savefig(written, format="svg", facecolor="white", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def draw_bar(ax: Axes, at: float, kind: Kind, side: Side) -> None:
    """Draws the bar of a run, or says why there is none."""
    if side.line is None:
        length, said = 0.0, f"{kind.label.split()[0].rstrip(',')}: {side.why}"
    else:
        length = side.line["tflops"]
        said = f"{length:.0f}  ({1e3 * side.line['seconds']:.0f} ms)"
    ax.barh(at, length, height=BAR * 0.92, color=kind.color)
    ax.annotate(said, (length, at), (4, 0), textcoords="offset points", va="center", fontsize=11)


def fastest(cards: list[KeptCard]) -> float:
    """The most TFLOP/s of all runs, 1 if none has any."""
    lines = (side.line for card in cards for side in bars_of(card).values())
    return max((line["tflops"] for line in lines if line is not None), default=1.0)


def labels(svg: str) -> list[str]:
    """Returns all texts of a picture, which are the same under every version of matplotlib."""
    return LABEL.findall(svg)
