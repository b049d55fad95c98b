"""What links keep, let go and tell first, each by itself in one process."""

import errno
import os
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.errors import DeviceError, HeapError, LinkError
from flashmoe_megatron.multipath import memory, queues
from flashmoe_megatron.multipath.choose import make_links
from flashmoe_megatron.multipath.links import Place
from flashmoe_megatron.multipath.memory import Block, SharedMemory
from flashmoe_megatron.multipath.multipath import Multipath
from flashmoe_megatron.multipath.peer_copies import Arena
from flashmoe_megatron.multipath.queues import GpuQueues
from flashmoe_megatron.multipath.reductions import Inbox
from flashmoe_megatron.multipath.ring import HostRelay
from flashmoe_megatron.multipath.thread_queues import ThreadQueues
from flashmoe_megatron.multipath.transfers import Transfers
from flashmoe_megatron.ranks import StoreRanks

CPU = torch.device("cpu")


def bare(kind: Any, **attributes: Any) -> Any:
    """An object of a class that is made by several ranks, with what one test looks at."""
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


def test_a_forward_is_behind_what_was_read_and_what_was_broken_off() -> None:
    waits: list[object] = []
    link = SimpleNamespace(raise_if_broken=lambda: None)
    arena = bare(Arena, link=link, _stream="the last one", _writer="broken off")
    stream: Any = SimpleNamespace(wait_stream=waits.append)
    arena.restart(stream)
    assert waits == ["the last one", "broken off"]
    arena.restart(stream)
    assert len(waits) == 2, "what is in the same stream is in order"


def test_a_failed_link_is_not_asked_for_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    asked: list[int] = []

    def allocate(nbytes: int) -> Any:
        asked.append(nbytes)
        raise DeviceError("no room")

    def raise_if_broken() -> None:
        raise LinkError("a peer is gone")

    link = SimpleNamespace(allocate=allocate, raise_if_broken=raise_if_broken)
    with pytest.raises(LinkError, match="a peer is gone"):
        bare(Arena, link=link, _memory=None, _outgrown=[])._grow(64)
    assert asked == [64]


def test_links_that_were_made_before_one_fails_are_closed() -> None:
    closed: list[str] = []

    def fail(*_: object) -> Any:
        raise LinkError("no wires")

    made = [
        lambda *_, name=name: SimpleNamespace(close=lambda: closed.append(name)) for name in "ab"
    ]
    ranks: Any = None
    with pytest.raises(LinkError, match="no wires"):
        make_links(ranks, ThreadQueues(), [*made, fail])
    assert closed == ["a", "b"]


def test_nothing_of_what_ranks_have_told_stays_in_the_store() -> None:
    """A training tells times for weeks."""
    store = dist.HashStore()
    ranks = [
        bare(StoreRanks, _store=store, _prefix="x", rank=rank, num_ranks=3, timeout=5.0)
        for rank in range(3)
    ]
    for number in range(2):
        for one in ranks:
            one._store.set(one._key(number, one.rank), str(10 * one.rank))
        assert [one.read(number) for one in ranks] == [[0, 10, 20]] * 3
    assert store.num_keys() == 0


def test_memory_has_what_lies_in_it_as_a_whole() -> None:
    """Peers have mapped no more of it."""
    memory = torch.empty(64, dtype=torch.uint8)
    block = Block(0, memory.data_ptr() + 16, 32, {})
    for begin, end, is_in in ((16, 48, True), (20, 48, True), (16, 49, False), (15, 20, False)):
        assert block.has(memory[begin:end]) == is_in
    assert not block.has(memory[48:])


def test_a_gather_is_known_by_its_dtype_too() -> None:
    """Half of a float32 tensor's memory may be another one's of 16 bits."""
    place = Place("here", {}, 0)
    transfers = SimpleNamespace(
        links=[], pieces=lambda own, parts, _: len(own.view(torch.uint8)), load=lambda *given: given
    )
    multipath = bare(
        Multipath,
        _watchdog=None,
        _in_place={},
        _broken=None,
        _gathered_in=lambda *_: place,
        device=CPU,
        min_bytes=1,
        num_ranks=2,
        rank=0,
        transfers=transfers,
    )
    wide = torch.zeros(8)
    narrow = wide.view(torch.bfloat16)[:8]
    moved = [multipath._gather_of(one, one[:4])[1] for one in (wide, narrow, wide)]
    assert moved == [16, 8, 16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_outputs_of_every_floating_dtype_are_marked_if_their_link_fails(dtype: torch.dtype) -> None:
    for verdict in (1.0, torch.nan):
        queues = ThreadQueues()
        link = bare(HostRelay, queues=queues, _verdict=torch.tensor([verdict]))
        output = torch.ones(3, dtype=dtype)
        assert link.guard(output)
        queues.synchronize()
        assert output.isnan().tolist() == [verdict != 1.0, False, False]
    assert not link.guard(torch.ones(3, dtype=torch.int32))


def test_a_host_without_room_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory.os, "ftruncate", truncate)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(HeapError, match="ENOSPC"):
        SharedMemory.create(4096)
    assert os.listdir("/proc/self/fd") == before


