"""The quantizer of blockwise FP8 against integer arithmetic on bits."""

import numpy as np
import pytest
import torch

from flashmoe_megatron.blockwise import (
    ROW,
    SQUARE,
    Blocks,
    dequantize,
    pack,
    quantize,
    rounded,
    unpack,
)
from flashmoe_megatron.config import fp8_row_bytes
from flashmoe_megatron.errors import ShapeError
from tests.unit import fp8
from tests.unit.cases import generator

INFINITY = 0x7F80
ROUNDS_UP = 0x7F78
"""From here on a number lies nearer to 2 ** 128, which bfloat16 has not, than to 240 * 2 ** 120."""


def of_bits(bits: torch.Tensor) -> torch.Tensor:
    """The bfloat16 values of 16 bits each."""
    return torch.where(bits >= 2**15, bits - 2**16, bits).to(torch.int16).view(torch.bfloat16)


def check(x: torch.Tensor, height: int) -> Blocks:
    """Compares values and scales bit by bit."""
    found, (values, exponent) = quantize(x, height), fp8.quantize(x, height)
    assert found.values.dtype == torch.float8_e4m3fn
    assert found.scales.dtype == torch.float32
    got = found.values.view(torch.uint8).numpy().astype(np.int64)
    wrong = (got != values).nonzero()
    assert not len(wrong[0]), (fp8.bits_of(x)[wrong][:8], got[wrong][:8], values[wrong][:8])
    assert torch.equal(found.scales, torch.from_numpy(np.ldexp(1.0, -exponent)).float())
    return found


def all_sizes() -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of all numbers and of infinity, and rows in which each is the largest value."""
    g = generator(1)
    largest = torch.arange(INFINITY + 1)
    near = (largest[:, None] - torch.randint(0, 2**11, (len(largest), 96), generator=g)).clamp(0)
    any_size = (torch.rand(len(largest), 31, generator=g) * (largest[:, None] + 1)).long()
    bits = torch.cat((largest[:, None], near, any_size), dim=1)
    order = torch.rand(bits.shape, generator=g).argsort(1)
    signs = torch.randint(0, 2, bits.shape, generator=g) << 15
    return largest, of_bits(bits.gather(1, order) + signs)


def every_bit_pattern() -> torch.Tensor:
    """All values in one matrix, in any order."""
    return of_bits(torch.randperm(2**16, generator=generator(2)).view(512, 128))


def test_every_bfloat16_as_the_largest_of_a_block() -> None:
    """Zero, subnormals, all finite numbers and infinity, each over smaller values of all sizes."""
    largest, x = all_sizes()
    read = dequantize(check(x, ROW), torch.bfloat16)
    assert read[largest < ROUNDS_UP].isfinite().all()


@pytest.mark.parametrize("height", [ROW, SQUARE])
def test_all_bit_patterns_in_one_matrix(height: int) -> None:
    """NaN, which no maximum counts, and infinity as well, side by side with all other values."""
    check(of_bits(torch.arange(2**16).view(256, 256)), height)
    check(every_bit_pattern(), height)


@pytest.mark.parametrize(
    ("values", "scale", "found"),
    [
        ([0.0, -0.0], 1.0, [0.0, -0.0]),
        ([448.0, -1.0], 1.0, [448.0, -1.0]),
        ([450.0, 448.0], 2.0, [448.0, 448.0]),  # 225 lies between 224 and 240
        ([3.5, 0.1], 2.0**-7, [3.5, 0.1015625]),
        ([torch.inf, 1000.0, 0.3], 1.0, [448.0, 448.0, 0.3125]),
        ([-torch.inf, -7.25], 1.0, [-448.0, -7.0]),  # to even
        ([torch.nan, 7.0], 2.0**-6, [torch.nan, 7.0]),
        ([torch.nan, 0.0], 1.0, [torch.nan, 0.0]),
        ([2.0**-133], 2.0**-127, [2.0**-133]),
        ([2.0**-125, 2.0**-133], 2.0**-127, [2.0**-125, 2.0**-133]),
        ([1.9921875 * 2.0**127], 2.0**120, [torch.inf]),
    ],
)
def test_blocks_by_hand(values: list[float], scale: float, found: list[float]) -> None:
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, : len(values)] = torch.tensor(values)
    blocks = check(x, ROW)
    assert blocks.scales.tolist() == [[scale]]
    want = torch.zeros(1, 128, dtype=torch.bfloat16)
    want[0, : len(found)] = torch.tensor(found)
    torch.testing.assert_close(
        dequantize(blocks, torch.bfloat16), want, rtol=0, atol=0, equal_nan=True
    )


def uneven(*shape: int) -> torch.Tensor:
    """Values of many sizes, so that neighbouring blocks have other scales."""
    g = generator(3)
    sizes = torch.randn(shape, generator=g).mul(4).exp()
    sizes *= (
        torch.linspace(-9, 9, shape[-1]).exp() * torch.linspace(-5, 5, shape[-2]).exp()[:, None]
    )
    return (torch.randn(shape, generator=g) * sizes).bfloat16()


@pytest.mark.parametrize("height", [ROW, SQUARE])
def test_each_block_has_its_own_scale(height: int) -> None:
    x = uneven(3, 256, 384)
    found = check(x, height)
    assert found.scales.shape == (3, 256 // height, 3)
    assert len(found.scales.unique()) > 6
    values, exponent = fp8.quantize(x, height)
    assert torch.equal(
        dequantize(found, torch.bfloat16).double(), fp8.read(values, exponent, height)
    )


def test_strided_matrices_are_read_where_they_are() -> None:
    wide = uneven(2, 128, 512)
    part = wide[:, :, 128:384]
    assert not part.is_contiguous()
    found, want = quantize(part, SQUARE), quantize(part.contiguous(), SQUARE)
    assert torch.equal(found.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(found.scales, want.scales)


def test_what_is_read_back_is_quantized_without_a_change() -> None:
    once = rounded(uneven(64, 512), ROW)
    assert torch.equal(rounded(once, ROW), once)
    assert torch.equal(rounded(once.float(), ROW, torch.bfloat16), once)


@pytest.mark.parametrize("width", [128, 512, 640])
@pytest.mark.parametrize("num_rows", [0, 5])
def test_packed_rows_carry_values_and_scales(num_rows: int, width: int) -> None:
    blocks = quantize(uneven(num_rows, width), ROW)
    packed = pack(blocks)
    assert packed.dtype == torch.uint8
    assert packed.shape == (num_rows, fp8_row_bytes(width))
    assert packed.shape[1] % 16 == 0
    found = unpack(packed[:3], width)
    assert torch.equal(found.values.view(torch.uint8), blocks.values[:3].view(torch.uint8))
    assert torch.equal(found.scales, blocks.scales[:3])
    assert found.height == ROW
    assert found.values.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_a_row_takes_half_of_its_bfloat16() -> None:
    assert fp8_row_bytes(4096) == 4096 + 128
    assert fp8_row_bytes(7168) / (2 * 7168) < 0.52


@pytest.mark.parametrize(("shape", "height"), [((3, 192), ROW), ((130, 256), SQUARE)])
def test_blocks_that_are_not_full_are_refused(shape: tuple[int, int], height: int) -> None:
    with pytest.raises(
        ShapeError, match=rf"\({shape[0]}, {shape[1]}\) in blocks of {height} x 128"
    ):
        quantize(torch.zeros(shape), height)
