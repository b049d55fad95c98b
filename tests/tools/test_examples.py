"""Examples from one command each, as a user without a GPU runs them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ending.stand_in import FORKED_FROM
from tests.tools.offline_wandb import offline_runs
from tools import gpu_check
from tools.weak_scaling import training

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def call(script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    # The environment of the tests has everything: nothing is to be set up for the script.
    environment = {**kept, "CUDA_VISIBLE_DEVICES": "", "FLASHMOE_PYTHON": sys.executable, **more}
    return subprocess.run(
        ["bash", f"examples/{script}.sh", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_training_in_plain_pytorch():
    ran = call("train_pytorch", "--train-iters", "20")
    assert ran.returncode == 0, ran.stdout
    assert "2 ranks on processors, 2 share the experts" in ran.stdout
    lines = re.findall(r"iteration +(\d+)/20: loss ([\d.]+), [\d,]+ tokens/s, \d+% of", ran.stdout)
    assert [int(iteration) for iteration, _ in lines] == [10, 20]
    fell = r"^loss of flashmoe: ([\d.]+) at the first iteration, ([\d.]+) at the end$"
    first, last = map(float, re.findall(fell, ran.stdout, re.M)[0])
    assert last < first - 1


def test_several_hosts_want_a_place_to_meet():
    ran = call("train_pytorch", "--help", FLASHMOE_HOSTS="2")
    assert ran.returncode == 2
    assert "FLASHMOE_HOSTS=2: wanted FLASHMOE_RENDEZVOUS=host:port" in ran.stdout


@pytest.mark.parametrize(
    ("framework", "arguments", "stock", "tokens"),
    [
        ("megatron", ("--train-iters", "6"), "alltoall", 64 * 2),
        ("deepspeed", ("--steps", "4", "--warmup", "2"), "DeepSpeed", 256),
    ],
)
def test_weak_scaling_of_training(
    framework: str,
    arguments: tuple[str, ...],
    stock: str,
    tokens: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
):
    pytest.importorskip("megatron.core" if framework == "megatron" else "deepspeed")
    folder = tmp_path / "run"
    # Megatron imports wandb. If that is imported before the fork, wandb's run lacks rows.
    imported = "with_torch" if framework == "megatron" else "with_transformers"
    more = {FORKED_FROM: str(request.getfixturevalue(imported))}
    ran = call(f"weak_scaling_{framework}", "--out", str(folder), *arguments, **more)
    logs = [log.read_text()[-3000:] for log in folder.glob("*.log")]
    assert ran.returncode == 0, ran.stdout + "".join(logs)
    records = {}
    for count in (1, 2):
        lines = (folder / f"ranks{count}.jsonl").read_text().splitlines()
        records[count] = {record["run"]: record for record in map(json.loads, lines)}
        assert records[count].keys() == {"flashmoe", stock}
        for record in records[count].values():
            assert record["num_ranks"] == count
            assert record["tokens_per_rank"] == tokens  # the same on any number of ranks
            assert len(record["iteration_ms"]) == 6
            assert all(time > 0 for time in record["iteration_ms"])
        ours, theirs = (records[count][name]["losses"] for name in ("flashmoe", stock))
        assert ours == pytest.approx(theirs, abs=1e-4)  # the same training
        assert len(set(ours)) == 6
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \|", (folder / "report.md").read_text(), re.M)
    assert [int(count) for count, _ in rows] == [1, 2]
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "scaling.svg").read_text()
    (run,) = offline_runs(folder / "wandb")
    assert run.name == f"weak-scaling-{framework}-run"
    assert (run.exit_code, run.config["num_experts"], run.config["is_reference"]) == (0, 8, True)
    *curves, shown = run.history
    ours, taken = "flashmoe (reference)", {}
    for count, metrics in zip(records, curves, strict=True):
        assert metrics["processes"] == count
        later = sorted(records[count]["flashmoe"]["iteration_ms"][2:])
        taken[count] = (later[1] + later[2]) / 2  # the median of four
        assert metrics[f"{ours}/iteration_ms"] == pytest.approx(taken[count])
        rate = count * tokens / (taken[count] / 1e3)
        assert metrics[f"{ours}/tokens_per_s"] == pytest.approx(rate)
    assert curves[1][f"{ours}/efficiency"] == curves[1][f"{stock}/efficiency"] == 1
    assert curves[1][f"{ours}/exposed_ms"] == pytest.approx(taken[2] - taken[1])
    table = json.loads(run.file("points").read_text())
    assert table["columns"][0] == "ranks"
    assert [row[0] for row in table["data"]] == [1, 2]
    assert run.file("scaling").read_bytes() == (folder / "scaling.png").read_bytes()
    assert "REFERENCE on processors, no time of the kernel" in (folder / "report.md").read_text()
    assert re.search(r"^1 of 2 numbers of ranks, \d+ s, about \d+ s left$", ran.stdout, re.M)
    again = call(f"weak_scaling_{framework}", "--out", str(folder), **more)
    assert again.returncode == 2
    assert "exists" in again.stdout


def test_a_job_writes_below_the_folder_of_its_caller(tmp_path: Path, monkeypatch):
    given: list[str] = []
    monkeypatch.setattr(training, "run_job", lambda *arguments: given.extend(arguments[2]) or "no")
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    options, _ = training.parse(["megatron", "--out", str(folder)])
    assert training.train_on(1, options, [], folder) == {"reason": "no"}
    for flag in ("--out", "--output"):  # jobs run in the checkout
        assert Path(given[given.index(flag) + 1]).parent == tmp_path / "run"


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_trainings_that_fail_or_hang_are_told(tmp_path: Path, capsys, monkeypatch):
    """Ranks that run on would disturb whatever is started next."""
    package = tmp_path / "stand-in" / "tools" / "bench" / "bench_training"
    package.mkdir(parents=True)
    for each in (package.parent.parent, package.parent, package):
        (each / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, pathlib, signal, time\n"
        "if os.environ['WORLD_SIZE'] == '1':\n"
        "    raise ValueError('intermediate=65: wanted a multiple of 64')\n"
        "if os.environ['RANK'] == '1':  # which torchrun alone can end, 30 s later\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid()))\n"
        f"time.sleep({TIMEOUT_S})\n"
    )
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path / "stand-in")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "run"
    arguments = ["megatron", "--gpus", "1", "2", "3", "--out", str(folder), "--timeout", "30"]
    assert training.main(arguments) == 1
    report = (folder / "report.md").read_text()
    error = "ValueError: intermediate=65: wanted a multiple of 64"
    assert f"Failed on 1: status 1, {error}; see" in report
    assert error in (folder / "ranks1.log").read_text()
    assert "Failed on 2: not done within 30 s" in report
    printed = capsys.readouterr().out
    assert "  failed: status 1" in printed
    assert "no more are started" in printed
    assert "3 ranks" not in printed
    assert all(has_ended(int((tmp_path / rank).read_text())) for rank in "01")
    (run,) = offline_runs(folder / "wandb")
    (shown,) = run.history  # without curves and a figure
    assert (run.exit_code, shown["failed"]) == (1, 1)
    table = json.loads(run.file("points").read_text())
    assert table["columns"] == ["ranks", "failed"]
    assert [row[0] for row in table["data"]] == [1, 2]
    assert error in table["data"][0][1]
