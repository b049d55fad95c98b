"""The process pool itself: failures and hangs must reach pytest, in bounded time."""

import os
import time

import pytest
import torch.distributed as dist

from tests.distributed import PATIENCE_S, RankError, RankPool, run_ranks


def add_ranks(group: dist.ProcessGroup, offset: int) -> int:
    return dist.get_rank(group) + offset


def fail_on_rank_one(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 1:
        raise ValueError("deliberate")
    dist.barrier(group)


def die(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 1:
        os._exit(7)


def hang(group: dist.ProcessGroup) -> None:
    time.sleep(3600)


def test_results_come_by_rank():
    assert run_ranks(add_ranks, 2, 10) == [10, 11]


@pytest.mark.timeout(4 * PATIENCE_S)  # starts its processes four times
def test_failures_raise_and_the_pool_recovers(capfd: pytest.CaptureFixture[str]):
    pool = RankPool(2)
    try:
        with pytest.raises(RankError, match="ValueError: deliberate"):
            pool.run(fail_on_rank_one)
        with pytest.raises(RankError, match="exit code 7"):
            pool.run(die)
        # New processes import this module first, which takes longer the more the machine has to do.
        assert pool.run(add_ranks, 0) == [0, 1]
        with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish within 3.0 s"):
            pool.run(hang, timeout_s=3.0)  # else for an hour, which pytest would end
        assert capfd.readouterr().err.count("in hang\n") == 2  # where both ranks stand
        assert pool.run(add_ranks, 0) == [0, 1]
    finally:
        pool.close()
