"""Prints how far a sweep has come, and estimates how long it still takes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSE_S = 0.5
"""Seconds between two looks at what is done."""


class Progress:
    """Counts the parts of a sweep; a part is assumed to take as long as those before it.

    Args:
        done: Parts that were done before.
        total: All parts.
        parts: Their name.
    """

    def __init__(self, done: int, total: int, parts: str) -> None:
        self._first, self._total, self._parts = done, total, parts
        self._last = done
        self._begin = time.monotonic()

    def say(self, done: int) -> None:
        """Prints a line if more is done than before."""
        if done <= self._last:
            return
        self._last = done
        seconds = time.monotonic() - self._begin
        left = seconds / (done - self._first) * (self._total - done)
        print(
            f"{done} of {self._total} {self._parts}, {seconds:.0f} s, about {left:.0f} s left",
            flush=True,
        )

    @contextmanager
    def watching(self, count: Callable[[], int]) -> Iterator[None]:
        """Prints lines while a job runs.

        Args:
            count: Counts what is done so far, from another thread.
        """
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(PAUSE_S):
                self.say(count())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.say(count())
