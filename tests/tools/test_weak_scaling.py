"""The experiments, small, on processors: from the command to tables, figures and wandb."""

import csv
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.tools.offline_wandb import offline_runs
from tools.weak_scaling import wandb_log
from tools.weak_scaling.jobs import Begun, Limits, Outcome, run_points, signal_told_of
from tools.weak_scaling.points import KERNELS, Settings, paper_settings, small_settings
from tools.weak_scaling.report import latency_table
from tools.weak_scaling.results import FolderError, Results
from tools.weak_scaling.wandb_log import ExperimentLog, metrics_of

ROOT = Path(__file__).parents[2]
# 3 experts do not divide among 2 ranks: one of the 5 points fails, the first on 2 ranks.
SWEEP = [
    *("--device", "cpu", "--gpus", "1", "2", "--tokens", "32", "--experts", "3"),
    *("--base-tokens", "64", "--base-experts", "4", "--expert-tokens", "32"),
    *("--hidden", "64", "--intermediate", "64", "--iterations", "3", "--commit", "abc"),
]
FAILING = "gpus2-tokens32-experts3-hidden64-ffn64-top2"
TIMEOUT_S = 200
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tools.weak_scaling", *map(str, arguments)]


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("sweep") / "run"
    return folder, call("run", *SWEEP, "--out", folder)


def test_a_failed_point_is_recorded_and_the_others_are_measured(sweep):
    folder, ran = sweep
    assert ran.returncode == 1, ran.stdout
    rows = {row["key"]: row for row in lines_of(folder)}
    assert len(rows) == 5
    failed = rows.pop(FAILING)
    assert failed["status"] == "failed"
    assert "ConfigError" in failed["reason"]
    assert "3" in failed["reason"]
    assert f"failed: {failed['reason']}" in ran.stdout
    for row in rows.values():
        assert row["status"] == "ok"
        assert row["machine"]["torch"]
        for implementation in ("fused", "unfused"):
            assert 0 < max(row["result"]["errors"][implementation].values()) < 6e-3
            for which in ("forward", "forward+backward"):
                times = row["result"]["times"][implementation][which]
                assert 0 < times["min_ms"] <= times["median_ms"] <= times["max_ms"]


