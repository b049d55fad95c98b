"""The scheduled backend: separate kernels of torch and NCCL, cut into parts that overlap.

Every expert's rows are cut into as many parts as the degree says. While one part is computed, the
next ones arrive and results of the last ones leave. Gradients of weights are computed over all rows
at once, behind the last part, while gradients of tokens leave.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.backend import (
    VECTOR,
    ExpertWeights,
    Together,
    TrafficCounters,
    Untold,
    WeightGrad,
)
from flashmoe_megatron.checks import (
    check_grad_out,
    check_readable,
    check_tokens,
    check_weight_grads,
    check_weights,
)
from flashmoe_megatron.config import Keep, MoEConfig
from flashmoe_megatron.errors import ConfigError, FlashMoEError, ShapeError
from flashmoe_megatron.hosts.grid import HostGrid, host_groups
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.planner import bounded_row_blocks, choose_keep
from flashmoe_megatron.ranks import OfGroup, Ranks
from flashmoe_megatron.router import Router
from flashmoe_megatron.separate import lanes
from flashmoe_megatron.separate.activations import accumulation_dtype
from flashmoe_megatron.separate.agreement import Agreement
from flashmoe_megatron.separate.copies import Copies
from flashmoe_megatron.separate.exchange import (
    ONE_STEP,
    ByLeader,
    Counts,
    Exchange,
    Slot,
    TwoSteps,
    kind_of,
)
from flashmoe_megatron.separate.hooks import Call, Hooks, of_part
from flashmoe_megatron.separate.lanes import Lane
from flashmoe_megatron.separate.plan import Part, Routes, Sizes, Sorted, Table, picked
from flashmoe_megatron.separate.products import (
    add_weight_grad,
    bias_grad,
    is_grouped,
    product,
    stack_of,
    store,
)
from flashmoe_megatron.separate.records import Laps, Records
from flashmoe_megatron.separate.rows import RowExchange
from flashmoe_megatron.separate.slices import GradientSlices
from flashmoe_megatron.separate.steps import steps_for
from flashmoe_megatron.separate.tensor import TensorGroup
from flashmoe_megatron.separate.ways import Way, Ways, arrived, returned
from flashmoe_megatron.telemetry.record import LaunchRecord, read_launch_number


@dataclass(frozen=True)
class _Saved:
    """What backward needs; rows are in the order of experts, whatever the degree was.

    Attributes:
        routes: The routes.
        all_counts: ``[source][expert]`` of the group, if the exchange needs them.
        num_tokens: Tokens of this rank.
        num_columns: Columns of the probabilities.
        rows: ``[rows, hidden]``, if they are kept.
        x: The tokens, if their rows are not.
        row_probs: ``[rows]``, their routing weights.
        preact: ``[rows, fc1_rows]``, the first projection's outputs.
        layer: The number that the caller gave the layer.
    """

    routes: Routes
    all_counts: Table | None
    num_tokens: int
    num_columns: int
    rows: torch.Tensor | None
    x: torch.Tensor | None
    row_probs: torch.Tensor
    preact: torch.Tensor
    layer: int


class ScheduledBackend(OfGroup):
    """Routed experts in parts; implements :class:`~flashmoe_megatron.backend.Backend`.

    Rows travel unpadded and nothing is dropped. The host waits once in a forward, for the counts of
    rows, and never in a backward. Products are in ``x.dtype``; activations, routing weights and
    sums over routes are in float32 (float64 if ``x`` is). Calls of one degree repeat their bits.

    Attributes:
        config: The layer's shape.
        degrees: Parts in forward and in backward.
        hooks: Called before and after the stages of every call.
        slices: What is reduced in a backward's gaps, ``None`` for nothing.
        traffic: What this rank has sent so far; it pads nothing.
    """

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
            tensor_group: The ranks that share each expert, of which every one has a slice of the
                intermediate dimension, ``config.intermediate`` wide; ``None`` for whole experts.

        Raises:
            ConfigError: The group's size is not ``config.num_ranks``, spare slots are asked for, or
                the exchange needs several hosts of several ranks, GPUs of one host, or whole
                experts.
            FlashMoEError: Rows are to be copied between GPUs that cannot write into each other's
                memory.
        """
        options = options or BackendOptions()
        if options.filled_slots:
            raise ConfigError(
                f"spare_slots={options.spare_slots} on the backend 'scheduled': wanted 0, or "
                "another backend"
            )
        self.config = config
        self.degrees = degrees
        self.hooks = Hooks()
        self.slices: GradientSlices | None = None
        self.keep: Keep = choose_keep(options.keep, config)
        talk = RowExchange(config, group)
        self.rank, self.traffic = talk.rank, talk.traffic
        self._device = device or torch.device("cpu")
        self._tensor = None
        if tensor_group is not None and Ranks(tensor_group).num_ranks > 1:
            self._tensor = TensorGroup(tensor_group, self.traffic, self._device)
        self.num_calls = 0
        self.takes_split = False
        self._untold = Untold()
        self._exchange = _make_exchange(
            options,
            talk.ranks,
            grid,
            self.traffic,
            self._device,
            is_cut=self._tensor is not None,
        )
        most_blocks = None
        if options.row_bound is not None:
            most_blocks = bounded_row_blocks(config, options.row_bound)
        self._agreement = Agreement(
            config,
            talk,
            self._tensor,
            self._exchange,
            most_blocks=most_blocks,
        )
        self._ways = Ways(
            self._exchange,
            self._tensor,
            config.num_ranks,
            travels=not self._agreement.is_alone,
        )
        self._records = Records(self.rank, counts=options.counters)
        self._checked: tuple[Any, ...] | None = None

    @property
    def unfollowed(self) -> tuple[int, ...]:
        """The ranks that have no backward of the last forward; see the protocol."""
        return self._agreement.unfollowed

    @property
    def streams(self) -> dict[str, Lane]:
        """Where rows travel between ranks, by the name of the stream."""
        return self._exchange.lanes

    def take_records(self) -> list[LaunchRecord]:
        """Takes what is known of the calls that have ended; see the protocol.

        Phases follow each other on the current stream: the plan, the parts with what they had to
        wait for, and the end.
        """
        return self._records.take()

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        weights: ExpertWeights,
        *,
        training: bool,
        followed: bool | None = None,
        first_plan: torch.Tensor | None = None,
        layer: int = 0,
        router: Router | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Applies the routed experts; collective over the group, see the protocol.

        Raises:
            ShapeError: A tensor is not what the layer was built for; as all that one rank refuses,
                on every rank.
            RowBoundError: On every rank, if any rank is to receive more rows than ``row_bound``
                allows.
            RoutingError: On every rank, if any rank's routing is unusable.
            PeerTimeoutError: A rank is gone or did not call in time, here and in backward.
        """
        config = self.config
        self._exchange.restart()
        with Together(self):
            self._untold.tell()
            check_readable("x", x)
            self._check_weights(weights, x.device)
            if self._tensor is not None and weights.fc2_bias:
                raise ConfigError(
                    "experts of several ranks with a bias in the second projection, which none of "
                    "them has alone: wanted none, or whole experts"
                )
            check_tokens(config, x, probs, routing_map, dtype=weights.fc1[0].dtype, device=x.device)
            self.hooks.probe(x, probs)
            call, hooked = Call.of("forward", layer), self.hooks.run
            laps = self._records.begin(x.device)
            given, x = x, hooked("before", "gate", x, call)
            if router is not None:
                if x is not given:
                    raise ConfigError(
                        "a hook before gate replaced the tokens of a router within the launch, "
                        "which has its gradient from the caller's: wanted fuse_router=False"
                    )
                router.run(x, config.topk)
            probs = hooked("after", "gate", probs, call)
        self._device = x.device
        self.num_calls += 1
        steps = steps_for(x)
        found = steps.sort_routes(config, probs, routing_map)
        degree = self._degree(0)
        if self._needs_no_counts(weights, found, degree, x):
            return self._forward_alone(
                found, x, probs, routing_map, weights, laps, training=training, layer=layer
            )
        is_followed = training if followed is None else followed
        heard = self._agreement.tell(found.counts, followed=is_followed)
        cut = steps.cut_routes(found.token_idx, found.place, found.ends, degree)
        probs_ready = self._ways.ready(x)  # the rows, which follow, take longer to collect
        every, ready = self._ways.collect(x, cut.token_idx, degree)
        routes, all_counts = self._agreement.plan(heard, found, probs, routing_map)
        routes.cuts[degree] = cut
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
        is_whole = degree == 1
        row_probs = arrived(of_probs, whole)

        fc1, fc2 = _oriented(weights)
        biases1, biases2 = _biases(weights)
        keeps_rows = training and self.keep != "preactivations"
        rows = preact = None
        if training and not is_whole:
            preact = x.new_empty(routes.num_rows, config.fc1_rows)
            rows = x.new_empty(routes.num_rows, config.hidden) if keeps_rows else None
        room = self._ways.room(counts, x)
        back: list[Way] = []
        for i, (part, count, way) in enumerate(zip(parts, counts, ways, strict=True)):
            call = of_part(call, i)
            mine = self._rows_of_experts(way, part, call)
            pre = product(mine, fc1, part.ends, part.counts)
            if biases1 is not None:
                pre += biases1[_experts(part)]
            weight = picked(row_probs, part.rows)
            activated = steps.weighted_activation(config, pre, weight)
            out_rows = product(activated, fc2, part.ends, part.counts)
            if biases2 is not None:
                wide = accumulation_dtype(x.dtype)
                out_rows += (weight.to(wide)[:, None] * biases2[_experts(part)].to(wide)).to(
                    x.dtype
                )
            back.append(self._combine(out_rows, part, count, call, room and room.slots[i]))
            if training and is_whole:
                preact, rows = pre, (mine if keeps_rows else None)
            elif preact is not None:
                assert part.rows is not None
                steps.put_rows(preact, part.rows, pre)
                if rows is not None:
                    steps.put_rows(rows, part.rows, mine)
        laps.lap("experts")
        out = steps.sum_routes(returned(back, room), cut.place)
        out = hooked("after", "combine", out, Call.of("forward", layer))
        laps.lap("combine")
        self._records.end(laps, routes, layer, "forward", num_tokens=len(x))
        if not training:
            return out, None
        assert preact is not None
        kept = None if keeps_rows else x
        num_columns = probs.shape[1]
        return out, _Saved(
            routes, all_counts, len(x), num_columns, rows, kept, row_probs, preact, layer
        )

    def _needs_no_counts(
        self, weights: ExpertWeights, found: Sorted, degree: int, x: torch.Tensor
    ) -> bool:
        """Whether a forward can be issued whole before the host knows how many rows there are."""
        return (
            self._agreement.is_alone
            and degree == 1
            and self._agreement.most_blocks is None
            and not self.hooks
            and not weights.fc1_bias
            and not weights.fc2_bias
            and len(found.token_idx) > 0
            and is_grouped(x)
        )

    def _forward_alone(
        self,
        found: Sorted,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        weights: ExpertWeights,
        laps: Laps,
        *,
        training: bool,
        layer: int,
    ) -> tuple[torch.Tensor, _Saved | None]:
        """One rank's forward in one part, for whose counts the host waits when all is issued.

        Rows are as many as there can be; none is read that no expert has.
        """
        config, steps = self.config, steps_for(x)
        counts = self._agreement.host_counts(found.counts)
        laps.lap("plan")
        fc1, fc2 = _oriented(weights)
        rows = x.index_select(0, found.token_idx)
        preact = product(rows, fc1, found.ends, ())
        activated = steps.weighted_activation(config, preact, found.row_probs)
        out_rows = product(activated, fc2, found.ends, ())
        laps.lap("experts")
        out = steps.sum_routes(out_rows, found.place)
        laps.lap("combine")
        routes = self._agreement.plan_alone(counts(), found, probs, routing_map)
        self._records.end(laps, routes, layer, "forward", num_tokens=len(x))
        if not training:
            return out, None
        num = routes.num_rows
        keeps_rows = self.keep != "preactivations"
        return out, _Saved(
            routes,
            None,
            len(x),
            probs.shape[1],
            rows[:num] if keeps_rows else None,
            None if keeps_rows else x,
            found.row_probs[:num],
            preact[:num],
            layer,
        )

    def put_off(self, error: FlashMoEError) -> None:
        """Has the next forward raise an error on every rank; see the protocol."""
        self._untold.put_off(error)

    def raise_pending_fault(self) -> None:
        """Does nothing, for every call raises its own faults; see the protocol."""

    def refuse(self, reason: str) -> None:
        """Ends the other ranks' forward at once; see the protocol.

        Raises:
            FlashMoEError: What has ended the exchange, of which they know themselves.
        """
        self._exchange.raise_if_broken()
        self.num_calls += 1
        self._agreement.refuse(reason, self._device)

    def early_fc2_grads(self) -> None:
        """None are complete before the others; see the protocol."""

    @torch.no_grad()
    def backward(
        self,
        grad_out: torch.Tensor,
        saved: Any,
        weights: ExpertWeights,
        grad_fc1: Sequence[WeightGrad],
        grad_fc2: Sequence[WeightGrad],
        grad_fc1_bias: Sequence[WeightGrad] = (),
        grad_fc2_bias: Sequence[WeightGrad] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all gradients of one forward; collective over the group, see the protocol."""
        config = self.config
        check_grad_out(config, grad_out, saved.num_tokens)
        given = [grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias]
        is_void = False
        try:
            check_weight_grads(weights, given)
        except ShapeError as error:
            if self._agreement.is_alone:
                raise
            grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias = self._untold.keep(
                error, weights, given
            )
            is_void = True
        laps = self._records.begin(grad_out.device)
        self._exchange.restart()
        routes: Routes = saved.routes
        degree, steps = self._degree(1), steps_for(grad_out)
        if degree not in routes.cuts:
            routes.cuts[degree] = steps.cut_routes(
                routes.token_idx, routes.place, routes.ends, degree
            )
        cut, num_routes = routes.cuts[degree], len(routes.token_idx)
        sizes, counts, whole_size, total = self._sizes(routes, saved.all_counts, degree)
        laps.lap("plan")
        call = Call.of("backward", saved.layer)
        token_idx = _of_parts(cut.token_idx[:num_routes], sizes)
        ways = [
            self._dispatch(grad_out.index_select(0, tokens), count, size, of_part(call, i))
            for i, (tokens, count, size) in enumerate(zip(token_idx, counts, sizes, strict=True))
        ]
        of_rows = None  # behind the gradients, since only weights' gradients need them
        if saved.rows is None:
            again = Call.of("forward", saved.layer)
            of_rows = self._dispatch(
                saved.x.index_select(0, routes.token_idx), total, whole_size, again
            )
        parts, whole = routes.parts(degree, steps.index_rows)
        is_whole = degree == 1
        if self.slices is not None:
            self.slices.take(read_launch_number(saved.layer).layer, self._exchange.lane)
        fc1_t, fc2_t = (weight.transpose(1, 2) for weight in _oriented(weights))
        _, biases2 = _biases(weights)
        wide = accumulation_dtype(grad_out.dtype)
        grad_row_probs = saved.row_probs.new_empty(routes.num_rows, dtype=wide)
        grad_y = grad_pre = weighted = None
        if not is_whole:
            grad_y = grad_out.new_empty(routes.num_rows, config.hidden)
            grad_pre = grad_out.new_empty(routes.num_rows, config.fc1_rows)
            weighted = grad_out.new_empty(routes.num_rows, config.intermediate)
        room = self._ways.room(counts, grad_out)
        back: list[Way] = []
        for i, (part, count, way) in enumerate(zip(parts, counts, ways, strict=True)):
            call = of_part(call, i)
            mine = self._rows_of_experts(way, part, call)
            grad_weighted = product(mine, fc2_t, part.ends, part.counts)
            pre_part, prob_part, weighted_part = steps.weighted_activation_backward(
                config,
                picked(saved.preact, part.rows),
                picked(saved.row_probs, part.rows),
                grad_weighted,
            )
            if biases2 is not None:
                prob_part = prob_part + (mine.to(wide) * biases2[_experts(part)].to(wide)).sum(1)
            grad_rows = product(pre_part, fc1_t, part.ends, part.counts)
            back.append(self._combine(grad_rows, part, count, call, room and room.slots[i]))
            if is_whole:
                grad_y, grad_pre, weighted, grad_row_probs = (
                    mine,
                    pre_part,
                    weighted_part,
                    prob_part,
                )
            else:
                assert part.rows is not None
                grad_row_probs.index_copy_(0, part.rows, prob_part)
                for every, one in (
                    (grad_y, mine),
                    (grad_pre, pre_part),
                    (weighted, weighted_part),
                ):
                    assert every is not None
                    steps.put_rows(every, part.rows, one)
        room_of_probs = self._ways.room([total], grad_row_probs)
        of_probs = self._ways.back(
            grad_row_probs, total, whole, room_of_probs and room_of_probs.slots[0]
        )
        laps.lap("experts")

        assert grad_y is not None
        assert grad_pre is not None
        assert weighted is not None
        rows = saved.rows if of_rows is None else self._rows_of_experts(of_rows, whole, again)
        pairs = ((rows, grad_pre, grad_fc1), (weighted, grad_y, grad_fc2))
        for inputs, grads, targets in pairs:
            left, right = (inputs, grads) if weights.transposed else (grads, inputs)
            add_weight_grad(targets, left, right, whole.ends, whole.counts)
        if grad_fc1_bias:
            store(grad_fc1_bias, bias_grad(grad_pre, whole.counts), VECTOR)
        if grad_fc2_bias:
            weighted_y = grad_y.to(wide) * saved.row_probs.to(wide)[:, None]
            store(grad_fc2_bias, bias_grad(weighted_y, whole.counts), VECTOR)
        laps.lap("weights")
        grad_x = steps.sum_routes(returned(back, room), cut.place)
        grad_x = self.hooks.run("after", "combine", grad_x, Call.of("backward", saved.layer))
        grad_probs = saved.row_probs.new_zeros(saved.num_tokens, saved.num_columns)
        grad_probs.view(-1).scatter_(0, routes.flat_idx, of_probs.wait().to(grad_probs.dtype))
        laps.lap("combine")
        self._records.end(laps, routes, saved.layer, "backward", num_tokens=saved.num_tokens)
        if self.slices is not None:
            self.slices.leave(read_launch_number(saved.layer).layer)
        if is_void:
            grad_x.fill_(torch.nan)
            grad_probs.fill_(torch.nan)
        return grad_x, grad_probs

    def _check_weights(self, weights: ExpertWeights, device: torch.device) -> None:
        """Checks weights unless the last ones looked the same."""
        looks = (
            weights.transposed,
            device,
            *(
                (kind, type(one), one.shape, one.stride(), one.dtype, one.device)
                for kind, tensors in vars(weights).items()
                if isinstance(tensors, tuple)
                for one in tensors
            ),
        )
        if looks != self._checked:
            check_weights(self.config, weights, device)
            self._checked = looks

    def _degree(self, direction: int) -> int:
        return self.degrees[direction]

    def _sizes(
        self, routes: Routes, all_counts: Table | None, degree: int
    ) -> tuple[Sequence[Sizes], Sequence[Counts], Sizes, Counts]:
        """The sizes of all parts and by which counts they travel, then those of the whole."""
        sizes, (whole,) = routes.sizes(degree), routes.sizes(1)
        counts = self._agreement.counts_of(routes, all_counts, sizes)
        if degree == 1:
            return sizes, counts, whole, counts[0]
        (total,) = self._agreement.counts_of(routes, all_counts, [whole])
        return sizes, counts, whole, total

    def _dispatch(
        self,
        routed: torch.Tensor,
        counts: Counts,
        sizes: Sizes,
        call: Call,
        ready: lanes.Mark = None,
    ) -> Way:
        """Begins to send routes' rows, complete by a moment or now, to their experts."""
        if self.hooks:  # what they do is done later
            routed, ready = self.hooks.run("before", "dispatch", routed, call), None
        return self._ways.there(routed, counts, sizes, ready)

    def _rows_of_experts(self, way: Way, part: Part, call: Call) -> torch.Tensor:
        """What experts compute with."""
        rows = self.hooks.run("after", "dispatch", arrived(way, part), call)
        return self.hooks.run("before", "experts", rows, call)

    def _combine(
        self,
        rows: torch.Tensor,
        part: Part,
        counts: Counts,
        call: Call,
        slot: Slot | None,
    ) -> Way:
        """Begins to send what experts have computed back, for rows sent by ``counts``."""
        rows = self.hooks.run("after", "experts", rows, call)
        rows = self.hooks.run("before", "combine", rows, call)
        return self._ways.back(rows, counts, part, slot)


