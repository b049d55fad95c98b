"""The sweep of a layer, small, on processors: from the command to the report and wandb."""

import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flashmoe_megatron.bench import style
from flashmoe_megatron.kernel import bindings
from tests.tools.offline_wandb import offline_runs
from tools.weak_scaling import layer, progress, wandb_log
from tools.weak_scaling.__main__ import main, parse
from tools.weak_scaling.metrics import metrics_of, planned_mib
from tools.weak_scaling.points import IMPLEMENTATIONS, PASSES, Point, points_of, read_results
from tools.weak_scaling.ranks import StuckError, UsageError, counts_of
from tools.weak_scaling.report import write_report
from tools.weak_scaling.wandb_log import Sweep, log_sweep

ROOT = Path(__file__).parents[2]
# 3 experts do not divide among 2 ranks: one of the 5 points fails, the first on 2 ranks.
SWEEP = [
    *("--gpus", "1", "2", "--tokens", "32", "--experts", "3"),
    *("--base-tokens", "64", "--base-experts", "4", "--expert-tokens", "32"),
    *("--hidden", "64", "--intermediate", "64", "--iterations", "3", "--commit", "abc"),
]
FAILING = Point(2, 32, 64, 64, 3, 2)
TIMEOUT_S = 400
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def start(*arguments: object) -> "subprocess.Popen[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tools.weak_scaling", *map(str, arguments)],
        cwd=ROOT,
        env={**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_here(folder: Path, *arguments: object) -> int:
    options = ["run", *SWEEP, *map(str, arguments), "--out", str(folder)]
    return layer.run(parse(options))


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The folder of a sweep, its exit status and what it printed."""
    folder = tmp_path_factory.mktemp("sweep") / "run"
    process = start("run", *SWEEP, "--out", folder)
    printed, _ = process.communicate(timeout=TIMEOUT_S)
    return folder, process.returncode, printed


@pytest.fixture
def copy(sweep, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(sweep[0], tmp_path / "copy", ignore=shutil.ignore_patterns("wandb"))
    )


def test_a_failed_point_is_told_and_the_others_are_measured(sweep):
    folder, status, printed = sweep
    assert status == 1, printed
    measured = read_results(folder)
    wanted = {(1, 32, 4), (1, 64, 4), (2, 32, 4), (2, 64, 4)}
    assert {(point.ranks, point.tokens, point.num_experts) for point in measured} == wanted
    for records in measured.values():
        for implementation, what in itertools.product(IMPLEMENTATIONS, PASSES):
            times = records[implementation, what]
            assert 0 < times["min_ms"] <= times["median_ms"] <= times["max_ms"]
            assert times["iterations"] == 3
            assert times["commit"] == "abc"
        for implementation in IMPLEMENTATIONS:
            assert 0 < max(records[implementation, "gate"]["relative_l2"].values()) < 6e-3
    assert re.search(f"{FAILING}: failed: status 1, error: shape .*: num_experts=3", printed)
    assert "num_experts=3" in (folder / "ranks2.log").read_text()


def test_the_report_holds_a_table_and_a_figure(sweep):
    folder, _, _ = sweep
    report = (folder / "report.md").read_text()
    assert "4 points measured, 1 missing" in report
    assert f"Failed: {FAILING}: status 1" in report
    lines = [line[2:-2].split(" | ") for line in report.splitlines() if line[:1] == "|"]
    titles, _, *rows = lines
    measured = read_results(folder)
    assert len(rows) == len(measured) == 4
    for row, (point, records) in zip(rows, measured.items(), strict=True):
        line = dict(zip(titles, row, strict=True))
        assert (line["ranks"], line["tokens per rank"]) == (str(point.ranks), str(point.tokens))
        forward = records["unfused", "forward"]["median_ms"]
        assert float(line["forward/unfused_ms"]) == pytest.approx(forward, rel=1e-3)
    assert "(scaling.png)" in report
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_wandb_has_one_run_with_curves_table_and_figure(sweep):
    folder, _, printed = sweep
    measured = read_results(folder)
    (run,) = offline_runs(folder / "wandb")
    assert (run.name, run.project) == ("weak-scaling-run", "flashmoe-weak-scaling")
    assert run.exit_code == 1  # a point has failed
    assert run.config["hidden"] == 64
    assert run.config["is_reference"] is True
    assert run.steps["*"] == "processes"
    *curves, shown = run.history
    assert [curve["processes"] for curve in curves] == [1, 2]
    for ranks, curve in zip((1, 2), curves, strict=True):
        wanted = metrics_of(measured, Point(ranks, 64, 64, 64, 4, 2))
        assert {name: curve[name] for name in wanted} == pytest.approx(wanted)
    for name in ("reference_efficiency", "reference_mtokens_per_s", "reference_exposed_ms"):
        assert f"forward+backward/{name}" in curves[1]
    table = json.loads(run.file("points").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["failed"] is None for row in rows] == [True, True, False, True, True]
    for row in rows:
        point = Point(row["ranks"], row["tokens per rank"], 64, 64, row["experts"], 2)
        if point == FAILING:
            assert "num_experts=3" in row["failed"]
        else:
            forward = measured[point]["fused", "forward"]["median_ms"]
            assert row["forward/reference_ms"] == pytest.approx(forward)
    assert run.file("scaling").read_bytes() == (folder / "scaling.png").read_bytes()
    assert shown["failed"] == 1
    assert re.search(r"^[45] of 5 points, \d+ s, about \d+ s left$", printed, re.MULTILINE)


def drawn_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of a folder's figure, drawn once more with text as such."""
    monkeypatch.setitem(style._STYLE, "svg.fonttype", "none")
    write_report(folder, {})
    return (folder / "scaling.svg").read_text()


IN_EVERY_FIGURE = (
    "Weak scaling of one MoE layer: H=64, F=64, 4 experts, top-2, bfloat16",
    "medians; bars are the shortest and the longest call",
    "Oe = T(2) / T(N)",
    "million tokens per s",
    "by the kernel's plan",
)


@pytest.mark.usefixtures("no_gpu")
def test_a_figure_of_processors_says_reference(copy: Path, monkeypatch):
    drawn = drawn_text(copy, monkeypatch)
    title = f"REFERENCE on processors, no time of the kernel; torch {torch.__version__}, commit abc"
    ideal = "ideal: as on 2 processes"
    for text in (*IN_EVERY_FIGURE, title, ideal, "processes, 64 tokens each", ">reference<"):
        assert text in drawn
    assert ">fused<" not in drawn
    report = (copy / "report.md").read_text()
    assert title in report
    assert "forward/reference_ms" in report
    assert "/fused_ms" not in report
    for explained in ("`_efficiency` is Oe", "`_spread` is", "`floor_ms` is", "`imbalance` has"):
        assert explained in report


@pytest.mark.usefixtures("no_gpu")
def test_a_figure_of_gpus_names_them(copy: Path, monkeypatch):
    results = copy / "results.jsonl"
    gpu = '"gpus": ["NVIDIA H100", "NVIDIA H100"]'
    results.write_text(results.read_text().replace('"gpus": []', gpu))
    drawn = drawn_text(copy, monkeypatch)
    own = ("NVIDIA H100; driver ", "ideal: as on 2 GPUs", "GPUs, 64 tokens each", ">fused<")
    for text in (*IN_EVERY_FIGURE, *own):
        assert text in drawn
    assert "REFERENCE" not in drawn
    assert ">reference<" not in drawn


@pytest.mark.usefixtures("no_gpu")
def test_an_existing_folder_is_refused(copy: Path):
    before = (copy / "results.jsonl").read_bytes()
    with pytest.raises(UsageError, match="exists: name another folder, or .* --resume"):
        run_here(copy)
    assert (copy / "results.jsonl").read_bytes() == before


@pytest.mark.usefixtures("no_gpu")
def test_resume_measures_only_what_is_missing(copy: Path, capsys):
    lines = (copy / "results.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["num_ranks"] == 2]
    half = lines[: len(lines) // 4]  # this is the first point on 1 rank
    assert json.loads(half[-1])["tokens"] == 32
    cut = "".join([*kept, *half[:-1], half[-1][:50]])
    (copy / "results.jsonl").write_text(cut)
    assert run_here(copy, "--resume") == 1  # the point that failed fails once more
    printed = capsys.readouterr().out
    assert "3 points to measure, 2 are there" in printed
    assert printed.count(", reference forward+backward ") == 2
    text = (copy / "results.jsonl").read_text()
    assert text.startswith("".join([*kept, *half[:-1]]))
    assert text.count('"num_ranks": 2') == len(kept)
    assert len(read_results(copy)) == 4


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--commit", "def"), "commit=abc, but commit=def is wanted"),
        (("--iterations", "7"), r"'3'\], but bench=.*'7'\] is wanted"),
        (("--hidden", "128"), "hidden=64, but hidden=128 is wanted"),
    ],
)
def test_resume_does_not_mix_settings(copy: Path, arguments: tuple[str, str], told: str):
    before = (copy / "results.jsonl").read_bytes()
    with pytest.raises(UsageError, match=told):
        run_here(copy, *arguments, "--resume")
    assert (copy / "results.jsonl").read_bytes() == before


def test_a_run_that_is_stopped_ends_its_ranks_and_keeps_its_points(tmp_path: Path):
    folder = tmp_path / "run"
    process = start("run", *SWEEP, "--gpus", "1", "--out", folder, "--iterations", "200")
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "results.jsonl").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started = psutil.Process(process.pid).children(recursive=True)
    assert any("tools.bench.bench_layer" in child.cmdline() for child in started)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, printed
    assert "stopped; what was measured is kept" in printed
    assert "failed" not in printed
    assert not psutil.wait_procs(started, timeout=TIMEOUT_S)[1]
    assert (folder / "report.md").exists()


