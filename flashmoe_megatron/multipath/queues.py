"""A device as links use it: queues that copy and wait, and memory that ranks map."""

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from flashmoe_megatron import driver
from flashmoe_megatron.streams import current_stream, timed_event

MOST_BYTES = 128 * 2**20
"""All rings of a rank that others write into, as long as no slot would be below the least."""
LEAST_SLOT = 4 * 2**20
_HERE = contextlib.nullcontext()


class Moment(Protocol):
    """A moment of a queue, as an event has it."""

    def query(self) -> bool:
        """Tells whether the queue has come to it."""

    def synchronize(self) -> None:
        """Has the caller wait until the queue comes to it."""

    def elapsed_time(self, end: Any) -> float:
        """Returns the milliseconds until a later moment, if both have a time."""


class Queue(Protocol):
    """A queue that runs its operations in order: a GPU's stream, or a thread's."""

    def wait_event(self, event: Any) -> None:
        """Waits for a moment of another queue."""

    def wait_stream(self, stream: Any) -> None:
        """Waits for all that another queue has been given."""

    def record_event(self) -> Moment:
        """Returns this queue's moment after all that it has been given, without a time."""

    def synchronize(self) -> None:
        """Has the caller wait for all that the queue has been given."""


class Queues(abc.ABC):
    """A device's queues and its memory.

    Calls of a link name a queue by its :meth:`handle`, memory by its address. The functions on
    memory and words do what those of :mod:`~flashmoe_megatron.driver` do, by their names.

    Attributes:
        device: Where tensors are.
        host_waits: Whether a caller waits until queues are done, as for tensors of a CPU; where it
            does not, the current stream waits.
        repeats: Transfers of a trial that count.
    """

    device: torch.device
    host_waits: bool
    repeats: int

    copy: Callable[[int, int, int, Any], object]
    wait_value: Callable[[Any, int, int], object]
    write_value: Callable[[Any, int, int], object]
    register: Callable[[int, int], int]
    unregister: Callable[[int], object]
    allocate: Callable[[int], int]
    free: Callable[[int], object]
    allocation_of: Callable[[int], int]
    allocation_id: Callable[[int], int]
    share: Callable[[int], bytes]
    map_shared: Callable[[bytes], int]
    unmap: Callable[[int], object]

    @abc.abstractmethod
    def make(self) -> Queue:
        """Makes a queue."""

    @abc.abstractmethod
    def current(self) -> Queue:
        """Returns the queue that makes the tensors ready, and has to wait for results."""

    @abc.abstractmethod
    def beside(self) -> Queue:
        """Returns the queue of operations that the caller does not wait for yet."""

    @abc.abstractmethod
    def handle(self, queue: Queue) -> Any:
        """Returns how the calls of this class name a queue."""

    @abc.abstractmethod
    def here(self) -> AbstractContextManager[object]:
        """Makes the device the current one."""

    @abc.abstractmethod
    def within(self, queue: Any) -> AbstractContextManager[object]:
        """Makes a queue the current one."""

    @abc.abstractmethod
    def run(self, queue: Any, work: Callable[[], object]) -> None:
        """Issues what torch does to a queue."""

    @abc.abstractmethod
    def do(self, work: Callable[[], object]) -> None:
        """Issues what torch does to the current queue."""

    @abc.abstractmethod
    def keep(self, tensors: Sequence[torch.Tensor], queue: Any) -> None:
        """Keeps the memory of tensors until a queue has done all that it has been given."""

    @abc.abstractmethod
    def event(self) -> Any:
        """Makes an event without a time, to be recorded time and again."""

    @abc.abstractmethod
    def timed_moment(self, queue: Any) -> Moment:
        """Returns a queue's moment with its time, which takes a GPU some 3 us."""

    def moment(self, queue: Queue, is_timed: bool) -> Moment:
        """Returns a queue's moment, with its time or without."""
        return self.timed_moment(queue) if is_timed else queue.record_event()

    def mark(self) -> Moment:
        """Returns the current queue's moment, with its time."""
        return self.timed_moment(self.current())

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Has the caller wait for all queues."""

    def raise_if_failed(self) -> None:  # noqa: B027 - what torch issues to a GPU fails at once
        """Raises what has failed in a queue, if anything has."""

    def close(self) -> None:  # noqa: B027 - torch owns the streams of a GPU
        """Ends the queues, which have nothing to do any more."""

    @abc.abstractmethod
    def slot_bytes(self, num_slots: int) -> int:
        """Returns the size of a ring's slot where a rank has so many slots."""

    @abc.abstractmethod
    def words(self, writes: Sequence[int], waits: Sequence[int]) -> Callable[[Any, int], None]:
        """Prepares to write words, and then to wait for others, given their addresses.

        Returns:
            What issues all of it, with one value, to a queue by its handle.
        """

    @abc.abstractmethod
    def numa_node(self) -> int:
        """Returns the device's NUMA node, -1 if it has none."""

    @abc.abstractmethod
    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns memory as bytes."""


class GpuQueues(Queues):
    """Streams, whose copies, waits and words are the driver's; see :mod:`driver` for these.

    Args:
        device: The GPU, by its index.
    """

    host_waits = False
    repeats = 5

    copy = staticmethod(driver.copy)
    wait_value = staticmethod(driver.wait_value)
    write_value = staticmethod(driver.write_value)
    register = staticmethod(driver.register)
    unregister = staticmethod(driver.unregister)
    allocate = staticmethod(driver.allocate)
    free = staticmethod(driver.free)
    allocation_of = staticmethod(driver.allocation_of)
    allocation_id = staticmethod(driver.allocation_id)
    share = staticmethod(driver.share)
    map_shared = staticmethod(driver.map_shared)
    unmap = staticmethod(driver.unmap)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self) -> Queue:
        """See the base class."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current(self) -> Queue:
        """See the base class."""
        return current_stream(self.device.index)

    def beside(self) -> Queue:
        """See the base class."""
        return self.make()

    def handle(self, queue: Any) -> int:
        """See the base class."""
        return int(queue.cuda_stream)

    def here(self) -> AbstractContextManager[object]:
        """See the base class; to enter the device that is current already takes some time."""
        is_there = torch.cuda.current_device() == self.device.index
        return _HERE if is_there else torch.cuda.device(self.device)

    def within(self, queue: Any) -> AbstractContextManager[object]:
        """See the base class."""
        return torch.cuda.stream(queue)

    def run(self, queue: Any, work: Callable[[], object]) -> None:
        """See the base class."""
        with torch.cuda.stream(queue):
            work()

    def do(self, work: Callable[[], object]) -> None:
        """See the base class."""
        work()

    def keep(self, tensors: Sequence[torch.Tensor], queue: Any) -> None:
        """See the base class."""
        for tensor in tensors:
            tensor.record_stream(queue)

    def event(self) -> torch.cuda.Event:
        """See the base class."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def timed_moment(self, queue: Any) -> Moment:
        """See the base class."""
        return timed_event(queue)

    def synchronize(self) -> None:
        """See the base class."""
        torch.cuda.synchronize(self.device)

    def slot_bytes(self, num_slots: int) -> int:
        """Returns the largest power of two that all slots have room for, as chunks are."""
        room = MOST_BYTES // num_slots
        return max(LEAST_SLOT, 1 << room.bit_length() - 1)

    def words(self, writes: Sequence[int], waits: Sequence[int]) -> Callable[[Any, int], None]:
        """See the base class."""
        return driver.MemoryOps(writes, waits).issue

    def numa_node(self) -> int:
        """See the base class; -1 where the machine does not say."""
        bus_id = driver.pci_bus_id(self.device.index).lower()
        try:
            return int(Path(f"/sys/bus/pci/devices/{bus_id}/numa_node").read_text())
        except (OSError, ValueError):
            return -1

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See the base class."""
        return driver.tensor(address, nbytes, self.device)
