"""Streams of a device: the current one without torch's detour, further ones, and moments.

What a lane reads or writes is allocated on the current stream, and kept until the current stream
has waited for the lane: then the allocator needs no record. Memory allocated on a lane stays
there, or is recorded for the other lane that reads it. On a CPU everything happens in the order of
its calls.
"""

import contextlib
import functools
import time
from collections.abc import Iterator

import torch

HOST = torch.device("cpu")
Mark = torch.cuda.Event | None
"""A moment on a stream; ``None`` on a processor, where it has passed."""
_NOTHING = contextlib.nullcontext()


def index_of(device: torch.device) -> int:
    """A GPU's index, the current one's if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(index: int) -> torch.cuda.Stream:
    """The current stream of a GPU by its index; to ask torch for it costs as much as to use it."""
    return _stream_of(index, torch._C._cuda_getCurrentRawStream(index))


@functools.lru_cache(maxsize=64)
def _stream_of(index: int, raw: int) -> torch.cuda.Stream:
    del raw  # which names it
    return torch.cuda.current_stream(index)


def timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Records a moment of a stream with its time, which takes the GPU some 3 us.

    An event that lets a host sleep would interrupt every process of the GPU when it is reached.
    """
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Stamp:
    """A moment with its time: of a GPU's current stream, or of the host for any other device."""

    __slots__ = ("_event", "_ns")

    def __init__(self, device: torch.device) -> None:
        """Marks all that the device has been given so far."""
        self._event: torch.cuda.Event | None = None
        self._ns = 0
        if device.type == "cuda":
            self._event = timed_event(current_stream(index_of(device)))
        else:
            self._ns = time.monotonic_ns()

    def has_passed(self) -> bool:
        """Tells whether the device has come to it."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits on the host until the device has come to it."""
        if self._event is not None:
            self._event.synchronize()

    def ns_since(self, begin: "Stamp") -> float:
        """Nanoseconds since an earlier moment of the device, which has passed both."""
        if self._event is None or begin._event is None:
            return self._ns - begin._ns
        return float(begin._event.elapsed_time(self._event)) * 1e6


def mark(device: torch.device) -> Mark:
    """This moment on the current stream."""
    return current_stream(index_of(device)).record_event() if device.type == "cuda" else None


def wait(device: torch.device, moment: Mark) -> None:
    """Lets the current stream wait."""
    if moment is not None:
        current_stream(index_of(device)).wait_event(moment)


class Lane:
    """One stream of its own.

    Attributes:
        stamps: Takes the begin and the end of each use, if it is a list.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the stream, on a GPU."""
        self.stamps: list[tuple[Stamp, Stamp]] | None = None
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def after(self, moment: Mark) -> Iterator[None]:
        """Runs the body's work on the lane, whose GPU is current, after a moment."""
        stream = self._stream
        if stream is None:
            with self._stamped():
                yield
            return
        if moment is not None:
            stream.wait_event(moment)
        # torch.cuda.stream would do this as well, and ask for streams and devices in between.
        current = current_stream(stream.device_index)
        torch.cuda.set_stream(stream)
        try:
            with self._stamped():
                yield
        finally:
            torch.cuda.set_stream(current)

    def _stamped(self) -> contextlib.AbstractContextManager[None]:
        return _NOTHING if self.stamps is None else self._stamping(self.stamps)

    @contextlib.contextmanager
    def _stamping(self, stamps: list[tuple[Stamp, Stamp]]) -> Iterator[None]:
        begin = Stamp(self._device)
        yield
        stamps.append((begin, Stamp(self._device)))

    def wait(self, moment: Mark) -> None:
        """Has the lane wait."""
        if self._stream is not None and moment is not None:
            self._stream.wait_event(moment)

    def mark(self) -> Mark:
        """This moment on the lane."""
        return None if self._stream is None else self._stream.record_event()

    def reads(self, tensor: torch.Tensor) -> None:
        """Says that the lane reads what another one has allocated."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
