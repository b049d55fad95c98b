"""Threads as queues, and shared memory in place of a GPU's, for tensors of a CPU."""

import contextlib
import ctypes
import functools
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.multipath.memory import SharedMemory
from flashmoe_megatron.multipath.queues import Queues

SLOT_BYTES = 2**20
_LONGEST_PAUSE_S = 1e-3
"""A thread that waits for a word sleeps at most so long before it looks again."""
_HERE = contextlib.nullcontext()
_Work = Callable[[], object]


class ThreadMoment:
    """A moment of a queue, with its time."""

    def __init__(self) -> None:
        self._reached, self._at = threading.Event(), 0.0

    def record(self, stream: "ThreadQueue") -> None:
        """Marks a queue's present moment; earlier waits stay with the moment recorded before."""
        self._reached = threading.Event()
        stream.run(functools.partial(self._reach, self._reached, stream))

    def _reach(self, reached: threading.Event, stream: "ThreadQueue") -> None:
        self._at = stream.now()
        reached.set()

    def waiting(self) -> Callable[[], object]:
        """Returns what waits for it, as it has been recorded last."""
        return self._reached.wait

    def query(self) -> bool:
        """Tells whether the queue has come to it."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Waits until the queue comes to it."""
        self._reached.wait()

    def elapsed_time(self, end: "ThreadMoment") -> float:
        """Returns the milliseconds until a later moment."""
        return (end._at - self._at) * 1e3


class ThreadQueue:
    """Runs what it is given in order, in a thread that several queues may share."""

    def __init__(self, give: Callable[[_Work], None]) -> None:
        self.run = give

    def now(self) -> float:
        """Returns the time, for operations of the queue."""
        return time.monotonic()

    def wait_event(self, event: ThreadMoment) -> None:
        """Waits for a moment of another queue."""
        self.run(event.waiting())

    def wait_stream(self, stream: "ThreadQueue") -> None:
        """Waits for all that another queue has been given."""
        self.wait_event(stream.record_event())

    def record_event(self) -> ThreadMoment:
        """Returns this queue's moment after all that it has been given."""
        moment = ThreadMoment()
        moment.record(self)
        return moment

    def synchronize(self) -> None:
        """Has the caller wait for all that the queue has been given."""
        self.record_event().synchronize()


