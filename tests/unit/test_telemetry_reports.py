"""Records of the reference backend, their reduction over ranks, and the loggers' files."""

import json
import logging
import signal
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.autograd import in_backward, moe_apply
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.measured.calibration import Calibration, Entry
from flashmoe_megatron.separate.records import MOST_RECORDS
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.telemetry import reporter as reporters
from flashmoe_megatron.telemetry.record import LaunchRecord, Phase
from flashmoe_megatron.telemetry.registry import METRICS
from flashmoe_megatron.telemetry.reporter import (
    Reduction,
    Reporter,
    agree_calibration,
    agree_layout,
)
from flashmoe_megatron.telemetry.sinks import Guarded, JsonLines, TensorBoardSink, WandbSink
from flashmoe_megatron.telemetry.totals import LayerPlace, Totals
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool
from tests.programs import run_python
from tests.tools.offline_wandb import offline_runs
from tests.unit import cases, records
from tests.unit.records import counted

CPU = torch.device("cpu")
TOKENS = [24, 40]


def run_layer(
    group: dist.ProcessGroup | None, backend: ReferenceBackend, layer: int, **changes: Any
) -> None:
    """Forward and backward of this rank's share."""
    rank = 0 if group is None else dist.get_rank(group)
    config = backend.config
    tokens = TOKENS[: config.num_ranks]
    inputs = cases.make_inputs(config, cases.uniform, tokens, dtype=torch.float32, **changes)
    first = rank * config.num_local_experts
    experts = slice(first, first + config.num_local_experts)
    weights = ExpertWeights(tuple(inputs.fc1[experts]), tuple(inputs.fc2[experts]))
    x = inputs.x[rank].requires_grad_()
    out = moe_apply(backend, x, inputs.probs[rank], inputs.routing_map[rank], weights, layer=layer)
    out.backward(inputs.grad_out[rank])


def records_of_rank(group: dist.ProcessGroup) -> tuple[list[LaunchRecord], list[int]]:
    config = cases.make_config(num_ranks=2)
    backend = ReferenceBackend(config, group)
    run_layer(group, backend, 5)
    taken = backend.take_records()
    assert backend.take_records() == []
    routing = cases.make_inputs(config, cases.uniform, TOKENS, dtype=torch.float32).routing_map
    return taken, torch.cat(routing).sum(0).tolist()


def test_reference_tells_of_its_launches(ranks: RankPool) -> None:
    outcomes = ranks.run(records_of_rank, num_ranks=2)
    for rank, (taken, selected) in enumerate(outcomes):
        assert [(one.layer, one.direction, one.epoch) for one in taken] == [
            (5, "forward", 1),
            (5, "backward", 2),
        ]
        for one in taken:
            assert one.num_tokens == TOKENS[rank]
            assert list(one.expert_rows) == selected[4 * rank : 4 * rank + 4]
            assert sum(one.rows_pulled) == one.num_rows == sum(one.expert_rows)
            assert one.num_row_blocks == sum(rows > 0 for rows in one.expert_rows)
            phases = one.phase_ns
            assert phases[Phase.GEMM] > 0
            ours = (Phase.HEAD, Phase.STAGE_WAIT, Phase.GEMM, Phase.TAIL)
            assert sum(phases[phase] for phase in ours) == one.duration_ns
    # What one rank pulls from the other is what the other had for it.
    (first, _), (second, _) = outcomes
    assert first[0].rows_pulled[1] + second[0].rows_pulled[1] == 2 * TOKENS[1]


def test_reference_forgets_the_oldest() -> None:
    backend = ReferenceBackend(cases.CONFIG)
    backend._records._unread = deque(maxlen=3)
    for layer in range(4):
        run_layer(None, backend, layer)
    assert [(one.layer, one.direction) for one in backend.take_records()] == [
        (2, "backward"),
        (3, "forward"),
        (3, "backward"),
    ]
    assert ReferenceBackend(cases.CONFIG)._records._unread.maxlen == MOST_RECORDS


def test_nothing_is_hidden_in_the_reference() -> None:
    backend = ReferenceBackend(cases.CONFIG)
    written = Memory()
    reporter = make_reporter(None, {0: place(backend, 0)}, backend, [written])
    run_layer(None, backend, 0)
    reporter.step(1, is_last=True)
    ((_, values),) = written.reports
    for direction in ("forward", "backward"):
        assert values[f"flashmoe/{direction}/hidden_communication"] == 0
        assert values[f"flashmoe/{direction}/layer_ms"] > 0
    assert values["flashmoe/deduplication"] == 1


class Memory:
    """A sink that tests look into."""

    def __init__(self) -> None:
        self.reports: list[tuple[tuple[int, int], dict[str, float]]] = []

    def write(self, values: dict[str, float], *, step: int, now: int) -> None:
        self.reports.append(((step, now), dict(values)))


