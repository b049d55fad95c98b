"""Streams beside the current one; on a processor everything happens in the order that it is called.

What a lane reads or writes is allocated on the current stream, and kept until the current stream
has waited for the lane: then the allocator needs no telling. What is allocated on a lane stays
there, or is told of the other lane that reads it.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

Mark = torch.cuda.Event | None
"""A moment on a stream; ``None`` on a processor, where it has passed."""


def mark(device: torch.device) -> Mark:
    """This moment on the current stream."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(device: torch.device, moment: Mark) -> None:
    """Lets the current stream wait."""
    if moment is not None:
        torch.cuda.current_stream(device).wait_event(moment)


def stamp(device: torch.device) -> Any:
    """This moment with its time: an event on the current stream or, on a processor, ns."""
    if device.type != "cuda":
        return time.monotonic_ns()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def nanoseconds(begin: Any, end: Any) -> int:
    """Time between two moments of :func:`stamp`, which have passed."""
    return end - begin if isinstance(end, int) else int(begin.elapsed_time(end) * 1e6)


class Lane:
    """One stream of its own.

    Attributes:
        stamps: Takes the begin and the end of each use, if it is a list.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the stream, on a GPU."""
        self.stamps: list[tuple[Any, Any]] | None = None
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def after(self, moment: Mark) -> Iterator[None]:
        """What is called within runs on the lane, once a moment has passed."""
        if self._stream is None:
            with self._stamped():
                yield
            return
        if moment is not None:
            self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream), self._stamped():
            yield

    @contextlib.contextmanager
    def _stamped(self) -> Iterator[None]:
        if self.stamps is None:
            yield
            return
        begin = stamp(self._device)
        yield
        self.stamps.append((begin, stamp(self._device)))

    def mark(self) -> Mark:
        """This moment on the lane."""
        return None if self._stream is None else self._stream.record_event()

    def reads(self, tensor: torch.Tensor) -> None:
        """Says that the lane reads what another one has allocated."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
