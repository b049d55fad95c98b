"""What wandb, TensorBoard and the file beside a run are told of Megatron's MoE layers."""

import contextlib
import dataclasses
import gc
import inspect
import itertools
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron import metrics
from flashmoe_megatron.adapters.megatron.arguments import extend_parser
from flashmoe_megatron.adapters.megatron.settings import Settings
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.calibration import Entry, write_entries
from tests.distributed import RankPool, refusal
from tests.megatron.harness import (
    MICRO_BATCH,
    SEQ_LENGTH,
    Case,
    Layout,
    forget_metrics,
    megatron_parser,
    prepare,
    train,
    transformer_config,
)
from tests.megatron.layers import make_layer
from tests.megatron.stock_script import MODEL, torchrun
from tests.programs import run_python
from tests.tools.offline_wandb import offline_runs
from tests.unit import cases
from tests.unit.records import counted

TOKENS = SEQ_LENGTH * MICRO_BATCH


def test_flags_reach_the_settings() -> None:
    parsed = extend_parser(megatron_parser()).parse_args(
        ["--flashmoe-metrics", "layer_ms,heap_mib", "--flashmoe-calibration", "t2.json"]
    )
    assert parsed.flashmoe_metrics == "layer_ms,heap_mib"
    assert parsed.flashmoe_calibration == "t2.json"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": "layer_time"}, "--flashmoe-metrics 'layer_time': unknown .*'layer_ms'"),
        ({"metrics": None}, "--flashmoe-metrics None: metrics are None"),
        ({"calibration": ""}, "--flashmoe-calibration '': wanted the path of a file"),
    ],
)
def test_settings_without_meaning_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings(**options)