def place(backend: ReferenceBackend, rank: int) -> LayerPlace:
    return LayerPlace(backend.config, rank, element_bytes=4)


def make_reporter(
    group: dist.ProcessGroup | None,
    places: dict[int, LayerPlace],
    backend: ReferenceBackend,
    sinks: list[Any],
    **changes: Any,
) -> Reporter:
    options = {"chosen": frozenset(METRICS), "take_records": backend.take_records, **changes}
    return Reporter(places, group, CPU, sinks=sinks, **options)


def make_layer(**changes: Any) -> FlashMoELayer:
    torch.manual_seed(3)
    options = {"router": True, "dtype": torch.float32, "backend": "reference", **changes}
    return FlashMoELayer(cases.CONFIG, device=CPU, **options)


def reports_of_layer(*, evaluations: int, **changes: Any) -> list[dict[str, float]]:
    """The reports of steps of 64 tokens, with evaluations of 8 tokens before each."""
    layer = make_layer(**changes)
    written = Memory()
    reporter = make_reporter(None, {0: place(layer.backend, 0)}, layer.backend, [written])
    x = torch.randn(64, layer.config.hidden)
    for step in (1, 2):
        layer.eval()
        for _ in range(evaluations):
            with torch.no_grad():
                layer(x[:8])
        layer.train()
        layer(x).sum().backward()
        reporter.step(step, is_last=step == 2)
    return [values for _, values in written.reports]


@pytest.mark.parametrize("fuse_router", [False, True])
def test_evaluation_is_in_no_metric(fuse_router: bool) -> None:
    alone = reports_of_layer(evaluations=0, fuse_router=fuse_router)
    mixed = reports_of_layer(evaluations=5, fuse_router=fuse_router)
    assert alone[0]["flashmoe/expert_rows/mean"] == 64 * 2 / 8
    assert [counted(values) for values in mixed] == [counted(values) for values in alone]


@pytest.mark.parametrize("keep", ["all", "inputs"])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_of_the_layer_tells_evaluation(
    is_training: bool, use_reentrant: bool | None, keep: str
) -> None:
    """Whatever is saved for a backward or computed again in it."""
    layer = make_layer().train(is_training)
    layer.backend.keep = keep
    x = torch.randn(8, layer.config.hidden, requires_grad=True)
    is_plain = use_reentrant is None
    out = layer(x) if is_plain else checkpoint(layer, x, use_reentrant=use_reentrant)
    out.sum().backward()
    taken = layer.backend.take_records()
    assert taken[-1].direction == "backward"
    assert {(one.layer, one.is_evaluation) for one in taken} == {(0, not is_training)}


def test_what_was_before_the_first_step_is_in_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report's time is from the one before to it, and its launches are of that time."""
    now = [100.0]
    monkeypatch.setattr(reporters.time, "monotonic", lambda: now[0])
    backend = ReferenceBackend(cases.CONFIG)
    for _ in range(3):
        run_layer(None, backend, 0)
    taken: list[Totals] = []
    reporter = make_reporter(
        None, {0: place(backend, 0)}, backend, [], annotate=taken.append, interval=2
    )
    for step, at in ((1, 101.0), (2, 104.0), (3, 105.0), (4, 111.0)):
        run_layer(None, backend, 0)
        now[0] = at
        reporter.step(step)
    assert [one.launches[0, "forward"].launches for one in taken] == [2, 2]
    assert [one.seconds for one in taken] == [4.0, 7.0]


def test_training_in_evaluation_mode_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = make_layer().eval()
    written = Memory()
    reporter = make_reporter(None, {0: place(layer.backend, 0)}, layer.backend, [written])
    for step in (1, 2):
        layer(torch.randn(8, layer.config.hidden)).sum().backward()
        reporter.step(step, is_last=True)
    assert [values for _, values in written.reports] == [{}, {}]
    assert [record.message for record in caplog.records] == [
        "launches of layers in evaluation mode are in no metric, although some have a backward: "
        "call train() on what is trained"
    ]


def reports_of_rank(group: dist.ProcessGroup) -> list[Any]:
    """Layer 1 runs on both ranks; layer 2 is known to rank 1 alone, as in a pipeline."""
    rank = dist.get_rank(group)
    backend = ReferenceBackend(cases.make_config(num_ranks=2), group)
    alone = ReferenceBackend(cases.make_config(num_ranks=1))
    places = {1: place(backend, rank)}
    if rank == 1:
        places[2] = LayerPlace(alone.config, 0, element_bytes=4)
    written = Memory()
    reporter = Reporter(
        places,
        group,
        CPU,
        chosen=frozenset(METRICS),
        take_records=lambda: [*backend.take_records(), *alone.take_records()],
        sinks=[written] if rank == 1 else [],
        interval=2,
    )
    for step in range(1, 7):
        run_layer(group, backend, 1, seed=step)
        if rank == 1:
            run_layer(None, alone, 2)
        reporter.step(step, is_last=step == 6)
    return written.reports


