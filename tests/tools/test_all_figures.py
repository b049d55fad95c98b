"""The list of measuring steps: what it runs, what it leaves out, how it goes on."""

from pathlib import Path

import pytest

from tools.bench import all_figures, bench_layer, compare_libraries
from tools.bench.all_figures import Step, part_of, run, steps
from tools.timeline import __main__ as timeline
from tools.weak_scaling import __main__ as weak_scaling

PARSERS = {
    "tools.bench.bench_layer": bench_layer.parse,
    "tools.bench.compare_libraries": compare_libraries.parse,
    "tools.timeline": timeline.parse,
    "tools.weak_scaling": weak_scaling.parse,
}


def statement(folder: Path, code: str, limit_s: float = 30) -> Step:
    return Step(folder, "timeit", ["-n", "1", "-r", "1", code], limit_s)


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_steps_have_folders_of_their_own_and_arguments_that_are_known(
    num_gpus: int, tmp_path: Path
) -> None:
    found = list(steps(num_gpus, tmp_path))
    assert len({step.folder for step in found}) == len(found) > 6
    for step in found:
        assert step.ranks <= num_gpus
        command = step.command("abc")
        assert ("torch.distributed.run" in command) == bool(step.ranks)
        arguments = command[command.index(step.module) + 1 :]
        options = PARSERS[step.module](arguments)
        assert options.commit == "abc"
        assert options.out.parent == part_of(step.folder)
        if step.module == "tools.bench.bench_layer":
            assert options.one_of == (4 if num_gpus == 1 else 1)
            assert options.row_bound == (2.5 if any(options.zipf) else 1.2)


def test_a_sweep_that_was_begun_goes_on(tmp_path: Path) -> None:
    for is_begun in (False, True):
        (sweep,) = [step for step in steps(1, tmp_path) if step.module == "tools.weak_scaling"]
        options = weak_scaling.parse(sweep.arguments)
        assert options.resume == is_begun
        options.out.mkdir(parents=True, exist_ok=True)


def test_goes_on_with_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine, broken, slow = (tmp_path / name for name in ("fine", "broken", "slow"))
    todo = [
        statement(fine, "pass"),
        Step(broken, "no_such_module", [], 30),
        statement(slow, "import time; time.sleep(60)", limit_s=1),
    ]
    assert run(todo, 10, None) == 2
    assert sorted(tmp_path.iterdir()) == [part_of(broken), fine, part_of(slow)]
    assert "no_such_module" in (part_of(broken) / "log.txt").read_text()
    printed = capsys.readouterr().out
    assert "fine: done in" in printed
    assert "slow: timed out" in printed
    assert run(todo[:2], 10, None) == 1
    printed = capsys.readouterr().out
    assert "fine: done before" in printed
    assert "broken: failed" in printed


def test_an_attempt_does_not_add_to_what_a_failed_one_has_left(tmp_path: Path) -> None:
    folder = tmp_path / "layer"
    append = f"open({str(part_of(folder) / 'results.jsonl')!r}, 'a').write('line')"
    for then, failures in (("1 / 0", 1), ("1 / 0", 1), ("pass", 0)):
        assert run([statement(folder, f"{append}; {then}")], 10, None) == failures
    assert (folder / "results.jsonl").read_text() == "line"
    assert list(tmp_path.iterdir()) == [folder]


def test_what_a_sweep_has_left_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "weak-scaling"
    kept = part_of(folder) / "sweep"
    kept.mkdir(parents=True)
    assert run([Step(folder, "no_such_module", ["--resume"], 30)], 10, None) == 1
    assert kept.is_dir()


def test_begins_nothing_that_may_not_end_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([statement(tmp_path / "fine", "pass")], 0.4, None) == 0
    assert "fine: may take 30 s, 2" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all_figures.main(["--out", str(tmp_path / "new"), "--gpus", "0"]) == 2
    assert "nothing can be measured" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert all_figures.main(["--out", str(tmp_path), "--gpus", "4", "--list"]) == 0
    assert "bench_layer" in capsys.readouterr().out
