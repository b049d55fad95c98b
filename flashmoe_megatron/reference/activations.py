"""The activations of the reference backend and their derivatives, free of autograd.

All in the dtype of what is given, element by element.
"""

import math
from collections.abc import Callable

import torch

from flashmoe_megatron.config import Activation


def activate(pre_activation: torch.Tensor, activation: Activation, *, gated: bool) -> torch.Tensor:
    """What becomes of fc1's output.

    Args:
        pre_activation: ``[rows, fc1_rows]``, the gate's half first if gated.
        activation: Applied to all of it, or to its gate half.
        gated: Whether the other half is multiplied with the activated one.

    Returns:
        ``[rows, intermediate]``.
    """
    value_and_slope = _VALUE_AND_SLOPE[activation]
    if gated:
        gate, up = pre_activation.chunk(2, dim=1)
        return value_and_slope(gate)[0] * up
    return value_and_slope(pre_activation)[0]


def activate_backward(
    pre_activation: torch.Tensor,
    grad_activated: torch.Tensor,
    activation: Activation,
    *,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiates :func:`activate`, whose other arguments it takes.

    Args:
        pre_activation: ``[rows, fc1_rows]``.
        grad_activated: ``[rows, intermediate]``, gradient of :func:`activate`'s result.
        activation: The one that :func:`activate` was given.
        gated: Whether it was applied to a gate half.

    Returns:
        That result again, and the gradient of ``pre_activation``.
    """
    value_and_slope = _VALUE_AND_SLOPE[activation]
    if gated:
        gate, up = pre_activation.chunk(2, dim=1)
        value, slope = value_and_slope(gate)
        grads = (grad_activated * up * slope, grad_activated * value)
        return value * up, torch.cat(grads, dim=1)
    value, slope = value_and_slope(pre_activation)
    return value, grad_activated * slope


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


_VALUE_AND_SLOPE: dict[Activation, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: _relu,
    Activation.SQUARED_RELU: _squared_relu,
}
