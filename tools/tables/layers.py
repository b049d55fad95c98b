"""Makes the table of one layer on several GPUs, from a record of ``bench_layer``."""

from typing import Any

from flashmoe_megatron.bench.shapes import SHAPES
from tools import markdown
from tools.bench.floors import Floors
from tools.tables.records import rows_of

SHOWN = {
    "paper-1k": "H=F=2048, 64 experts, top-2, GELU; 1K",
    "paper-8k": "the same; 8K",
    "paper-16k-e64": "the same; 16K",
    "qwen3-30b": "Qwen3-30B-A3B; 8K",
    "mixtral-8x7b": "Mixtral 8x7B; 8K",
    "deepseek-v3-e64": "DeepSeek-V3 with 64 experts; 4K",
}
"""Titles of the shapes that the table shows, with the tokens of a GPU."""
PASSES = {"forward": "forward, ms", "forward+backward": "forward + backward, ms"}


def layers(name: str, memory_gbps: str | None = None) -> list[str]:
    """Times from Python and from a graph, over the floor, and against the unfused layer.

    Args:
        name: The record.
        memory_gbps: What a copy in the memory of these GPUs reads and writes, for a record without
            it, whose floors know no weights.
    """
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in rows_of(name):
        found.setdefault(row["shape"], {})[row["implementation"], row["measurement"]] = row
    titles = ["layer, tokens per GPU"]
    for title in PASSES.values():
        titles += [title, "from a graph, ms", "times floor", "against unfused"]
    rows = [[title, *_cells(shape, found[shape], memory_gbps)] for shape, title in SHOWN.items()]
    return markdown.table(titles, rows)


def _cells(
    shape: str, of: dict[tuple[str, str], dict[str, Any]], memory_gbps: str | None
) -> list[str]:
    forward = of["fused", "forward"]
    least, least_both = (of["fused", passes]["floor_ms"] for passes in PASSES)
    floors = Floors(least, least_both - least)
    if "memory_gbps" not in forward:
        if memory_gbps is None:
            raise ValueError(f"the record of {shape} has no memory_gbps: wanted it in the mark")
        numbers = SHAPES[shape].expert_numbers * forward["num_experts"] / forward["num_ranks"]
        floors = floors.with_weights(numbers, forward["grads"], float(memory_gbps))
    cells = []
    for passes, floor in zip(PASSES, (floors.forward, floors.both), strict=True):
        python, unfused = (of[one, passes]["median_ms"] for one in ("fused", "unfused"))
        graph = of["fused", f"{passes} from a graph"]["median_ms"]
        cells += [_ms(python), _ms(graph), f"{graph / floor:.1f}", f"{unfused / python:.1f}x"]
    return cells


def _ms(time: float) -> str:
    return f"{time:.2f}" if time >= 10 else f"{time:.3f}"
