"""Blockwise FP8 as Transformer Engine's recipe ``Float8BlockScaling`` has it, in torch's operators.

A block of values shares one scale: 128 values of a token's row, or 128 x 128 of a weight. Values
are E4M3, whose largest is 448, and scales are powers of two. So a value that is read back has 4
significant bits of the original, and bfloat16 holds it exactly.

The rule is Transformer Engine's, in ``transformer_engine/common``: ``compute_scale_from_amax`` in
``recipe/recipe_common.cuh`` gives the scale, ``transpose/quantize_transpose_vector_blockwise.cu``
quantizes 1 x 128 and ``transpose/quantize_transpose_square_blockwise.cu`` 128 x 128, with the
recipe's own choices: ``power_2_scale=True`` and ``amax_epsilon=0``.
"""

from typing import NamedTuple

import torch

from flashmoe_megatron.config import FP8_GRANULE as BLOCK
from flashmoe_megatron.config import fp8_row_bytes
from flashmoe_megatron.errors import ShapeError

ROW, SQUARE = 1, BLOCK
"""Rows of a block of tokens, and of a block of a weight."""
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_EXPONENT = 0x7F800000
"""The bits of a float32 that hold its exponent."""


class Blocks(NamedTuple):
    """A quantized matrix, or several.

    Attributes:
        values: ``[..., rows, width]`` in float8_e4m3fn.
        scales: ``[..., rows / height, width / 128]`` in float32, what each block's values are
            multiplied with when they are read, as Transformer Engine's ``scale_inv``.
        height: Rows of a block.
    """

    values: torch.Tensor
    scales: torch.Tensor
    height: int


def quantize(x: torch.Tensor, height: int) -> Blocks:
    """Quantizes matrices in blocks of ``height`` x 128.

    A block is multiplied with ``448 / amax``, rounded down to a power of two, and rounded to the
    nearest E4M3, ties to even. ``amax`` leaves NaN out. An ``amax`` of 0 or infinity has the scale
    1, and one whose scale float32 cannot hold has 2 ** 127. What is larger than 448 becomes 448,
    infinity as well, and NaN stays NaN.

    Args:
        x: ``[..., rows, width]`` in bfloat16 or float32.
        height: :data:`ROW` or :data:`SQUARE`; divides ``rows`` as 128 divides ``width``.

    Raises:
        ShapeError: There is a block that would not be full.
    """
    if x.shape[-1] % BLOCK or x.shape[-2] % height:
        raise ShapeError(
            f"values of shape {tuple(x.shape)} in blocks of {height} x {BLOCK}: wanted whole blocks"
        )
    tiles = _tiles(x, height)
    amax = tiles.abs().nan_to_num(0.0, posinf=torch.inf).amax((-3, -1), keepdim=True)
    scale = _scale_of(amax.float())
    values = (tiles.float() * scale).clamp(-LARGEST, LARGEST).to(FP8)
    return Blocks(values.view(x.shape), scale.reciprocal().squeeze(-1).squeeze(-2), height)


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    """Returns the powers of two, in float32, that blocks of these float32 maxima are scaled by."""
    # torch multiplies a number with reciprocals, which may round to less than a power of two.
    scale = (amax.new_full((), LARGEST) / amax).clamp(max=torch.finfo(torch.float32).max)
    power = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return power.masked_fill_((amax == 0) | amax.isinf(), 1)


def dequantize(blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """Reads values back, ``[..., rows, width]`` in bfloat16 or a wider dtype.

    Nothing is rounded, but that a block around the largest number of bfloat16 may round up to
    2 ** 128, which is infinity.
    """
    tiles = _tiles(blocks.values, blocks.height).float()
    read = tiles * blocks.scales.unsqueeze(-2).unsqueeze(-1)
    return read.to(dtype).view(blocks.values.shape)


def rounded(x: torch.Tensor, height: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Quantizes and reads back, in the same dtype unless another one is given."""
    return dequantize(quantize(x, height), dtype or x.dtype)


def pack(rows: Blocks) -> torch.Tensor:
    """Lays each row's values and scales side by side, so that one message carries both.

    Returns:
        ``[rows, bytes]`` uint8: ``width`` values, then ``width / 128`` scales, then zeros up to a
        multiple of 16 bytes.
    """
    parts = [rows.values.view(torch.uint8), rows.scales.view(torch.uint8)]
    num_rows, width = rows.values.shape
    pad = fp8_row_bytes(width) - sum(part.shape[1] for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(num_rows, pad)], dim=1)


def unpack(packed: torch.Tensor, width: int) -> Blocks:
    """Finds values and scales of :func:`pack` again, without a copy."""
    scales = packed.narrow(1, width, width // BLOCK * torch.float32.itemsize)
    return Blocks(packed.narrow(1, 0, width).view(FP8), scales.view(torch.float32), height=ROW)


def _tiles(x: torch.Tensor, height: int) -> torch.Tensor:
    """Returns ``[..., rows / height, height, width / 128, 128]`` of the same values."""
    *others, rows, width = x.shape
    return x.view(*others, rows // height, height, width // BLOCK, BLOCK)
