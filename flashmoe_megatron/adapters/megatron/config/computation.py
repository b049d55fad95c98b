"""Recognises the dtype and the activation of a configuration's experts."""

import functools
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_megatron.config import BOUNDED_ACTIVATIONS, Activation
from flashmoe_megatron.errors import ConfigError


def compute_dtype(config: Any) -> torch.dtype:
    """The dtype of parameters and tokens once Megatron has wrapped the model in Float16Module."""
    if config.bf16:
        return torch.bfloat16
    if config.fp16:
        return torch.float16
    dtype: torch.dtype = config.params_dtype
    return dtype


def activation_of(function: Any) -> Activation | None:
    """The activation that a Python function computes, ``None`` if it is not one of ours."""
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.fusions import fused_bias_geglu

    if isinstance(function, functools.partial):
        # One partial means an activation of ours: GELU with its tanh form chosen.
        is_tanh = function.keywords == {"approximate": "tanh"} and not function.args
        return Activation.GELU_TANH if function.func is F.gelu and is_tanh else None
    for known, activation in (
        (F.silu, Activation.SILU),
        (F.gelu, Activation.GELU),
        (F.relu, Activation.RELU),
        (fast_gelu, Activation.GELU_TANH),
        (squared_relu, Activation.SQUARED_RELU),
        (quick_gelu, Activation.QUICK_GELU),
        (fused_bias_geglu.quick_gelu, Activation.QUICK_GELU),  # which Megatron's own checks know
    ):
        if function is known:
            return activation
    return None


def takes_glu_terms(config: Any) -> bool:
    """Tells whether a configuration's experts have a gate that may have a clamp and an offset."""
    is_gated = bool(getattr(config, "gated_linear_unit", False))
    return is_gated and activation_of(getattr(config, "activation_func", None)) in (
        BOUNDED_ACTIVATIONS
    )


def functions_of(experts: torch.nn.Module) -> list[Any]:
    """The functions between the projections that a layer's experts hold, one or one of each."""
    owners: Any = getattr(experts, "local_experts", (experts,))
    return [getattr(owner, "activation_func", None) for owner in owners]


_TE_ACTIVATIONS = {
    "GELU": Activation.GELU_TANH,
    "GEGLU": Activation.GELU_TANH,
    "ReLU": Activation.RELU,
    "ReGLU": Activation.RELU,
    "SwiGLU": Activation.SILU,
}
"""The activation that an operation of Transformer Engine computes: its GELU is the tanh form."""


def activation_of_experts(config: Any, experts: torch.nn.Module) -> Activation:
    """Returns the activation that a layer's experts compute.

    With ``--use-te-activation-func`` it is Transformer Engine's operation, where the model's
    specification names one. Megatron chooses the operation by the configuration's function, but the
    operation may compute another function.

    Raises:
        ConfigError: It is not one of ours.
    """
    activation = activation_of(config.activation_func)
    if activation is None:
        raise ConfigError(f"activation_func={config.activation_func}: unknown activation")
    if not getattr(config, "use_te_activation_func", False):
        return activation
    # Experts that hold a function hold the configuration's: the specification names no operation.
    held = functions_of(experts)
    used = {type(operation) for operation in held if isinstance(operation, torch.nn.Module)}
    if not used:
        return activation
    found = [
        _TE_ACTIVATIONS.get(cls.__name__)
        for cls in used
        if cls.__module__.partition(".")[0] == "transformer_engine"
    ]
    if len(used) == len(found) == 1 and found[0] is not None:
        return found[0]
    listed = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in used))
    raise ConfigError(
        f"--use-te-activation-func: the experts' activation is {listed}, wanted one of "
        f"Transformer Engine's {', '.join(_TE_ACTIVATIONS)}; leave the flag out"
    )
