"""The host relay and peer copies between two processes that share one GPU."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import FlashMoELayer, MoEConfig
from flashmoe_megatron.errors import FlashMoEError, LinkError, PeerTimeoutError, ShapeError
from flashmoe_megatron.multipath import trials
from flashmoe_megatron.multipath.links import Link
from flashmoe_megatron.multipath.multipath import Multipath
from flashmoe_megatron.multipath.queues import Queues
from flashmoe_megatron.multipath.transfers import Load
from tests.distributed import RankError, RankPool
from tests.unit.summands import contribution, in_order

pytestmark = pytest.mark.gpu

LENGTH = 3_000_001
LIMIT_S = 3.0
"""How long a link waits for a peer that is lost."""
PATIENCE_S = 60.0
"""How long a test waits for an error, which says nothing of speed."""


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two processes that tests share, for to start them takes longer than most tests."""
    with contextlib.closing(RankPool(2)) as pool:
        yield pool


@pytest.fixture(scope="module")
def other_pair() -> Iterator[RankPool]:
    """The same with one hardware queue and expandable segments, which are read at the start."""
    with contextlib.closing(RankPool(2)) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            pool.run(dist.get_rank)
        yield pool


def made(group: dist.ProcessGroup, **options: object) -> Multipath:
    torch.cuda.set_device(0)
    given: dict = {"links": ("peer", "host"), "min_bytes": 1, "timeout": 20.0, **options}
    return Multipath(group, **given)


def all_operations(group: dist.ProcessGroup, dtypes: list[torch.dtype]) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    with made(group) as multipath:
        for dtype in dtypes:
            parts = [contribution(one, ranks * LENGTH, dtype).cuda() for one in range(ranks)]
            want = in_order(parts)
            for _ in range(3):
                gathered = torch.zeros(ranks * ranks * LENGTH, dtype=dtype, device="cuda")
                multipath.all_gather(gathered, parts[rank])
                assert torch.equal(gathered, torch.cat(parts))
                shard = torch.zeros(LENGTH, dtype=dtype, device="cuda")
                multipath.reduce_scatter(shard, parts[rank].clone())
                assert torch.equal(shard, want[rank * LENGTH : (rank + 1) * LENGTH])
                whole = parts[rank].clone()[:-1]
                work = multipath.all_reduce(whole, async_op=True)
                assert work is not None
                work.wait()
                assert torch.equal(whole, want[:-1])
        for index in range(60):  # windows of the second stage, whose times come two later
            whole = parts[rank].clone()
            multipath.all_reduce(whole)
            assert torch.equal(whole, want), index
        totals = multipath.take_totals()
        assert sum(total.nbytes for total in totals.values()) > 0


def test_operations_are_right(pair: RankPool) -> None:
    pair.run(all_operations, [torch.bfloat16, torch.float32, torch.int32, torch.uint8])


def gathers_by_what_is_faster(group: dist.ProcessGroup, links_take: float) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts = [contribution(one, LENGTH, torch.float32).cuda() for one in range(ranks)]
    by_links: list[str] = []
    with made(group, links="auto") as multipath, pytest.MonkeyPatch.context() as patch:
        exchange, row_of = multipath.transfers.exchange, trials.row_of

        def noted(load: Load) -> set[Link]:
            by_links.append(load.what)
            return exchange(load)

        patch.setattr(multipath.transfers, "exchange", noted)

        def paced(move: Callable[[], object], queues: Queues) -> tuple[list[object], float]:
            before = len(by_links)
            runs, _ = row_of(move, queues)
            return runs, links_take if len(by_links) > before else 1.0

        patch.setattr(trials, "row_of", paced)
        gathered = torch.zeros(ranks * LENGTH, device="cuda")
        for async_op in (False, True):
            multipath.all_gather(gathered, parts[rank])
            assert torch.equal(gathered, torch.cat(parts))
            by_links.clear()
            gathered.zero_()
            work = multipath.all_gather(gathered, parts[rank], async_op)
            if work is not None:
                work.wait()
            assert torch.equal(gathered, torch.cat(parts))
            assert len(by_links) == (links_take < 1.0)


@pytest.mark.parametrize("links_take", [0.5, 2.0])
def test_gathers_go_by_what_is_faster(links_take: float, pair: RankPool) -> None:
    pair.run(gathers_by_what_is_faster, links_take)


def into_shared_tensors(group: dist.ProcessGroup, can_share: bool) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pad = torch.zeros(1000 * (rank + 1), dtype=torch.uint8, device="cuda")  # other places in it
    outputs = [torch.zeros(ranks * LENGTH, dtype=torch.uint8, device="cuda") for _ in range(2)]
    with made(group) as multipath:
        assert [multipath.share(output) for output in outputs] == [can_share] * 2
        for index, output in enumerate(outputs * 2):
            parts = [contribution(one + index, LENGTH, torch.uint8).cuda() for one in range(ranks)]
            own = output[rank * LENGTH : (rank + 1) * LENGTH]
            own.copy_(parts[rank])
            work = multipath.all_gather(output, own, async_op=index > 1)
            if work is not None:
                work.wait()
            assert torch.equal(output, torch.cat(parts))
        tuned = multipath.transfers.direct, multipath.transfers.balancer
        assert [one.is_tuned(LENGTH) for one in tuned] == [can_share, not can_share]
    del pad


