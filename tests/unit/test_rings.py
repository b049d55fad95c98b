"""The protocol of links between queues, which are threads here."""

import contextlib
import ctypes
import functools
import itertools
import math
import random
import struct
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.errors import (
    DeviceError,
    FlashMoEError,
    LinkError,
    PeerTimeoutError,
    ShapeError,
    reason_of,
)
from flashmoe_megatron.multipath import board, ring
from flashmoe_megatron.multipath.links import Moved
from flashmoe_megatron.multipath.multipath import MIN_MAPPED_BYTES, Multipath
from flashmoe_megatron.multipath.peer_copies import Arena
from flashmoe_megatron.multipath.queues import GpuQueues
from flashmoe_megatron.multipath.ring import HostRelay
from flashmoe_megatron.multipath.thread_queues import ThreadMoment, ThreadQueue, ThreadQueues
from flashmoe_megatron.multipath.trials import Times
from flashmoe_megatron.separate.exchange import Copies
from tests.distributed import RankPool, assert_waited
from tests.unit.summands import contribution
from tools.bench import multipath as bench

CPU = torch.device("cpu")
LINKS = ["peer", "host"]


def make_queues(num_threads: int = 9) -> ThreadQueues:
    """Queues with small slots, so that chunks have to wait for them."""
    return ThreadQueues(num_threads, slot_bytes=2**14)


def opened(
    group: dist.ProcessGroup,
    queues: ThreadQueues,
    links: Sequence[Any] = LINKS,
    timeout: float = 30,
    min_bytes: int = 1,
) -> Multipath:
    """Links whose calls return at once, so that several are under way as on a GPU."""
    multipath = Multipath(
        group, device=CPU, links=links, min_bytes=min_bytes, timeout=timeout, queues=queues
    )
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        vars(multipath)[name] = functools.partial(getattr(multipath, name), async_op=True)
    return multipath


def gathers(group: dist.ProcessGroup, num_queues: int) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    draw = random.Random(3)  # the same lengths on every rank
    queues = make_queues(num_queues)
    current = queues.current()
    with opened(group, queues) as multipath:
        inputs, expected = [], []
        memory = multipath.empty(3_000_000)
        for index in range(40):
            length = draw.choice([1, 4096, 5000, 16384, 70_001, 300_000])
            parts = [
                torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed))
                for seed in range(index * ranks, (index + 1) * ranks)
            ]
            whole = torch.cat(parts).to(torch.uint8)
            if index % 2:  # in memory that is written to directly, whose parts are used in turn
                at = index % 4 // 2 * 1_000_000
                output = memory[at : at + whole.numel()]
                current.synchronize()
            else:
                output = torch.zeros_like(whole)
            inputs.append(parts[rank].to(torch.uint8))
            multipath.all_gather(output, inputs[-1])
            expected.append((output, whole))
            if index % 8 == 7:  # several gathers are under way at once
                current.synchronize()
                assert all(torch.equal(*pair) for pair in expected[-2:])
                assert all(torch.equal(*pair) for pair in expected[::2])


@pytest.mark.parametrize(("num_ranks", "num_queues"), [(2, 9), (3, 1)])
def test_gathers_by_lanes(num_ranks: int, num_queues: int, ranks: RankPool) -> None:
    ranks.run(gathers, num_queues, num_ranks=num_ranks)


def without_a_pacer(group: dist.ProcessGroup) -> str:
    """A gather by copies that wait for leave from a process that has ended."""
    queues = make_queues()
    current = queues.current()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.multiprocessing, "get_context", lambda _: Mock())
        patch.setattr(bench, "_wait_for_pacer", lambda *_: None)
        links = [lambda ranks, queues: bench.PacedCopies(ranks, queues, 1.0)]
        multipath = opened(group, queues, links)
        output = multipath.empty(200)
        multipath.transfers.links[0].timeout = 2  # from here on
        multipath.transfers.direct.tune(100, lambda carried, chunks: [1e-6 * max(carried)])
        part = output[100 * dist.get_rank(group) :][:100]

        def gather_twice() -> None:
            for _ in range(2):
                multipath.all_gather(output, part)
                current.synchronize()  # which ends, since the link lets its streams go

        with pytest.raises(PeerTimeoutError) as caught:
            gather_twice()
        multipath.close()
        return str(caught.value)


def test_a_pacer_that_ends_ends_the_link(ranks: RankPool) -> None:
    said = ranks.run(without_a_pacer, num_ranks=2)
    assert any("has waited" in one and "longer than 2 s" in one for one in said)


def noted_copies(queues: ThreadQueues) -> list[tuple[int, int, int, ThreadQueue]]:
    """Each copy's target, source and bytes, and its queue, from now on."""
    copies: list[Any] = []
    vars(queues).update(copy=noting(queues.copy, copies))
    return copies