@pytest.mark.usefixtures("no_gpu")
def test_one_point_fails_and_the_next_job_goes_on_behind_it(copy: Path, monkeypatch, capsys):
    """A job that ends has failed at its first point without times, whatever ended it."""
    lines = (copy / "results.jsonl").read_text().splitlines(keepends=True)
    (copy / "results.jsonl").unlink()
    jobs = []

    def run_job(count: int, module: str, arguments: list[str], log: Path, limit_s: float) -> str:
        shapes = arguments[1 : arguments.index("--grads")]
        jobs.append((count, len(shapes)))
        for shape in shapes:
            records = [
                line
                for line in lines
                if json.loads(line)["shape"] == shape and json.loads(line)["num_ranks"] == count
            ]
            if not records:
                return "status 9"
            if (count, shape) == (2, "32x64x64x4x2"):
                raise StuckError("not done within 1 s")
            with (copy / "results.jsonl").open("a") as file:
                file.writelines(records)
        return ""

    monkeypatch.setattr(layer, "run_job", run_job)
    assert run_here(copy, "--resume") == 1
    assert jobs == [(1, 2), (2, 3), (2, 2)]
    printed = capsys.readouterr().out
    assert f"{FAILING}: failed: status 9" in printed
    assert "2 ranks, 32 tokens, 4 experts: failed: not done within 1 s; its ranks may" in printed
    assert "2 points measured, 3 missing" in (copy / "report.md").read_text()