def test_ranks_are_added_up_and_one_writes(ranks: RankPool) -> None:
    nothing, reports = ranks.run(reports_of_rank, num_ranks=2)
    assert nothing == []
    # The report of step 2 is written at step 3, the last one at once.
    assert [steps for steps, _ in reports] == [(2, 3), (4, 5), (6, 6)]
    for _, values in reports:
        # Every token of both ranks selects 2 of 8 experts: 128 rows over 8 experts.
        of_layer = [values[f"flashmoe/layer_1/expert_rows/{expert}"] for expert in range(8)]
        assert sum(of_layer) == pytest.approx(2 * sum(TOKENS))
        # Half of the launches on rank 0, half on rank 1; layer 2's own rows cross no link.
        sent = values["flashmoe/mib/rank_0_to_1"] + values["flashmoe/mib/rank_1_to_0"]
        assert 0 < sent < 2 * 2 * sum(TOKENS) * 64 * 4 / 2**20
        assert "flashmoe/forward/layer_2/layer_ms" in values


def fails_on_every_rank(group: dist.ProcessGroup) -> str:
    config = cases.make_config(num_ranks=2, hidden=64 * (1 + dist.get_rank(group)))
    with pytest.raises(ConfigError, match="layer 1 is .*hidden=128.* on rank 1 and .*hidden=64"):
        agree_layout({1: LayerPlace(config, 0)}, group)
    return "refused"


def test_layers_that_differ_are_refused_everywhere(ranks: RankPool) -> None:
    assert ranks.run(fails_on_every_rank, num_ranks=2) == ["refused"] * 2


def reduce_without_records(group: dist.ProcessGroup) -> list[float]:
    """Rank 0 has neither layers nor records, rank 1 has both: the collectives are the same."""
    rank = dist.get_rank(group)
    places = {3: records.place(0)} if rank == 1 else {}
    layout = agree_layout(places, group)
    totals = Totals(layout, places)
    totals.heap_bytes = 10.0 * (2 - rank)
    if rank == 1:
        totals.add(records.RECORD)
    reduced = Reduction(totals, group, CPU).result()
    one = reduced.launches[3, "forward"]
    dist.barrier(group)  # would fail or hang if the ranks had gone apart
    return [one.launches, one.num_rows, reduced.heap_bytes, *reduced.expert_rows[3][:2]]


def test_a_rank_without_records_does_not_diverge(ranks: RankPool) -> None:
    for found in ranks.run(reduce_without_records, num_ranks=2):
        assert found == [1, 500, 20.0, 100, 150]


