"""Which link takes which chunk of a piece, where a link is free to choose."""

import threading
from collections.abc import Sequence

from flashmoe_megatron.multipath.balancer import GRAIN

REST = 0.1
"""The part of a transfer that goes by whichever link is free."""

Range = tuple[int, int]
"""First byte, and the byte behind the last."""


class Tickets:
    """Hands out the chunks of one piece: first each link's own, then the rest to who asks.

    A link gets a chunk of the rest only if it will have moved it before the fastest link could have
    moved all that is left: else the slowest link would take the last chunk, and all wait for it.

    Args:
        carried: Bytes that each link carries by its share, in the order of the links.
        chunks: Bytes that each link moves at once.
        rates: Bytes per second of each link; a link with rate 0 takes nothing.
    """

    def __init__(
        self, carried: Sequence[int], chunks: Sequence[int], rates: Sequence[float]
    ) -> None:
        self._lock = threading.Lock()
        self._chunks, self._rates = chunks, rates
        self._own: list[Range] = []
        begin = 0
        for nbytes in carried:
            self._own.append((begin, begin + nbytes))
            begin += nbytes
        self._rest: Range = (begin, begin)

    @classmethod
    def with_rest(
        cls, carried: Sequence[int], chunks: Sequence[int], rates: Sequence[float]
    ) -> "Tickets":
        """Tickets whose last tenth, by every link's share, is the rest.

        Links that carry nothing take none of it, however fast they are: the others do not leave the
        last chunks to them.
        """
        rates = [rate if nbytes else 0.0 for rate, nbytes in zip(rates, carried, strict=True)]
        own = [int(nbytes * (1 - REST)) // GRAIN * GRAIN for nbytes in carried]
        tickets = cls(own, chunks, rates)
        tickets._rest = (sum(own), sum(carried))
        return tickets

    def take(self, link: int) -> Range | None:
        """The next chunk for a link; ``None`` once there is none for it."""
        with self._lock:
            begin, end = self._own[link]
            if begin < end:
                cut = min(end, begin + self._chunks[link])
                self._own[link] = (cut, end)
                return begin, cut
            begin, end = self._rest
            if begin == end or not self._rates[link]:
                return None
            # Small enough that a slow link, too, can take its part of the rest.
            cut = min(end, begin + max(GRAIN, min(self._chunks[link], (end - begin) // 16)))
            if (cut - begin) / self._rates[link] > (end - begin) / max(self._rates):
                return None
            self._rest = (cut, end)
            return begin, cut
