"""Programs that train by the stock script: what they read of it, and what they call wrong."""

import math
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_megatron.adapters.megatron.buckets import links as adapter
from tests.distributed import PATIENCE_S
from tests.multi_gpu import alternating, multipath, replicas, stock_training
from tests.multi_gpu.alternating import BLOCK, alternate, turn_of
from tests.multi_gpu.replicas import Loads, Run
from tests.multi_gpu.stock_training import Outcome
from tools.bench.bench_training.logs import Iteration

pytestmark = pytest.mark.timeout(4 * PATIENCE_S)

SCRIPT = """
import json, os, pathlib, sys, time
if "--hang" in sys.argv:
    print("it begins", flush=True)
    time.sleep(1e6)
if os.environ["RANK"] == "1":
    for i in range(1, 5):
        print(f" [now] iteration {i:8}/       4 | elapsed time per iteration (ms): {100 / i:.1f} | "
              f"lm loss: {5 - i:.6E} | loss scale: 1.0 |", flush=True)
    folder = pathlib.Path(sys.argv[sys.argv.index("--tensorboard-dir") + 1])
    folder.mkdir()
    report = {"step": 2, "seen": os.environ["SEEN"]}
    (folder / "flashmoe_metrics.jsonl").write_text(json.dumps(report))
    if "--fail" in sys.argv:
        raise SystemExit("SomeError: the reason")
"""


def train(folder: Path, *arguments: str, limit_s: float = PATIENCE_S) -> Outcome:
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    return stock_training.train(
        folder,
        arguments,
        ranks_per_host=2,
        limit_s=limit_s,
        environments=[{"SEEN": "yes"}],
        launcher=(),
        with_reports=True,
    )


def test_a_training_is_read(tmp_path: Path) -> None:
    found = train(tmp_path)
    assert found.is_right(4)
    assert not found.is_right(5)
    assert found.losses == [4, 3, 2, 1]
    assert found.median_ms(2) == pytest.approx((33.3 + 25) / 2)
    assert math.isnan(found.median_ms(4))
    assert found.reports == [{"step": 2, "seen": "yes"}]


def test_a_training_that_fails_says_why(tmp_path: Path) -> None:
    found = train(tmp_path, "--fail")
    assert found.codes == [1]
    assert not found.is_right(4)
    assert found.ends().startswith("SomeError: the reason")


def test_a_training_that_hangs_is_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = train(tmp_path, "--hang", limit_s=8)
    assert time.monotonic() - begin < PATIENCE_S
    assert any(found.codes)
    assert found.iterations == {}
    assert found.reports == []


def test_losses_agree_or_do_not() -> None:
    agree = stock_training.agree
    assert agree([])
    assert agree([[10.0, 9.0], [10.01, 9.01]])
    assert not agree([[10.0, 9.0], [10.0, 9.1]])
    assert not agree([[10.0, 9.0], [10.0]])
    assert not agree([[10.0], [math.nan]])


REPORT = {
    "step": 9,
    # Four experts on two ranks: all is even in one layer, and rank 1 has 1.5 in the other.
    **{f"flashmoe/layer_0/expert_rows/{expert}": 8.0 for expert in range(4)},
    **{
        f"flashmoe/layer_1/expert_rows/{expert}": rows for expert, rows in enumerate((8, 0, 12, 12))
    },
    "flashmoe/rank_imbalance": 1.1,
    "flashmoe/forward/layer_ms": 2.0,
    "flashmoe/backward/layer_ms": 5.0,
}
WITH_SLOTS = {**REPORT, "flashmoe/rank_imbalance_before": 1.5, "flashmoe/replicas": 0.5}


def test_loads_are_those_of_the_reports() -> None:
    loads = Loads.of([WITH_SLOTS, {**WITH_SLOTS, "flashmoe/replicas": 0.0}], num_ranks=2)
    assert loads == Loads(1.25, 1.5, 1.1, replicas=0.25, moved=0.5, forward_ms=2, backward_ms=5)
    assert Loads.of([REPORT], 2) == replace(loads, before=None, replicas=0, moved=0)