def in_step(group: dist.ProcessGroup) -> None:
    """Gathers whose input is late, whose copies are late, and whose input is used again at once."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    queues = make_queues()
    current = queues.current()
    copies = noted_copies(queues)
    with opened(group, queues, LINKS[:1]) as multipath:
        output = multipath.empty(ranks * 100)
        part = output[rank * 100 :][:100]
        multipath.all_gather(output, part)  # tunes
        streams = [stream for lane in multipath.transfers.links[0].streams for stream in lane]
        for turn in range(12):
            current.run(functools.partial(time.sleep, 0.01 * (turn % ranks == rank)))
            current.run(functools.partial(part.fill_, turn * ranks + rank))
            if turn % 2:
                late = streams[1 + turn % (ranks - 2)]
                late.run(functools.partial(time.sleep, 0.01))
            copies.clear()
            multipath.all_gather(output, part)
            assert len({stream for *_, stream in copies}) == ranks - 1
            found = torch.empty_like(output)
            current.run(functools.partial(found.copy_, output))
            current.run(functools.partial(part.fill_, 255))
            current.synchronize()
            assert found.view(ranks, 100).eq(turn * ranks + torch.arange(ranks)[:, None]).all()


def test_copies_beside_each_other_wait_for_the_first_stream_and_it_for_them(
    ranks: RankPool,
) -> None:
    ranks.run(in_step, num_ranks=4)


def sent_once(group: dist.ProcessGroup) -> None:
    """Gathers by the relay, between reductions, where one receiver is late with every chunk."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    queues = make_queues()
    current = queues.current()
    copies = noted_copies(queues)
    with opened(group, queues, LINKS[1:]) as multipath:
        streams = [stream for lane in multipath.transfers.links[0].streams for stream in lane]
        for length in (70_001, 8192, 300_000, 1):
            parts = [contribution(one, length, torch.float32) for one in range(ranks)]
            output = torch.zeros(ranks * length)
            multipath.all_gather(output, parts[rank])  # tries chunks
            for _ in range(3):
                current.synchronize()
                output.zero_()
                if rank == ranks - 1:
                    for stream in streams[1::2]:
                        stream.run(functools.partial(time.sleep, 0.02))
                copies.clear()
                multipath.all_gather(output, parts[rank])
                begin = parts[rank].data_ptr()
                sent = [at for _, at, *_ in copies if begin <= at < begin + 4 * length]
                assert len(sent) == len(set(sent))
                assert len(copies) == ranks * len(sent)
                shard = torch.zeros(length)
                multipath.reduce_scatter(shard, torch.cat(parts))
                current.synchronize()
                assert torch.equal(output, torch.cat(parts))
                assert torch.equal(shard, parts[rank] + parts[rank] + parts[rank])


def test_what_is_for_all_is_sent_once(ranks: RankPool) -> None:
    ranks.run(sent_once, num_ranks=3)


def alone(group: dist.ProcessGroup, is_direct: bool) -> str:
    rank = dist.get_rank(group)
    queues = make_queues()
    current = queues.current()
    links = LINKS[:1] if is_direct else LINKS[1:]
    multipath = opened(group, queues, links)
    output = multipath.empty(200)
    multipath.transfers.links[0].timeout = 2  # from here on
    part = output[100 * rank :][:100].fill_(1)
    tuned = multipath.transfers.direct if is_direct else multipath.transfers.balancer
    tuned.tune(100, lambda carried, chunks: [1e-6 * max(carried)])
    events = list[Any]()
    vars(queues).update(moment=noting(queues.moment, events))
    if rank == 0:
        multipath.all_gather(output, part)
        current.synchronize()  # which ends, since the link lets its streams go
        assert bool(events) != is_direct  # words tell of one copy alone
    dist.barrier(group)
    try:
        multipath.all_gather(output, part)
    except PeerTimeoutError as error:
        return str(error)
    return "no error"


def noting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The function, which notes the positional arguments of each call before that."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    return noted


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_peer_that_stays_away_is_named(is_direct: bool, ranks: RankPool) -> None:
    said = ranks.run(alone, is_direct, num_ranks=2)
    assert_waited(said[0], [1], 2)


