"""The proof that losses in FP8 are those of alltoall; a script stands in for Megatron's."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools.bench.cards.kept import RESULTS
from tools.bench.cards.picture import LABEL
from tools.bench.common import read_record
from tools.bench.fp8_losses import __main__ as fp8_losses
from tools.bench.fp8_losses.begun import FirstWeights, sums_of
from tools.bench.fp8_losses.judge import are_the_same, judge, means_of, table
from tools.bench.fp8_losses.picture import COLORS, MEAN_OF, means
from tools.bench.fp8_losses.runs import END_OF_FILE, RUNS, THEIRS, write_text

KEPT = RESULTS / "2026-11-29-fp8-losses-h200-1x.jsonl"
WEIGHTS = {"elements": 10, "sum": 2.5, "squares": 7.0}


def records(**ends: float) -> dict[str, dict[str, Any]]:
    """Runs of 20 iterations, whose last two losses are ``ends`` of the run's, or 1."""
    found = {}
    for run in RUNS:
        end = ends.get(run.name.replace("-", "_"), 1.0)
        losses = [5.0 - i / 10 for i in range(18)] + [end, end]
        known = {"losses": losses, "wanted": 20, "attention": ["cudnn"], "weights": dict(WEIGHTS)}
        found[run.name] = {"run": run.name, **known}
    return found


@pytest.mark.parametrize(
    ("again", "ours", "is_right"),
    [(1.0, 1.0024, True), (1.0, 1.0026, False), (0.99, 0.991, True), (0.99, 1.011, False)],
)
def test_the_last_tenth_is_within_the_band(again: float, ours: float, is_right: bool) -> None:
    """Two runs in bfloat16 tell the band, which is 0.25 % at least."""
    found = records(alltoall_bf16_again=again, flashmoe_fp8_dgrad=ours)
    wrong = judge(found)
    assert bool(wrong) == (not is_right)
    assert all(each.startswith("the last tenth of flashmoe-fp8-dgrad is") for each in wrong)


def test_ours_is_compared_with_alltoall_in_fp8() -> None:
    assert judge(records(alltoall_fp8=1.01, flashmoe_fp8=1.01, flashmoe_fp8_dgrad=1.01)) == []
    assert len(judge(records(alltoall_fp8=1.01))) == 2
    assert judge(records(alltoall_fp8_again=1.1)) == []
    lines = table(records(flashmoe_fp8=1.002))
    assert "| flashmoe-fp8 | alltoall-fp8 | +0.200% |" in lines
    assert lines[-1] == "Allowed: 0.250%."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention": ["cudnn", "unfused"]}, "wanted fused attention"),
        ({"attention": []}, "wanted fused attention"),
        ({"weights": {**WEIGHTS, "sum": 2.6}}, "begins with other weights"),
        ({"weights": None}, "begins with other weights"),
        ({"losses": [5.0] * 19}, "has 19 losses, wanted 20"),
        ({"losses": [5.0] * 19 + [math.nan]}, "wanted 20 finite ones"),
        ({"losses": [5.1] + [5.0] * 19}, "begins with a loss 2.0e-02 apart"),
        ({"losses": []}, "has 0 losses"),
    ],
)
def test_runs_that_cannot_be_compared(change: dict[str, Any], said: str) -> None:
    for name in ("flashmoe-fp8", "alltoall-bf16-again"):
        found = records()
        found[name] |= change
        wrong = judge(found)
        assert len(wrong) == 1
        assert wrong[0].startswith(name)
        assert said in wrong[0]
        assert name in "\n".join(table(found))


def test_a_run_that_is_missing_is_said() -> None:
    found = records()
    del found[THEIRS.name]
    assert judge(found) == [f"{THEIRS.name} has not run"]
    assert "Allowed" not in "\n".join(table(found))


def test_the_second_run_in_fp8_may_be_missing() -> None:
    found = records(flashmoe_fp8=1.1)
    del found["alltoall-fp8-again"]
    wrong = judge(found)
    assert len(wrong) == 1
    assert wrong[0].startswith("the last tenth of flashmoe-fp8 is")
    assert table(found)[-1] == "Allowed: 0.250%."


