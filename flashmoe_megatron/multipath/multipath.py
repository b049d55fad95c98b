"""Collectives whose bytes go over all links of a machine at once."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from flashmoe_megatron.config import (
    DEFAULT_TIMEOUT,
    MAX_TIMEOUT,
    MIN_TIMEOUT,
    check_class,
    is_number,
    is_word,
)
from flashmoe_megatron.ending import EndsWithGroup, ends_with
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    LinkError,
    ShapeError,
    reason_of,
)
from flashmoe_megatron.multipath.balancer import GRAIN, LEAST_GAIN, size_class
from flashmoe_megatron.multipath.choose import MakeLink, make_links, queues_of
from flashmoe_megatron.multipath.links import Link, Place
from flashmoe_megatron.multipath.queues import Moment, Queue, Queues
from flashmoe_megatron.multipath.reductions import Inbox, check_summable, sum_in_order
from flashmoe_megatron.multipath.transfers import LinkTotals, Load, Transfers
from flashmoe_megatron.multipath.trials import Comparison
from flashmoe_megatron.multipath.watchdog import Call, Watchdog
from flashmoe_megatron.ranks import StoreRanks, check_member
from flashmoe_megatron.streams import index_of

MIN_BYTES = 64 * 2**20
"""Smaller tensors go by torch.distributed alone, since several links do not pay."""

MIN_MAPPED_BYTES = 16 * 2**20
"""The same for gathers into memory that peers write to without a detour."""

MOST_SUMMED = 2
"""More ranks leave sums to torch.distributed: four took 20 per cent longer over links than by NCCL.
Trials cannot decide, since NCCL's sums have other bits, and a training would depend on chance."""

Reduction = Literal["sum", "average"]
_UNWATCHED: AbstractContextManager[None] = contextlib.nullcontext()


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


