"""A backward that one rank lacks, on simulated GPUs: no rank waits for it, and all are told why."""

from functools import partial

import pytest

from flashmoe_megatron.kernel.backend import KernelBackend
from tests.unit import in_step
from tests.unit.in_step import CONFIG, RANKS
from tests.unit.simulated_gpus import Gpus, install, make_backend
from tests.unit.unmatched import Trained, check_told


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("row_bound", [None, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_backward_that_one_rank_lacks(
    keep: str, row_bound: float | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(RANKS, seed, slow=seed % RANKS)
    install(gpus, monkeypatch)

    def make(rank: int) -> KernelBackend:
        return make_backend(CONFIG, rank, row_bound=row_bound, keep=keep)

    ranks = []
    for rank in range(RANKS):
        ranks.append(Trained(make(rank), lambda call: call, partial(gpus.wait, rank)))
    in_step.run_ranks(list(ranks))
    assert not gpus.problems
    check_told(ranks, raises_at_once=row_bound is None)
