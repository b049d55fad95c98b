"""Gives ZeRO's buckets a size that fits the gaps of a backward."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed.routed import RoutedExperts
from flashmoe_megatron.adapters.deepspeed.settings import Settings
from flashmoe_megatron.adapters.gradients import LayerGradients, plan_reduction

_BUCKET = "reduce_bucket_size"


def size_buckets(
    engine: Any,
    layers: Sequence[RoutedExperts],
    group: dist.ProcessGroup | None,
    settings: Settings,
) -> None:
    """Sets the size of ZeRO's buckets if the user has set none. Collective over all ranks.

    Called before the engine's first backward, with this rank's layers in the order of the model.

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


def _is_expert(parameter: Any) -> bool:
    return not getattr(parameter, "allreduce", True)


def _num_replicas(parameters: Sequence[Any]) -> int:
    """Counts the ranks that have the same experts."""
    from deepspeed.utils import groups

    names = {parameter.group_name for parameter in parameters if _is_expert(parameter)}
    sizes = [dist.get_world_size(groups._get_expert_data_parallel_group(name)) for name in names]
    return max(sizes, default=1)
