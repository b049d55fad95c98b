"""Rows on their way: from their tokens' ranks to the ranks that compute them, and back.

Ranks that share experts each need the rows of all of them, so rows are gathered over these behind
the exchange, and summed and scattered before the way back.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmoe_megatron.scheduled import lanes
from flashmoe_megatron.scheduled.exchange import Counts, Exchange
from flashmoe_megatron.scheduled.plan import Part, Sizes, latest_ends, picked
from flashmoe_megatron.scheduled.tensor import TensorGroup


@dataclass(frozen=True)
class Way:
    """Rows under way.

    Attributes:
        sent: What travels, which lives until the way has been waited for.
        received: Where it arrives.
        done: When it has.
    """

    sent: tuple[torch.Tensor, ...]
    received: torch.Tensor
    done: lanes.Mark

    def wait(self) -> torch.Tensor:
        """What has arrived, for which the current stream waits."""
        lanes.wait(self.received.device, self.done)
        return self.received


@dataclass(frozen=True)
class Room:
    """Where all parts of a call come back, one behind the other.

    Attributes:
        rows: All of it; ``None`` without any other rank, where each stays where it is.
        slices: Each part's of it.
    """

    rows: torch.Tensor | None
    slices: Sequence[torch.Tensor | None]


class Ways:
    """Begins ways; every call is collective over the ranks of the exchange."""

    def __init__(
        self, exchange: Exchange, tensor: TensorGroup | None, num_ranks: int, *, travels: bool
    ) -> None:
        """Binds them to what carries rows.

        Args:
            exchange: Carries rows in the expert-parallel group.
            tensor: The ranks that share experts, if any do.
            num_ranks: The expert-parallel group's.
            travels: Whether there is any other rank.
        """
        self._exchange, self._tensor = exchange, tensor
        self._num_ranks, self._travels = num_ranks, travels

    def collect(
        self, x: torch.Tensor, token_idx: torch.Tensor, degree: int
    ) -> tuple[torch.Tensor, list[lanes.Mark]]:
        """Begins to collect the rows of as many routes as there can be.

        Args:
            x: The tokens.
            token_idx: The token of each route, part behind part, and any behind the last route.
            degree: The number of parts.

        Returns:
            The rows, and when those of each part are complete.
        """
        rows = x.new_empty(len(token_idx), *x.shape[1:])
        ready = []
        for begin, end in itertools.pairwise([0, *latest_ends(len(token_idx), degree)]):
            torch.index_select(x, 0, token_idx[begin:end], out=rows[begin:end])
            ready.append(self.ready(x))
        return rows, ready

    def there(
        self, send: torch.Tensor, counts: Counts, sizes: Sizes, ready: lanes.Mark = None
    ) -> Way:
        """Begins to send rows to their experts.

        Args:
            send: The rows.
            counts: By which they travel.
            sizes: The part's.
            ready: When the rows are complete, by default on the current stream now. Since then it
                may have used no memory that is free by now, where the rows would arrive too early.
        """
        received = send
        if not self._exchange.is_alone:
            from_ranks = sum(row[self._exchange.rank] for row in counts)
            received = self._exchange.room(from_ranks, send)
        done = self._exchange.run(received, send, counts, ready or self.ready(send))
        if self._tensor is None:
            return Way((send,), received, done)
        of_ranks = self._of_ranks(sizes)
        every = received.new_empty(sum(of_ranks), *received.shape[1:])
        done = self._tensor.gather(every, received, of_ranks, done)
        return Way((send, received), every, done)

    def room(self, parts: Sequence[Sizes], like: torch.Tensor) -> Room:
        """Makes room for all parts, whose rows have the shape and dtype of others."""
        if self._exchange.is_alone:
            return Room(None, [None] * len(parts))
        sizes = [sum(part.send_counts) for part in parts]
        rows = self._exchange.room(sum(sizes), like)
        return Room(rows, torch.split(rows, sizes))

    def back(
        self, rows: torch.Tensor, counts: Counts, part: Part, received: torch.Tensor | None
    ) -> Way:
        """Begins to send rows, by expert, back to where they came from by ``counts``.

        Args:
            rows: What experts have computed.
            counts: By which the part came.
            part: What these are.
            received: Their slice of a room; ``None`` without any other rank.
        """
        turned = [list(column) for column in zip(*counts, strict=True)]
        send = rows = picked(rows, part.by_rank)
        ready = self.ready(rows)
        if self._tensor is not None:
            of_ranks = self._of_ranks(part)
            send = rows.new_empty(of_ranks[self._tensor.rank], *rows.shape[1:])
            ready = self._tensor.reduce(send, rows, of_ranks, ready)
        received = send if received is None else received
        return Way((rows, send), received, self._exchange.run(received, send, turned, ready))

    def ready(self, rows: torch.Tensor) -> lanes.Mark:
        """This moment, where anybody waits for it."""
        return lanes.mark(rows.device) if self._travels else None

    def _of_ranks(self, sizes: Sizes) -> list[int]:
        """Rows that each of the ranks which share experts receives."""
        counts, step = sizes.recv_counts, self._num_ranks
        return [sum(counts[i : i + step]) for i in range(0, len(counts), step)]


def arrived(way: Way, part: Part) -> torch.Tensor:
    """The received rows of a part in the order of experts."""
    return picked(way.wait(), part.by_expert)


def returned(back: Sequence[Way], room: Room) -> torch.Tensor:
    """All parts' rows, one part behind the other, once they are back."""
    rows = [way.wait() for way in back]
    if room.rows is not None:
        return room.rows
    return rows[0] if len(rows) == 1 else torch.cat(rows)
