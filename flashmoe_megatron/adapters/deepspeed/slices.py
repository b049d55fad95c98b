"""Gives ZeRO's buckets a size that fits the gaps of a backward, and has them wait for these.

ZeRO fills one bucket and reduces it when the next gradient has no room. A bucket that waits is
taken aside with its buffer, and ZeRO goes on with an empty one.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed.routed import RoutedExperts
from flashmoe_megatron.adapters.deepspeed.settings import Settings
from flashmoe_megatron.adapters.gradients import LayerGradients, plan_reduction
from flashmoe_megatron.separate.slices import GradientSlices

_BUCKET = "reduce_bucket_size"


def size_buckets(
    engine: Any,
    layers: Sequence[RoutedExperts],
    group: dist.ProcessGroup | None,
    settings: Settings,
) -> None:
    """Sets the size of ZeRO's buckets if the user has set none. Collective over all ranks.

    Where ZeRO reduces while a backward runs (``overlap_comm``) and backwards have gaps, full
    buckets wait for them. Called before the engine's first backward, with this rank's layers in
    the order of the model.

    Raises:
        ConfigError: On every rank: the ZeRO stage has no buckets that are reduced while a backward
            runs, or a rank cannot plan.
    """
    stage = engine.zero_optimization_stage()
    if stage not in (1, 2):
        raise settings.refusal(
            "slice_gradients", True, f"wanted false with ZeRO stage {stage}, or stage 1 or 2"
        )
    parameters = list(engine.module.parameters())
    size = parameters[0].dtype.itemsize
    is_reduced = {True: _num_replicas(parameters) > 1, False: dist.get_world_size() > 1}
    numbers = {True: 0, False: 0}
    for parameter in parameters:
        numbers[_is_expert(parameter)] += parameter.numel()
    own = numbers[True] * is_reduced[True] // max(len(layers), 1)
    others = numbers[False] // (len(layers) + 1)
    plan = plan_reduction(
        [
            LayerGradients(
                experts.layer,
                experts.backend,
                experts.dtype,
                experts.bound_of_tokens,
                own_bytes=own * size,
                other_bytes=others * size * is_reduced[False],
                other_parameters=others,
            )
            for experts in layers
        ],
        settings,
        group,
        engine.device,
        "all_reduce",
    )
    given = engine.config.get("zero_optimization", {})
    if plan is not None and plan.piece_bytes and _BUCKET not in given:
        setattr(engine.optimizer, _BUCKET, max(plan.piece_bytes // size, 1))
    if plan is None or not engine.optimizer.overlap_comm:
        return
    slices = GradientSlices(engine.device)
    have_gaps = [experts.reduce_in_gaps(slices) for experts in layers]
    if any(have_gaps):
        slices.plan(plan.in_gap, plan.beside)
        engine.optimizer.reduce_ipg_grads = _WaitingBuckets(engine.optimizer, slices)


def travelling(optimizer: Any, bucket: Any) -> int:
    """Counts a bucket's gradients that other ranks have, too, in elements."""
    found = 0
    for group, place, _ in bucket.params:
        parameter = optimizer.bit16_groups[group][place]
        ranks = optimizer.dp_process_group
        if _is_expert(parameter):
            ranks = optimizer.expert_dp_process_group[parameter.group_name]
        found += parameter.numel() * (dist.get_world_size(ranks) > 1)
    return found


class _WaitingBuckets:
    """Takes the place of the method of a ZeRO optimizer that reduces full buckets."""

    def __init__(self, optimizer: Any, slices: GradientSlices) -> None:
        self._optimizer, self._slices = optimizer, slices
        self._reduce: Callable[..., None] = optimizer.reduce_ipg_grads

    def __call__(self, comm_dtype: torch.dtype | None = None) -> None:
        """Queues a bucket, or at the end of a backward, without a dtype, reduces all that is left.

        Args:
            comm_dtype: Which of ZeRO's buckets is full.
        """
        if comm_dtype is None:
            self._slices.drain()
            self._reduce()
            return
        if not self._optimizer.ipg_buckets[comm_dtype].params:
            return  # as before a gradient that is larger than a bucket
        full, large = self._take_aside(comm_dtype)
        size = travelling(self._optimizer, full) * comm_dtype.itemsize
        self._slices.put(size, lambda: self._start(comm_dtype, full, large))

    def _take_aside(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """Returns what ZeRO has of a full bucket, and leaves it an empty one in its place."""
        optimizer = self._optimizer
        bucket = optimizer.ipg_buckets[dtype]
        full = copy.copy(bucket)
        for name, value in vars(bucket).items():
            if isinstance(value, list | dict | set):
                setattr(full, name, copy.copy(value))
        bucket.clear()
        getattr(bucket, "reuse_events", {}).pop(bucket.index, None)  # newer releases have them
        if bucket.buffer:
            bucket.buffer[bucket.index] = torch.empty_like(bucket.buffer[bucket.index])
        return full, optimizer.extra_large_param_to_reduce.pop(dtype, None)

    def _start(self, dtype: torch.dtype, full: Any, large: Any) -> None:
        """Reduces a bucket as ZeRO would have done, after the work of the current stream."""
        optimizer = self._optimizer
        filling = optimizer.ipg_buckets[dtype]
        next_large = optimizer.extra_large_param_to_reduce.pop(dtype, None)
        optimizer.ipg_buckets[dtype] = full
        if large is not None:
            optimizer.extra_large_param_to_reduce[dtype] = large
        if full.grads[0].is_cuda:
            optimizer.reduction_stream.wait_stream(torch.cuda.current_stream())
            for gradient in full.grads:  # the allocator gives their memory away afterwards
                gradient.record_stream(optimizer.reduction_stream)
        try:
            self._reduce(comm_dtype=dtype)
        finally:
            optimizer.ipg_buckets[dtype] = filling
            if next_large is not None:
                optimizer.extra_large_param_to_reduce[dtype] = next_large


def _is_expert(parameter: Any) -> bool:
    return not getattr(parameter, "allreduce", True)


def _num_replicas(parameters: Sequence[Any]) -> int:
    """Counts the ranks that have the same experts."""
    from deepspeed.utils import groups

    names = {parameter.group_name for parameter in parameters if _is_expert(parameter)}
    sizes = [dist.get_world_size(groups._get_expert_data_parallel_group(name)) for name in names]
    return max(sizes, default=1)
