"""The counters of rings and the notices of ranks, in host memory that all of them share.

Every rank owns one segment, which the others map. It begins with the ranks' messages to each other:

- for each peer and lane a word FULL, the chunks that the peer has sent, and a word FREE, the chunks
  of it that this rank has taken out of the ring again; both count modulo 2**32;
- two words that the rank itself writes and all others wait for: OFFERED, for how many direct copies
  it has offered its places, and WRITTEN, how many of its own have come to theirs;
- a word ENDED that it writes for itself: the exchanges that its streams of the link have ended;
- the last exchanges that the rank has begun, so that a peer sees that it has begun another one;
- why the rank's links have failed, once they have, and the factor of received data: 1, then NaN.

What follows is the link's own.
"""

import functools
import math
import struct

from flashmoe_megatron.errors import LinkError, ShapeError
from flashmoe_megatron.multipath.shared import SharedMemory

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


def full_word(peer: int, lane: int) -> int:
    """Offset of the word FULL of a peer's lane."""
    return peer * _PEER_BYTES + lane * _LANE


def free_word(peer: int, lane: int) -> int:
    """Offset of the word FREE of a peer's lane."""
    return full_word(peer, lane) + _FREE


class Log:
    """The last exchanges that a rank has begun, in its segment.

    Args:
        memory: The segment.
        rank: Its rank.
    """

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


def require_ranks(num_ranks: int) -> None:
    """Refuses groups that have more ranks than there are counters."""
    if num_ranks > MAX_RANKS:
        raise LinkError(f"{num_ranks} ranks: wanted at most {MAX_RANKS}, which share one host")