def test_what_a_training_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    log = "flashmoe: backend kernel, 4 experts\nflashmoe: replicas of at most 2 experts of"
    good = Outcome([0], {1: Iteration(1, 2), 2: Iteration(1, 1.5)}, [WITH_SLOTS], [log], 1.0)
    loads = Loads.of(good.reports, 2)
    skewed, alltoall = Run("skewed", slots=2), Run("learned", dispatcher="alltoall")
    assert not replicas.what_is_wrong(skewed, good, loads, 2, "kernel")
    assert not replicas.what_is_wrong(alltoall, replace(good, logs=[""]), None, 2, "kernel")
    for words, run, outcome, seen in [
        ("wanted 2 finite losses", skewed, replace(good, codes=[1]), loads),
        ("runs on the backend kernel", skewed, replace(good, logs=[log[20:]]), loads),
        ("that it has slots", skewed, replace(good, logs=[log[:30]]), loads),
        ("no launch is reported", skewed, good, None),
        ("wanted replicas in 100%", skewed, good, replace(loads, moved=0.9)),
        ("runs on flashmoe", alltoall, good, None),
    ]:
        (sentence,) = replicas.what_is_wrong(run, outcome, seen, 2, "kernel")
        assert words in sentence
    assert good.say_wrong("a training", [])
    assert not good.say_wrong("a training", [sentence])
    assert capsys.readouterr().out == f"wrong, a training: {sentence}\n...\n{log}\n"


def test_runs_are_read_as_they_are_written() -> None:
    for text in (
        "learned",
        "balanced,slots=2,queues=8,placement=lookahead,row_bound=1.25",
        "learned,dispatcher=alltoall",
    ):
        assert str(Run.of(text)) == text
    for text, words in [
        ("uneven", "wanted one of"),
        ("learned,slot=2", "NAME=VALUE"),
        ("learned,ends=2", "NAME=VALUE"),
        ("learned,slots=two", "invalid literal"),
    ]:
        with pytest.raises(ArgumentTypeError, match=words):
            Run.of(text)


def test_replicas_are_judged_over_balanced_routing(capsys: pytest.CaptureFixture[str]) -> None:
    learned = Run("learned", slots=2)
    ms = {
        learned: 102.0,
        Run("balanced"): 100.0,
        Run("skewed", slots=2, placement="lookahead"): 104.0,
        replace(learned, slots=0, dispatcher="alltoall"): 204.0,
    }
    replicas.say_ratios(ms, SimpleNamespace(out=None))
    assert capsys.readouterr().out.splitlines() == [
        "learned,dispatcher=alltoall over learned,slots=2: 2.000",
        "learned,slots=2 over balanced: 1.020, asked 1.03: kept",
        "skewed,slots=2,placement=lookahead over balanced: 1.040",
    ]


