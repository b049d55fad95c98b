"""The times of a forward in FP8."""

import pytest
import torch

from tools.bench import fp8_forward


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8_forward.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
