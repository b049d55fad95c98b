"""The times of layers in FP8."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashmoe_megatron.blockwise import SQUARE, Blocks, dequantize
from flashmoe_megatron.separate import precision
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import WeightGrad
from tools.bench import common, fp8_both, fp8_forward

on_a_processor = pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
SMALL = ["--shapes", "32x256x256x4x2", "--gated", "--one-of", "1", "--turns", "1", "--times", "1"]


@on_a_processor
@pytest.mark.parametrize("tool", [fp8_forward, fp8_both], ids=lambda tool: tool.__name__)
def test_without_a_gpu_nothing_is_measured(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def time_here(monkeypatch: pytest.MonkeyPatch, out: Path) -> list[dict[str, Any]]:
    """Times both directions on the processor, and returns what has been recorded."""
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    assert fp8_both.main([*SMALL, "--out", str(out)]) == 0
    return common.read_record(out)


@on_a_processor
def test_both_directions_are_timed_once_they_are_close_to_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["bf16", "fp8", "fp8 step", "fp8_dgrad", "fp8_dgrad step"]
    (line,) = time_here(monkeypatch, tmp_path / "times.jsonl")
    assert line["measurement"] == "fp8_both"
    assert [*line["milliseconds"]] == kinds
    *compared, medians = capsys.readouterr().out.splitlines()
    assert [one.split(": ")[0].split(", ")[1] for one in compared] == kinds
    assert all("grad_fc1" in one and "grad_probs" in one for one in compared)
    assert "fp8_dgrad step" in medians


def of_the_next_block(blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """Reads weights with other scales, and tokens with their own."""
    scales = blocks.scales.roll(1, -1) if blocks.height == SQUARE else blocks.scales
    return dequantize(blocks._replace(scales=scales), dtype)


def left_out(self: WeightGrad, value: torch.Tensor) -> None:
    """Stores nothing of a gradient."""


def of_zeros(self: ReferenceBackend, *given: Any, **how: Any) -> Any:
    """Forgets the output of one token."""
    out, saved = FORWARD(self, *given, **how)
    out[5] = 0
    return out, saved


FORWARD = ReferenceBackend.forward


@on_a_processor
@pytest.mark.parametrize(
    ("owner", "name", "wrong", "who"),
    [
        (precision, "dequantize", of_the_next_block, "fp8"),
        (WeightGrad, "store", left_out, "bf16"),
        (ReferenceBackend, "forward", of_zeros, "bf16"),
    ],
    ids=["scale", "gradient", "token"],
)
def test_wrong_results_are_not_timed(
    owner: Any,
    name: str,
    wrong: Callable[..., Any],
    who: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    monkeypatch.setattr(fp8_both.Layer, "turn_ms", lambda *_, **__: 1.0)
    out = tmp_path / "times.jsonl"
    with pytest.raises(SystemExit, match=rf", {who}: relative L2 error \S+, wanted at most"):
        time_here(monkeypatch, out)
    assert not out.exists()
