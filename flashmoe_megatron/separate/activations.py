"""Activations and their derivatives in plain torch, free of autograd, and the dtype of sums.

All compute in the dtype of their input, element by element.
"""

import math
from collections.abc import Callable

import torch

from flashmoe_megatron.config import Activation, MoEConfig


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def activate(pre_activation: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Applies the activation to fc1's output.

    Args:
        pre_activation: ``[rows, fc1_rows]``, in the order of fc1's rows.
        config: The layer's shape.

    Returns:
        ``[rows, intermediate]``.
    """
    value_and_slope = _VALUE_AND_SLOPE[config.activation]
    if not config.gated:
        return value_and_slope(pre_activation)[0]
    gate, up = _split(pre_activation, config.glu_interleave)
    if config.clamp_value is not None:
        gate = gate.clamp(max=config.clamp_value)
        up = up.clamp(-config.clamp_value, config.clamp_value)
    return value_and_slope(gate)[0] * (up + config.linear_offset)


def activate_backward(
    pre_activation: torch.Tensor,
    grad_activated: torch.Tensor,
    config: MoEConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiates :func:`activate`, whose other arguments it takes.

    A value that is clamped has no gradient; one at the bound itself has, as in ``torch.clamp``.

    Args:
        pre_activation: ``[rows, fc1_rows]``.
        grad_activated: ``[rows, intermediate]``, gradient of :func:`activate`'s result.
        config: The layer's shape.

    Returns:
        That result again, and the gradient of ``pre_activation``.
    """
    value_and_slope = _VALUE_AND_SLOPE[config.activation]
    if not config.gated:
        value, slope = value_and_slope(pre_activation)
        return value, grad_activated * slope
    gate, up = _split(pre_activation, config.glu_interleave)
    grad_gate, grad_up = grad_activated, grad_activated
    if config.clamp_value is not None:
        grad_gate = grad_gate * (gate <= config.clamp_value)
        grad_up = grad_up * (up.abs() <= config.clamp_value)
        gate = gate.clamp(max=config.clamp_value)
        up = up.clamp(-config.clamp_value, config.clamp_value)
    value, slope = value_and_slope(gate)
    factor = up + config.linear_offset
    grads = (grad_gate * factor * slope, grad_up * value)
    return value * factor, _join(*grads, config.glu_interleave)


def _split(rows: torch.Tensor, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up columns apart, each in order."""
    if not interleave:
        gate, up = rows.chunk(2, dim=1)
        return gate, up
    blocks = torch.unflatten(rows, 1, (-1, 2, interleave))
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def _join(gate: torch.Tensor, up: torch.Tensor, interleave: int) -> torch.Tensor:
    """The way back."""
    if not interleave:
        return torch.cat((gate, up), dim=1)
    blocks = [torch.unflatten(half, 1, (-1, interleave)) for half in (gate, up)]
    return torch.stack(blocks, dim=2).flatten(1)


def _silu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(z)
    return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))


def _gelu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return z * cdf, cdf + z * density


def _gelu_tanh(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    tanh = torch.tanh(scale * (z + cubic * z**3))
    inner_slope = scale * (1 + 3 * cubic * z * z)
    return 0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * inner_slope


def _relu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return z.clamp(min=0), (z > 0).to(z.dtype)


def _squared_relu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive = z.clamp(min=0)
    return positive * positive, 2 * positive


def _quick_gelu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(1.702 * z)
    return z * sigmoid, sigmoid * (1 + 1.702 * z * (1 - sigmoid))


_VALUE_AND_SLOPE: dict[Activation, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: _relu,
    Activation.SQUARED_RELU: _squared_relu,
    Activation.QUICK_GELU: _quick_gelu,
}