@pytest.mark.usefixtures("no_gpu")
def test_a_job_without_the_times_that_are_compared_is_not_run_again(tmp_path: Path, capsys):
    folder = tmp_path / "run"
    assert run_here(folder, "--gpus", "1", "--no-baselines") == 1
    printed = capsys.readouterr().out
    assert printed.count("1 ranks, 3 points ...") == 1
    assert printed.count("failed: has not all times") == 3


def test_points_of_the_paper():
    sizes = {name: large for name, (large, _, _) in layer.SIZES.items()}
    points = points_of({"gpus": [1, 2, 4], **sizes})
    assert len(points) == len(set(points)) == 3 * 6 + 4
    for gpus in (1, 2, 4):
        tokens = [p.tokens for p in points if p.ranks == gpus and p.num_experts == 64]
        assert tokens == [1024, 2048, 4096, 8192, 16384, 32768]
    experts = [p.num_experts for p in points if p.ranks == 4 and p.tokens == 16384]
    assert experts == [8, 16, 32, 64, 128]
    assert {(p.hidden, p.intermediate, p.topk) for p in points} == {(2048, 2048, 2)}


def records_of(point: Point) -> dict[tuple[str, str], dict[str, Any]]:
    """Made-up records: T(N) = N / 2 ms for the layer, twice that for the baseline."""
    forward = point.ranks / 2
    common = {"floor_ms": 0.1, "imbalance": 1.0, "gpus": ["a GPU"]}

    def timing(ms: float) -> dict[str, Any]:
        return {"median_ms": ms, "min_ms": 0.9 * ms, "max_ms": 1.2 * ms, **common}

    return {
        ("fused", "gate"): {"relative_l2": {"out": 1e-3, "grad_x": 2e-3}},
        **{
            (name, what): timing(forward * scale * more)
            for name, scale in (("fused", 1), ("unfused", 2))
            for what, more in zip(PASSES, (1, 3), strict=True)
        },
        **(
            {("fused", "backward kernel"): {"median_ms": math.sqrt(point.ranks)}}
            if point.ranks > 1
            else {}
        ),
    }


