"""Copies from GPU to GPU of one host by copy engines."""

from collections.abc import Iterator
from typing import Any

import torch

from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.multipath import driver
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.links import Exchange
from flashmoe_megatron.multipath.ring import RingFlight, RingLink


class PeerCopies(RingLink):
    """Writes into the receiver's memory, which the sender has mapped. Collective.

    Tensors of a program are not mapped elsewhere, so that chunks are staged in rings and copied out
    of them; tensors in memory of :meth:`allocate` are written to directly, in one copy.
    """

    name = "peer"

    def _open(self, control: Control, own_bytes: int) -> None:
        self._control = control
        self._allocated: list[tuple[int, int, dict[int, int]]] = []
        super()._open(control, own_bytes)

    def _slots(self, control: Control) -> tuple[dict[int, int], dict[int, int]]:
        own, mapped = self._mapped(len(self.peers) * self.ring_bytes)
        inbound = {peer: own + self.offset(self.rank, peer) for peer in self.peers}
        return inbound, {peer: mapped[peer] + self.offset(peer, self.rank) for peer in self.peers}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See the base class."""
        with torch.cuda.device(self.device):
            own, mapped = self._mapped(nbytes)
        self._allocated.append((own, nbytes, mapped))
        return driver.tensor(own, nbytes, self.device)

    def begin(self, exchange: Exchange, index: int, tickets: Any) -> RingFlight:
        """See the base class."""
        mirror = exchange.pieces[0].mirror
        for number, (own, nbytes, mapped) in enumerate(self._allocated):
            offset = -1 if mirror is None else mirror.data_ptr() - own
            if 0 <= offset < nbytes:
                # Ranks compare where the whole begins, which has to be the same on all of them.
                first = min(0, *(one.receive.data_ptr() - own - offset for one in exchange.pieces))
                what = f"{exchange.what} to {number}+{offset + first:x}"
                exchange = exchange._replace(what=what)
                self.announce(exchange)
                targets = {peer: address + offset for peer, address in mapped.items()}
                return _DirectFlight(self, exchange, index, targets)
        return super().begin(exchange, index, tickets)

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

    Every rank first says that its memory may be written, so that nobody waits in front of that. One
    stream does it all, since every event costs the host as much as a piece of a copy.
    """

    def __init__(
        self, link: PeerCopies, exchange: Exchange, index: int, targets: dict[int, int]
    ) -> None:
        super().__init__(link, exchange, index)
        self._targets = targets

    def steps(self) -> Iterator[None]:
        """Issues everything at once; what has arrived is awaited behind what other links issue."""
        link, (begin, end, _) = self.link, self.part
        stream = link.streams[0][0]
        self.enter([stream])
        pieces = [piece for piece in self.pieces if begin < piece.receive.numel()]
        for piece in pieces:
            link.inbound[piece.peer][0].offer(stream.cuda_stream)
        for piece in self.pieces:
            if (nbytes := min(end, piece.send.numel()) - begin) > 0:
                ring = link.outbound[piece.peer][0]
                link.admit(ring.stream, nbytes)
                ring.put(self._targets[piece.peer] + begin, piece.send.data_ptr() + begin, nbytes)
        yield
        for piece in pieces:
            link.inbound[piece.peer][0].arrive(stream.cuda_stream)
        self.leave()
