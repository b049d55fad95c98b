"""The current GPU, its current stream without torch's detour, and moments of streams."""

import functools
import time

import torch

HOST = torch.device("cpu")


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
