"""Copies from GPU to GPU of one host by copy engines: a link, and memory for pieces of any size."""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.ending import EndsWithGroup, ends_with
from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.multipath import board
from flashmoe_megatron.multipath.links import Exchange, Part, Piece, Place, Writes
from flashmoe_megatron.multipath.memory import Block, MappedMemory
from flashmoe_megatron.multipath.queues import Queue, Queues
from flashmoe_megatron.multipath.ring import Awaited, RingFlight, RingLink, Slots, has_counted
from flashmoe_megatron.ranks import StoreRanks

ALIGNMENT = 256
"""Regions begin at multiples of it, in bytes."""
HEADROOM = 1.25
"""An arena that is too small becomes so many times as large as what it is too small for."""


class PeerCopies(RingLink):
    """Writes into the receiver's memory, which the sender has mapped. Collective.

    Tensors of a program are not mapped elsewhere, so that chunks are staged in rings and copied out
    of them; tensors in memory of :meth:`allocate` or :meth:`share` are written to directly, in one
    copy.

    Without rings (``has_rings``), all has to be written to directly.

    Attributes:
        copiers: The streams of direct copies; the first one is for copies during other work.
        offers: Where ranks have come to offering their places for direct copies.
        arrivals: Where they have come to having written those of their peers.
    """

    name = "peer"

    def __init__(self, ranks: StoreRanks, queues: Queues, *, has_rings: bool = True) -> None:
        self._has_rings = has_rings
        super().__init__(ranks, queues)

    def _open(self, ranks: StoreRanks, own_bytes: int) -> None:
        self._memory = MappedMemory(ranks, self.peers, self.queues)
        self._stack.callback(self._memory.close)
        self._blocks: list[Block] = []
        super()._open(ranks, own_bytes)
        self.offers, self.arrivals = _Mark(self, board.OFFERED), _Mark(self, board.WRITTEN)
        self.copiers = [stream for lane in self.streams for stream in lane]
        self._events = [self.queues.event() for _ in self.copiers]

    def _slots(self, ranks: StoreRanks) -> Slots:
        if not self._has_rings:
            nowhere = dict.fromkeys(self.peers, 0)
            return nowhere, nowhere, {}
        rings = self._memory.allocate(len(self.peers) * self.ring_bytes)
        inbound = {peer: rings.begin + self.offset(self.rank, peer) for peer in self.peers}
        outbound = {peer: rings.mapped[peer] + self.offset(peer, self.rank) for peer in self.peers}
        return inbound, outbound, {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See the base class."""
        with self.queues.here():
            block = self._memory.allocate(nbytes)
        self._blocks.append(block)
        return self.queues.tensor(block.begin, nbytes)

    def share(self, tensor: torch.Tensor) -> bool:
        """See the base class."""
        if any(block.has(tensor) for block in self._blocks):
            return True
        try:
            with self.queues.here():
                self._blocks.append(self._memory.adopt(tensor))
        except DeviceError:
            self.raise_if_broken()
            return False
        return True

    def free(self, memory: torch.Tensor) -> None:
        """See the base class."""
        block = next(one for one in self._blocks if one.has(memory))
        self._blocks.remove(block)
        with self.queues.here():
            self._memory.release(block)

    def leave(self) -> None:
        """See the base class."""
        super().leave()
        with self.queues.here():
            self._memory.leave()

    def place_of(self, whole: torch.Tensor, offsets: Mapping[int, int]) -> Place | None:
        """See the base class."""
        for block in self._blocks:
            if block.has(whole):
                at = whole.data_ptr() - block.begin
                targets = {peer: block.mapped[peer] + at + offsets[peer] for peer in self.peers}
                return Place(f"{block.number}+{at:x}", targets, block.number)
        return None

    def begin(self, exchange: Exchange, index: int) -> RingFlight:
        """See the base class."""
        writes = self.writes(exchange.pieces, exchange.parts[index])
        if writes is None:
            return super().begin(exchange, index)
        self._prepare(exchange.number, exchange.what, writes)
        return _DirectFlight(self, exchange, index, writes)

    def writes(self, pieces: Sequence[Piece], part: Part) -> Writes | None:
        """See the base class."""
        place = pieces[0].place
        if place is None:
            return None
        copies = tuple(
            (place.targets[piece.peer] + part.begin, piece.send.data_ptr() + part.begin, nbytes)
            for piece in pieces
            if (nbytes := part.of(piece.send.numel()))
        )
        received = sum(part.of(piece.receive.numel()) for piece in pieces)
        return Writes(copies, received, place.block, pieces[0].to_all)

    def write(self, number: int, what: str, writes: Writes, stream: Queue) -> None:
        """See the base class."""
        self._prepare(number, what, writes)
        self.watch.add(self.arrive(what, stream, self.copy(writes, stream)))

    def _prepare(self, number: int, what: str, writes: Writes) -> None:
        self._memory.check(writes.block)
        self.announce(number, what)

    def copy(self, writes: Writes, first: Queue) -> list[Queue]:
        """Offers this rank's places and copies to those of peers, after their offers.

        Every call of the driver and every event costs as much as a piece of a copy, so that one
        stream does all that it can. But what several peers get alike has a stream for each, since
        a copy that follows another one begins only some 10 us after its end. Concurrent copies of
        different bytes drift apart, until several ranks write to one: in a row, each rank
        is written to by one other at a time.

        The tensors are ready in ``first``. Returns the streams that copy besides it.
        """
        handle = self.queues.handle
        stream = handle(first)
        others = self.copiers[1 : len(writes.copies)] if writes.to_all else []
        self.offers.meet(stream)
        streams = [stream]
        if others:
            self._events[0].record(first)
            for other in others:
                other.wait_event(self._events[0])
            streams += map(handle, others)
        for number, (target, source, nbytes) in enumerate(writes.copies):
            copier = streams[number % len(streams)]
            self.admit(copier, nbytes)
            self.queues.copy(target, source, nbytes, copier)
        return others

    def arrive(self, what: str, first: Queue, others: Sequence[Queue]) -> "Meeting":
        """Tells peers that their places have been written, and waits for this rank's.

        The first stream is that of :meth:`copy`, and the others are its results.
        """
        for other, copied in zip(others, self._events[1:], strict=False):
            copied.record(other)
            first.wait_event(copied)
        return Meeting(self, what, self.arrivals.meet(self.queues.handle(first)))

    def has_arrived(self, count: int) -> bool:
        """Returns whether all peers have written their parts of so many direct copies."""
        return all(has_counted(one.word, count) for one in self.arrivals.awaited)


class _Mark:
    """A point of all ranks' streams, at which they wait for each other.

    Every rank has one word for all of its peers, since a stream takes a microsecond for each word
    that it writes: the host sees ``own``, and those of peers in ``awaited``.
    """

    def __init__(self, link: PeerCopies, offset: int) -> None:
        self.own = link.own.word(offset)
        self.awaited = [Awaited(link.memories[peer].word(offset)) for peer in link.peers]
        for peer, one in zip(link.peers, self.awaited, strict=True):
            link.awaited[peer].append(one)
        theirs = [link.headers[peer] + offset for peer in link.peers]
        self._issue = link.queues.words([link.headers[link.rank] + offset], theirs)
        self._count = 0

    def meet(self, stream: Any) -> int:
        """Makes a stream say that it is there, and wait for those of peers.

        Returns:
            How often it has been called.
        """
        self._count += 1
        for one in self.awaited:
            one.count = self._count
        self._issue(stream, self._count)
        return self._count


class Meeting(NamedTuple):
    """The ranks' meeting after their direct writes, for the watch.

    The words that ranks write for each other tell how far this rank's stream has come, which spares
    it events. ``number`` is what all ranks will have counted.
    """

    link: PeerCopies
    what: str
    number: int

    def has_begun(self) -> bool:
        """Returns whether the stream has come to it: then it waits for peers or for nothing."""
        return has_counted(self.link.offers.own, self.number)

    def is_over(self) -> bool:
        """Returns whether the stream waits for nothing any more, unless the link has failed."""
        return self.link.has_arrived(self.number)


class _DirectFlight(RingFlight):
    """A transfer to the receivers' memory without a detour: one copy to each peer.

    It is in the current stream unless that has other work meanwhile.
    """

    def __init__(self, link: PeerCopies, exchange: Exchange, index: int, writes: Writes) -> None:
        super().__init__(link, exchange, index)
        self._copies, self._writes = link, writes
        self._is_beside = exchange.is_beside

    def steps(self) -> Iterator[None]:
        """Issues everything at once; waits for arrivals come after the work of other links."""
        link = self._copies
        self.enter([link.copiers[0]] if self._is_beside else [])
        first = self._streams[0]
        others = link.copy(self._writes, first)
        yield
        link.arrive(self.what, first, others)
        self.leave()


class Region(NamedTuple):
    """Some of every rank's memory: this rank's, flat uint8, and where each peer's begins."""

    memory: torch.Tensor
    place: Place


class Arena(EndsWithGroup):
    """Memory into which a group's ranks write pieces for each other. Making one is collective.

    There are no shares and no trials: copy engines carry everything. A rank that knows how much
    every rank receives knows where it lies, since all ranks' memory is handed out alike.

    Args:
        group: The ranks, of one host.
        queues: The queues of this rank's GPU.
        timeout: Seconds without progress that end an exchange with an error.

    Attributes:
        link: The link, which guards what has arrived and raises what has ended it.
        ranks: These ranks, whose hosts speak to each other; a wait for one of them reports a link
            that breaks meanwhile.

    Raises:
        LinkError: The ranks do not share a host.
        DeviceError: The GPUs cannot map each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, queues: Queues, timeout: float) -> None:
        self.ranks = StoreRanks(group, timeout, purpose="copies")
        self.link = PeerCopies(self.ranks, queues, has_rings=False)
        self.ranks.look = self.link.raise_if_broken
        # Layers that go before their group take their arena with them, unless the process ends.
        self._close = weakref.finalize(self, _close_apart, self.link)
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
        """See the base class; later calls raise a LinkError."""
        try:
            self.link.leave()
        finally:
            self.ranks.leave()

    def is_left(self) -> bool:
        """See the base class."""
        return self.ranks.is_left()

    def free(self) -> None:
        """See the base class."""
        self._close.detach()
        self._memory = None
        self._outgrown.clear()
        self.link.close()

    def restart(self, stream: Queue) -> None:
        """Has regions taken from the beginning again, since earlier ones are not read any more.

        Peers may write after the stream's work so far. Reads of earlier regions are in it, or in
        the last call's stream, and it waits for that one.

        Raises:
            FlashMoEError: What has ended the link, on every rank, if anything has.
        """
        self.link.raise_if_broken()
        # The writer's stream is waited for, too, since a call can be broken off by an error that is
        # no link's, and words are counted in order.
        for before in (self._stream, self._writer):
            if before is not None and before is not stream:
                stream.wait_stream(before)
        self._stream, self._writer = stream, None
        self._taken, self._is_new = 0, True

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
                self.link.free(self._outgrown.pop())
        self._is_new = False
        if self._memory is None or self._memory.numel() < self._taken:
            self._grow(int(self._taken * HEADROOM))
        assert self._memory is not None
        whole = self._memory[begin : self._taken]
        place = self.link.place_of(whole, dict.fromkeys(self.link.peers, 0))
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
        self.link.write(self._number, what, writes, stream)

    def _grow(self, nbytes: int) -> None:
        if self._memory is not None:
            self._outgrown.append(self._memory)
            self._memory = None
        try:
            self._memory = self.link.allocate(nbytes)
        except DeviceError:  # the same on every rank; torch may hold memory that it does not use
            self.link.raise_if_broken()
            torch.cuda.empty_cache()
            self._memory = self.link.allocate(nbytes)


def _close_apart(link: PeerCopies) -> None:
    """Closes a link in a thread of its own, since a collector may run in the link's."""
    threading.Thread(target=link.close, name="flashmoe-arena", daemon=True).start()
