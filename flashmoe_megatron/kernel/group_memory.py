"""Memory that all layers of one expert-parallel group share on a GPU: heap, workspace, mailbox."""

import contextlib
import ctypes
import logging
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from flashmoe_megatron.config import MAX_RANKS, MoEConfig
from flashmoe_megatron.ending import EndsWithGroup, ends_with
from flashmoe_megatron.errors import ConfigError, FlashMoEError
from flashmoe_megatron.kernel import bindings, symmetric
from flashmoe_megatron.kernel.captured import Captured
from flashmoe_megatron.kernel.early_fc2 import EarlyFc2
from flashmoe_megatron.kernel.memory import SLOT_BYTES
from flashmoe_megatron.kernel.records import launch_record
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.planner import least_rows_of
from flashmoe_megatron.ranks import Ranks, StoreRanks
from flashmoe_megatron.telemetry.record import LaunchRecord

logger = logging.getLogger("flashmoe_megatron")


class Promised:
    """Guards a section that all ranks must finish: if a rank leaves it by an error, all reallocate.

    The others wait for its launch in vain, and its next launch must not take part in theirs.
    """

    def __init__(self, memory: "GroupMemory") -> None:
        self._memory = memory

    def __enter__(self) -> None:
        """Nothing is broken off yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Notes that it is."""
        if error is not None:
            self._memory.is_void = True


