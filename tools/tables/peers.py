"""Makes the table of layers of other libraries, from records of ``bench_peers``."""

from typing import Any

from tools import markdown
from tools.bench import peers_report
from tools.bench.bench_peers import PASSES
from tools.bench.peers_report import FINENESS, OURS
from tools.tables.records import path_of

SONICMOE = "[SonicMoE](https://arxiv.org/abs/2512.14080), both from CUDA graphs"
OTHERS = {"liger": "Liger's Triton kernel", "torch": "torch's grouped GEMMs"}
TITLES = ("ours over", "experts", "forward", "forward + backward")


def peers(sonicmoe: str, *others: str) -> list[str]:
    """The least and the most of our time over another library's, in both passes.

    Args:
        sonicmoe: The record with SonicMoE, which gets a row for each range of the experts' width.
        *others: Records with Liger's kernel and torch's products, which get a row each.
    """
    rows = peers_report.load(path_of(sonicmoe))
    lines = []
    for least, most in FINENESS.values():
        within = [row for row in rows if least <= row["sizes"]["intermediate"] <= most]
        ranges = _ranges(within, f"{OURS} from a graph", "sonicmoe from a graph")
        lines.append(["" if lines else SONICMOE, _described(within), *ranges])
    for record in others:
        rows = peers_report.load(path_of(record))
        for layer, title in OTHERS.items():
            lines.append([title, _described(rows), *_ranges(rows, OURS, layer)])
    return markdown.table(TITLES, lines)


def _described(rows: list[dict[str, Any]]) -> str:
    widths = [row["sizes"]["intermediate"] for row in rows]
    least, most = min(widths), max(widths)
    width = f"{least} to {most}" if most > least else str(least)
    shapes = {tuple(row["sizes"].values()) for row in rows}  # a shape may have two hosts' rows
    return f"F {width}, {len(shapes)} shapes"


def _ranges(rows: list[dict[str, Any]], ours: str, other: str) -> list[str]:
    ranges = []
    for passes in PASSES:
        times = [peers_report.values(row, passes) for row in rows]
        over = [of[ours] / of[other] for of in times]
        ranges.append(f"{min(over):.2f} to {max(over):.2f}")
    return ranges
