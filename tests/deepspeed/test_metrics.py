"""What DeepSpeed's monitors and the file beside a run are told of its MoE layers."""

import contextlib
import csv
import json
import logging
import re
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flashmoe_megatron.adapters.deepspeed.settings import read_settings
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.calibration import Entry, write_entries
from tests.deepspeed import pipeline
from tests.deepspeed.harness import (
    Case,
    batch,
    build,
    ds_config,
    prepare,
    train,
    train_engine,
)
from tests.deepspeed.models import AutoEPModel, NativeModel
from tests.distributed import RankPool, refusal
from tests.forks import ForkServer
from tests.tools.offline_wandb import offline_runs
from tests.unit import cases
from tests.unit.records import counted

STEPS = 7
INTERVAL = 2


def csv_files(directory: str) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": directory, "job_name": "job"}}


def case(directory: str, *, monitors: dict[str, Any] | None = None, **flashmoe: Any) -> Case:
    """Two layers of 8 experts, top-2, at half of the capacity that would drop nothing."""
    return Case(
        model={"k": 2, "capacity_factor": 0.5, "min_capacity": 1},
        config={"wall_clock_breakdown": True, **(monitors or csv_files(directory))},
        steps=STEPS,
        settings={"metrics_interval": INTERVAL, **flashmoe},
    )


def run(group: dist.ProcessGroup, given: Case) -> tuple[float, ...]:
    engine = build(given, fused=True)
    train_engine(engine, given)
    layer = engine.moe_layers[0]
    return layer.time_moe, layer.time_falltoall, layer.time_salltoall, layer.gate.gate_time


def reports(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "flashmoe_metrics.jsonl").open()]


def test_the_monitor_and_the_breakdown_receive_our_figures(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for time_moe, first, second, gate in two_ranks.run(run, case(str(tmp_path))):
        assert time_moe > gate > 0
        assert (first, second) == (0, 0)
    values = {}
    for path in (tmp_path / "job").glob("flashmoe_*.csv"):
        with path.open() as file:
            _, *rows = csv.reader(file)
        # A step has two samples; the report of a step comes with the forward after the next one.
        assert [int(row[0]) for row in rows] == [6, 10, 14], path.stem
        values[path.stem] = [float(row[1]) for row in rows]
    assert {"flashmoe_forward_layer_ms", "flashmoe_tokens_per_second"} <= set(values)
    assert all(1 <= value <= 8 for value in values["flashmoe_expert_imbalance"])
    assert all(0.3 < value < 0.8 for value in values["flashmoe_dropped_routes"])
    # Dropped routes are not sent, nor are pads.
    assert all(0 < value <= 1 for value in values["flashmoe_forward_payload_share"])
    lines = reports(tmp_path / "job")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["flashmoe/dropped_routes"] for line in lines] == pytest.approx(
        values["flashmoe_dropped_routes"]
    )


def run_compiled(group: dist.ProcessGroup, given: Case) -> tuple[list[float], list[str]]:
    """The losses of a compiled engine, and the code that the compiler has put into its graphs."""
    engine = build(given, fused=True)
    traces: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traces.extend(filter(None, (node.stack_trace for node in graph.graph.nodes)))
        return graph.forward

    torch.compiler.reset()
    engine.compile(backend=backend)
    try:
        return train_engine(engine, given).losses, traces
    finally:
        torch.compiler.reset()


