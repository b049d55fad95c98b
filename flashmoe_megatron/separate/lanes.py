"""Further streams next to the current one; on a CPU everything happens in the order of its calls.

What a lane reads or writes is allocated on the current stream, and kept until the current stream
has waited for the lane: then the allocator needs no record. Memory allocated on a lane stays
there, or is recorded for the other lane that reads it.
"""

import contextlib
from collections.abc import Iterator

import torch

from flashmoe_megatron.streams import Stamp, current_stream, index_of

_NOTHING = contextlib.nullcontext()

Mark = torch.cuda.Event | None
"""A moment on a stream; ``None`` on a processor, where it has passed."""


def mark(device: torch.device) -> Mark:
    """This moment on the current stream."""
    return _current(device).record_event() if device.type == "cuda" else None


def wait(device: torch.device, moment: Mark) -> None:
    """Lets the current stream wait."""
    if moment is not None:
        _current(device).wait_event(moment)


def _current(device: torch.device) -> torch.cuda.Stream:
    return current_stream(index_of(device))


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