def test_efficiency_and_throughput_by_hand():
    points = [Point(ranks, 1024, 64, 64, 8, 2) for ranks in (1, 2, 4)]
    alone = Point(4, 1024, 64, 64, 16, 2)
    measured = {point: records_of(point) for point in (*points, alone)}
    one, two, four = (metrics_of(measured, point) for point in points)
    assert one["forward/speedup"] == 2
    assert one["forward/fused_mtokens_per_s"] == pytest.approx(2.048)  # 1024 in half a ms
    assert four["forward+backward/fused_mtokens_per_s"] == pytest.approx(2.048 / 3)
    assert four["forward/unfused_spread"] == pytest.approx(0.3)
    assert four["error"] == 2e-3
    assert "kernel/backward_ms" not in one
    assert two["kernel/backward_ms"] == pytest.approx(math.sqrt(2))
    for found in (one, metrics_of(measured, alone)):
        assert not [name for name in found if "efficiency" in name or "exposed" in name]
    keys = [f"{what}/{name}" for what in PASSES for name in IMPLEMENTATIONS]
    for found, share in ((two, 1.0), (four, 0.5)):
        efficiencies = {name: value for name, value in found.items() if "efficiency" in name}
        assert efficiencies == {
            **{f"{key}_efficiency": share for key in keys},
            "kernel/backward_efficiency": pytest.approx(math.sqrt(share)),
        }
    # One rank takes half a ms, and the baseline twice, and both passes three times as long.
    exposed = {name: value for name, value in four.items() if "exposed" in name}
    assert exposed == {
        f"{key}_exposed_ms": ms for key, ms in zip(keys, (1.5, 3, 4.5, 9), strict=True)
    }


@pytest.mark.library
def test_memory_by_tokens_is_the_kernels_plan():
    few, many = (planned_mib(Point(2, tokens, 64, 128, 8, 2)) for tokens in (1024, 4096))
    assert few["planned/tokens_mib"] == 1024 * 64 * 2 / 2**20
    assert many["planned/tokens_mib"] == 4 * few["planned/tokens_mib"]
    for name in ("planned/symmetric_mib", "planned/kept_mib"):
        assert few[name] < many[name]


