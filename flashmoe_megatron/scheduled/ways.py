"""Rows on their way: from their tokens' ranks to the ranks that compute them, and back.

Ranks that share experts each need the rows of all of them, so rows are gathered over these behind
the exchange, and summed and scattered before the way back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmoe_megatron.scheduled import lanes
from flashmoe_megatron.scheduled.exchange import Counts, Exchange
from flashmoe_megatron.scheduled.plan import Part, Routes, picked
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

    def there(self, send: torch.Tensor, counts: Counts, part: Part) -> Way:
        """Begins to send rows that are complete on the current stream to their experts."""
        received = self._exchange.received(send, counts)
        done = self._exchange.run(received, send, counts, self._ready(send))
        if self._tensor is None:
            return Way((send,), received, done)
        sizes = self._sizes(part)
        every = received.new_empty(sum(sizes), *received.shape[1:])
        done = self._tensor.gather(every, received, sizes, done)
        return Way((send, received), every, done)

    def back(self, rows: torch.Tensor, counts: Counts, part: Part) -> Way:
        """Begins to send rows, by expert, back to where they came from by ``counts``."""
        turned = [list(column) for column in zip(*counts, strict=True)]
        send = rows = picked(rows, part.by_rank)
        ready = self._ready(rows)
        if self._tensor is not None:
            sizes = self._sizes(part)
            send = rows.new_empty(sizes[self._tensor.rank], *rows.shape[1:])
            ready = self._tensor.reduce(send, rows, sizes, ready)
        received = self._exchange.received(send, turned)
        return Way((rows, send), received, self._exchange.run(received, send, turned, ready))

    def _ready(self, rows: torch.Tensor) -> lanes.Mark:
        """This moment, where anybody waits for it."""
        return lanes.mark(rows.device) if self._travels else None

    def _sizes(self, part: Part) -> list[int]:
        """Rows that each of the ranks which share experts receives."""
        counts, step = part.recv_counts, self._num_ranks
        return [sum(counts[i : i + step]) for i in range(0, len(counts), step)]


def arrived(way: Way, part: Part) -> torch.Tensor:
    """The received rows of a part in the order of experts."""
    return picked(way.wait(), part.by_expert)


def returned(back: Sequence[Way], parts: Sequence[Part], routes: Routes) -> torch.Tensor:
    """All routes' rows in their order, once every part is back."""
    for way in back:
        way.wait()
    first = back[0].received
    if len(back) == 1:
        return first
    rows = first.new_empty(len(routes.token_idx), *first.shape[1:])
    for way, part in zip(back, parts, strict=True):
        rows[part.send_idx] = way.received
    return rows
