"""Memory of the ranks of one host, into which they write pieces of any size for each other.

There are no shares and no trials: copy engines carry everything between GPUs that see each other's
memory. A rank that knows how much every rank receives knows where it lies, since all ranks' memory
is handed out alike.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.ending import EndsWithGroup, ends_with
from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.links import Place, Writes
from flashmoe_megatron.multipath.peer_copies import PeerCopies
from flashmoe_megatron.multipath.queues import Queue, Queues

ALIGNMENT = 256
"""Regions begin at multiples of it, in bytes."""
HEADROOM = 1.25
"""An arena that is too small becomes so many times as large as what it is too small for."""


class Region(NamedTuple):
    """Some of every rank's memory.

    Attributes:
        memory: This rank's, flat uint8.
        place: Where each peer's begins.
    """

    memory: torch.Tensor
    place: Place


class Arena(EndsWithGroup):
    """Links and memory that a group's exchanges of pieces share. Making one is collective.

    Args:
        group: The ranks, of one host.
        queues: The queues of this rank's GPU.
        timeout: Seconds without progress that end an exchange with an error.

    Attributes:
        ranks: These ranks, whose hosts speak to each other; a wait for one of them reports a link
            that breaks meanwhile.

    Raises:
        LinkError: The ranks do not share a host.
        DeviceError: The GPUs cannot map each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, queues: Queues, timeout: float) -> None:
        self.ranks = Control(group, timeout)
        self._link = PeerCopies(self.ranks, queues, has_rings=False)
        self.ranks.look = self._link.raise_if_broken
        # Layers that go before their group take their arena with them, unless the process ends.
        self._close = weakref.finalize(self, _close_apart, self._link)
        self._close.atexit = False
        self._memory: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor] = []
        self._taken = 0
        self._is_new = True
        self._number = 0
        self._stream: Queue | None = None
        self._writer: Queue | None = None
        ends_with(self.ranks.group, self)

    def leave(self) -> None:
        """See :class:`~flashmoe_megatron.ending.EndsWithGroup`; later calls raise a LinkError."""
        try:
            self._link.leave()
        finally:
            self.ranks.leave()

    def is_left(self) -> bool:
        """See :class:`~flashmoe_megatron.ending.EndsWithGroup`."""
        return self.ranks.is_left()

    def free(self) -> None:
        """See :class:`~flashmoe_megatron.ending.EndsWithGroup`."""
        self._close.detach()
        self._memory = None
        self._outgrown.clear()
        self._link.close()

    def restart(self, stream: Queue) -> None:
        """Has regions taken from the beginning again, since earlier ones are not read any more.

        Args:
            stream: Peers may write after its work so far. Reads of earlier regions are in it, or in
                the last call's stream, and it waits for that one.

        Raises:
            FlashMoEError: As :meth:`raise_if_broken`.
        """
        self.raise_if_broken()
        # The writer's stream is waited for, too, since a call can be broken off by an error that is
        # no link's, and words are counted in order.
        for before in (self._stream, self._writer):
            if before is not None and before is not stream:
                stream.wait_stream(before)
        self._stream, self._writer = stream, None
        self._taken, self._is_new = 0, True

    def raise_if_broken(self) -> None:
        """Raises what has ended the link, on every rank, if anything has."""
        self._link.raise_if_broken()

    def take(self, nbytes: Sequence[int]) -> Region:
        """The next region, until :meth:`restart`. Collective where the arena is too small for it.

        Args:
            nbytes: How much of it every rank needs, by rank; the same list on every rank.

        Raises:
            DeviceError: A GPU has not that much memory.
            PeerTimeoutError: A rank is gone or does not come.
        """
        begin = self._taken
        self._taken += -(-max(*nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if self._is_new and self._outgrown:
            assert self._stream is not None
            self._stream.synchronize()  # which has waited for all that read or wrote it
            while self._outgrown:
                self._link.free(self._outgrown.pop())
        self._is_new = False
        if self._memory is None or self._memory.numel() < self._taken:
            self._grow(int(self._taken * HEADROOM))
        assert self._memory is not None
        whole = self._memory[begin : self._taken]
        place = self._link.place_of(whole, dict.fromkeys(self._link.peers, 0))
        assert place is not None
        return Region(whole[: nbytes[self.ranks.rank]], place)

    def write(
        self,
        what: str,
        copies: Sequence[tuple[int, int, int]],
        region: Region,
        stream: Queue,
    ) -> None:
        """Writes to every peer's region, and waits until peers have written to this rank's.

        Args:
            what: The operation, the same on every rank; at most 48 letters.
            copies: Target, source and bytes of each, those for the next rank first.
            region: Where everything goes.
            stream: Where what is sent is ready, and which waits for the end.

        Raises:
            ShapeError: A peer exchanges something else.
            FlashMoEError: What has ended the link before.
        """
        self._number += 1
        self._writer = stream
        writes = Writes(tuple(copies), 0, region.place.block, False)  # no caller asks what arrives
        self._link.write(self._number, what, writes, stream)

    @property
    def peers(self) -> Sequence[int]:
        """The other ranks, the next one first."""
        return self._link.peers

    def guard(self, received: torch.Tensor) -> None:
        """Makes the first value NaN, in the current stream, if the link has failed by then."""
        self._link.guard(received)

    def _grow(self, nbytes: int) -> None:
        if self._memory is not None:
            self._outgrown.append(self._memory)
            self._memory = None
        try:
            self._memory = self._link.allocate(nbytes)
        except DeviceError:  # the same on every rank; torch may hold memory that it does not use
            self._link.raise_if_broken()
            torch.cuda.empty_cache()
            self._memory = self._link.allocate(nbytes)


def _close_apart(link: PeerCopies) -> None:
    """Closes a link in a thread of its own, since a collector may run in the link's."""
    threading.Thread(target=link.close, name="flashmoe-arena", daemon=True).start()
