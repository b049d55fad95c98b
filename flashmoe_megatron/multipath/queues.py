"""A device as links use it: queues that copy and wait, and memory that ranks map."""

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


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


class Words(Protocol):
    """Words in memory that a queue writes, and others that it then waits for."""

    def issue(self, queue: Any, value: int) -> None:
        """Issues all of it, with one value, to a queue by its handle."""


class Queues(abc.ABC):
    """A device's queues and its memory.

    Calls of a link name a queue by its :meth:`handle`, memory by its address.

    Attributes:
        device: Where tensors are.
        host_waits: Whether a caller waits until queues are done, as for tensors of a CPU; where it
            does not, the current stream waits.
        repeats: Transfers of a trial that count.
    """

    device: torch.device
    host_waits: bool
    repeats: int

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
    def slot_bytes(self, num_rings: int) -> int:
        """Returns the size of a ring's slot where a rank has so many rings."""

    @abc.abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copies bytes between any two places, in a queue."""

    @abc.abstractmethod
    def wait_value(self, stream: Any, address: int, value: int) -> None:
        """Makes a queue wait until a word in memory is at least a value, modulo 2**32."""

    @abc.abstractmethod
    def write_value(self, stream: Any, address: int, value: int) -> None:
        """Makes a queue write a word when everything before it is done and visible."""

    @abc.abstractmethod
    def words(self, writes: Sequence[int], waits: Sequence[int]) -> Words:
        """Prepares to write words, and then to wait for others, given their addresses."""

    @abc.abstractmethod
    def register(self, address: int, nbytes: int) -> int:
        """Pins host memory, and returns where queues see it."""

    @abc.abstractmethod
    def unregister(self, address: int) -> None:
        """Ends that."""

    @abc.abstractmethod
    def numa_node(self) -> int:
        """Returns the device's NUMA node, -1 if it has none."""

    @abc.abstractmethod
    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns memory as bytes."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Allocates memory that other processes can map."""

    @abc.abstractmethod
    def free(self, address: int) -> None:
        """Frees what :meth:`allocate` gave."""

    @abc.abstractmethod
    def allocation_of(self, address: int) -> int:
        """Returns the begin of the allocation that holds an address."""

    @abc.abstractmethod
    def allocation_id(self, address: int) -> int:
        """Returns a number that no other allocation of the process has ever had."""

    @abc.abstractmethod
    def share(self, address: int) -> bytes:
        """Returns what another process needs to map an allocation, given where that begins.

        Raises:
            DeviceError: Other processes cannot map it.
        """

    @abc.abstractmethod
    def map_shared(self, handle: bytes) -> int:
        """Maps another process's allocation."""

    @abc.abstractmethod
    def unmap(self, address: int) -> None:
        """Ends that."""
