"""The ways of rows: directly, by copy engines, or in two steps through the ranks of a host.

All exchanges bring the same rows in the same order, that of the ranks that have sent them. Counts
of rows are ``[source][target]`` of the whole group.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid, HostGroups, host_groups
from flashmoe_megatron.multipath.peer_copies import Arena, Region
from flashmoe_megatron.multipath.queues import GpuQueues
from flashmoe_megatron.options import BackendOptions, ExchangeKind
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.streams import Lane, Mark, current_stream, index_of, mark, wait

Counts = Sequence[Sequence[int]]
Kind = Literal["direct", "copies", "2dh"]
ONE_STEP: tuple[Kind, ...] = ("direct", "copies")
"""Exchanges that send rows from each rank to each in one step."""
_SPIN_S = 0.01
"""So long the host looks without a pause, for a pause is as long as it may be late."""
_PAUSE_S = 5e-5


def kind_of(kind: ExchangeKind, grid: HostGrid | None, device: torch.device) -> Kind:
    """Returns how rows travel in a group, by its user's choice.

    Raises:
        ConfigError: The exchange that is asked for needs several hosts of several ranks, or GPUs of
            one host.
    """
    has_levels = grid is not None and grid.num_hosts > 1 and grid.ranks_per_host > 1
    here = (
        f"exchange={kind!r} in an expert-parallel group of {grid or 'one rank'} (hosts x ranks of "
        "each)"
    )
    if kind == "auto":
        return "2dh" if has_levels else "direct"
    if kind == "copies":
        if device.type != "cuda" or (grid is not None and grid.num_hosts > 1):
            raise ConfigError(f"{here} on {device.type}: wanted GPUs of one host")
        return kind
    if kind != "direct" and not has_levels:
        raise ConfigError(f"{here}: wanted several hosts with several ranks each, or 'direct'")
    return kind


def counts_between(rank: int, sent: Sequence[int], received: Sequence[int]) -> Counts:
    """Returns ``[source][target]`` rows where only this rank's are known, and the others' zero.

    This rank sends ``sent`` rows to each rank and gets ``received`` ones from each.
    """
    known = [[0] * len(sent) for _ in sent]
    for other, count in enumerate(received):
        known[other][rank] = count
    known[rank] = list(sent)
    return known


def row_bytes(rows: torch.Tensor) -> int:
    """The bytes of a row."""
    return math.prod(rows.shape[1:]) * rows.element_size()


class Slot(NamedTuple):
    """Memory for the rows that one call brings.

    Attributes:
        rows: ``[received rows, ...]``.
        where: For copy engines, the region of several calls and the byte of it at which this call
            begins on each peer.
    """

    rows: torch.Tensor
    where: tuple[Region, Mapping[int, int]] | None = None


class Room(NamedTuple):
    """Memory for the rows that several calls bring: all of it, and each call's in turn."""

    rows: torch.Tensor
    slots: Sequence[Slot]