class ThreadQueues(Queues):
    """Queues of threads, and memory of a CPU.

    Args:
        num_threads: Threads that queues share, as a GPU may have a single hardware queue; by
            default each queue has its own.
        slot_bytes: The size of a ring's slot.
    """

    device = torch.device("cpu")
    host_waits = True
    repeats = 1

    def __init__(self, num_threads: int | None = None, slot_bytes: int = SLOT_BYTES) -> None:
        self._slot_bytes = slot_bytes
        self._given: list[queue.SimpleQueue[_Work | None]] = []
        self._streams: list[ThreadQueue] = []
        self._error: Exception | None = None
        self._held: dict[int, SharedMemory] = {}
        self._numbers: dict[int, int] = {}
        self._counter = itertools.count()
        shared = [self._started() for _ in range(num_threads or 0)]
        self._next = itertools.cycle(shared) if shared else iter(self._started, None)
        self._current = self.make()

    def make(self) -> ThreadQueue:
        """See the base class."""
        stream = ThreadQueue(next(self._next).put)
        self._streams.append(stream)
        return stream

    def current(self) -> ThreadQueue:
        """Returns the only queue that a caller knows of."""
        return self._current

    beside = current

    def handle(self, queue: Any) -> ThreadQueue:
        """See the base class."""
        assert isinstance(queue, ThreadQueue)
        return queue

    def here(self) -> AbstractContextManager[object]:
        """See the base class."""
        return _HERE

    def within(self, queue: Any) -> AbstractContextManager[object]:
        """See the base class."""
        return _HERE

    def run(self, queue: Any, work: _Work) -> None:
        """See the base class."""
        queue.run(work)

    def do(self, work: _Work) -> None:
        """See the base class."""
        self._current.run(work)

    def keep(self, tensors: Sequence[torch.Tensor], queue: Any) -> None:
        """See the base class."""
        queue.run(functools.partial(tuple, tensors))

    def event(self) -> ThreadMoment:
        """See the base class."""
        return ThreadMoment()

    def timed_moment(self, queue: Any) -> ThreadMoment:
        """See the base class."""
        return self.handle(queue).record_event()

    def synchronize(self) -> None:
        """See the base class."""
        for stream in self._streams:
            stream.synchronize()

    def raise_if_failed(self) -> None:
        """See the base class."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """See the base class."""
        for given in self._given:
            given.put(None)

    def slot_bytes(self, num_rings: int) -> int:
        """See the base class."""
        return self._slot_bytes

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """See the base class."""
        stream.run(functools.partial(ctypes.memmove, target, source, nbytes))

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        """See the base class."""
        stream.run(functools.partial(_wait, ctypes.c_uint32.from_address(address), value))

    def write_value(self, stream: Any, address: int, value: int) -> None:
        """See the base class."""
        word = ctypes.c_uint32.from_address(address)
        stream.run(functools.partial(setattr, word, "value", value & 0xFFFFFFFF))

    def words(self, writes: Sequence[int], waits: Sequence[int]) -> Callable[[Any, int], None]:
        """See the base class."""

        def issue(queue: Any, value: int) -> None:
            for address in writes:
                self.write_value(queue, address, value)
            for address in waits:
                self.wait_value(queue, address, value)

        return issue

    def register(self, address: int, nbytes: int) -> int:
        """Returns the same address: a CPU sees all of its memory."""
        return address

    def unregister(self, address: int) -> None:
        """See the base class."""

    def numa_node(self) -> int:
        """See the base class."""
        return -1

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See the base class; memory of :meth:`allocate` is there as long as a tensor has it."""
        begin = self.allocation_of(address)
        if begin in self._held:
            return self._held[begin].tensor(address - begin, nbytes)
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def allocate(self, nbytes: int) -> int:
        """See the base class."""
        return self._hold(SharedMemory.create(nbytes))

    def free(self, address: int) -> None:
        """See the base class."""
        self._held.pop(address).close()

    def allocation_of(self, address: int) -> int:
        """See the base class; an address of other memory is its own answer."""
        for begin, memory in self._held.items():
            if begin <= address < begin + memory.nbytes:
                return begin
        return address

    def allocation_id(self, address: int) -> int:
        """See the base class; -1 for other memory."""
        return self._numbers.get(self.allocation_of(address), -1)

    def share(self, address: int) -> bytes:
        """See the base class."""
        if address not in self._held:
            raise DeviceError("memory of a CPU that was not made for it cannot be shared")
        return json.dumps(self._held[address].place).encode()

    def map_shared(self, handle: bytes) -> int:
        """See the base class."""
        return self._hold(SharedMemory.open(tuple(json.loads(handle))))

    def unmap(self, address: int) -> None:
        """See the base class."""
        self._held.pop(address).close()

    def _hold(self, memory: SharedMemory) -> int:
        self._held[memory.address] = memory
        self._numbers[memory.address] = next(self._counter)
        return memory.address

    def _started(self) -> "queue.SimpleQueue[_Work | None]":
        """Starts a thread, and returns what gives it work."""
        given: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        name = f"flashmoe-queue-{len(self._given)}"
        threading.Thread(target=self._work, args=(given,), name=name, daemon=True).start()
        self._given.append(given)
        return given

    def _work(self, given: "queue.SimpleQueue[_Work | None]") -> None:
        """Does what a thread is given; what fails ends the operation, not what comes after it."""
        torch.set_grad_enabled(False)  # which torch keeps for each thread
        while (work := given.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the caller raises whichever it is
                self._error = self._error or error
            work = None  # which may have tensors


def _wait(word: ctypes.c_uint32, value: int) -> None:
    """Waits until a word is at least a value, modulo 2**32."""
    pause = 5e-5
    while (word.value - value) & 0xFFFFFFFF >= 2**31:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
