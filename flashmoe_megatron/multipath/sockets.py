"""A link of TCP connections, for tensors in the host's memory; any network card will do."""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from flashmoe_megatron.errors import FlashMoEError, LinkError, ShapeError
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.ledger import Ledger
from flashmoe_megatron.multipath.links import Exchange, Flight, Link, Piece, broken_link

_HELLO = struct.Struct("<I")
"""Sent by whoever connects: its rank."""
_HEADER = struct.Struct("<QQQ48s")
"""Before every chunk: the exchange's number, the chunk's first byte, its length, the operation."""
_LAST_WORDS_S = 1.0
"""How long what is sent last, or was, may take; a peer that does not read is not waited for."""


class Pace:
    """Makes a link as slow as another one.

    Args:
        rate: Bytes per second that may leave a rank.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Waits until so many more bytes may have left."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.rate
            left = self._free_at - time.monotonic()
        time.sleep(max(0.0, left))

    def seconds(self, nbytes: int, measured: float) -> float:
        """How long it took to send so many bytes, which took so long by the clock."""
        del nbytes
        return measured


class SocketLink(Link):
    """One connection between every two ranks. Making it is collective.

    Args:
        control: The ranks.
        name: The link's.
        host: The address of this rank's network card, at which the others reach it.
        pace: Bounds the rate at which this rank sends.

    Raises:
        LinkError: A rank cannot listen, or cannot reach another one, within the time limit.
    """

    device_type = "cpu"
    takes_rest = True

    def __init__(
        self,
        control: Control,
        name: str = "sockets",
        host: str = "127.0.0.1",
        pace: Pace | None = None,
    ) -> None:
        self.name, self.pace = name, pace
        self._control = control
        self._begun = threading.Condition()
        self._flights: dict[int, _SocketFlight] = {}
        self._is_closed = False
        self._sockets = self._connected(host)
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self.queues: dict[int, queue.SimpleQueue[_SocketFlight | None]] = {}
        for peer, connection in self._sockets.items():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.queues[peer] = queue.SimpleQueue()
            for what, target in (("send", self._send), ("receive", self._receive)):
                self._threads[what, peer] = threading.Thread(
                    target=target,
                    args=(peer, connection),
                    name=f"{name}-{what}-{peer}",
                    daemon=True,
                )
                self._threads[what, peer].start()

    def begin(self, exchange: Exchange, index: int, tickets: Any) -> "_SocketFlight":
        """See the base class; ``tickets`` is the exchange's ledger."""
        return _SocketFlight(self, exchange, index, tickets)

    def register(self, flight: "_SocketFlight") -> None:
        """Lets what peers send of an exchange go to its tensors."""
        with self._begun:
            self._flights[flight.exchange.number] = flight
            self._begun.notify_all()

    def forget(self, flight: "_SocketFlight") -> None:
        """Ends that."""
        with self._begun:
            self._flights.pop(flight.exchange.number, None)

    def close(self) -> None:
        """Closes the connections, which ends the threads."""
        with self._begun:
            self._is_closed = True
            self._begun.notify_all()
        for sending in self.queues.values():
            sending.put(None)
        deadline = time.monotonic() + _LAST_WORDS_S
        for peer, connection in self._sockets.items():
            # What a peer has to know of this rank's calls is in front of what is sent.
            self._threads["send", peer].join(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _connected(self, host: str) -> dict[int, socket.socket]:
        """A connection to every peer: lower ranks accept, higher ones connect."""
        control = self._control
        found: dict[int, socket.socket] = {}

        def listen() -> tuple[socket.socket, tuple[str, int]]:
            try:
                return (listener := socket.create_server((host, 0))), listener.getsockname()
            except OSError as error:
                raise LinkError(f"link {self.name}: cannot listen at {host}: {error}") from error

        listener: socket.socket | None = None

        def address() -> tuple[str, int]:
            nonlocal listener
            listener, at = listen()
            return at

        def connect() -> None:
            assert listener is not None
            listener.settimeout(control.timeout)
            for peer in range(control.rank):
                found[peer] = socket.create_connection(addresses[peer], control.timeout)
                found[peer].sendall(_HELLO.pack(control.rank))
            for _ in range(control.rank + 1, control.num_ranks):
                connection, _ = listener.accept()
                connection.settimeout(control.timeout)
                (peer,) = _HELLO.unpack(_read(connection, _HELLO.size))
                found[peer] = connection

        def reached() -> None:
            try:
                connect()
            except OSError as error:
                raise LinkError(f"link {self.name}: cannot reach a peer: {error}") from error

        try:
            addresses = control.all(address)
            control.all(reached)
        except FlashMoEError:
            for connection in found.values():
                connection.close()
            raise
        finally:
            if listener is not None:
                listener.close()
        return found

    def _send(self, peer: int, connection: socket.socket) -> None:
        """The life of the thread that sends to a peer."""
        while (flight := self.queues[peer].get()) is not None:
            try:
                flight.send_to(peer, connection)
            except OSError as error:
                # Why the peer has closed the connection may be in what it sent before.
                self._threads["receive", peer].join(_LAST_WORDS_S)
                flight.ledger.fail(self._broken(peer, error))
            finally:
                flight.ledger.end_sending()

    def _receive(self, peer: int, connection: socket.socket) -> None:
        """The life of the thread that receives from a peer."""
        flight: _SocketFlight | None = None
        try:
            while True:
                number, begin, nbytes, what = _HEADER.unpack(_read(connection, _HEADER.size))
                flight = self._flight(number)
                if flight is None:
                    return
                flight.receive_from(peer, connection, begin, nbytes, what.rstrip(b"\0").decode())
        except FlashMoEError as error:
            assert flight is not None
            flight.ledger.fail(error)
        except OSError as error:
            self._lose(peer, self._broken(peer, error))

    def _flight(self, number: int) -> "_SocketFlight | None":
        """The exchange of a number, for which this waits; ``None`` once the link is closed."""
        with self._begun:
            while number not in self._flights and not self._is_closed:
                self._begun.wait()
            return None if self._is_closed else self._flights[number]

    def _lose(self, peer: int, error: LinkError) -> None:
        with self._begun:
            self.broken = error
            for flight in self._flights.values():
                flight.ledger.lose(peer, error)

    def _broken(self, peer: int, error: OSError) -> LinkError:
        return broken_link(self.name, self._control.rank, peer, error)

    broken: LinkError | None = None
    """Why the link is of no use any more."""


class _SocketFlight(Flight):
    """What one link of connections carries of an exchange."""

    def __init__(self, link: SocketLink, exchange: Exchange, index: int, ledger: Ledger) -> None:
        self.exchange, self.ledger = exchange, ledger
        self._link, self._index = link, index
        self._pieces = {piece.peer: _Bytes(piece) for piece in exchange.pieces}
        self._lock = threading.Lock()
        self._sent = self._received = 0
        self._began_at = self._moved_at = time.monotonic()

    def steps(self) -> Iterator[None]:
        """Hands everything to the threads at once."""
        self._began_at = self._moved_at = time.monotonic()
        self._link.register(self)
        if self._link.broken is not None:
            self.ledger.fail(self._link.broken)
        for peer in self._pieces:
            self.ledger.begin_sending()
            self._link.queues[peer].put(self)
        yield

    def join(self) -> None:
        """Waits for the whole exchange."""
        try:
            self.ledger.wait()
        finally:
            self._link.forget(self)
        # Flights are kept for their times, tensors are not; no thread looks for them any more.
        self._pieces, self.exchange = {}, self.exchange._replace(pieces=())

    def seconds(self) -> float:
        """From the beginning to the last chunk that this link sent or received."""
        measured = self._moved_at - self._began_at
        pace = self._link.pace
        return measured if pace is None else pace.seconds(self._sent, measured)

    def num_bytes(self) -> int:
        """What this link has brought."""
        return self._received

    def send_to(self, peer: int, connection: socket.socket) -> None:
        """Sends chunks as long as there are tickets for this link."""
        source, what = self._pieces[peer].send, self.exchange.what.encode()
        while (chunk := self.ledger.tickets[peer].take(self._index)) is not None:
            begin, end = chunk
            if self._link.pace is not None:
                self._link.pace.take(end - begin)
            connection.sendall(_HEADER.pack(self.exchange.number, begin, end - begin, what))
            connection.sendall(source[begin:end])
            self.ledger.note_sent()
            self._note(sent=end - begin)

    def receive_from(
        self, peer: int, connection: socket.socket, begin: int, nbytes: int, what: str
    ) -> None:
        """Receives a chunk into its place."""
        target = self._pieces[peer].receive
        if what != self.exchange.what or begin + nbytes > len(target):
            raise ShapeError(
                f"rank {peer} takes part in {what}, rank {self._link._control.rank} in "
                f"{self.exchange.what}: wanted the same on every rank"
            )
        _read_into(connection, target[begin : begin + nbytes])
        self._note(received=nbytes)
        self.ledger.note_received(peer, nbytes)

    def _note(self, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._sent += sent
            self._received += received
            self._moved_at = time.monotonic()


class _Bytes:
    """A piece's tensors as Python sees bytes."""

    def __init__(self, piece: Piece) -> None:
        self.send, self.receive = _view(piece.send), _view(piece.receive)


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def _read(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    _read_into(connection, memoryview(data))
    return data


def _read_into(connection: socket.socket, target: memoryview) -> None:
    """Fills a buffer.

    Raises:
        ConnectionError: The peer has closed the connection, or died.
    """
    while len(target):
        got = connection.recv_into(target)
        if not got:
            raise ConnectionError("the peer has closed it, or died")
        target = target[got:]
