"""What of tools/gpu_check.py can be told without a GPU."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import gpu_check
from tools.gpu_check import PARTS, Check, StressRun, main, pack, run_parts, run_stress


@given(
    st.integers(0, 3).flatmap(
        lambda power: st.tuples(
            st.just(2**power), st.lists(st.sampled_from([1, 2, 4, 8][: power + 1]))
        )
    )
)
def test_rounds_hold_every_run_once_and_no_more_than_fits(given: tuple[int, list[int]]) -> None:
    num_gpus, sizes = given
    runs = [StressRun(Path(str(i)), [], size) for i, size in enumerate(sizes)]
    rounds = pack(runs, num_gpus)
    assert sorted(str(run.library) for one in rounds for run in one) == sorted(
        str(run.library) for run in runs
    )
    assert all(sum(run.num_gpus for run in one) <= num_gpus for one in rounds)
    assert len(rounds) == -(-sum(sizes) // num_gpus)  # powers of two leave no gap


def test_runs_of_a_round_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    seen: list[tuple[int, list[str], int]] = []

    def run(run: StressRun, gpus: list[str], seconds: float, seed: int) -> Check:
        seen.append((run.num_gpus, gpus, seed))
        return Check("stress", "passed", report={"launches": 1000})

    monkeypatch.setattr(gpu_check, "_run_stress", run)
    checks = run_stress(4, 60.0, 1)
    assert all(len(gpus) == size == len(set(gpus)) for size, gpus, _ in seen)
    assert {gpu for _, gpus, _ in seen for gpu in gpus} == {"3", "5", "6", "7"}
    assert len({seed for _, _, seed in seen}) == len(seen)
    assert [size for size, _, _ in seen].count(1) in (3, 6)  # with delays, if they are built
    assert checks[-1].report["launches"] == 1000 * len(seen)


def test_too_few_launches_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_check, "_run_stress", lambda *_: Check("stress", "passed", report={"launches": 1})
    )
    assert run_stress(1, 60.0, 20_000)[-1].status == "failed"


@pytest.fixture
def anything_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run_tests", lambda name, *_: Check(name, "passed"))
    monkeypatch.setattr(gpu_check, "run_sanitizer", lambda tool: Check(tool, "passed"))
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda _: object())


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_or_says_why_not(
    anything_passes: None, part: str, num_gpus: int, quick: bool
) -> None:
    checks = run_parts([part], num_gpus, quick=quick)
    assert checks
    runs = part == "single" or num_gpus > 1 or part == "sanitizer"
    runs = runs and not (quick and part in ("faults", "deepspeed", "sanitizer"))
    for check in checks:
        assert (check.status, bool(check.reason)) == (
            ("passed", False) if runs else ("skipped", True)
        )


@pytest.mark.parametrize(
    ("arguments", "status", "recorded"),
    [
        (["--only", "faults", "deepspeed"], 1, None),
        (["--only", "single", "faults"], 0, ["passed", "skipped"]),
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
        checks = json.loads(record.read_text())["checks"]
        assert [check["status"] for check in checks] == recorded
