"""Measured times from records of ``tools.bench.bench_layer``, by itself or for a sweep."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flashmoe_megatron.bench.shapes import SHAPES, Shape
from flashmoe_megatron.bench.style import tokens_label

FITTED_SHAPES = ("paper-1k", "paper-16k-e64", "qwen3-30b", "mixtral-8x7b")
"""The model is fitted to these shapes, on any number of GPUs: the ends of the ranges of tokens and
widths. It is judged by all other shapes."""

OF_LAUNCHES = ("forward kernel", "backward kernel")
"""The names that bench_layer gives to times that launches record. These are simulated, since other
times have the host's calls in them."""


class PointError(Exception):
    """A file holds no times that can be used."""


@dataclass(frozen=True)
class Measurement:
    """One measured time.

    Attributes:
        run: The file.
        name: The shape's name.
        shape: The layer.
        num_gpus: Ranks of the group.
        backward: The backward's launch, else the forward's.
        kernel_ms: The least that the slowest rank recorded. Where ranks' hosts are late, a launch
            waits for its peers, which a median has in it.
        cublas_tflops, link_gbps: What the same run measured, if it did.
    """

    run: str
    name: str
    shape: Shape
    num_gpus: int
    backward: bool
    kernel_ms: float
    cublas_tflops: float | None
    link_gbps: float | None

    @property
    def is_fitted(self) -> bool:
        """Tells whether the model may see it before it is judged."""
        return self.name in FITTED_SHAPES or self.shape in (SHAPES[name] for name in FITTED_SHAPES)

    @property
    def title(self) -> str:
        """How a table names the point."""
        return f"{self.name} {'backward' if self.backward else 'forward'}"


def read_points(path: Path) -> list[Measurement]:
    """Reads the times that launches recorded from a file.

    Raises:
        PointError: There are none, or the file cannot be read.
    """
    found: list[Measurement] = []
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found += _of_sweep(path, row) if "key" in row else _of_bench(path, row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PointError(f"{path}: {error!r}") from error
    if not found:
        raise PointError(f"{path}: no times that launches recorded in it")
    return found


def _of_bench(path: Path, row: dict[str, Any]) -> list[Measurement]:
    if row["implementation"] != "fused" or row["measurement"] not in OF_LAUNCHES:
        return []
    is_skewed = row.get("zipf") or row.get("locality") is not None
    if is_skewed or row.get("spare_slots") or row.get("dtype", "bf16") != "bf16":
        return []  # the model has none of it
    return [
        Measurement(
            run=path.name,
            name=row["shape"],
            shape=Shape(**{field.name: row[field.name] for field in fields(Shape)}),
            num_gpus=row["num_ranks"],
            backward=row["measurement"] == "backward kernel",
            kernel_ms=row["min_ms"],
            cublas_tflops=row["cublas_tflops"],
            link_gbps=row["link_gbps"],
        )
    ]


def _of_sweep(path: Path, row: dict[str, Any]) -> list[Measurement]:
    """A point as sweeps wrote it until 24 November 2026."""
    if row["status"] != "ok":
        return []
    point, result = dict(row["point"]), row["result"]
    num_gpus = point.pop("num_gpus")
    shape = Shape(**point, gated=False)
    return [
        Measurement(
            run=f"{path.parent.name}/{path.name}",
            name=f"{tokens_label(shape.tokens)} tokens, {shape.num_experts} experts",
            shape=shape,
            num_gpus=num_gpus,
            backward=direction == "backward",
            kernel_ms=timing["min_ms"],
            cublas_tflops=result.get("cublas_tflops"),
            link_gbps=result.get("link_gbps"),
        )
        for direction, timing in result.get("kernels", {}).items()
    ]
