"""Recognises the activation functions that Megatron's configurations hold."""

import functools
from typing import Any

import torch.nn.functional as F

from flashmoe_megatron.config import Activation


def activation_of(function: Any) -> Activation | None:
    """The activation that a Python function computes, ``None`` if it is not one of ours."""
    from megatron.core.activations import fast_gelu, squared_relu

    if isinstance(function, functools.partial):
        # The only partial that means one of ours: GELU with its tanh form chosen.
        is_tanh = function.keywords == {"approximate": "tanh"} and not function.args
        return Activation.GELU_TANH if function.func is F.gelu and is_tanh else None
    for known, activation in (
        (F.silu, Activation.SILU),
        (F.gelu, Activation.GELU),
        (F.relu, Activation.RELU),
        (fast_gelu, Activation.GELU_TANH),
        (squared_relu, Activation.SQUARED_RELU),
    ):
        if function is known:
            return activation
    return None
