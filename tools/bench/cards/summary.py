"""Writes what pages have of the kept cards: the README's comparison, and every card."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tools import markdown
from tools.bench.cards.card import NOT_RUN
from tools.bench.cards.kept import Comparison, KeptCard, Side, comparisons, shown
from tools.bench.cards.models import MODELS
from tools.bench.cards.page import NONE, wrap
from tools.bench.cards.page import markdown as text_of

TITLES = (
    "s an iteration",
    "GPU busy, %",
    "TFLOP/s/GPU",
    "tokens/s/GPU",
    "peak GiB",
    "gain",
)
TWO_DAYS = "two days"
"""Stands where a gain would compare the hosts and kernels of two days."""


def summary(cards: list[KeptCard], *, has_all: bool = False) -> list[str]:
    """Returns the lines of a comparison of flashmoe with alltoall, model by model.

    Args:
        cards: The cards that are kept.
        has_all: Whether it has forced balance, graphs of pieces, and FP8 in a part of a run, too.
            The README's has what a user gets: natural routing, in one graph.
    """
    chosen = shown(cards)
    rows = [row for card in chosen for row in comparisons(card) if has_all or is_for_readme(row)]
    machines = sorted({card.machine for card in chosen})
    lines = [*wrap(said_gain(rows, machines)), ""]
    ran = [row for row in rows if not is_open(row)]
    titles = ("model", "routing, GPUs" if has_all else "GPUs", *TITLES)
    lines += markdown.table(titles, (cells(row, has_all=has_all) for row in ran))
    apart = [row for row in ran if row.ratio is not None and row.is_of_two_runs]
    if has_all and apart:
        said = "; ".join(names(row, has_all=has_all) for row in apart)
        lines += ["", *wrap(f"Both sides ran on one day, but over half an hour apart: {said}.")]
    open_rows = [names(row, has_all=has_all) for row in rows if is_open(row)]
    if open_rows:
        lines += ["", *wrap(f"Not run yet: {'; '.join(open_rows)}.")]
    absent = [
        model.title for model in MODELS if all(card.model.name != model.name for card in chosen)
    ]
    if absent:
        lines += ["", *wrap(f"No card yet: {', '.join(absent)}.")]
    return lines


def is_for_readme(row: Comparison) -> bool:
    """Tells whether a user would choose the run, with natural routing.

    Spare slots are an option of a run that has its row already, and so need a gain to be shown.
    """
    is_part = row.is_mixed or row.arm.variant == "fp8"
    says_nothing = row.has_slots and row.ratio is None
    return row.arm.graph == "whole" and not (row.arm.is_forced or is_part or says_nothing)


def is_open(row: Comparison) -> bool:
    """Tells whether a row would show nothing of flashmoe, or nothing of alltoall in FP8."""
    ours, theirs = (side.line is None and side.why == NOT_RUN for side in (row.ours, row.theirs))
    return ours or (theirs and row.other.in_fp8)


def page(cards: list[KeptCard], folder: Path) -> list[str]:
    """Returns the lines of all cards, with links from a page in a folder to their records."""
    lines: list[str] = []
    for each in cards:
        again = f"python -m tools.bench.cards run --models {each.model.name} --gpus {each.num_gpus}"
        records = f"[Records]({os.path.relpath(each.path, folder)}), made by `{again}`."
        lines += [f"#{line}" if line.startswith("#") else line for line in text_of(each.card)]
        lines += [*wrap(records), ""]
    return lines[:-1]


def said_gain(rows: list[Comparison], machines: list[str]) -> str:
    """Says in a sentence how many times as long alltoall takes, and its GPU works."""
    where = " and ".join(machines)
    bf16 = span(row.ratio for row in rows if not row.other.in_fp8)
    if not bf16:
        return f"No pair is complete on {where}."
    told = f"On {where}, an iteration takes {bf16} times as long with `alltoall` as with flashmoe"
    works = span(row.over("busy_ms") for row in rows if not row.other.in_fp8)
    if works:
        told += f", and the GPU works {works} times as long"
    fp8 = span(row.ratio for row in rows if row.other.in_fp8 and not row.is_mixed)
    if fp8:
        told += f". With both in blockwise FP8 it takes {fp8} times as long with `alltoall`"
    mixed = span(row.ratio for row in rows if row.is_mixed)
    if mixed:
        told += f". With `alltoall` alone in blockwise FP8 it takes {mixed} times"
    return f"{told}."


def span(ratios: Iterable[float | None]) -> str:
    """Returns the least and the most of some numbers, "" of none."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return ""
    least, most = f"{min(known):.1f}", f"{max(known):.1f}"
    return least if least == most else f"{least} to {most}"


def names(row: Comparison, *, has_all: bool) -> str:
    """Returns what a sentence calls a row, as its first two cells do."""
    return " ".join(cells(row, has_all=has_all)[:2])


def cells(row: Comparison, *, has_all: bool) -> list[str]:
    """Returns the cells of a row, without a word on its routing unless there are all rows."""
    model = row.card.model.title + precision(row)
    routing = f"{'forced' if row.arm.is_forced else 'natural'}, " if has_all else ""
    graph = ", pieces" if row.arm.graph == "pieces" else ""
    slots = ", 2 slots" if row.has_slots else ""
    return [
        model,
        f"{routing}{row.card.machine}{graph}{slots}",
        pair(row, "seconds", lambda value: f"{value:.3f}", says_why=True),
        f"{busy(row.ours)} / {busy(row.theirs)}",
        pair(row, "tflops", lambda value: f"{value:.0f}"),
        pair(row, "tokens_per_s", lambda value: f"{value / 1e3:.1f}K"),
        pair(row, "peak_gib", lambda value: f"{value:.1f}"),
        gain(row),
    ]


def gain(row: Comparison) -> str:
    """Returns how many times as long alltoall takes, or why that is not said."""
    if row.ratio is not None:
        return f"{row.ratio:.1f}x"
    return TWO_DAYS if row.is_of_two_days else NONE


def precision(row: Comparison) -> str:
    """Returns what the name of a row's model is followed by, where alltoall's run is in FP8."""
    if not row.other.in_fp8:
        return ""
    if row.is_mixed:
        return ", bf16/FP8"
    return ", FP8" if row.arm.variant == "fp8-dgrad" else ", FP8 forward"


def pair(row: Comparison, key: str, form: Callable[[float], str], *, says_why: bool = False) -> str:
    """A number of both sides."""

    def one(side: Side) -> str:
        if side.line is None:
            return side.why if says_why else NONE
        return NONE if side.line[key] is None else form(side.line[key])

    return f"{one(row.ours)} / {one(row.theirs)}"


def busy(side: Side) -> str:
    """The share of an iteration in which the GPU works."""
    if side.line is None or side.line["busy_ms"] is None:
        return NONE
    return f"{side.line['busy_ms'] / side.line['seconds'] / 10:.0f}"
