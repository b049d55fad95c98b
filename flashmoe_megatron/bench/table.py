"""Says what was measured, as text and for programs."""

from dataclasses import asdict
from typing import Any

from flashmoe_megatron.bench.measure import GIB, Row
from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.bench.timer import Timing

TITLES = (
    "implementation",
    "forward, ms",
    "min to max",
    "TFLOP/s",
    "forward + backward, ms",
    "min to max",
    "TFLOP/s",
    "error",
    "GiB kept",
)
BACKWARD = 3
"""A forward and backward has so many times the operations of a forward."""


def tflops(shape: Shape, ms: float, passes: int) -> float:
    """Returns the TFLOP/s of one GPU.

    Args:
        shape: The layer.
        ms: The time of a call.
        passes: 1 for a forward, ``BACKWARD`` with its backward.
    """
    return passes * shape.flops / ms / 1e9


def lines(rows: list[Row], shape: Shape) -> list[str]:
    """Returns a table in aligned Markdown, and a sentence for each row without times."""
    cells = [list(TITLES), *([*_cells(row, shape)] for row in rows if row.forward)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    said = [
        "| "
        + " | ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in cells
    ]
    said.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return [*said, *(f"{row.name} {row.reason}" for row in rows if row.reason)]


def _cells(row: Row, shape: Shape) -> list[str]:
    found = [row.name]
    for timing, passes in ((row.forward, 1), (row.both, BACKWARD)):
        assert timing is not None
        ms = timing.median_ms
        span = f"{timing.min_ms:.3f} to {timing.max_ms:.3f}"
        found += [f"{ms:.3f}", span, f"{tflops(shape, ms, passes):.4g}"]
    kept = "" if row.kept is None else f"{row.kept / GIB:.3f}"
    return [*found, f"{row.error:.1e}", kept]


def record(rows: list[Row], shape: Shape) -> list[dict[str, Any]]:
    """Returns the rows for a file of JSON."""

    def of_timing(timing: Timing | None, passes: int) -> dict[str, Any] | None:
        if timing is None:
            return None
        rate = tflops(shape, timing.median_ms, passes)
        return {**timing.as_dict(), "tflops": round(rate, 4)}

    return [
        {
            **asdict(row),
            "forward": of_timing(row.forward, 1),
            "both": of_timing(row.both, BACKWARD),
        }
        for row in rows
    ]
