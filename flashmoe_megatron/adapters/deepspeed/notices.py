"""Says what was asked for and has a risk: pure functions."""

from typing import Any

from flashmoe_megatron.adapters import collectives
from flashmoe_megatron.adapters.deepspeed.settings import SECTION, Settings


def overlap_notice(engine: Any, kinds: set[str], ranks: int, settings: Settings) -> str | None:
    """Says that a reduction of gradients and a launch may wait for each other, if they may.

    Args:
        engine: DeepSpeed's engine.
        kinds: What computes its layers.
        ranks: How many ranks share the experts of a layer, at most.
        settings: Its layers have these.
    """
    if (
        "kernel" not in kinds
        or ranks < 2
        or not (engine.zero_optimization_stage() and engine.zero_overlap_comm())
        or collectives.has_one_queue()
        or collectives.is_small(settings.reserved_sms)
    ):
        return None
    return (
        f"overlap_comm while launches leave {settings.reserved_sms} multiprocessors: a reduction "
        f"of more CTAs and {collectives.circle(f'{SECTION}.timeout')}; set "
        f"NCCL_MAX_CTAS={max(1, settings.reserved_sms)} and "
        "NCCL_CGA_CLUSTER_SIZE=1, or CUDA_DEVICE_MAX_CONNECTIONS=1, before the processes start"
    )
