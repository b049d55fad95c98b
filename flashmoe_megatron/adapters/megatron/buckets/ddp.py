"""Wraps the methods of Megatron's DDP that make, fill, reduce and gather its buckets."""

from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.megatron.buckets.hooks import (
    check_counts,
    make_backward_post_hook,
    make_forward_pre_hook,
)
from flashmoe_megatron.adapters.megatron.buckets.links import compared, over_links
from flashmoe_megatron.adapters.megatron.buckets.sizes import planning, slices_of
from flashmoe_megatron.adapters.megatron.buckets.state import BUCKETS
from flashmoe_megatron.adapters.patch import Function, patch


def patch_ddp(module: ModuleType) -> None:
    """Plans the reduction when Megatron wraps a model, and notes the hooks that DDP makes.

    Ranks compare then, too, which links buckets travel by.
    """
    ddp = module.DistributedDataParallel
    patch(ddp, "__init__", lambda original: planning(compared(original), "module"))
    patch(ddp, "_make_backward_post_hook", make_backward_post_hook)
    patch(ddp, "_make_forward_pre_hook", make_forward_pre_hook)


def patch_buckets(module: ModuleType) -> None:
    """Wraps what Megatron calls when a parameter has its gradient, and what that may start."""
    group_class = module._ParamAndGradBucketGroup
    gathers = over_links(module, "param_gather_handle")
    reduces = over_links(module, "grad_reduce_handle")
    patch(group_class, "start_param_sync", gathers)
    patch(group_class, "register_grad_ready", _register_grad_ready)
    patch(group_class, "start_grad_sync", lambda original: _start_grad_sync(reduces(original)))
    patch(group_class, "finish_grad_sync", _finish_grad_sync)


def _register_grad_ready(original: Function) -> Function:
    def register_grad_ready(group: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
        BUCKETS.told, BUCKETS.is_early = group, BUCKETS.may_be_early(group, param)
        try:
            return original(group, param, *args, **kwargs)
        finally:
            BUCKETS.told = None

    return register_grad_ready


def _start_grad_sync(original: Function) -> Function:
    """Queues what starts since a gradient was the last to come, where backwards leave gaps."""

    def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
        def start() -> Any:
            with BUCKETS.fc2_alone(group):
                return original(group, *args, **kwargs)

        slices = slices_of(group.ddp_config)
        if slices is None:
            return start()
        if group is not BUCKETS.told:
            slices.drain()  # one order on all ranks
            return start()
        return slices.put(sum(bucket.grad_data.nbytes for bucket in group.buckets), start)

    return start_grad_sync


def _finish_grad_sync(original: Function) -> Function:
    """Starts what no gap has taken before it is waited for."""

    def finish_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
        slices = slices_of(group.ddp_config)
        if slices is not None:
            slices.drain()
        check_counts(group)
        return original(group, *args, **kwargs)

    return finish_grad_sync