def test_what_a_training_over_links_lacks_is_named() -> None:
    iterations = {1: Iteration(1, 2), 2: Iteration(1, 1.5)}
    moved = {"step": 2, "flashmoe/link/peer/mib": 300.0, "flashmoe/link/host/mib": 20.0}
    good = Outcome([0], iterations, [moved], ["flashmoe: backend kernel, 4 experts"], 1.0)
    assert multipath.links_of(good) == {"peer": 300.0, "host": 20.0}
    compared = {"step": 2, "flashmoe/link/peer/mib": 6000.0}
    with_first = replace(good, reports=[compared, moved, moved])
    assert multipath.links_of(with_first) == {"peer": 300.0, "host": 20.0}
    plain = replace(good, iterations={n: Iteration(3, 2 - n / 9) for n in range(1, 5)}, reports=[])
    moved, idle = {**moved, "step": 3}, {"step": 7}
    turns = ["auto", "off"]
    mixed = replace(plain, reports=[moved, idle])
    assert not multipath.what_is_wrong(mixed, plain, turns, 4)
    assert not multipath.what_is_wrong(replace(mixed, reports=[moved]), plain, ["auto"], 4)
    for step in (4, 5):  # at a block's end, what is beside it counts, too
        for report in (moved, idle):
            beside = replace(mixed, reports=[{**report, "step": step}])
            assert not multipath.what_is_wrong(beside, plain, turns, 4)
    other = {n: Iteration(3, 2 - n / 8) for n in range(1, 5)}
    for words, outcome, beside in [
        ("in turns: wanted 4 finite losses", replace(mixed, codes=[1]), plain),
        ("in turns: no layer says that it runs on the backend", replace(mixed, logs=[""]), plain),
        ("off: wanted 4 finite losses", mixed, replace(plain, codes=[1])),
        (
            "7: links carried something",
            replace(mixed, reports=[moved, {**moved, "step": 7}]),
            plain,
        ),
        ("3: links carried nothing", replace(mixed, reports=[{"step": 3}, idle]), plain),
        ("nothing is reported", replace(mixed, reports=[]), plain),
        ("first losses are [1.8", mixed, replace(plain, iterations=other)),
    ]:
        (sentence,) = multipath.what_is_wrong(outcome, beside, turns, 4)
        assert words in sentence


def test_blocks_of_iterations_are_timed_by_what_they_go_by() -> None:
    turns = ["auto", "off"]
    assert [turn_of(turns, number) for number in (1, 4, 5, 8, 9)] == [
        *("auto", "auto", "off", "off", "auto")
    ]
    # The first ones, and the first of each block, are slow; the rest takes 10 ms by links and 20.
    usual = {"auto": 10, "off": 20}
    ms = {n: 99 if n <= 14 or n % 4 == 1 else usual[turn_of(turns, n)] for n in range(1, 33)}
    outcome = Outcome([0], {n: Iteration(one, 1) for n, one in ms.items()}, [], [""], 1.0)
    assert multipath.ms_of(outcome, turns) == {"auto": 10, "off": 20}


def stand_in(monkeypatch: pytest.MonkeyPatch, train_step: Callable[[], None]) -> Any:
    """Megatron's training, whose steps alternate; what that replaces comes back behind the test."""
    training = SimpleNamespace(train_step=train_step)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(training=training))
    for name in ("_is_on", "_made", "Multipath"):
        monkeypatch.setattr(adapter, name, getattr(adapter, name))
    return training


def test_iterations_choose_links(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    training = stand_in(monkeypatch, lambda: seen.append(adapter._is_on(None)))
    monkeypatch.setattr(adapter, "_is_on", lambda config: True)
    monkeypatch.setattr(adapter, "Multipath", lambda group, links: links)
    alternate(["off", "auto", "peer"])
    made = []
    for _ in range(3 * BLOCK):
        training.train_step()
        made.append((id(adapter._made), adapter.Multipath("group")))
    assert seen == [False] * BLOCK + [True] * 2 * BLOCK
    assert [links for _, links in made[BLOCK:]] == ["auto"] * BLOCK + [("peer",)] * BLOCK
    assert len({place for place, _ in made}) == 3


def test_an_iteration_that_stands_still_has_its_stacks_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def waits_for_nobody() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while "waits_for_nobody" not in capfd.readouterr().err:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    training = stand_in(monkeypatch, waits_for_nobody)
    monkeypatch.setattr(alternating, "_LONG_S", 0.01)
    alternate(["off"])
    # Threads are written newest first and 100 at most, and other tests may have left theirs.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(training.train_step).result()


def test_trainings_with_slots_run_on_processors(
    megatron_lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpus", "0", "--megatron", str(megatron_lm), "--train-iterations", "4"]
    trainings = ["--parts", "training", "--trainings", "learned,slots=2", "learned"]
    assert replicas.main([*arguments, *trainings]) == 0
    out = capsys.readouterr().out
    assert "learned: first losses of 2 trainings agree" in out
    assert out.endswith("all right\n")
