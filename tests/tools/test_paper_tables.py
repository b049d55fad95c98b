"""Counting what a layer has a GPU do, and how late ranks are: tables 1 and 2 of FlashMoE."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import RankPool
from tools.bench import late_ranks, launches

KERNEL, COPY, FILL = ({"ph": "X", "cat": cat} for cat in ("kernel", "gpu_memcpy", "gpu_memset"))
OTHERS: list[dict[str, Any]] = [
    {"ph": "X", "cat": "gpu_user_annotation"},  # a range around an exchange
    {"ph": "X", "cat": "cuda_runtime"},
    {"ph": "s", "cat": "ac2g"},
    {"ph": "M"},
]


class Profiler:
    """Gives one list of events after the other."""

    def __init__(self, *traces: list[dict[str, Any]]) -> None:
        self.traces, self.calls = list(traces), 0

    def call(self) -> None:
        self.calls += 1

    def take(self, call: launches.Call) -> list[dict[str, Any]]:
        call()
        return self.traces.pop(0)


def test_kernels_copies_and_fills_are_counted_and_nothing_else() -> None:
    trace = [KERNEL, *OTHERS, KERNEL, COPY, FILL, KERNEL]
    profiler = Profiler([], trace, trace)
    found = launches.counted(profiler.call, profiler.take)
    assert found == {"kernels": 3, "copies": 1, "fills": 1, "operations": 5}
    assert profiler.calls == launches.WARM + 3


@pytest.mark.parametrize("traces", [([KERNEL], [KERNEL, COPY]), (OTHERS, OTHERS)])
def test_numbers_that_differ_or_are_none_are_no_result(traces: Any) -> None:
    profiler = Profiler([KERNEL], *traces)
    with pytest.raises(launches.UncountedError, match="wanted the same twice, and some"):
        launches.counted(profiler.call, profiler.take)


def test_a_delay_is_the_slowest_over_the_fastest_of_each_step() -> None:
    slow, fast = [2.0] * 19 + [9.0], [1.0] * 19 + [3.0]
    found = late_ranks.delays_of([slow, fast])
    assert (found.steps, found.median, found.percentile_95, found.most) == (20, 2.0, 3.0, 3.0)
    assert found.median_ms == 2.0
    tail = [1.0] * 90 + [5.0] * 6 + [7.0] * 4
    found = late_ranks.delays_of([tail, [1.0] * 100])
    assert (found.median, found.percentile_95, found.most) == (1.0, 5.0, 7.0)


def test_ranks_of_an_exchange_and_of_a_layer_are_compared(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks.run(compare_ways, str(tmp_path / "late.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "late.jsonl").read_text().splitlines()]
    assert [row["way"] for row in rows] == ["all-to-all", "reference"]
    for row in rows:
        assert row["steps"] == 7
        assert 1 <= row["median"] <= row["percentile_95"] <= row["most"]
        assert row["median_ms"] > 0
        assert row["imbalance"] > 1.5


def compare_ways(group: Any, out: str) -> None:
    options = late_ranks.parse(
        ["--steps", "7", "--zipf", "2", "--shapes", "64x64x64x8x2", "--out", out]
    )
    late_ranks.measure(options, [])


def test_one_rank_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no ranks are here: wanted torchrun"):
        late_ranks.main([])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="1 rank, for which nobody is late: wanted several"):
        late_ranks.main([])
