"""Collectives whose bytes go over all links of a machine at once."""

import concurrent.futures
import contextlib
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.config import DEFAULT_TIMEOUT
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    LinkError,
    ShapeError,
    reason_of,
)
from flashmoe_megatron.multipath.balancer import (
    CHUNKS,
    GRAIN,
    WINDOW,
    Balancer,
    chunks_of,
    cut,
    size_class,
)
from flashmoe_megatron.multipath.choose import MakeLink, make_links
from flashmoe_megatron.multipath.control import Answers, Control, greatest
from flashmoe_megatron.multipath.ledger import Ledger
from flashmoe_megatron.multipath.links import (
    Exchange,
    Flight,
    Link,
    Part,
    Piece,
    Place,
    timed_event,
)
from flashmoe_megatron.multipath.sums import check_summable, sum_in_order
from flashmoe_megatron.multipath.trials import one_of_a_row, row_of, seconds_of

MIN_BYTES = 64 * 2**20
"""Smaller tensors go by torch.distributed alone, since several links do not pay."""

_TRIAL_BYTES = 64 * 2**20
"""What links of one kind of wires move to each peer to find the faster one."""

_ROUNDS = 3
"""How often gathers by links and by torch.distributed are compared; medians count."""

_WINDOWS = 4
"""Windows whose times ranks tell each other at once, since that takes the host a millisecond."""

Reduction = Literal["sum", "average"]


@dataclass
class LinkTotals:
    """What a link has carried.

    Attributes:
        nbytes: Bytes that this rank received by it.
        timed_bytes: Bytes of transfers whose times have become known, some windows later.
        seconds: How long it was at work for them, as the slowest rank saw it.
    """

    nbytes: int = 0
    timed_bytes: int = 0
    seconds: float = 0.0


class _Gather(NamedTuple):
    """What :meth:`Multipath.exchange` wants to know of a gather."""

    what: str
    pieces: Sequence[Piece]
    meanwhile: Callable[[], object] | None


class Work:
    """A collective under way. Tensors that it reads or writes must stay as they are until then."""

    def __init__(self, wait: Callable[[], None], tensors: Sequence[torch.Tensor]) -> None:
        self._wait, self._tensors = wait, tensors

    def wait(self) -> None:
        """Waits for the end: on GPUs the current stream does, on CPUs the caller.

        Raises:
            PeerTimeoutError: A peer did not take part within the time limit.
            LinkError: A link broke.
            ShapeError: A peer has called something else.
        """
        self._wait()
        self._tensors = ()


