"""What ranks agree on: a value of all, the same error on all, and a peer that is gone."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    LinkError,
    PeerTimeoutError,
    RowBoundError,
    reason_of,
)
from flashmoe_megatron.ranks import Ranks, StoreRanks
from tests.distributed import RankPool

RANKS = 2


def ranks_of(group: dist.ProcessGroup, kind: str) -> Ranks:
    return Ranks(group) if kind == "group" else StoreRanks(group, 30.0, purpose="test")


def agree(group: dist.ProcessGroup, kind: str) -> list[Any]:
    """All that a rank hears from calls of which the last two fail on the last rank."""
    ranks = ranks_of(group, kind)
    mine = ranks.rank

    def fail(error: Exception) -> int:
        if mine == RANKS - 1:
            raise error
        return mine

    heard: list[Any] = [
        ranks.gather(mine * 10),
        ranks.all(lambda: mine + 1),
        ranks.each(lambda: mine + 2),
        str(ranks.first_error(None if mine == 0 else reason_of(LinkError("loose")))),
    ]
    for error in (ConfigError("no such option"), KeyError("gone")):
        with pytest.raises(FlashMoEError) as raised:
            ranks.all(lambda error=error: fail(error))
        assert raised.value.__cause__ is (error if mine == RANKS - 1 else None)
        heard.append(f"{type(raised.value).__name__}: {raised.value}")
    with pytest.raises(ConfigError) as differ:
        ranks.check_same({"degree": 1, "keep": mine})
    heard.append(str(differ.value))
    ranks.check_same({"degree": 1})
    return heard


@pytest.mark.parametrize("kind", ["group", "store"])
def test_all_ranks_hear_the_same(kind: str, ranks: RankPool) -> None:
    for rank, heard in enumerate(ranks.run(agree, kind, num_ranks=RANKS)):
        assert heard == [
            [0, 10],
            [1, 2],
            rank + 2,
            "rank 1: loose",
            "ConfigError: rank 1: no such option",
            "FlashMoEError: rank 1: KeyError: 'gone'",
            "the ranks disagree on keep: 0 on rank 0, 1 on rank 1; wanted one value",
        ]


def reduce(group: dist.ProcessGroup) -> list[list[int]]:
    ranks = Ranks(group)
    values = torch.tensor([ranks.rank, -ranks.rank])
    ranks.meet()
    return [ranks.least(values.clone()).tolist(), ranks.most(values.clone()).tolist()]


def test_extremes_of_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(reduce, num_ranks=RANKS) == [[[0, -1], [1, 0]]] * RANKS


def silent_peer(group: dist.ProcessGroup) -> list[Any]:
    """One rank asks and hears nothing until the other one has asked, too."""
    ranks = StoreRanks(group, 0.05, purpose="test")
    heard: list[Any] = []
    if ranks.rank == 0:
        answers = ranks.ask("here")
        heard.append(answers.silent(0.05))
        with pytest.raises(PeerTimeoutError, match="rank 0 has waited 0.05 s for rank 1"):
            answers.wait()
        dist.barrier(group)
        heard += [answers.silent(30.0), answers.wait()]
    else:
        dist.barrier(group)
        heard += [ranks.ask("late").wait()]
    dist.barrier(group)
    return heard


def test_a_store_says_who_is_silent(ranks: RankPool) -> None:
    first, second = ranks.run(silent_peer, num_ranks=RANKS)
    assert first == [[1], [], ["here", "late"]]
    assert second == [["here", "late"]]


def test_one_rank_agrees_with_itself() -> None:
    ranks = Ranks(None)
    assert (ranks.rank, ranks.num_ranks) == (0, 1)
    assert ranks.gather("x") == ["x"]
    with pytest.raises(KeyError, match="own"):  # one rank's own error is raised as it is
        ranks.all(lambda: {}["own"])
    assert ranks.most(torch.tensor([3])).tolist() == [3]
    assert ranks.first_error(None) is None
    ranks.meet()


@pytest.mark.parametrize("mine", [RuntimeError("reset by peer"), RowBoundError("too many rows")])
def test_only_the_error_of_torch_stands_for_a_peer_that_is_gone(mine: Exception) -> None:
    ranks = Ranks(None, exchange="rank 2: a talk", peers="ranks [0, 1]")
    kind = type(mine) if isinstance(mine, FlashMoEError) else PeerTimeoutError
    with pytest.raises(kind) as said, ranks.bounded:
        raise mine
    if said.value is not mine:
        wanted = "rank 2: a talk failed, since one of ranks [0, 1] is gone or did not come: reset"
        assert str(said.value).startswith(wanted)
        assert said.value.__cause__ is mine


def test_ranks_are_shared_by_copies_and_are_not_pickled() -> None:
    ranks = Ranks(None)
    assert copy.deepcopy(ranks) is ranks
    with pytest.raises(FlashMoEError, match="Ranks belongs to the process group of this process"):
        pickle.dumps(ranks)