def by_shares_of_their_own(group: dist.ProcessGroup) -> None:
    queues = make_queues()
    current = queues.current()
    with opened(group, queues) as multipath:
        nbytes, flights = 2**16, list[Any]()
        multipath.transfers.balancer.tune(
            nbytes, lambda carried, chunks: [1e-9 * one for one in carried]
        )
        multipath.transfers.direct.tune(nbytes, lambda carried, chunks: [1e-9 * carried[0], 1.0])

        vars(multipath.transfers).update(fly=noting(multipath.transfers.fly, flights))
        part = torch.ones(nbytes, dtype=torch.uint8)
        memory = multipath.empty(2 * nbytes)
        for output in (memory, torch.empty_like(memory)):
            multipath.all_gather(output, part)
            current.synchronize()
            assert bool((output == 1).all())
        moved = [carried for _, _, carried, *_ in flights]
        assert moved == [(nbytes, 0), (nbytes // 2, nbytes // 2)]


def test_gathers_without_a_detour_have_shares_of_their_own(ranks: RankPool) -> None:
    ranks.run(by_shares_of_their_own, num_ranks=2)


def trials_alone(group: dist.ProcessGroup, is_direct: bool) -> None:
    queues = make_queues()
    current = queues.current()
    with opened(group, queues, LINKS[:1]) as multipath:
        flights = list[Any]()
        vars(multipath.transfers).update(fly=noting(multipath.transfers.fly, flights))
        memory = multipath.empty(2 * 2**16)
        part = torch.ones(2**16, dtype=torch.uint8)
        output = memory if is_direct else torch.empty_like(memory)
        multipath.all_gather(output, part)
        current.synchronize()
        timed = [what for what, *_ in flights if what != "a meeting"]
        assert len(timed) < len(flights)
        # The call itself has its own part to copy meanwhile, so that it has a flight.
        assert (len(timed) == 1) == is_direct


@pytest.mark.parametrize("is_direct", [False, True])
def test_what_a_link_writes_alone_is_tried_as_it_goes(is_direct: bool, ranks: RankPool) -> None:
    ranks.run(trials_alone, is_direct, num_ranks=2)


def reductions(group: dist.ProcessGroup, num_queues: int) -> None:
    """Sums of parts that peers have written to this rank's inbox, which grows and is used again."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    queues = make_queues(num_queues)
    current = queues.current()
    exchanges = list[Any]()
    with opened(group, queues) as multipath:
        exchange = multipath.transfers.exchange
        vars(multipath.transfers).update(exchange=noting(exchange, exchanges))
        memory = multipath.empty(4 * 5 * 30_000)
        for dtype in (torch.bfloat16, torch.float32):
            for length in (3, 30_000, 1000, 20_001):
                for average in (False, True):
                    parts = [contribution(one, ranks * length, dtype) for one in range(ranks)]
                    total = functools.reduce(torch.add, [part.float() for part in parts])
                    want = (total / ranks if average else total).to(dtype)
                    own = want[rank * length : (rank + 1) * length]
                    shard = torch.zeros(length, dtype=dtype)
                    op: Any = "average" if average else "sum"
                    multipath.reduce_scatter(shard, parts[rank].clone(), op)
                    current.synchronize()
                    assert torch.equal(shard, own)
                    # The last rank's part is shorter, or there is none for it.
                    nbytes = (ranks * length - 2) * dtype.itemsize
                    for place in (torch.empty(nbytes, dtype=torch.uint8), memory[:nbytes]):
                        whole = place.view(dtype)
                        whole.copy_(parts[rank][:-2])
                        exchanges.clear()
                        multipath.all_reduce(whole, op)
                        current.synchronize()
                        assert torch.equal(whole, want[:-2])
                        direct = [load.pieces[0].place is not None for (load,) in exchanges]
                        assert direct == [True, place.data_ptr() == memory.data_ptr()]


@pytest.mark.parametrize(("num_ranks", "num_queues"), [(2, 9), (3, 1)])
def test_reductions_without_a_detour(num_ranks: int, num_queues: int, ranks: RankPool) -> None:
    ranks.run(reductions, num_queues, num_ranks=num_ranks)


def into_shared_tensors(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    queues = make_queues()
    current = queues.current()
    flights = list[Any]()
    with opened(group, queues) as multipath:
        fly = multipath.transfers.fly
        # A program's tensors lie somewhere in allocations, on each rank somewhere else.
        allocation = queues.tensor(queues.allocate(2**17), 2**17)
        output, alike = (
            allocation[512 * rank :][:70_000],
            torch.zeros(70_000, dtype=torch.uint8),
        )
        assert multipath.share(output)
        assert multipath.share(output)  # again, which tells nobody anything
        for target in (output, output[1000:3000], alike):
            length = target.numel() // 2
            part = torch.full((length,), rank + 1, dtype=torch.uint8)
            multipath.all_gather(target, part)
            current.synchronize()
            vars(multipath.transfers).update(fly=noting(fly, flights))
            flights.clear()
            target.zero_()
            dist.barrier(group)
            multipath.all_gather(target, part)
            current.synchronize()
            assert target.tolist() == [1] * length + [2] * length
            moved = [pieces[0].place is not None for _, pieces, *_ in flights]
            assert moved == [target is not alike]
            vars(multipath.transfers).update(fly=fly)
        refused = alike if rank else queues.tensor(queues.allocate(70_000), 70_000)
        # What one rank cannot share none does; nothing else is asked of ranks after that.
        assert not multipath.share(refused)
        assert not multipath.share(output[: 100 + rank])
        assert multipath.share(output)
    queues = make_queues()
    allocation = queues.tensor(queues.allocate(2**17), 2**17)
    with (
        opened(group, queues) as multipath,
        pytest.raises(ShapeError, match=r"memory of \[100, 101\] bytes"),
    ):
        multipath.share(allocation[: 100 + rank])


def test_tensors_that_are_shared_are_written_to(ranks: RankPool) -> None:
    ranks.run(into_shared_tensors, num_ranks=2)


def into_memory_that_is_gone(group: dist.ProcessGroup) -> str:
    rank = dist.get_rank(group)
    queues = make_queues()
    multipath = opened(group, queues, timeout=20)
    multipath.transfers.direct.tune(100, lambda carried, chunks: [1e-6 * carried[0], 1.0])
    output = queues.tensor(queues.allocate(200), 200)
    part = output[100 * rank :][:100]
    assert multipath.share(output)
    multipath.all_gather(output, part)
    if rank == 0:  # the storage has been resized, and the same address has been given
        vars(queues).update(allocation_id=lambda address: -1)
    dist.barrier(group)
    said = "no error"
    try:
        for _ in range(100):
            multipath.all_gather(output, part)
            time.sleep(0.02)
    except LinkError as error:
        said = str(error)
    multipath.close()
    return said


def test_memory_that_was_given_back_is_not_written_to(ranks: RankPool) -> None:
    for said in ranks.run(into_memory_that_is_gone, num_ranks=2):
        assert "wanted its storage not to be resized" in said


def with_places(
    group: dist.ProcessGroup, queues: ThreadQueues, timeout: float = 20, num_links: int = 1
) -> tuple[Multipath, torch.Tensor, torch.Tensor]:
    """Peer copies, which carry all, memory that they write to, and this rank's part of it."""
    rank, links = dist.get_rank(group), LINKS[:num_links]
    multipath = opened(group, queues, links, timeout=timeout)
    tune = multipath.transfers.direct.tune
    tune(100, lambda carried, chunks: [1e-6 * carried[0], 1.0][:num_links])
    output = multipath.empty(200)
    dist.barrier(group)  # else a rank may hear of a failure while it still waits for memory
    return multipath, output, output[100 * rank :][:100]


def behind_a_failure(group: dist.ProcessGroup) -> float:
    """The failed rank's stream comes late to an offer that its peer has been let go from already.

    Returns:
        Seconds until this rank's stream has passed all, which the other's may be behind.
    """
    rank = dist.get_rank(group)
    queues = make_queues()
    current = queues.current()
    gate = threading.Event()
    multipath, output, part = with_places(group, queues, 2)
    current.run(gate.wait)  # its own work
    multipath.all_gather(output, part)
    if rank == 0:
        multipath.all_gather(output, part)
    dist.barrier(group)
    if rank == 1:
        multipath.transfers.links[0].fail(LinkError("a cable is loose"))
    time.sleep(1.0 + 0.5 * (rank == 0))
    gate.set()
    began = time.monotonic()
    current.synchronize()
    took = time.monotonic() - began
    dist.barrier(group)
    with pytest.raises(LinkError, match="a cable is loose"):
        multipath.close()
    return took


def test_streams_end_behind_a_failure(ranks: RankPool) -> None:
    assert max(ranks.run(behind_a_failure, num_ranks=2)) < 5


def marked_by_any(group: dist.ProcessGroup, failing: int) -> None:
    """A gather goes by two links, and the peer tells of the failure of one of them alone."""
    rank, reason = dist.get_rank(group), reason_of(LinkError("a cable is loose"))
    queues = make_queues()
    current = queues.current()
    with pytest.MonkeyPatch.context() as patch:
        multipath = opened(group, queues, timeout=20)
        links: Any = multipath.transfers.links
        multipath.transfers.balancer.tune(
            2**18, lambda carried, chunks: [1e-6 * n for n in carried]
        )
        guard, release, guards = ring.RingLink.guard, ring.RingLink.release, list[str]()

        def noted(link: ring.RingLink, output: torch.Tensor) -> bool:
            guards.append(link.name)
            if len(guards) == 2:
                dist.barrier(group)  # all of the second gather has been issued
            return guard(link, output)

        def checked(link: ring.RingLink) -> None:
            for one in links:
                assert math.isnan(*struct.unpack("<f", one.own.read(board.VERDICT, 4)))
            release(link)

        patch.setattr(ring.RingLink, "guard", noted)
        patch.setattr(ring.RingLink, "release", checked)
        output, part = torch.zeros(2**17), torch.ones(2**16)
        multipath.all_gather(output, part)
        assert len(guards) == 1
        current.synchronize()
        assert bool((output == 1).all())
        if rank == 0:
            multipath.all_gather(output, part)
            current.synchronize()
            assert bool(output[0].isnan())
        else:
            dist.barrier(group)
            for memory in links[failing].memories.values():
                board.post(memory, f"1 {reason}")
        dist.barrier(group)
        with pytest.raises(LinkError, match="a cable is loose"):
            multipath.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_links_fail_together(failing: int, ranks: RankPool) -> None:
    ranks.run(marked_by_any, failing, num_ranks=2)


def closed_early(group: dist.ProcessGroup) -> None:
    queues = make_queues()
    current = queues.current()
    gate = threading.Event()
    multipath, output, part = with_places(group, queues)
    current.run(gate.wait)
    multipath.all_gather(output, part)
    dist.barrier(group)
    multipath.transfers.links[0].fail(LinkError("a cable is loose"))
    with pytest.raises(LinkError, match="a cable is loose"):
        multipath.all_gather(output, part)
    behind, gate_behind = threading.Event(), threading.Event()
    current.run(gate_behind.wait)
    current.run(behind.set)
    threading.Timer(0.5, gate.set).start()
    threading.Timer(1.0, gate_behind.set).start()
    multipath.close()
    assert behind.is_set()  # nothing that the GPU has still to do is unmapped


def test_closing_waits_for_what_is_issued(ranks: RankPool) -> None:
    ranks.run(closed_early, num_ranks=2)


def broken_off(group: dist.ProcessGroup, num_links: int) -> None:
    """The driver refuses a copy behind the offer, for which the stream already waits."""
    rank = dist.get_rank(group)
    queues = make_queues()
    multipath, output, part = with_places(group, queues, num_links=num_links)

    def refused(*_: Any) -> None:
        raise DeviceError("cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE (1)")

    if rank == 0:
        vars(queues).update(copy=refused)
        with pytest.raises(DeviceError):
            multipath.all_gather(output, part)
        multipath.close()  # which waits for the stream
    dist.barrier(group)
    if rank == 1:
        with pytest.raises(DeviceError, match="rank 0"):
            multipath.all_gather(output, part)
        multipath.close()


@pytest.mark.parametrize("num_links", [1, 2])
def test_closing_lets_go_what_was_broken_off(num_links: int, ranks: RankPool) -> None:
    ranks.run(broken_off, num_links, num_ranks=2)


def late_behind_a_close(group: dist.ProcessGroup) -> None:
    """A peer's late word is smaller than the one that has let this rank's stream go on."""
    rank = dist.get_rank(group)
    queues = make_queues()
    current = queues.current()
    multipath = opened(group, queues, LINKS[1:], timeout=20)
    for length in (8192, 100_000):
        multipath.transfers.balancer.tune(length, lambda carried, chunks: [1e-6 * carried[0]])
    gate, copies, copy = threading.Event(), itertools.count(), queues.copy
    if rank == 1:
        for _, from_peer in multipath.transfers.links[0].streams:
            from_peer.run(gate.wait)
    small, large = (torch.zeros(length, dtype=torch.uint8) for length in (16384, 200_000))
    multipath.all_gather(small, torch.ones(8192, dtype=torch.uint8))
    if rank == 0:
        current.synchronize()  # its own part is over; the peer has not taken what it was sent
        current.run(functools.partial(time.sleep, 2.0))  # its own work

        def refused(*args: Any) -> None:
            if next(copies) == 11:
                raise DeviceError("cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE (1)")
            copy(*args)

        vars(queues).update(copy=refused)
        with pytest.raises(DeviceError):
            multipath.all_gather(large, torch.ones(100_000, dtype=torch.uint8))
    dist.barrier(group)
    if rank == 1:
        threading.Timer(1.0, gate.set).start()
    with contextlib.suppress(DeviceError):
        multipath.close()


def test_closing_lets_go_of_late_peers(ranks: RankPool) -> None:
    ranks.run(late_behind_a_close, num_ranks=2)


def failed_meanwhile(group: dist.ProcessGroup, operation: str) -> None:
    """A peer's failure is not taken for a GPU that has no room, or cannot share."""
    rank = dist.get_rank(group)
    queues = make_queues()
    multipath = opened(group, queues, LINKS[:1], timeout=20)
    tensor = queues.tensor(queues.allocate(4000), 4000)
    if rank == 1:
        time.sleep(0.5)
        multipath.transfers.links[0].fail(DeviceError("a card has fallen off the bus"))
    else:
        with pytest.raises(DeviceError, match="rank 1: a card"):
            multipath.share(tensor) if operation == "share" else multipath.all_reduce(tensor)
    dist.barrier(group)
    with contextlib.suppress(DeviceError):
        multipath.close()


@pytest.mark.parametrize("operation", ["share", "all_reduce"])
def test_a_failure_is_no_want_of_memory(operation: str, ranks: RankPool) -> None:
    ranks.run(failed_meanwhile, operation, num_ranks=2)


def uneven_reductions(group: dist.ProcessGroup) -> str:
    rank = dist.get_rank(group)
    queues = make_queues()
    multipath = opened(group, queues, timeout=60)
    began = time.monotonic()
    tensors = [torch.ones(20_000), *(torch.ones(20_000 + 30_000 * rank) for _ in range(100))]
    said = "no error"
    try:
        for tensor in tensors:
            multipath.all_reduce(tensor)
            time.sleep(0.02)
    except FlashMoEError as error:
        assert time.monotonic() < began + 20
        said = str(error)
    multipath.close()  # which waits for what is still to be copied
    return said


def test_reductions_of_other_sizes_are_named_on_every_rank(ranks: RankPool) -> None:
    for said in ranks.run(uneven_reductions, num_ranks=2):
        assert "all_reduce of 80000 bytes" in said
        assert "all_reduce of 200000 bytes" in said


def without_room(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    queues = make_queues()
    current = queues.current()
    allocate = queues.allocate

    def allocated(nbytes: int) -> int:
        if rank == 1 and nbytes > 2**17:
            raise DeviceError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
        return allocate(nbytes)

    with opened(group, queues) as multipath:
        vars(queues).update(allocate=allocated)
        for length in (1000, 2**18, 1000):
            whole = torch.full((length,), rank + 1, dtype=torch.int32)
            multipath.all_reduce(whole)
            current.synchronize()
            assert whole.tolist() == [3] * length


def test_reductions_without_room_take_a_detour(ranks: RankPool) -> None:
    ranks.run(without_room, num_ranks=2)


def by_their_size(group: dist.ProcessGroup) -> None:
    queues = make_queues()
    with pytest.MonkeyPatch.context() as patch:
        sizes = [2**17, 2**18]
        with opened(group, queues, min_bytes=sizes[-1]) as multipath:
            moved, memory = list[int](), multipath.empty(sizes[-1])
            vars(multipath.transfers).update(exchange=lambda load: moved.append(len(load.pieces)))
            for least in (MIN_MAPPED_BYTES, sizes[0]):
                patch.setattr("flashmoe_megatron.multipath.multipath.MIN_MAPPED_BYTES", least)
                for place in (memory, torch.empty_like(memory)):
                    is_mapped = place is memory and least == sizes[0]
                    for nbytes, wanted in zip(sizes, (int(is_mapped), 1), strict=True):
                        moved.clear()
                        part = torch.full((nbytes // 2,), 3, dtype=torch.uint8)
                        place.zero_()
                        work = multipath.all_gather(place[:nbytes], part)
                        assert work is not None
                        work.wait()
                        assert len(moved) == wanted
                        assert wanted or bool((place[:nbytes] == 3).all())


def test_small_gathers_go_by_torch(ranks: RankPool) -> None:
    ranks.run(by_their_size, num_ranks=2)


def strided_in_place(group: dist.ProcessGroup) -> list[str]:
    """What is said of other tensors at addresses, with lengths and dtypes, that are known."""
    queues = make_queues()
    current = queues.current()
    multipath, output, part = with_places(group, queues)
    part.fill_(1)
    for _ in range(2):
        multipath.all_gather(output, part)
    current.synchronize()
    said = []
    for given in ((output.view(2, 100).t(), part), (output, part.view(2, 50).t())):
        with pytest.raises(ShapeError) as refused:
            multipath.all_gather(*given)
        said.append(str(refused.value))
    multipath.close()
    return said


def test_a_known_address_does_not_make_a_tensor_contiguous(ranks: RankPool) -> None:
    for output, part in ranks.run(strided_in_place, num_ranks=2):
        assert output == "output has strides (1, 100): wanted it contiguous"
        assert part == "input has strides (1, 50): wanted it contiguous"


@pytest.mark.parametrize("count", [5, 2**32 - 3])
def test_a_counter_goes_on_past_its_last_number(count: int) -> None:
    for behind, has_counted in ((-1, False), (0, True), (1, True), (7, True), (2**30, True)):
        word = ctypes.c_uint32((count + behind) & 0xFFFFFFFF)
        assert ring.has_counted(word, count) == has_counted


def noted_times(group: dist.ProcessGroup) -> list[int]:
    """Bytes of noted gathers, of which only the first rank's own part has to be copied."""
    rank = dist.get_rank(group)
    queues = make_queues()
    current = queues.current()
    with pytest.MonkeyPatch.context() as patch:
        noted = list[int]()
        with opened(group, queues) as multipath:
            multipath.transfers.direct.tune(100, lambda carried, chunks: [1e-6 * carried[0], 1.0])
            memory = multipath.empty(200)
            own = memory[100 * rank :][:100]
            part = torch.ones(100, dtype=torch.uint8) if rank == 0 else own.fill_(1)
            add = Times.add

            def noting(
                self: Times, shares: tuple[float, ...], links: Sequence[Moved | None]
            ) -> Any:
                noted.append(sum(one.nbytes for one in links if one))
                return add(self, shares, links)

            patch.setattr(Times, "add", noting)
            for _ in range(33):
                multipath.all_gather(memory, part)
            current.synchronize()
            assert bool((memory == 1).all())
        return noted


def test_ranks_take_note_of_the_same_transfers(ranks: RankPool) -> None:
    assert ranks.run(noted_times, num_ranks=2) == [[100] * 4] * 2


def timed_moments(group: dist.ProcessGroup) -> int:
    """Moments with a time in sixteen gathers by two links."""
    queues = make_queues()
    current = queues.current()
    nbytes, timed = 2**16, list[Any]()
    with opened(group, queues) as multipath:
        multipath.transfers.direct.tune(
            nbytes, lambda carried, chunks: [1e-9 * one for one in carried]
        )
        memory = multipath.empty(2 * nbytes)
        part = memory[nbytes * dist.get_rank(group) :][:nbytes].fill_(1)

        vars(queues).update(timed_moment=noting(queues.timed_moment, timed))
        for _ in range(16):
            multipath.all_gather(memory, part)
        current.synchronize()
        assert bool((memory == 1).all())
    return len(timed)


def test_a_gather_by_two_links_is_timed_one_time_in_eight(ranks: RankPool) -> None:
    """A moment with a time holds a GPU up: each of the two has a begin and two links' ends."""
    assert ranks.run(timed_moments, num_ranks=2) == [2 * 3] * 2


def into_other_parts(group: dist.ProcessGroup, operation: str) -> str:
    rank = dist.get_rank(group)
    queues = make_queues()
    multipath = opened(group, queues, timeout=20)
    multipath.transfers.direct.tune(100, lambda carried, chunks: [1e-6 * carried[0], 1.0])
    memory = multipath.empty(1000, torch.int32)
    said = "no error"
    try:
        for _ in range(200):
            if operation == "all_gather":
                multipath.all_gather(memory[rank : rank + 50], memory[500:525])
            else:
                multipath.all_reduce(memory[rank : rank + 50])
            time.sleep(0.02)
    except FlashMoEError as error:
        said = str(error)
    multipath.close()
    return said


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce"])
def test_other_parts_of_memory_are_refused_on_every_rank(operation: str, ranks: RankPool) -> None:
    for said in ranks.run(into_other_parts, operation, num_ranks=2):
        assert f"{operation} of 200 bytes to 1+0" in said
        assert f"{operation} of 200 bytes to 1+4" in said


def test_slots_of_many_ranks() -> None:
    gpu = GpuQueues(torch.device("cuda", 0))
    sizes = [gpu.slot_bytes(4 * peers) for peers in (1, 3, 7, board.MAX_RANKS - 1)]
    assert sizes == [2**25, 2**23, 2**22, 2**22]


def told_by_a_peer(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    output, part = torch.zeros(200, dtype=torch.uint8), torch.ones(100, dtype=torch.uint8)
    queues = make_queues()
    multipath = opened(group, queues, LINKS[1:], timeout=20)
    relay = multipath.transfers.links[0]
    assert isinstance(relay, HostRelay)
    assert relay.own.read(board.VERDICT, 4) == struct.pack("<f", 1.0)
    dist.barrier(group)
    if rank == 1:
        relay.fail(LinkError("a cable is loose"))
    dist.barrier(group)
    # No stream has gone on yet that waits for the peer, so that no output is taken for good.
    assert math.isnan(*struct.unpack("<f", relay.own.read(board.VERDICT, 4)))
    with pytest.raises(LinkError, match="a cable is loose"):
        multipath.close() if rank == 0 else multipath.all_gather(output, part)
    multipath.close()


def test_what_a_peer_tells_counts_at_once(ranks: RankPool) -> None:
    ranks.run(told_by_a_peer, num_ranks=2)


def writes_of_any_size(group: dist.ProcessGroup, num_queues: int) -> None:
    """Exchanges of random pieces in regions of several, with an arena that grows."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    draw = random.Random(5)  # the same sizes on every rank
    queues = make_queues(num_queues)
    current = queues.current()
    arena = Arena(group, queues, 30)
    kept = []
    for call in range(12):
        arena.restart(current)
        expected = []
        for _ in range(draw.randrange(1, 4)):
            most = draw.choice([0, 1, 300, 40_000])
            sizes = [[draw.randrange(most + 1) for _ in range(ranks)] for _ in range(ranks)]
            region = arena.take([sum(column) for column in zip(*sizes, strict=True)])
            begins = [sum(row[target] for row in sizes[:rank]) for target in range(ranks)]
            sent = {
                peer: bytes_of(rank, peer, call, sizes[rank][peer]) for peer in arena.link.peers
            }
            copies = [
                (region.place.targets[peer] + begins[peer], one.data_ptr(), one.numel())
                for peer, one in sent.items()
                if one.numel()
            ]
            arena.write(f"call {call}", copies, region, current)
            own = slice(begins[rank], begins[rank] + sizes[rank][rank])
            whole = torch.cat(
                [bytes_of(source, rank, call, sizes[source][rank]) for source in range(ranks)]
            )
            kept.append(sent)
            expected.append((region.memory, whole, own))
        current.synchronize()
        for got, whole, own in expected:
            got[own] = whole[own]
            assert torch.equal(got, whole), f"call {call}"


def bytes_of(source: int, target: int, call: int, length: int) -> torch.Tensor:
    seed = (source * 8 + target) * 100 + call
    g = torch.Generator().manual_seed(seed)
    return torch.randint(256, (length,), generator=g, dtype=torch.uint8)


@pytest.mark.parametrize(("num_ranks", "num_queues"), [(2, 9), (3, 1)])
def test_ranks_write_pieces_of_any_size(num_ranks: int, num_queues: int, ranks: RankPool) -> None:
    ranks.run(writes_of_any_size, num_queues, num_ranks=num_ranks)


def without_a_peer(group: dist.ProcessGroup) -> str:
    rank = dist.get_rank(group)
    queues = make_queues()
    current = queues.current()
    arena = Arena(group, queues, 30)
    arena.restart(current)
    region = arena.take([64, 64])
    arena.link.timeout = 2  # from here on
    if rank == 0:
        arena.write("8 rows", [], region, current)
        current.synchronize()  # which ends, since the link lets its streams go
    dist.barrier(group)
    try:
        arena.restart(current)
    except FlashMoEError as error:
        return str(error)
    return "no error"


def hears_while_it_waits(group: dist.ProcessGroup) -> list[str]:
    """A peer stays away from an exchange while this rank already is in the next call."""
    rank = dist.get_rank(group)
    said = []
    queues = make_queues()
    current = queues.current()
    copies = Copies.__new__(Copies)  # without the streams of a GPU
    copies._arena = Arena(group, queues, 200)
    copies.restart = functools.partial(copies._arena.restart, current)
    copies.restart()
    region = copies._arena.take([64, 64])
    copies._arena.link.timeout = 1  # from here on
    if rank == 0:
        copies._arena.write("8 rows", [], region, current)
        copies.restart()
        never: Any = ThreadMoment()
        hosts = copies._arena.ranks
        for wait in (lambda: copies.wait_on_host(never), lambda: hosts.gather(None)):
            try:
                wait()
            except FlashMoEError as error:
                said.append(str(error))
    dist.barrier(group)
    return said


def test_a_host_that_waits_for_all_ranks_hears_of_a_broken_link(ranks: RankPool) -> None:
    numbers, reasons = ranks.run(hears_while_it_waits, num_ranks=2)[0]
    assert_waited(numbers, [1], 1)
    assert reasons == numbers


def gathers_reasons(group: dist.ProcessGroup) -> list[str | None]:
    queues = make_queues()
    copies = Copies.__new__(Copies)
    copies._arena = Arena(group, queues, 30)
    begun, moment = time.monotonic(), SimpleNamespace()
    moment.query = lambda: time.monotonic() > begun + 0.03  # longer than a host looks at once
    copies.wait_on_host(moment)
    return copies._arena.ranks.gather("late" if dist.get_rank(group) else None)


def test_hosts_tell_what_a_call_refuses(ranks: RankPool) -> None:
    assert ranks.run(gathers_reasons, num_ranks=2) == [[None, "late"]] * 2


def test_an_arena_names_the_peer_that_stays_away(ranks: RankPool) -> None:
    said = ranks.run(without_a_peer, num_ranks=2)
    assert_waited(said[0], [1], 2)
    assert said[1] != "no error"
