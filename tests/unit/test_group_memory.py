"""When the memory of a group is made anew, and what becomes of the old; without a GPU."""

import gc
import logging
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from flashmoe_megatron import driver
from flashmoe_megatron.errors import ConfigError, HeapError, PeerTimeoutError
from flashmoe_megatron.kernel import bindings, group_memory, symmetric
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.ranks import Ranks
from tests.distributed import RankPool, refusal
from tests.unit.cases import make_config
from tests.unit.simulated_gpus import Gpus, install, make_backend

SIZES = bindings.FlashMoESizes(heap_bytes=4096, workspace_bytes=512, mailbox_bytes=256)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> GroupMemory:
    """With host memory in place of a GPU's."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 1, raising=False)
    monkeypatch.setattr(
        group_memory.symmetric,
        "allocate",
        lambda *_: symmetric.SymmetricAllocation(torch.empty(0), (4096,)),
    )
    memory = GroupMemory(None, torch.device("cpu"), BackendOptions())
    memory.register(make_config(max_tokens=32, topk=2))
    return memory


def test_it_is_needed_once(memory: GroupMemory) -> None:
    assert memory.needs(SIZES)
    memory.allocate(SIZES)
    assert not memory.needs(SIZES)


@pytest.mark.parametrize("raised", [{"max_tokens": 33}, {"topk": 3}], ids=str)
def test_a_layer_that_moves_places_needs_it_anew(
    memory: GroupMemory, raised: dict[str, int]
) -> None:
    """Bytes may be enough, but a peer may still use the last layer's places."""
    memory.allocate(SIZES)
    memory.register(make_config(**{"max_tokens": 32, "topk": 2, **raised}))
    assert memory.needs(SIZES)
    memory.allocate(SIZES)
    assert not memory.needs(SIZES)


@pytest.mark.parametrize("same", [{}, {"max_tokens": 31}, {"topk": 1}, {"hidden": 8192}], ids=str)
def test_a_layer_within_its_bounds_needs_nothing(memory: GroupMemory, same: dict[str, int]) -> None:
    memory.allocate(SIZES)
    memory.register(make_config(**{"max_tokens": 32, "topk": 2, **same}))
    assert not memory.needs(SIZES)


@pytest.mark.parametrize("field", ["heap_bytes", "workspace_bytes"])
def test_it_never_shrinks(memory: GroupMemory, field: str) -> None:
    memory.allocate(SIZES)
    larger = bindings.FlashMoESizes.from_buffer_copy(SIZES)
    setattr(larger, field, 8192)
    assert memory.needs(larger)
    memory.allocate(larger)
    memory.register(make_config(max_tokens=64, topk=2))
    memory.allocate(SIZES)
    assert not memory.needs(larger)


def test_a_fault_is_told_although_cuda_has_failed(
    memory: GroupMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.allocate(SIZES)
    memory.open()
    assert memory.take_fault() is None

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", fail)
    memory._mailbox.view(torch.int32)[0] = bindings.PEER_TIMEOUT
    assert isinstance(memory.take_fault(), PeerTimeoutError)
    assert memory.is_void


def test_a_rank_without_room_for_the_rest_tells_the_others(
    memory: GroupMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def allocate(*given: object) -> None:
        told.append(given[-1])
        raise HeapError("no rank gets any")

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(group_memory.symmetric, "allocate", allocate)
    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    with pytest.raises(HeapError):
        memory.allocate(SIZES)
    assert "out of memory" in str(told[0])
    assert memory.needs(SIZES)


def allocate_for(group: dist.ProcessGroup, layers: list[dict[str, int]]) -> str:
    """Makes the heap of a rank that knows of a layer; returns the error."""
    memory = GroupMemory(group, torch.device("cpu"), BackendOptions())
    memory.register(make_config(**layers[dist.get_rank(group)]))
    return refusal(group, lambda _: memory.allocate(SIZES))


def test_ranks_that_know_of_other_layers_make_no_heap(ranks: RankPool) -> None:
    """They would read each other's rows in wrong places."""
    layers = [{"max_tokens": 32, "topk": 2}, {"max_tokens": 64, "topk": 2}]
    for said in ranks.run(allocate_for, layers, num_ranks=2):
        assert said.startswith("ConfigError: the ranks disagree on the symmetric heap's bounds: ")
        assert "tokens=32, " in said
        assert "tokens=64, " in said


def test_a_heap_that_does_not_fit_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's own error would come on one rank alone, and the others would wait for it."""
    free = 4096
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1 << 40))
    assert len(symmetric.allocate(free, None, torch.device("cpu")).addresses) == 1
    with pytest.raises(HeapError, match="needs 4097 bytes on every GPU, the fullest has 4096 free"):
        symmetric.allocate(free + 1, None, torch.device("cpu"))