def test_the_kept_record_holds() -> None:
    """The record that the page on FP8 rests on."""
    assert judge({line["run"]: line for line in read_record(KEPT)}) == []


def test_first_losses_are_those_of_one_precision() -> None:
    """A model has other losses in FP8 than in bfloat16 from the first iteration on."""
    found = records()
    for name, record in found.items():
        record["losses"][0] += 0.02 * ("fp8" in name)
    assert judge(found) == []


def test_means_are_of_tenths() -> None:
    assert means_of(list(range(20))) == [2 * i + 0.5 for i in range(10)]
    assert means_of([3.0]) == [3.0]


def test_weights_are_told_apart(tmp_path: Path) -> None:
    """Sums do not see how tensors are split and ordered, but a tensor that is another."""
    weights = torch.linspace(-1, 2, 600, dtype=torch.bfloat16).view(6, 100)
    split = [*weights[3:].unbind(), weights[:3]]
    assert are_the_same(sums_of([weights]), sums_of(split))
    assert not are_the_same(sums_of([weights]), sums_of([weights + 0.01]))
    assert not are_the_same(sums_of([weights]), sums_of([*split, weights[:0], weights[:1]]))
    model = torch.nn.Linear(3, 2)
    watch = FirstWeights(tmp_path / "seen.json")
    watch.seen["attention"] = ["cudnn"]
    step = watch.train_step(lambda *_: model.weight.data.add_(1))
    step(None, None, [model])
    first = json.loads((tmp_path / "seen.json").read_text())["weights"]
    assert first["elements"] == 8
    now = sum(float(each.detach().double().sum()) for each in model.parameters())
    assert first["sum"] == pytest.approx(now - model.weight.numel(), abs=1e-5)
    step(None, None, [model])
    assert watch.seen["weights"] == first