def test_a_compiled_engine_compiles_neither_experts_nor_metrics(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    given = case(str(tmp_path / "compiled"))
    plain = two_ranks.run(train, case(str(tmp_path / "plain")), True)
    for (losses, traces), wanted in zip(two_ranks.run(run_compiled, given), plain, strict=True):
        assert losses == pytest.approx(wanted.losses, rel=1e-5)
        assert traces
        for ours in ("flashmoe_megatron/telemetry/", "flashmoe_megatron/adapters/experts.py"):
            assert not [trace for trace in traces if ours in trace]
    assert [line["step"] for line in reports(tmp_path / "compiled" / "job")] == [2, 4, 6]


def run_resumed(group: dist.ProcessGroup, given: Case, directory: str) -> None:
    """Steps to a checkpoint, and as many again in an engine that loads it."""
    first = build(given, fused=True)
    train_engine(first, given)
    first.save_checkpoint(directory)
    again = build(given, fused=True)
    again.load_checkpoint(directory)
    train_engine(again, replace(given, first_step=given.steps))


def test_a_resumed_run_reports_its_own_steps(two_ranks: RankPool, tmp_path: Path) -> None:
    given = replace(case(str(tmp_path)), steps=2 * INTERVAL)
    two_ranks.run(run_resumed, given, str(tmp_path / "checkpoint"))
    lines = reports(tmp_path / "job")
    # The last report of each run would come with a forward of a later step.
    assert [line["step"] for line in lines] == [2, 6]
    assert all(line["flashmoe/forward/layer_ms"] > 0 for line in lines)


def run_to_an_evaluation(group: dist.ProcessGroup, given: Case) -> None:
    """Evaluates behind the last step, until its report has been written."""
    engine = build(given, fused=True)
    train_engine(engine, given)
    path = Path(given.config["csv_monitor"]["output_path"], "job", "flashmoe_metrics.jsonl")
    for _ in range(500):
        is_written = [path.exists() and f'"step": {given.steps},' in path.read_text()]
        dist.broadcast_object_list(is_written)
        if is_written[0]:
            return
        time.sleep(0.01)
        with torch.no_grad():
            engine(*batch(given, 999, torch.float32))


def test_evaluation_writes_the_last_report(two_ranks: RankPool, tmp_path: Path) -> None:
    given = replace(case(str(tmp_path)), steps=INTERVAL)
    two_ranks.run(run_to_an_evaluation, given)
    assert [line["step"] for line in reports(tmp_path / "job")] == [INTERVAL]


def train_step(engine: Any, given: Case, step: int) -> None:
    engine.train()
    torch.manual_seed(77 + step)  # the gate draws
    engine.backward(engine(*batch(given, step, torch.float32)))
    engine.step()


def run_beside_evaluations(group: dist.ProcessGroup, given: Case, evaluations: int) -> None:
    """Steps, and after each evaluations of a third as many tokens."""
    engine = build(given, fused=True)
    for step in range(given.steps):
        train_step(engine, given, step)
        engine.eval()
        for _ in range(evaluations):
            with torch.no_grad():
                engine(*batch(replace(given, tokens=(8,)), 999, torch.float32))


def test_evaluation_is_in_no_metric(two_ranks: RankPool, tmp_path: Path) -> None:
    """Least of all in that of dropped routes: here evaluation drops none."""
    lines = []
    for evaluations in (0, 5):
        given = case(str(tmp_path / str(evaluations)), metrics="all")
        given.model["eval_capacity_factor"] = 8.0
        two_ranks.run(run_beside_evaluations, given, evaluations)
        lines.append([counted(line) for line in reports(tmp_path / str(evaluations) / "job")])
    alone, mixed = lines
    assert alone[0]["flashmoe/dropped_routes"] > 0
    both = min(len(alone), len(mixed))  # the last report is written if a forward finds it done
    assert both > 1
    assert mixed[:both] == alone[:both]


def run_beside_rank_0(group: dist.ProcessGroup, given: Case) -> list[float]:
    """Steps, and after each an evaluation by rank 0 alone and a sum over all ranks."""
    engine = build(given, fused=True)
    rank = dist.get_rank()
    sums = []
    for step in range(given.steps):
        train_step(engine, given, step)
        engine.eval()
        if rank == 0:
            with torch.no_grad():
                engine(*batch(given, 999, torch.float32))
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        sums.append(float(total))
    return sums


def test_one_rank_may_evaluate_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    given = case(str(tmp_path), metrics_interval=1)
    given.model["ep_sizes"] = (1, 1)  # a layer of both ranks would need both
    for sums in two_ranks.run(run_beside_rank_0, given):
        assert sums == [3.0] * STEPS
    steps = [line["step"] for line in reports(tmp_path / "job")]
    assert len(steps) > 1
    assert steps == list(range(1, 1 + len(steps)))


def limit_beside_the_world(group: dist.ProcessGroup, limit: timedelta) -> timedelta:
    """The time limit of a group for reports, where the world has another than torch's default."""
    from flashmoe_megatron.adapters.deepspeed.metrics import make_group

    cpu = torch.device("cpu")
    distributed_c10d._set_pg_timeout(limit)
    try:
        return make_group(cpu)._get_backend(cpu).options._timeout
    finally:
        distributed_c10d._set_pg_timeout(distributed_c10d.default_pg_timeout)


def test_a_rank_may_evaluate_for_as_long_as_the_world_waits(two_ranks: RankPool) -> None:
    limit = timedelta(hours=7)
    assert two_ranks.run(limit_beside_the_world, limit) == [limit, limit]


def run_with_a_monitor_of(group: dist.ProcessGroup, given: Case, owner: int) -> None:
    monitors = given.config if dist.get_rank() == owner else {}
    run(group, replace(given, config={"wall_clock_breakdown": True, **monitors}))


@pytest.mark.parametrize("owner", [0, 1])
def test_the_first_ranks_monitor_counts(owner: int, two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(run_with_a_monitor_of, case(str(tmp_path)), owner)
    assert (tmp_path / "job" / "flashmoe_metrics.jsonl").exists() == (owner == 0)


def run_in_turns(group: dist.ProcessGroup, given: list[Case]) -> None:
    """Steps engines in turns, whose backends share their records as the kernel's do."""
    engines = [build(one, fused=True) for one in given]
    backends = [engine.moe_layers[0].flashmoe.experts.backend for engine in engines]
    for backend in backends:
        backend._records = backends[0]._records
    for step in range(given[0].steps):
        for engine, one in zip(engines, given, strict=True):
            train_step(engine, one, step)


def test_each_engine_reports_its_own_layers(two_ranks: RankPool, tmp_path: Path) -> None:
    def given(name: str, tokens: int) -> Case:
        return replace(case(str(tmp_path / name), metrics="all"), tokens=(tokens,))

    two_ranks.run(run_in_turns, [given("first", 24), given("second", 8)])
    for name, tokens in (("first", 24), ("second", 8)):
        two_ranks.run(run_in_turns, [given(f"{name} alone", tokens)])
        together, alone = (
            [counted(line) for line in reports(tmp_path / folder / "job")]
            for folder in (name, f"{name} alone")
        )
        both = min(len(together), len(alone))  # the last report is written if a forward finds it
        assert both > 1
        assert together[:both] == alone[:both]


def modes(group: dist.ProcessGroup, given: Case) -> list[tuple[set[bool], int, int]]:
    """Whether launches were evaluation, and tokens and routes, in evaluation and in training."""
    prepare()
    from flashmoe_megatron.adapters.deepspeed.routes import RouteReader
    from flashmoe_megatron.deepspeed import initialize

    config = ds_config(given, fused=True)
    del config["optimizer"]  # an engine for evaluation has none
    model = NativeModel((2, 2)) if given.family == "native" else AutoEPModel()
    engine, *_ = initialize(model=model, config=config)
    served = [one.flashmoe for one in engine.module.modules() if hasattr(one, "flashmoe")]
    reader = RouteReader([one.routes for one in served])
    found = []
    for is_training in (False, True):
        engine.train(is_training)
        with torch.no_grad():
            engine(*batch(given, 0, torch.float32))
        backends = {id(one.experts.backend): one.experts.backend for one in served}.values()
        taken = [record for backend in backends for record in backend.take_records()]
        tokens = sum(one.experts.num_tokens for one in served)
        found.append(({record.is_evaluation for record in taken}, tokens, reader.read()[0]))
    return found


@pytest.mark.parametrize("family", ["native", "autoep"])
def test_layers_know_evaluation_where_nobody_reports(family: str, two_ranks: RankPool) -> None:
    """Another engine's metrics may read what they leave in the memory of their group."""
    for evaluated, trained in two_ranks.run(modes, Case(family=family)):
        assert evaluated == ({True}, 0, 0)
        assert trained[0] == {False}
        assert min(trained[1:]) > 0


def test_a_choice_of_metrics(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(run, case(str(tmp_path), metrics="row_fill"))
    for line in reports(tmp_path / "job"):
        assert set(line) == {"step", "time", "flashmoe/row_fill"}
    for number, choice in enumerate(({"metrics": "none"}, {"metrics_interval": 0})):
        folder = tmp_path / str(number)
        two_ranks.run(run, case(str(folder), **choice))
        assert not list(folder.rglob("flashmoe*"))


def calibration(path: Path, *, num_tokens: int = 24, **changes: Any) -> str:
    shape = {"hidden": 64, "intermediate": 128, "num_experts": 8, "topk": 2, "num_ranks": 2}
    activation = {"activation": cases.CONFIG.activation, "gated": True}
    config = MoEConfig(**{**shape, **activation, "max_tokens": num_tokens, **changes})
    measured = {"num_tokens": num_tokens, "gpu": "cpu", "dtype": "float32"}
    entry = Entry.of(config, **measured, direction="forward", time_ms=1.0)
    write_entries(path, [entry])
    return str(path)


def shape_of(group: dist.ProcessGroup) -> MoEConfig:
    """The shape of the layers in these tests' model."""
    engine = build(case(""), fused=True)
    return engine.moe_layers[0].flashmoe.experts.backend.config


def test_overlap_efficiency_comes_from_the_file(two_ranks: RankPool, tmp_path: Path) -> None:
    shape = vars(two_ranks.run(shape_of)[0])
    file = calibration(tmp_path / "t2.json", **shape)
    two_ranks.run(run, case(str(tmp_path), calibration=file))
    for line in reports(tmp_path / "job"):
        efficiency = line["flashmoe/forward/overlap_efficiency"]
        assert efficiency == pytest.approx(1 / line["flashmoe/forward/layer_ms"])
        assert "flashmoe/backward/overlap_efficiency" not in line
    wider = calibration(tmp_path / "wider.json", **{**shape, "hidden": 192})
    for told in two_ranks.run(refusal, run, case(str(tmp_path), calibration=wider)):
        assert re.search("wider.json: none of its 1 entries is of this run.*hidden", told)
    given = case(str(tmp_path), calibration="t2.json")
    for told in two_ranks.run(run_without_a_file_on_rank_1, given, str(tmp_path)):
        assert "rank 1: calibration file t2.json: cannot be read" in told


def run_without_a_file_on_rank_1(group: dist.ProcessGroup, given: Case, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder if dist.get_rank(group) == 0 else Path(folder).parent)
        return refusal(group, run, given)


PIPELINES = {"MMMM": 4, "DDMM": 2, "MMDD": 2}
"""Blocks of two stages, and how many have experts. Rank 0, of the first stage, writes."""


def test_all_stages_of_a_pipeline_are_reported(servers: list[ForkServer], tmp_path: Path) -> None:
    shape = {"num_experts": 4, "num_tokens": pipeline.SAMPLES}
    file = calibration(tmp_path / "t2.json", **shape)
    section = {"enabled": True, "metrics_interval": 1, "metrics": "all", "calibration": file}
    runs = [
        (blocks, {**csv_files(str(tmp_path / blocks)), "flashmoe": section}) for blocks in PIPELINES
    ]
    with contextlib.closing(RankPool(4, servers)) as pool:
        pool.run(pipeline.train_with_metrics, runs)
    for blocks, num_layers in PIPELINES.items():
        lines = reports(tmp_path / blocks / "job")
        assert lines
        for line in lines:
            layers = {
                key.split("/")[2] for key in line if re.search("/layer_[0-9]+/layer_ms$", key)
            }
            assert layers == {f"layer_{number}" for number in range(num_layers)}
            for layer in layers:
                rows = [line[f"flashmoe/{layer}/expert_rows/{expert}"] for expert in range(4)]
                # Per launch: both ranks of a group hold all tokens, of which each chose two.
                assert sum(rows) == pytest.approx(2 * pipeline.SAMPLES * 2)
            assert line["flashmoe/forward/overlap_efficiency"] > 0
            assert line["flashmoe/tokens_per_second"] > 0
        assert (tmp_path / blocks / "job" / "flashmoe_tokens_per_second.csv").exists()


def with_wandb(group: dist.ProcessGroup, given: Case, environment: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        quiet = {"WANDB_CONSOLE": "off", "WANDB_SILENT": "true", "WANDB_X_DISABLE_STATS": "true"}
        for name, value in {**quiet, **environment}.items():
            patch.setenv(name, value)
        patch.chdir(environment["WANDB_DIR"])
        run(group, given)
        if dist.get_rank() == 0:
            import wandb

            if wandb.run is not None:
                wandb.finish()
            wandb.teardown()


WANDB = {"wandb": {"enabled": True, "project": "overlap"}}


def test_wandb_offline(two_ranks: RankPool, tmp_path: Path) -> None:
    given = case(str(tmp_path), monitors=WANDB)
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    two_ranks.run(with_wandb, given, environment)
    (found,) = offline_runs(tmp_path)
    rows = [row for row in found.history if "flashmoe/forward/layer_ms" in row]
    assert [row["_step"] for row in rows] == [6, 10, 14]


UNREACHABLE = {
    "WANDB_MODE": "online",
    "WANDB_API_KEY": "0" * 40,
    "WANDB_BASE_URL": "http://127.0.0.1:9",  # nobody listens there
    "WANDB_INIT_TIMEOUT": "5",
    "WANDB_SILENT": "true",
}


def without_wandb(
    group: dist.ProcessGroup, given: Case, directory: str, is_installed: bool
) -> list[str]:
    """Warnings where wandb does not answer, or is not installed."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("flashmoe_megatron")
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(directory)
            if is_installed:
                for name, value in UNREACHABLE.items():
                    patch.setenv(name, value)
            else:
                patch.setitem(sys.modules, "wandb", None)
            run(group, given)
    finally:
        logger.removeHandler(handler)
    return [message for message in told if "wandb" in message]


@pytest.mark.parametrize(
    ("is_installed", "error"), [(True, "CommError"), (False, "ModuleNotFoundError")]
)
def test_training_goes_on_without_wandb(
    is_installed: bool, error: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    given = case(str(tmp_path), monitors=WANDB)
    told, nothing = two_ranks.run(without_wandb, given, str(tmp_path), is_installed)
    assert nothing == []
    (message,) = told
    assert message.startswith(f"wandb does not start: {error}")
    assert [line["step"] for line in reports(tmp_path)] == [2, 4, 6]


def without_monitor(group: dist.ProcessGroup, flashmoe: dict[str, Any]) -> list[str]:
    """The warnings of an engine that has no monitor."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("flashmoe_megatron")
    logger.addHandler(handler)
    try:
        build(Case(settings=flashmoe), fused=True)
    finally:
        logger.removeHandler(handler)
    return [message for message in told if "without effect" in message]


@pytest.mark.parametrize(
    ("flashmoe", "keys"),
    [
        ({}, ""),
        ({"metrics": "none"}, ""),
        ({"metrics": "all"}, "flashmoe.metrics is"),
        ({"metrics": "all", "metrics_interval": 5}, "flashmoe.metrics, flashmoe.metrics_interval"),
    ],
    ids=str,
)
def test_metrics_without_a_monitor_are_said(
    flashmoe: dict[str, Any], keys: str, two_ranks: RankPool
) -> None:
    told, nothing = two_ranks.run(without_monitor, flashmoe)
    assert nothing == []
    assert len(told) == bool(keys)
    for message in told:
        assert message.startswith(keys)
        assert "DeepSpeed has no monitor" in message


def test_routes_are_counted_on_the_device() -> None:
    from flashmoe_megatron.adapters.deepspeed.routes import RouteCounter, RouteReader

    counters = [RouteCounter(torch.device("cpu")) for _ in range(2)]
    counters[0].count(torch.tensor([5, 5]), torch.tensor([0]))  # nobody reads yet
    reader = RouteReader(counters)
    for counter in counters:
        counter.count(torch.tensor([3, 1]), torch.tensor([0, 0, -1, 1]))
    assert reader.read() == (8, 6)
    counters[1].count(torch.tensor([0, 2]), torch.tensor([-1, -1]))
    assert reader.read() == (2, 0)
    assert reader.read() == (0, 0)
    assert RouteReader([]).read() == (0, 0)  # a pipeline stage may have no experts


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("metrics", "layer_time", "flashmoe.metrics is 'layer_time', unknown .*'layer_ms'"),
        ("metrics", ["layer_ms"], r"flashmoe.metrics is \['layer_ms'\], metrics are"),
        ("calibration", True, "flashmoe.calibration is True, wanted the path of a file"),
    ],
)
def test_settings_without_meaning_are_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings({"flashmoe": {"enabled": True, key: value}})
