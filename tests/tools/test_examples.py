"""The two examples of weak scaling, from one command each, as a user without a GPU runs them."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.tools.offline_wandb import offline_runs

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def call(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    # The environment of the tests has everything: nothing is to be set up for the script.
    environment = {**kept, "CUDA_VISIBLE_DEVICES": "", "FLASHMOE_PYTHON": sys.executable}
    return subprocess.run(
        ["bash", f"examples/{script}.sh", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
def test_weak_scaling_of_training(framework: str, tmp_path: Path):
    pytest.importorskip("megatron.core" if framework == "megatron" else "deepspeed")
    folder = tmp_path / "run"
    ran = call(f"weak_scaling_{framework}", "--out", str(folder), "--train-iters", "6")
    logs = [log.read_text()[-3000:] for log in folder.glob("*.log")]
    assert ran.returncode == 0, ran.stdout + "".join(logs)
    stock = "alltoall" if framework == "megatron" else "deepspeed"
    reports = {count: json.loads((folder / f"ranks{count}.json").read_text()) for count in (1, 2)}
    for count, report in reports.items():
        assert report["ranks"] == count
        assert report["tokens_per_rank"] == 64 * 2  # the same on any number of ranks
        assert list(report["milliseconds"]) == ["flashmoe", stock]
        for times in report["milliseconds"].values():
            assert len(times) == 6
            assert all(time > 0 for time in times)
        ours, theirs = report["losses"]["flashmoe"], report["losses"][stock]
        assert ours == pytest.approx(theirs, abs=1e-4)  # the same training
        assert len(set(ours)) == 6
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \|", (folder / "report.md").read_text(), re.M)
    assert [int(count) for count, _ in rows] == [1, 2]
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "scaling.svg").read_text()
    runs = {run.name: run for run in offline_runs(folder / "wandb")}
    assert runs.keys() == {"ranks1", "ranks2"}
    assert {run.group for run in runs.values()} == {f"weak-scaling-{framework}-run"}
    for count, report in reports.items():
        run = runs[f"ranks{count}"]
        (metrics,) = run.history
        later = sorted(report["milliseconds"]["flashmoe"][2:])
        iteration_ms = (later[1] + later[2]) / 2  # the median of four
        assert metrics["flashmoe/iteration_ms"] == pytest.approx(iteration_ms)
        rate = count * report["tokens_per_rank"] / (iteration_ms / 1e3)
        assert metrics["flashmoe/tokens_per_s"] == pytest.approx(rate)
        assert run.config["num_experts"] == 8
    again = call(f"weak_scaling_{framework}", "--out", str(folder))
    assert again.returncode == 2
    assert "exists" in again.stdout


@pytest.fixture
def weak_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, whose training writes its process's number and hangs."""
    path = ROOT / "examples" / "weak_scaling.py"
    spec = importlib.util.spec_from_file_location("weak_scaling_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EXAMPLES", tmp_path)
    hangs = f"import os, time; open({str(tmp_path / 'rank')!r}, 'w').write(str(os.getpid()))"
    (tmp_path / "weak_scaling_megatron.py").write_text(f"{hangs}; time.sleep({TIMEOUT_S})\n")
    arguments = ("weak_scaling.py", "megatron", "--gpus", "1", "2", "--out", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "argv", [*arguments, "--timeout", "15"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return module


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_ranks_of_a_training_that_hangs_are_ended(weak_scaling, tmp_path: Path):
    sys.argv.remove("2")
    assert weak_scaling.main() == 1
    report = (tmp_path / "run" / "report.md").read_text()
    assert "Failed on 1: not done within 15 s" in report
    assert has_ended(int((tmp_path / "rank").read_text()))


def test_a_sweep_stops_at_ranks_that_cannot_be_ended(weak_scaling, tmp_path: Path, capsys):
    weak_scaling.PATIENCE_S = 0  # torchrun is killed before it can end its rank
    try:
        assert weak_scaling.main() == 1
        assert "1 ranks ...\n  failed: not done within 15 s" in (printed := capsys.readouterr().out)
        assert "no more are started" in printed
        assert "2 ranks" not in printed
    finally:
        pid = int((tmp_path / "rank").read_text())
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_training_that_fails_is_told(tmp_path: Path):
    folder = tmp_path / "run"
    # 65 is no multiple of 64, which the layer refuses.
    arguments = ("--gpus", "1", "--moe-ffn-hidden-size", "65")
    ran = call("weak_scaling_megatron", "--out", str(folder), *arguments)
    assert ran.returncode == 1
    assert "failed: status 1" in ran.stdout
    assert "Failed on 1: status 1" in (folder / "report.md").read_text()
    assert "65" in (folder / "ranks1.log").read_text()
    (run,) = offline_runs(folder / "wandb")
    assert run.exit_code == 1
    assert run.history == [{**run.history[0], "failed": 1}]