def test_the_text_is_that_of_pythons_library(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    write_text(tmp_path / "data" / "text", 1)
    dataset = IndexedDataset(str(tmp_path / "data" / "text"))
    source = Path(os.__file__).with_name("abc.py").read_bytes()
    documents = [bytes(each[:-1].astype(np.uint8)) for each in dataset[:]]
    assert source in documents
    assert {int(each[-1]) for each in dataset[:]} == {END_OF_FILE}


SCRIPT = """
import json, sys
seen, arguments = sys.argv[1], sys.argv[2:]
flag = lambda name: arguments[arguments.index(name) + 1]
is_fp8 = "--fp8-format" in arguments
assert ("--flashmoe-experts" in arguments) == (is_fp8 and "flashmoe" in arguments)
json.dump({"attention": ["cudnn"], "weights": {"elements": 2, "sum": 1.0, "squares": 1.0}},
          open(seen, "w"))
for i in range(1, int(flag("--train-iters")) + 1):
    loss = 6 - i / 10 + (SHIFT if "fp8_dgrad" in arguments and i > 1 else 0)
    print(f" [now] iteration {i:8}/      20 | elapsed time per iteration (ms): 20.0 | "
          f"lm loss: {loss:.6E} | loss scale: 1.0 |", flush=True)
"""


@pytest.mark.parametrize(("shift", "status"), [(0.0, 0), (0.004, 0), (0.02, 1)])
def test_all_ways_are_trained_and_judged(
    shift: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A whole run of the program; the means of the last tenth are 4.05 without the shift."""
    program = tmp_path / "program.py"
    program.write_text(SCRIPT.replace("SHIFT", repr(shift)))
    (tmp_path / "pretrain_gpt.py").touch()
    command_of = fp8_losses.Run.command

    def command(run: fp8_losses.Run, *arguments: Any) -> list[str]:
        words = command_of(run, *arguments)
        seen = words.index("tools.bench.fp8_losses.begun") + 1
        return [sys.executable, str(program), *words[seen:]]

    monkeypatch.setattr(fp8_losses.Run, "command", command)
    monkeypatch.setattr(fp8_losses, "write_text", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fp8_losses.common, "machine", lambda commit: {"commit": commit})
    out = tmp_path / "out"
    arguments = ["--megatron", str(tmp_path), "--out", str(out), "--commit", "abc"]
    assert fp8_losses.main([*arguments, "--iterations", "20"]) == status
    printed = capsys.readouterr().out
    assert ("failed: the last tenth of flashmoe-fp8-dgrad" in printed) == bool(status)
    assert f"| flashmoe-fp8-dgrad | alltoall-fp8 | {shift / 4.05:+.3%} |" in printed
    kept = out / "fp8_losses.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert {line["run"] for line in lines} == {run.name for run in RUNS}
    assert all(line["commit"] == "abc" and line["status"] == 0 for line in lines)
    assert not list(out.glob("*.turn"))
    assert fp8_losses.main(["--judge", str(kept)]) == status
    assert capsys.readouterr().out == printed


def test_a_picture_shows_the_record_and_how_far_apart_its_runs_are(tmp_path: Path) -> None:
    """The page's picture is drawn from the kept record; a record with something wrong has none."""
    path, there = tmp_path / "losses", Path(fp8_losses.__file__).with_name("losses.svg")
    assert fp8_losses.main(["--judge", str(KEPT), "--picture", str(path)]) == 0
    texts = LABEL.findall(path.with_suffix(".svg").read_text())
    assert texts == LABEL.findall(there.read_text())
    assert set(COLORS) <= set(texts)
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()]
    lines[0]["losses"] = [2 * loss for loss in lines[0]["losses"]]
    other, wrong = tmp_path / "other", tmp_path / "wrong.jsonl"
    wrong.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert fp8_losses.main(["--judge", str(wrong), "--picture", str(other)]) == 1
    assert not other.with_suffix(".svg").exists()
    losses = np.arange(1.0, 101.0)
    assert np.allclose(means(losses), [np.mean(losses[i : i + MEAN_OF]) for i in range(51)])


WAITS = """
import os, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]).parent, Path(sys.argv[1]).stem
while not os.path.exists(os.environ["CARDS_TURN"]):
    time.sleep(0.01)
begun, begin = folder / f"{name}.begun", time.monotonic()
begun.touch()
while len(list(folder.glob("*.begun"))) < 2 and time.monotonic() < begin + 3:
    time.sleep(0.01)
time.sleep(0.3)
with (folder / "together").open("a") as file:
    print(len(list(folder.glob("*.begun"))), file=file)
begun.unlink()
sys.exit(name.endswith("again"))
"""


def test_two_are_trained_at_the_same_time_and_the_rest_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails is trained again by the next call, and no other."""
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(WAITS)
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(
        fp8_losses.Run, "command", lambda _, __, seen, *___: [sys.executable, program, str(seen)]
    )
    monkeypatch.setattr(fp8_losses, "write_text", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fp8_losses.common, "machine", lambda commit: {"commit": commit})
    arguments = ["--megatron", str(tmp_path), "--out", str(out)]
    assert fp8_losses.main(arguments) == 1
    together = (out / "together").read_text().split()
    assert len(together) == len(RUNS)
    assert set(together) <= {"1", "2"}
    assert "2" in together
    kept = {json.loads(line)["run"] for line in (out / "fp8_losses.jsonl").read_text().splitlines()}
    again = {run.name for run in RUNS if run.name.endswith("again")}
    assert kept == {run.name for run in RUNS} - again
    assert fp8_losses.main(arguments) == 1
    assert len((out / "together").read_text().split()) == len(RUNS) + len(again)
    (out / "together").unlink()
    program.write_text("import time; time.sleep(100)")
    assert fp8_losses.main([*arguments, "--limit-s", "1"]) == 1
    printed = capsys.readouterr().out
    assert all(f"failed: {name} has 0 losses" in printed for name in again)


def test_what_cannot_be_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--megatron", str(tmp_path), "--out", str(tmp_path / "out")]
    assert fp8_losses.main(arguments) == 2
    assert "pretrain_gpt.py is no file, wanted Megatron-LM's script" in capsys.readouterr().err
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fp8_losses.main(arguments) == 2
    assert "no CUDA GPU is usable here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert fp8_losses.main(["--list"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == len(RUNS)
    assert all("--seed 1234" in each and "--fp8-param-gather" not in each for each in commands)
