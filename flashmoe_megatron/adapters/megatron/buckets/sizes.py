"""Cuts the reduction of Megatron's gradients into pieces that fit the gaps of its backward.

A bucket is a piece, so the pieces' size is that of buckets. On the scheduled backend a bucket whose
gradients are complete waits for a gap; on others it starts at once, as in Megatron itself.

What makes buckets reads their size from DDP's configuration. From Megatron-Core 0.18 on that is the
layout of parameters, which the training script computes before it calls DDP, so that the size has
to be there by then. Muon's layout has a lower bound of its own, which rank 0 tells where pieces are
smaller.
"""

import inspect
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.gradients import LayerGradients, plan_reduction
from flashmoe_megatron.adapters.megatron.buckets.state import BUCKETS
from flashmoe_megatron.adapters.megatron.settings import (
    current_settings,
    current_value,
    flag_of,
    megatron_args,
)
from flashmoe_megatron.adapters.megatron.shape import ROUTED, number_in_model
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.separate.slices import GradientSlices

logger = logging.getLogger("flashmoe_megatron")

_SLICES = "flashmoe_slices"
"""Attribute of the configuration of Megatron's DDP: the queue of the models that it wraps."""


def slices_of(ddp_config: Any) -> GradientSlices | None:
    """The queue of the models that have a configuration of DDP, ``None`` without gaps."""
    slices: GradientSlices | None = getattr(ddp_config, _SLICES, None)
    return slices


def patch_training(module: ModuleType) -> None:
    """Plans before the script computes layouts, and lets its arguments say who chose a size."""
    patch(module, "get_model", _scripted)
    if hasattr(module, "wrap_model_chunks_with_ddp"):  # from 0.18 on
        patch(
            module,
            "wrap_model_chunks_with_ddp",
            lambda original: planning(original, "model_chunks"),
        )


def patch_builders(module: ModuleType) -> None:
    """Plans before a builder of models computes layouts."""
    patch(module, "_ddp_wrap", lambda original: planning(original, "model"))


def _scripted(original: Function) -> Function:
    def get_model(*args: Any, **kwargs: Any) -> Any:
        BUCKETS.is_script = True
        try:
            return original(*args, **kwargs)
        finally:
            BUCKETS.is_script = False

    return get_model


def planning(original: Function, name: str) -> Function:
    """Plans before a function that wraps what its argument ``name`` has, a chunk or several."""
    signature = inspect.signature(original)

    def wrap(*args: Any, **kwargs: Any) -> Any:
        if BUCKETS.is_planned or not current_value("slice_gradients"):
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        chunks = given[name] if isinstance(given[name], list) else [given[name]]
        piece = _size_buckets(given["ddp_config"], chunks, will_scatter=_will_scatter(given))
        if BUCKETS.is_script and given.get("bucket_sizes"):  # None of a chunk leaves it whole
            size = given["ddp_config"].bucket_size
            given["bucket_sizes"] = [each and size for each in given["bucket_sizes"]]
        BUCKETS.is_planned = True
        try:
            wrapped = original(*bound.args, **bound.kwargs)
        finally:
            BUCKETS.is_planned = False
        if piece and _has_muons_layout(given):
            _warn_of_whole_matrices(piece, chunks)
        return wrapped

    return wrap


def _will_scatter(given: dict[str, Any]) -> bool:
    """Tells whether gradients are reduced to shards; Muon's layout sets this as it is computed."""
    return bool(given["ddp_config"].use_distributed_optimizer or _has_muons_layout(given))


def _has_muons_layout(given: dict[str, Any]) -> bool:
    """Tells whether Megatron computes the layout that gives each rank whole matrices."""
    by_layer = given.get("use_layer_wise_distributed_optimizer", False)
    return bool(by_layer and given.get("use_layer_wise_param_layout", False))


