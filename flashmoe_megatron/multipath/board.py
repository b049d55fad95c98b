"""The counters, messages and failures of ranks that share a host, and the watch over them.

Every rank owns one segment of host memory, which the others map. It begins with the ranks' messages
to each other:

- for each peer and lane a word FULL, the chunks that the peer has sent, and a word FREE, the chunks
  of it that this rank has taken out of the ring again; both count modulo 2**32;
- two words that the rank itself writes and all others wait for: OFFERED, for how many direct copies
  it has offered its places, and WRITTEN, how many of its own have come to theirs;
- a word ENDED that it writes for itself: the exchanges that its streams of the link have ended;
- the last exchanges that the rank has begun, so that a peer sees that it has begun another one;
- why the rank's links have failed, once they have, and the factor of received data: 1, then NaN.

What follows is the link's own. A thread of each link watches words that its streams wait for.
"""

import functools
import math
import struct
import threading
import time
from collections import deque
from typing import Any

from flashmoe_megatron.errors import FlashMoEError, LinkError, PeerTimeoutError, ShapeError
from flashmoe_megatron.multipath.memory import SharedMemory

HEADER_BYTES = 65536
MAX_RANKS = 64
NUM_LANES = 2
NUM_SLOTS = 2
"""Slots of a lane."""
_PEER_BYTES, _FREE, _LANE = 256, 128, 64  # a counter has a cache line for itself
_LOG, _LOG_ENTRIES = MAX_RANKS * _PEER_BYTES, 64
_NUMBER_BYTES, _TEXT_BYTES = 8, 56
_ENTRY_BYTES = _NUMBER_BYTES + _TEXT_BYTES
NOTICE = _LOG + _LOG_ENTRIES * _ENTRY_BYTES
"""Offset of a word that is 0 as long as there is no notice."""
_LENGTH = struct.Struct("<I")
OFFERED, WRITTEN = HEADER_BYTES - 192, HEADER_BYTES - 128
"""Offsets of words that count direct copies, modulo 2**32."""
ENDED = HEADER_BYTES - 256
"""Offset of the word that counts exchanges, likewise."""
VERDICT = HEADER_BYTES - 64
"""Offset of the factor for outputs, a float."""
_FACTOR = struct.Struct("<f")
_LONGEST = 1000
_PERIOD_S = 0.1


def full_word(peer: int, lane: int) -> int:
    """Offset of the word FULL of a peer's lane."""
    return peer * _PEER_BYTES + lane * _LANE


def free_word(peer: int, lane: int) -> int:
    """Offset of the word FREE of a peer's lane."""
    return full_word(peer, lane) + _FREE


class Log:
    """The last exchanges that a rank has begun, in its segment."""

    def __init__(self, memory: SharedMemory, rank: int) -> None:
        self._memory, self._rank = memory, rank
        self._numbers = [memory.number(_entry(index)) for index in range(_LOG_ENTRIES)]
        self._written = [""] * _LOG_ENTRIES

    def add(self, number: int, what: str) -> None:
        """Writes down that its own rank begins an exchange."""
        index = number % _LOG_ENTRIES
        # A reader that finds the number before and after the text has read the whole text.
        if self._written[index] != what:
            self._numbers[index].value = 0
            self._memory.write(_entry(index) + _NUMBER_BYTES, _text(what))
            self._written[index] = what
        self._numbers[index].value = number

    def check(self, rank: int, number: int, what: str) -> None:
        """Compares an exchange of another rank with its own rank's of that number, if begun.

        Raises:
            ShapeError: It exchanges something else.
        """
        index = number % _LOG_ENTRIES
        if self._numbers[index].value != number:
            return
        text = self._memory.read(_entry(index) + _NUMBER_BYTES, _TEXT_BYTES)
        if text != _text(what) and self._numbers[index].value == number:
            theirs = text.rstrip(b"\0").decode(errors="replace")
            raise ShapeError(
                f"rank {self._rank} takes part in {theirs}, rank {rank} in {what}: wanted the same "
                "on every rank"
            )


def _entry(index: int) -> int:
    """Offset of an entry of the log."""
    return _LOG + index * _ENTRY_BYTES


@functools.lru_cache(maxsize=64)
def _text(what: str) -> bytes:
    """An operation as an entry has it."""
    return what.encode().ljust(_TEXT_BYTES, b"\0")


def clear(memory: SharedMemory) -> None:
    """Says that a new rank's links are good."""
    memory.write(VERDICT, _FACTOR.pack(1.0))


def post(memory: SharedMemory, reason: str) -> None:
    """Tells a rank, and its GPU, that the links have failed; the first reason stays."""
    memory.write(VERDICT, _FACTOR.pack(math.nan))
    if notice(memory) is None:
        text = reason.encode()[:_LONGEST]
        memory.write(NOTICE + _LENGTH.size, text)
        memory.write(NOTICE, _LENGTH.pack(len(text)))


def notice(memory: SharedMemory) -> str | None:
    """Why the links have failed, if they have."""
    (length,) = _LENGTH.unpack(memory.read(NOTICE, _LENGTH.size))
    return memory.read(NOTICE + _LENGTH.size, length).decode(errors="replace") if length else None


class Watch:
    """A thread that ends transfers of a link that will never end by themselves, and says why.

    It looks 10 times a second while there are transfers, however many there are, and none of them
    wakes it: it would take the interpreter's lock from the thread that issues chunks.

    A stream that waits for a word waits for ever if no rank writes it. Where a peer has died, has
    failed, or has not counted for the time limit, the thread notes the error, tells every rank, and
    writes the words itself, time and again: a peer that is late may write smaller ones over them.
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
            now = [one.word.value for ones in self._link.awaited.values() for one in ones]
            # Until the stream gets there it waits for this rank's own work, not for a peer.
            if flight is not self._flights[0] or now != counts or not flight.has_begun():
                flight, moved_at, counts = self._flights[0], time.monotonic(), now
            error = self._link.problem() or self._problem(flight, time.monotonic() - moved_at)
            if error is not None:
                self._end(error)

    def _end(self, error: FlashMoEError) -> None:
        self._link.fail(error)
        self._link.release()

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
