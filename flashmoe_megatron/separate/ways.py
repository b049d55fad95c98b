"""Rows on their way: from their tokens' ranks to the ranks that compute them, and back.

Ranks that share experts each need the rows of all of them, so rows are gathered over these after
the exchange, and summed and scattered before the way back.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmoe_megatron.separate import lanes
from flashmoe_megatron.separate.exchange import Counts, Exchange, Room, Slot
from flashmoe_megatron.separate.plan import Part, Sizes, latest_ends, picked
from flashmoe_megatron.separate.tensor import TensorGroup


@dataclass(frozen=True)
class Way:
    """Rows under way.

    Attributes:
        sent: What travels, which lives until the way has been waited for.
        received: Where it arrives.
        done: When it has.
        exchange: What carries it.
    """

    sent: tuple[torch.Tensor, ...]
    received: torch.Tensor
    done: lanes.Mark
    exchange: Exchange

    def wait(self) -> torch.Tensor:
        """Makes the current stream wait for the transfer, and returns its rows."""
        if self.done is not None:
            lanes.wait(self.received.device, self.done)
        self.exchange.guard(self.received)
        return self.received


class Ways:
    """Begins ways; every call is collective over the ranks of the exchange."""

    def __init__(
        self, exchange: Exchange, tensor: TensorGroup | None, num_ranks: int, *, travels: bool
    ) -> None:
        """Binds them to the exchanges that carry rows.

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
            token_idx: The token of each route, part after part; any token after the last route.
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
        if not self._travels:
            return Way((), send, None, self._exchange)
        slot = Slot(send)
        if not self._exchange.is_alone:
            (slot,) = self._exchange.room([counts], send).slots
        done = self._exchange.run(slot, send, counts, ready or self.ready(send))
        received = slot.rows
        if self._tensor is None:
            return Way((send,), received, done, self._exchange)
        of_ranks = self._of_ranks(sizes)
        every = received.new_empty(sum(of_ranks), *received.shape[1:])
        done = self._tensor.gather(every, received, of_ranks, done)
        return Way((send, received), every, done, self._exchange)

    def room(self, calls: Sequence[Counts], like: torch.Tensor) -> Room | None:
        """Makes room for all parts that come back.

        Args:
            calls: The counts of rows of each part, as they came.
            like: Has rows of their shape and dtype.

        Returns:
            ``None`` without any other rank, where rows stay where they are.
        """
        if self._exchange.is_alone:
            return None
        return self._exchange.room([_turned(counts) for counts in calls], like)

    def back(self, rows: torch.Tensor, counts: Counts, part: Part, slot: Slot | None) -> Way:
        """Begins to send rows, by expert, back to where they came from by ``counts``.

        Args:
            rows: What experts have computed.
            counts: By which the part came.
            part: What these are.
            slot: Where they come back to; ``None`` without any other rank.
        """
        send = rows = picked(rows, part.by_rank)
        if not self._travels:
            return Way((), send, None, self._exchange)
        ready = self.ready(rows)
        if self._tensor is not None:
            of_ranks = self._of_ranks(part)
            send = rows.new_empty(of_ranks[self._tensor.rank], *rows.shape[1:])
            ready = self._tensor.reduce(send, rows, of_ranks, ready)
        slot = slot or Slot(send)
        done = self._exchange.run(slot, send, _turned(counts), ready)
        return Way((rows, send), slot.rows, done, self._exchange)

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


def returned(back: Sequence[Way], room: Room | None) -> torch.Tensor:
    """Returns all parts' rows, one part after the other, once they are back."""
    rows = [way.wait() for way in back]
    if room is not None:
        return room.rows
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _turned(counts: Counts) -> list[list[int]]:
    return [list(column) for column in zip(*counts, strict=True)]
