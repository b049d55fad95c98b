"""Lets Megatron reduce fc2's gradients over replicas while fc1's are still computed.

A backward computes the gradients of fc2's weights before those of fc1's, in one launch. With
``--overlap-grad-reduce`` Megatron starts a bucket's collective in the hook of the last parameter to
get its gradient, behind all that the compute stream has by then: that whole launch. Where all that
is new in a bucket is of fc2, the collective is started behind fc2's gradients alone.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron import ddp_hooks, slices
from flashmoe_megatron.adapters.megatron.multipath import over_links
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.call import Backend

_EARLY = "flashmoe_early_in"
"""Attribute of a parameter: the last backward that may complete its gradient before it ends."""
_LATE = "flashmoe_late_in"
"""Attribute of a bucket group: the last backward that had to end before it had a gradient."""
_IS_FOREIGN = "flashmoe_is_foreign"
"""Attribute of a bucket group: Megatron's hooks have added gradients to it themselves."""


@dataclass(frozen=True)
class _Backward:
    """A layer's backward that has been launched: its number in the process, and its backend."""

    number: int
    backend: Backend | None


_last = _Backward(0, None)
_early_group: Any = None
"""The bucket group that Megatron is telling of a gradient, if its collective may start early."""


def note_backward(backend: Backend, fc2_in_main_grad: Sequence[torch.Tensor]) -> None:
    """Called once a layer's backward has been launched, before its parameters' hooks.

    Args:
        backend: The backend that has launched it.
        fc2_in_main_grad: The fc2 weights whose gradients it adds to main_grad.
    """
    global _last
    _last = _Backward(_last.number + 1, backend)
    for weight in fc2_in_main_grad:
        if not _adds_zeros(weight):
            setattr(weight, _EARLY, _last.number)


def patch_buckets(module: ModuleType) -> None:
    """Wraps what Megatron's hooks call when a parameter has its gradient, and what that may start.

    Args:
        module: ``megatron.core.distributed.param_and_grad_buffer``.
    """
    group_class = module._ParamAndGradBucketGroup
    patch(
        group_class,
        "register_grad_ready",
        lambda original: slices.told(_register_grad_ready(original)),
    )
    patch(
        group_class,
        "finish_grad_sync",
        lambda original: slices.drained(ddp_hooks.checked(original)),
    )
    patch(group_class, "start_param_sync", over_links(module, "param_gather_handle"))
    grads_over_links = over_links(module, "grad_reduce_handle")
    patch(
        group_class,
        "start_grad_sync",
        lambda original: slices.queued(_start_grad_sync(grads_over_links(original))),
    )


def _register_grad_ready(original: Function) -> Function:
    def register_grad_ready(group: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
        global _early_group
        if not _may_be_early(group, param):
            return original(group, param, *args, **kwargs)
        _early_group = group
        try:
            return original(group, param, *args, **kwargs)
        finally:
            _early_group = None

    return register_grad_ready


def _start_grad_sync(original: Function) -> Function:
    def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
        early = None
        if group is _early_group and _last.backend is not None:
            early = _last.backend.early_fc2_grads()
        with early or contextlib.nullcontext():
            return original(group, *args, **kwargs)

    return start_grad_sync


def _may_be_early(group: Any, param: torch.Tensor) -> bool:
    """Whether a bucket group need not wait for the last backward's end, this gradient being there.

    Gradients that launches added to main_grad before that backward are complete when it begins to
    compute its own; any that came since, other than the early ones, are as late as its end. What
    hooks add is on the stream on which DDP was made, which no launch waits for.
    """
    if not getattr(param, "grad_added_to_main_grad", False) or _adds_zeros(param):
        setattr(group, _IS_FOREIGN, True)
    if not group.is_last_microbatch:  # then Megatron starts none, and a hook comes for each weight
        return False
    if getattr(param, _EARLY, 0) != _last.number:
        setattr(group, _LATE, _last.number)
        return False
    # Several instances of the distributed optimizer reduce on a stream of their own, which waits
    # for the compute stream; and sums in float32 are made when the collective is waited for.
    config = group.ddp_config
    return bool(
        not getattr(group, _IS_FOREIGN, False)
        and getattr(group, _LATE, 0) != _last.number
        and config.num_distributed_optimizer_instances == 1
        and not getattr(config, "reduce_scatter_with_fp32_accumulation", False)
    )


def _adds_zeros(param: torch.Tensor) -> bool:
    """Whether Megatron's hook adds the zeros that autograd got to what a launch has added."""
    return bool(getattr(param, "zero_out_wgrad", False))
