"""Copies from GPU to GPU of one host by copy engines."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.multipath import board
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.links import Exchange, Part, Piece, Place, Writes
from flashmoe_megatron.multipath.mapped import Block, MappedMemory
from flashmoe_megatron.multipath.queues import Queue, Queues
from flashmoe_megatron.multipath.ring import Awaited, RingFlight, RingLink, Slots, has_counted


class PeerCopies(RingLink):
    """Writes into the receiver's memory, which the sender has mapped. Collective.

    Tensors of a program are not mapped elsewhere, so that chunks are staged in rings and copied out
    of them; tensors in memory of :meth:`allocate` or :meth:`share` are written to directly, in one
    copy.

    Args:
        control: The ranks.
        queues: This rank's, of the device where tensors are.
        has_rings: Whether there are rings; without them all has to be written to directly.

    Attributes:
        copiers: The streams of direct copies; the first one is for copies during other work.
        offers: Where ranks have come to offering their places for direct copies.
        arrivals: Where they have come to having written those of their peers.
    """

    name = "peer"

    def __init__(self, control: Control, queues: Queues, *, has_rings: bool = True) -> None:
        self._has_rings = has_rings
        super().__init__(control, queues)

    def _open(self, control: Control, own_bytes: int) -> None:
        self._memory = MappedMemory(control, self.peers, self.queues)
        self._stack.callback(self._memory.close)
        self._blocks: list[Block] = []
        super()._open(control, own_bytes)
        self.offers, self.arrivals = _Mark(self, board.OFFERED), _Mark(self, board.WRITTEN)
        self.copiers = [stream for lane in self.streams for stream in lane]
        self._events = [self.queues.event() for _ in self.copiers]

    def _slots(self, control: Control) -> Slots:
        if not self._has_rings:
            nowhere = dict.fromkeys(self.peers, 0)
            return Slots(nowhere, nowhere, {})
        rings = self._memory.allocate(len(self.peers) * self.ring_bytes)
        inbound = {peer: rings.begin + self.offset(self.rank, peer) for peer in self.peers}
        outbound = {peer: rings.mapped[peer] + self.offset(peer, self.rank) for peer in self.peers}
        return Slots(inbound, outbound, {})

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

        Args:
            writes: What is copied.
            first: Where the tensors are ready.

        Returns:
            The streams besides.
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

        Args:
            what: The operation, for messages.
            first: As in :meth:`copy`.
            others: What that gave.
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
    that it writes.

    Attributes:
        own: This rank's word, for the host.
        awaited: What it waits for, of each peer.
    """

    def __init__(self, link: PeerCopies, offset: int) -> None:
        self.own = link.own.word(offset)
        self.awaited = [Awaited(link.memories[peer].word(offset)) for peer in link.peers]
        for peer, one in zip(link.peers, self.awaited, strict=True):
            link.awaited[peer].append(one)
        theirs = [link.headers[peer] + offset for peer in link.peers]
        self._ops = link.queues.words([link.headers[link.rank] + offset], theirs)
        self._count = 0

    def meet(self, stream: Any) -> int:
        """Makes a stream say that it is there, and wait for those of peers.

        Returns:
            How often it has been called.
        """
        self._count += 1
        for one in self.awaited:
            one.count = self._count
        self._ops.issue(stream, self._count)
        return self._count


class Meeting:
    """The ranks' meeting after their direct writes, for the watch.

    The words that ranks write for each other tell how far this rank's stream has come, which spares
    it events.

    Args:
        link: The link that has written.
        what: The operation, for messages.
        count: What all ranks will have counted.
    """

    def __init__(self, link: PeerCopies, what: str, count: int) -> None:
        self.what = what
        self._link, self._count = link, count

    def has_begun(self) -> bool:
        """Returns whether the stream has come to it: then it waits for peers or for nothing."""
        return has_counted(self._link.offers.own, self._count)

    def is_over(self) -> bool:
        """Returns whether the stream waits for nothing any more, unless the link has failed."""
        return self._link.has_arrived(self._count)


class _DirectFlight(RingFlight):
    """A transfer to the receivers' memory without a detour: one copy to each peer.

    It is in the current stream unless that has other work meanwhile.
    """

    def __init__(self, link: PeerCopies, exchange: Exchange, index: int, writes: Writes) -> None:
        super().__init__(link, exchange, index)
        self._peer_copies, self._writes = link, writes
        self._is_beside = exchange.is_beside

    def steps(self) -> Iterator[None]:
        """Issues everything at once; waits for arrivals come after the work of other links."""
        link = self._peer_copies
        self.enter([link.copiers[0]] if self._is_beside else [])
        first = self._streams[0]
        others = link.copy(self._writes, first)
        yield
        link.arrive(self.what, first, others)
        self.leave()
