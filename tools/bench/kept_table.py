"""Tells what our forwards keep for a backward at the shapes of a record of ``bench_peers``.

Sizes are the plan's, for buffers as that record's layers had them, so that no GPU is needed.
"""

from typing import Any

from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.config import TILE_M, Keep
from flashmoe_megatron.kernel.memory import plan_memory, reads_tokens
from flashmoe_megatron.planner import bounded_row_blocks, choose_keep, plan_buffer_rows

HEADS = ("rows of an expert", "all", "preactivations", "auto", "tokens")
KEEPS: tuple[Keep, ...] = ("all", "preactivations")


def megabytes(row: dict[str, Any]) -> dict[str, float]:
    """Rows of an expert and megabytes of a shape, by ``HEADS``.

    "auto" is where its choice by sizes leads; tokens are the layer's input, which another layer may
    keep anyway.
    """
    shape = Shape(**row["sizes"])
    config = shape.config(1)
    most = plan_buffer_rows(config).worst_case // TILE_M
    blocks = min(most, bounded_row_blocks(config, row["row_bound"]))
    plans = {keep: plan_memory(config, keep=keep, num_row_blocks=blocks) for keep in KEEPS}
    chosen = plans[choose_keep("auto", config, reads_tokens=reads_tokens(config))]
    kept = (*plans.values(), chosen)
    sizes = [plan.kept / 1e6 for plan in kept] + [chosen.token_buffer / 1e6]
    rows = shape.tokens * shape.topk / shape.num_experts
    return dict(zip(HEADS, (rows, *sizes), strict=True))
