"""The scheduled backend: separate kernels of torch and NCCL, cut into parts that overlap.

Every expert's rows are cut into as many parts as the degree says. While one part is computed, the
next ones arrive and results of the last ones leave. Gradients of weights are computed over all rows
at once, behind the last part, while gradients of tokens leave.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.backend import (
    VECTOR,
    ExpertWeights,
    OfGroup,
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
    choices_problem,
    map_problem,
)
from flashmoe_megatron.config import TILE_M, Keep, MoEConfig, align_capacity
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    RoutingError,
    ShapeError,
    reason_of,
    told_error,
)
from flashmoe_megatron.hosts.grid import HostGrid, host_groups
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.planner import bounded_row_blocks, choose_keep
from flashmoe_megatron.reference.rows import RowExchange, accumulation_dtype
from flashmoe_megatron.router import Router
from flashmoe_megatron.scheduled import lanes
from flashmoe_megatron.scheduled.exchange import ByLeader, Counts, Exchange, TwoSteps, kind_of
from flashmoe_megatron.scheduled.hooks import Call, Hooks, of_part
from flashmoe_megatron.scheduled.plan import (
    REFUSED,
    Part,
    Routes,
    Sorted,
    Table,
    part_size,
    rows_of_experts,
)
from flashmoe_megatron.scheduled.products import (
    add_weight_grad,
    bias_grad,
    is_grouped,
    product,
    stack_of,
    store,
)
from flashmoe_megatron.scheduled.slices import GradientSlices
from flashmoe_megatron.scheduled.steps import steps_for
from flashmoe_megatron.scheduled.tensor import TensorGroup
from flashmoe_megatron.telemetry.record import (
    Direction,
    LaunchRecord,
    Phase,
    read_launch_number,
)

MOST_RECORDS = 4096
"""Records kept for whoever takes them."""


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


@dataclass(frozen=True)
class _Travel:
    """Rows under way.

    Attributes:
        sent: What travels, which lives until the way has been waited for.
        received: Where it arrives.
        done: When it has.
    """

    sent: tuple[torch.Tensor, ...]
    received: torch.Tensor
    done: lanes.Mark


class _Laps:
    """Moments of one call, on the device or, on a processor, on the host."""

    def __init__(self, device: torch.device, *, counts: bool) -> None:
        self._device, self._counts = device, counts
        self.moments: list[tuple[str, Any]] = []
        self.begin_ns = time.monotonic_ns()
        self.lap("begin")

    def lap(self, name: str) -> None:
        """Gives this moment a name."""
        if self._counts:
            self.moments.append((name, lanes.stamp(self._device)))

    def are_over(self) -> bool:
        """Whether the device has passed the last one."""
        return self._device.type != "cuda" or bool(self.moments[-1][1].query())

    def nanoseconds(self) -> dict[str, int]:
        """Time from one moment to the next, by the later one's name."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return {name: lanes.nanoseconds(a, b) for (_, a), (name, b) in pairs}


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
                the exchange needs several hosts of several ranks.
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
        self._talk = RowExchange(config, group)
        self._most_blocks = None
        if options.row_bound is not None:
            self._most_blocks = bounded_row_blocks(config, options.row_bound)
        self._group = group
        self._device = device or torch.device("cpu")
        self._tensor = None
        if tensor_group is not None and dist.get_world_size(tensor_group) > 1:
            self._tensor = TensorGroup(tensor_group, self._talk.traffic, self._device)
        self._counts = options.counters
        self.rank = self._talk.rank
        self.num_calls = 0
        self.takes_split = False
        self._untold = Untold()
        self._epoch = 0
        self._exchange = _make_exchange(
            options, group, grid, self.rank, self._talk.traffic, self._device
        )
        self._checked: tuple[Any, ...] | None = None
        self._counts_here: torch.Tensor | None = None
        self._unread: deque[tuple[_Laps, Callable[[dict[str, int]], LaunchRecord]]] = deque(
            maxlen=MOST_RECORDS
        )

    @property
    def streams(self) -> dict[str, lanes.Lane]:
        """Where rows travel between ranks, by the name of the stream."""
        return self._exchange.lanes

    @property
    def traffic(self) -> TrafficCounters:
        """What this rank has sent so far; it pads nothing."""
        return self._talk.traffic

    def take_records(self) -> list[LaunchRecord]:
        """Takes what is known of the calls that have ended; see the protocol.

        Phases follow each other on the current stream: the plan, the parts with what they had to
        wait for, and the end.
        """
        records = []
        while self._unread and self._unread[0][0].are_over():
            laps, make = self._unread.popleft()
            records.append(make(laps.nanoseconds()))
        return records

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        weights: ExpertWeights,
        *,
        training: bool,
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
            call, hooked = Call("forward", layer), self.hooks.run
            laps = _Laps(x.device, counts=self._counts)
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
        routes, all_counts = self._plan(found, probs, routing_map)
        laps.lap("plan")
        parts = routes.parts(degree)
        counts = self._counts_of(routes, all_counts, parts)
        is_whole = degree == 1
        (whole,) = routes.parts(1)
        (total,) = counts if is_whole else self._counts_of(routes, all_counts, [whole])
        of_probs = self._travel(found.row_probs[: len(routes.token_idx)], total, whole)
        ways = [
            self._dispatch(
                x.index_select(0, _picked(routes.token_idx, part.send_idx)),
                count,
                part,
                of_part(call, i),
            )
            for i, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        row_probs = self._arrived(of_probs, whole)

        fc1, fc2 = _oriented(weights)
        biases1, biases2 = _biases(weights)
        keeps_rows = training and self.keep != "preactivations"
        rows = preact = None
        if training and not is_whole:
            preact = x.new_empty(routes.num_rows, config.fc1_rows)
            rows = x.new_empty(routes.num_rows, config.hidden) if keeps_rows else None
        back: list[_Travel] = []
        for i, (part, count, way) in enumerate(zip(parts, counts, ways, strict=True)):
            call = of_part(call, i)
            mine = self._rows_of_experts(way, part, call)
            pre = product(mine, fc1, part.ends, part.counts)
            if biases1 is not None:
                pre += biases1[_experts(part)]
            weight = _picked(row_probs, part.rows)
            activated = steps.weighted_activation(config, pre, weight)
            out_rows = product(activated, fc2, part.ends, part.counts)
            if biases2 is not None:
                wide = accumulation_dtype(x.dtype)
                out_rows += (weight.to(wide)[:, None] * biases2[_experts(part)].to(wide)).to(
                    x.dtype
                )
            back.append(self._combine(out_rows, part, count, call))
            if training and is_whole:
                preact, rows = pre, (mine if keeps_rows else None)
            elif preact is not None:
                preact[part.rows] = pre
                if rows is not None:
                    rows[part.rows] = mine
        laps.lap("experts")
        out = steps.sum_routes(self._returned(back, parts, routes), routes.place)
        out = hooked("after", "combine", out, Call("forward", layer))
        laps.lap("combine")
        self._record(laps, routes, layer, "forward", num_tokens=len(x))
        if not training:
            return out, None
        assert preact is not None
        tokens = None if keeps_rows else x
        num_columns = probs.shape[1]
        return out, _Saved(
            routes, all_counts, len(x), num_columns, rows, tokens, row_probs, preact, layer
        )

    def _needs_no_counts(
        self, weights: ExpertWeights, found: Sorted, degree: int, x: torch.Tensor
    ) -> bool:
        """Whether a forward can be issued whole before the host knows how many rows there are."""
        return (
            self._is_alone
            and degree == 1
            and self._most_blocks is None
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
        laps: _Laps,
        *,
        training: bool,
        layer: int,
    ) -> tuple[torch.Tensor, _Saved | None]:
        """One rank's forward in one part, for whose counts the host waits when all is issued.

        Rows are as many as there can be; none is read that no expert has.
        """
        config, steps = self.config, steps_for(x)
        counts = self._host_counts(found.counts)
        laps.lap("plan")
        fc1, fc2 = _oriented(weights)
        rows = x.index_select(0, found.token_idx)
        preact = product(rows, fc1, found.ends, ())
        activated = steps.weighted_activation(config, preact, found.row_probs)
        out_rows = product(activated, fc2, found.ends, ())
        laps.lap("experts")
        out = steps.sum_routes(out_rows, found.place)
        laps.lap("combine")
        own = counts()
        host = Table.of(own, len(own))
        self._refuse_unusable(own, host, 0, probs, routing_map)
        routes = found.routes(host, host)
        self._record(laps, routes, layer, "forward", num_tokens=len(x))
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

    def raise_pending_fault(self) -> None:
        """Does nothing, for every call raises its own faults; see the protocol."""

    def refuse(self, reason: str) -> None:
        """Ends the other ranks' forward at once; see the protocol."""
        self.num_calls += 1
        if self._group is None and self._tensor is None:
            return
        told = torch.full((self.config.num_experts,), REFUSED, device=self._device)
        received, _ = self._tell(told)
        if self._tensor is not None:
            self._tensor.every(received)
        self._hear_refusal(reason, is_here=True)

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
            if config.num_ranks == 1:
                raise
            grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias = self._untold.keep(
                error, weights, given
            )
            is_void = True
        laps = _Laps(grad_out.device, counts=self._counts)
        routes: Routes = saved.routes
        degree = self._degree(1)
        parts = routes.parts(degree)
        counts = self._counts_of(routes, saved.all_counts, parts)
        is_whole = degree == 1
        (whole,) = routes.parts(1)
        (total,) = counts if is_whole else self._counts_of(routes, saved.all_counts, [whole])
        laps.lap("plan")
        call = Call("backward", saved.layer)
        ways = [
            self._dispatch(
                grad_out.index_select(0, _picked(routes.token_idx, part.send_idx)),
                count,
                part,
                of_part(call, i),
            )
            for i, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        of_rows = None  # behind the gradients, since only weights' gradients need them
        if saved.rows is None:
            again = Call("forward", saved.layer)
            of_rows = self._dispatch(saved.x.index_select(0, routes.token_idx), total, whole, again)
        if self.slices is not None:
            self.slices.take(read_launch_number(saved.layer)[0], self._exchange.lane)
        fc1, fc2 = _oriented(weights)
        _, biases2 = _biases(weights)
        steps = steps_for(grad_out)
        wide = accumulation_dtype(grad_out.dtype)
        grad_row_probs = saved.row_probs.new_empty(routes.num_rows, dtype=wide)
        grad_y = grad_pre = weighted = None
        if not is_whole:
            grad_y = grad_out.new_empty(routes.num_rows, config.hidden)
            grad_pre = grad_out.new_empty(routes.num_rows, config.fc1_rows)
            weighted = grad_out.new_empty(routes.num_rows, config.intermediate)
        back: list[_Travel] = []
        for i, (part, count, way) in enumerate(zip(parts, counts, ways, strict=True)):
            call = of_part(call, i)
            mine = self._rows_of_experts(way, part, call)
            grad_weighted = product(mine, fc2.transpose(1, 2), part.ends, part.counts)
            pre_part, prob_part, weighted_part = steps.weighted_activation_backward(
                config,
                _picked(saved.preact, part.rows),
                _picked(saved.row_probs, part.rows),
                grad_weighted,
            )
            if biases2 is not None:
                prob_part = prob_part + (mine.to(wide) * biases2[_experts(part)].to(wide)).sum(1)
            grad_rows = product(pre_part, fc1.transpose(1, 2), part.ends, part.counts)
            back.append(self._combine(grad_rows, part, count, call))
            if is_whole:
                grad_y, grad_pre, weighted, grad_row_probs = (
                    mine,
                    pre_part,
                    weighted_part,
                    prob_part,
                )
            else:
                grad_row_probs[part.rows] = prob_part
                for every, one in (
                    (grad_y, mine),
                    (grad_pre, pre_part),
                    (weighted, weighted_part),
                ):
                    assert every is not None
                    every[part.rows] = one
        of_probs = self._return(grad_row_probs, total, whole)
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
        grad_x = steps.sum_routes(self._returned(back, parts, routes), routes.place)
        grad_x = self.hooks.run("after", "combine", grad_x, Call("backward", saved.layer))
        grad_probs = saved.row_probs.new_zeros(saved.num_tokens, saved.num_columns)
        lanes.wait(self._device, of_probs.done)
        grad_probs.view(-1).scatter_(0, routes.flat_idx, of_probs.received.to(grad_probs.dtype))
        laps.lap("combine")
        self._record(laps, routes, saved.layer, "backward", num_tokens=saved.num_tokens)
        if self.slices is not None:
            self.slices.leave(read_launch_number(saved.layer)[0])
        if is_void:
            grad_x.fill_(torch.nan)
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

    def _plan(
        self, found: Sorted, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[Routes, Table | None]:
        """Tells all ranks the numbers of routes; the host waits once.

        Returns:
            The routes, and all ranks' counts if the exchange needs them.
        """
        config = self.config
        num_experts, local = config.num_experts, config.num_local_experts
        received, everyone = self._tell(found.counts)
        first_source = 0
        if self._tensor is not None:
            received = self._tensor.every(received)
            first_source = self._tensor.rank * config.num_ranks
        if self._is_alone:
            own = others = self._host_counts(found.counts)()
        else:
            heard = (found.counts, received, *([] if everyone is None else [everyone]))
            host = torch.cat([one.reshape(-1) for one in heard]).tolist()  # the host waits here
            own, others = host[:num_experts], host[num_experts:]
        host_received = Table.of(others[: received.numel()], local)
        self._refuse_unusable(own, host_received, first_source, probs, routing_map)
        all_counts = None
        if everyone is not None:
            all_counts = Table.of(others[received.numel() :], num_experts)
        if self._most_blocks is not None:
            blocks = sum(align_capacity(rows) for rows in rows_of_experts(host_received))
            self._talk.check_bound(blocks // TILE_M, self._most_blocks, found.counts)
        routes = found.routes(Table.of(own, local), host_received, first_source)
        return routes, all_counts

    def _refuse_unusable(
        self,
        own: Sequence[int],
        host_received: Table,
        first_source: int,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
    ) -> None:
        """Raises what is wrong with a rank's routing, on all of them."""
        config = self.config
        if own[0] == REFUSED:
            problem: str | None
            if routing_map.dtype == torch.bool:
                selected = routing_map & (probs != 0) if config.skip_zero_probs else routing_map
                problem = map_problem(config, probs, selected)
            else:
                problem = choices_problem(config, routing_map, probs)
            reason = reason_of(RoutingError(str(problem)))
            if not self._is_alone:
                self._hear_refusal(reason, is_here=True)
            raise told_error(self.rank, reason)
        if min(map(min, host_received)) == REFUSED:
            of_group = host_received[first_source : first_source + config.num_ranks]
            raise self._hear_refusal(None, is_here=min(map(min, of_group)) == REFUSED)

    @property
    def _is_alone(self) -> bool:
        """Whether nothing travels."""
        return self._group is None and self._tensor is None

    def _host_counts(self, counts: torch.Tensor) -> Callable[[], list[int]]:
        """Begins to bring counts to the host; what is returned waits for them alone."""
        if counts.device.type != "cuda":
            return counts.tolist
        if self._counts_here is None:
            self._counts_here = torch.empty_like(counts, device="cpu", pin_memory=True)
        here = self._counts_here.copy_(counts, non_blocking=True)
        arrived = torch.cuda.current_stream(counts.device).record_event()

        def wait() -> list[int]:
            arrived.synchronize()
            return list(here.tolist())

        return wait

    def _tell(self, told: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tells the other ranks this one's counts.

        Returns:
            ``[num_ranks, num_local_experts]``, what each rank tells this one; and all that they
            tell, ``[num_ranks, num_experts]``, where the exchange needs it.
        """
        if not self._exchange.needs_all_counts:
            return self._talk.tell_counts(told), None
        everyone = self._gather(told)
        local = self.config.num_local_experts
        return everyone[:, self.rank * local : (self.rank + 1) * local], everyone

    def _hear_refusal(self, own: str | None, *, is_here: bool) -> FlashMoEError:
        """What the first rank that refuses this call has refused.

        Args:
            own: Why this one does, ``None`` if it does not.
            is_here: Whether any of the expert-parallel group does, and not only of another one
                whose ranks share experts with this one's.
        """
        found = self._talk.first_refusal(own) if is_here else None
        if self._tensor is not None:
            found = self._tensor.first(found)
        assert found is not None
        return told_error(*found)

    def _gather(self, counts: torch.Tensor) -> torch.Tensor:
        everyone = [torch.empty_like(counts) for _ in range(self.config.num_ranks)]
        with self._talk.bounded():
            dist.all_gather(everyone, counts, group=self._group)
        return torch.stack(everyone)

    def _counts_of(
        self, routes: Routes, all_counts: Table | None, parts: Sequence[Part]
    ) -> list[Counts]:
        """``[source][target]`` rows of each part; without all ranks' counts, where this rank is."""
        local, ranks = self.config.num_local_experts, range(self.config.num_ranks)

        def rows(counts: Sequence[int], part: int) -> int:
            return sum(part_size(count, part, len(parts)) for count in counts)

        if all_counts is not None:
            return [
                [
                    [rows(of_rank[target * local : (target + 1) * local], part) for target in ranks]
                    for of_rank in all_counts
                ]
                for part in range(len(parts))
            ]
        found: list[Counts] = []
        for part in parts:
            known = [[0] * len(ranks) for _ in ranks]
            for other in ranks:
                known[other][self.rank] = part.recv_counts[routes.first_source + other]
                known[self.rank][other] = part.send_counts[other]
            found.append(known)
        return found

    def _travel(self, send: torch.Tensor, counts: Counts, part: Part) -> _Travel:
        """Begins to send rows that are complete on the current stream to their experts."""
        received = self._exchange.received(send, counts)
        done = self._exchange.run(received, send, counts, self._ready())
        if self._tensor is None:
            return _Travel((send,), received, done)
        sizes = self._sizes(part)
        every = received.new_empty(sum(sizes), *received.shape[1:])
        done = self._tensor.gather(every, received, sizes, done)
        return _Travel((send, received), every, done)

    def _return(self, rows: torch.Tensor, counts: Counts, part: Part) -> _Travel:
        """Begins to send rows, by expert, back to where they came from by ``counts``."""
        back = _transposed(counts)
        send = rows = _picked(rows, part.by_rank)
        ready = self._ready()
        if self._tensor is not None:
            sizes = self._sizes(part)
            send = rows.new_empty(sizes[self._tensor.rank], *rows.shape[1:])
            ready = self._tensor.reduce(send, rows, sizes, ready)
        received = self._exchange.received(send, back)
        return _Travel((rows, send), received, self._exchange.run(received, send, back, ready))

    def _ready(self) -> lanes.Mark:
        """This moment, where anybody waits for it."""
        return None if self._is_alone else lanes.mark(self._device)

    def _sizes(self, part: Part) -> list[int]:
        """Rows that each of the ranks which share experts receives."""
        step = self.config.num_ranks
        return [sum(part.recv_counts[i : i + step]) for i in range(0, len(part.recv_counts), step)]

    def _dispatch(self, routed: torch.Tensor, counts: Counts, part: Part, call: Call) -> _Travel:
        """Begins to send routes' rows to their experts."""
        return self._travel(self.hooks.run("before", "dispatch", routed, call), counts, part)

    def _rows_of_experts(self, way: _Travel, part: Part, call: Call) -> torch.Tensor:
        """What experts compute with."""
        rows = self.hooks.run("after", "dispatch", self._arrived(way, part), call)
        return self.hooks.run("before", "experts", rows, call)

    def _combine(self, rows: torch.Tensor, part: Part, counts: Counts, call: Call) -> _Travel:
        """Begins to send what experts have computed back, for rows sent by ``counts``."""
        rows = self.hooks.run("after", "experts", rows, call)
        rows = self.hooks.run("before", "combine", rows, call)
        return self._return(rows, counts, part)

    def _arrived(self, way: _Travel, part: Part) -> torch.Tensor:
        """The received rows in the order of experts."""
        lanes.wait(self._device, way.done)
        return _picked(way.received, part.by_expert)

    def _returned(
        self, back: Sequence[_Travel], parts: Sequence[Part], routes: Routes
    ) -> torch.Tensor:
        """All routes' rows in their order."""
        for way in back:
            lanes.wait(self._device, way.done)
        if len(back) == 1:
            return back[0].received
        returned = back[0].received.new_empty(len(routes.token_idx), self.config.hidden)
        for way, part in zip(back, parts, strict=True):
            returned[part.send_idx] = way.received
        return returned

    def _record(
        self, laps: _Laps, routes: Routes, number: int, direction: Direction, *, num_tokens: int
    ) -> None:
        if not self._counts:
            return
        self._epoch += 1
        epoch = self._epoch
        layer, is_evaluation = read_launch_number(number)
        from_ranks, to_ranks = routes.from_ranks, routes.host_sent  # no tensor is kept alive
        every = routes.host_received

        def make(ns: dict[str, int]) -> LaunchRecord:
            rows = tuple(rows_of_experts(every))
            pulled = tuple(sum(row) for row in from_ranks)
            sent = [sum(row) for row in to_ranks]
            return LaunchRecord(
                layer=layer,
                direction=direction,
                epoch=epoch,
                begin_ns=laps.begin_ns,
                end_ns=laps.begin_ns + sum(ns.values()),
                num_ctas=1,
                num_tokens=num_tokens,
                num_rows=sum(rows),
                num_row_blocks=sum(align_capacity(count) for count in rows) // TILE_M,
                expert_rows=rows,
                rows_pulled=pulled,
                results_pushed=pulled,
                phase_ns={
                    Phase.HEAD: ns["plan"],
                    Phase.STAGE_WAIT: 0,
                    Phase.GEMM: ns["experts"] + ns.get("weights", 0),
                    Phase.TAIL: ns["combine"],
                },
                is_evaluation=is_evaluation,
                routes=(sent[self.rank], sum(sent)),
            )

        self._unread.append((laps, make))


def _make_exchange(
    options: BackendOptions,
    group: dist.ProcessGroup | None,
    grid: HostGrid | None,
    rank: int,
    traffic: TrafficCounters,
    device: torch.device,
) -> Exchange:
    """What carries the rows.

    Raises:
        ConfigError: The exchange that is asked for needs several hosts of several ranks.
    """
    kind = kind_of(options.exchange, grid)
    if kind == "direct" or group is None or grid is None:
        return Exchange(group, rank, traffic, device)
    groups = host_groups(group, grid, timeout=options.timeout)
    return {"1dh": ByLeader, "2dh": TwoSteps}[kind](group, grid, groups, traffic, device)


def _picked(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return rows if index is None else rows.index_select(0, index)


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


def _transposed(counts: Counts) -> Counts:
    """The way back."""
    return [list(column) for column in zip(*counts, strict=True)]