class GroupMemory(EndsWithGroup):
    """Memory that all layers of one expert-parallel group share: heap, workspace and mailbox.

    Sized by the largest layer registered so far, allocated at the first call that needs it. All
    ranks build the same layers in the same order, so they allocate together.

    Launches use it one after the other, on whatever streams they are called. A program that replays
    a CUDA graph orders the graph's launches itself, and so it does with branches of one capture.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, options: BackendOptions
    ) -> None:
        self.group = group
        self.device = device
        self.options = options
        self.bounds = bindings.HeapBounds(0, 0)
        """Bounds of all layers registered so far; a heap of other bounds fits no layer."""
        self._heap: symmetric.SymmetricAllocation | None = None
        self._heap_bounds = self.bounds
        self._least_replica_rows = 0
        self.heap_bytes = 0
        """Bytes of the symmetric heap; 0 before the first call."""
        self._workspace = torch.empty(0)
        self._workspace_bytes = 0
        self._mailbox = torch.empty(0)
        self.fault_code = ctypes.c_uint32()
        """Code of the fault that a launch has left in the mailbox, 0 if none."""
        self.captured = Captured()
        self.early_fc2 = EarlyFc2(device)
        self._groups: dict[int, bindings.FlashMoEGroup] = {}  # by stream
        self.is_void = False
        """Some rank has given up waiting: ranks no longer agree on the launches, and all have to
        allocate again.
        """
        self.promised = Promised(self)
        """Encloses a rank's part in a launch, which the other ranks wait for."""
        self._known_since: float | None = None
        self._last_record = bindings.FlashMoERecord()
        self._last_stream: int | None = None
        self._stream_ahead: torch.cuda.Stream | None = None
        self.settled_for: object = None
        """The forward whose replicas the last launch has settled on, if it has."""
        self._ranks: StoreRanks | None = None
        self._is_over = False
        ends_with(group, self)

    def register(self, config: MoEConfig, spare_slots: int = 0) -> None:
        """Adds a layer; a larger one than any before grows the memory at its first call."""
        self.bounds = self.bounds.joined(bindings.HeapBounds.of(config, spare_slots))

    @property
    def own_heap(self) -> int:
        """Address of this rank's symmetric heap, which has been allocated."""
        self._raise_if_over()
        assert self._heap is not None
        return self._heap.local.data_ptr()

    def needs(self, sizes: bindings.FlashMoESizes) -> bool:
        """Returns whether the memory is smaller than ``sizes``, or laid out for other layers."""
        return (
            self._heap is None
            or self.is_void
            or self._heap_bounds != self.bounds
            or self.heap_bytes < sizes.heap_bytes
            or self._workspace_bytes < sizes.workspace_bytes
        )

    def allocate(self, sizes: bindings.FlashMoESizes) -> None:
        """Allocates again, never less than before. Collective over the group.

        Raises:
            ConfigError: Ranks would lay the heap out differently, for layers that some have not; or
                the group has been destroyed.
            HeapError: See :func:`~flashmoe_megatron.kernel.symmetric.allocate`.
        """
        self._raise_if_over()
        heap_bytes = max(int(sizes.heap_bytes), self.heap_bytes)
        ranks = Ranks(self.group)
        ranks.check_same(
            {"the symmetric heap's bounds": self.bounds, "the symmetric heap's bytes": heap_bytes}
        )
        if self._ranks is None and ranks.num_ranks > 1:
            assert self.group is not None
            self._ranks = StoreRanks(self.group, self.options.timeout, purpose="heap")
        workspace_bytes = max(int(sizes.workspace_bytes), self._workspace_bytes)
        torch.cuda.synchronize(self.device)
        if self.captured.has_heap:
            # Its addresses are in the graphs: a replay must not write over what others have now.
            self.captured.keep(self._heap, self._workspace, self._mailbox)
            self.captured.has_heap = False
            logger.warning(
                "the symmetric heap is made anew: CUDA graphs of MoE layers keep the old one, of "
                "whose faults and records nobody hears; capture them again"
            )
        # The mailbox, which has the code, goes with them.
        self._heap, self.heap_bytes, self.fault_code = None, 0, ctypes.c_uint32()
        obstacle = None
        try:
            self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=self.device)
            mailbox = torch.zeros(sizes.mailbox_bytes, dtype=torch.uint8, device="cpu")
            self._mailbox = mailbox.pin_memory()
        except RuntimeError as error:  # all ranks learn of it, so that none waits for this one
            obstacle = error
        self._heap = symmetric.allocate(
            heap_bytes, self.group, self.device, self.options.symmetric_memory, obstacle
        )
        self._least_replica_rows = least_rows_of(self._heap.link_bytes_per_s)
        self.fault_code = ctypes.c_uint32.from_address(self._mailbox.data_ptr())
        self.heap_bytes, self._workspace_bytes = heap_bytes, workspace_bytes
        self._heap_bounds = self.bounds
        self._groups.clear()
        self._last_record = bindings.FlashMoERecord()
        self.is_void = False
        self.settled_for = None
        if ranks.rank == 0:
            logger.warning(
                "symmetric heap: %.1f MiB on each of %d ranks (%s), shared by all MoE layers",
                heap_bytes / 2**20,
                len(self._heap.addresses),
                self.options.symmetric_memory,
            )
            if self._heap.link_bytes_per_s:
                rate = self._heap.link_bytes_per_s / 1e9
                logger.info("rows of another rank come at %.0f GB/s", rate)
            if self.bounds.slot_elements:
                logger.warning(
                    "of these, replicas of experts and their gradients take %.1f MiB",
                    SLOT_BYTES * self.bounds.slot_elements / 2**20,
                )

    def leave(self) -> None:
        """See :class:`~flashmoe_megatron.ending.EndsWithGroup`; later calls raise a ConfigError.

        Peers' memory stays mapped as long as this rank's is there: torch maps and frees them
        together. Nothing reads it any more.
        """
        self._is_over = True
        try:
            if self._heap is not None:
                torch.cuda.synchronize(self.device)
        finally:
            self._groups.clear()
            if self._ranks is not None:
                self._ranks.leave()

    def is_left(self) -> bool:
        """See :class:`~flashmoe_megatron.ending.EndsWithGroup`.

        No rank waits for ranks of a group in which some have given up on others.
        """
        return self.is_void or self.has_fault or self._ranks is None or self._ranks.is_left()

    def free(self) -> None:
        """See :class:`~flashmoe_megatron.ending.EndsWithGroup`.

        A heap that graphs of others have captured stays, since a replay would write where somebody
        else's memory is by then.
        """
        if not self.captured.end():
            self.captured.keep(self._heap, self._workspace, self._mailbox)
            logger.warning(
                "the process group of a symmetric heap is destroyed: CUDA graphs of MoE layers "
                "keep its %.1f MiB, and a replay of them waits for ranks that do not come",
                self.heap_bytes / 2**20,
            )
        self._heap, self.heap_bytes, self._workspace_bytes = None, 0, 0
        self._workspace = self._mailbox = torch.empty(0)
        self.fault_code = ctypes.c_uint32()
        self.settled_for = None

    def _raise_if_over(self) -> None:
        if self._is_over:
            raise ConfigError(
                "the process group of these experts has been destroyed, and with it the memory "
                "that its ranks shared: wanted every backward before that, and the next forward "
                "for a group that is there"
            )

    def open(self) -> bindings.FlashMoEGroup:
        """The group as the library sees it, on the current stream.

        Raises:
            ConfigError: The group has been destroyed.
        """
        if self._is_over:
            self._raise_if_over()
        assert self._heap is not None
        # The call within torch.cuda.current_stream(), without a stream object for every launch.
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._last_stream:
            self._follow(stream)
        if torch.cuda.is_current_stream_capturing():
            self.captured.note_launch()
        group = self._groups.get(stream)
        if group is None:
            group = self._groups[stream] = bindings.FlashMoEGroup(
                counters=self.options.counters,
                heaps=(ctypes.c_void_p * MAX_RANKS)(*self._heap.addresses),
                workspace=self._workspace.data_ptr(),
                mailbox=self._mailbox.data_ptr(),
                stream=stream,
                link_bytes_per_s=self._heap.link_bytes_per_s,
                least_replica_rows=self._least_replica_rows,
            )
        return group

    def _follow(self, stream: int) -> None:
        """Orders launches on this stream after those on the last one: all share their memory."""
        last, self._last_stream = self._last_stream, stream
        if last is not None and not torch.cuda.is_current_stream_capturing():
            # Not ExternalStream, which makes a stream of its own of 0, the default stream's handle.
            before = torch.cuda.get_stream_from_external(last, self.device)
            torch.cuda.current_stream(self.device).wait_stream(before)

    @contextlib.contextmanager
    def ahead(self, *used: torch.Tensor) -> Iterator[None]:
        """Lets launches of its body run concurrently with later work of the current stream.

        The tensors are made for them by the current stream.
        """
        if self._stream_ahead is None:
            self._stream_ahead = self._make_stream_ahead()
        self._stream_ahead.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream_ahead):
            yield
        for tensor in used:
            tensor.record_stream(self._stream_ahead)

    def _make_stream_ahead(self) -> torch.cuda.Stream:
        """A stream whose launches get their few SMs before the current stream's get the rest."""
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def last_group(self) -> bindings.FlashMoEGroup:
        """The group as the last launch had it: a new one would ask CUDA, which may be broken."""
        assert self._last_stream is not None
        return self._groups[self._last_stream]

    @property
    def has_heap(self) -> bool:
        """True if there has been a call."""
        return self._heap is not None

    @property
    def has_fault(self) -> bool:
        """True if a launch has left a fault that has not been raised yet."""
        return self.fault_code.value != 0

    @property
    def has_shared_fault(self) -> bool:
        """True if every rank's launch has left the same fault, which all raise in one call."""
        return self.has_fault and self.fault_code.value != bindings.PEER_TIMEOUT

    def unfollowed(self) -> tuple[int, ...]:
        """The ranks that lack a backward of this one's, if that is the fault."""
        if not self.has_fault or self.fault_code.value != bindings.UNMATCHED:
            return ()
        fault = bindings.read_fault(self.last_group())
        return () if fault is None else bindings.ranks_of(fault.seen)

    def seconds_of_fault(self) -> float:
        """For how long this host has known of the fault."""
        now = time.monotonic()
        self._known_since = self._known_since or now
        return now - self._known_since

    def fault(self) -> FlashMoEError:
        """The error that a launch has left, which stays."""
        fault = bindings.read_fault(self.last_group())
        assert fault is not None
        return bindings.fault_error(fault)

    def take_fault(self) -> FlashMoEError | None:
        """The error that a launch has left, once."""
        if not self.has_fault:
            return None
        if self.captured.has_heap:  # replays are assumed to be on the caller's stream
            with contextlib.suppress(RuntimeError):  # CUDA may have failed: the fault says why
                torch.cuda.current_stream(self.device).synchronize()
        group = self.last_group()
        fault = bindings.read_fault(group)
        if fault is None:
            return None
        self._known_since = None
        self.is_void = self.is_void or fault.code == bindings.PEER_TIMEOUT
        bindings.clear_fault(group)
        return bindings.fault_error(fault)

    def take_records(self, num_ranks: int) -> list[LaunchRecord]:
        """Returns records of launches ended since the last call, oldest first; waits for none."""
        if self._heap is None or self._is_over:
            return []
        group = self.open()
        records: list[LaunchRecord] = []
        while True:
            last, record = self._last_record, bindings.FlashMoERecord()
            sequence = last.sequence + 1
            bindings.call("read_record", group, ctypes.c_uint64(sequence), record)
            if record.sequence == 0:
                return records
            if record.sequence == sequence:
                records.append(launch_record(record, last, num_ranks))
                self._last_record = record
            else:  # the ring has gone round: go on with the oldest that it still holds
                before = record.sequence - bindings.NUM_RECORDS
                self._last_record = bindings.FlashMoERecord(sequence=before)


def shared_memory(
    group: dist.ProcessGroup | None, device: torch.device, options: BackendOptions
) -> GroupMemory:
    """One memory per group and device, for all layers whose memory and counters are alike."""
    return Ranks(group).once(
        GroupMemory,
        device,
        options.symmetric_memory,
        options.counters,
        make=lambda: GroupMemory(group, device, options),
    )
