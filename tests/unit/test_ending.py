"""What a group's ranks share ends before the group does: all leave it, and then each frees its own.

CPUs stand for GPUs; what maps memory notes when each rank unmaps and frees some.
"""

import contextlib
import functools
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flashmoe_megatron import ending
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid, host_groups
from flashmoe_megatron.kernel import captured, group_memory, symmetric
from flashmoe_megatron.kernel.group_memory import GroupMemory, shared_memory
from flashmoe_megatron.multipath.multipath import Multipath
from flashmoe_megatron.multipath.peer_copies import Arena
from flashmoe_megatron.multipath.thread_queues import ThreadQueues
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.ranks import Ranks
from tests.distributed import RankPool, refusal
from tests.unit.cases import make_config
from tests.unit.test_group_memory import SIZES

LAST = 3
"""The rank that destroys the group after the others have begun to."""
DEVICE = torch.device("cpu")

Note = Callable[[str], None]


class Clock:
    """Numbers what happens on all ranks in one order."""

    def __init__(self, name: str) -> None:
        self._store = distributed_c10d._get_default_store()
        self._name = name
        self.noted: list[tuple[int, str]] = []

    def note(self, what: str) -> None:
        self.noted.append((self._store.add(f"{self._name} clock", 1), what))
        self._store.add(f"{self._name} {what} {dist.get_rank()}", 1)

    def count(self, what: str, rank: int) -> int:
        return int(self._store.add(f"{self._name} {what} {rank}", 0))

    def wait(self, what: str, rank: int, longest: float = 60.0) -> None:
        deadline = time.monotonic() + longest
        while not self.count(what, rank) and time.monotonic() < deadline:
            time.sleep(1e-3)


@contextlib.contextmanager
def noted(clock: Clock) -> Iterator[None]:
    """Heaps in a CPU's memory, which say when a rank's own is freed, until the block ends.

    A collection of garbage may free some later, in the midst of another test, without a group.
    """
    notes: list[weakref.finalize[..., object]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 1, raising=False)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

        def allocate(nbytes: int, *_: object) -> symmetric.SymmetricAllocation:
            heap = torch.zeros(nbytes, dtype=torch.uint8)
            notes.append(weakref.finalize(heap.untyped_storage(), clock.note, "freed"))
            notes[-1].atexit = False
            return symmetric.SymmetricAllocation(heap, (heap.data_ptr(),) * 4)

        patch.setattr(group_memory.symmetric, "allocate", allocate)
        try:
            yield
        finally:
            for one in notes:
                one.detach()


