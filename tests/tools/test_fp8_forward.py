"""The times of layers in FP8."""

from types import ModuleType

import pytest
import torch

from tools.bench import fp8_both, fp8_forward


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
@pytest.mark.parametrize("tool", [fp8_forward, fp8_both], ids=lambda tool: tool.__name__)
def test_without_a_gpu_nothing_is_measured(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