def _make_exchange(
    options: BackendOptions,
    ranks: Ranks,
    grid: HostGrid | None,
    traffic: TrafficCounters,
    device: torch.device,
    *,
    is_cut: bool,
) -> Exchange:
    """What carries the rows.

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
    return {"1dh": ByLeader, "2dh": TwoSteps}[kind](ranks, grid, groups, traffic, device)


def _of_parts(routes: torch.Tensor, sizes: Sequence[Sizes]) -> Sequence[torch.Tensor]:
    """Each part's of what there is for every route, part behind part."""
    return torch.split(routes, [sum(size.send_counts) for size in sizes])


def _experts(part: Part) -> torch.Tensor:
    """The local expert of each row."""
    counts = torch.tensor(part.counts, device=part.ends.device)
    experts = torch.arange(len(part.counts), device=part.ends.device)
    return experts.repeat_interleave(counts, output_size=sum(part.counts))


def _oriented(weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """``[experts, hidden, fc1_rows]`` and ``[experts, intermediate, hidden]``."""
    fc1, fc2 = stack_of(weights.fc1), stack_of(weights.fc2)
    return (fc1, fc2) if weights.transposed else (fc1.transpose(1, 2), fc2.transpose(1, 2))


def _biases(weights: ExpertWeights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    first, second = (
        stack_of(biases, VECTOR) if biases else None
        for biases in (weights.fc1_bias, weights.fc2_bias)
    )
    return first, second