class NotedQueues(ThreadQueues):
    """Say when memory of peers is unmapped and a rank's own is freed."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def unmap(self, address: int) -> None:
        self._clock.note("left")
        super().unmap(address)

    def free(self, address: int) -> None:
        self._clock.note("freed")
        super().free(address)


def open_arena(group: dist.ProcessGroup, clock: Clock) -> Callable[[], object]:
    queues = NotedQueues(clock)
    arena = Ranks(group).once(Arena, make=lambda: Arena(group, queues, 30.0))
    arena.take([1000] * 4)
    return lambda: arena.restart(queues.current())


def open_links(group: dist.ProcessGroup, clock: Clock) -> Callable[[], object]:
    queues, links = NotedQueues(clock), ["peer"]
    multipath = Multipath(group, device=DEVICE, links=links, min_bytes=1, timeout=30, queues=queues)
    return lambda: multipath.all_reduce(torch.ones(4))


def open_heap(group: dist.ProcessGroup, clock: Clock) -> Callable[[], object]:
    memory = shared_memory(group, DEVICE, BackendOptions())
    memory.register(make_config(max_tokens=32, topk=2))
    memory.allocate(SIZES)
    synchronize = torch.cuda.synchronize

    def ended(device: object) -> None:  # launches have, before a rank leaves
        synchronize(device)
        clock.note("left")

    torch.cuda.synchronize = ended  # which the fixture's patch restores
    return memory.open


OPENED = {"arena": open_arena, "links": open_links, "heap": open_heap}


def ends(group: dist.ProcessGroup, kind: str, is_patient: bool) -> list[tuple[int, str]]:
    """Destroys a group on the last rank after the others have begun to, or are through with it."""
    clock = Clock(f"ending {kind} {is_patient}")
    made = dist.new_group()
    with noted(clock), pytest.MonkeyPatch.context() as patch:
        use = OPENED[kind](made, clock)
        patch.setattr(ending, "PATIENCE_S", 60.0 if is_patient else 0.0)
        if dist.get_rank() == LAST:
            if is_patient:
                clock.wait("left", 0)
                clock.wait("freed", 0, longest=0.5)  # which it must not be
            else:
                dist.barrier(group)
        dist.destroy_process_group(made)
        if dist.get_rank() != LAST and not is_patient:
            assert not clock.count("freed", dist.get_rank())
            dist.barrier(group)
            clock.wait("freed", LAST)
            Ranks(None).once(object, make=object)  # the next call of anything
        assert clock.count("freed", dist.get_rank()), "memory is free before a layer is called"
        assert not ending._left
        assert refusal(group, lambda _: use()).startswith(
            "ConfigError: the process group of these" if kind == "heap" else "LinkError: "
        )
        dist.barrier(group)
    return clock.noted


@pytest.mark.parametrize("is_patient", [True, False], ids=["waits", "goes on"])
@pytest.mark.parametrize("kind", OPENED)
def test_no_rank_frees_what_another_one_uses(kind: str, is_patient: bool, ranks: RankPool) -> None:
    """Nor does one that destroys the group earlier hang."""
    everything = [one for found in ranks.run(ends, kind, is_patient) for one in found]
    left, freed = ([at for at, what in everything if what == name] for name in ("left", "freed"))
    assert len(freed) >= 4
    assert max(left) < min(freed)


def groups_between_hosts(group: dist.ProcessGroup) -> None:
    """The groups along the axes end with the whole one, and what is made for them."""
    known, rank = distributed_c10d._world.pg_map, dist.get_rank()
    before = set(known)
    patched, wrapped = dist.new_group, []
    for _ in range(2):
        made = patched()
        dist.new_group = lambda *_, **__: wrapped.append(1)  # some frameworks wrap what it gives
        try:
            groups = host_groups(made, HostGrid(2, 2, rank), timeout=30.0)
        finally:
            dist.new_group = patched
        within, rail = groups.within, groups.rail
        assert {made, within, rail} == set(known) - before
        memory = weakref.ref(shared_memory(within, DEVICE, BackendOptions()))
        dist.destroy_process_group(made)
        assert set(known) == before
        assert memory()._is_over
        Ranks(None).once(object, make=object)
        gc.collect()
        assert memory() is None
        for own in (within, rail):  # for who ends all groups that there were
            dist.destroy_process_group(own)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(made)
    assert not wrapped


def test_groups_between_hosts_end_with_the_whole_one(ranks: RankPool) -> None:
    ranks.run(groups_between_hosts)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Shared(ending.EndsWithGroup):
    """Notes what becomes of it."""

    def __init__(self, *, fails: str = "", is_alone: bool = False) -> None:
        self.done: list[str] = []
        self.fails, self.is_alone = fails, is_alone

    def leave(self) -> None:
        self.done.append("leave")
        if self.fails == "leave":
            raise RuntimeError("CUDA error: unspecified launch failure")

    def is_left(self) -> bool:
        return self.is_alone

    def free(self) -> None:
        self.done.append("free")
        if self.fails == "free":
            raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("fails", ["leave", "free"])
def test_what_is_broken_keeps_no_group(
    fails: str, alone: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = Shared(fails=fails, is_alone=True), Shared(is_alone=True)
    for each in (one, other):
        ending.ends_with(alone, each)
    with caplog.at_level(logging.WARNING, "flashmoe_megatron"):
        dist.destroy_process_group()
    assert not dist.is_initialized()
    assert one.done == other.done == ["leave", "free"]
    assert "Shared" in caplog.text
    assert "launch failure" in caplog.text


def test_a_group_that_is_destroyed_by_an_older_name_ends_in_the_next_call(
    alone: dist.ProcessGroup,
) -> None:
    one = Shared(is_alone=True)
    ending.ends_with(alone, one)
    distributed_c10d.destroy_process_group.__wrapped__()
    assert not one.done
    Ranks(None).once(object, make=object)
    assert one.done == ["leave", "free"]


def test_nobody_waits_for_a_peer_that_is_given_up(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    memory = GroupMemory(alone, DEVICE, BackendOptions())
    memory._ranks = SimpleNamespace(leave=lambda: None, is_left=lambda: False)
    memory.leave()
    assert not memory.is_left()
    memory.is_void = True
    assert memory.is_left()


@pytest.mark.parametrize("owner", ["ours", "another's"])
def test_graphs_are_dropped_with_their_group(
    owner: str, alone: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a replay would write where somebody else's memory is."""
    dropped: list[str] = []
    drop = functools.partial(dropped.append, "graph")
    with noted(Clock("graphs")), pytest.MonkeyPatch.context() as patch:
        memory = shared_memory(alone, DEVICE, BackendOptions())
        memory.register(make_config(max_tokens=32, topk=2))
        memory.allocate(SIZES)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        is_ours = owner == "ours"
        with captured.dropped_by(drop) if is_ours else contextlib.nullcontext():
            memory.open()
            memory.captured.keep(torch.empty(1))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        memory.open()
        memory.allocate(SIZES)  # graphs keep the one before, too
        heaps = [weakref.ref(memory._heap), weakref.ref(memory.captured._kept[-1][0])]
        with caplog.at_level(logging.WARNING, "flashmoe_megatron"):
            dist.destroy_process_group()
        assert dropped == (["graph"] if is_ours else [])
        assert [heap() is None for heap in heaps] == [is_ours] * 2
        assert ("a replay of them waits for ranks" in caplog.text) != is_ours
        with pytest.raises(ConfigError, match="has been destroyed, and with it the memory"):
            memory.allocate(SIZES)
        assert memory.take_records(1) == []
        assert not memory.has_fault
