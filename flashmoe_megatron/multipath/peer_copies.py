"""Copies from GPU to GPU of one host by copy engines."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.multipath import board, driver
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.links import Exchange, Place
from flashmoe_megatron.multipath.mapped import Block, MappedMemory
from flashmoe_megatron.multipath.ring import RingFlight, RingLink, Slots, has_counted


class PeerCopies(RingLink):
    """Writes into the receiver's memory, which the sender has mapped. Collective.

    Tensors of a program are not mapped elsewhere, so that chunks are staged in rings and copied out
    of them; tensors in memory of :meth:`allocate` or :meth:`share` are written to directly, in one
    copy.

    Attributes:
        copiers: The streams of direct copies; the first one is for those beside other work.
    """

    name = "peer"
    writes_to_places = True

    def _open(self, control: Control, own_bytes: int) -> None:
        self._memory = MappedMemory(control, self.peers)
        self._stack.callback(self._memory.close)
        self._blocks: list[Block] = []
        super()._open(control, own_bytes)
        self._inward = [self.inbound[peer][0] for peer in self.peers]
        self._outward = [self.outbound[peer][0] for peer in self.peers]
        counted, awaited = (
            [[getattr(one, word) for one in lanes] for lanes in (self._inward, self._outward)]
            for word in ("counted", "awaited")
        )
        self._offers = driver.memory_ops(counted[0], awaited[1])
        self._arrivals = driver.memory_ops(counted[1], awaited[0])
        self._offered = self.own.word(board.free_word(self.peers[0], 0))
        self.copiers = [stream for lane in self.streams for stream in lane]

    def _slots(self, control: Control) -> Slots:
        rings = self._memory.allocate(len(self.peers) * self.ring_bytes)
        inbound = {peer: rings.begin + self.offset(self.rank, peer) for peer in self.peers}
        outbound = {peer: rings.mapped[peer] + self.offset(peer, self.rank) for peer in self.peers}
        return Slots(inbound, outbound, {})

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See the base class."""
        with torch.cuda.device(self.device):
            block = self._memory.allocate(nbytes)
        self._blocks.append(block)
        return driver.tensor(block.begin, nbytes, self.device)

    def share(self, tensor: torch.Tensor) -> bool:
        """See the base class."""
        if any(block.has(tensor) for block in self._blocks):
            return True
        try:
            with torch.cuda.device(self.device):
                self._blocks.append(self._memory.adopt(tensor))
        except DeviceError:
            self.raise_if_broken()
            return False
        return True

    def free(self, memory: torch.Tensor) -> None:
        """See the base class."""
        block = next(one for one in self._blocks if one.has(memory))
        self._blocks.remove(block)
        with torch.cuda.device(self.device):
            self._memory.release(block)

    def place_of(self, whole: torch.Tensor, offsets: Mapping[int, int]) -> Place | None:
        """See the base class."""
        for block in self._blocks:
            if block.has(whole):
                at = whole.data_ptr() - block.begin
                targets = {peer: block.mapped[peer] + at + offsets[peer] for peer in self.peers}
                return Place(f"{block.number}+{at:x}", targets, block.number)
        return None

    def begin(self, exchange: Exchange, index: int, tickets: Any) -> RingFlight:
        """See the base class."""
        place = exchange.pieces[0].place
        if place is None:
            return super().begin(exchange, index, tickets)
        self._memory.check(place.block)
        self.announce(exchange)
        return _DirectFlight(self, exchange, index, place)

    def offer(self, stream: int) -> None:
        """Tells peers that this rank's places may be written, and waits for theirs."""
        counts = [lane.count + 1 for lane in (*self._inward, *self._outward)]
        driver.issue(stream, self._offers, counts)

    def arrive(self, stream: int) -> list[int]:
        """Tells peers that their places have been written, and waits for this rank's.

        Returns:
            The counts of all peers by which the stream knows.
        """
        lanes = (*self._outward, *self._inward)
        counts = [lane.count + 1 for lane in lanes]
        driver.issue(stream, self._arrivals, counts)
        for lane in lanes:
            lane.pass_by()
        return counts[len(self._outward) :]

    def has_offered(self, counts: list[int]) -> bool:
        """Whether this rank's stream has come to the offers that belong to arrivals."""
        return has_counted(self._offered, counts[0])

    def has_arrived(self, counts: list[int]) -> bool:
        """Whether all peers have counted so far."""
        lanes = zip(self._inward, counts, strict=True)
        return all(has_counted(lane.word, count) for lane, count in lanes)


class _DirectFlight(RingFlight):
    """What goes to the receivers' memory without a detour: one copy to each peer.

    Ranks meet before and after it, in one stream, since every call of the driver and every event
    costs as much as a piece of a copy. It is the current stream unless that has other work
    meanwhile. Copies to several peers have a stream each, for a copy that follows another one
    begins only some 10 us after its end. There are events with times only where it is timed: the
    words that ranks write for each other tell the host how far the stream has come.
    """

    def __init__(self, link: PeerCopies, exchange: Exchange, index: int, place: Place) -> None:
        super().__init__(link, exchange, index)
        self._peer_copies, self._targets = link, place.targets
        self._is_beside = exchange.is_beside

    def steps(self) -> Iterator[None]:
        """Issues everything at once; what has arrived is awaited behind what other links issue."""
        link, (begin, end, _) = self._peer_copies, self.part
        self.enter([link.copiers[0]] if self._is_beside else [])
        first, others = self._streams[0], link.copiers[1 : len(self.pieces)]
        stream = int(first.cuda_stream)
        link.offer(stream)
        if others:
            offered = first.record_event()
            for other in others:
                other.wait_event(offered)
        streams = itertools.cycle([stream, *(int(other.cuda_stream) for other in others)])
        for piece, copier in zip(self.pieces, streams, strict=False):
            self._received += max(0, min(end, piece.receive.numel()) - begin)
            if (nbytes := min(end, piece.send.numel()) - begin) > 0:
                link.admit(copier, nbytes)
                target = self._targets[piece.peer] + begin
                driver.copy(target, piece.send.data_ptr() + begin, nbytes, copier)
        yield
        for other in others:
            first.wait_stream(other)
        self._counts = link.arrive(stream)
        if self.started is not None:
            self.leave()
        else:
            self.pieces = ()
            link.watch.add(self)

    def has_begun(self) -> bool:
        """See the base class."""
        return self._peer_copies.has_offered(self._counts)

    def is_over(self) -> bool:
        """See the base class."""
        if self._peer_copies.broken is None:
            return self._peer_copies.has_arrived(self._counts)
        return bool(self._streams[0].query())  # words that let it go are not those of peers
