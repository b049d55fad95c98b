"""Blockwise FP8 on a GPU: the quantizer, Transformer Engine's own, and a scheduled layer."""

import pytest
import torch

from flashmoe_megatron.blockwise import ROW, SQUARE, dequantize, quantize
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.separate.backend import ScheduledBackend
from tests.gpu.test_scheduled import on
from tests.unit.separate import compare, oracle, run
from tests.unit.test_blockwise import all_sizes, every_bit_pattern
from tests.unit.test_fp8 import CONFIG, FURTHER, uneven_inputs

pytestmark = pytest.mark.gpu


def values() -> list[torch.Tensor]:
    """Every bfloat16 as the largest of a row's block, and all bit patterns together."""
    rows = all_sizes()[1]
    return [rows[: len(rows) // 128 * 128], every_bit_pattern()]


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares bytes of E4M3, where the sign of NaN is the converter's own."""
    got, want = got.view(torch.uint8).cpu(), want.view(torch.uint8).cpu()
    is_nan = want & 0x7F == 0x7F
    assert torch.equal(got & 0x7F == 0x7F, is_nan)
    assert torch.equal(got[~is_nan], want[~is_nan])


@pytest.mark.parametrize("height", [ROW, SQUARE])
def test_the_quantizer_has_the_bits_of_processors(height: int) -> None:
    for x in values():
        want, got = quantize(x, height), quantize(x.cuda(), height)
        assert_same_bytes(got.values, want.values)
        assert torch.equal(got.scales.cpu(), want.scales)


@pytest.mark.parametrize("height", [ROW, SQUARE])
def test_the_quantizer_has_the_bits_of_transformer_engine(height: int) -> None:
    """Values, scales, what they stand for, and of weights the transposes of a backward, too."""
    pytest.importorskip("transformer_engine.pytorch")
    import transformer_engine_torch as engine
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    is_square = height == SQUARE
    quantizer = Float8BlockQuantizer(
        fp8_dtype=engine.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=is_square,
        amax_epsilon=0.0,
        force_pow_2_scales=True,
        block_scaling_dim=2 if is_square else 1,
    )
    for x in values():
        want, got = quantizer(x.cuda()), quantize(x.cuda(), height)
        assert_same_bytes(got.values, want._rowwise_data)
        (rows, columns), scales = got.scales.shape, want._rowwise_scale_inv
        if not is_square:  # which lie column by column
            scales = scales.t()
        assert torch.equal(got.scales, scales[:rows, :columns])
        if is_square:
            assert_same_bytes(got.values.view(torch.uint8).t(), want._columnwise_data)
            assert torch.equal(got.scales.t(), want._columnwise_scale_inv[:columns, :rows])
        read = dequantize(got, torch.float32)
        torch.testing.assert_close(
            read, want.dequantize(dtype=torch.float32), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("degrees", [(1, 1), (4, 3)], ids=str)
@pytest.mark.parametrize("keep", ["all", "preactivations"])
def test_a_scheduled_layer_is_the_oracle(keep: str, degrees: tuple[int, int]) -> None:
    inputs = uneven_inputs(CONFIG, [300])
    (want,) = oracle(CONFIG, inputs)
    given = on("cuda", inputs, torch.bfloat16)
    given.probs = [probs.cuda() for probs in inputs.probs]
    backend = ScheduledBackend(
        CONFIG,
        device=torch.device("cuda"),
        options=BackendOptions(keep=keep),
        degrees=degrees,
    )
    found = run(backend, given)
    compare(found, want, torch.bfloat16, times=1.3 * FURTHER)
    for name, value in run(backend, given).items():
        assert torch.equal(value, found[name]), name
