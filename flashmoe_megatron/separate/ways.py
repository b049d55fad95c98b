"""Rows on their way: from their tokens' ranks to the ranks that compute them, and back.

Expert tensor parallelism means ranks that each have a slice of the same experts' matrices. Every
one of them computes its slice for the rows of all, so rows are gathered after the exchange with the
expert-parallel ranks, and the results, which are summands, are summed and scattered before the way
back. Rows are as ragged as they are there, and none is padded.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashmoe_megatron import streams
from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.hooks import Order
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.separate.exchange import Counts, Exchange, Room, Slot
from flashmoe_megatron.separate.plan import Part, Sizes, latest_ends, picked
from flashmoe_megatron.separate.steps import accumulation_dtype
from flashmoe_megatron.streams import Lane, Mark


class TensorGroup:
    """Exchanges of the ranks that share experts; every call is collective over them.

    Attributes:
        ranks: These ranks.
        size: How many they are.
        rank: This one's number among them.
    """

    def __init__(
        self, group: dist.ProcessGroup, traffic: TrafficCounters, device: torch.device
    ) -> None:
        """Binds it to a group of two or more ranks."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = Ranks(
            group,
            exchange=f"rank {self.rank} of {self.size} that share experts: an exchange with the "
            "others",
        )
        self._group = group
        self._traffic = traffic
        self._within = Lane(device)

    def every(self, counts: torch.Tensor) -> torch.Tensor:
        """``[size * n, ...]``, the ``[n, ...]`` of all ranks, on the current stream."""
        everyone = [torch.empty_like(counts) for _ in range(self.size)]
        with self.ranks.bounded:
            dist.all_gather(everyone, counts.contiguous(), group=self._group)
        return torch.cat(everyone)

    def gather(
        self, every: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], ready: Mark
    ) -> Mark:
        """All-gathers rows concurrently with the current stream.

        ``every`` is ``[sum of sizes, ...]`` of the current stream, and is filled by rank. It and
        this rank's ``rows``, complete by ``ready``, are kept by the caller until that stream has
        waited for the returned mark.

        Raises:
            PeerTimeoutError: A rank is gone or did not come in time.
        """
        pieces = torch.split(every, list(sizes))
        with self._within.after(ready):
            pieces[self.rank].copy_(rows)
            self._swap([rows] * self.size, pieces)
        return self._within.mark()

    def reduce(
        self, out: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], ready: Mark
    ) -> Mark:
        """Sums in the order of ranks, and scatters, concurrently with the current stream.

        ``rows`` has the pieces of all ranks, of these ``sizes``, and is complete by ``ready``; this
        rank's is summed up in ``out``. Both are kept as in :meth:`gather`, and the mark says when
        ``out`` is complete.

        Raises:
            PeerTimeoutError: A rank is gone or did not come in time.
        """
        pieces = torch.split(rows, list(sizes))
        with self._within.after(ready):
            summands = [torch.empty_like(out) for _ in range(self.size)]
            summands[self.rank] = pieces[self.rank]
            self._swap(pieces, summands)
            total = torch.zeros_like(out, dtype=accumulation_dtype(out.dtype))
            for summand in summands:
                total += summand
            out.copy_(total)
        return self._within.mark()

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Sends every other rank a tensor and fills one of each; empty ones do not travel."""
        ways = []
        for other in range(self.size):
            if other == self.rank:
                continue
            for operation, tensor in ((dist.isend, sent[other]), (dist.irecv, received[other])):
                if tensor.numel():
                    way = dist.P2POp(operation, tensor, group=self._group, group_peer=other)
                    ways.append(way)
            leaving = sent[other]
            self._traffic.rows_sent += len(leaving) if leaving.dim() > 1 else 0
            self._traffic.bytes_sent += leaving.nbytes
        if not ways:
            return
        with self.ranks.bounded:
            for work in dist.batch_isend_irecv(ways):
                work.wait()


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
    done: Mark
    exchange: Exchange

    def wait(self) -> torch.Tensor:
        """Makes the current stream wait for the transfer, and returns its rows."""
        if self.done is not None:
            streams.wait(self.received.device, self.done)
        self.exchange.guard(self.received)
        return self.received


class Ways:
    """Begins ways; every call is collective over the ranks of the exchange."""

    def __init__(
        self, exchange: Exchange, tensor: TensorGroup | None, num_ranks: int, *, travels: bool
    ) -> None:
        """Binds them to the exchanges of the expert-parallel group and of ranks that share experts.

        ``num_ranks`` are in the former; nothing travels where there is no other rank at all.
        """
        self._exchange, self._tensor = exchange, tensor
        self._num_ranks, self._travels = num_ranks, travels

    def collect(
        self, x: torch.Tensor, token_idx: torch.Tensor, degree: int, order: Order | None = None
    ) -> tuple[torch.Tensor, list[Mark]]:
        """Begins to collect the rows of as many routes as there can be, part after part.

        Where there are fewer routes, the last ones have any token. Returns the rows, and when those
        of each part are complete.
        """
        rows = x.new_empty(len(token_idx), *x.shape[1:])
        ready = []
        for begin, end in itertools.pairwise([0, *latest_ends(len(token_idx), degree)]):
            if order is None:
                torch.index_select(x, 0, token_idx[begin:end], out=rows[begin:end])
            else:
                order.order(x, token_idx[begin:end], rows[begin:end])
            ready.append(self.ready(x))
        return rows, ready

    def there(self, send: torch.Tensor, counts: Counts, sizes: Sizes, ready: Mark = None) -> Way:
        """Begins to send the rows of a part to their experts, by these counts.

        Rows are complete by ``ready``, by default on the current stream now. Since then it may have
        used no memory that is free by now, where the rows would arrive too early.
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
        """Makes room for all parts that come back, which came by these counts.

        Returns:
            ``None`` without any other rank, where rows stay where they are.
        """
        if self._exchange.is_alone:
            return None
        return self._exchange.room([_turned(counts) for counts in calls], like)

    def back(self, rows: torch.Tensor, counts: Counts, part: Part, slot: Slot | None) -> Way:
        """Begins to send a part's results back to where its rows came from by ``counts``.

        Rows come back to ``slot``, which is ``None`` without any other rank.
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

    def ready(self, rows: torch.Tensor) -> Mark:
        """This moment, where anybody waits for it."""
        return streams.mark(rows.device) if self._travels else None

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
