"""The process pool itself: failures and hangs must reach pytest, in bounded time."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import PATIENCE_S, RankError, RankPool, run_ranks
from tests.forks import ForkServer


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


def seen(group: dist.ProcessGroup) -> tuple[str | None, str, int]:
    return os.environ.get("FLASHMOE_SEEN"), os.getcwd(), hash("flashmoe")


def test_ranks_start_where_the_test_is_and_order_sets_differently(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    run_ranks(seen, 2)  # the servers run by now
    monkeypatch.setenv("FLASHMOE_SEEN", "now")
    monkeypatch.chdir(tmp_path)
    found = run_ranks(seen, 2)
    assert [where for *where, _ in found] == [["now", str(tmp_path)]] * 2
    assert found[0][2] != found[1][2]


def test_a_server_that_cannot_import_says_so(capfd: pytest.CaptureFixture[str]):
    server = ForkServer("tests.no_such_module")
    try:
        with pytest.raises(RuntimeError, match="tests.no_such_module"):
            server.fork(seen)
    finally:
        server.close()
    assert "No module named 'tests.no_such_module'" in capfd.readouterr().err


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
