"""Says what was asked for and has a risk: pure functions."""

import os
from typing import Any

from flashmoe_megatron.adapters.deepspeed.settings import SECTION, Settings


def overlap_notice(engine: Any, kinds: set[str], ranks: int, settings: Settings) -> str | None:
    """Says that a reduction of gradients and a launch may wait for each other, if they may.

    Each needs almost all multiprocessors of all of its GPUs at once. On one GPU the launch may
    leave too few for the reduction, on another the reduction too few for the launch.

    Args:
        engine: DeepSpeed's engine.
        kinds: What computes its layers.
        ranks: How many ranks share the experts of a layer, at most.
        settings: Its layers have these.
    """
    most = os.environ.get("NCCL_MAX_CTAS", "")
    if (
        "kernel" not in kinds
        or ranks < 2
        or not (engine.zero_optimization_stage() and engine.zero_overlap_comm())
        or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        or (most.isdigit() and int(most) <= settings.reserved_sms)
    ):
        return None
    return (
        f"overlap_comm while launches leave {settings.reserved_sms} multiprocessors: a reduction "
        "of more CTAs and a launch may each wait for room that the other holds on another GPU, "
        f"until {SECTION}.timeout ends it; set NCCL_MAX_CTAS={max(1, settings.reserved_sms)} and "
        "NCCL_CGA_CLUSTER_SIZE=1, or CUDA_DEVICE_MAX_CONNECTIONS=1, before the processes start"
    )