def test_a_rank_that_the_heap_leaves_no_room_knows_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would come on this rank alone, as the others wait to agree on a rate."""

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    heap = SimpleNamespace(rank=1, world_size=2, buffer_ptrs=[0, 0])
    monkeypatch.setattr(torch, "empty", fail)
    assert symmetric._link_rate(heap, symmetric.LINK_TRIAL_BYTES, torch.device("cpu")) == 0.0


def test_a_link_is_measured_whatever_size_the_handle_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives the handle of NVSHMEM's memory that was freed for what lies there since."""
    copied: list[tuple[int, int]] = []

    class Stamp:
        def __init__(self, _: torch.device) -> None: ...

        def wait(self) -> None: ...

        def ns_since(self, _: "Stamp") -> float:
            return 2e6

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("get_buffer: the requested size exceeds the allocated size")

    monkeypatch.setattr(symmetric, "Stamp", Stamp)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(
        driver, "copy", lambda target, source, nbytes, stream: copied.append((source, nbytes))
    )
    heap = SimpleNamespace(rank=1, world_size=2, buffer_ptrs=[4096, 0], get_buffer=refuse)
    nbytes = symmetric.LINK_TRIAL_BYTES // 4
    rate = symmetric._link_rate(heap, nbytes, torch.device("cpu"))
    assert copied == [(4096, nbytes)] * 4 * 3
    assert rate == pytest.approx(symmetric.LINK_TRIAL_BYTES / 2e-3)