def reports(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "layout", [Layout(expert=2), Layout(expert=2, pipeline=2)], ids=["ep2_dp2", "pp2_ep2"]
)
def test_layers_of_all_ranks_are_reported(
    layout: Layout, four_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    case = Case(layout, steps=4, metrics_to=str(path), settings={"metrics": "all"})
    four_ranks.run(train, case, True)
    lines = reports(path)
    # The first iteration is not reported, and the last is although none follows.
    assert [line["step"] for line in lines] == [2, 3, 4]
    for line in lines:
        for layer in (0, 1):
            assert line[f"flashmoe/forward/layer_{layer}/layer_ms"] > 0
            assert line[f"flashmoe/backward/layer_{layer}/layer_ms"] > 0
            rows = [line[f"flashmoe/layer_{layer}/expert_rows/{expert}"] for expert in range(8)]
            # Per launch: both ranks of a group hold all tokens, of which each chose two experts.
            assert sum(rows) == pytest.approx(2 * TOKENS * 2)
        assert line["flashmoe/forward/hidden_communication"] == 0
        assert line["flashmoe/deduplication"] == 1
        assert line["flashmoe/tokens_per_second"] > 0
        assert line["flashmoe/forward/mib_sent"] == line["flashmoe/backward/mib_sent"] > 0
        sent = line["flashmoe/mib/rank_0_to_1"] + line["flashmoe/mib/rank_1_to_0"]
        assert sent == pytest.approx(2 * line["flashmoe/forward/mib_sent"])
        assert "flashmoe/forward/overlap_efficiency" not in line


def test_a_choice_of_metrics(four_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    case = Case(Layout(expert=2), steps=2, metrics_to=str(path), settings={"metrics": "layer_ms"})
    four_ranks.run(train, case, True)
    (line,) = reports(path)
    assert set(line) == {
        "step",
        "time",
        "flashmoe/forward/layer_ms",
        "flashmoe/backward/layer_ms",
    }
    path.unlink()
    case = dataclasses.replace(case, settings={"metrics": "none"})
    four_ranks.run(train, case, True)
    assert not path.exists()


def calibration(path: Path, **changes: Any) -> str:
    config = cases.make_config(num_ranks=2, **changes)
    measured = {"num_tokens": TOKENS, "gpu": "cpu", "dtype": "float32", "grads": "main_grad"}
    write_entries(path, [Entry.of(config, **measured, direction="forward", time_ms=1.0)])
    return str(path)


def test_overlap_efficiency_comes_from_the_file(four_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    settings = {"calibration": calibration(tmp_path / "t2.json")}
    case = Case(Layout(expert=4), steps=2, metrics_to=str(path), settings=settings)
    four_ranks.run(train, case, True)
    (line,) = reports(path)
    efficiency = line["flashmoe/forward/overlap_efficiency"]
    assert efficiency == pytest.approx(1 / line["flashmoe/forward/layer_ms"])
    assert "flashmoe/backward/overlap_efficiency" not in line


def test_a_calibration_of_another_shape_ends_the_run(four_ranks: RankPool, tmp_path: Path) -> None:
    file = calibration(tmp_path / "t2.json", intermediate=128)
    case = Case(Layout(expert=4), settings={"calibration": file})
    for told in four_ranks.run(refusal, train, case, True):
        assert "has intermediate 128 and not 64" in told


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """A layer of this many intermediate features, Megatron's number of it, and if it is frozen."""

    width: int = 64
    number: int = 1
    is_frozen: bool = False


def report_layers(
    group: dist.ProcessGroup, by_rank: Sequence[Sequence[OneLayer]], path: str, file: str | None
) -> list[str]:
    """Runs each rank's layers for two steps, the last rank writing; returns the warnings."""
    from flashmoe_megatron.adapters.megatron.metrics import MoEMetrics
    from flashmoe_megatron.telemetry.sinks import JsonLines

    prepare(Layout(), metrics="all", calibration=file)
    layers = []
    for one in by_rank[dist.get_rank()]:
        # Without the auxiliary loss, whose table has room for the layers of one model.
        config = transformer_config(
            Layout(),
            "flashmoe",
            moe_ffn_hidden_size=one.width,
            moe_router_load_balancing_type="none",
        )
        layer = make_layer(config)
        layer.set_layer_number(one.number)
        layer.requires_grad_(not one.is_frozen)
        layers.append(layer)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("flashmoe_megatron")
    logger.addHandler(handler)
    is_writer = dist.get_rank() == dist.get_world_size() - 1
    report = MoEMetrics([JsonLines(Path(path))] if is_writer else [], model=layers)
    try:
        for step in (1, 2):
            for layer in layers:
                layer(torch.randn(SEQ_LENGTH, MICRO_BATCH, 64))
            report(step, is_last=step == 2)
    finally:
        logger.removeHandler(handler)
    return told


def test_the_rank_that_writes_needs_no_layer_for_the_efficiency(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path, file = tmp_path / "metrics.jsonl", calibration(tmp_path / "t2.json")
    two_ranks.run(report_layers, [[OneLayer()], []], str(path), file)
    (line,) = reports(path)
    efficiency = line["flashmoe/forward/overlap_efficiency"]
    assert efficiency == pytest.approx(1 / line["flashmoe/forward/layer_ms"])


def report_uneven(group: dist.ProcessGroup, path: str) -> None:
    """Two iterations without a bound of tokens, of which the second pair of ranks has more."""
    from flashmoe_megatron.adapters.megatron.metrics import MoEMetrics
    from flashmoe_megatron.telemetry.sinks import JsonLines

    prepare(Layout(expert=2), max_tokens=None)
    layer = make_layer(transformer_config(Layout(expert=2), "flashmoe"))
    report = MoEMetrics([JsonLines(Path(path))] if dist.get_rank() == 0 else [], model=[layer])
    num_tokens = TOKENS if dist.get_rank() < 2 else 8 * TOKENS
    for iteration in (1, 2):
        layer(torch.randn(num_tokens, 1, 64))
        report(iteration, is_last=iteration == 2)


def begin_reports(
    group: dist.ProcessGroup, settings: Sequence[str], intervals: Sequence[int]
) -> str:
    """Ends a first iteration with this rank's metrics and interval; returns the error."""
    prepare(Layout())
    rank = dist.get_rank()
    report = metrics.MoEMetrics(settings=Settings(metrics=settings[rank]), interval=intervals[rank])
    return refusal(group, lambda _: report(1))


@pytest.mark.parametrize(
    ("settings", "intervals", "told"),
    [
        (("default", "none"), (1, 1), "metrics: default on rank 0, none on rank 1"),
        (("default", "default"), (1, 2), "interval: 1 on rank 0, 2 on rank 1"),
    ],
)
def test_ranks_report_the_same_at_the_same_time(
    settings: Sequence[str], intervals: Sequence[int], told: str, two_ranks: RankPool
) -> None:
    said = two_ranks.run(begin_reports, settings, intervals)
    assert said == [f"ConfigError: the ranks disagree on {told}; wanted one value"] * 2


def test_groups_may_have_other_numbers_of_tokens(four_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    four_ranks.run(report_uneven, str(path))
    (line,) = reports(path)
    # The mean over launches: the ranks of a group hold all of its tokens, of two experts each.
    assert line["flashmoe/expert_rows/mean"] == 2 * 2 * (TOKENS + 8 * TOKENS) / 2 / 8


def report_beside_evaluations(group: dist.ProcessGroup, evaluations: int, path: str) -> None:
    """Three iterations of a layer, and before each evaluations of half as many tokens."""
    from flashmoe_megatron.adapters.megatron.metrics import MoEMetrics
    from flashmoe_megatron.telemetry.sinks import JsonLines

    prepare(Layout(expert=2), metrics="all")
    layer = make_layer(transformer_config(Layout(expert=2), "flashmoe"))
    report = MoEMetrics([JsonLines(Path(path))] if dist.get_rank() == 0 else [], model=[layer])
    torch.manual_seed(5)
    x = torch.randn(SEQ_LENGTH, MICRO_BATCH, 64)
    for iteration in (1, 2, 3):
        layer.eval()
        for _ in range(evaluations):
            with torch.no_grad():
                layer(x[: SEQ_LENGTH // 2])
        layer.train()
        layer(x)[0].sum().backward()
        report(iteration, is_last=iteration == 3)


def test_evaluation_is_in_no_metric(two_ranks: RankPool, tmp_path: Path) -> None:
    alone, mixed = tmp_path / "alone.jsonl", tmp_path / "mixed.jsonl"
    for evaluations, path in ((0, alone), (5, mixed)):
        two_ranks.run(report_beside_evaluations, evaluations, str(path))
    assert [line["step"] for line in reports(mixed)] == [2, 3]
    for line, wanted in zip(reports(mixed), reports(alone), strict=True):
        assert line["flashmoe/expert_rows/mean"] == 2 * TOKENS * 2 / 8
        assert counted(line) == counted(wanted)


def report_models(group: dist.ProcessGroup, tokens: Sequence[int], paths: Sequence[str]) -> None:
    """Steps of several models of one layer each, which share a backend; then all report."""
    from flashmoe_megatron.adapters.megatron.metrics import MoEMetrics
    from flashmoe_megatron.telemetry.sinks import JsonLines

    prepare(Layout(expert=2), metrics="all")
    models = [make_layer(transformer_config(Layout(expert=2), "flashmoe")) for _ in tokens]
    told = [
        MoEMetrics([JsonLines(Path(path))] if dist.get_rank() == 0 else [], model=[model])
        for path, model in zip(paths, models, strict=True)
    ]
    for step in (1, 2, 3):
        for count, model in zip(tokens, models, strict=True):
            model(torch.randn(count, 1, 64))[0].sum().backward()
        for report in told:
            report(step, is_last=step == 3)


def test_each_of_two_models_is_reported_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    paths, tokens = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"], (TOKENS, TOKENS // 2)
    two_ranks.run(report_models, tokens, [str(path) for path in paths])
    for path, count in zip(paths, tokens, strict=True):
        assert [line["step"] for line in reports(path)] == [2, 3]
        for line in reports(path):
            assert line["flashmoe/expert_rows/mean"] == 2 * count * 2 / 8


TEACHER = [OneLayer(128, number, is_frozen=True) for number in (1, 2, 3)]


def test_of_layers_alike_the_last_one_made_is_reported() -> None:
    """A set gives them in the order of their addresses, which is another one on every rank."""
    backend = SimpleNamespace(config=cases.CONFIG)
    older, newer, other = (
        SimpleNamespace(layer=layer, backend=backend, owner=owner)
        for layer, owner in ((0, 7), (0, 8), (1, 3))
    )
    for order in itertools.permutations((older, newer, other)):
        assert metrics._one_of_each_number(order) == [newer, other]  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["student", "teacher"])
def test_of_a_teacher_and_its_student_the_student_is_reported(
    first: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    student = [OneLayer(number=number) for number in (1, 2)]
    both = student + TEACHER if first == "student" else TEACHER + student
    path = tmp_path / "metrics.jsonl"
    # The stage of the second rank has a part of the teacher alone.
    by_rank = [both, TEACHER]
    told = two_ranks.run(report_layers, by_rank, str(path), None)
    assert told == [[], []]
    (line,) = reports(path)
    for layer in (0, 1):
        rows = [line[f"flashmoe/layer_{layer}/expert_rows/{expert}"] for expert in range(8)]
        assert sum(rows) == pytest.approx(TOKENS * 2)
    assert "flashmoe/forward/layer_2/layer_ms" not in line


def numbers_with_prediction(group: dist.ProcessGroup) -> list[int]:
    """The numbers in the records of a decoder's layer and of two of multi-token prediction."""
    prepare(Layout())
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_layer import TransformerLayer

    model_parallel_cuda_manual_seed(7)
    # Without the auxiliary loss, whose table has room for the decoder's layers.
    config = transformer_config(Layout(), "flashmoe", moe_router_load_balancing_type="none")
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)
    first = {"layer_number": 1, "is_mtp_layer": True}
    if "is_mtp_layer" not in inspect.signature(TransformerLayer).parameters:
        first = {"layer_number": 1 + config.num_layers}  # as Megatron-Core 0.16 numbers it itself
    layers = [TransformerLayer(config, spec.submodules, **place).mlp for place in ({}, first)]
    layers.append(make_layer(config))
    layers[2].set_layer_number(2)
    layers[2].is_mtp_layer = True
    numbers = []
    for layer in layers:
        backend = layer.flashmoe_routed_experts.backend
        backend.take_records()
        layer(torch.randn(SEQ_LENGTH, MICRO_BATCH, 64))
        numbers += [record.layer for record in backend.take_records()]
    return numbers


def numbers_in_both_metrics(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Under which numbers flashmoe and Megatron know the second of two layers."""
    prepare(Layout())
    forget_metrics()
    layer = make_layer(transformer_config(Layout(), "flashmoe"))
    layer.set_layer_number(2)
    backend = layer.flashmoe_routed_experts.backend
    backend.take_records()
    layer(torch.randn(SEQ_LENGTH, MICRO_BATCH, 64))
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        losses = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"]
    else:
        losses = get_moe_metrics_tracker().metrics["load_balancing_loss"].values
    return [record.layer for record in backend.take_records()], losses.nonzero().flatten().tolist()


def test_layers_have_the_numbers_of_megatrons_own_metrics(two_ranks: RankPool) -> None:
    """Megatron logs what it keeps at an index as layer_{index}."""
    for ours, theirs in two_ranks.run(numbers_in_both_metrics):
        assert ours == theirs == [1]


def test_layers_of_multi_token_prediction_follow_the_decoders(two_ranks: RankPool) -> None:
    for numbers in two_ranks.run(numbers_with_prediction):
        assert numbers == [0, 2, 3]


def test_frozen_layers_are_reported_where_none_is_trained(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    two_ranks.run(report_layers, [TEACHER] * 2, str(path), None)
    (line,) = reports(path)
    assert line["flashmoe/forward/layer_2/layer_ms"] > 0


def test_models_that_differ_in_a_layer_are_not_reported(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    """Ranks that have both choose the same one; ranks that have different ones report none."""
    path = tmp_path / "metrics.jsonl"
    one, other = OneLayer(), OneLayer(128)
    both = [[one, other], [other, one]]
    told = two_ranks.run(report_layers, both, str(path), None)
    assert told == [[], []]
    assert len(reports(path)) == 1
    path.unlink()
    differ = [[one], [other]]
    told = two_ranks.run(report_layers, differ, str(path), None)
    assert told[0] == []
    (message,) = told[1]
    assert message.startswith("no metrics of flashmoe: layer 0 is ")
    assert not path.exists()


@pytest.mark.parametrize("exits", [None, 3], ids=str)
def test_no_report_is_left_when_a_script_exits(
    exits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashmoe_megatron.adapters.megatron import metrics as adapter

    told: dict[int, bool] = {}

    def report(iteration: int, *, is_last: bool) -> None:
        told[iteration] = is_last

    args = SimpleNamespace(train_iters=5, exit_interval=exits)
    monkeypatch.setattr(adapter, "megatron_args", lambda: args)
    monkeypatch.setattr(adapter, "is_served", lambda _: True)
    monkeypatch.setattr(adapter, "has_logger", lambda _: True)
    monkeypatch.setattr(adapter, "MoEMetrics", lambda *_, **__: report)
    script = adapter._ScriptMetrics(SimpleNamespace())
    monkeypatch.setattr(script, "_sinks", lambda _: [])
    for iteration in range(1, 6):
        script(iteration)
    assert [iteration for iteration, is_last in told.items() if is_last] == (
        [5] if exits is None else [3, 5]
    )


def restart(group: dist.ProcessGroup, directory: str) -> list[bool]:
    """Which iterations of Megatron's script have new metrics; the groups change after the third."""
    from flashmoe_megatron.adapters.megatron import metrics as adapter

    prepare(Layout())
    layer = make_layer(transformer_config(Layout(), "flashmoe"))
    gc.collect()  # layers of other tests hold themselves in cycles
    args = SimpleNamespace(
        moe_token_dispatcher_type="flashmoe", num_experts=8, tensorboard_dir=directory
    )
    world = dist.group.WORLD
    anew = dist.new_group()
    script = adapter._ScriptMetrics(
        SimpleNamespace(get_wandb_writer=lambda: None, get_tensorboard_writer=lambda: None)
    )
    made = []
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as at_end:
        at_end.callback(setattr, dist.group, "WORLD", world)
        patch.setattr(adapter, "megatron_args", lambda: args)
        for index, iteration in enumerate((1, 2, 3, 3, 4)):
            if index == 3:
                dist.group.WORLD = anew
            layer(torch.randn(SEQ_LENGTH, MICRO_BATCH, 64))
            before = script._metrics
            script(iteration)
            made.append(script._metrics is not before)
            reporter = script._metrics._reporter
            assert reporter._group is (world if index < 3 else anew)
    return made


def test_metrics_begin_anew_with_new_groups(two_ranks: RankPool, tmp_path: Path) -> None:
    """Megatron's --inprocess-restart makes new groups and goes back to a checkpoint."""
    for made in two_ranks.run(restart, str(tmp_path)):
        assert made == [True, False, False, True, False]


OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_CONSOLE": "off",
    "WANDB_SILENT": "true",
    "WANDB_X_DISABLE_STATS": "true",
}


def stock_script(megatron_lm: Path, directory: Path, *arguments: str, **environment: str) -> str:
    """Runs ``pretrain_gpt.py`` of a checkout with flashmoe on two ranks; returns its output."""
    script = ("-m", "flashmoe_megatron.run", str(megatron_lm / "pretrain_gpt.py"), *MODEL)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**OFFLINE, **environment}.items():
            patch.setenv(name, value)
        return torchrun(
            megatron_lm, directory, *script, "--moe-token-dispatcher-type", "flashmoe", *arguments
        )


def test_stock_script_with_wandb_alone(megatron_lm: Path, tmp_path: Path) -> None:
    """Neither name, folder nor TensorBoard: Megatron's own script would end with an error."""
    stock_script(megatron_lm, tmp_path, "--wandb-project", "overlap")
    (run,) = offline_runs(tmp_path)
    assert run.project == "overlap"
    ours = [row for row in run.history if "flashmoe/step" in row]
    # Each report is in the row of its own iteration.
    assert [(row["flashmoe/step"], row["_step"]) for row in ours] == [(2, 2), (3, 3)]
    assert all(row["flashmoe/forward/layer_ms"] > 0 for row in ours)
    assert [line["step"] for line in reports(tmp_path / "flashmoe_metrics.jsonl")] == [2, 3]


def test_stock_script_with_tensorboard_alone(megatron_lm: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "events"
    stock_script(megatron_lm, tmp_path, "--tensorboard-dir", str(folder))
    events = EventAccumulator(str(folder)).Reload()
    assert [one.step for one in events.Scalars("flashmoe/forward/layer_ms")] == [2, 3]
    assert events.Scalars("lm loss vs samples")
    assert [line["step"] for line in reports(folder / "flashmoe_metrics.jsonl")] == [2, 3]


def test_stock_script_goes_on_without_wandb(megatron_lm: Path, tmp_path: Path) -> None:
    """The import of wandb fails, as where it is not installed."""
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "wandb.py").write_text("raise ImportError('No module named wandb')\n")
    path = os.pathsep.join([str(absent), os.environ.get("PYTHONPATH", "")])
    output = stock_script(megatron_lm, tmp_path, "--wandb-project", "overlap", PYTHONPATH=path)
    assert output.count("wandb does not start: ImportError: No module named wandb") == 1
    assert [line["step"] for line in reports(tmp_path / "flashmoe_metrics.jsonl")] == [2, 3]


def test_stock_script_goes_on_where_wandb_is_unreachable(megatron_lm: Path, tmp_path: Path) -> None:
    output = stock_script(
        megatron_lm,
        tmp_path,
        "--wandb-project",
        "overlap",
        WANDB_MODE="online",
        WANDB_API_KEY="0" * 40,
        WANDB_BASE_URL="http://127.0.0.1:9",  # nobody listens there
        WANDB_INIT_TIMEOUT="5",
    )
    assert output.count("wandb does not start") == 1
    assert [line["step"] for line in reports(tmp_path / "flashmoe_metrics.jsonl")] == [2, 3]


WRITERS = """
import sys
from types import SimpleNamespace
from flashmoe_megatron.adapters.megatron.metrics import patch_wandb

def start(args):
    if args.wandb_project == "broken":
        raise ValueError("no wandb here")
    print("started", args.wandb_exp_name or "unnamed", args.wandb_save_dir)

module = SimpleNamespace(__name__="global_vars", _set_wandb_writer=start)
patch_wandb(module)
patch_wandb(module)
args = SimpleNamespace(
    moe_token_dispatcher_type=sys.argv[1],
    num_experts=4,
    wandb_project=sys.argv[2],
    wandb_exp_name="",
    wandb_save_dir="",
    save=None,
)
module._set_wandb_writer(args)
print("goes on")
"""


@pytest.mark.parametrize(
    ("dispatcher", "project", "words"),
    [
        ("flashmoe", "overlap", "started flashmoe .\ngoes on"),
        ("flashmoe", "broken", "goes on"),
        ("alltoall", "overlap", "started unnamed \ngoes on"),
    ],
)
def test_wandb_starts_or_is_done_without(
    dispatcher: str, project: str, words: str, with_megatron: Path
) -> None:
    done = run_python("-c", WRITERS, dispatcher, project, forked_from=with_megatron)
    assert done.stdout.strip() == words, done.stderr
    assert ("wandb does not start: ValueError: no wandb here" in done.stderr) == (
        project == "broken"
    )


def test_runs_with_other_dispatchers_keep_their_errors(with_megatron: Path) -> None:
    words = ("-c", WRITERS, "alltoall", "broken")
    done = run_python(*words, status=1, forked_from=with_megatron)
    assert "ValueError: no wandb here" in done.stderr


OTHER_RELEASE = """
from types import SimpleNamespace
from flashmoe_megatron.adapters.megatron.metrics import patch_training
patch_training(SimpleNamespace(__name__="megatron.training.training"))
print("goes on")
"""


def test_a_release_without_the_place_is_told_of(with_megatron: Path) -> None:
    done = run_python("-c", OTHER_RELEASE, forked_from=with_megatron)
    assert done.stdout.strip() == "goes on", done.stderr
    assert "megatron.training.training has no training_log: no metrics" in done.stderr


def test_metrics_begin_again_with_torch_distributed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks may destroy all groups while others use the GPUs."""
    steps: list[list[int]] = []

    def start(_: object) -> Any:
        steps.append([])
        return SimpleNamespace(step=lambda number, **_: steps[-1].append(number))

    monkeypatch.setattr(metrics.MoEMetrics, "_start", start)
    report = metrics.MoEMetrics(settings=Settings())
    for world in range(2):
        store = dist.FileStore(str(tmp_path / str(world)), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            for iteration in range(3):
                report(3 * world + iteration)
        finally:
            dist.destroy_process_group()
    assert steps == [[1, 2], [4, 5]]
