"""The streams of a GPU as queues."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from flashmoe_megatron import driver
from flashmoe_megatron.multipath.balancer import CHUNKS
from flashmoe_megatron.multipath.board import NUM_LANES, NUM_SLOTS
from flashmoe_megatron.multipath.queues import Moment, Queue, Queues, Words
from flashmoe_megatron.multipath.shared import node_of_gpu
from flashmoe_megatron.streams import current_stream, timed_event

MOST_BYTES = 128 * 2**20
"""All rings of a rank that others write into, as long as no slot would be below the least."""
LEAST_SLOT = 4 * 2**20
_HERE = contextlib.nullcontext()


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

    def slot_bytes(self, num_rings: int) -> int:
        """Returns the largest chunk that all rings have room for."""
        room = MOST_BYTES // (NUM_LANES * NUM_SLOTS * num_rings)
        return max([LEAST_SLOT, *(chunk for chunk in CHUNKS if chunk <= room)])

    def words(self, writes: Sequence[int], waits: Sequence[int]) -> Words:
        """See the base class."""
        return driver.MemoryOps(writes, waits)

    def numa_node(self) -> int:
        """See the base class."""
        return node_of_gpu(driver.pci_bus_id(self.device.index))

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See the base class."""
        return driver.tensor(address, nbytes, self.device)
