"""Blockwise FP8 by integer arithmetic on bits, and a layer's experts that compute with it.

Shares no code with what it judges: a value is a whole number times a power of two, and is rounded
to E4M3 by shifts. What is read back is in float64.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from flashmoe_megatron.config import Activation
from flashmoe_megatron.oracle import FUNCTIONS

Ints = npt.NDArray[np.int64]
BLOCK = 128
Rounded = Callable[[torch.Tensor, int], torch.Tensor]
"""Rounds bfloat16 in blocks of a height, to float64."""


def bits_of(x: torch.Tensor) -> Ints:
    """The bits of bfloat16 values."""
    assert x.dtype == torch.bfloat16
    return x.detach().cpu().contiguous().view(torch.int16).numpy().astype(np.int64) & 0xFFFF


def _parts(bits: Ints) -> tuple[Ints, Ints]:
    """Whole numbers below 256 and powers of two whose product is the magnitude of finite values."""
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    return np.where(exponent == 0, mantissa, 128 + mantissa), np.maximum(exponent, 1) - 134


def _length(whole: Ints) -> Ints:
    """How many bits a whole number has."""
    return np.floor(np.log2(np.maximum(whole, 1))).astype(np.int64) + (whole > 0)


def exponents(amax: Ints) -> Ints:
    """The powers of two that blocks are multiplied with, by the bits of their largest values."""
    whole, power = _parts(amax)
    length = _length(whole)
    highest = power + length - 1
    # 448 is 1.75 times 2 ** 8: what is larger than 1.75 in its binade gets half the scale.
    is_above = (whole << (8 - length)) > 224
    found = np.minimum(8 - highest - is_above, 127)
    return np.where((amax == 0) | (amax == 0x7F80), 0, found)


def _to_e4m3(bits: Ints, exponent: Ints) -> Ints:
    """The bytes of values times two to the exponent: to nearest, ties to even, at most 448."""
    sign, magnitude = bits >> 15 << 7, bits & 0x7FFF
    whole, power = _parts(magnitude)
    power = power + exponent
    step = np.maximum(power + _length(whole) - 1, -6) - 3
    shift = np.clip(step - power, -8, 40)
    left, right = np.maximum(-shift, 0), np.maximum(shift, 0)
    kept = (whole << left) >> right
    rest, half = whole - (kept << right), (1 << right) >> 1
    kept = kept + ((right > 0) & ((rest > half) | ((rest == half) & (kept & 1 == 1))))
    step, kept = step + (kept == 16), np.where(kept == 16, 8, kept)
    byte = np.where(kept < 8, kept, (step + 10 << 3) | (kept - 8))
    byte = np.where((magnitude == 0x7F80) | (byte > 0x7E), 0x7E, byte)
    return sign | np.where(magnitude > 0x7F80, 0x7F, byte)


def quantize(x: torch.Tensor, height: int) -> tuple[Ints, Ints]:
    """Bytes of E4M3 and exponents of scales, ``[..., rows / height, width / 128]``."""
    bits = bits_of(x)
    *others, rows, width = bits.shape
    tiles = bits.reshape(*others, rows // height, height, width // BLOCK, BLOCK)
    magnitude = tiles & 0x7FFF
    amax = np.where(magnitude > 0x7F80, 0, magnitude).max((-3, -1), keepdims=True)
    exponent = exponents(amax)
    values = _to_e4m3(tiles, exponent).reshape(bits.shape)
    return values, exponent.squeeze(-1).squeeze(-2)


def read(values: Ints, exponent: Ints, height: int) -> torch.Tensor:
    """What the bytes stand for, in float64."""
    field, mantissa = values >> 3 & 0xF, values & 7
    whole = np.where(field == 0, mantissa, 8 + mantissa).astype(np.float64)
    number = np.ldexp(whole, np.maximum(field, 1) - 10)
    number = np.where(values & 0x7F == 0x7F, np.nan, number)
    scales = exponent.repeat(height, -2).repeat(BLOCK, -1)
    return torch.from_numpy(np.where(values >> 7 == 1, -1.0, 1.0) * np.ldexp(number, -scales))


def as_bfloat16(values: torch.Tensor, height: int) -> torch.Tensor:
    """The values themselves, in float64."""
    return values.double()


def by_integers(values: torch.Tensor, height: int) -> torch.Tensor:
    """What bfloat16 values become, in float64."""
    return read(*quantize(values, height), height).to(values.device)


def along_rows(values: torch.Tensor, rounded: Rounded) -> torch.Tensor:
    """Rounds blocks of 128 successive rows and one column, the last of as many as there are."""
    pads = values.new_zeros(-len(values) % BLOCK, values.shape[1])
    whole = torch.cat((values, pads)).bfloat16()
    return rounded(whole.t().contiguous(), 1).t()[: len(values)]


class _RoundedGradient(torch.autograd.Function):
    """The same values, whose gradient is rounded."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rounded: Rounded) -> torch.Tensor:
        ctx.rounded = rounded
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rounded(grad.bfloat16(), 1), None