class Multipath(EndsWithGroup):
    """Gathers and reduces over all links between the ranks of a group.

    Making one is collective, and so is every call; ranks make the same calls in the same order. The
    first call of a size class tries shares for at most a second or two.

    Args:
        group: The ranks, at least 2; ``None`` for all. What is small goes over this group.
        device: Where tensors are; by default the current GPU, if there is one.
        links: "auto", or links by name or as functions that make them; see
            :func:`~flashmoe_megatron.multipath.choose.make_links`.
        min_bytes: Tensors below this size go by torch.distributed; gathers into memory of
            :meth:`empty` and :meth:`share` only below 16 MiB if that is less.
        least_gain: How much faster several links have to be than the best one alone, by themselves,
            to be used: 0.03 is three per cent. During other work a link costs more than its time.
        timeout: Seconds without progress that end a call with an error.
        queues: They copy and wait; by default the device's.
        watch: A call that takes more seconds gets a line in the log, which says how far each rank
            has come with it, and the place of this rank's program; ``None`` for no lines. The ranks
            have to share a host.

    Attributes:
        transfers: Moves bytes over the links, and has their shares.
        sums_over_links: Whether reductions go over links: between two ranks, or over links that
            were asked for by name.

    Raises:
        ConfigError: The group, the device or a link's name is of no use, or ranks differ in
            ``watch``.
        FlashMoEError: A link cannot be made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        links: str | Sequence[str | MakeLink] = "auto",
        min_bytes: int = MIN_BYTES,
        least_gain: float = LEAST_GAIN,
        timeout: float = DEFAULT_TIMEOUT,
        queues: Queues | None = None,
        watch: float | None = None,
    ) -> None:
        if watch is not None and not is_number(watch, least=MIN_TIMEOUT, most=MAX_TIMEOUT):
            raise ConfigError(
                f"watch is {watch!r}: wanted None, or seconds above 0, {MIN_TIMEOUT:g} to "
                f"{MAX_TIMEOUT:g}"
            )
        check_class("device", device, (torch.device, type(None)), "a torch.device, or None")
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device("cuda", index_of(device)) if device.type == "cuda" else device
        self.min_bytes = min_bytes
        self._ranks = _ranks_of(group, timeout)
        self._group = self._ranks.group
        self.rank, self.num_ranks = self._ranks.rank, self._ranks.num_ranks
        self._queues = queues or queues_of(self.device)
        self._ranks.check_same({"watch": watch})
        made = make_links(self._ranks, self._queues, links)
        if not made:
            raise ConfigError(f"no link can be made between the {self.num_ranks} ranks")
        is_auto = links == "auto"
        self.sums_over_links = not is_auto or self.num_ranks <= MOST_SUMMED
        self.transfers = Transfers(
            self._ranks, self._queues, made, leaves_out_slower=is_auto, least_gain=least_gain
        )
        compares = is_auto and device.type == "cuda"  # links asked for by name are used
        self._comparison = Comparison(self._ranks, self._queues) if compares else None
        self._ranks.look = self._raise_if_a_link_is_broken
        self._broken: FlashMoEError | None = None
        self._stream = self._queues.beside()
        self._last_stream: Queue | None = None
        self._in_place: dict[tuple[Any, ...], Load] = {}
        self._can_share = True
        self._shared: set[tuple[int, int]] = set()
        self._inbox = Inbox(made, self._queues)
        self._watchdog = None if watch is None else self._watchdog_of(watch)
        ends_with(self._group, self)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False
    ) -> Work | None:
        """Gathers every rank's input, in rank order.

        Args:
            output: ``[num_ranks * n]`` elements in any shape, contiguous.
            input: ``[n]`` elements, contiguous; may be this rank's part of the output.
            async_op: Returns at once, with an object to wait for.

        Raises:
            ShapeError: The tensors do not fit each other or this object's device.
        """
        gather = self._gather_of(output, input)
        plain = functools.partial(dist.all_gather_into_tensor, output, input, self._group)
        if gather is None:
            return self._by_torch("all_gather", output, plain, async_op)
        key = gather.balancer, size_class(gather.inbound)
        links = functools.partial(self.transfers.exchange, gather)

        def run() -> None:
            if self._comparison is None or self._comparison.is_won(key, links, plain):
                self._guard(output, links())
            else:
                plain()

        return self._start("all_gather", run, (output, input), async_op)

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
            async_op: Returns at once, with an object to wait for.

        Raises:
            ConfigError: There is no such ``op``.
            ShapeError: The tensors do not fit each other or this object's device, or have no sum.
        """
        _check_op(op)
        self._check(output=output, input=input)
        check_summable(input.dtype, op == "average")
        if input.numel() != self.num_ranks * output.numel():
            raise _uneven("reduce_scatter", "input", input, self.num_ranks, output)
        if self._is_small(input) or not self.sums_over_links:
            plain = functools.partial(
                dist.reduce_scatter_tensor, output, input, _reduce_op(op), self._group
            )
            return self._by_torch("reduce_scatter", input, plain, async_op)
        parts = input.view(-1).chunk(self.num_ranks)
        target = output.view(-1)

        def run() -> None:
            what = f"reduce_scatter of {input.nbytes} bytes"
            self._guard(output, self._reduce(what, parts, target, op == "average"))

        return self._start("reduce_scatter", run, (input, output), async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: Reduction = "sum", async_op: bool = False
    ) -> Work | None:
        """Replaces a contiguous tensor of any size by the sum of every rank's.

        The other arguments and errors are those of :meth:`reduce_scatter`.
        """
        _check_op(op)
        self._check(tensor=tensor)
        check_summable(tensor.dtype, op == "average")
        if self._is_small(tensor) or not self.sums_over_links:
            plain = functools.partial(dist.all_reduce, tensor, _reduce_op(op), self._group)
            return self._by_torch("all_reduce", tensor, plain, async_op)
        flat = tensor.view(-1)
        length = -(-flat.numel() // self.num_ranks)
        parts = [flat[rank * length : (rank + 1) * length] for rank in range(self.num_ranks)]
        own = parts[self.rank]

        def run() -> None:
            what = f"all_reduce of {tensor.nbytes} bytes"
            used = self._reduce(what, parts, own, op == "average")
            place = self._gathered_in(flat, length * flat.element_size())
            what = _to(place, what)
            pieces = self.transfers.pieces(own, parts, place)
            used |= self.transfers.exchange(self.transfers.load(what, pieces))
            self._guard(tensor, used)

        return self._start("all_reduce", run, (tensor,), async_op)

    def empty(self, length: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Memory for the outputs of gathers, which peer copies write to without a detour.

        Collective. Each rank has to gather into the same part of the memory that one call gave it.

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
        self._noting_errors(lambda: self.transfers.announce("empty"))
        for link in self.transfers.links:
            memory = link.allocate(nbytes)
            if memory is not None:
                return memory.view(dtype)
        return torch.empty(length, dtype=dtype, device=self.device)

    def share(self, tensor: torch.Tensor) -> bool:
        """Lets peers write into a tensor's memory without a detour, as into that of :meth:`empty`.

        Collective; ranks share the same tensors in the same order. The memory is kept until
        :meth:`close`, even if its other users have released it.

        Args:
            tensor: Contiguous, with the same number of bytes on every rank. Each rank has to gather
                into the same part of it. Its storage must not be resized.

        Returns:
            Whether they can. Other processes cannot map memory of torch's expandable segments or of
            other pools than torch's own; gathers into it go as before, and no rank is asked again.

        Raises:
            ShapeError: Ranks have other numbers of bytes.
        """
        key = (tensor.data_ptr(), tensor.nbytes)
        # One refusal is enough: every rank has it, and to ask again takes a millisecond.
        if self._can_share and key not in self._shared:
            self._check(tensor=tensor)
            with self._watched("share", tensor):
                self._noting_errors(lambda: self.transfers.announce("share"))
                self._can_share = any(link.share(tensor) for link in self.transfers.links)
            if self._can_share:
                self._shared.add(key)
        return key in self._shared

    def take_totals(self) -> dict[str, LinkTotals]:
        """Returns the bytes of each link since the last call, and the times that became known."""
        return self.transfers.take_totals()

    def close(self) -> None:
        """Waits for calls under way and ends the links. Collective while the group is there.

        Raises:
            FlashMoEError: A link has failed, which no call has reported; the links have ended.
        """
        is_open = self._broken is None
        try:
            self.leave()
            if is_open and self._ranks.can_meet():
                # A rank that is still receiving must not find its peers gone.
                self._ranks.gather(None)
        finally:
            self.free()

    def leave(self) -> None:
        """See the base class."""
        try:
            if self._broken is None:
                self._queues.synchronize()
                self._raise_if_a_link_is_broken()
        finally:
            self._broken = self._broken or LinkError("it has been closed")
            self._ranks.look = lambda: None  # links that have been left are no failures
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None
            self.transfers.leave()
            self._ranks.leave()

    def is_left(self) -> bool:
        """See the base class."""
        return self._ranks.is_left()

    def free(self) -> None:
        """See the base class."""
        self._in_place.clear()
        self.transfers.close()
        self._queues.close()

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

    def _watchdog_of(self, watch: float) -> Watchdog:
        try:
            return Watchdog(self._ranks, watch)
        except BaseException:
            self.transfers.close()
            raise

    def _watched(self, name: str, whole: torch.Tensor) -> AbstractContextManager[Call | None]:
        """Encloses a call on the current queue for the watchdog, if there is one.

        Without a watchdog it takes the look at one attribute.
        """
        if self._watchdog is None:
            return _UNWATCHED
        begun = self._queues.current().record_event()
        return self._watchdog.call(f"{name} of {whole.nbytes} bytes", begun.query)

    def _by_torch(
        self, name: str, whole: torch.Tensor, run: Callable[[bool], Any], async_op: bool
    ) -> Work | None:
        """Runs a collective of torch.distributed."""
        with self._watched(name, whole) as call:
            work = run(async_op)
            if call is not None:
                is_over = self._queues.current().record_event().query
                call.is_over = is_over if work is None else work.is_completed
        return None if work is None else Work(work.wait, ())

    def _start(
        self,
        name: str,
        run: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Work | None:
        """Issues a collective in the current queue, or in one concurrent with it.

        The first one of the tensors has the bytes of all ranks.
        """
        queues = self._queues
        current = queues.current()
        stream = self._stream if async_op else current
        # Links take calls one after the other, whichever streams these are in.
        for before in (current, self._last_stream):
            if before is not None and before is not stream:
                stream.wait_stream(before)
        self._last_stream = stream
        with queues.here():
            if not async_op:
                with self._watched(name, tensors[0]) as call:
                    self._noting_errors(run)
                    if queues.host_waits:
                        self._wait_for(stream.record_event())
                    elif call is not None:
                        call.is_over = stream.record_event().query
                return None
            with queues.within(stream), self._watched(name, tensors[0]) as call:
                self._noting_errors(run)
                end = stream.record_event()
                if call is not None:
                    call.is_over = end.query
        queues.keep(tensors, stream)
        return Work(lambda: self._wait_for(end), tensors)

    def _raise_if_a_link_is_broken(self) -> None:
        self._queues.raise_if_failed()
        for link in self.transfers.links:
            link.raise_if_broken()

    def _wait_for(self, end: Moment) -> None:
        if self._queues.host_waits:
            end.synchronize()
            self._noting_errors(self._raise_if_a_link_is_broken)
        else:
            self._raise_if_a_link_is_broken()
            self._queues.current().wait_event(end)

    def _noting_errors(self, run: Callable[[], None]) -> None:
        self._raise_if_broken()
        try:
            run()
        except Exception as error:
            # Whatever it is: peers are in this call, and would take the next one's bytes for its.
            self._broken = (
                error if isinstance(error, FlashMoEError) else LinkError(reason_of(error))
            )
            for link in self.transfers.links:
                link.fail(self._broken)
            raise

    def _guard(self, output: torch.Tensor, used: set[Link]) -> None:
        """Marks an output if a link fails that has brought some of it: all fail with it."""
        if output.dtype.is_floating_point:
            with torch.no_grad():
                any(link.guard(output.view(-1)) for link in used)

    def _gather_of(self, output: torch.Tensor, input: torch.Tensor) -> Load | None:
        """The plan of a gather over links, ``None`` if it goes by torch.distributed."""
        lengths, dtypes = (output.numel(), input.numel()), (output.dtype, input.dtype)
        key = (output.data_ptr(), input.data_ptr(), lengths, dtypes)
        known = self._in_place.get(key)
        # To look at all else once more would take the host as long as a call of the driver.
        if known is not None and output.is_contiguous() and input.is_contiguous():
            return known
        self._check(output=output, input=input)
        if output.numel() != self.num_ranks * input.numel():
            raise _uneven("all_gather", "output", output, self.num_ranks, input)
        if output.nbytes < min(max(self.min_bytes, 1), MIN_MAPPED_BYTES):
            return None
        place = self._gathered_in(output, input.nbytes)
        if place is None and self._is_small(output):
            return None
        what = _to(place, f"all_gather of {output.nbytes} bytes")
        parts, own = output.view(-1).chunk(self.num_ranks), input.view(-1)
        pieces = self.transfers.pieces(own, parts, place)
        if parts[self.rank].data_ptr() != own.data_ptr():
            return self.transfers.load(what, pieces, lambda: _copy(own, parts[self.rank]))
        gather = self.transfers.load(what, pieces)
        if place is not None:  # this memory is there as long as the links are
            self._in_place[key] = gather
        return gather

    def _gathered_in(self, whole: torch.Tensor, nbytes: int) -> Place | None:
        """The places of this rank's part of a gather at peers; parts are so many bytes apart."""
        return self._place_in(whole, dict.fromkeys(range(self.num_ranks), nbytes * self.rank))

    def _place_in(self, whole: torch.Tensor, offsets: Mapping[int, int]) -> Place | None:
        """The places at peers that this rank sends to, if they can be written to."""
        places = (link.place_of(whole, offsets) for link in self.transfers.links)
        return next(filter(None, places), None)

    @torch.no_grad()
    def _reduce(
        self, what: str, parts: Sequence[torch.Tensor], output: torch.Tensor, average: bool
    ) -> set[Link]:
        """Sends each rank its part and sums what comes of this rank's; gives the links used."""
        own, others = parts[self.rank], [rank for rank in range(len(parts)) if rank != self.rank]
        # The last part may be shorter than the others.
        slot = -(-parts[0].nbytes // GRAIN) * GRAIN
        announce = functools.partial(self.transfers.announce, what)
        inbox = self._inbox.take(slot * len(others), announce)
        received = {
            rank: inbox[index * slot :][: own.nbytes].view(own.dtype)
            for index, rank in enumerate(others)
        }
        # A rank's slot is among those of a peer, which has none for itself.
        offsets = {rank: slot * (self.rank - (self.rank > rank)) for rank in others}
        place = self._place_in(inbox, offsets)
        contributions = [received.get(rank, own) for rank in range(len(parts))]
        pieces = self.transfers.pieces(parts, contributions, place)
        used = self.transfers.exchange(self.transfers.load(what, pieces))
        self._queues.do(functools.partial(sum_in_order, contributions, output, average))
        return used


def _ranks_of(group: dist.ProcessGroup | None, timeout: float) -> StoreRanks:
    """The ranks of a group, which agree through the job's store."""
    if not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: wanted a process group")
    check_member(group)
    whole = group or dist.group.WORLD
    assert whole is not None
    if dist.get_world_size(whole) < 2:
        raise ConfigError("the group has one rank: wanted at least 2, between which links are")
    return StoreRanks(whole, timeout, purpose="multipath")


def _to(place: Place | None, what: str) -> str:
    """An operation and its place: peers write where they find it, so that all have to be alike."""
    return what if place is None else f"{what} to {place.name}"


@torch.no_grad()
def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _check_op(op: object) -> None:
    if not is_word(op, get_args(Reduction)):
        raise ConfigError(f"op is {op!r}, wanted one of {', '.join(get_args(Reduction))}")


def _reduce_op(op: Reduction) -> Any:
    return dist.ReduceOp.AVG if op == "average" else dist.ReduceOp.SUM


def _uneven(
    what: str, name: str, whole: torch.Tensor, num_ranks: int, part: torch.Tensor
) -> ShapeError:
    return ShapeError(
        f"{what}: {name} has {whole.numel()} elements, wanted {num_ranks} times the "
        f"{part.numel()} of the other tensor"
    )