@pytest.mark.parametrize("is_captured", [False, True], ids=["no graph", "a graph"])
def test_what_a_graph_has_captured_is_kept(
    memory: GroupMemory,
    is_captured: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory.allocate(SIZES)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    memory.open()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    memory.open()
    kept = (memory._heap, memory._workspace, memory._mailbox)
    with caplog.at_level(logging.WARNING, "flashmoe_megatron"):
        for _ in range(2):  # the second heap is in no graph
            memory.allocate(SIZES)
    tables = (torch.empty(1), torch.empty(2))
    memory.captured.keep_left(*tables)  # graphs of the old heap may read them
    assert [tuple(map(id, one)) for one in memory.captured._kept] == (
        [tuple(map(id, one)) for one in (kept, tables)] if is_captured else []
    )
    assert caplog.text.count("capture them again") == is_captured


def test_what_the_host_reads_is_on_the_host_whatever_the_default_device(
    memory: GroupMemory,
) -> None:
    with torch.device("meta"):
        memory.allocate(SIZES)
    assert memory._mailbox.device.type == "cpu"


def test_launches_go_on_in_the_memory_that_was_made_last(
    memory: GroupMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is settled on in it: the old one had the replicas."""
    addresses = iter((4096, 8192))
    monkeypatch.setattr(
        group_memory.symmetric,
        "allocate",
        lambda *_: symmetric.SymmetricAllocation(torch.empty(0), (next(addresses),)),
    )
    memory.allocate(SIZES)
    assert memory.open().heaps[0] == 4096
    memory.settled_for = "a forward"
    memory.allocate(SIZES)
    opened = memory.open()
    assert opened.heaps[0] == 8192
    assert (opened.workspace, opened.mailbox) == (
        memory._workspace.data_ptr(),
        memory._mailbox.data_ptr(),
    )
    assert memory.settled_for is None


def test_each_fault_has_its_own_time(memory: GroupMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks give a fault up that all do not hear of in time, however long one took before."""
    now = [100.0]
    monkeypatch.setattr(group_memory.time, "monotonic", lambda: now[0])
    fault = bindings.FlashMoEFault(code=bindings.BAD_ROUTING, rank=0, peer=-1)
    monkeypatch.setattr(bindings, "read_fault", lambda _: fault)
    monkeypatch.setattr(bindings, "clear_fault", lambda _: memory._mailbox.zero_())
    memory.allocate(SIZES)
    memory.open()
    for begin in (100.0, 250.0):
        now[0] = begin
        memory._mailbox.view(torch.int32)[0] = bindings.BAD_ROUTING
        assert memory.seconds_of_fault() == 0
        now[0] += 3
        assert memory.seconds_of_fault() == 3
        assert memory.take_fault() is not None
        assert not memory.has_fault


def test_launches_on_another_stream_are_behind_those_on_the_last(
    memory: GroupMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All share one memory."""
    current, waits = [1], list[tuple[int, int]]()

    def stream_of(number: int) -> SimpleNamespace:
        def wait(other: SimpleNamespace) -> None:
            waits.append((number, other.number))

        return SimpleNamespace(number=number, wait_stream=wait)

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream_of(current[0]))
    monkeypatch.setattr(
        torch.cuda, "get_stream_from_external", lambda number, _: stream_of(number), raising=False
    )
    memory.allocate(SIZES)
    for current[0] in (1, 1, 2, 2, 1):
        assert memory.open().stream == current[0]
    assert waits == [(2, 1), (1, 2)]


def test_no_rank_signals_into_memory_that_another_still_zeroes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks meet behind it, and multicast, which never is used, is off before it is made."""
    switches = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
    for name in switches:
        monkeypatch.setenv(name, "0")
    local = torch.ones(64, dtype=torch.uint8)
    steps: list[str] = []

    def empty(*_: object, **__: object) -> torch.Tensor:
        assert [os.environ[name] for name in switches] == ["1", "1"]
        return local

    def synchronize(_: object) -> None:
        assert not local.any()
        steps.append("zeroed")

    handle = SimpleNamespace(buffer_ptrs=[1, 2])
    for owner, name, stand_in in (
        (symm_mem, "get_backend", lambda _: "CUDA"),
        (symm_mem, "empty", empty),
        (symm_mem, "rendezvous", lambda *_: handle),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 40)),
        (torch.cuda, "synchronize", synchronize),
        (dist, "get_world_size", lambda _: 2),
        (dist, "barrier", lambda _: steps.append("met")),
        (symmetric, "_least", lambda value, *_: value),
        (symmetric, "_link_rate", lambda *_: 5.0),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    group: Any = "two ranks"
    found = symmetric.allocate(64, group, torch.device("cpu"))
    assert steps == ["zeroed", "met"]
    assert (found.addresses, found.link_bytes_per_s) == ((1, 2), 5.0)


def test_layers_that_differ_in_their_bounds_alone_share_it() -> None:
    device = torch.device("cpu")
    shared = group_memory.shared_memory(None, device, BackendOptions())
    for options in ({"row_bound": 2.0}, {"timeout": 3.0}, {"reserved_sms": 8}):
        assert group_memory.shared_memory(None, device, BackendOptions(**options)) is shared
    for options in ({"counters": False}, {"symmetric_memory": "nvshmem"}):
        assert group_memory.shared_memory(None, device, BackendOptions(**options)) is not shared


def test_names_begin_anew_with_torch_distributed(tmp_path: Path) -> None:
    """A process that takes a dead one's place has given none."""
    names = []
    for start in range(2):
        store = dist.FileStore(str(tmp_path / f"store{start}"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            names.append([Ranks(dist.group.WORLD).next_name() for _ in range(2)])
        finally:
            dist.destroy_process_group()
    assert names == [["0/0", "0/1"]] * 2


def test_the_memory_of_a_group_that_is_destroyed_is_given_up(tmp_path: Path) -> None:
    device, options = torch.device("cpu"), BackendOptions()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        memory = group_memory.shared_memory(dist.group.WORLD, device, options)
        assert group_memory.shared_memory(dist.group.WORLD, device, options) is memory
        of_nobody = weakref.ref(memory)
    finally:
        dist.destroy_process_group()
    group_memory.shared_memory(None, device, options)
    assert of_nobody() is memory
    del memory
    gc.collect()
    assert of_nobody() is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_slots_that_take_too_much_memory_are_refused_on_one_rank_too(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank allocates none: what it refuses is what the job will be on several GPUs."""
    install(Gpus(num_ranks, seed=0, slow=0), monkeypatch)
    wide = make_config(num_ranks=num_ranks, hidden=16384, intermediate=16384)
    assert make_backend(wide, 0, spare_slots=1).spare_slots == num_ranks - 1
    with pytest.raises(ConfigError, match=r"^spare_slots=2: .* wanted at most 6554 MiB"):
        make_backend(wide, 0, spare_slots=2)
