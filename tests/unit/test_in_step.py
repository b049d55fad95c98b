"""Hosts ahead of their GPUs hear of an error in one call, and the group goes on in step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit import in_step
from tests.unit.in_step import BAD, BAD_STEP, CONFIG, RANKS, Call, Rank, check_in_step
from tests.unit.simulated_gpus import Gpus, install, make_backend


def train(
    change: Callable[[Call], Call],
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: int,
    waits: bool = False,
    **options: Any,
) -> list[Rank]:
    gpus = Gpus(RANKS, seed, slow=seed % RANKS)
    install(gpus, monkeypatch)
    backends = [make_backend(CONFIG, rank, row_bound=2.0, **options) for rank in range(RANKS)]
    ranks = [Rank(one, change, partial(gpus.wait, one.rank), waits=waits) for one in backends]
    in_step.run_ranks(ranks)
    assert not gpus.problems
    return ranks


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("name", BAD)
def test_all_raise_in_one_call(name: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = BAD[name]
    seed = 3 * list(BAD).index(name) + len(keep)
    check_in_step(train(change, monkeypatch, seed=seed, keep=keep), message)


@pytest.mark.parametrize("name", ["values", "found by the GPU"])
def test_hosts_that_wait_raise_in_the_next_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in train(BAD[name][0], monkeypatch, seed=1, waits=True, keep="all"):
        ((step, number, _),) = one.errors
        assert (step, number) == (BAD_STEP, 1)


def test_a_backward_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part in the others', and the next forward raises on all."""

    def change(call: Call) -> Call:
        (fc1,) = call["weights"].fc1
        fc1.main_grad = torch.zeros(fc1.shape, dtype=torch.float64)
        return {**call, "accumulate": True}

    for one in train(change, monkeypatch, seed=1, keep="all"):
        ((step, _, message),) = one.errors
        assert step > BAD_STEP
        assert message == (
            "rank 1: weight gradient: dtype torch.float64, wanted torch.float32 or torch.bfloat16"
        )
