"""The state of an exchange that threads carry out: what has come, and what went wrong."""

import threading
import time
from collections.abc import Sequence

import torch

from flashmoe_megatron.errors import FlashMoEError, PeerTimeoutError
from flashmoe_megatron.multipath.links import Exchange
from flashmoe_megatron.multipath.tickets import Tickets


class Ledger:
    """Shared by the links of an exchange that choose their chunks themselves.

    Args:
        rank: This rank, for messages.
        exchange: What is exchanged.
        links: The places among the parts of the links that share the ledger.
        takes_rest: Whether the exchange has a rest, which needs that every link may take it.
        timeout: Seconds without any progress that are an error.

    Attributes:
        tickets: Each peer's, for what is sent to it.
    """

    def __init__(
        self,
        rank: int,
        exchange: Exchange,
        links: Sequence[int],
        takes_rest: bool,
        timeout: float,
    ) -> None:
        make = Tickets.with_rest if takes_rest else Tickets
        chunks = [part.chunk for part in exchange.parts]
        self.tickets: dict[int, Tickets] = {}
        self._awaited: dict[int, int] = {}
        for piece in exchange.pieces:
            send, receive = _carried(exchange, piece.send), _carried(exchange, piece.receive)
            self.tickets[piece.peer] = make(send, chunks, exchange.rates)
            self._awaited[piece.peer] = sum(receive[link] for link in links)
        self._rank, self._what, self._timeout = rank, exchange.what, timeout
        self._changed = threading.Condition()
        self._num_sending = 0
        self._error: FlashMoEError | None = None
        self._moved_at = time.monotonic()

    def begin_sending(self) -> None:
        """A link will send to one more peer."""
        with self._changed:
            self._num_sending += 1

    def end_sending(self) -> None:
        """A link has sent its last chunk to a peer."""
        with self._changed:
            self._num_sending -= 1
            self._changed.notify_all()

    def note_sent(self) -> None:
        """A chunk has left, so the peer still reads."""
        self._moved_at = time.monotonic()

    def note_received(self, peer: int, nbytes: int) -> None:
        """So many bytes of a peer have arrived."""
        with self._changed:
            self._awaited[peer] -= nbytes
            self._moved_at = time.monotonic()
            self._changed.notify_all()

    def fail(self, error: FlashMoEError) -> None:
        """Ends the exchange with an error; the first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def lose(self, peer: int, error: FlashMoEError) -> None:
        """A peer sends no more, which ends the exchange unless all of its bytes are there."""
        with self._changed:
            is_missed = self._awaited[peer] > 0
        if is_missed:
            self.fail(error)

    def wait(self) -> None:
        """Waits until everything is sent and received.

        Raises:
            FlashMoEError: What :meth:`fail` was given.
            PeerTimeoutError: Nothing has moved for the time limit; names the peers.
        """
        with self._changed:
            while self._error is None and (self._num_sending or any(self._awaited.values())):
                left = self._moved_at + self._timeout - time.monotonic()
                if left <= 0:
                    self._error = self._late()
                    break
                self._changed.wait(left)
            if self._error is not None:
                raise self._error

    def _late(self) -> PeerTimeoutError:
        missing = {peer: nbytes for peer, nbytes in self._awaited.items() if nbytes}
        whom = ", ".join(f"{nbytes} bytes of rank {peer}" for peer, nbytes in missing.items())
        return PeerTimeoutError(
            f"{self._what}: rank {self._rank} still awaits {whom or 'peers that read'}, and "
            f"nothing has moved for {self._timeout:g} s"
        )


def _carried(exchange: Exchange, tensor: torch.Tensor) -> list[int]:
    """How many bytes of a piece's tensor each link carries."""
    length = tensor.numel()
    return [part.of(length) for part in exchange.parts]
