"""Lines in the log about a call that does not end: its time so far, and the ranks that are late.

The ranks of one host have a page of shared memory each, with the calls that they have made, begun
and ended. A thread of each rank looks at its own calls and, once one is late, at the pages of all:
a rank whose interpreter stands still has none that could answer a question.
"""

import contextlib
import itertools
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from flashmoe_megatron.multipath.memory import SharedMemory
from flashmoe_megatron.ranks import StoreRanks

logger = logging.getLogger("flashmoe_megatron")

MOST_LINES = 100
"""Lines of one rank; a call's next line comes after twice the time of the one before."""
_LEAST_PERIOD_S, _PERIOD_S = 0.05, 1.0
_MADE, _BEGUN, _ENDED, _WHAT = 0, 8, 16, 24
_WHAT_BYTES, _PAGE_BYTES = 96, 4096
_FRAMES = 4


class Call:
    """A call of this rank: its number, which is the same on every rank, and what it does.

    Attributes:
        has_begun: Tells whether the stream has come to it.
        is_over: Tells whether it has ended; ``None`` while the host issues it.
    """

    def __init__(self, number: int, what: str, has_begun: Callable[[], bool]) -> None:
        self.number, self.what, self.has_begun = number, what, has_begun
        self.is_over: Callable[[], bool] | None = None
        self.host = threading.get_ident()


class Patience:
    """Decides when a line is due: after some seconds, then each time after twice as long as before.

    Args:
        after: The seconds.
    """

    def __init__(self, after: float) -> None:
        self._after = self._due = after
        self._state, self._since = (0, False), 0.0
        self._left = MOST_LINES

    def is_due(self, now: float, number: int, late: bool) -> float | None:
        """Takes the call that is waited for, or the last one if none is.

        Returns:
            For how many seconds that has been so, if a line about it is due.
        """
        if self._state != (number, late):
            self._state, self._since, self._due = (number, late), now, self._after
        still = now - self._since
        if still < self._due or not self._left:
            return None
        self._left -= 1
        self._due = 2 * self._due if late else math.inf  # a pause has one line
        return still


class Watchdog:
    """Writes lines about calls that have not ended for some seconds. Made by all ranks of a host.

    A rank that makes no call for so long writes a line, too, once in each pause.

    Args:
        ranks: The ranks, of one host.
        after: The seconds.

    Raises:
        LinkError: The ranks do not share a host.
        HeapError: The host has no room for a page.
    """

    def __init__(self, ranks: StoreRanks, after: float) -> None:
        self._rank, self._after = ranks.rank, after
        self._calls: deque[Call] = deque()
        self._last: Call | None = None
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._memory = contextlib.ExitStack()
        try:
            self._pages = self._shared(ranks)
        except BaseException:
            self._memory.close()
            raise
        self._thread = threading.Thread(target=self._run, name="flashmoe-watchdog", daemon=True)
        self._thread.start()

    def _shared(self, ranks: StoreRanks) -> list[SharedMemory]:
        own = SharedMemory.create(_PAGE_BYTES)
        self._memory.callback(own.close)
        own.hold()
        pages = []
        for rank, place in enumerate(ranks.all(lambda: own.place)):
            page = own
            if rank != ranks.rank:
                page = SharedMemory.open(place)
                self._memory.callback(page.close)
            pages.append(page)
        # No rank goes on, and ends, before all have opened its page.
        ranks.all(lambda: None)
        return pages

    @contextlib.contextmanager
    def call(self, what: str, has_begun: Callable[[], bool]) -> Iterator[Call]:
        """Looks after a call that is made within; it is over then unless ``is_over`` says when."""
        call = Call(next(self._numbers), what, has_begun)
        own = self._pages[self._rank]
        own.write(_WHAT, what.encode()[:_WHAT_BYTES].ljust(_WHAT_BYTES, b"\0"))
        own.number(_MADE).value = call.number
        self._calls.append(call)
        try:
            yield call
        except BaseException:
            call.is_over = _always
            raise
        call.is_over = call.is_over or _always

    def close(self) -> None:
        """Ends the thread and forgets the calls."""
        self._closed.set()
        self._thread.join()
        self._calls.clear()
        self._last = None
        self._pages.clear()
        self._memory.close()

    def _run(self) -> None:
        patience = Patience(self._after)
        period = max(_LEAST_PERIOD_S, min(_PERIOD_S, self._after / 4))
        own = self._pages[self._rank]
        while not self._closed.wait(period):
            while self._calls and self._calls[0].is_over is not None and self._calls[0].is_over():
                self._last = self._calls.popleft()
                own.number(_ENDED).value = self._last.number
            late = bool(self._calls)
            call = self._calls[0] if late else self._last
            if call is None:
                continue
            if late and call.has_begun():
                own.number(_BEGUN).value = call.number
            still = patience.is_due(time.monotonic(), call.number, late)
            if still is not None:
                logger.warning("%s", self._line(call, still, late))

    def _line(self, call: Call, still: float, late: bool) -> str:
        """Describes a call that is late, or the last one before a pause."""
        name = f"call {call.number}, {call.what}"
        if late:
            place = "waits in it" if call.has_begun() else "has not come to it"
            said = f"{name}, has not ended for {still:.1f} s, and this rank's stream {place}"
        else:
            said = f"no call for {still:.1f} s, since {name}, has ended"
        others = [
            f"rank {rank} {self._state(page, call)}"
            for rank, page in enumerate(self._pages)
            if rank != self._rank
        ]
        where = _frames(sys._current_frames().get(call.host))
        return f"multipath, rank {self._rank}: {said}; {', '.join(others)}; its host is at {where}"

    def _state(self, page: SharedMemory, call: Call) -> str:
        """Says how far another rank has come with a call."""
        made, begun, ended = (page.number(at).value for at in (_MADE, _BEGUN, _ENDED))
        if not page.is_held():
            return f"has left, its process or its links, after {made} calls"
        if made < call.number:
            what = page.read(_WHAT, _WHAT_BYTES).rstrip(b"\0").decode(errors="replace")
            last = f" (its last is call {made}, {what})" if made else ""
            return f"has not made it{last}"
        if ended >= call.number:
            return "has ended it" if made == call.number else f"has made call {made}"
        return "waits in it, too" if begun >= call.number else "has made it and not come to it"


def _always() -> bool:
    return True


def _frames(frame: FrameType | None) -> str:
    """Names the innermost places of a thread."""
    places: list[str] = []
    while frame is not None and len(places) < _FRAMES:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places) or "an end"