def calibrations_of_pairs(group: dist.ProcessGroup) -> list[float | None]:
    """The time that each of two groups agrees on, where some of its ranks have measured it."""
    rank, found = dist.get_rank(group), list[float | None]()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    for owners in ((1, 3), (0, 2, 3), (3,)):
        own = None
        if rank in owners:
            run = {"num_tokens": 256, "gpu": "cpu", "dtype": "float32", "direction": "forward"}
            entry = Entry.of(records.CONFIG, time_ms=10.0 + rank, **run)  # type: ignore[arg-type]
            own = Calibration([entry], gpu="cpu", dtype="float32")
        told = agree_calibration(own, pairs[rank // 2])
        found.append(told and told.time_ms(records.CONFIG, "forward", num_tokens=256))
    dist.destroy_process_group(pairs[rank // 2])
    return found


def test_a_group_of_some_ranks_agrees_on_its_own_calibration(ranks: RankPool) -> None:
    first, last = [11.0, 10.0, None], [13.0, 12.0, 13.0]
    assert ranks.run(calibrations_of_pairs) == [first, first, last, last]


def test_records_of_unknown_layers_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = ReferenceBackend(cases.CONFIG)
    written = Memory()
    reporter = make_reporter(None, {0: place(backend, 0)}, backend, [written])
    for step in (1, 2):
        run_layer(None, backend, 9)
        reporter.step(step, is_last=True)
    assert [record.message for record in caplog.records] == [
        "some launches are in no metric: a record of layer 9: this rank has layers 0"
    ]
    assert [values for _, values in written.reports] == [{}, {}]


def test_efficiency_that_cannot_be_told_is_absent(caplog: pytest.LogCaptureFixture) -> None:
    """The file is of this layer, but the layer is called with other numbers of tokens."""
    backend = ReferenceBackend(cases.CONFIG)
    made = Entry.of(
        cases.make_config(num_ranks=2),
        num_tokens=TOKENS[0] + 1,
        gpu="cpu",
        dtype="float32",
        direction="forward",
        time_ms=1.0,
    )
    written = Memory()
    calibration = Calibration([made], gpu="cpu", dtype="float32")
    places = {0: place(backend, 0)}
    reporter = make_reporter(None, places, backend, [written], calibration=calibration)
    for step in (1, 2):
        run_layer(None, backend, 0)
        reporter.step(step, is_last=True)
    assert not any("overlap_efficiency" in key for _, values in written.reports for key in values)
    assert len(caplog.records) == 1
    assert "no overlap efficiency" in caplog.text


VALUES = {"flashmoe/forward/layer_ms": 1.5, "flashmoe/heap_mib": 3.0}


def test_json_lines_keep_what_was_written_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "run" / "flashmoe_metrics.jsonl"
    JsonLines(path).write(VALUES, step=1, now=2)
    JsonLines(path).write({**VALUES, "flashmoe/heap_mib": 4.0}, step=3, now=4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3]
    assert [line["flashmoe/heap_mib"] for line in lines] == [3.0, 4.0]
    assert all(line["time"] > 1e9 for line in lines)


def test_json_lines_go_on_after_a_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "flashmoe_metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "flashm')
    JsonLines(path).write(VALUES, step=3, now=4)
    first, _, last = path.read_text().splitlines()
    assert json.loads(first) == {"step": 1}
    assert json.loads(last)["step"] == 3


DYING = """
import os, signal, sys
import torch
from pathlib import Path
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.telemetry.sinks import JsonLines
from tests.unit import cases
from tests.unit.test_telemetry_reports import make_reporter, place, run_layer

backend = ReferenceBackend(cases.CONFIG)
sinks = [JsonLines(Path(sys.argv[1]))]
reporter = make_reporter(None, {0: place(backend, 0)}, backend, sinks)
for step in range(1, 6):
    run_layer(None, backend, 0)
    reporter.step(step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_dies_keeps_its_points(tmp_path: Path) -> None:
    path = tmp_path / "flashmoe_metrics.jsonl"
    run_python("-c", DYING, path, status=-signal.SIGKILL)
    # The report of the last step was to be written by the next one.
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_wandb_offline_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {
        "MODE": "offline",
        "CONSOLE": "off",
        "SILENT": "true",
        "X_DISABLE_STATS": "true",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # another test may have set it up for another server
    wandb.init(project="overlap", dir=str(tmp_path))
    sink = WandbSink(wandb)
    wandb.log({"lm loss": 2.5}, step=2)
    sink.write(VALUES, step=1, now=2)
    wandb.log({"lm loss": 2.25}, step=3)
    sink.write({"flashmoe/heap_mib": 4.0}, step=2, now=3)
    wandb.finish()
    (run,) = offline_runs(tmp_path)
    # One row for each step of the framework, ours beside its own.
    rows = [{key: row[key] for key in row if key[0] != "_"} for row in run.history]
    assert rows == [
        {"lm loss": 2.5, **VALUES, "flashmoe/step": 1},
        {"lm loss": 2.25, "flashmoe/heap_mib": 4.0, "flashmoe/step": 2},
    ]


def test_tensorboard_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(tmp_path))
    sink = TensorBoardSink(writer)
    sink.write(VALUES, step=1, now=2)
    sink.write(VALUES, step=2, now=3)
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(VALUES)
    read = [(one.step, one.value) for one in events.Scalars("flashmoe/forward/layer_ms")]
    assert read == [(1, 1.5), (2, 1.5)]


class Unreachable:
    """A logger whose server has gone away."""

    calls = 0

    def write(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        raise ConnectionResetError("connection lost")


def test_a_logger_that_fails_is_given_up_with_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.WARNING)
    failing = Unreachable()
    backend = ReferenceBackend(cases.CONFIG)
    kept = tmp_path / "kept.jsonl"
    sinks = [Guarded(failing, "wandb", kept="kept.jsonl"), JsonLines(kept)]
    reporter = make_reporter(None, {0: place(backend, 0)}, backend, sinks)
    for step in (1, 2, 3):
        run_layer(None, backend, 0)
        reporter.step(step, is_last=step == 3)
    assert failing.calls == 1
    assert [record.message for record in caplog.records] == [
        "wandb takes no more metrics of flashmoe: ConnectionResetError: connection lost; training "
        "goes on, and kept.jsonl has them"
    ]
    assert [json.loads(line)["step"] for line in kept.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_known_as_such(use_reentrant: bool) -> None:
    seen: list[bool] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_backward())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
    assert not in_backward()
