"""What of tools/gpu_check.py can be told without a GPU."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import gpu_of_worker
from tools import gpu_check
from tools.gpu_check import PARTS, SHARED_GPUS, Check, main, run_parts, run_stress

pytest_plugins = "pytester"


def test_every_number_of_ranks_and_library_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Path, float, int]] = []

    def run(command: list[str], library: Path, seconds: float, seed: int) -> Check:
        seen.append((" ".join(command[1:]), library, seconds, seed))
        return Check("stress", "passed", report={"launches": 1000})

    monkeypatch.setattr(gpu_check, "_run_stress", run)
    checks = run_stress(4, 60.0, 1)
    commands, libraries, seconds, seeds = zip(*seen, strict=True)
    assert len(set(commands)) == 6  # 1, 2, 4 and 8 virtual ranks, 2 and 4 GPUs
    assert len(seen) == len(set(seeds)) == 6 * len(set(libraries))  # with delays, if they are built
    assert sum(seconds) == pytest.approx(60.0)
    assert checks[-1].report["launches"] == 1000 * len(seen)


def test_too_few_launches_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_check, "_run_stress", lambda *_: Check("stress", "passed", report={"launches": 1})
    )
    assert run_stress(1, 60.0, 20_000)[-1].status == "failed"


@pytest.mark.parametrize(
    ("num_gpus", "visible", "shared"), [(1, None, "0"), (3, None, "0,1,2"), (2, "5,7", "5,7")]
)
def test_processes_share_all_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, visible: str | None, shared: str
) -> None:
    seen: list[dict[str, str]] = []

    def note(name: str, *_: object, variables: dict[str, str]) -> tuple[Check, str]:
        seen.append(variables)
        return Check(name, "passed", counts={"passed": 1}), ""

    monkeypatch.setattr(gpu_check, "checked", note)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda _: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (many, _) = run_parts(["single"], num_gpus)
    assert many.report["processes"] == 3 * num_gpus
    assert [each.get(SHARED_GPUS) for each in seen] == [shared, None]
    took = [gpu_of_worker(f"gw{number}", shared) for number in range(3 * num_gpus)]
    assert sorted(took) == sorted(3 * shared.split(","))


@pytest.mark.parametrize("has_xdist", [True, False])
def test_what_judges_times_runs_alone_after_the_rest(
    monkeypatch: pytest.MonkeyPatch, has_xdist: bool
) -> None:
    seen: list[tuple[list[str], float]] = []

    def note(name: str, command: list[str], limit_s: float, **_: object) -> tuple[Check, str]:
        seen.append((command, limit_s))
        return Check(name, "passed", counts={"passed": 1}), ""

    monkeypatch.setattr(gpu_check, "checked", note)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda _: has_xdist or None)
    checks = run_parts(["single"], 1)
    assert [check.report["processes"] for check in checks] == [3 if has_xdist else 1, 1]
    (many, many_s), (alone, alone_s) = seen
    assert "gpu and not alone" in many
    assert "gpu and alone" in alone
    assert ("-n" in many) == has_xdist
    assert "-n" not in alone
    assert "--at-once" in many
    assert "--at-once" in alone
    assert many_s == (480 if has_xdist else 1440)
    assert alone_s == 90


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failure_is_printed_when_it_happens(pytester: pytest.Pytester, at_once: bool) -> None:
    pytester.makepyfile(
        """
        def test_first(): assert "one" == "other"
        def test_second(): pass
        """
    )
    options = ["-v", "-p", "tests.conftest", *(["--at-once"] if at_once else [])]
    printed = pytester.runpytest_inprocess(*options).stdout.str()
    assert printed.count("""assert "one" == "other\"""") == 1 + at_once
    assert (printed.index("""assert "one\"""") < printed.index("::test_second")) == at_once


@pytest.fixture
def anything_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run_tests", lambda tests: Check(tests.name, "passed"))
    monkeypatch.setattr(gpu_check, "run_sanitizer", lambda tool: Check(tool, "passed"))
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda _: object())


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_or_says_why_not(anything_passes: None, part: str, num_gpus: int) -> None:
    checks = run_parts([part], num_gpus)
    assert checks
    runs = part == "single" or num_gpus > 1 or part == "sanitizer"
    for check in checks:
        assert (check.status, bool(check.reason)) == (
            ("passed", False) if runs else ("skipped", True)
        )


@pytest.mark.parametrize(
    ("arguments", "status", "recorded"),
    [
        (["--only", "faults", "deepspeed"], 1, None),
        (["--only", "single", "faults"], 0, ["passed", "passed", "skipped"]),
    ],
)
def test_it_fails_where_nothing_ran(
    anything_passes: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    status: int,
    recorded: list[str] | None,
) -> None:
    machine = {"date": "2026-01-02T", "gpus": ["one"], "compute_capabilities": ["9.0"]}
    monkeypatch.setattr(gpu_check, "describe_machine", lambda: machine)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (tmp_path / "flashmoe_megatron").mkdir()
    (tmp_path / "flashmoe_megatron" / "libflashmoe.so").touch()
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments, "--out", str(tmp_path / "out")])
    assert main() == status
    record = tmp_path / "out" / "2026-01-02-gpu-check-1x.json"
    assert record.exists() == (recorded is not None)
    if recorded is not None:
        first = record.read_text()
        assert [check["status"] for check in json.loads(first)["checks"]] == recorded
        for later in ("-2", "-3"):
            assert main() == status
            assert record.with_stem(record.stem + later).exists()
        assert record.read_text() == first
