"""Limits collectives that run concurrently with launches, so that nothing waits in a circle.

:mod:`flashmoe_megatron.adapters.collectives` says why; here their groups get few CTAs.
"""

import sys
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.collectives import has_one_queue
from flashmoe_megatron.adapters.megatron.config.asked import expert_tensor_size, number
from flashmoe_megatron.adapters.megatron.dispatcher import is_ours
from flashmoe_megatron.adapters.megatron.settings import FLAG_PREFIX, Settings
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.config import DEFAULT_RESERVED_SMS
from flashmoe_megatron.options import read_flags

OF_EXPERTS = ("ep_dp", "intra_ep_dp", "inter_ep_dp", "ep_gtp_remat_dp")
OF_OTHERS = ("dp", "dp_cp", "intra_dp_cp", "gtp_remat_dp", "gtp_remat_dp_cp")
OF_BOTH = ("intra_dist_opt_instance",)
"""Megatron's names of the groups that reduce gradients and gather parameters."""


def patch_groups(parallel_state: ModuleType) -> None:
    """Limits the communicators that ``megatron.core.parallel_state`` makes for a script."""
    patch(parallel_state, "get_nccl_options", _with_limits)


def most_ctas(args: Any) -> int | None:
    """Returns how many CTAs a collective of gradients may have.

    Gradients of experts are reduced by a communicator of their own, if anybody shares them,
    concurrently with those of all else: each gets half of the multiprocessors.

    Args:
        args: The arguments of Megatron's script.

    Returns:
        A number, 0 where not even one fits; or ``None`` where no collective can wait in a circle
        with a launch: no rank waits for another in one, nothing is reduced concurrently, or one
        hardware queue keeps both in the same order on all GPUs.
    """
    flags = read_flags(args, Settings, FLAG_PREFIX)
    if (
        not is_ours(args)
        or flags.get("backend") in ("scheduled", "reference")
        or not torch.cuda.is_available()
        or getattr(args, "expert_model_parallel_size", 1) < 2
        or not getattr(args, "overlap_grad_reduce", False)
        or has_one_queue()
    ):
        return None
    reserved = int(flags.get("reserved_sms", DEFAULT_RESERVED_SMS))
    return reserved // (2 if reduces_experts(args) else 1)


def reduces_experts(args: Any) -> bool:
    """Tells whether several ranks have the same experts."""
    stages = number(args, "pipeline_model_parallel_size", 1)
    apart = stages * number(args, "expert_model_parallel_size", 1) * expert_tensor_size(args)
    return number(args, "world_size", 1) > apart


def limits(args: Any, group: str) -> dict[str, int]:
    """Returns the options that a group's communicator gets, by the names of Megatron's file.

    Without clusters of CTAs: a cluster needs multiprocessors that are near each other, and a launch
    leaves some anywhere.
    """
    most = most_ctas(args)
    if not most or group not in (*OF_EXPERTS, *OF_OTHERS, *OF_BOTH):
        return {}
    return {"max_ctas": most, "cga_cluster_size": 1}


def _with_limits(original: Function) -> Function:
    def get_nccl_options(pg_name: str, nccl_comm_cfgs: Any) -> Any:
        args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
        own = limits(args, pg_name) if args is not None else {}
        if own:
            given = nccl_comm_cfgs.get(pg_name, {})
            nccl_comm_cfgs = {**nccl_comm_cfgs, pg_name: {**own, **given}}
        return original(pg_name, nccl_comm_cfgs)

    return get_nccl_options
