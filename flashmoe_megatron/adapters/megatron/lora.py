"""Reads Megatron-Bridge's LoRA of experts: wrappers around linears, whose forwards are not called.

Factors and scale of each wrapper become low-rank additions to its linear's matrices. Known are the
adapters that Bridge makes for experts by ``LoRA``: one for each expert, one that the experts share,
and ``experts_shared_outer_loras``. All else below a wrapper is refused by name.
"""

from collections.abc import Sequence
from typing import Any

import torch

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.weights import ExpertWeights

_PEFT = "megatron.bridge.peft."
_WRAPPER = f"{_PEFT}lora_layers.LoRALinear"
KNOWN = frozenset(
    [
        _WRAPPER,
        f"{_PEFT}utils.ParallelLinearAdapter",
        f"{_PEFT}utils.GroupedExpertLinearAdapter",
        f"{_PEFT}utils._GroupedExpertAdapterWeight",
        f"{_PEFT}utils.SharedOuterGroupedExpertAdapter",
        f"{_PEFT}utils.PackedPerExpertLinear",
    ]
)
"""Classes whose factors are read; their subclasses may compute something else."""


def class_name(module: torch.nn.Module) -> str:
    """Returns a module's class with its package, by which a class is known."""
    cls = type(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def base_of(linear: Any) -> Any:
    """Returns the linear that a wrapper holds, a linear itself where there is none."""
    return linear._modules.get("to_wrap", linear)


def problem_of(module: torch.nn.Module) -> str | None:
    """Says what an adapter computes besides its two factors, ``None`` of what computes no more."""
    if not class_name(module).endswith("Adapter"):
        return None
    adapter: Any = module
    for name in ("dropout", "activation"):
        one = getattr(adapter, name, None)
        if type(one) is torch.nn.Dropout:
            return f"has a dropout of {one.p}"
        if type(one) is not torch.nn.Identity:
            return f"has {type(one).__name__} as its {name}"
    return None


def with_additions(weights: ExpertWeights, fc1: Sequence[Any], fc2: Sequence[Any]) -> ExpertWeights:
    """Adds what is wrapped around experts' linears; the same weights where nothing is.

    Args:
        weights: The weights of the linears within wrappers.
        fc1: The linears as the experts have them: one, or one for each expert.
        fc2: Likewise.

    Raises:
        ConfigError: Some experts have an adapter that is on and others none, adapters have several
            scales, or the weights are one parameter for all experts.
    """
    found = [_additions(name, linears) for name, linears in (("fc1", fc1), ("fc2", fc2))]
    if not any(down for down, _, _ in found):
        return weights
    if type(weights) is not ExpertWeights:
        raise ConfigError(
            "LoRA on experts whose weights are one parameter: wanted a parameter for each expert, "
            "leave --moe-single-grouped-weight out"
        )
    (fc1_down, fc1_up, fc1_scale), (fc2_down, fc2_up, fc2_scale) = found
    return AdaptedWeights(
        weights.fc1,
        weights.fc2,
        fc1_bias=weights.fc1_bias,
        fc2_bias=weights.fc2_bias,
        fc1_down=fc1_down,
        fc1_up=fc1_up,
        fc2_down=fc2_down,
        fc2_up=fc2_up,
        fc1_scale=fc1_scale,
        fc2_scale=fc2_scale,
    )


_Factors = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], float]


def _additions(name: str, linears: Sequence[Any]) -> _Factors:
    adapters = [
        linear.adapter
        for linear in linears
        if "to_wrap" in linear._modules and linear._adapter_enabled
    ]
    if not adapters:
        return (), (), 1.0
    if len(adapters) != len(linears):
        raise ConfigError(
            f"LoRA on linear_{name} of {len(adapters)} of {len(linears)} experts: wanted an "
            "adapter, and switched on, for all of them or for none"
        )
    scales = {float(adapter.alpha / adapter.dim) for adapter in adapters}
    if len(scales) > 1:
        raise ConfigError(
            f"LoRA on linear_{name} with alpha / dim of {sorted(scales)} for experts of one layer: "
            "wanted the same"
        )
    return (
        tuple(adapter.linear_in.weight for adapter in adapters),
        tuple(adapter.linear_out.weight for adapter in adapters),
        scales.pop(),
    )
