"""The interface of links, and what they carry."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashmoe_megatron.errors import FlashMoEError
from flashmoe_megatron.multipath.queues import Moment, Queue


class Place(NamedTuple):
    """Where peers write what this rank sends, in memory of :meth:`Link.allocate` or its like.

    Attributes:
        name: Says where the whole begins, the same on every rank.
        targets: Where each peer has what this rank sends it, by the peer's rank.
        block: The link's number of the memory.
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
    """The copies that a rank writes to its peers' places.

    Attributes:
        copies: Target, source and bytes of each.
        received: Bytes that peers write to this rank's places.
        block: The link's number of the memory.
        to_all: As the pieces have it.
    """

    copies: tuple[tuple[int, int, int], ...]
    received: int
    block: int
    to_all: bool


class Part(NamedTuple):
    """The bytes of every piece that one link carries; a shorter piece may end before them.

    Attributes:
        begin: The first.
        end: The byte after the last.
        chunk: How many are moved at once.
    """

    begin: int
    end: int
    chunk: int

    def of(self, length: int) -> int:
        """How many bytes of a piece that is so long it has."""
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


class Moved(abc.ABC):
    """A transfer that a link has made, or is still making."""

    @abc.abstractmethod
    def seconds(self) -> float:
        """How long it took, if it was timed. Waits until that is known."""

    @abc.abstractmethod
    def num_bytes(self) -> int:
        """How many bytes this rank received by it."""


class Flight(Moved):
    """One link's share of an exchange, under way."""

    @abc.abstractmethod
    def steps(self) -> Iterator[None]:
        """Issues it, chunk by chunk; the links of an exchange take turns."""

    @abc.abstractmethod
    def join(self) -> None:
        """Makes the current stream wait for it.

        Raises:
            FlashMoEError: What has ended the link.
        """


class Link(abc.ABC):
    """A way from every rank of a group to every other.

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
        """Prepares this link's share of an exchange.

        Args:
            exchange: What is exchanged.
            index: This link's place among the parts.
        """

    def announce(self, number: int, what: str) -> None:  # noqa: B027 - not all links can
        """Compares an exchange about to begin with the peers' exchanges, if they can be asked.

        Args:
            number: As an exchange has it.
            what: Likewise.

        Raises:
            ShapeError: A peer exchanges something else.
        """

    def writes(self, pieces: Sequence[Piece], part: Part) -> Writes | None:
        """Returns its copies for a part of each piece, ``None`` if it does not write to places."""
        del pieces, part
        return None

    def write(self, number: int, what: str, writes: Writes, stream: Any) -> None:
        """Does in a stream what :meth:`writes` has found, without telling how long it takes.

        Args:
            number: As in :meth:`announce`.
            what: Likewise.
            writes: The same ones can be written time and again.
            stream: Where the tensors are ready, and which waits for the end.
        """
        raise NotImplementedError

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Memory that peers write to without a detour, until it is freed. Collective.

        Args:
            nbytes: Its size, the same on every rank.

        Returns:
            Flat uint8; ``None`` for most links, which write to any memory alike.
        """
        del nbytes
        return None

    def share(self, tensor: torch.Tensor) -> bool:
        """Lets peers write to a tensor's memory without a detour. Collective.

        Returns:
            Whether they can until the link is closed, which keeps the memory that long.
        """
        del tensor
        return False

    def free(self, memory: torch.Tensor) -> None:  # noqa: B027 - most links have none
        """Gives back what :meth:`allocate` gave, which no GPU may still use. Collective."""

    def place_of(self, whole: torch.Tensor, offsets: Mapping[int, int]) -> Place | None:
        """Where peers write, if a tensor lies in memory that they write to without a detour.

        Args:
            whole: What this rank receives; the peers' lie at the same place.
            offsets: Where in its own each peer has what this rank sends it, in bytes.
        """
        del whole, offsets
        return None

    def raise_if_broken(self) -> None:  # noqa: B027 - most links say it when they are used
        """Raises what has ended the link for good, if anything has."""

    def fail(self, error: FlashMoEError) -> None:  # noqa: B027 - peers of most links see it
        """Ends the link and its partners on every rank, since this one has failed."""

    def guard(self, output: torch.Tensor) -> bool:
        """Marks an output as wrong, in the current stream, if the link has failed by then.

        Returns:
            Whether it does; most links' errors are enough.
        """
        del output
        return False

    def leave(self) -> None:  # noqa: B027 - most links have nothing of other ranks
        """Waits for the work that the GPU has been given, and unmaps other ranks' memory for good.

        A rank frees its own, by :meth:`close`, once every rank has left.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Frees what the link holds."""


def seconds_between(begin: Moment, end: Moment) -> float:
    """Seconds between two moments with times. Waits for the later one."""
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


class Between(Moved):
    """A transfer between two moments of a stream.

    Args:
        started: The moment before.
        ended: The moment after.
        nbytes: What this rank received.
    """

    def __init__(self, started: Moment, ended: Moment, nbytes: int) -> None:
        self._started, self._ended, self._nbytes = started, ended, nbytes

    def seconds(self) -> float:
        """By the clock of queues."""
        return seconds_between(self._started, self._ended)

    def num_bytes(self) -> int:
        """See the base class."""
        return self._nbytes
