"""The reference backend: plain torch on any device, ``torch.distributed`` between ranks.

It keeps the promises of the kernel that can be kept without one: rows travel unpadded, every sum
has a fixed order, and nothing is dropped.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.backend import (
    MATRIX,
    VECTOR,
    ExpertWeights,
    Together,
    TrafficCounters,
    Untold,
    WeightGrad,
    unstacked,
)
from flashmoe_megatron.checks import (
    check_grad_out,
    check_readable,
    check_tokens,
    check_weight_grads,
    check_weights,
)
from flashmoe_megatron.config import TILE_M, Keep, MoEConfig, align_capacity
from flashmoe_megatron.errors import FlashMoEError, ShapeError
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.planner import choose_keep
from flashmoe_megatron.ranks import OfGroup
from flashmoe_megatron.replicas.placement import Counts, Hosts, Placement
from flashmoe_megatron.replicas.policy import check_slots, plan_replicas
from flashmoe_megatron.router import Router
from flashmoe_megatron.separate.activations import accumulation_dtype, activate, activate_backward
from flashmoe_megatron.separate.replicas import Values, add_replica_grads, with_replicas
from flashmoe_megatron.separate.rows import Planner, RowExchange, RowPlan
from flashmoe_megatron.telemetry.record import (
    Direction,
    LaunchRecord,
    Phase,
    ReplicaRecord,
    read_launch_number,
)

MOST_RECORDS = 4096
"""Records kept for whoever takes them."""


@dataclass(frozen=True)
class _Saved:
    """What backward needs: the plan, and rows of the receive buffer.

    Attributes:
        plan: The routes.
        num_tokens: Tokens of this rank.
        num_columns: Columns of the probabilities, and so of their gradient.
        rows: ``[buffer rows, hidden]``, the dispatched tokens, if they are kept.
        x: The tokens, if their rows are not.
        row_probs: ``[buffer rows]``, their routing weights.
        preact: ``[buffer rows, fc1_rows]``, fc1's output.
        layer: The number that the caller gave the layer.
    """

    plan: RowPlan
    num_tokens: int
    num_columns: int
    rows: torch.Tensor | None
    x: torch.Tensor | None
    row_probs: torch.Tensor
    preact: torch.Tensor
    layer: int


class _Stopwatch:
    """Nanoseconds between the steps of one call, each done on the device before it is timed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.laps_ns: dict[str, int] = {}
        self.begin_ns = self.end_ns = self._now()

    def lap(self, name: str) -> None:
        """Gives the time since the last lap a name."""
        now = self._now()
        self.laps_ns[name] = now - self.end_ns
        self.end_ns = now

    def _now(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()


class ReferenceBackend(OfGroup):
    """Routed experts in plain torch; implements :class:`~flashmoe_megatron.backend.Backend`.

    Arithmetic: GEMMs in ``x.dtype``; activation, routing weight, weight gradients and all sums over
    routes in float32 (float64 if ``x`` is), rounded once at the end. Repeated calls give the same
    bits.

    Attributes:
        config: The layer's shape.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        options: BackendOptions | None = None,
        planner: Planner | None = None,
    ) -> None:
        """Binds the layer to a process group.

        Args:
            config: The layer's shape.
            group: The expert-parallel group, gloo for CPU tensors or NCCL for GPU tensors; ``None``
                for one rank.
            device: Where tokens will be, by default the CPU; what a rank refuses before its first
                forward is told from there.
            options: How the layer runs, of which the reference heeds ``keep``, ``row_bound`` and
                what is said of replicas.
            planner: Plans replicas in place of the options' policy; the same on every rank.

        Raises:
            ConfigError: The group's size is not ``config.num_ranks``, or a rank cannot have the
                spare slots.
        """
        self.config = config
        options = options or BackendOptions()
        self.keep: Keep = choose_keep(options.keep, config)
        spare_slots = options.filled_slots
        check_slots(config, spare_slots, options.placement)
        if planner is None and spare_slots:

            def planner(counts: Counts, hosts: Hosts | None) -> Placement:
                return plan_replicas(options.replica_policy, counts, spare_slots, hosts)

        self._rows = RowExchange(
            config, group, options.row_bound, spare_slots=spare_slots, planner=planner
        )
        self.takes_split = not spare_slots
        self._settled: dict[int, Hosts] = {}
        self._device = device or torch.device("cpu")
        self.rank = self._rows.rank
        self.num_calls = 0
        self.unfollowed: tuple[int, ...] = ()
        self._untold = Untold()
        self._epoch = 0
        self._records: deque[LaunchRecord] = deque(maxlen=MOST_RECORDS)

    @property
    def traffic(self) -> TrafficCounters:
        """What this rank has sent and padded so far."""
        return self._rows.traffic

    def take_records(self) -> list[LaunchRecord]:
        """Takes what is known of the calls so far; see the protocol.

        Times are the host's, after this rank's device has done what it was told. Nothing overlaps:
        a call plans and dispatches, computes the experts (in backward with their weights'
        gradients), and combines.
        """
        records = list(self._records)
        self._records.clear()
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
            RoutingError: On every rank, if any rank's token selects more than ``topk`` experts or
                has a NaN among its selected probabilities.
            PeerTimeoutError: A rank is gone or did not call in time, here and in backward.
        """
        config = self.config
        with Together(self):
            self._untold.tell()
            check_readable("x", x)
            weights = check_weights(config, weights, x.device)
            dtype = weights.fc1[0].dtype
            check_tokens(config, x, probs, routing_map, dtype=dtype, device=x.device)
            wide = accumulation_dtype(x.dtype)
            watch = _Stopwatch(x.device)
            if router is not None:
                router.run(x, config.topk)
        self._device = x.device
        self.num_calls += 1
        hosts = self._settled.pop(layer, None)
        try:
            is_followed = training if followed is None else followed
            plan = self._rows.plan(probs, routing_map, hosts, followed=is_followed)
        except FlashMoEError:
            self._settled.clear()  # on every rank, as on one that refuses
            raise
        self.unfollowed = plan.unfollowed
        weights, moved = self._with_replicas(weights, plan)
        watch.lap("plan")
        row_probs = self._rows.dispatch(probs[plan.token_idx, plan.column_idx], plan)
        rows = self._rows.dispatch(x[plan.token_idx], plan)
        watch.lap("dispatch")

        preact = x.new_zeros(rows.shape[0], config.fc1_rows)
        expert_out = torch.zeros_like(rows)
        for local_expert, (start, count) in enumerate(plan.segments[: len(weights.fc2)]):
            segment = _with_pads(start, count)
            fc1, fc2 = _oriented(weights, local_expert)
            torch.mm(rows[segment], fc1.t(), out=preact[segment])
            if weights.fc1_bias:
                preact[segment] += weights.fc1_bias[local_expert]
            activated = activate(preact[segment].to(wide), config)
            weight = row_probs[segment].to(wide)
            weighted = (activated * weight[:, None]).to(x.dtype)
            torch.mm(weighted, fc2.t(), out=expert_out[segment])
            if weights.fc2_bias:
                bias = weights.fc2_bias[local_expert].to(wide)
                expert_out[segment] += torch.outer(weight, bias)
        watch.lap("experts")
        out = self._rows.combine(expert_out, plan, num_tokens=x.shape[0])
        watch.lap("combine")
        self._record(watch, plan, layer, "forward", num_tokens=x.shape[0], replica_bytes=moved)
        if not training:
            return out, None
        kept, tokens = (rows, None) if self.keep != "preactivations" else (None, x)
        return out, _Saved(plan, len(x), probs.shape[1], kept, tokens, row_probs, preact, layer)

    def settle(
        self,
        routing_map: torch.Tensor,
        read_weights: Callable[[], ExpertWeights],
        *,
        layer: int,
    ) -> None:
        """See :class:`~flashmoe_megatron.backend.LooksAhead`; weights travel in the forward."""
        self._settled[layer] = self._rows.foresee(routing_map)

    def put_off(self, error: FlashMoEError) -> None:
        """Has the next forward raise an error on every rank; see the protocol."""
        self._untold.put_off(error)

    def raise_pending_fault(self) -> None:
        """Does nothing, for every call raises its own faults; see the protocol."""

    def refuse(self, reason: str) -> None:
        """Ends the other ranks' forward at once; see the protocol."""
        self._settled.clear()  # as the others do, whose forward fails
        self.num_calls += 1
        self._rows.refuse(reason, self._device)

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
        config, is_void = self.config, False
        given = [grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias]
        try:
            check_weight_grads(weights, given)
        except ShapeError as error:
            if config.num_ranks == 1:
                raise
            given, is_void = [*self._untold.keep(error, weights, given)], True
        weights = weights.per_expert()
        local = config.num_local_experts
        kinds = [_per_expert(given[0], MATRIX), _per_expert(given[1], MATRIX)]
        kinds += [_per_expert(grads, VECTOR) for grads in given[2:] if grads]
        if weights.split:
            kinds[:1] = [kinds[0][:local], kinds[0][local:]]

        def store(local_expert: int, values: Values) -> None:
            for grads, value in zip(kinds, values, strict=True):
                grads[local_expert].store(value)

        check_grad_out(config, grad_out, saved.num_tokens)
        plan: RowPlan = saved.plan
        dtype, wide = grad_out.dtype, accumulation_dtype(grad_out.dtype)
        watch = _Stopwatch(grad_out.device)
        x_rows = saved.rows
        if x_rows is None:
            x_rows = self._rows.dispatch(saved.x[plan.token_idx], plan)
        grad_rows = self._rows.dispatch(grad_out[plan.token_idx], plan)
        weights, moved = self._with_replicas(weights, plan)
        own_grads: dict[int, Values] = {}
        spare_grads: list[Values] = []
        if plan.placement is not None:
            replicated = {expert % local for _, _, expert in plan.placement.replicas_of(self.rank)}
            own_grads = {expert: [] for expert in replicated}
        watch.lap("dispatch")
        grad_x_rows = torch.zeros_like(x_rows)
        grad_row_probs = saved.row_probs.new_zeros(saved.row_probs.shape, dtype=wide)
        for local_expert, (start, count) in enumerate(plan.segments[: len(weights.fc2)]):
            segment = _with_pads(start, count)
            fc1, fc2 = _oriented(weights, local_expert)
            grad_y = grad_rows[segment].to(wide)
            # The gradient before the routing weight gives that weight's own gradient without a
            # division, so a weight of 0 needs no special case.
            grad_weighted = grad_y @ fc2.to(wide)
            weight = saved.row_probs[segment].to(wide)
            activated, grad_pre = activate_backward(
                saved.preact[segment].to(wide),
                grad_weighted * weight[:, None],
                config,
            )
            grad_prob = (grad_weighted * activated).sum(1)
            weighted = (activated * weight[:, None]).to(dtype)
            grad_pre = grad_pre.to(dtype)
            bias_grads: Values = []
            if weights.fc1_bias:
                bias_grads.append(grad_pre.to(wide).sum(0))
            if weights.fc2_bias:
                grad_prob = grad_prob + grad_y @ weights.fc2_bias[local_expert].to(wide)
                bias_grads.append(weight @ grad_y)
            grad_row_probs[segment] = grad_prob
            torch.mm(grad_pre, fc1, out=grad_x_rows[segment])
            rows = x_rows[segment]
            matrix_grads = [grad_pre.to(wide).t() @ rows.to(wide), grad_y.t() @ weighted.to(wide)]
            values = [value.t() if weights.transposed else value for value in matrix_grads]
            if weights.split:
                values[:1] = values[0].chunk(2)
            values += bias_grads
            if local_expert >= local:
                spare_grads.append(values)
            elif local_expert in own_grads:
                own_grads[local_expert] = values
            else:
                store(local_expert, values)
        if plan.placement is not None:
            moved += add_replica_grads(
                self._rows, plan.placement, own_grads, spare_grads, like=grad_row_probs
            )
            for local_expert, values in own_grads.items():
                store(local_expert, values)

        watch.lap("experts")
        num_tokens = saved.num_tokens
        grad_x = self._rows.combine(grad_x_rows, plan, num_tokens=num_tokens)
        grad_probs = saved.row_probs.new_zeros(num_tokens, saved.num_columns)
        returned = self._rows.send_back(grad_row_probs, plan).to(grad_probs.dtype)
        grad_probs[plan.token_idx, plan.column_idx] = returned
        watch.lap("combine")
        self._record(
            watch, plan, saved.layer, "backward", num_tokens=num_tokens, replica_bytes=moved
        )
        if is_void:
            grad_x.fill_(torch.nan)
            grad_probs.fill_(torch.nan)
        return grad_x, grad_probs

    def _with_replicas(self, weights: ExpertWeights, plan: RowPlan) -> tuple[ExpertWeights, int]:
        """The weights of all slots that hold an expert, and the bytes that came for them."""
        if plan.placement is None:
            return weights, 0
        return with_replicas(self._rows, weights, plan.placement)

    def _record(
        self,
        watch: "_Stopwatch",
        plan: RowPlan,
        number: int,
        direction: Direction,
        *,
        num_tokens: int,
        replica_bytes: int,
    ) -> None:
        self._epoch += 1
        layer, is_evaluation, owner = read_launch_number(number)
        rows = tuple(count for _, count in plan.segments)
        local = self.config.num_local_experts
        laps = watch.laps_ns
        head = laps.get("plan", 0) + laps["dispatch"]
        self._records.append(
            LaunchRecord(
                layer=layer,
                direction=direction,
                epoch=self._epoch,
                begin_ns=watch.begin_ns,
                end_ns=watch.end_ns,
                num_ctas=1,
                num_tokens=num_tokens,
                num_rows=sum(rows),
                num_row_blocks=plan.is_route.shape[0] // TILE_M,
                expert_rows=rows[:local],
                rows_pulled=plan.recv_counts,
                results_pushed=plan.recv_counts,
                phase_ns={
                    Phase.HEAD: head,
                    Phase.ROWS_WAIT: laps["dispatch"],
                    Phase.STAGE_WAIT: 0,
                    Phase.GEMM: laps["experts"],
                    Phase.DISPATCH: laps["dispatch"],
                    Phase.DELIVER: laps["combine"],
                    Phase.TAIL: laps["combine"],
                },
                is_evaluation=is_evaluation,
                owner=owner,
                routes=(plan.send_counts[self.rank], sum(plan.send_counts)),
                replicas=None
                if plan.placement is None
                else ReplicaRecord(
                    rows=tuple(zip(plan.placement.hosts[self.rank], rows[local:], strict=False)),
                    num_bytes=replica_bytes,
                ),
            )
        )


_ROWS_ALIKE = 8
"""Products of whole multiples of so many rows give each row the same bits, however many there are;
fewer rows, or odd ones, take other instructions."""


def _with_pads(start: int, count: int) -> slice:
    """The rows of a segment with some of the pad rows behind it, which are zeros and stay zeros.

    So a route's bits do not depend on which others are computed with it, as they do not in the
    kernel.
    """
    return slice(start, start + align_capacity(count, _ROWS_ALIKE))


def _per_expert(grads: Sequence[WeightGrad], num_dims: int) -> list[WeightGrad]:
    return [
        WeightGrad(buffer, grad.accumulate)
        for grad in grads
        for buffer in unstacked([grad.buffer], num_dims)
    ]


def _oriented(weights: ExpertWeights, local_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's weights as ``[fc1_rows, hidden]`` and ``[hidden, intermediate]``."""
    fc1, fc2 = weights.fc1[local_expert], weights.fc2[local_expert]
    if weights.split:
        fc1 = torch.cat((fc1, weights.fc1[len(weights.fc2) + local_expert]))
    return (fc1.t(), fc2.t()) if weights.transposed else (fc1, fc2)