def test_without_the_library_memory_is_left_out(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("FLASHMOE_LIBRARY", str(tmp_path / "none.so"))
    bindings.load.cache_clear()
    bindings.function.cache_clear()
    assert planned_mib(Point(2, 1024, 64, 128, 8, 2)) == {}


def test_progress_estimates_by_the_parts_before(monkeypatch, capsys):
    clock = iter([100.0, 110.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    parts = progress.Progress(2, 6, "points")
    parts.say(2)  # nothing is new
    parts.say(3)
    parts.say(5)
    assert capsys.readouterr().out.splitlines() == [
        "3 of 6 points, 10 s, about 30 s left",
        "5 of 6 points, 30 s, about 10 s left",
    ]


def test_points_of_a_running_job_are_counted(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PAUSE_S", 0.01)
    seen = threading.Event()
    counts = iter([1, 1])

    def count() -> int:
        found = next(counts, 2)
        if found == 2:
            seen.set()
        return found

    with progress.Progress(0, 2, "points").watching(count):
        assert seen.wait(TIMEOUT_S)
    said = re.findall(r"^(\d) of 2 points", capsys.readouterr().out, re.MULTILINE)
    assert said == ["1", "2"]


def small_sweep(name: str) -> Sweep:
    return Sweep(name, {}, "GPUs", [{"GPUs": 1, "time": 1.0}], ["ranks"], [[1]], None, "", False)


def test_without_wandb_there_is_one_warning(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        log_sweep(tmp_path, small_sweep("a"))
    (record,) = caplog.records
    assert "wandb is not installed" in record.getMessage()
    assert str(tmp_path) in record.getMessage()


def test_an_unreachable_server_costs_one_warning_and_no_data(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb_log, "SERVER_TIMEOUT_S", 2.0)
    with caplog.at_level(logging.WARNING, "flashmoe.weak_scaling"):
        log_sweep(tmp_path, small_sweep("a"))
    (record,) = [r for r in caplog.records if r.name == "flashmoe.weak_scaling"]
    assert "wandb cannot be used online" in record.getMessage()
    (run,) = offline_runs(tmp_path / "wandb")
    assert (run.name, run.history[0]["time"], run.exit_code) == ("a", 1.0, 0)


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "x"}, "online"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "disabled"),
        ({"WANDB_MODE": "online"}, "online"),
    ],
)
def test_wandb_follows_its_own_variables(monkeypatch, variables: dict[str, str], mode: str):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wandb_log.wandb_mode() == mode


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys):
    with pytest.raises(UsageError, match="holds no run"):
        write_report(tmp_path, {})
    (tmp_path / "settings.json").write_text('{"gpus": [1]}')
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run of this tool: KeyError('base_tokens')" in capsys.readouterr().err


def test_a_broken_line_is_named(copy: Path):
    results = copy / "results.jsonl"
    at = len(results.read_text().splitlines()) + 1
    with results.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(UsageError, match=rf"results\.jsonl:{at} cannot be read"):
        read_results(copy)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "arguments", [("--no-such-option",), ("--topk", "-1"), ("--topk", "0"), ("--base-tokens", "0")]
)
def test_what_the_bench_cannot_read_is_told_at_once(tmp_path: Path, arguments, capsys):
    with pytest.raises(SystemExit):
        run_here(tmp_path / "run", *arguments)
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--zipf", "0", "0.5"),
        ("--locality", "0.5"),
        ("--spare-slots", "2"),
        ("--grads", "bf16"),
        ("--backend", "scheduled"),
    ],
)
def test_points_that_would_not_be_as_reported_are_refused(tmp_path: Path, arguments):
    with pytest.raises(UsageError, match=f"{arguments[0][2:].replace('-', '_')}=.*: every point"):
        run_here(tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


def test_numbers_of_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert counts_of(None) == [1, 2, 4]
    assert counts_of([6, 3, 3]) == [3, 6]
    for asked, told in ((8, "--gpus 8: this machine has 6"), (0, "--gpus 0: wanted at least 1")):
        with pytest.raises(UsageError, match=told):
            counts_of([asked])
