"""Lets Megatron's large parameter gathers and gradient reductions go over all links at once.

Megatron starts both in the methods of a bucket group, by two functions of that module. While such a
method runs, functions stand in their place that take buckets of at least 64 MiB.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron.config.asked import is_served
from flashmoe_megatron.adapters.megatron.settings import (
    current_settings,
    current_value,
    megatron_args,
)
from flashmoe_megatron.adapters.patch import Function
from flashmoe_megatron.ending import end_destroyed
from flashmoe_megatron.multipath import (
    MIN_BYTES,
    MOST_SUMMED,
    LinkTotals,
    Multipath,
    Reduction,
    Work,
)
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.torch_groups import is_destroyed, torch_group

_made: dict[dist.ProcessGroup, Multipath] = {}
_least_bytes = MIN_BYTES
_LEAST_GAIN = 0.1
"""The least gain of several links over one. Where NVLink is fast, the relay through the
host makes buckets 5 per cent faster and steps 4 per cent slower: kernels are launched over the same
PCIe."""


def over_links(module: ModuleType, handle: str) -> Callable[[Function], Function]:
    """Makes a bucket group's method move large buckets over all links.

    ``module`` is Megatron's of the groups, ``handle`` their attribute that holds what Megatron
    waits for.
    """

    def make(original: Function) -> Function:
        def start(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_on(group.ddp_config):
                return original(group, *args, **kwargs)
            with _in_place(module, group.buckets) as calls:
                result = original(group, *args, **kwargs)
            works = [work for call in calls if (work := call()) is not None]
            if works:
                setattr(group, handle, _Handles([getattr(group, handle), *works]))
            return result

        return start

    return make


def compared(original: Function) -> Function:
    """Has ranks whose buckets travel together compare the setting; for ``__init__`` of the DDP.

    Else those with another one would wait for each other in different collectives.
    """

    @functools.wraps(original)  # the plan of the reduction reads the arguments by name
    def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        if not _can_be_on(ddp.ddp_config):
            return
        bucket_groups = (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        held = "intra_distributed_optimizer_instance_group"  # without the optimizer there is none
        groups = [getattr(each, held) for each in bucket_groups if hasattr(each, held)]
        for group in dict.fromkeys(groups):
            names = ("multipath", "multipath_watch")
            Ranks(group).check_same({name: current_value(name) for name in names})

    return init


def take_link_totals() -> dict[str, LinkTotals]:
    """Returns what each link has carried for all groups of this process since the last call."""
    sums: dict[str, LinkTotals] = {}
    for multipath in _made.values():
        for name, one in multipath.take_totals().items():
            whole = sums.setdefault(name, LinkTotals())
            whole.nbytes += one.nbytes
            whole.timed_bytes += one.timed_bytes
            whole.seconds += one.seconds
    return sums


class _Handles:
    """Waits for a bucket group: for Megatron's own handle and for buckets that went over links."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = [handle for handle in handles if handle is not None]

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


def _is_on(config: Any) -> bool:
    """Tells whether buckets go over all links, by the settings and Megatron's own configuration."""
    return current_value("multipath") == "auto" and _can_be_on(config)


def _can_be_on(config: Any) -> bool:
    """Tells whether buckets can go over all links, as Megatron's own configuration says.

    Several instances of the distributed optimizer reduce on a stream of their own, and Megatron's
    sums in float32 have a handle of their own.
    """
    args = megatron_args()
    return (args is None or is_served(args)) and not (
        getattr(config, "num_distributed_optimizer_instances", 1) > 1
        or getattr(config, "reduce_scatter_with_fp32_accumulation", False)
    )


@contextlib.contextmanager
def _in_place(module: ModuleType, buckets: Sequence[Any]) -> Iterator[list[Callable[[], Any]]]:
    """Stands in for Megatron's two functions while buckets begin.

    Gives the calls that are to be made after them: Megatron calls its functions while the group
    collects collectives, when no other one of the group can begin.
    """
    gather, reduce = module.dist_all_gather_func, module.dist_reduce_scatter_func
    calls: list[Callable[[], Any]] = []

    def all_gather(
        output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if not _is_large(output, group):
            return gather(output, input, group=group, async_op=async_op)
        shares = any(_has_own_memory(bucket, output) for bucket in buckets)

        def call() -> Work | None:
            multipath = _multipath(group, output)
            if shares:  # peers may write directly to memory that stays
                multipath.share(output)
            return multipath.all_gather(output, input, async_op)

        calls.append(call)
        return None

    def reduce_scatter(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        kind = _kind_of(op)
        is_slower = dist.get_world_size(group) > MOST_SUMMED
        if kind is None or is_slower or not _is_large(input, group):
            return reduce(output, input, op=op, group=group, async_op=async_op)
        calls.append(lambda: _multipath(group, input).reduce_scatter(output, input, kind, async_op))
        return None

    module.dist_all_gather_func = all_gather  # type: ignore[attr-defined]
    module.dist_reduce_scatter_func = reduce_scatter  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        module.dist_all_gather_func = gather  # type: ignore[attr-defined]
        module.dist_reduce_scatter_func = reduce  # type: ignore[attr-defined]


def _has_own_memory(bucket: Any, parameters: torch.Tensor) -> bool:
    """Tells whether parameters are a bucket's, in the same memory in every iteration.

    Parameters that lie in the memory of gradients go with it: Megatron can give that back.
    """
    if bucket.param_data is not parameters:
        return False
    places = (one.untyped_storage().data_ptr() for one in (parameters, bucket.grad_data))
    return len(set(places)) == 2


def _kind_of(op: Any) -> Reduction | None:
    if op == dist.ReduceOp.SUM:
        return "sum"
    return "average" if op == dist.ReduceOp.AVG else None


def _is_large(tensor: torch.Tensor, group: Any) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= _least_bytes and dist.get_world_size(group) > 1


def _multipath(group: Any, tensor: torch.Tensor) -> Multipath:
    """The links of a group. Collective when it is first asked for."""
    group = torch_group(group) or dist.group.WORLD
    if group not in _made:
        end_destroyed()
        for gone in filter(is_destroyed, list(_made)):
            del _made[gone]
        timeout = current_settings().backend_options()["timeout"]
        _made[group] = Multipath(
            group,
            device=tensor.device,
            min_bytes=_least_bytes,
            least_gain=_LEAST_GAIN,
            timeout=timeout,
            watch=current_value("multipath_watch"),
        )
    return _made[group]
