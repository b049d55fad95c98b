"""The times of layers in FP8."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.blockwise import SQUARE, Blocks, dequantize
from flashmoe_megatron.separate import precision
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import WeightGrad
from tools.bench import common, fp8_both, fp8_forward, fp8_times

on_a_processor = pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
SMALL = ["--shapes", "32x256x256x4x2", "--gated", "--one-of", "1", "--turns", "2"]
BRIEF = ["--times", "1", "--settle-ms", "0.5"]


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
    assert fp8_both.main([*SMALL, *BRIEF, "--out", str(out)]) == 0
    return common.read_record(out)


@on_a_processor
def test_both_directions_are_timed_once_they_are_close_to_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["bf16", "fp8", "fp8 step", "fp8_dgrad", "fp8_dgrad step"]
    (line,) = time_here(monkeypatch, tmp_path / "times.jsonl")
    assert line["measurement"] == "fp8_both"
    assert [*line["milliseconds"]] == kinds
    assert (line["one_of"], line["settle_ms"]) == (1, 0.5)
    *compared, medians = capsys.readouterr().out.splitlines()
    assert [one.split(": ")[0].split(", ")[1] for one in compared] == kinds
    assert all("grad_fc1" in one and "grad_probs" in one for one in compared)
    assert "fp8_dgrad step" in medians


@on_a_processor
def test_turns_of_both_directions_settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of all kinds: otherwise one has the clock that the one before it has left."""
    asked: list[float] = []
    monkeypatch.setattr(fp8_both, "turn_ms", lambda call, times, ms: asked.append(ms) or 1.0)
    time_here(monkeypatch, tmp_path / "times.jsonl")
    assert asked == [0.5] * (5 * 2), "five kinds, two turns"


class Launches:
    """A rank that notes whether each of its forwards finds copies of its weights."""

    stream = None

    def __init__(self, fault: str = "") -> None:
        self.found: list[bool] = []
        self._fault = fault

    def forward(self, *given: torch.Tensor, copies_are_current: bool = False) -> None:
        self.found.append(copies_are_current)
        time.sleep(1e-3)

    def fault(self) -> str:
        return self._fault


@on_a_processor
def test_a_turn_of_forwards_settles_with_the_weights_that_it_is_timed_with() -> None:
    problem = make_problem(Shape(32, 256, 256, 4, 2, gated=True))
    rank: Any = Launches()
    begin = time.monotonic()
    fp8_forward.turn_ms(rank, problem, 2, 20.0, copies_are_current=True)
    assert time.monotonic() - begin >= 0.02
    assert rank.found[:1] == [False], "which makes the copies"
    assert len(rank.found) > 4
    assert all(rank.found[1:])
    rank = Launches()
    fp8_forward.turn_ms(rank, problem, 2)
    assert rank.found == [False] * 4
    with pytest.raises(RuntimeError, match="a launch gave up: rows"):
        fp8_forward.turn_ms(Launches("rows"), problem, 2)  # type: ignore[arg-type]


@on_a_processor
@pytest.mark.parametrize(("tool", "times"), [(fp8_forward, 10), (fp8_both, 6)])
def test_turns_settle_as_long_as_the_clock_takes(
    tool: ModuleType, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, float]] = []

    def takers_of(name: str, problem: Problem, *of_turn: Any) -> fp8_times.Takers:
        found.append(of_turn)  # type: ignore[arg-type]
        return {"bf16": lambda: 1.0}

    monkeypatch.setattr(common, "has_gpu", lambda: True)
    monkeypatch.setattr(tool, "takers_of", takers_of)
    assert tool.main(SMALL) == 0
    assert tool.main([*SMALL, *BRIEF]) == 0
    assert found == [(times, stopwatch.SETTLE_MS), (1, 0.5)]


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
