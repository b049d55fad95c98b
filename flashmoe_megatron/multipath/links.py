"""The interface of links, what they carry, and torch.distributed as one of them."""

import abc
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import FlashMoEError, LinkError
from flashmoe_megatron.multipath.queues import Moment, Queue, Queues
from flashmoe_megatron.ranks import StoreRanks


class Place(NamedTuple):
    """The memory of peers, of :meth:`Link.allocate` or its like, that this rank writes into.

    ``name`` says where the whole begins, the same on every rank; ``targets`` are the addresses by
    the peer's rank, and ``block`` is the link's number of the memory.
    """

    name: str
    targets: Mapping[int, int]
    block: int


class Piece(NamedTuple):
    """The memory that a rank sends to one peer and receives from it in an exchange.

    Attributes:
        peer: The peer's rank in the group.
        send: Bytes to send, flat uint8.
        receive: Where the peer's bytes go, flat uint8; a different number is possible.
        place: Where it goes, if peers can be written to without a detour.
        to_all: Whether every peer gets the same bytes, which is so on all ranks or on none.
    """

    peer: int
    send: torch.Tensor
    receive: torch.Tensor
    place: Place | None = None
    to_all: bool = False


class Writes(NamedTuple):
    """The copies that a rank writes to its peers' places: target, source and bytes of each.

    Peers write ``received`` bytes to this rank's; the rest is as places and pieces have it.
    """

    copies: tuple[tuple[int, int, int], ...]
    received: int
    block: int
    to_all: bool


class Part(NamedTuple):
    """The bytes of every piece that one link carries, a ``chunk`` at once.

    A shorter piece may end before them.
    """

    begin: int
    end: int
    chunk: int

    def of(self, length: int) -> int:
        """The number of bytes that it has of a piece that is so long."""
        return min(self.end, length) - min(self.begin, length)


class Exchange(NamedTuple):
    """One exchange of pieces with all peers, the same parts on every rank.

    Attributes:
        number: Counts the exchanges of the group, the same on every rank.
        what: The operation, as peers compare it: its name and the bytes of the whole.
        pieces: One for every peer.
        parts: One for every link.
        stream: The current one.
        started: A moment of that stream; links may begin after it.
        is_beside: Whether the current stream has other work meanwhile.
        is_timed: Whether what links do is timed: moments with a time hold a GPU up.
    """

    number: int
    what: str
    pieces: Sequence[Piece]
    parts: Sequence[Part]
    stream: Queue
    started: Moment
    is_beside: bool = False
    is_timed: bool = True


class Moved:
    """A transfer between two moments of a queue, which brings this rank so many bytes.

    ``ended`` is the moment after it, once all of it has been issued.
    """

    def __init__(self, started: Moment, nbytes: int) -> None:
        self.started = self.ended = started
        self.nbytes = nbytes

    def seconds(self) -> float:
        """Returns how long it took, if it was timed; waits until that is known."""
        return seconds_between(self.started, self.ended)


