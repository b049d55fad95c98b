"""What the tools' commands say where they cannot run, and what they record where they can."""

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import machine_code
import nvcc_build
from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import GATE
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.bench.timer import Timer
from flashmoe_megatron.measured.fit import write_fit
from tests.fits import make_fit
from tools import check_prose, memory_table
from tools.arguments import parser_of
from tools.bench import (
    all_figures,
    bench_degrees,
    bench_layer,
    bench_peers,
    common,
    compare_libraries,
    fp8_both,
    gate,
    launches,
    multipath,
)
from tools.bench.bench_training import logs
from tools.timeline import __main__ as timeline

ROOT = Path(__file__).parents[2]
CHECKS = ("ruff", "mypy", "clang-format", "codespell", "python", "pytest")


def fit_in(folder: Path, *, by_copies: bool = False) -> Path:
    """A file of a fit that nobody has measured."""
    path, fit = folder / f"{by_copies}.json", make_fit()
    write_fit(path, replace(fit, machine=replace(fit.machine, by_copies=by_copies)))
    return path


@pytest.mark.parametrize("tool", [bench_layer, bench_peers, compare_libraries, launches])
def test_without_a_gpu_nothing_is_measured(tool, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main(["--out", str(tmp_path / "out.jsonl")]) == 2
    wanted = "no CUDA GPU is usable here: nothing can be measured\n"
    assert capsys.readouterr().err == wanted
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--kernel", "--graph"])
def test_what_a_gpu_alone_can_tell_is_refused(flag: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stopwatch, "HAS_GPU", False)
    out = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit, match=f"{flag}.* want a GPU, got none"):
        bench_layer.main(["--allow-cpu", flag, "--shapes", "64x64x64x4x2", "--out", str(out)])
    assert not out.exists()


@pytest.mark.parametrize("name", ["tools.tables", "tools.tables.__main__"])
def test_a_tool_is_named_as_it_is_called(name: str, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(name, None))
    assert parser_of("").prog == "python -m tools.tables"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/checkout/tools/tables.py"])
    assert parser_of("").prog == "tables.py"


def test_degrees_of_a_shape_that_is_none(tmp_path: Path, capsys) -> None:
    fit = str(fit_in(tmp_path))
    options = bench_degrees.parse([fit, "--shapes", "2048x768x768x8x2"])
    assert [shape.gated for shape in options.shapes.values()] == [True]
    with pytest.raises(SystemExit, match="2"):
        bench_degrees.parse([fit, "--shapes", "2048x768"])
    assert "shape 2048x768: wanted TOKENSx" in capsys.readouterr().err


def test_a_fit_says_how_rows_travel_or_is_refused(tmp_path: Path, capsys) -> None:
    fits = [fit_in(tmp_path, by_copies=by_copies) for by_copies in (False, True)]
    options = bench_degrees.parse([*map(str, fits)])
    assert options.fits == dict(zip(fits, ("auto", "copies"), strict=True))
    fits[1].write_text('{"machine": {"by_copies": true}}')
    with pytest.raises(SystemExit, match="2"):
        bench_degrees.parse([*map(str, fits)])
    assert f"fit {fits[1]}: wanted an object of format" in capsys.readouterr().err


def test_a_baseline_that_is_not_installed_is_left_out(capsys, monkeypatch) -> None:
    def missing(problem: Problem) -> NoReturn:
        raise ImportError("No module named 'megatron'")

    monkeypatch.setitem(bench_degrees.BESIDE, "megatron", missing)
    problem = make_problem(Shape(8, 64, 64, 4, 2, gated=True), device=torch.device("cpu"))
    names = ["unfused", "megatron"]
    found = bench_degrees.measure_beside("small", problem, names, Timer(iterations=1, warmup=0))
    assert names == list(found) == ["unfused"]
    assert capsys.readouterr().out.endswith("megatron is left out: No module named 'megatron'\n")


@pytest.mark.parametrize("error", [GATE * 1.01, float("nan")])
def test_nothing_wrong_is_measured(error: float) -> None:
    gate.require_gate("small", {"out": GATE, "grad_x": 0.0})
    with pytest.raises(SystemExit, match="small: relative L2 error .*, wanted at most 0.006"):
        gate.require_gate("small", {"out": error, "grad_x": 0.0})