def test_the_report_holds_tables_and_figures(sweep):
    folder, _ = sweep
    rows = {row["key"]: row for row in lines_of(folder) if row["status"] == "ok"}
    with (folder / "latency.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 4
    for line in table:
        key = "gpus{}-tokens{}-experts{}-hidden64-ffn64-top2".format(
            *(line[title] for title in ("GPUs", "tokens per GPU", "experts"))
        )
        times = rows[key]["result"]["times"]
        forward = times["fused"]["forward"]["median_ms"]
        assert float(line["forward fused, ms"]) == pytest.approx(forward, rel=1e-3)
        if line["GPUs"] == "1":
            assert line["forward fused Oe = T(2)/T(N)"] == ""
        else:
            assert line["forward fused Oe = T(2)/T(N)"] == "1.000"
    report = (folder / "report.md").read_text()
    assert "4 points measured, 1 failed, 0 missing" in report
    assert "ConfigError" in report
    for name in ("latency_over_tokens", "throughput", "overlap_efficiency"):
        assert f"({name}.png)" in report
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{name}.svg").read_text()


def test_wandb_has_every_point_in_one_group(sweep):
    folder, _ = sweep
    rows = {row["key"]: row for row in lines_of(folder)}
    runs = {run.name: run for run in offline_runs(folder / "wandb")}
    assert runs.keys() == rows.keys()
    assert {run.group for run in runs.values()} == {"weak-scaling-run"}
    assert {run.project for run in runs.values()} == {"flashmoe-weak-scaling"}
    for key, run in runs.items():
        row = rows[key]
        assert {name: run.config[name] for name in row["point"]} == row["point"]
        assert run.config["settings"]["hidden"] == 64
        (metrics,) = run.history
        if key == FAILING:
            assert metrics["failed"] == 1
            assert run.config["reason"] == row["reason"]
            assert run.exit_code == 1
            continue
        times = row["result"]["times"]
        for name in ("fused", "unfused"):
            median = times[name]["forward"]["median_ms"]
            assert metrics[f"forward/{name}_ms"] == median
            tokens = row["point"]["tokens"] * row["point"]["num_gpus"]
            rate = metrics[f"forward/{name}_mtokens_per_s"]
            assert rate * 1e6 == pytest.approx(tokens / (median / 1e3))
        assert run.exit_code == 0


def test_an_existing_folder_is_refused(sweep):
    folder, _ = sweep
    before = (folder / "results.jsonl").read_bytes()
    ran = call("run", *SWEEP, "--out", folder)
    assert ran.returncode == 2
    assert "exists" in ran.stdout
    assert "--resume" in ran.stdout
    assert (folder / "results.jsonl").read_bytes() == before


def test_resume_measures_only_what_is_missing(sweep, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(sweep[0], folder, ignore=shutil.ignore_patterns("wandb", "jobs"))
    kept = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    lost = json.loads(kept.pop(0))["key"]
    (folder / "results.jsonl").write_text("".join(kept) + '{"key": "half a li')
    ran = call("run", *SWEEP, "--out", folder, "--resume")
    assert ran.returncode == 1, ran.stdout  # the failed point is still one
    assert "1 points to measure, 4 are there" in ran.stdout
    rows = lines_of(folder)
    assert [row["key"] for row in rows] == [*(json.loads(line)["key"] for line in kept), lost]
    assert len(offline_runs(folder / "wandb")) == 1


def test_resume_does_not_mix_settings(sweep):
    folder, _ = sweep
    ran = call("run", *SWEEP, "--iterations", 7, "--out", folder, "--resume")
    assert ran.returncode == 2
    assert "iterations=3" in ran.stdout
    assert "iterations=7" in ran.stdout


def test_resume_does_not_mix_commits(sweep):
    folder, _ = sweep
    before = (folder / "results.jsonl").read_bytes()
    ran = call("run", *SWEEP, "--commit", "def", "--out", folder, "--resume")
    assert ran.returncode == 2
    assert "has points of commit abc, but this is def" in ran.stdout
    assert (folder / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize("machine", [{"commit": "unknown"}, {"gpus": []}, {}])
def test_resume_goes_on_where_no_commit_is_known(tmp_path: Path, machine: dict[str, Any]):
    settings = small_settings((1,))
    results = Results.create(tmp_path / "run", settings)
    results.add(Outcome(settings.points()[0], machine, reason="none"))
    assert Results.resume(results.folder, settings, "unknown").rows == results.rows
    if machine:
        with pytest.raises(FolderError, match="commit unknown, but this is abc"):
            Results.resume(results.folder, settings, "abc")


def test_a_run_that_dies_keeps_its_points(tmp_path: Path):
    folder = tmp_path / "run"
    arguments = [*SWEEP, "--gpus", "1", "--experts", "4", "--out", folder]
    process = subprocess.Popen(
        command("run", *arguments), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    )

    def has_a_point() -> bool:
        assert process.poll() is None
        return (folder / "results.jsonl").exists()

    wait_until(has_a_point)
    process.kill()
    process.wait()
    kept = (folder / "results.jsonl").read_text()
    ran = call("run", *arguments, "--resume")
    assert ran.returncode == 0, ran.stdout
    assert (folder / "results.jsonl").read_text().startswith(kept)
    assert len(lines_of(folder)) == 2
    assert "2 points measured, 0 failed, 0 missing" in (folder / "report.md").read_text()


def slow_settings() -> Settings:
    """Points that take seconds, so that their processes can be caught at work."""
    return replace(
        small_settings((2,)),
        tokens=(2048, 2049, 32),
        experts=(),
        base_tokens=32,
        hidden=256,
        intermediate=256,
        iterations=10,
    )


def worker_of(logs: Path, rank: int) -> int:
    """The process of a rank of the newest job; rank 0 may have begun before this one tells."""
    newest = max(logs.glob("gpus2-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    told = newest / f"events-rank{rank}.jsonl"
    wait_until(lambda: told.exists() and "\n" in told.read_text())
    return json.loads(told.read_text().splitlines()[0])["pid"]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ranks_that_are_killed_or_hang_fail_their_point_alone(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = slow_settings()
    points = sorted(settings.points(), reverse=True)  # 2049, 2048, 32 tokens
    outcomes = []
    pids = []
    for happening in run_points(points, settings, tmp_path, Limits(TIMEOUT_S, 10)):
        if isinstance(happening, Outcome):
            outcomes.append(happening)
        elif isinstance(happening, Begun) and happening.point.tokens > 32:
            pids.append(worker_of(tmp_path, 1))
            is_first = happening.point.tokens == 2049
            os.kill(pids[-1], signal.SIGKILL if is_first else signal.SIGSTOP)
    killed, hung, fine = outcomes
    assert [outcome.point for outcome in outcomes] == points
    assert killed.result is None
    assert hung.result is None
    # Either torchrun tells of the signal, or the other rank of its lost peer.
    assert "SIGKILL" in killed.reason or "rank 0" in killed.reason
    assert hung.reason == "no result within 10 s"
    assert fine.result is not None
    assert all(map(has_ended, pids))


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ((), None),
        (((15, "SIGTERM", 7),), "Signal 15 (SIGTERM) received by PID 7"),
        (((15, "SIGTERM", 7), (9, "SIGKILL", 8)), "Signal 9 (SIGKILL) received by PID 8"),
        (
            ((15, "SIGTERM", 5), (9, "SIGKILL", 6), (11, "SIGSEGV", 7)),
            "Signal 11 (SIGSEGV) received by PID 7",
        ),
    ],
)
def test_the_signal_of_the_rank_that_failed_is_told(told, wanted: str | None):
    """Whatever torchrun lists first: it ends the other ranks with signals too."""
    failures = {
        rank: ProcessFailure(rank, pid, -number, "") for rank, (number, _, pid) in enumerate(told)
    }
    log = ChildFailedError("worker", failures).format_msg() if failures else "nothing"
    assert all(f"({name})" in log for _, name, _ in told)
    assert signal_told_of(log) == wanted


def test_a_job_that_cannot_start_fails_its_points(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    settings = small_settings((1,))
    outcomes = list(run_points(settings.points(), settings, tmp_path, Limits()))
    assert [outcome.point for outcome in outcomes] == settings.points()
    assert all("did not start" in outcome.reason for outcome in outcomes)


def test_points_of_the_paper():
    points = paper_settings((1, 2, 4)).points()
    assert len(points) == len(set(points)) == 3 * 6 + 4
    for gpus in (1, 2, 4):
        tokens = [p.tokens for p in points if p.num_gpus == gpus and p.num_experts == 64]
        assert tokens == [1024, 2048, 4096, 8192, 16384, 32768]
    experts = [p.num_experts for p in points if p.num_gpus == 4 and p.tokens == 16384]
    assert experts == [8, 16, 32, 64, 128]
    assert {(p.hidden, p.intermediate, p.topk) for p in points} == {(2048, 2048, 2)}


def row_of(settings: Settings, factor: float = 1.0) -> list[Outcome]:
    """Made-up results: T(N) = factor * N for the kernel and twice that for the baseline."""

    def timing(ms: float) -> dict[str, float]:
        return {"median_ms": ms, "min_ms": ms, "max_ms": ms, "p90_ms": ms, "iterations": 1}

    outcomes = []
    for point in settings.points():
        times = {
            name: {
                "forward": timing(scale * factor * point.num_gpus),
                "forward+backward": timing(3 * scale * factor * point.num_gpus),
            }
            for name, scale in (("fused", 1.0), ("unfused", 2.0))
        }
        memory = {"tokens": 2**20, "rows_expected": 2**21, "rows_worst_case": 2**22}
        result = {
            "imbalance": 1.0,
            "times": times,
            "errors": {"fused": {"out": 1e-3}, "unfused": {"out": 1e-3}},
            "memory": {**memory, "fused": {}, "unfused": {}},
        }
        if point.num_gpus != 1:
            result["kernels"] = {
                direction: timing(factor * math.sqrt(point.num_gpus)) for direction in KERNELS
            }
        outcomes.append(Outcome(point, {"gpus": []}, result))
    return outcomes


def test_overlap_efficiency_and_throughput_by_hand(tmp_path: Path):
    settings = small_settings((1, 2, 4))
    results = Results.create(tmp_path / "run", settings)
    for outcome in row_of(settings, factor=0.5):
        results.add(outcome)
    titles, rows = latency_table(results.measured())
    for row in rows:
        line = dict(zip(titles, row, strict=True))
        gpus, tokens = int(line["GPUs"]), int(line["tokens per GPU"])
        # T(N) = N / 2 ms, so that Oe = T(2) / T(N) = 2 / N and N * T tokens take N / 2 ms.
        # The sweep over experts is on 4 alone, but for what it shares with the one over tokens.
        is_alone = int(line["experts"]) != settings.base_experts
        wanted = {1: "", 2: "1.000", 4: "" if is_alone else "0.500"}[gpus]
        assert line["forward fused Oe = T(2)/T(N)"] == wanted
        assert line["forward unfused / fused"] == "2.00"
        assert float(line["forward fused, Mtokens/s"]) == pytest.approx(2 * tokens / 1e3, rel=1e-2)
        # The kernels' are made up to take sqrt(N) / 2 ms, and to be missing on one GPU.
        kernel = {1: "", 2: "0.7071", 4: "1"}[gpus]
        wanted = {1: "", 2: "1.000", 4: "" if is_alone else "0.707"}[gpus]
        for direction in KERNELS:
            assert line[f"{direction} kernel, ms"] == kernel
            assert line[f"{direction} kernel Oe = T(2)/T(N)"] == wanted
    logged = metrics_of(results.rows[settings.points()[-1].key])
    assert logged["kernel/backward_ms"] == 1.0


def test_without_wandb_there_is_one_warning(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = small_settings((1, 2))
    results = Results.create(tmp_path / "run", settings)
    log = ExperimentLog(results.folder, settings)
    with caplog.at_level(logging.WARNING):
        for outcome in row_of(settings)[:2]:
            log.add(results.add(outcome))
    (record,) = caplog.records
    assert "wandb is not installed" in record.getMessage()
    assert str(results.folder) in record.getMessage()
    assert len(lines_of(results.folder)) == 2


def test_an_unreachable_server_costs_one_warning_and_no_data(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb_log, "SERVER_TIMEOUT_S", 2.0)
    settings = small_settings((1, 2))
    results = Results.create(tmp_path / "run", settings)
    log = ExperimentLog(results.folder, settings)
    outcomes = row_of(settings)[:2]
    with caplog.at_level(logging.WARNING, "flashmoe.weak_scaling"):
        for outcome in outcomes:
            log.add(results.add(outcome))
    (record,) = [r for r in caplog.records if r.name == "flashmoe.weak_scaling"]
    assert "server" in record.getMessage()
    wanted = {outcome.point.key for outcome in outcomes}
    deadline = time.monotonic() + 60
    while True:  # wandb's own process writes them, late on a busy machine
        names = {run.name for run in offline_runs(results.folder / "wandb")}
        if names == wanted or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert names == wanted


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


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(FolderError, match=r"settings\.json"):
        Results(tmp_path)
    (tmp_path / "settings.json").write_text('{"device": "cpu"}')
    with pytest.raises(FolderError, match="cannot be read"):
        Results(tmp_path)


def test_a_broken_line_is_named(tmp_path: Path):
    results = Results.create(tmp_path / "run", small_settings((1,)))
    (results.folder / "results.jsonl").write_text('{"key": "a", "status": "ok"}\nnonsense\n')
    with pytest.raises(FolderError, match=r"results\.jsonl:2"):
        Results(results.folder)


def test_without_a_gpu_the_way_out_is_named(tmp_path: Path):
    ran = call("run", "--out", tmp_path / "run")
    assert ran.returncode == 2
    assert "--device cpu" in ran.stdout
    assert not (tmp_path / "run").exists()