class Multipath:
    """Gathers and reduces over all links between the ranks of a group.

    Making one is collective, and so is every call; ranks make the same calls in the same order. The
    first call of a size class tries shares for at most a second or two.

    Args:
        group: The ranks, at least 2; ``None`` for all. What is small goes over this group.
        device: Where tensors are; by default the current GPU, if there is one.
        links: "auto", or links by name or as functions that make them; see
            :func:`~flashmoe_megatron.multipath.choose.make_links`.
        min_bytes: Tensors below this size go by torch.distributed.
        timeout: Seconds without progress that end a call with an error.

    Attributes:
        balancer: Has the shares.
        direct: Has those of gathers into memory of :meth:`empty`, to which peer copies are faster.
        links: The links, in the order of the balancer's.

    Raises:
        ConfigError: The group or a link's name is of no use.
        FlashMoEError: A link cannot be made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        links: str | Sequence[str | MakeLink] = "auto",
        min_bytes: int = MIN_BYTES,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if device is None:
            has_gpu = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else None
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.empty(0, device=device).device
        self.device = device or torch.device("cpu")
        self.min_bytes = min_bytes
        self._control = Control(group, timeout)
        self._group = self._control.group
        self.rank, self.num_ranks = self._control.rank, self._control.num_ranks
        self.links: list[Link] = make_links(self._control, self.device, links)
        if not self.links:
            raise ConfigError(f"no link can be made between the {self.num_ranks} ranks")
        self._is_on_gpus = any(link.device_type == "cuda" for link in self.links)
        # Links that are asked for by name are used.
        self._may_do_without = links == "auto" and self._is_on_gpus
        self._number = 0
        self._broken: FlashMoEError | None = None
        self._faster: dict[tuple[Balancer, int], bool] = {}
        self._times: dict[tuple[Balancer, int], _Times] = defaultdict(lambda: _Times(self._control))
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._last_stream: torch.cuda.Stream | None = None
        else:
            self._worker = concurrent.futures.ThreadPoolExecutor(1, "flashmoe-multipath")
        try:
            names = [link.name for link in self.links]
            slower = self._slower("peer", "nccl") if links == "auto" else None
            self.balancer = Balancer(names, without={slower} if slower else ())
            # Peer copies without a detour are never the slower ones.
            self.direct = Balancer(names, without={"nccl"} if slower else ())
        except BaseException:
            self._close_links()
            raise
        self._totals = {link.name: LinkTotals() for link in self.links}
        self._route = functools.lru_cache(maxsize=64)(self._route_by)
        self._in_place: dict[tuple[int, int, int], _Gather] = {}

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False
    ) -> Work | None:
        """Gathers every rank's input, in rank order.

        Args:
            output: ``[num_ranks * n]`` elements in any shape, contiguous.
            input: ``[n]`` elements, contiguous; may be this rank's part of the output.
            async_op: Returns at once, with what to wait for.

        Raises:
            ShapeError: The tensors do not fit each other or this object's device.
        """
        self._check(output=output, input=input)
        if output.numel() != self.num_ranks * input.numel():
            raise _uneven("all_gather", "output", output, self.num_ranks, input)
        gather = self._gather_of(output, input)
        plain = functools.partial(dist.all_gather_into_tensor, output, input, self._group)
        if gather is None:
            return _plain(plain(async_op))

        def run() -> None:
            if self._may_do_without and not self._pays(gather, plain):
                plain()
            else:
                self._guard(output, self.exchange(*gather))

        return self._start(run, (output, input), async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Reduction = "sum",
        async_op: bool = False,
    ) -> Work | None:
        """Gives each rank the sum of its part of every rank's input.

        Args:
            output: ``[n]`` elements, contiguous; may be this rank's part of the input.
            input: ``[num_ranks * n]`` elements in any shape, contiguous.
            op: "sum" or "average"; added in float32, in rank order.
            async_op: Returns at once, with what to wait for.

        Raises:
            ShapeError: The tensors do not fit each other or this object's device, or have no sum.
        """
        self._check(output=output, input=input)
        check_summable(input.dtype, op == "average")
        if input.numel() != self.num_ranks * output.numel():
            raise _uneven("reduce_scatter", "input", input, self.num_ranks, output)
        if self._is_small(input):
            return _plain(
                dist.reduce_scatter_tensor(output, input, _reduce_op(op), self._group, async_op)
            )
        parts = input.view(-1).chunk(self.num_ranks)
        target = output.view(-1)

        def run() -> None:
            what = f"reduce_scatter of {input.nbytes} bytes"
            self._guard(output, self._reduce(what, parts, target, op == "average"))

        return self._start(run, (output, input), async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: Reduction = "sum", async_op: bool = False
    ) -> Work | None:
        """Replaces a tensor by the sum of every rank's.

        Args:
            tensor: Any number of elements, contiguous.
            op: "sum" or "average"; added in float32, in rank order.
            async_op: Returns at once, with what to wait for.

        Raises:
            ShapeError: The tensor is not on this object's device, or has no sum.
        """
        self._check(tensor=tensor)
        check_summable(tensor.dtype, op == "average")
        if self._is_small(tensor):
            return _plain(dist.all_reduce(tensor, _reduce_op(op), self._group, async_op))
        flat = tensor.view(-1)
        length = -(-flat.numel() // self.num_ranks)
        parts = [flat[rank * length : (rank + 1) * length] for rank in range(self.num_ranks)]
        own = parts[self.rank]

        def run() -> None:
            what = f"all_reduce of {tensor.nbytes} bytes"
            used = self._reduce(what, parts, own, op == "average")
            used |= self.exchange(what, self._pieces([own] * self.num_ranks, parts))
            self._guard(tensor, used)

        return self._start(run, (tensor,), async_op)

    def empty(self, length: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Memory for the outputs of gathers, which peer copies write to without a detour.

        Collective. Each rank has to gather into the same part of what it got in the same call.

        Args:
            length: Elements, the same number on every rank.
            dtype: Their type.

        Returns:
            ``[length]``, not initialized; of no use after :meth:`close`.

        Raises:
            ShapeError: Ranks ask for other numbers of bytes.
            DeviceError: The GPU has no room.
        """
        nbytes = length * dtype.itemsize
        for link in self.links:
            memory = link.allocate(nbytes)
            if memory is not None:
                return memory.view(dtype)
        return torch.empty(length, dtype=dtype, device=self.device)

    def take_totals(self) -> dict[str, LinkTotals]:
        """What each link has carried since the last call, and the times that are known since."""
        taken = self._totals
        self._totals = {name: LinkTotals() for name in taken}
        return taken

    def close(self) -> None:
        """Waits for what is under way and ends the links. Collective while the group is there.

        Raises:
            FlashMoEError: A link has failed of which no call has told; the links have ended.
        """
        if self.device.type == "cpu":
            self._worker.shutdown()
        try:
            if self._broken is None:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                for link in self.links:
                    link.raise_if_broken()
                if self._control.can_meet():
                    # A rank that is still receiving must not find its peers gone.
                    self._control.gather(None)
        finally:
            self._broken = self._broken or LinkError("it has been closed")
            self._close_links()

    def _close_links(self) -> None:
        links, self.links = self.links, []
        with contextlib.ExitStack() as stack:  # an error of one leaves none of the others open
            for link in links:
                stack.callback(link.close)

    def __enter__(self) -> "Multipath":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _check(self, **tensors: torch.Tensor) -> None:
        """Refuses tensors that cannot take part, before anything is moved."""
        self._raise_if_broken()
        for name, tensor in tensors.items():
            if tensor.device != self.device:
                raise ShapeError(f"{name} is on {tensor.device}: wanted {self.device}")
            if not tensor.is_contiguous():
                raise ShapeError(f"{name} has strides {tensor.stride()}: wanted it contiguous")
        if len(dtypes := {tensor.dtype for tensor in tensors.values()}) > 1:
            raise ShapeError(f"tensors of {dtypes}: wanted one dtype")

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise LinkError(f"multipath is of no use since {self._broken}") from self._broken

    def _is_small(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes < max(self.min_bytes, 1)

    def _start(
        self, run: Callable[[], None], tensors: Sequence[torch.Tensor], async_op: bool
    ) -> Work | None:
        """Runs a collective: on CPUs in a thread, on GPUs in or behind the current stream."""
        if self.device.type == "cpu":
            future = self._worker.submit(self._noting_errors, run)
            work = Work(lambda: future.result(), tensors)
        else:
            index = self.device.index  # a number costs torch less than a device
            current = torch.cuda.current_stream(index)
            stream = self._stream if async_op else current
            # Links take calls one after the other, whichever streams these are in.
            for before in (current, self._last_stream):
                if before is not None and before != stream:
                    stream.wait_stream(before)
            self._last_stream = stream
            with torch.cuda.device(index):
                if not async_op:
                    self._noting_errors(run)
                    return None
                with torch.cuda.stream(stream):
                    self._noting_errors(run)
                    end = stream.record_event()
            for tensor in tensors:
                tensor.record_stream(stream)
            work = Work(lambda: self._wait_for(end), tensors)
        if async_op:
            return work
        work.wait()
        return None

    def _wait_for(self, end: torch.cuda.Event) -> None:
        for link in self.links:
            link.raise_if_broken()
        torch.cuda.current_stream(self.device.index).wait_event(end)

    def _noting_errors(self, run: Callable[[], None]) -> None:
        self._raise_if_broken()
        try:
            with torch.no_grad():  # a thread does not have its caller's mode
                run()
        except Exception as error:
            # Whatever it is: peers are in this call, and would take the next one's bytes for its.
            self._broken = (
                error if isinstance(error, FlashMoEError) else LinkError(reason_of(error))
            )
            for link in self.links:
                link.fail(self._broken)
            raise

    def _guard(self, output: torch.Tensor, links: set[Link]) -> None:
        if output.is_floating_point():
            for link in links:
                link.guard(output.view(-1))

    def _gather_of(self, output: torch.Tensor, input: torch.Tensor) -> "_Gather | None":
        """How a gather goes over links, ``None`` if it goes by torch.distributed."""
        key = (output.data_ptr(), input.data_ptr(), output.nbytes)
        if key in self._in_place:
            return self._in_place[key]
        if self._is_small(output):
            return None
        places = [link.place_of(output, input) for link in self.links]
        place = next(filter(None, places), None)
        what = f"all_gather of {output.nbytes} bytes"
        parts, own = output.view(-1).chunk(self.num_ranks), input.view(-1)
        if place is not None:
            # Peers write where they find the place, so that it has to be the same on all of them.
            what = f"{what} to {place.name}"
        pieces = self._pieces([own] * self.num_ranks, parts, place)
        if parts[self.rank].data_ptr() != own.data_ptr():
            return _Gather(what, pieces, lambda: parts[self.rank].copy_(own))
        gather = _Gather(what, pieces, None)
        if place is not None:  # this memory is there as long as the links are
            self._in_place[key] = gather
        return gather

    def _pieces(
        self,
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
        place: Place | None = None,
    ) -> list[Piece]:
        """What goes to and comes from each peer, the next rank first."""
        order = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        return [
            Piece(peer, _bytes_of(sends[peer]), _bytes_of(receives[peer]), place) for peer in order
        ]

    def _reduce(
        self, what: str, parts: Sequence[torch.Tensor], output: torch.Tensor, average: bool
    ) -> set[Link]:
        """Sends each rank its part and sums what comes of this rank's; gives the links used."""
        own = parts[self.rank]
        received = torch.empty((self.num_ranks, own.numel()), dtype=own.dtype, device=own.device)
        contributions = [own if rank == self.rank else received[rank] for rank in range(len(parts))]
        used = self.exchange(what, self._pieces(parts, contributions))
        sum_in_order(contributions, output, average)
        return used

    def exchange(
        self, what: str, pieces: Sequence[Piece], meanwhile: Callable[[], object] | None = None
    ) -> set[Link]:
        """Moves pieces over all links, by the shares of their size, behind the current stream.

        Args:
            what: Names it in messages, and is compared between ranks; at most 48 letters.
            pieces: One for every peer. The longest of each rank is as long as those of the others,
                so that all ranks cut at the same places.
            meanwhile: What the current stream, or this thread, does beside the transfer.

        Returns:
            The links that have carried something.
        """
        balancer = self._balancer_of(pieces)
        inbound = self._inbound(pieces)
        if not balancer.is_tuned(inbound):
            self.tune(inbound, pieces, what)
        length = inbound // (self.num_ranks - 1)
        carried, chunks, rates = self._route(balancer, length, balancer.shares(inbound))
        flights = self.fly(what, pieces, carried, chunks, rates, meanwhile)
        self._note(balancer, inbound, flights)
        return {link for link, flight in zip(self.links, flights, strict=True) if flight}

    def _inbound(self, pieces: Sequence[Piece]) -> int:
        """Bytes that a rank receives of all others, if all pieces are as long as the longest."""
        longest = max(max(piece.send.numel(), piece.receive.numel()) for piece in pieces)
        return longest * (self.num_ranks - 1)

    def _balancer_of(self, pieces: Sequence[Piece]) -> Balancer:
        return self.balancer if pieces[0].place is None else self.direct

    def _route_by(
        self, balancer: Balancer, length: int, shares: tuple[float, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...], list[float]]:
        """What :meth:`fly` wants to know of the links for pieces of a length."""
        models = balancer.models(length * (self.num_ranks - 1))
        rates = [model.rate for model in models]
        return tuple(cut(shares, length)), tuple(chunks_of(models, shares)), rates

    def fly(
        self,
        what: str,
        pieces: Sequence[Piece],
        carried: Sequence[int],
        chunks: Sequence[int],
        rates: Sequence[float],
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Flight | None]:
        """Moves so many bytes of every piece over each link; the current stream waits for it.

        Args:
            what: As in :meth:`exchange`.
            pieces: As there.
            carried: Bytes of every piece for each link.
            chunks: Bytes that each link moves at once.
            rates: Bytes per second of each link, by which it takes chunks of the rest; with 0 there
                is no rest.
            meanwhile: As in :meth:`exchange`.

        Returns:
            What each link did, ``None`` for those that had nothing to do.
        """
        self._number += 1
        parts, used, turns = _plan(tuple(carried), tuple(chunks))
        stream = torch.cuda.current_stream(self.device.index) if self._is_on_gpus else None
        started = stream and timed_event(stream)
        exchange = Exchange(self._number, what, pieces, parts, rates, stream, started)
        free = [index for index in used if self.links[index].takes_rest]
        ledger = None
        if free:
            takes_rest = 1 < len(used) == len(free) and all(rates[index] > 0 for index in used)
            ledger = Ledger(self.rank, exchange, free, takes_rest, self._control.timeout)
        flights: list[Flight | None] = [None] * len(carried)
        for index in used:
            flights[index] = self.links[index].begin(exchange, index, ledger)
        steps = [flight.steps() if flight else iter(()) for flight in flights]
        for index in turns:
            next(steps[index], None)
        for index in used:
            for _ in steps[index]:
                pass
        if meanwhile is not None:
            meanwhile()
        # Links with threads note their own ends, so it does no harm to wait for them last.
        for index in sorted(used, key=lambda index: self.links[index].takes_rest):
            flight = flights[index]
            assert flight is not None
            flight.join()
        return flights

    def tune(self, inbound: int, pieces: Sequence[Piece], what: str = "a trial") -> None:
        """Finds the shares of a size class by moving bytes. Collective.

        Args:
            inbound: Bytes that each rank receives of all others.
            pieces: What is moved for it, time and again.
            what: As in :meth:`exchange`.
        """
        idle = torch.empty((self.num_ranks + 1, GRAIN), dtype=torch.uint8, device=self.device)
        meeting = self._pieces([idle[-1]] * self.num_ranks, list(idle[:-1]))

        def measure(carried: Sequence[int], chunks: Sequence[int]) -> Sequence[float]:
            # The balancer counts what a rank receives of all peers, a link what it moves to each.
            scaled = [nbytes // (self.num_ranks - 1) for nbytes in carried]
            # Without rates there is no rest: a trial shows what each link does alone.
            rates = [0.0] * len(scaled)
            move = functools.partial(self.fly, what, pieces, scaled, chunks, rates)
            if self.device.type == "cpu":
                return greatest(self._control.gather(seconds_of(move())))
            # GPUs begin together, else a time has the lateness of a peer.
            first = [GRAIN if index == 0 else 0 for index in range(len(scaled))]
            self.fly("a meeting", meeting, first, [GRAIN] * len(scaled), rates)
            current = torch.cuda.current_stream(self.device.index)
            mark = functools.partial(timed_event, current)
            return one_of_a_row(move, mark, self._control.gather)

        self._balancer_of(pieces).tune(inbound, measure)
        self._route.cache_clear()

    def _slower(self, *names: str) -> str | None:
        """The slower one of two links that use the same wires, if both are there. Collective."""
        rivals = [index for index, link in enumerate(self.links) if link.name in names]
        if len(rivals) < 2:
            return None
        shape = (self.num_ranks + 1, _TRIAL_BYTES)
        empty = torch.empty(shape, dtype=torch.uint8, device=self.device)
        pieces = self._pieces([empty[-1]] * self.num_ranks, list(empty[:-1]))
        took = dict.fromkeys(rivals, math.inf)
        for index in rivals * 3:  # the first time also pays for what is made then
            carried = [_TRIAL_BYTES * (one == index) for one in range(len(self.links))]
            width = len(carried)
            flights = self.fly("a trial", pieces, carried, [CHUNKS[-1]] * width, [0.0] * width)
            flight = flights[index]
            assert flight is not None
            took[index] = min(took[index], *greatest(self._control.gather([flight.seconds()])))
        return self.links[max(rivals, key=lambda index: took[index])].name

    def _pays(self, gather: "_Gather", plain: Callable[[], object]) -> bool:
        """Whether links gather faster than torch.distributed; tried once for a size. Collective."""
        balancer, inbound = self._balancer_of(gather.pieces), self._inbound(gather.pieces)
        key = balancer, size_class(inbound)
        if key not in self._faster:
            ours = functools.partial(self.exchange, *gather)
            ours()  # which tunes
            mark = functools.partial(timed_event, torch.cuda.current_stream(self.device.index))
            rounds = [(row_of(ours, mark)[1], row_of(plain, mark)[1]) for _ in range(_ROUNDS)]
            own = [statistics.median(column) for column in zip(*rounds, strict=True)]
            by_links, by_plain = greatest(self._control.gather(own))
            self._faster[key] = by_links <= by_plain
        return self._faster[key]

    def _note(self, balancer: Balancer, inbound: int, flights: list[Flight | None]) -> None:
        """Hands times to the balancer, a window at a time and after all ranks have agreed."""
        for link, flight in zip(self.links, flights, strict=True):
            self._totals[link.name].nbytes += flight.num_bytes() if flight else 0
        for seconds, moved in self._times[balancer, size_class(inbound)].add(flights):
            balancer.observe(inbound, seconds)
            for name, one, nbytes in zip(self._totals, seconds, moved, strict=True):
                self._totals[name].seconds += one
                self._totals[name].timed_bytes += nbytes


class _Times:
    """The times of the transfers of a size class, until all ranks have agreed on them.

    The times of some windows are asked for when the next ones are full, so that nobody waits for a
    transfer, and used when those after them are, so that nobody waits for a rank.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._window: list[list[Flight | None]] = []
        self._full: list[list[Flight | None]] = []
        self._asked: tuple[Answers[list[float]] | None, list[float], list[list[int]]] | None = None

    def add(self, flights: list[Flight | None]) -> Iterator[tuple[Sequence[float], Sequence[int]]]:
        """Takes a transfer's flights; gives times and bytes of earlier ones, when it is time."""
        self._window.append(flights)
        if len(self._window) < _WINDOWS * WINDOW:
            return
        if self._asked is not None:
            asked, values, moved = self._asked
            if asked is not None:
                values = greatest(asked.wait())
            width = len(flights)
            for index, nbytes in enumerate(moved):
                yield values[index * width : (index + 1) * width], nbytes
            self._asked = None
        if self._full:
            values = [one for row in self._full for one in seconds_of(row)]
            moved = [[one.num_bytes() if one else 0 for one in row] for row in self._full]
            # Times of one link alone move nothing, so that nobody has to agree on them.
            alone = all(sum(flight is not None for flight in row) == 1 for row in self._full)
            self._asked = (None if alone else self._control.ask(values), values, moved)
        self._full, self._window = self._window, []


@functools.lru_cache(maxsize=64)
def _plan(
    carried: tuple[int, ...], chunks: tuple[int, ...]
) -> tuple[list[Part], list[int], list[int]]:
    """Each link's part, the links that carry some, and these in the order of their chunks.

    The link that is least advanced is next: with one hardware queue, chunks of several links then
    run beside each other.
    """
    ends = list(itertools.accumulate(carried))
    spans = zip(carried, ends, chunks, strict=True)
    parts = [Part(end - nbytes, end, chunk) for nbytes, end, chunk in spans]
    counts = [-(-nbytes // chunk) for nbytes, chunk in zip(carried, chunks, strict=True)]
    moments = [(turn / count, link) for link, count in enumerate(counts) for turn in range(count)]
    used = [index for index, nbytes in enumerate(carried) if nbytes]
    return parts, used, [link for _, link in sorted(moments)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _reduce_op(op: Reduction) -> Any:
    return dist.ReduceOp.AVG if op == "average" else dist.ReduceOp.SUM


def _plain(work: Any) -> Work | None:
    """The work of torch.distributed, if there is one, as one of ours."""
    return None if work is None else Work(work.wait, ())


def _uneven(
    what: str, name: str, whole: torch.Tensor, num_ranks: int, part: torch.Tensor
) -> ShapeError:
    return ShapeError(
        f"{what}: {name} has {whole.numel()} elements, wanted {num_ranks} times the "
        f"{part.numel()} of the other tensor"
    )
