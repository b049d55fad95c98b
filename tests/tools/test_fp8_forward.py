"""The times of a forward in FP8: the weights that it hands to the C interface."""

import pytest
import torch

from flashmoe_megatron.blockwise import SQUARE, quantize
from tools.bench import fp8_forward


def test_a_weight_is_its_values_and_then_scales_in_whole_groups() -> None:
    weight = torch.randn(256, 640, generator=torch.Generator().manual_seed(1)).bfloat16()
    blocks = quantize(weight, SQUARE)
    found = fp8_forward.quantized(weight)
    values, scales = found[: weight.numel()], found[weight.numel() :].view(torch.float32)
    assert torch.equal(values.view(weight.shape), blocks.values.view(torch.uint8))
    assert torch.equal(scales.view(2, 8)[:, :5], blocks.scales)
    assert not scales.view(2, 8)[:, 5:].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8_forward.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
