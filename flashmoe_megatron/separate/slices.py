"""Reductions of gradients that wait until the way between ranks is idle.

A piece is queued when its gradients are complete, and starts in the order of pieces: concurrently
with the computation between layers as long as that lasts, and after a layer's last part on its way
to the experts. Every rank queues the same pieces and asks for them at the same places, so that all
start them in one order.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flashmoe_megatron.separate import lanes


@dataclass(frozen=True)
class _Piece:
    """A reduction that has not been started.

    Attributes:
        num_bytes: What it reduces.
        start: Starts it on the current stream.
        ready: When its gradients are complete.
    """

    num_bytes: int
    start: Callable[[], None]
    ready: lanes.Mark


class GradientSlices:
    """Pieces of the gradients' reduction, first come first served.

    Attributes:
        in_gap: Bytes for the gap of each layer, by its number.
        ``beside``: Bytes for the computation between each layer's backward and the next.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes an empty queue without room."""
        self.in_gap: dict[int, float] = {}
        self.beside: dict[int, float] = {}
        self._device = device
        self._queue: deque[_Piece] = deque()
        self._room = 0.0

    def plan(self, in_gap: Mapping[int, float], beside: Mapping[int, float]) -> None:
        """Adds what layers have room for."""
        self.in_gap.update(in_gap)
        self.beside.update(beside)

    def put(self, num_bytes: int, start: Callable[[], None]) -> None:
        """Queues a reduction whose gradients are complete on the current stream.

        Args:
            num_bytes: What it reduces.
            start: Starts it on the current stream.
        """
        self._queue.append(_Piece(num_bytes, start, lanes.mark(self._device)))
        self._start_what_fits(None)

    def take(self, layer: int, lane: lanes.Lane) -> None:
        """Starts the pieces that fit a layer's gap, after all work on a lane.

        Args:
            layer: The layer's number.
            lane: The way between ranks.
        """
        self._room += self.in_gap.get(layer, 0.0)
        self._start_what_fits(lane)

    def leave(self, layer: int) -> None:
        """Starts what fits what follows a layer's backward, now or as it is queued."""
        self._room += self.beside.get(layer, 0.0)
        self._start_what_fits(None)

    def drain(self) -> None:
        """Starts all that is left."""
        self._room = float("inf")
        self._start_what_fits(None)
        self._room = 0.0

    def _start_what_fits(self, lane: lanes.Lane | None) -> None:
        """Pieces are not of one size: one goes where it fits at least by half, or waits on."""
        while self._queue and self._queue[0].num_bytes <= 2 * self._room:
            piece = self._queue.popleft()
            self._room -= piece.num_bytes
            if lane is None:
                lanes.wait(self._device, piece.ready)
                piece.start()
                continue
            with lane.after(piece.ready):
                piece.start()
        if lane is not None and not self._queue:
            self._room = 0.0  # a gap is over with its layer