class _Product(torch.autograd.Function):
    """Rows times the transpose of weights, with a backward in FP8.

    The gradient of the rows has that of the outputs rounded; so has that of the weights with
    ``rounds_wgrad``, which has the rows rounded again, as Transformer Engine has: both in blocks of
    one column. Else it has neither rounded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        unrounded: torch.Tensor,
        rounded: Rounded,
        rounds_wgrad: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, unrounded)
        ctx.rounded, ctx.rounds_wgrad = rounded, rounds_wgrad
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, unrounded = ctx.saved_tensors
        of_rows = ctx.rounded(grad.bfloat16(), 1) @ weight
        if ctx.rounds_wgrad:
            grad, rows = along_rows(grad, ctx.rounded), along_rows(unrounded, ctx.rounded)
        return of_rows, grad.t() @ rows, None, None, None


def moe_in_fp8(
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    fc1: list[torch.Tensor],
    fc2: list[torch.Tensor],
    *,
    activation: Activation,
    gated: bool,
    glu_interleave: int = 0,
    rounded: Rounded = by_integers,
    backward: Literal["dequantized", "fp8_dgrad", "transformer_engine"] = "dequantized",
    hands_over: bool = False,
    **_: object,
) -> torch.Tensor:
    """The oracle's function, in float64 but for operands, which are rounded as FP8 experts do.

    Gradients pass roundings unchanged, so that products of a ``dequantized`` backward have the
    rounded operands. With ``fp8_dgrad`` gradients of outputs are rounded as their tokens are, and
    those of pre-activations for gradients of tokens; ``transformer_engine`` rounds them so, and
    for gradients of weights both operands in blocks along the rows. With ``hands_over`` the product
    of gradients of outputs and fc2 is rounded to bfloat16, as the kernel hands it over: by that 2 %
    of the gradients of pre-activations are quantized to their other side, which is a tenth away.
    """
    rounds_wgrad = backward == "transformer_engine"

    def bfloat16(values: torch.Tensor) -> torch.Tensor:
        return values + (values.bfloat16() - values).detach()

    def fp8(values: torch.Tensor, height: int) -> torch.Tensor:
        return values + (rounded(values.bfloat16(), height) - values).detach()

    def product(values: torch.Tensor, in_fp8: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if backward == "dequantized":
            return in_fp8 @ weight.t()
        product: torch.Tensor = _Product.apply(
            in_fp8, weight, values.detach(), rounded, rounds_wgrad
        )
        return product

    out = torch.zeros_like(x)
    tokens_in_fp8 = fp8(x, 1)
    for expert in range(len(fc1)):
        tokens = routing_map[:, expert].nonzero().squeeze(1)
        projected = bfloat16(product(x[tokens], tokens_in_fp8[tokens], fp8(fc1[expert], BLOCK)))
        if gated:
            blocks = projected.unflatten(1, (-1, 2, glu_interleave or projected.shape[1] // 2))
            gate, up = blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)
            activated = FUNCTIONS[activation](gate) * up
        else:
            activated = FUNCTIONS[activation](projected)
        weighted = bfloat16(activated * probs[tokens, expert].unsqueeze(1))
        in_fp8 = fp8(weighted, 1)
        if hands_over:
            in_fp8 = _RoundedGradient.apply(in_fp8, as_bfloat16)
        rows = product(weighted, in_fp8, fp8(fc2[expert], BLOCK))
        out = out.index_add(0, tokens, rows)
    if backward != "fp8_dgrad":
        return out
    of_rounded: torch.Tensor = _RoundedGradient.apply(out, rounded)  # they have travelled so
    return of_rounded