def _warn_of_whole_matrices(piece: int, chunks: Sequence[torch.nn.Module]) -> None:
    """Says on rank 0 where Muon's layout, which has been computed, has no buckets of that size.

    A bucket has as much room for every rank, so that one with a matrix, which is whole on a rank,
    cannot be smaller than the matrix times the ranks, and all of that travels.
    """
    least = max(
        (
            _num_sharing(parameter) * parameter.numel()
            for chunk in chunks
            for parameter in chunk.parameters()
            if getattr(parameter, "is_managed_by_layer_wise_optimizer", False)
            and _num_sharing(parameter) > 1
        ),
        default=0,
    )
    if least > piece and dist.get_rank() == 0:
        logger.warning(
            "%s: pieces of %d elements fit the gaps, but a bucket of Muon's layout has room for "
            "its largest matrix on each rank that shares it, here up to %d elements; pass "
            "--no-use-layer-wise-param-layout for buckets that fit",
            flag_of("slice_gradients"),
            piece,
            least,
        )


def _size_buckets(
    ddp_config: Any, chunks: Sequence[torch.nn.Module], *, will_scatter: bool
) -> int | None:
    """Gives buckets the size that fits a gap, if the user has not chosen one. Collective.

    Returns that size in elements, ``None`` where buckets keep another.
    """
    operation = "reduce_scatter" if will_scatter else "all_reduce"
    sizes = [_plan(ddp_config, chunk, operation) for chunk in chunks]
    piece = None if _is_chosen(ddp_config) else next(filter(None, sizes), None)
    ddp_config.bucket_size = piece or ddp_config.bucket_size
    return piece


def _is_chosen(ddp_config: Any) -> bool:
    if not BUCKETS.is_script:
        return ddp_config.bucket_size is not None
    args = megatron_args()
    return args.ddp_bucket_size is not None or args.ddp_num_buckets is not None


def _plan(ddp_config: Any, module: torch.nn.Module, operation: str) -> int:
    """Plans what each layer has room for, in elements of a bucket. Collective over all ranks."""
    if not ddp_config.overlap_grad_reduce:
        raise ConfigError(f"{flag_of('slice_gradients')} wants --overlap-grad-reduce beside it")
    if ddp_config.num_distributed_optimizer_instances > 1:
        raise ConfigError(
            f"{flag_of('slice_gradients')} with --num-distributed-optimizer-instances "
            f"{ddp_config.num_distributed_optimizer_instances}: wanted 1, since several reduce on "
            "a stream of their own"
        )
    moe_layers: list[Any] = [each for each in module.modules() if hasattr(each, ROUTED)]
    routed = [getattr(each, ROUTED) for each in moe_layers]
    layers = _gradients_of(ddp_config, module, moe_layers)
    device = torch.empty(0, device=torch.cuda.current_device()).device
    group = moe_layers[0].ep_group if moe_layers else None
    plan = plan_reduction(layers, current_settings(), group, device, operation)
    if plan is None:
        return 0
    slices = slices_of(ddp_config) or GradientSlices(device)
    have_gaps = [each.reduce_in_gaps(slices) for each in routed]
    if any(have_gaps):
        slices.plan(plan.in_gap, plan.beside)
        setattr(ddp_config, _SLICES, slices)
    size = 4 if ddp_config.grad_reduce_in_fp32 else layers[0].dtype.itemsize
    return -(-plan.piece_bytes // size)


def _gradients_of(
    ddp_config: Any, module: torch.nn.Module, moe_layers: list[Any]
) -> list[LayerGradients]:
    """The bytes that are reduced around each layer, as though all that lies there were alike."""
    totals = {True: [0, 0], False: [0, 0]}  # bytes and parameters, of experts and of all else
    for parameter in module.parameters():
        is_expert = not getattr(parameter, "allreduce", True)
        size = 4 if ddp_config.grad_reduce_in_fp32 else parameter.dtype.itemsize
        total = totals[is_expert]
        total[0] += parameter.numel() * size * (_num_sharing(parameter) > 1)
        total[1] += parameter.numel()
    num_layers = len(moe_layers)
    return [
        LayerGradients(
            number_in_model(each),
            getattr(each, ROUTED).backend,
            getattr(each, ROUTED).dtype,
            getattr(each, ROUTED).bound_of_tokens,
            own_bytes=totals[True][0] // num_layers,
            other_bytes=totals[False][0] // (num_layers + 1),
            other_parameters=totals[False][1] // (num_layers + 1),
        )
        for each in moe_layers
    ]


def _num_sharing(parameter: torch.Tensor) -> int:
    """Counts the ranks that have the same parameter, and reduce its gradients."""
    from megatron.core import parallel_state

    if not getattr(parameter, "allreduce", True):
        return int(parallel_state.get_expert_data_parallel_world_size())
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
