"""The list of measuring steps: what it runs, what it leaves out, how it goes on."""

from pathlib import Path

import pytest

from tools.bench import all_figures, bench_layer, counters_cost
from tools.bench.all_figures import FolderError, Step, put_aside, read_done, run, steps
from tools.timeline import __main__ as timeline
from tools.weak_scaling import __main__ as weak_scaling

FINE = Step("fine", "timeit", ["-n", "1", "pass"], 30)
BROKEN = Step("broken", "no_such_module", [], 30)
LONG = Step("long", "timeit", ["-n", "1", "import time; time.sleep(60)"], 1)

PARSERS = {
    "tools.bench.bench_layer": bench_layer.parse,
    "tools.bench.counters_cost": counters_cost.parse,
    "tools.timeline": timeline.parse,
    "tools.weak_scaling": weak_scaling.parse,
}


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_steps_have_names_of_their_own_and_arguments_that_are_known(
    num_gpus: int, tmp_path: Path
) -> None:
    found = list(steps(num_gpus, tmp_path))
    assert len({step.name for step in found}) == len(found) > 6
    for step in found:
        assert step.ranks <= num_gpus
        command = step.command("abc")
        assert ("torch.distributed.run" in command) == bool(step.ranks)
        arguments = command[command.index(step.module) + 1 :]
        options = PARSERS[step.module](arguments)
        assert options.commit == "abc"
        assert options.out.parent == tmp_path
        if step.module == "tools.bench.bench_layer":
            assert options.out.name == f"{step.name}.jsonl"
            assert options.one_of == (4 if num_gpus == 1 else 1)
            assert options.row_bound == (2.5 if options.zipf else 1.2)


def test_a_sweep_that_was_begun_goes_on(tmp_path: Path) -> None:
    for is_begun in (False, True):
        (sweep,) = [step for step in steps(1, tmp_path) if step.name == "weak-scaling"]
        assert weak_scaling.parse(sweep.arguments).resume == is_begun
        (tmp_path / "weak-scaling").mkdir(exist_ok=True)


def test_goes_on_with_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([FINE, BROKEN, LONG], tmp_path, 10, None) == 2
    assert [(one.name, one.status) for one in read_done(tmp_path / "steps.jsonl")] == [
        ("fine", "done"),
        ("broken", "failed"),
        ("long", "timed out"),
    ]
    assert "no_such_module" in (tmp_path / "broken.log").read_text()
    capsys.readouterr()
    assert run([FINE, BROKEN], tmp_path, 10, None) == 1
    printed = capsys.readouterr().out
    assert "fine: done before" in printed
    assert "broken: failed" in printed


def test_what_a_failed_attempt_has_left_is_put_aside(tmp_path: Path) -> None:
    append = f"open({str(tmp_path / 'layer.jsonl')!r}, 'a').write('line')"

    def attempt(then: str) -> int:
        step = Step("layer", "timeit", ["-n", "1", "-r", "1", f"{append}; {then}"], 30)
        return run([step], tmp_path, 10, None)

    assert [attempt("1 / 0"), attempt("1 / 0"), attempt("pass")] == [1, 1, 0]
    names = ["layer.jsonl", "layer.jsonl.before0", "layer.jsonl.before1"]
    assert sorted(path.name for path in tmp_path.glob("layer.jsonl*")) == names
    assert [(tmp_path / name).read_text() for name in names] == ["line"] * 3
    assert attempt("pass") == 0  # done before
    assert sorted(path.name for path in tmp_path.glob("layer.jsonl*")) == names


def test_folders_are_put_aside_but_the_sweeps(tmp_path: Path) -> None:
    for name in ("timeline", "weak-scaling"):
        (tmp_path / name).mkdir()
    for step in steps(2, tmp_path):
        put_aside(step, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.before0", "weak-scaling"}


def test_begins_nothing_that_may_not_end_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([FINE], tmp_path, 0.4, None) == 0
    assert "fine: may take 30 s, 2" in capsys.readouterr().out
    assert not (tmp_path / "steps.jsonl").exists()


def test_a_list_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for content in ("fine", "[1]", '{"step": "fine"}'):
        path.write_text(content + "\n")
        with pytest.raises(FolderError, match="wanted a JSON object of a step a line"):
            run([FINE], tmp_path, 10, None)


def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all_figures.main(["--out", str(tmp_path / "new"), "--gpus", "0"]) == 2
    assert "nothing can be measured" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert all_figures.main(["--out", str(tmp_path), "--gpus", "4", "--list"]) == 0
    assert "bench_layer" in capsys.readouterr().out