def test_tensors_of_torch_are_shared(pair: RankPool) -> None:
    pair.run(into_shared_tensors, True)


def test_tensors_of_expandable_segments_are_not_shared(other_pair: RankPool) -> None:
    other_pair.run(into_shared_tensors, False)


def beside_launches(group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    config = MoEConfig(
        hidden=1024,
        intermediate=512,
        num_experts=16,
        topk=2,
        activation="silu",
        gated=True,
        num_ranks=1,
        max_tokens=2048,
    )
    layer = FlashMoELayer(config, router=True)
    x = torch.randn(2048, 1024, dtype=torch.bfloat16, device="cuda")
    want_y = layer(x)
    parts = [contribution(one, 16 * LENGTH, torch.float32).cuda() for one in range(ranks)]
    want = in_order(parts)
    with made(group) as multipath:
        multipath.all_reduce(parts[rank].clone())
        for _ in range(10):
            whole = parts[rank].clone()
            layer(x)
            work = multipath.all_reduce(whole, async_op=True)
            y = layer(x)
            assert work is not None
            work.wait()
            assert torch.equal(whole, want)
            assert torch.equal(y, want_y)


def test_reductions_beside_launches(pair: RankPool) -> None:
    pair.run(beside_launches)


def test_reductions_beside_launches_on_one_hardware_queue(other_pair: RankPool) -> None:
    other_pair.run(beside_launches)


def on_the_host(group: dist.ProcessGroup) -> str:
    with made(group) as multipath:
        with pytest.raises(ShapeError, match=r"tensor is on cpu: wanted cuda:0"):
            multipath.all_reduce(torch.ones(4))
        return "refused"


def test_tensors_of_the_host_are_refused(pair: RankPool) -> None:
    assert pair.run(on_the_host) == ["refused"] * 2


def uneven(group: dist.ProcessGroup) -> str:
    rank = dist.get_rank(group)
    multipath = made(group, timeout=5.0)
    multipath.all_reduce(torch.ones(LENGTH, device="cuda"))
    try:
        for _ in range(3):
            multipath.all_reduce(torch.ones(LENGTH + rank, device="cuda"))
            torch.cuda.synchronize()
            time.sleep(0.5)
    except FlashMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_uneven_sizes_are_named_on_every_rank(pair: RankPool) -> None:
    sizes = {f"{4 * (LENGTH + rank)} bytes" for rank in range(2)}
    for said in pair.run(uneven):
        assert ShapeError.__name__ in said
        assert all(size in said for size in sizes)


def outcome_of(multipath: Multipath, path: Path) -> None:
    """Goes on until a call fails, and writes down how."""
    part = torch.ones(32 * 2**20, device="cuda")
    whole = torch.zeros(2 * part.numel(), device="cuda")
    began = began_last = time.monotonic()
    try:
        while time.monotonic() < began + PATIENCE_S:
            multipath.all_gather(whole, part)
            torch.cuda.synchronize()
            began_last = time.monotonic()
    except FlashMoEError as error:
        took = time.monotonic() - began_last
        path.write_text(f"{took}\n{type(error).__name__}: {error}\n{float(whole[0])}")
        return
    path.write_text("0\nno error\n0")


def with_a_peer_that(group: dist.ProcessGroup, fault: str, path: Path) -> None:
    rank = dist.get_rank(group)
    multipath = made(
        group,
        links=("host",) if fault == "dies" else ("peer", "host"),
        timeout=LIMIT_S,
        watch=LIMIT_S / 4,
    )
    part = torch.ones(32 * 2**20, device="cuda")
    multipath.all_gather(torch.zeros(2 * part.numel(), device="cuda"), part)
    torch.cuda.synchronize()
    if rank == 0:
        lines = logging.FileHandler(path.with_suffix(".lines"))
        logging.getLogger("flashmoe_megatron").addHandler(lines)
        try:
            outcome_of(multipath, path)
        finally:
            logging.getLogger("flashmoe_megatron").removeHandler(lines)
    elif fault == "dies":
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        outcome_of(multipath, path.with_suffix(".peer"))
    else:  # stays away until the other has given up
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def test_a_peer_that_stays_away_is_named_in_time(pair: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "outcome"
    pair.run(with_a_peer_that, "stays away", path)
    took, error, first = path.read_text().split("\n")
    assert "ranks [1]" in error
    lines = path.with_suffix(".lines").read_text()
    assert "multipath, rank 0: call 2, all_gather of 268435456 bytes, has not ended for " in lines
    assert "rank 1 has not made it (its last is call 1, all_gather of 268435456 bytes)" in lines
    assert error.startswith((LinkError.__name__, PeerTimeoutError.__name__))
    assert float(took) < 10 * LIMIT_S  # on a busy machine, too
    assert first == "nan"  # nobody can take what was moved for a result


def test_a_peer_that_dies_is_named_soon(pair: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "outcome"
    with pytest.raises(RankError):
        pair.run(with_a_peer_that, "dies", path)
    took, error, _ = path.read_text().split("\n")
    assert "rank 1" in error
    assert error.startswith((LinkError.__name__, PeerTimeoutError.__name__))
    assert float(took) < 10 * LIMIT_S  # on a busy machine, too
