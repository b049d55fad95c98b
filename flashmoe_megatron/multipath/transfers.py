"""Pieces that go to peers over several links, by the shares of their size."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashmoe_megatron.multipath.balancer import (
    CHUNKS,
    GRAIN,
    Balancer,
    chunks_of,
    cut,
    size_class,
)
from flashmoe_megatron.multipath.links import (
    Exchange,
    Flight,
    Link,
    Moved,
    Part,
    Piece,
    Place,
    Writes,
)
from flashmoe_megatron.multipath.queues import Queues
from flashmoe_megatron.multipath.trials import Timed, Times, greatest, one_of_a_row, row_of
from flashmoe_megatron.ranks import StoreRanks

_TRIAL_BYTES = 64 * 2**20
"""Bytes that links of one kind of wires move to each peer to find the faster one."""


@dataclass
class Load:
    """The pieces that an exchange moves; see :meth:`Transfers.load`.

    Attributes:
        what: Names it in messages, and is compared between ranks.
        pieces: One for every peer.
        meanwhile: Work of the current stream concurrent with the transfer.
        inbound: Bytes that a rank receives of all others, if all pieces are as long as the longest.
        balancer: Has the shares of pieces like these.
        times: The times of their size class, once some have gone.
        shares: The shares that it has used, if it has moved.
        route: How it goes by them.
        writes: The copies to places of the link that carries all, if it makes any.
    """

    what: str
    pieces: Sequence[Piece]
    meanwhile: Callable[[], object] | None
    inbound: int
    balancer: Balancer
    times: Times | None = None
    shares: tuple[float, ...] | None = None
    route: "_Route | None" = None
    writes: Writes | None = None


class _Route(NamedTuple):
    """The way of pieces over links, as :meth:`Transfers.fly` takes it; one ``alone``, or -1."""

    carried: tuple[int, ...]
    chunks: tuple[int, ...]
    alone: int


@dataclass
class LinkTotals:
    """The bytes and times of a link.

    Attributes:
        nbytes: Bytes that this rank received by it.
        timed_bytes: Bytes of transfers whose times have become known, some windows later.
        seconds: How long it was at work for them, as the slowest rank saw it.
    """

    nbytes: int = 0
    timed_bytes: int = 0
    seconds: float = 0.0


class Transfers:
    """Transfers between the ranks of a group; every call is collective over it.

    Args:
        ranks: The ranks.
        queues: The queues of the device where tensors are.
        links: The links, which are closed if this fails.
        leaves_out_slower: Whether the slower one of two links over the same wires carries nothing,
            which is tried.
        least_gain: The balancers'.

    Attributes:
        links: The links, in the order of the balancers'.
        balancer: Has the shares of data that differs for each peer; see :meth:`balancer_for`.
        direct: Has them where peer copies write without a detour.
    """

    def __init__(
        self,
        ranks: StoreRanks,
        queues: Queues,
        links: list[Link],
        *,
        leaves_out_slower: bool,
        least_gain: float,
    ) -> None:
        self.links = links
        for link in links:
            link.partners = [other for other in links if other is not link]
        self._ranks, self._queues = ranks, queues
        self._rank, self._num_ranks = ranks.rank, ranks.num_ranks
        self._number = 0
        self._times: dict[tuple[Balancer, int], Times] = {}
        names = [link.name for link in links]
        self._totals = {name: LinkTotals() for name in names}
        self._route = functools.lru_cache(maxsize=64)(self._route_by)
        try:
            slower = self._slower("peer", "nccl") if leaves_out_slower else None
            # Peer copies without a detour are never the slower ones.
            left_out = [{slower} if slower else set(), {"nccl"} if slower else set()]
            self._balancers = {
                (is_direct, to_all): Balancer(names, left_out[is_direct], least_gain)
                for is_direct in (False, True)
                for to_all in (False, True)
            }
            self.balancer = self._balancers[False, False]
            self.direct = self._balancers[True, False]
        except BaseException:
            self.close()
            raise

    def pieces(
        self,
        sends: torch.Tensor | Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
        place: Place | None = None,
    ) -> list[Piece]:
        """Returns the pieces to and from each peer, the next rank first.

        Args:
            sends: The data for each rank, or the same for all.
            receives: Where each rank's goes.
            place: Where it goes on peers, if they can be written to without a detour.
        """
        to_all = isinstance(sends, torch.Tensor)
        each = [sends] * self._num_ranks if isinstance(sends, torch.Tensor) else sends
        order = [(self._rank + step) % self._num_ranks for step in range(1, self._num_ranks)]
        return [
            Piece(one, each[one].view(torch.uint8), receives[one].view(torch.uint8), place, to_all)
            for one in order
        ]

    def balancer_for(self, is_direct: bool, to_all: bool) -> Balancer:
        """Has the shares of pieces that peer copies write directly, or that every peer gets."""
        return self._balancers[is_direct, to_all and any(link.sends_once for link in self.links)]

    def load(
        self, what: str, pieces: Sequence[Piece], meanwhile: Callable[[], object] | None = None
    ) -> Load:
        """Makes a load that :meth:`exchange` can move, time and again.

        Args:
            what: At most 48 letters.
            pieces: The longest of each rank is as long as those of the others, so that all ranks
                cut at the same places.
            meanwhile: May be called concurrently with the transfer.
        """
        longest = max(max(piece.send.numel(), piece.receive.numel()) for piece in pieces)
        inbound = longest * (self._num_ranks - 1)
        balancer = self.balancer_for(pieces[0].place is not None, pieces[0].to_all)
        return Load(what, pieces, meanwhile, inbound, balancer)

    def announce(self, what: str) -> None:
        """Compares an operation with those of peers, before ranks wait for each other in it.

        Raises:
            ShapeError: A peer has begun another one.
        """
        self._number += 1
        for link in self.links:
            link.announce(self._number, what)

    def exchange(self, load: Load) -> set[Link]:
        """Moves pieces over all links, by the shares of their size, after the current stream.

        Returns:
            The links that have carried something.
        """
        balancer, inbound, meanwhile = load.balancer, load.inbound, load.meanwhile
        if (times := load.times) is None:
            times = load.times = self._times_of(load)
        shares = balancer.shares(inbound)
        carried, chunks, alone = self._settled(load, shares)
        # Ranks note the same transfers, also where only some of them have other work meanwhile.
        is_noted = times.is_next_timed()
        moved: list[Moved | None] = [None] * len(self.links)
        if load.writes is not None and meanwhile is None:
            # One link carries all, and untimed it leaves the host little else to do.
            started = self._queues.mark() if is_noted else None
            self._write(self.links[alone], load.what, load.writes)
            self._totals[self.links[alone].name].nbytes += load.writes.received
            used = {self.links[alone]}
            if started is not None:
                moved[alone] = one = Moved(started, load.writes.received)
                one.ended = self._queues.mark()
        else:
            moved[:] = self.fly(load.what, load.pieces, carried, chunks, meanwhile, is_noted)
            used = set()
            for link, flight in zip(self.links, moved, strict=True):
                if flight is not None:
                    used.add(link)
                    self._totals[link.name].nbytes += flight.nbytes
        if is_noted:
            self._note(balancer, inbound, times.add(shares, moved))
        return used

    def _times_of(self, load: Load) -> Times:
        """The times of a load's size class, whose shares are tried if they are not known yet."""
        key = load.balancer, size_class(load.inbound)
        if key not in self._times:
            if not load.balancer.is_tuned(load.inbound):
                self.tune(load)
            self._times[key] = Times(self._ranks)
        return self._times[key]

    def _write(self, link: Link, what: str, writes: Writes) -> None:
        self._number += 1
        link.write(self._number, what, writes, self._queues.current())

    def _settled(self, load: Load, shares: tuple[float, ...]) -> _Route:
        """Returns how pieces go by shares; a load that moves time and again keeps it."""
        if load.route is None or load.shares is not shares:
            length = load.inbound // (self._num_ranks - 1)
            load.shares, load.route = shares, self._route(load.balancer, length, shares)
            alone = load.route.alone
            whole = Part(0, length, length)
            load.writes = self.links[alone].writes(load.pieces, whole) if alone >= 0 else None
        return load.route

    def _route_by(self, balancer: Balancer, length: int, shares: tuple[float, ...]) -> _Route:
        """The way of pieces of a length by a balancer's shares."""
        models = balancer.models(length * (self._num_ranks - 1))
        carried = tuple(cut(shares, length))
        alone = carried.index(length) if length in carried else -1
        return _Route(carried, tuple(chunks_of(models, shares)), alone)

    def fly(
        self,
        what: str,
        pieces: Sequence[Piece],
        carried: Sequence[int],
        chunks: Sequence[int],
        meanwhile: Callable[[], object] | None = None,
        is_timed: bool = True,
    ) -> list[Flight | None]:
        """Moves so many bytes of every piece over each link; the current stream waits for it.

        Args:
            what: As :class:`Load` has it, like ``pieces`` and ``meanwhile``.
            pieces: Likewise.
            carried: Bytes of every piece for each link.
            chunks: Bytes that each link moves at once.
            meanwhile: Likewise.
            is_timed: Whether flights have times.

        Returns:
            The flight of each link, ``None`` for links that had nothing to do.
        """
        self._number += 1
        parts, used, turns = _plan(tuple(carried), tuple(chunks))
        stream = self._queues.current()
        started = self._queues.moment(stream, is_timed)
        is_beside = meanwhile is not None
        exchange = Exchange(self._number, what, pieces, parts, stream, started, is_beside, is_timed)
        flights = {index: self.links[index].begin(exchange, index) for index in used}
        steps = {index: flight.steps() for index, flight in flights.items()}
        for index in turns:
            next(steps[index], None)
        for rest in steps.values():
            for _ in rest:
                pass
        if meanwhile is not None:
            self._queues.do(meanwhile)
        for flight in flights.values():
            flight.join()
        return [flights.get(index) for index in range(len(carried))]

    def tune(self, load: Load) -> None:
        """Finds the shares of a size class by moving bytes, time and again. Collective."""
        what, pieces, inbound = load.what, load.pieces, load.inbound
        meeting = self._idle(GRAIN)

        def measure(carried: Sequence[int], chunks: Sequence[int]) -> Sequence[float]:
            # The balancer counts what a rank receives of all peers, a link what it moves to each.
            scaled = [nbytes // (self._num_ranks - 1) for nbytes in carried]

            def move(is_timed: bool = True) -> list[Flight | None]:
                return self.fly(what, pieces, scaled, chunks, is_timed=is_timed)

            # Ranks begin together, else a time has the lateness of a peer.
            first = [GRAIN if index == 0 else 0 for index in range(len(scaled))]
            self.fly("a meeting", meeting, first, [GRAIN] * len(scaled))
            whole = sum(scaled)
            for link, nbytes, chunk in zip(self.links, scaled, chunks, strict=True):
                writes = link.writes(pieces, Part(0, whole, chunk)) if nbytes == whole else None
                if writes is not None:  # an untimed transfer goes so, and takes less
                    write = functools.partial(self._write, link, what, writes)
                    _, took = row_of(write, self._queues)
                    (slowest,) = greatest(self._ranks.gather([took]))
                    return [slowest if one is link else 0.0 for one in self.links]
            return one_of_a_row(move, self._queues, self._ranks.gather)

        load.balancer.tune(inbound, measure)
        self._route.cache_clear()

    def _slower(self, *names: str) -> str | None:
        """The slower one of two links that use the same wires, if both are there. Collective."""
        rivals = [index for index, link in enumerate(self.links) if link.name in names]
        if len(rivals) < 2:
            return None
        pieces = self._idle(_TRIAL_BYTES)
        took = dict.fromkeys(rivals, math.inf)
        for index in rivals * 3:  # the first time also pays for objects that are made then
            carried = [_TRIAL_BYTES * (one == index) for one in range(len(self.links))]
            flights = self.fly("a trial", pieces, carried, [CHUNKS[-1]] * len(carried))
            flight = flights[index]
            assert flight is not None
            took[index] = min(took[index], *greatest(self._ranks.gather([flight.seconds()])))
        return self.links[max(rivals, key=lambda index: took[index])].name

    def _idle(self, nbytes: int) -> list[Piece]:
        """Pieces of so many bytes, whose values have no meaning."""
        shape = (self._num_ranks + 1, nbytes)
        idle = torch.empty(shape, dtype=torch.uint8, device=self._queues.device)
        return self.pieces([idle[-1]] * self._num_ranks, list(idle[:-1]))

    def _note(self, balancer: Balancer, inbound: int, known: Iterable[Timed]) -> None:
        """Hands times to the balancer, a window at a time and after all ranks have agreed."""
        for shares, seconds, moved in known:
            balancer.observe(inbound, shares, seconds)
            for name, one, nbytes in zip(self._totals, seconds, moved, strict=True):
                self._totals[name].seconds += one
                self._totals[name].timed_bytes += nbytes

    def take_totals(self) -> dict[str, LinkTotals]:
        """Returns the bytes of each link since the last call, and the times that became known."""
        taken = self._totals
        self._totals = {name: LinkTotals() for name in taken}
        return taken

    def leave(self) -> None:
        """Has the links unmap other ranks' memory, all of them even after an error of one."""
        with contextlib.ExitStack() as stack:
            for link in self.links:
                stack.callback(link.leave)

    def close(self) -> None:
        """Ends the links."""
        links, self.links = self.links, []
        for link in links:
            link.partners = ()
        with contextlib.ExitStack() as stack:  # an error of one leaves none of the others open
            for link in links:
                stack.callback(link.close)


@functools.lru_cache(maxsize=64)
def _plan(
    carried: tuple[int, ...], chunks: tuple[int, ...]
) -> tuple[list[Part], list[int], list[int]]:
    """Each link's part, the links that carry some, and these in the order of their chunks.

    The link that is least advanced is next: with one hardware queue, chunks of several links then
    run concurrently.
    """
    ends = list(itertools.accumulate(carried))
    spans = zip(carried, ends, chunks, strict=True)
    parts = [Part(end - nbytes, end, chunk) for nbytes, end, chunk in spans]
    counts = [-(-nbytes // chunk) for nbytes, chunk in zip(carried, chunks, strict=True)]
    moments = [(turn / count, link) for link, count in enumerate(counts) for turn in range(count)]
    used = [index for index, nbytes in enumerate(carried) if nbytes]
    return parts, used, [link for _, link in sorted(moments)]