class Flight(Moved, abc.ABC):
    """One link's share of an exchange, under way. It is kept for its times, tensors are not."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self.part = part = exchange.parts[index]
        self.is_timed = exchange.is_timed
        received = sum(part.of(piece.receive.numel()) for piece in exchange.pieces)
        super().__init__(exchange.started, received)

    @abc.abstractmethod
    def steps(self) -> Iterator[None]:
        """Issues it, chunk by chunk; the links of an exchange take turns."""

    @abc.abstractmethod
    def join(self) -> None:
        """Makes the current stream wait for it.

        Raises:
            FlashMoEError: What has ended the link.
        """


def seconds_between(begin: Moment, end: Moment) -> float:
    """Seconds between two moments with times. Waits for the later one."""
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


class Link(abc.ABC):
    """A way from every rank of a group to every other. What it does not override most links lack.

    Attributes:
        name: Names it in messages, metrics and options.
        sends_once: Whether what is for all peers takes its way only once until it branches off.
        partners: The other links of the same transfers, which end if this one does.
    """

    name: str
    sends_once: bool = False
    partners: Sequence["Link"] = ()

    @abc.abstractmethod
    def begin(self, exchange: Exchange, index: int) -> Flight:
        """Prepares this link's share of an exchange; ``index`` is its place among the parts."""

    def announce(self, number: int, what: str) -> None:  # noqa: B027
        """Compares an exchange about to begin with the peers' exchanges, if they can be asked.

        Raises:
            ShapeError: A peer exchanges something else.
        """

    def writes(self, pieces: Sequence[Piece], part: Part) -> Writes | None:
        """Returns its copies for a part of each piece, ``None`` if it does not write to places."""
        del pieces, part
        return None

    def write(self, number: int, what: str, writes: Writes, stream: Any) -> None:
        """Does what :meth:`writes` has found, without telling how long it takes.

        The tensors are ready in ``stream``, which waits for the end.
        """
        raise NotImplementedError

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Makes memory that peers write to without a detour, until it is freed. Collective.

        Returns:
            Flat uint8, as large on every rank; ``None`` if the link writes to any memory alike.
        """
        del nbytes
        return None

    def share(self, tensor: torch.Tensor) -> bool:
        """Lets peers write to a tensor's memory without a detour, if they can. Collective.

        The link keeps the memory until it is closed.
        """
        del tensor
        return False

    def free(self, memory: torch.Tensor) -> None:  # noqa: B027
        """Gives back what :meth:`allocate` gave, which no GPU may still use. Collective."""

    def place_of(self, whole: torch.Tensor, offsets: Mapping[int, int]) -> Place | None:
        """Returns where peers write, if a tensor lies in memory without a detour.

        Args:
            whole: The tensor that this rank receives; the peers' lie at the same place.
            offsets: Bytes before the place in each peer's tensor where this rank's data go.
        """
        del whole, offsets
        return None

    def raise_if_broken(self) -> None:  # noqa: B027
        """Raises what has ended the link for good, if anything has."""

    def fail(self, error: FlashMoEError) -> None:  # noqa: B027
        """Ends the link and its partners on every rank, since this one has failed."""

    def guard(self, output: torch.Tensor) -> bool:
        """Makes the first value of a flat output NaN, in the current stream, if it fails by then.

        Returns whether it does: for a floating-point type, where errors alone are not enough.
        """
        del output
        return False

    def leave(self) -> None:  # noqa: B027
        """Waits for the work that the GPU has been given, and unmaps other ranks' memory for good.

        A rank frees its own, by :meth:`close`, once every rank has left.
        """

    def close(self) -> None:  # noqa: B027
        """Frees what the link holds, after :meth:`leave`."""


class GroupLink(Link):
    """The group's own communicator: NCCL's for tensors on GPUs, gloo's for those of a CPU.

    Raises:
        LinkError: The group has another backend for such tensors.
    """

    def __init__(self, ranks: StoreRanks, queues: Queues) -> None:
        self.group, self.rank, self.queues = ranks.group, ranks.rank, queues
        kind = queues.device.type
        self.name = {"cuda": "nccl", "cpu": "gloo"}[kind]
        try:
            found = self.group._get_backend(torch.device(kind)).name()
        except RuntimeError as error:
            found = f"none ({error})"
        if found != self.name:
            raise LinkError(f"link {self.name}: the group's backend is {found}, wanted {self.name}")
        self.stream = queues.make()

    def begin(self, exchange: Exchange, index: int) -> Flight:
        """See the base class."""
        return _GroupFlight(self, exchange, index)


class _GroupFlight(Flight):
    """The part of an exchange that a communicator carries; torch cuts it into messages itself."""

    def __init__(self, link: GroupLink, exchange: Exchange, index: int) -> None:
        super().__init__(exchange, index)
        self._link = link
        self._peers = ", ".join(str(piece.peer) for piece in exchange.pieces)
        self._operations = [
            dist.P2POp(function, some, group=link.group, group_peer=piece.peer)
            for piece in exchange.pieces
            for function, whole in ((dist.isend, piece.send), (dist.irecv, piece.receive))
            if (some := whole[self.part.begin : self.part.end]).numel()
        ]

    def steps(self) -> Iterator[None]:
        """See the base class."""
        link = self._link
        link.stream.wait_event(self.started)
        operations, self._operations = self._operations, []
        link.queues.run(link.stream, functools.partial(self._carry, operations))
        self.ended = link.queues.moment(link.stream, self.is_timed)
        yield

    def join(self) -> None:
        """See the base class."""
        self._link.queues.current().wait_event(self.ended)

    def _carry(self, operations: list[Any]) -> None:
        try:  # torch.distributed also raises at the start where a peer is gone
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        except RuntimeError as error:
            link = self._link
            raise LinkError(
                f"link {link.name} between ranks {link.rank} and {self._peers} broke: {error}"
            ) from error