@pytest.mark.library
@pytest.mark.parametrize("num_ranks", [0, 3, 9])
def test_a_layer_that_cannot_be_on_so_many_ranks(num_ranks: int, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    assert memory_table.main(["--ranks", str(num_ranks), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert str(num_ranks) in printed.err
    assert not out.exists()


def test_sizes_want_the_library(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("FLASHMOE_LIBRARY", str(tmp_path / "none.so"))
    assert memory_table.main(["--shapes", "paper-1k"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {tmp_path / 'none.so'} is missing")
    assert "python tools/build.py" in printed.err
    assert printed.err.count("\n") == 1


def test_a_wrong_interpreter_is_named() -> None:
    ran = subprocess.run(
        ["bash", "tools/setup_env.sh"],
        cwd=ROOT,
        env={**os.environ, "FLASHMOE_PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "setup: FLASHMOE_PYTHON=no-such-python: no such interpreter\n"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "Prepares .venv with torch, .*MAX_JOBS  +compilers at a time"),
        (["--jobs", "2"], 2, "setup: got --jobs 2: wanted no arguments\n$"),
    ],
)
def test_setting_up_takes_no_arguments(
    arguments: list[str], status: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools" / "setup_env.sh"
    script.write_text((ROOT / "tools" / "setup_env.sh").read_text())
    ran = subprocess.run(
        ["bash", str(script), *arguments], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == status
    assert re.match(said, ran.stdout + ran.stderr, re.DOTALL)
    assert [path.name for path in tmp_path.iterdir()] == ["tools"]


SHAPE = "64x64x64x4x2"


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        (bench_layer, "--iterations 0", "--iterations: got 0, wanted at least 1"),
        (bench_layer, "--warmup -1", "--warmup: got -1, wanted at least 0"),
        (bench_layer, "--one-of 0", "--one-of: got 0, wanted at least 1"),
        (bench_layer, "--spare-slots -1", "--spare-slots: got -1, wanted at least 0"),
        (bench_layer, "--zipf nan", "--zipf: got nan, wanted a number, 0 or more"),
        (bench_layer, "--locality 1", "--locality: got 1, wanted more than 0 and less than 1"),
        (bench_layer, "--row-bound 0.5", "--row-bound: row_bound=0.5: wanted a number"),
        (bench_layer, "--shapes nosuch", "shape nosuch: wanted TOKENSx"),
        (bench_layer, "--out .", "--out: . is a folder, wanted a file"),
        (bench_layer, f"--allow-cpu --one-of 3 --shapes {SHAPE}", "4 experts: wanted a multiple"),
        (bench_layer, "--allow-cpu --shapes 64x64x64x4x8", "shape 64x64x64x4x8: topk=8: must"),
        (compare_libraries, "--turns 0", "--turns: got 0, wanted an even number, at least 2"),
        (fp8_both, "--turns 7", "--turns: got 7, wanted an even number, at least 2: every other"),
        (bench_peers, "--turns 5", "--turns: got 5, wanted an even number"),
        (compare_libraries, "--one-of 3", "shape paper-8k: 64 experts: wanted a multiple of 3"),
        (bench_peers, "--tokens 0", "--tokens: got 0, wanted at least 1"),
        (all_figures, "--gpus -1 --list", "--gpus: got -1, wanted at least 0"),
        (memory_table, "--tolerance -1", "--tolerance: got -1, wanted at least 0"),
        (multipath, "threads --ranks 0", "--ranks 0: wanted at least 2"),
        (multipath, "threads --mbps 0", "--mbps: got 0, wanted more than 0"),
        (multipath, "gpus --mib 0", "--mib: got 0, wanted at least 1"),
        (multipath, "plot nosuch picture.png", "nosuch is no record: .* No such file"),
        (logs, "nosuch nosuch --noise nosuch", "a log cannot be read: .* No such file"),
        (timeline, "capture --one-of 0", "--one-of: got 0, wanted at least 1"),
        (timeline, "capture --row-bound 0", "--row-bound: row_bound=0.0: wanted a number"),
        (check_prose, "nosuch.py", "no file or folder nosuch.py"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    tool, arguments: str, said: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(stopwatch, "HAS_GPU", False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        tool.main(arguments.split())
    told = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
    assert re.search(said, told.splitlines()[-1])
    assert not list(tmp_path.iterdir())


def test_links_of_gpus_want_as_many(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert multipath.main(["gpus"]) == 2
    assert capsys.readouterr().err == "no CUDA GPU is usable here: nothing can be measured\n"
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="1 GPUs are here: wanted 2, or --same-gpu"):
        multipath.main(["gpus"])


def test_trainings_want_ranks(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="no ranks are here: wanted torchrun"):
        common.need_torchrun()
    monkeypatch.setenv("RANK", "0")
    common.need_torchrun()


def test_kernels_that_cannot_be_built_have_no_machine_code(monkeypatch, capsys) -> None:
    def fails(library: Path) -> NoReturn:
        raise nvcc_build.BuildError("nvcc not found")

    monkeypatch.setattr(nvcc_build, "build_library", fails)
    monkeypatch.setattr("sys.argv", ["machine_code.py"])
    assert machine_code.main() == 2
    assert capsys.readouterr().err == "nvcc not found\n"


def commands_of_pages() -> list[tuple[str, ...]]:
    """Every command in Python on the pages of the tools, from the tool's name on."""
    found = set()
    for page in (ROOT / "tools" / "README.md", ROOT / "tools" / "bench" / "README.md"):
        for text in re.findall(r"`((?:python|torchrun) [^`]+)`", page.read_text()):
            words = re.sub(r"[\[\]]", "", text).split()
            at = words.index("-m" if "-m" in words else "python") + 1
            found.add(tuple(words[at:]))
    return sorted(found - {("tools.NAME",)})


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", commands_of_pages(), ids=" ".join)
def test_commands_of_pages_have_help_and_their_options(command, capsys, monkeypatch) -> None:
    tool, *rest = command
    subcommand = rest[:1] if rest and not rest[0].startswith("-") else []
    monkeypatch.setattr("sys.argv", [tool, *subcommand, "--help"])
    run = runpy.run_path if tool.endswith(".py") else runpy.run_module
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        run(tool, run_name="__main__")
    assert not ended.value.code
    told = capsys.readouterr().out
    assert "--help" in told
    for option in (word for word in rest if word.startswith("--")):
        assert re.search(rf"^  {option}\b", told, re.MULTILINE)


def run_checks(folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, list[str]]]:
    """Runs ``tests/run.sh`` in a folder without git, with commands that write their arguments.

    Returns:
        How it ended, and the arguments by command.
    """
    bin_folder = folder / "bin"
    for part in ("bin", "tests", "tools"):
        (folder / part).mkdir(exist_ok=True)
    (folder / "tests" / "run.sh").write_text((ROOT / "tests" / "run.sh").read_text())
    (folder / "tools" / "setup_env.sh").write_text(f"echo {bin_folder}/python\n")
    for name in CHECKS:
        command = bin_folder / name
        command.write_text(
            f'#!/bin/sh\nfor word in "$@"; do echo "$word" >> {command}.said; done\n'
        )
        command.chmod(0o755)
    ran = subprocess.run(
        ["bash", "tests/run.sh"],
        cwd=folder,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran, {path.stem: path.read_text().split() for path in bin_folder.glob("*.said")}


def test_sources_are_checked_without_git(tmp_path: Path) -> None:
    sources = ["csrc/a/b.cuh", "csrc/c.cu", "csrc/e.h", "tests/cc/d.cc", "tools/f.cu"]
    for name in (*sources, "csrc/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    ran, said = run_checks(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert said["clang-format"] == ["--dry-run", "-Werror", *sources]


def test_a_checkout_without_sources_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    ran, said = run_checks(tmp_path)
    assert ran.returncode == 1
    assert "csrc has no sources" in ran.stderr
    assert "clang-format" not in said
