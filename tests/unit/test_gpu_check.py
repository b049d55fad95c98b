"""What of tools/gpu_check.py can be told without a GPU."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import gpu_check
from tools.gpu_check import Check, StressRun, pack, run_stress


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
