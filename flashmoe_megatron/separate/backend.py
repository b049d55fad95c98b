"""The backend of separate kernels of torch and NCCL, cut into parts that overlap.

It has two names: "scheduled", and "reference" with plain steps in one part. Every expert's rows are
cut into as many parts as the degree says. While one part is computed, the next ones arrive and
results of the last ones leave. Gradients of weights are computed over all rows at once, after the
last part, while gradients of tokens leave.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.call import Backend, Given, Grads, Together, TrafficCounters
from flashmoe_megatron.checks import check_grad_out
from flashmoe_megatron.config import MoEConfig, check_class
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hooks import UNHEARD, Call, Expert, Point, of_part
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.low_rank import Factors
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.planner import bounded_row_blocks, choose_keep
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.replicas.placement import Placement
from flashmoe_megatron.separate.agreement import Agreement, ranks_of
from flashmoe_megatron.separate.exchange import Counts, Exchange, Slot, make_exchange
from flashmoe_megatron.separate.own_experts import OwnExperts
from flashmoe_megatron.separate.parts import BackwardParts, ForwardParts, Pair, Summands, is_any
from flashmoe_megatron.separate.plan import (
    Padded,
    Part,
    Routes,
    Sizes,
    Sorted,
    Table,
)
from flashmoe_megatron.separate.precision import precision_of, precision_of_gradients
from flashmoe_megatron.separate.records import IN_PARTS, Laps, Records
from flashmoe_megatron.separate.replicas import Replicas, add_replica_grads, with_replicas
from flashmoe_megatron.separate.slices import GradientSlices
from flashmoe_megatron.separate.steps import (
    PLAIN,
    Steps,
    bias_grad,
    of_wanted,
    store,
)
from flashmoe_megatron.separate.ways import TensorGroup, Way, Ways, arrived, returned
from flashmoe_megatron.streams import Lane, Mark
from flashmoe_megatron.telemetry.record import LaunchRecord, read_launch_number
from flashmoe_megatron.weights import VECTOR, ExpertWeights


@dataclass(frozen=True)
class _Saved:
    """State for backward; rows are in the order of experts, for any degree.

    Attributes:
        routes: The routes.
        all_counts: ``[source][expert]`` of the group, if the exchange needs them.
        probs_shape: The probabilities', and so their gradient's.
        rows: The experts' rows of tokens, as they have travelled, if they are kept.
        x: The tokens as they travel, if a backward fetches their rows again.
        row_probs: ``[rows]``, their routing weights.
        preact: ``[rows, fc1_rows]``, the first projection's outputs.
        layer: The number that the caller gave the layer.
        placement: Where replicas are, ``None`` where there are no spare slots.
        expert: The user's own that computed the rows, ``None`` for the layer's FFN.
    """

    routes: Routes
    all_counts: Table | None
    probs_shape: torch.Size  # a plain tuple would be searched for tensors
    rows: torch.Tensor | None
    x: torch.Tensor | None
    row_probs: torch.Tensor
    preact: torch.Tensor
    layer: int
    placement: Placement | None
    expert: Expert | None = None


class SeparateBackend(Backend):
    """Routed experts in parts; implements :class:`~flashmoe_megatron.call.Backend`.

    Rows travel unpadded and nothing is dropped. The host waits once in a forward, for the counts of
    rows, and never in a backward. Products are in ``x.dtype``; activations, routing weights and
    sums over routes are in float32 (float64 if ``x`` is). Calls of one degree repeat their bits.

    Attributes:
        degrees: Parts in forward and in backward.
        slices: What is reduced in a backward's gaps, ``None`` for nothing.
    """

    def __init__(
        self,
        config: MoEConfig,
        ranks: Ranks,
        exchange: Exchange,
        *,
        options: BackendOptions,
        device: torch.device,
        moments: frozenset[str],
        degrees: tuple[int, int] = (1, 1),
        tensor: TensorGroup | None = None,
        replicas: Replicas | None = None,
        takes_split: bool = False,
    ) -> None:
        """Puts a layer together.

        Rows travel between ``ranks`` by ``exchange``, and between the ranks of ``tensor`` if they
        share each expert. Tokens will be on ``device``. Records have these ``moments`` of calls, or
        there are none. There are as many parts in forward and in backward as ``degrees`` say.
        """
        keep = choose_keep(options.keep, config)
        super().__init__(config, keep=keep, rank=ranks.rank, takes_split=takes_split)
        self.degrees = degrees
        self.slices: GradientSlices | None = None
        self._device, self._tensor, self._replicas = device, tensor, replicas
        self._exchange = exchange
        if replicas is not None:
            self.spare_slots = options.filled_slots
        self._precision, self._of_gradients = precision_of(config), precision_of_gradients(config)
        most_blocks = None
        if options.row_bound is not None:
            most_blocks = bounded_row_blocks(config, options.row_bound, options.filled_slots)
        self._agreement = Agreement(
            config,
            ranks,
            tensor,
            exchange,
            most_blocks=most_blocks,
            tells_all=replicas is not None,
        )
        self._ways = Ways(exchange, tensor, config.num_ranks, travels=not self._agreement.is_alone)
        self._records = Records(config, self.rank, moments)

    @property
    def traffic(self) -> TrafficCounters:
        """Counts of the rows that this rank has sent and padded so far."""
        return self._exchange.traffic

    @property
    def streams(self) -> dict[str, Lane]:
        """The streams on which rows travel between ranks, by name."""
        return self._exchange.lanes

    def take_records(self) -> list[LaunchRecord]:
        """Takes what is known of the calls that have ended; see the base class.

        Phases follow each other on the current stream: the plan, the parts with their waits, and
        the end.
        """
        return self._records.take()

    @torch.no_grad()
    def _forward(self, given: Given, weights: ExpertWeights) -> tuple[torch.Tensor, Any]:
        config = self.config
        self._exchange.restart()
        has_hooks, has_pads = bool(self.hooks), self.hooks.has("padding")
        call = Call.of("forward", given.layer) if has_hooks else UNHEARD
        with Together(self):
            self._check(given, weights)
            laps = self._records.begin(given.x.device)
            given = self._routed(given)
            self._check_own(weights)
            pad_value = self.hooks.pad_value(call) if has_pads else 0.0
        x, probs, routing_map, training, followed, layer, _, _, trains_fc1, _ = given
        self._device = x.device
        self.num_calls += 1
        steps = self._steps_for(x)
        found = steps.sort_routes(config, probs, routing_map)
        degree = self.degrees[0]
        if self._needs_no_counts(weights, found, degree, steps.is_grouped(x)):
            return self._forward_alone(found, given, weights, laps)
        heard, placement = self._agreement.tell(found.counts, followed=followed), None
        if self._replicas is not None:
            found, heard, placement = self._replicas.place(self._agreement, found, heard, layer)
        cut = steps.cut_routes(found.token_idx, found.place, found.ends, degree)
        probs_ready = self._ways.ready(x)  # the rows, which follow, take longer to collect
        tokens = self._precision.pack(x)
        every, ready = self._ways.collect(tokens, cut.token_idx, degree, self.hooks.order)
        routes, all_counts = self._agreement.plan(heard, found, probs, routing_map, self.attempts)
        self.unfollowed = self._agreement.unfollowed
        routes.cuts[degree] = cut
        self._count_pads(routes)
        moved = 0
        if placement is not None:
            weights, moved = with_replicas(self._exchange, weights.per_expert(), placement)
        laps.lap("plan")
        sizes, counts, whole_size, total = self._sizes(routes, all_counts, degree)
        num_routes = len(routes.token_idx)
        of_probs = self._ways.there(found.row_probs[:num_routes], total, whole_size, probs_ready)
        ways = [
            self._dispatch(send, count, size, of_part(call, i), moment)
            for i, (send, count, size, moment) in enumerate(
                zip(_of_parts(every[:num_routes], sizes), counts, sizes, ready, strict=True)
            )
        ]
        parts, whole = routes.parts(degree, steps.index_rows)
        row_probs = arrived(of_probs, whole)
        laps.lap("dispatch")

        expert = self.hooks.expert
        own = None if expert is None else OwnExperts(expert, weights)
        experts = ForwardParts(config, steps, self._precision, weights, row_probs, own)
        keeps_rows = training and self._keeps_rows(trains_fc1)
        room = self._ways.room(counts, x)
        back: list[Way] = []
        for i, (part, count, way) in enumerate(zip(parts, counts, ways, strict=True)):
            call = of_part(call, i)
            mine = self._rows_of_experts(way, part, call)
            weight = experts.probs_of(part)
            if has_pads:
                mine, out_rows, pre = self._compute_padded(
                    experts, mine, weight, part, call, pad_value
                )
            else:
                numbers = self._precision.unpack(mine)
                out_rows, pre = experts.compute(numbers, weight, part)
            experts.add_second_bias(out_rows, weight, part)
            laps.lap("products")
            back.append(self._combine(out_rows, part, count, call, room and room.slots[i]))
            experts.keep(part, pre if training else None, mine if keeps_rows else None)
        laps.lap("parts")
        out = self._restored(steps, returned(back, room), cut.place)
        if has_hooks:
            out = self.hooks.run("after", "combine", out, Call.of("forward", layer))
        laps.lap("combine")
        self._records.end(
            laps,
            routes,
            layer,
            "forward",
            num_tokens=len(x),
            placement=placement,
            replica_bytes=moved,
        )
        if not training:
            return out, None
        preact = experts.preact
        if preact is None:  # an own expert's are its own
            preact = x.new_empty(0)
        kept, shape, rows = self._fetches_again(trains_fc1), probs.shape, experts.rows
        return out, _Saved(
            routes,
            all_counts,
            shape,
            rows,
            tokens if kept else None,
            row_probs,
            preact,
            layer,
            placement,
            expert,
        )

    def _compute_padded(
        self,
        experts: ForwardParts,
        mine: torch.Tensor,
        weight: torch.Tensor,
        part: Part,
        call: Call,
        pad_value: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Computes a part's rows with pads, which hooks after padding see.

        Returns the rows as they travel, which these hooks may have replaced, their outputs and the
        first projection's, all without pads.
        """
        padded = Padded.of(part, call.block)
        shown = padded.fill(self._precision.unpack(mine), pad_value)
        numbers = self.hooks.run("after", "padding", shown, call)
        if numbers is not shown:
            mine = self._precision.pack(padded.without_pads(numbers))
        out_rows, pre = experts.compute(numbers, padded.fill(weight, 0.0), padded.part)
        out_rows = padded.without_pads(out_rows)
        return mine, out_rows, None if pre is None else padded.without_pads(pre)

    def _keeps_rows(self, trains_fc1: bool) -> bool:
        """Tells whether experts' rows are kept; those in slots may be trained elsewhere."""
        is_read = trains_fc1 or self._replicas is not None or self.hooks.expert is not None
        return self.keep != "preactivations" and is_read

    def _fetches_again(self, trains_fc1: bool) -> bool:
        """Tells whether a backward fetches rows again: on all ranks, as one may need them."""
        is_read = trains_fc1 or not self._is_alone or self.hooks.expert is not None
        return self.keep == "preactivations" and is_read

    def _needs_no_counts(
        self, weights: ExpertWeights, found: Sorted, degree: int, is_grouped: bool
    ) -> bool:
        """Returns whether a forward can be issued before the host knows how many rows there are."""
        return (
            self._agreement.is_alone
            and degree == 1
            and self._agreement.most_blocks is None
            and not self.hooks
            and not weights.fc1_bias
            and not weights.fc2_bias
            and len(found.token_idx) > 0
            and is_grouped
        )

    def _forward_alone(
        self,
        found: Sorted,
        given: Given,
        weights: ExpertWeights,
        laps: Laps,
    ) -> tuple[torch.Tensor, _Saved | None]:
        """One rank's forward in one part, for whose counts the host waits when all is issued.

        Rows are as many as there can be; none is read that no expert has.
        """
        x, probs, routing_map, training, _, layer, _, _, trains_fc1, _ = given
        config, steps = self.config, self._steps_for(x)
        counts = self._agreement.host_counts(found.counts)
        laps.lap("plan")
        precision = self._precision
        fc1, fc2 = steps.matrices(precision.weights(weights))
        tokens = precision.pack(x)
        rows = tokens.index_select(0, found.token_idx)
        preact = steps.product(precision.unpack(rows), fc1, found.ends, ())
        activated = precision.between(steps.weighted_activation(config, preact, found.row_probs))
        out_rows = steps.product(activated, fc2, found.ends, ())
        laps.lap("parts")
        out = steps.sum_routes(out_rows, found.place)
        laps.lap("combine")
        routes = self._agreement.plan_alone(counts(), found, probs, routing_map)
        self._records.end(laps, routes, layer, "forward", num_tokens=len(x))
        if not training:
            return out, None
        num = routes.num_rows
        return out, _Saved(
            routes,
            None,
            probs.shape,
            rows[:num] if self._keeps_rows(trains_fc1) else None,
            tokens if self._fetches_again(trains_fc1) else None,
            found.row_probs[:num],
            preact[:num],
            layer,
            None,
        )

    def refuse(self, reason: str) -> None:
        """Ends the other ranks' forward at once; see the base class.

        Raises:
            FlashMoEError: The error that has ended the exchange; they know it themselves.
        """
        self._exchange.raise_if_broken()
        if self._replicas is not None:
            self._replicas.forget()
        self.num_calls += 1
        self._agreement.refuse(reason, self._device)

    @property
    def _is_alone(self) -> bool:
        """See the base class; ranks that share experts take part, too."""
        return self._agreement.is_alone

    @torch.no_grad()
    def _backward(
        self,
        grad_out: torch.Tensor,
        saved: Any,
        weights: ExpertWeights,
        grads: Grads,
        factors: Factors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        check_grad_out(config, grad_out, saved.probs_shape[0])
        written, is_void = self._writable(weights, grads)
        laps = self._records.begin(grad_out.device)
        self._exchange.restart()
        routes: Routes = saved.routes
        degree, steps = self.degrees[1], self._steps_for(grad_out)
        if degree not in routes.cuts:
            routes.cuts[degree] = steps.cut_routes(
                routes.token_idx, routes.place, routes.ends, degree
            )
        cut, num_routes = routes.cuts[degree], len(routes.token_idx)
        sizes, counts, whole_size, total = self._sizes(routes, saved.all_counts, degree)
        laps.lap("plan")
        call, again = Call.of("backward", saved.layer), Call.of("forward", saved.layer)
        token_idx = _of_parts(cut.token_idx[:num_routes], sizes)
        packed = self._of_gradients.pack(grad_out)
        ways = [
            self._dispatch(self._ordered(packed, tokens), count, size, of_part(call, i))
            for i, (tokens, count, size) in enumerate(zip(token_idx, counts, sizes, strict=True))
        ]
        of_rows = None  # after the gradients, since only weights' gradients need them
        if saved.x is not None:
            of_rows = self._dispatch(
                self._ordered(saved.x, routes.token_idx), total, whole_size, again
            )
        parts, whole = routes.parts(degree, steps.index_rows)
        if self.slices is not None:
            self.slices.take(read_launch_number(saved.layer).layer, self._exchange.lane)
        moved = 0
        if saved.placement is not None:
            weights, moved = with_replicas(self._exchange, weights.per_expert(), saved.placement)
        experts = BackwardParts(
            config,
            steps,
            (self._precision, self._of_gradients),
            weights,
            (saved.preact, saved.row_probs),
            _wants(saved, written, factors),
        )
        rows, own = saved.rows, None
        if saved.expert is not None:
            own = OwnExperts(saved.expert, weights)
            if of_rows is not None:
                rows = self._rows_of_experts(of_rows, whole, again)
        laps.lap("dispatch")
        room = self._ways.room(counts, grad_out)
        back: list[Way] = []
        for i, (part, count, way) in enumerate(zip(parts, counts, ways, strict=True)):
            call = of_part(call, i)
            mine = self._of_gradients.unpack(self._rows_of_experts(way, part, call))
            if own is not None:
                assert rows is not None
                grad_rows, found = experts.compute_own(own, mine, rows, part)
            else:
                grad_rows, found = experts.compute(mine, part)
            laps.lap("products")
            back.append(self._combine(grad_rows, part, count, call, room and room.slots[i]))
            experts.keep(part, mine, found)
        of_probs = self._probs_back(experts.grad_row_probs, total, whole)
        laps.lap("parts")

        if own is not None:
            own.store(written)
        else:
            if of_rows is not None:
                rows = self._rows_of_experts(of_rows, whole, again)
            moved += self._write_weight_grads(experts, saved, rows, written, factors, whole)
        laps.lap("weights")
        grad_x = self._restored(steps, returned(back, room), cut.place)
        grad_x = self.hooks.run("after", "combine", grad_x, Call.of("backward", saved.layer))
        grad_probs = saved.row_probs.new_zeros(saved.probs_shape)
        grad_probs.view(-1).scatter_(0, routes.flat_idx, of_probs.wait().to(grad_probs.dtype))
        laps.lap("combine")
        self._records.end(
            laps,
            routes,
            saved.layer,
            "backward",
            num_tokens=len(grad_out),
            placement=saved.placement,
            replica_bytes=moved,
        )
        if self.slices is not None:
            self.slices.leave(read_launch_number(saved.layer).layer)
        if is_void:
            self._spoil(grad_x, grad_probs, factors)
        return grad_x, grad_probs

    def _probs_back(self, grad_row_probs: torch.Tensor | None, total: Counts, whole: Part) -> Way:
        """Begins to send the gradients of routing weights back to their tokens' ranks."""
        assert grad_row_probs is not None
        room = self._ways.room([total], grad_row_probs)
        return self._ways.back(grad_row_probs, total, whole, room and room.slots[0])

    def _write_weight_grads(
        self,
        experts: BackwardParts,
        saved: _Saved,
        rows: torch.Tensor | None,
        written: Grads,
        factors: Factors,
        whole: Part,
    ) -> int:
        """Adds or writes the gradients of weights and factors; returns bytes of replicas'."""
        has_slots = saved.placement is not None
        if rows is not None and (has_slots or is_any(written.fc1) or factors.fc1 is not None):
            rows = self._precision.unpack(rows)
        if factors.wanted:
            experts.give(factors, rows, whole)
        pairs, summands = experts.products(rows, written, is_all=has_slots)
        if saved.placement is not None:
            return self._add_with_replicas(experts.steps, saved.placement, pairs, summands, whole)
        for left, right, targets in pairs:
            experts.steps.add_weight_grad(*of_wanted(targets, left, right, whole))
        for each, targets in summands:
            store(targets, bias_grad(each, whole.counts), VECTOR)
        return 0

    @property
    def num_sharing(self) -> int:
        """Ranks that share each expert."""
        return 1 if self._tensor is None else self._tensor.size

    def _steps_for(self, x: torch.Tensor) -> Steps:
        """Chooses the steps for tokens such as these."""
        return steps_for(x)

    def _count_pads(self, routes: Routes) -> None:
        """Counts no pad rows, since there are none."""

    def _add_with_replicas(
        self,
        steps: Steps,
        placement: Placement,
        pairs: Sequence[Pair],
        summands: Sequence[Summands],
        whole: Part,
    ) -> int:
        """Adds or writes gradients of weights, those of replicas included; returns their bytes."""
        values = [
            steps.weight_grad(left, right, whole.ends, whole.counts) for left, right, _ in pairs
        ]
        values += [bias_grad(each, whole.counts) for each, _ in summands]
        moved = add_replica_grads(self._exchange, placement, values)
        targets = [of_pair for *_, of_pair in pairs] + [of_bias for _, of_bias in summands]
        for kind, value in zip(targets, values, strict=True):
            store(kind, value[: placement.num_local_experts], value.dim() - 1)
        return moved

    def _check_weights(self, weights: ExpertWeights, device: torch.device) -> None:
        super()._check_weights(weights, device)
        if self._tensor is not None and weights.fc2_bias:
            raise ConfigError(
                "experts of several ranks with a bias in the second projection, which none of "
                "them has alone: wanted none, or whole experts"
            )

    def _check_own(self, weights: ExpertWeights) -> None:
        """Refuses an order or an expert of a user's own where the layer has more than it knows."""
        order, expert = self.hooks.order, self.hooks.expert
        experts = f"experts={self.config.experts!r}"
        is_fp8 = self.config.in_fp8
        if order is not None and is_fp8 and not order.takes_bytes:
            raise ConfigError(
                f"{type(order).__name__} with {experts}, whose rows are bytes: wanted an order "
                "that takes_bytes, or experts='bf16'"
            )
        if expert is None:
            return
        for is_there, what, wanted in (
            (is_fp8, experts, "experts='bf16'"),
            (self._replicas is not None, "spare slots", "spare_slots=0"),
            (self._tensor is not None, "experts that ranks share", "whole experts"),
        ):
            if is_there:
                raise ConfigError(
                    f"an expert of your own, {type(expert).__name__}, with {what}: wanted {wanted}"
                )

    def _ordered(self, tokens: torch.Tensor, token_idx: torch.Tensor) -> torch.Tensor:
        """Returns the rows of routes."""
        order = self.hooks.order
        if order is None:
            return tokens.index_select(0, token_idx)
        rows = tokens.new_empty(len(token_idx), *tokens.shape[1:])
        order.order(tokens, token_idx, rows)
        return rows

    def _restored(self, steps: Steps, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Returns the sums of tokens' rows."""
        order = self.hooks.order
        return steps.sum_routes(rows, place) if order is None else order.restore(rows, place)

    def _sizes(
        self, routes: Routes, all_counts: Table | None, degree: int
    ) -> tuple[Sequence[Sizes], Sequence[Counts], Sizes, Counts]:
        """Returns sizes and row counts of each part, then of all parts together."""
        sizes = routes.sizes(degree)
        counts = self._agreement.counts_of(routes, all_counts, sizes)
        if degree == 1:
            return sizes, counts, sizes[0], counts[0]
        (whole,) = routes.sizes(1)
        (total,) = self._agreement.counts_of(routes, all_counts, [whole])
        return sizes, counts, whole, total

    def _dispatch(
        self,
        routed: torch.Tensor,
        counts: Counts,
        sizes: Sizes,
        call: Call,
        ready: Mark = None,
    ) -> Way:
        """Begins to send routes' rows, complete by a moment or now, to their experts."""
        if self.hooks:  # what they do is done later
            routed, ready = self._heard(routed, call, ("before", "dispatch")), None
        return self._ways.there(routed, counts, sizes, ready)

    def _rows_of_experts(self, way: Way, part: Part, call: Call) -> torch.Tensor:
        """Returns the rows that experts compute with, as they have travelled."""
        rows = arrived(way, part)
        if self.hooks:
            rows = self._heard(rows, call, ("after", "dispatch"), ("before", "experts"))
        return rows

    def _heard(self, rows: torch.Tensor, call: Call, *points: Point) -> torch.Tensor:
        """Returns travelling rows after hooks, which see tokens and gradients as numbers."""
        packed = self._precision if call.direction == "forward" else self._of_gradients
        rows = packed.unpack(rows)
        for when, stage in points:
            rows = self.hooks.run(when, stage, rows, call)
        return packed.pack(rows)

    def _combine(
        self,
        rows: torch.Tensor,
        part: Part,
        counts: Counts,
        call: Call,
        slot: Slot | None,
    ) -> Way:
        """Begins to send what experts have computed back, for rows sent by ``counts``."""
        if self.hooks:
            rows = self.hooks.run("after", "experts", rows, call)
            rows = self.hooks.run("before", "combine", rows, call)
        return self._ways.back(rows, counts, part, slot)


def steps_for(x: torch.Tensor) -> Steps:
    """The steps for tokens such as these.

    Raises:
        ImportError: They are on a GPU, and Triton, which comes with torch there, is missing.
    """
    return _kernels() if x.is_cuda and x.dtype != torch.float64 else PLAIN


@functools.cache
def _kernels() -> Steps:
    from flashmoe_megatron.separate.kernels import KERNELS  # a processor needs no Triton

    return KERNELS


def options_and_device(
    options: BackendOptions | None, device: torch.device | None
) -> tuple[BackendOptions, torch.device]:
    """The options and the device of a layer, by default all defaults and the CPU.

    Raises:
        ConfigError: One of them is of another class.
    """
    check_class("options", options, (BackendOptions, type(None)), "a BackendOptions, or None")
    check_class("device", device, (torch.device, type(None)), "a torch.device, or None")
    return options or BackendOptions(), device or torch.device("cpu")


class ScheduledBackend(SeparateBackend):
    """The backend by the name "scheduled": several parts, any way between ranks, shared experts."""

    kind = "scheduled"

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        options: BackendOptions | None = None,
        grid: HostGrid | None = None,
        degrees: tuple[int, int] = (1, 1),
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Binds the layer to its process groups. Collective over them.

        Args:
            config: The layer's shape.
            group: The expert-parallel group, ``None`` for one rank.
            device: Where tokens will be, by default the CPU.
            options: How the layer runs.
            grid: How the ranks lie on hosts; ``None`` where they share one.
            degrees: Parts in forward and in backward.
            tensor_group: The ranks that share each expert; every rank has a slice of the
                intermediate dimension, ``config.intermediate`` wide; ``None`` for whole experts.

        Raises:
            ConfigError: The group's size is not ``config.num_ranks``, spare slots are asked for, or
                the exchange needs several hosts of several ranks, GPUs of one host, whole experts,
                or experts that are not in FP8.
            FlashMoEError: Rows are to be copied between GPUs that cannot write into each other's
                memory.
        """
        options, device = options_and_device(options, device)
        if options.filled_slots:
            raise ConfigError(
                f"spare_slots={options.spare_slots} on the backend 'scheduled': wanted 0, or "
                "another backend"
            )
        if options.exchange == "copies" and config.in_fp8:
            raise ConfigError(
                f"exchange='copies' with experts={config.experts!r}, whose rows are bytes that no "
                "NaN can mark where a copy has failed: wanted another exchange, or experts='bf16'"
            )
        ranks, traffic, tensor = ranks_of(config, group), TrafficCounters(), None
        if tensor_group is not None and Ranks(tensor_group).num_ranks > 1:
            tensor = TensorGroup(tensor_group, traffic, device)
        exchange = make_exchange(options, ranks, grid, traffic, device, is_cut=tensor is not None)
        super().__init__(
            config,
            ranks,
            exchange,
            options=options,
            device=device,
            moments=IN_PARTS if options.counters else frozenset(),
            degrees=degrees,
            tensor=tensor,
        )
        self.num_hosts = 1 if grid is None else grid.num_hosts


def _of_parts(routes: torch.Tensor, sizes: Sequence[Sizes]) -> Sequence[torch.Tensor]:
    """Splits a per-route tensor into its parts."""
    return torch.split(routes, [sum(size.send_counts) for size in sizes])


def _wants(saved: _Saved, written: Grads, factors: Factors) -> tuple[bool, bool]:
    """Tells for either projection whether gradients of its weights are to be computed.

    Slots compute other ranks' experts; an expert of the user's own computes its gradients itself.
    """
    if saved.expert is not None:
        return False, False
    fc1 = is_any(written.fc1) or is_any(written.fc1_bias) or factors.fc1 is not None
    fc2 = is_any(written.fc2) or is_any(written.fc2_bias) or factors.fc2 is not None
    return saved.placement is not None or fc1, saved.placement is not None or fc2