class Exchange:
    """Uneven all-to-all of rows over one group; every call is collective over it.

    Attributes:
        ranks: The ranks as their hosts speak to each other in a call.
        traffic: What was sent so far.
        needs_all_counts: Whether a call needs the counts of all ranks, not its own alone.
        is_alone: Whether there is no other rank, so that what is sent is what is received.
        streams: Where rows travel, by the names of :mod:`flashmoe_megatron.separate.degree`.
        lanes: These streams.
    """

    needs_all_counts = False
    streams: tuple[str, ...] = ("between",)

    def __init__(self, ranks: Ranks, traffic: TrafficCounters, device: torch.device) -> None:
        """Binds it to the ranks of a group."""
        self.rank = ranks.rank
        self.traffic = traffic
        self.is_alone = ranks.group is None
        self.ranks = ranks
        self.lanes = {name: Lane(device) for name in self.streams}
        self._between = self.lanes["between"]

    @property
    def lane(self) -> Lane:
        """The stream of the transfers between ranks."""
        return self._between

    def raise_if_broken(self) -> None:
        """Raises what has ended the exchange for good, on every rank, if anything has."""

    def restart(self) -> None:
        """Begins a forward or a backward: the rows of the last one are not read any more.

        Raises:
            FlashMoEError: As :meth:`raise_if_broken`.
        """

    def wait_on_host(self, moment: torch.cuda.Event) -> None:
        """Makes the host wait for the numbers that all ranks exchange on their GPUs.

        Raises:
            FlashMoEError: As :meth:`raise_if_broken`, since a rank that knows of it sends
                nothing any more.
        """
        moment.synchronize()

    def room(self, calls: Sequence[Counts], like: torch.Tensor) -> Room:
        """Allocates memory for rows of calls with these counts, on the current stream.

        ``like`` has rows of their shape and dtype.
        """
        sizes = [sum(row[self.rank] for row in counts) for counts in calls]
        rows = like.new_empty(sum(sizes), *like.shape[1:])
        return Room(rows, [Slot(slot) for slot in torch.split(rows, sizes)])

    def guard(self, rows: torch.Tensor) -> None:
        """Makes the first value of the received rows NaN if a peer has died unnoticed.

        On the current stream, which has waited for the rows.
        """

    def run(self, slot: Slot, send: torch.Tensor, counts: Counts, ready: Mark) -> Mark:
        """Sends each rank its rows, concurrently with the current stream.

        Args:
            slot: From :meth:`room`, or ``send`` where :attr:`is_alone`; is filled by rank. It and
                ``send`` are kept by the caller until the current stream has waited for the
                returned mark.
            send: Contiguous rows, by rank.
            counts: Rows from every rank to every rank; where :attr:`needs_all_counts` is false,
                only the own row and column are read.
            ready: When ``send`` is complete.

        Returns:
            When the slot is complete.

        Raises:
            PeerTimeoutError: A rank is gone or did not come in time. The process group cannot be
                used again.
        """
        self._count(send, counts)
        if self.is_alone:
            return ready
        with self.ranks.bounded:
            self._send(slot, send, counts, ready)
        return self._between.mark()

    def swap(
        self, send: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Sends each rank its rows, and waits on the current stream for theirs; see :meth:`run`.

        ``send`` has the ``sent`` rows for each rank, by rank; ``received`` ones come from each.
        """
        counts, slot = counts_between(self.rank, sent, received), Slot(send)
        if not self.is_alone:
            (slot,) = self.room([counts], send).slots
        wait(send.device, self.run(slot, send, counts, mark(send.device)))
        return slot.rows

    def _send(self, slot: Slot, send: torch.Tensor, counts: Counts, ready: Mark) -> None:
        from_ranks = [row[self.rank] for row in counts]
        with self._between.after(ready):
            dist.all_to_all_single(
                slot.rows, send, from_ranks, list(counts[self.rank]), group=self.ranks.group
            )

    def _count(self, send: torch.Tensor, counts: Counts) -> None:
        leaving = send.shape[0] - counts[self.rank][self.rank]
        if send.dim() > 1:
            self.traffic.rows_sent += leaving
        self.traffic.bytes_sent += leaving * row_bytes(send)


class TwoSteps(Exchange):
    """Two-dimensional: to the rank of the same place within the host, then between hosts.

    A rank sends one message to each other rank of its host and one to each other host.
    """

    needs_all_counts = True
    streams = ("between", "within")

    def __init__(
        self,
        ranks: Ranks,
        grid: HostGrid,
        groups: HostGroups,
        traffic: TrafficCounters,
        device: torch.device,
    ) -> None:
        """Binds it to a group whose hosts are known."""
        super().__init__(ranks, traffic, device)
        self._grid, self._groups = grid, groups

    def _send(self, slot: Slot, send: torch.Tensor, counts: Counts, ready: Mark) -> None:
        grid = self._grid
        hosts, places = range(grid.num_hosts), range(grid.ranks_per_host)
        mine = [grid.host * grid.ranks_per_host + place for place in places]

        def rank_of(host: int, place: int) -> int:
            return host * grid.ranks_per_host + place

        # Within the host by place of the target, then its host.
        order = [rank_of(host, place) for place in places for host in hosts]
        to_places = [
            sum(counts[self.rank][rank_of(host, place)] for host in hosts) for place in places
        ]
        sizes = [counts[source][rank_of(host, grid.place)] for source in mine for host in hosts]
        per_source = [sum(sizes[i * len(hosts) : (i + 1) * len(hosts)]) for i in places]
        within = self.lanes["within"]
        with within.after(ready):
            packed = _pieces(send, counts[self.rank], order)
            halfway = send.new_empty(sum(sizes), *send.shape[1:])
            dist.all_to_all_single(
                halfway, packed, per_source, to_places, group=self._groups.within
            )
        self._between.reads(halfway)
        # Between hosts by host of the target, then place of the source, which is its rank's order.
        by_host = [source * len(hosts) + host for host in hosts for source in places]
        to_hosts = [
            sum(counts[source][rank_of(host, grid.place)] for source in mine) for host in hosts
        ]
        from_hosts = [
            sum(counts[rank_of(host, place)][self.rank] for place in places) for host in hosts
        ]
        with self._between.after(within.mark()):
            packed = _pieces(halfway, sizes, by_host)
            dist.all_to_all_single(slot.rows, packed, from_hosts, to_hosts, group=self._groups.rail)


class Copies(Exchange):
    """Copy engines write rows straight into the memory of the GPU that wants them, on one host.

    NCCL's kernels hold multiprocessors, so that a concurrent product begins late and both are
    slower; copies hold none. What a rank sends lies on its peer where the lower ranks' rows end, so
    every rank has to know all counts. A group's layers share one arena.
    """

    needs_all_counts = True

    def __init__(
        self,
        ranks: Ranks,
        traffic: TrafficCounters,
        device: torch.device,
        timeout: float,
    ) -> None:
        """Binds it to two or more ranks; ``timeout`` seconds without progress are an error.

        Raises:
            FlashMoEError: The GPUs cannot write into each other's memory.
        """
        super().__init__(ranks, traffic, device)
        self._index = index_of(device)
        self._staying = Lane(device)
        here, group = torch.device("cuda", self._index), ranks.group
        assert group is not None
        self._arena = ranks.once(
            Arena, here, timeout, make=lambda: Arena(group, GpuQueues(here), timeout)
        )
        self.ranks = self._arena.ranks  # which learn of a copy that fails

    def raise_if_broken(self) -> None:
        """See the base class."""
        self._arena.link.raise_if_broken()

    def restart(self) -> None:
        """See the base class."""
        self._arena.restart(current_stream(self._index))

    def wait_on_host(self, moment: torch.cuda.Event) -> None:
        """See the base class; NCCL alone would wait as long as the group's own timeout."""
        begun = time.monotonic()
        while not moment.query():  # type: ignore[no-untyped-call]
            self.raise_if_broken()
            if time.monotonic() - begun < _SPIN_S:
                os.sched_yield()  # leaves the interpreter to other threads, as query does not
            else:
                time.sleep(_PAUSE_S)

    def room(self, calls: Sequence[Counts], like: torch.Tensor) -> Room:
        """See the base class; collective where more rows arrive than ever before."""
        width = row_bytes(like)
        ranks = range(len(calls[0]))
        sizes = [[sum(row[rank] for row in counts) for rank in ranks] for counts in calls]
        columns = (itertools.accumulate(of_rank, initial=0) for of_rank in zip(*sizes, strict=True))
        ends = list(zip(*columns, strict=True))
        region = self._arena.take([count * width for count in ends[-1]])
        rows = region.memory.view(like.dtype).view(ends[-1][self.rank], *like.shape[1:])
        slots = [
            Slot(
                rows[begin[self.rank] : end[self.rank]],
                (region, {peer: begin[peer] * width for peer in self._arena.link.peers}),
            )
            for begin, end in itertools.pairwise(ends)
        ]
        return Room(rows, slots)

    def guard(self, rows: torch.Tensor) -> None:
        """See the base class."""
        self._arena.link.guard(rows.view(-1))

    def _send(self, slot: Slot, send: torch.Tensor, counts: Counts, ready: Mark) -> None:
        assert slot.where is not None, "rows are copied to a slot of the arena"
        region, first = slot.where
        width, rank = row_bytes(send), self.rank
        sent = list(itertools.accumulate(counts[rank], initial=0))
        begins = [sum(row[target] for row in counts[:rank]) for target in range(len(counts))]
        copies = [
            (
                region.place.targets[peer] + first[peer] + begins[peer] * width,
                send.data_ptr() + sent[peer] * width,
                counts[rank][peer] * width,
            )
            for peer in self._arena.link.peers
            if counts[rank][peer]
        ]
        what = f"{sum(map(sum, counts))} rows of {width} bytes"
        with self._between.after(ready):
            self._arena.write(what, copies, region, current_stream(self._index))
        # A copy within a GPU takes multiprocessors. After the copies to peers it would come when
        # a product has them all; here it begins with the first copy to a peer.
        with self._staying.after(ready):
            own = slot.rows[begins[rank] :][: counts[rank][rank]]
            own.copy_(send[sent[rank] : sent[rank + 1]])
        self._between.wait(self._staying.mark())


def _pieces(rows: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Pieces of rows in another order."""
    pieces = torch.split(rows, list(sizes))
    return torch.cat([pieces[i] for i in order])


def make_exchange(
    options: BackendOptions,
    ranks: Ranks,
    grid: HostGrid | None,
    traffic: TrafficCounters,
    device: torch.device,
    *,
    is_cut: bool,
) -> Exchange:
    """Returns the exchange that carries the rows.

    Raises:
        ConfigError: The exchange that is asked for needs several hosts of several ranks, GPUs of
            one host, or whole experts.
        FlashMoEError: The GPUs cannot write into each other's memory.
    """
    kind = kind_of(options.exchange, grid, device)
    if kind == "copies" and is_cut:
        raise ConfigError(
            "exchange='copies' where several ranks share each expert, of which some would not hear "
            "that the others' copies have failed: wanted another exchange"
        )
    if kind == "copies" and ranks.num_ranks > 1:
        return Copies(ranks, traffic, device, options.timeout)
    if kind in ONE_STEP or ranks.group is None or grid is None:
        return Exchange(ranks, traffic, device)
    groups = host_groups(ranks.group, grid, timeout=options.timeout)
    return TwoSteps(ranks, grid, groups, traffic, device)
