"""Ends transfers between GPUs that will never end by themselves, and says why."""

import threading
import time
from collections import deque
from typing import Any

from flashmoe_megatron.errors import FlashMoEError, LinkError, PeerTimeoutError

_PERIOD_S = 0.1


class Watch:
    """A thread that looks after the transfers of a link; it sleeps nearly all of the time.

    It looks 10 times a second while there are transfers, however many there are, and none of them
    wakes it: it would take the interpreter's lock from the thread that issues chunks.

    A stream that waits for a word waits for ever if no rank writes it. Where a peer has died, has
    failed, or has not counted for the time limit, the thread notes the error, tells every rank, and
    writes the words itself, time and again: a peer that is late may write smaller ones over them.

    Args:
        link: The :class:`~flashmoe_megatron.multipath.ring.RingLink`.
    """

    def __init__(self, link: Any) -> None:
        self._link = link
        self._flights: deque[Any] = deque()
        self._added, self._is_closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=f"{link.name}-watch", daemon=True)
        self._thread.start()

    def add(self, flight: Any) -> None:
        """Looks after another transfer, which has been issued completely."""
        self._flights.append(flight)
        if not self._added.is_set():
            self._added.set()

    def wake(self) -> None:
        """Lets streams go on from now on, since the link has failed."""
        self._added.set()

    def close(self) -> None:
        """Ends the thread, once the transfers have ended."""
        self._is_closed = True
        self._added.set()
        self._thread.join()

    def _run(self) -> None:
        flight: Any = None
        moved_at, counts = 0.0, list[int]()
        while self._added.wait():
            time.sleep(_PERIOD_S)
            self._added.clear()
            while self._flights and self._flights[0].is_over():
                self._flights.popleft()
            if not self._flights:
                if self._is_closed:
                    return
                if self._link.broken is not None:  # what was broken off is in no transfer
                    self._end(self._link.broken)
                continue
            self._added.set()
            now = self._counts()
            # Until the stream gets there it waits for this rank's own work, not for a peer.
            if flight is not self._flights[0] or now != counts or not flight.has_begun():
                flight, moved_at, counts = self._flights[0], time.monotonic(), now
            error = self._link.problem() or self._problem(flight, time.monotonic() - moved_at)
            if error is not None:
                self._end(error)

    def _end(self, error: FlashMoEError) -> None:
        self._link.fail(error)
        self._link.release()

    def _counts(self) -> list[int]:
        return [one.word.value for ones in self._link.awaited.values() for one in ones]

    def _problem(self, flight: Any, still: float) -> FlashMoEError | None:
        link = self._link
        where = f"link {link.name}, {flight.what}: rank {link.rank}"
        late = [peer for peer in link.peers if any(one.is_behind() for one in link.awaited[peer])]
        for peer in late:
            if not link.memories[peer].is_held():
                return LinkError(f"{where} lost rank {peer}, whose process has ended")
        if still > link.timeout:
            whom = f"ranks {late}" if late else "its own GPU"
            return PeerTimeoutError(
                f"{where} has waited {still:.1f} s for {whom}, longer than {link.timeout:g} s"
            )
        return None
