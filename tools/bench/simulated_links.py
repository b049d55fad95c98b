"""A link that has a clock instead of wires, to try the balancer on."""

import math
import random
from collections.abc import Sequence


class SimulatedLink:
    """A link of a known rate and latency.

    Args:
        name: The link's.
        gbps: GB/s into each rank.
        latency_us: Microseconds before the first byte.
        per_chunk_us: Microseconds that every chunk costs in addition to its bytes.
        hops: How many copies follow each other on the way; a relay through the host has two, and
            its second begins when the first has moved a chunk.
        noise: Standard deviation of its times, as a part of them.
    """

    def __init__(
        self,
        name: str,
        gbps: float,
        latency_us: float,
        *,
        per_chunk_us: float = 0.0,
        hops: int = 1,
        noise: float = 0.0,
    ) -> None:
        self.name, self.gbps, self.latency_us = name, gbps, latency_us
        self.per_chunk_us, self.hops, self.noise = per_chunk_us, hops, noise
        self._random = random.Random(name)

    def seconds(self, nbytes: int, chunk: int) -> float:
        """How long a transfer takes; 0 for nothing."""
        if nbytes <= 0:
            return 0.0
        fill = (self.hops - 1) * min(chunk, nbytes)
        moving = (nbytes + fill) / (self.gbps * 1e9)
        chunks = math.ceil(nbytes / chunk) * self.per_chunk_us
        return (moving + (self.latency_us + chunks) * 1e-6) * self._wobble()

    def _wobble(self) -> float:
        return max(0.0, 1 + self.noise * self._random.gauss(0, 1)) if self.noise else 1.0


def measure(
    links: Sequence[SimulatedLink], carried: Sequence[int], chunks: Sequence[int]
) -> list[float]:
    """Each link's seconds if each moves its bytes, all at once."""
    return [
        link.seconds(nbytes, chunk)
        for link, nbytes, chunk in zip(links, carried, chunks, strict=True)
    ]
