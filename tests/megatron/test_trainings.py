"""Trainings of published models: what is seen of them, and what is said of those that fail."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankPool
from tests.megatron import shared_overlap, trainings, watched
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer

CUDA, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


def event(begin: int, duration: int, device: Any = CUDA, *, is_note: bool = False) -> Any:
    """An activity as torch's profiler has it, times in nanoseconds."""
    return SimpleNamespace(
        name=lambda: f"at {begin}",
        device_type=lambda: device,
        start_ns=lambda: begin,
        duration_ns=lambda: duration,
        is_user_annotation=lambda: is_note,
    )


def test_a_training_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches an iteration, and one before the first; the last iterations are recorded."""
    clock, calls = [0.0], []
    events = [event(0, 6_000_000), event(3_000_000, 6_000_000), event(12_000_000, 9)]
    events.append(event(0, 99, CPU))
    events.append(event(0, 10**9, is_note=True))
    profiler = SimpleNamespace(
        start=lambda: calls.append("start"),
        stop=lambda: calls.append("stop"),
        profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)),
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(watched.time, "perf_counter", lambda: clock[0])

    def batch(iterator: Any) -> str:
        clock[0] += 0.002
        return "batch"

    watch = watched.Watch(tmp_path / "seen.json", 5)
    next_batch = watch.next_batch(batch)
    step = watch.train_step(lambda: calls.append([next_batch(None), next_batch(None)]))
    next_batch(None)
    for _ in range(5):
        step()
    assert calls == [["batch"] * 2] * 2 + ["start"] + [["batch"] * 2] * 3 + ["stop"]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == {
        "batch_ms": [4.0] * 5,
        "busy_ms": 3.0,
        "idle_before_ms": {"at 12000000": 1.0},
        "kernels": 1,
        "most_gib": 3.0,
    }


def test_a_row_tells_by_how_much_the_host_is_late() -> None:
    result = {
        "run": "qwen3-flashmoe",
        "status": 0,
        "losses": [10.0 - 0.1 * i for i in range(20)],
        "iteration_ms": [*[900.0] * 7, *[100.0] * 10, *[300.0] * 3],
        "batch_ms": [*[50.0] * 7, *[5.0] * 13],
        "busy_ms": 80.0,
        "most_gib": 40.0,
    }
    row = "| qwen3-flashmoe | 100.0 | 5.0 | 80.0 | 15.0 | 40.0 | 10.00000, 9.10000, 8.10000 |"
    assert trainings.row(result) == row
    failed = {"run": "gpt-oss-flashmoe", "status": 1, "losses": []}
    assert trainings.row(failed).startswith("| gpt-oss-flashmoe | status 1 after 0 iterations |")


def test_every_run_is_beside_alltoall_where_that_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert trainings.main(["--megatron", "there", "--list"]) == 0
    commands = capsys.readouterr().out.splitlines()
    ours = [command for command in commands if command.endswith("type flashmoe")]
    beside = [line.replace("alltoall", "flashmoe") for line in commands if line not in ours]
    alone = [line for line in ours if line not in beside]
    assert "--cuda-graph-impl full_iteration" in alone[0]
    assert "--flashmoe-row-bound" in alone[0]
    assert "--moe-single-grouped-weight" in alone[1]
    assert len(ours) == len(beside) + len(alone) == 7


def test_what_cannot_be_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainings.main(["--megatron", str(tmp_path)]) == 2
    assert "pretrain_gpt.py is no file, wanted Megatron-LM's" in capsys.readouterr().err
    (tmp_path / "pretrain_gpt.py").touch()
    assert trainings.main(["--megatron", str(tmp_path), "--only", "llama"]) == 2
    assert "no run's name has one of ['llama']" in capsys.readouterr().err


def test_a_run_that_fails_shows_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("raise SystemExit('SomeError: the reason')")
    program = [trainings.sys.executable, str(script)]
    monkeypatch.setattr(trainings.Training, "command", lambda *_: program)
    options = ["--megatron", str(tmp_path), "--out", str(tmp_path / "out"), "--only", "gpt-oss-fl"]
    assert trainings.main(options) == 1
    out = capsys.readouterr().out
    assert "| gpt-oss-flashmoe | status 1 after 0 iterations |" in out
    assert "SomeError: the reason" in out
    assert json.loads((tmp_path / "out" / "recipes.jsonl").read_text())["status"] == 1


SMALL = shared_overlap.Sizes(16, 64, 64, 8, 2, 128)


def overlap_times(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """How many times a layer with the flag and one without give, and how often they are called."""
    prepare(Layout())
    layers = {}
    for overlaps in (False, True):
        fields = shared_overlap.settings(SMALL, "flashmoe", overlaps=overlaps)
        dispatcher = fields.pop("moe_token_dispatcher_type")
        config = transformer_config(Layout(), dispatcher, **fields)
        layers["with" if overlaps else "without"] = make_layer(config)
    times = shared_overlap.turns_of(layers, (SMALL.num_tokens, 1, SMALL.hidden), 2, calls=2)
    calls = [layer.flashmoe_routed_experts.num_calls for layer in layers.values()]
    assert all(
        layer.experts.local_experts[0].linear_fc1.weight.grad is not None
        for layer in layers.values()
    )
    return [len(each) for each in times.values()], calls


def test_a_shared_expert_is_timed_with_the_overlap_and_without(two_ranks: RankPool) -> None:
    """Two turns follow two that warm up, and a call comes before each turn's two."""
    assert two_ranks.run(overlap_times) == [([2, 2], [12, 12])] * 2


def test_a_row_tells_what_the_overlap_gains(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"without": [4.0, 2.0, 9.0], "with": [3.0, 5.0, 3.0]}
    assert shared_overlap.row("a layer", "flashmoe", times) == (
        "| a layer | flashmoe | 4.000 | 3.000 | -25.0 % |"
    )
    if not torch.cuda.is_available():
        assert shared_overlap.main([]) == 2
        assert "no CUDA GPU" in capsys.readouterr().err
