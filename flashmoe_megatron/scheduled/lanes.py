"""Streams beside the current one; on a processor everything happens in the order that it is called.

What a lane reads or writes is allocated on the current stream, and kept until the current stream
has waited for the lane: then the allocator needs no telling. What is allocated on a lane stays
there, or is told of the other lane that reads it.
"""

import contextlib
from collections.abc import Iterator

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


class Lane:
    """One stream of its own."""

    def __init__(self, device: torch.device) -> None:
        """Makes the stream, on a GPU."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def after(self, moment: Mark) -> Iterator[None]:
        """What is called within runs on the lane, once a moment has passed."""
        if self._stream is None:
            yield
            return
        if moment is not None:
            self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """This moment on the lane."""
        return None if self._stream is None else self._stream.record_event()

    def reads(self, tensor: torch.Tensor) -> None:
        """Says that the lane reads what another one has allocated."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