def test_of_two_links_over_the_same_wires_the_slower_one_is_found() -> None:
    took = {"peer": 2.0, "nccl": 3.0, "host": 9.0}
    links = [SimpleNamespace(name=name) for name in took]

    def fly(what: str, pieces: object, carried: list[int], *_: object) -> list[Any]:
        return [
            SimpleNamespace(seconds=lambda one=one: took[one.name]) if nbytes else None
            for one, nbytes in zip(links, carried, strict=True)
        ]

    ranks = SimpleNamespace(gather=lambda row: [row])
    transfers = bare(
        Transfers, links=links, fly=fly, pieces=lambda *_: [], _ranks=ranks, _num_ranks=1
    )
    transfers._queues = SimpleNamespace(device=torch.device("meta"))
    assert transfers._slower("peer", "nccl") == "nccl"
    took["peer"] = 4.0
    assert transfers._slower("peer", "nccl") == "peer"
    assert transfers._slower("peer", "gloo") is None


def test_what_moves_time_and_again_goes_by_the_shares_of_now() -> None:
    routes = {(1.0, 0.0): 0, (0.5, 0.5): -1, (0.0, 1.0): 1}
    link = SimpleNamespace(writes=lambda *_: None)
    transfers = bare(
        Transfers,
        _num_ranks=2,
        links=[link, link],
        _route=lambda _, length, shares: SimpleNamespace(alone=routes[shares]),
    )
    load: Any = SimpleNamespace(route=None, shares=None, inbound=64, balancer=None, pieces=[])
    for shares, alone in routes.items():
        for _ in range(2):
            assert transfers._settled(load, shares).alone == alone


def test_what_is_closed_holds_no_tensors() -> None:
    class Gather:
        """Has the tensors of a gather that is known by their addresses."""

    known = {0: Gather()}
    held = weakref.ref(known[0])
    multipath = bare(
        Multipath,
        _watchdog=None,
        _broken=LinkError("a peer is gone"),
        _ranks=SimpleNamespace(leave=lambda: None),
        _in_place=known,
        _queues=ThreadQueues(),
        device=CPU,
        transfers=SimpleNamespace(leave=lambda: None, close=lambda: None),
    )
    multipath.close()
    assert held() is None


def test_ranks_compare_operations_before_they_wait_for_memory() -> None:
    steps: list[str] = []

    def allocate(nbytes: int) -> torch.Tensor:
        steps.append(f"{nbytes} bytes")
        return torch.empty(nbytes, dtype=torch.uint8)

    link: Any = SimpleNamespace(allocate=allocate)
    inbox = Inbox([link], ThreadQueues())
    inbox.take(64, lambda: steps.append("compared"))
    inbox.take(32, lambda: steps.append("compared"))
    assert steps == ["compared", "64 bytes"]


@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_on_a_gpu_is_in_order_with_the_streams_around_it(
    monkeypatch: pytest.MonkeyPatch, async_op: bool
) -> None:
    """A call behind another one waits for its stream, and memory is kept for the one it is in."""
    calls: list[object] = []

    class Stream(SimpleNamespace):
        def wait_stream(self, other: "Stream") -> None:
            calls.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            return f"end of {self.name}"

        def wait_event(self, event: str) -> None:
            calls.append(f"{self.name} waits for {event}")

    current, own, earlier = (Stream(name=name) for name in ("current", "own", "earlier"))
    monkeypatch.setattr(queues, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda one: noted(calls, f"on {one}"))
    monkeypatch.setattr(torch.cuda, "stream", lambda one: noted(calls, f"in {one.name}"))
    link = SimpleNamespace(raise_if_broken=lambda: calls.append("looks"))
    multipath = bare(
        Multipath,
        _watchdog=None,
        _broken=None,
        _last_stream=earlier,
        _queues=GpuQueues(torch.device("cuda", 0)),
        _stream=own,
        transfers=SimpleNamespace(links=[link]),
    )
    tensor: Any = SimpleNamespace(record_stream=lambda one: calls.append(f"kept for {one.name}"))
    work = multipath._start("all_gather", lambda: calls.append("runs"), [tensor], async_op)
    if not async_op:
        assert calls == ["current waits for earlier", "on cuda:0", "runs"]
        assert work is None
        return
    work.wait()
    assert calls == [
        *("own waits for current", "own waits for earlier", "on cuda:0", "in own", "runs"),
        *("kept for own", "looks", "current waits for end of own"),
    ]


def noted(calls: list[object], what: str) -> nullcontext[None]:
    calls.append(what)
    return nullcontext()


def test_memory_between_processes_stays_mapped_as_long_as_a_tensor_has_it() -> None:
    before = os.listdir("/proc/self/fd")
    queues = ThreadQueues()
    address = queues.allocate(4096)
    tensor = queues.tensor(address + 8, 16)
    queues.copy(tensor.data_ptr(), tensor.fill_(3).data_ptr() + 8, 8, queues.current())
    queues.synchronize()
    queues.free(address)
    assert queues.allocation_of(address + 8) == address + 8
    assert tensor.tolist() == [3] * 16
    del tensor
    assert os.listdir("/proc/self/fd") == before


def test_threads_end_with_their_queues_and_say_what_has_failed() -> None:
    queues = ThreadQueues()
    queues.make()
    threads = [one for one in threading.enumerate() if one.name.startswith("flashmoe-queue")]
    assert len(threads) >= 2
    queues.do(lambda: 1 / 0)
    queues.do(lambda: [][0])
    queues.synchronize()
    with pytest.raises(ZeroDivisionError):  # the first one
        queues.raise_if_failed()
    queues.close()
    for thread in threads[-2:]:
        thread.join(20)
        assert not thread.is_alive()
