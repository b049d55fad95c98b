"""Reductions of gradients in the gaps of a backward, while the way between ranks is idle.

A backward is a sequence of windows: exchanges of a layer leave the way between ranks idle for a
while, and so do computations outside the experts. A reduction that fits costs nothing. Gaps
are filled first, the earliest first, as FSMoE does; what is left then goes where each further byte
costs least, which is after the last window if it is nowhere less.

A piece is queued when its gradients are complete, and starts in the order of pieces: concurrently
with the computation between layers as long as that lasts, and after a layer's last part on its way
to the experts. Every rank queues the same pieces and asks for them at the same places, so that all
start them in one order.
"""

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flashmoe_megatron import streams
from flashmoe_megatron.measured.fit import Line
from flashmoe_megatron.separate.degree import Pass, time_of

PARTS = (1, 1 / 2, 1 / 8, 1 / 32, 1 / 128)
"""Parts of a reduction that are moved to other windows."""
MOST_MOVES = 256


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
        self._queue: deque[tuple[int, Callable[[], None], streams.Mark]] = deque()
        self._room = 0.0

    def plan(self, in_gap: Mapping[int, float], beside: Mapping[int, float]) -> None:
        """Adds what layers have room for."""
        self.in_gap.update(in_gap)
        self.beside.update(beside)

    def put(self, num_bytes: int, start: Callable[[], None]) -> None:
        """Queues a reduction of gradients that the current stream completes; it starts there."""
        self._queue.append((num_bytes, start, streams.mark(self._device)))
        self._start_what_fits(None)

    def take(self, layer: int, lane: streams.Lane) -> None:
        """Starts the pieces that fit a layer's gap, after all work on the lane between ranks."""
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

    def _start_what_fits(self, lane: streams.Lane | None) -> None:
        """Pieces are not of one size: one goes where it fits at least by half, or waits on."""
        while self._queue and self._queue[0][0] <= 2 * self._room:
            num_bytes, start, ready = self._queue.popleft()
            self._room -= num_bytes
            if lane is None:
                streams.wait(self._device, ready)
                start()
                continue
            with lane.after(ready):
                start()
        if lane is not None and not self._queue:
            self._room = 0.0  # a gap is over with its layer


@dataclass(frozen=True)
class Window:
    """A part of a backward.

    Attributes:
        ready: Bytes of gradients that become ready before it, since the window before it.
        cost_s: Seconds that reductions of so many seconds add to it: nothing while they
            fit its gap, then more and more.
    """

    ready: float
    cost_s: Callable[[float], float]


def layer_window(ready: float, backward: Pass, degree: int) -> Window:
    """Returns the window that a layer's exchanges leave in its backward, in ``degree`` parts.

    ``ready`` bytes of gradients become ready before it.
    """
    alone_s = time_of(backward, degree)

    def cost_s(seconds: float) -> float:
        more = dataclasses.replace(backward, slices_s=backward.slices_s + seconds)
        return time_of(more, degree) - alone_s

    return Window(ready, cost_s)


def beside_window(ready: float, seconds: float) -> Window:
    """The window of something that does not use the way between ranks for so many seconds."""
    return Window(ready, lambda reduction_s: max(reduction_s - seconds, 0.0))


def cut_gradients(windows: Sequence[Window], line: Line) -> list[float]:
    """Returns the bytes to reduce in each window, in order; the rest is reduced after the last.

    ``line`` is what a reduction takes.
    """
    return _spread(windows, fill_gaps(windows, line), line)


def fill_gaps(windows: Sequence[Window], line: Line) -> list[float]:
    """Applies FSMoE's first rule: each window takes as many ready bytes as cost nothing."""
    filled: list[float] = []
    left = 0.0
    for window in windows:
        left += window.ready
        filled.append(_free_bytes(window, left, line))
        left -= filled[-1]
    return filled


def _reduction_s(size: float, line: Line) -> float:
    return line.time_s(size) if size > 0.5 else 0.0  # half a byte is none, but for rounding


def _free_bytes(window: Window, most: float, line: Line) -> float:
    """The most bytes, up to ``most``, that cost the window nothing."""

    def is_free(size: float) -> bool:
        seconds = _reduction_s(size, line)
        return window.cost_s(seconds) <= 1e-9 * seconds

    if is_free(most):
        return most
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_free(middle) else (low, middle)
    return low if low > 0.5 else 0.0


def _spread(windows: Sequence[Window], filled: Sequence[float], line: Line) -> list[float]:
    """Moves bytes from where they cost most to where they cost least, until no move saves time.

    A move takes all that a window has or a part of it; the bytes left after the last window count
    as a window, too. So marginal costs become equal, but for the fixed cost of each reduction.
    """
    ends = itertools.accumulate(window.ready for window in windows)
    ready = list(ends)
    behind = len(windows)
    amounts = [*filled, max((ready[-1] if ready else 0.0) - sum(filled), 0.0)]

    @functools.cache
    def cost_s(place: int, size: float) -> float:
        seconds = _reduction_s(size, line)
        return seconds if place == behind else windows[place].cost_s(seconds)

    def room(source: int, target: int) -> float:
        """Returns how many bytes may be moved; all have to be ready in the target window."""
        taken = list(itertools.accumulate(amounts))
        return min((ready[i] - taken[i] for i in range(target, source)), default=math.inf)

    def moves() -> Iterator[tuple[int, int, float]]:
        places = range(behind + 1)
        for source, target in itertools.permutations(places, 2):
            if cost_s(source, amounts[source]) > 0:
                most = min(amounts[source], room(source, target))
                yield from ((source, target, most * part) for part in PARTS if most * part > 0.5)

    def saved_s(source: int, target: int, size: float) -> float:
        before = cost_s(source, amounts[source]) + cost_s(target, amounts[target])
        source_s = cost_s(source, amounts[source] - size)
        return before - source_s - cost_s(target, amounts[target] + size)

    for _ in range(MOST_MOVES):
        found = [(saved_s(*move), move) for move in moves()]
        if not found or max(found)[0] <= line.time_s(1) * 1e-3:
            break
        _, (source, target, size) = max(found)
        amounts[source] -= size
        amounts[target] += size
    return amounts[:behind]
