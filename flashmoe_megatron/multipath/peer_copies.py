"""Copies from GPU to GPU of one host by copy engines."""

from collections.abc import Iterator
from typing import Any

import torch

from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.multipath import driver
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.links import Exchange, Place
from flashmoe_megatron.multipath.ring import RingFlight, RingLink


class PeerCopies(RingLink):
    """Writes into the receiver's memory, which the sender has mapped. Collective.

    Tensors of a program are not mapped elsewhere, so that chunks are staged in rings and copied out
    of them; tensors in memory of :meth:`allocate` are written to directly, in one copy.
    """

    name = "peer"

    def _open(self, control: Control, own_bytes: int) -> None:
        self._control = control
        self._blocks: list[tuple[int, int, dict[int, int]]] = []
        super()._open(control, own_bytes)
        self._inward = [self.inbound[peer][0] for peer in self.peers]
        self._outward = [self.outbound[peer][0] for peer in self.peers]
        inward, outward = self._inward, self._outward
        self._offers, self._arrivals = (
            driver.memory_ops([one.counted for one in told], [one.awaited for one in awaited])
            for told, awaited in ((inward, outward), (outward, inward))
        )

    def _slots(self, control: Control) -> tuple[dict[int, int], dict[int, int]]:
        own, mapped = self._mapped(len(self.peers) * self.ring_bytes)
        inbound = {peer: own + self.offset(self.rank, peer) for peer in self.peers}
        return inbound, {peer: mapped[peer] + self.offset(peer, self.rank) for peer in self.peers}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See the base class."""
        with torch.cuda.device(self.device):
            own, mapped = self._mapped(nbytes)
        self._blocks.append((own, nbytes, mapped))
        return driver.tensor(own, nbytes, self.device)

    def place_of(self, output: torch.Tensor, input: torch.Tensor) -> Place | None:
        """See the base class."""
        begin = output.data_ptr()
        for number, (own, nbytes, mapped) in enumerate(self._blocks):
            if own <= begin < own + nbytes:
                part = begin - own + self.rank * input.nbytes
                targets = {peer: address + part for peer, address in mapped.items()}
                return Place(f"{number}+{begin - own:x}", targets, own + part == input.data_ptr())
        return None

    def begin(self, exchange: Exchange, index: int, tickets: Any) -> RingFlight:
        """See the base class."""
        place = exchange.pieces[0].place
        if place is None:
            return super().begin(exchange, index, tickets)
        self.announce(exchange)
        return _DirectFlight(self, exchange, index, place)

    def offer(self, stream: int) -> None:
        """Tells peers that this rank's places may be written, and waits for theirs."""
        counts = [lane.count + 1 for lane in (*self._inward, *self._outward)]
        driver.issue(stream, self._offers, counts)

    def arrive(self, stream: int) -> None:
        """Tells peers that their places have been written, and waits for this rank's."""
        lanes = (*self._outward, *self._inward)
        driver.issue(stream, self._arrivals, [lane.count + 1 for lane in lanes])
        for lane in lanes:
            lane.pass_by()

    def _mapped(self, nbytes: int) -> tuple[int, dict[int, int]]:
        """Memory of this rank, and where that of the others is mapped, until the link is closed."""

        def share() -> tuple[int, int, str]:
            own = driver.allocate(nbytes)
            self._stack.callback(driver.free, own)
            return nbytes, own, driver.share(own).hex()

        shared = self._control.agree(share)
        sizes = [size for size, _, _ in shared]
        if len(set(sizes)) > 1:
            raise ShapeError(f"memory of {sizes} bytes: wanted as many on every rank")
        mapped: dict[int, int] = {}

        def connect() -> None:
            for peer in self.peers:
                mapped[peer] = driver.map_shared(bytes.fromhex(shared[peer][2]))
                self._stack.callback(driver.unmap, mapped[peer])

        self._control.agree(connect)
        return shared[self.rank][1], mapped


class _DirectFlight(RingFlight):
    """What goes to the receivers' memory without a detour: one copy to each peer.

    Ranks meet before and after it. Every call of the driver and every event costs as much as a
    piece of a copy, so that one stream does it all, and it is the current one unless that has the
    rank's own part to copy.
    """

    def __init__(self, link: PeerCopies, exchange: Exchange, index: int, place: Place) -> None:
        super().__init__(link, exchange, index)
        self._peer_copies, self._place = link, place

    def steps(self) -> Iterator[None]:
        """Issues everything at once; what has arrived is awaited behind what other links issue."""
        link, (begin, end, _) = self._peer_copies, self.part
        self.enter([] if self._place.is_in_place else [link.streams[0][0]])
        stream = self._streams[0].cuda_stream
        link.offer(stream)
        for piece in self.pieces:
            link.admit(stream, end - begin)
            target = self._place.targets[piece.peer] + begin
            driver.copy(target, piece.send.data_ptr() + begin, end - begin, stream)
        yield
        link.arrive(stream)
        self.leave()
