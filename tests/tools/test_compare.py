"""Comparisons of builds and of training logs: nothing drops out of them silently."""

import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tools.bench import common, compare_libraries
from tools.bench.bench_training import logs
from tools.bench.compare_libraries import PASSES, Turn, names_of

LOSSES = [10.5, 10.25, 10.0, 9.75, 9.5, 9.25, 9.0]


def milliseconds_in_file(
    library: Path, orders: Connection, launches: int, one_of: int, counters: bool = True
) -> None:
    """Stands in the place of ``work``: what the file says, and half a millisecond to count."""
    while orders.recv() is not None:
        times_ms = dict.fromkeys(PASSES, float(library.read_text()) + 0.5 * counters)
        orders.send(Turn(times_ms, {"out": library.read_text()}))


def test_libraries_of_one_name_are_told_apart(tmp_path: Path, monkeypatch, capsys) -> None:
    libraries = [tmp_path / name / "libflashmoe.so" for name in ("before", "now")]
    for milliseconds, library in enumerate(libraries, 1):
        library.parent.mkdir()
        library.write_text(str(milliseconds))
    out = tmp_path / "results.jsonl"
    arguments = [*map(str, libraries), "--shapes", "paper-8k", "--turns", "2", "--out", str(out)]
    monkeypatch.setattr(compare_libraries, "work", milliseconds_in_file)
    fork = multiprocessing.get_context("fork")  # what they run needs no torch of their own
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": fork}.__getitem__)
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    assert compare_libraries.main([*arguments, "--uncounted"]) == 0
    uncounted = f"{libraries[0]}, uncounted"
    wanted = {str(libraries[0]): [1.5, 1.5], str(libraries[1]): [2.5, 2.5], uncounted: [1.0, 1.0]}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["milliseconds"] for row in rows] == [wanted] * len(PASSES)
    printed = capsys.readouterr().out
    assert f"paper-8k: {libraries[1]}'s out: other bits than {libraries[0]}'s\n" in printed
    assert printed.count("other bits") == 1


def test_libraries_are_named_shortly_and_once() -> None:
    assert names_of([Path("a/before.so"), Path("b/now.so")]) == ["before", "now"]
    with pytest.raises(SystemExit, match="named twice"):
        names_of([Path("a/now.so"), Path("b/../a/now.so")])


def line_of(iteration: int, loss: str) -> str:
    """A line as Megatron's ``training_log`` writes it."""
    told = f" lm loss: {loss} |" if loss else ""
    return (
        f" [2026-11-24 08:00:00.000000] iteration {iteration:8d}/{20:8d} | consumed samples: "
        f"{iteration:12d} | elapsed time per iteration (ms): {400.0:.1f} | learning rate: "
        f"1.000000E-04 | global batch size:    32 |{told} loss scale: 1.0 | grad norm: 1.000 |"
    )


def compare(tmp_path: Path, **changes: list[str]) -> int:
    """The exit status for logs of which some are others than the plain one."""
    plain = [line_of(i, f"{loss:.6E}") for i, loss in enumerate(LOSSES, 1)]
    paths = [tmp_path / f"{name}.log" for name in ("ours", "theirs", "noise")]
    for path in paths:
        path.write_text("\n".join(["building ...", *changes.get(path.stem, plain)]) + "\n")
    ours, theirs, noise = map(str, paths)
    return logs.main([ours, theirs, "--noise", noise])


def with_line(at: int, line: str) -> list[str]:
    lines = [line_of(i, f"{loss:.6E}") for i, loss in enumerate(LOSSES, 1)]
    return [*lines[: at - 1], line, *lines[at:]]


def test_equal_logs(tmp_path: Path, capsys) -> None:
    assert compare(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "Within noise at 7 of 7 iterations." in printed
    assert "Median from iteration 6 on: 400 ms, alltoall 400 ms" in printed


@pytest.mark.parametrize("loss", ["INF", "NAN", "", "9.7.5", "0.000000E+00"])
@pytest.mark.parametrize("which", ["ours", "theirs"])
def test_a_loss_that_is_none_is_outside(tmp_path: Path, capsys, which: str, loss: str) -> None:
    assert compare(tmp_path, **{which: with_line(4, line_of(4, loss))}) == 1
    assert "Within noise at 6 of 7 iterations." in capsys.readouterr().out


def test_a_line_that_ends_early_is_outside(tmp_path: Path, capsys) -> None:
    whole = line_of(4, f"{LOSSES[3]:.6E}")
    for end in (whole.index("elapsed"), whole.index("E+00")):
        assert compare(tmp_path, ours=with_line(4, whole[:end])) == 1
        assert "Within noise at 6 of 7 iterations." in capsys.readouterr().out


def test_iterations_after_a_crash_of_ours_are_outside(tmp_path: Path, capsys) -> None:
    assert compare(tmp_path, ours=with_line(7, "torch.AcceleratorError")) == 1
    assert "Within noise at 6 of 7 iterations." in capsys.readouterr().out


def test_a_reference_may_end_early_and_that_is_told(tmp_path: Path, capsys) -> None:
    short = with_line(1, line_of(1, f"{LOSSES[0]:.6E}"))[:5]
    assert compare(tmp_path, theirs=short) == 0
    printed = capsys.readouterr().out
    assert "Within noise at 5 of 5 iterations." in printed
    assert "theirs.log lacks 2 more of ours, which are not compared." in printed


@pytest.mark.parametrize("loss", ["INF", "NAN", ""])
def test_noise_that_is_no_number_allows_nothing(tmp_path: Path, loss: str) -> None:
    noise = with_line(4, line_of(4, loss))
    assert compare(tmp_path, noise=noise) == 0
    assert compare(tmp_path, noise=noise, ours=with_line(4, line_of(4, "9.900000E+00"))) == 1


def test_a_noise_run_that_ends_early_is_told(tmp_path: Path, capsys) -> None:
    assert compare(tmp_path, noise=with_line(7, "torch.AcceleratorError")) == 0
    assert "noise.log lacks 1 of them" in capsys.readouterr().out


def test_a_log_without_iterations_is_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        compare(tmp_path, ours=["torch.AcceleratorError"])
    assert "ours.log has no iterations" in capsys.readouterr().err
