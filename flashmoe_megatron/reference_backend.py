"""The reference backend: plain torch on any device, ``torch.distributed`` between ranks.

It keeps the promises of the kernel that can be kept without one: rows travel unpadded, each
expert's segment starts at a multiple of :data:`~flashmoe_megatron.config.TILE_M` in the receiver's
buffer only, every sum has a fixed order, and nothing is dropped.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.backend import ExpertWeights, OfGroup, TrafficCounters, WeightGrad
from flashmoe_megatron.checks import check_grad_out, check_tokens, check_weights
from flashmoe_megatron.config import TILE_M, Activation, Keep, MoEConfig, align_capacity
from flashmoe_megatron.errors import ConfigError, PeerTimeoutError, RoutingError
from flashmoe_megatron.gate import Gate
from flashmoe_megatron.telemetry.record import Direction, LaunchRecord, Phase

_UNUSABLE = -1  # takes the place of every count in the exchange of a rank with unusable routing

MOST_RECORDS = 4096
"""Records kept for whoever takes them."""


@dataclass(frozen=True)
class _Plan:
    """Where every route of one call goes.

    A route is a pair of a token and an expert that it selected. Routes are ordered by expert, then
    by token, so that the routes to one rank are consecutive.

    Attributes:
        token_idx: ``[num_routes]`` int64, the token of each route of this rank.
        expert_idx: ``[num_routes]`` int64, its global expert.
        route_of_token: ``[num_tokens, most routes of a token]`` int64, each token's routes by
            ascending expert, then -1.
        send_counts: Routes to each rank.
        recv_counts: Rows from each rank.
        slot: ``[num_rows]`` int64, where each received row lies in the receive buffer.
        is_route: ``[buffer rows]`` bool, false for the pad rows.
        segments: First row and number of rows of each local expert in the receive buffer.
    """

    token_idx: torch.Tensor
    expert_idx: torch.Tensor
    route_of_token: torch.Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    slot: torch.Tensor
    is_route: torch.Tensor
    segments: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Saved:
    """What backward needs: the plan, and rows of the receive buffer.

    Attributes:
        plan: The routes.
        num_tokens: Tokens of this rank.
        rows: ``[buffer rows, hidden]``, the dispatched tokens, if they are kept.
        x: The tokens, if their rows are not.
        row_probs: ``[buffer rows]``, their routing weights.
        pre_activation: ``[buffer rows, fc1_rows]``, fc1's output.
        layer: The number that the caller gave the layer.
    """

    plan: _Plan
    num_tokens: int
    rows: torch.Tensor | None
    x: torch.Tensor | None
    row_probs: torch.Tensor
    pre_activation: torch.Tensor
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
        traffic: What was sent and padded so far.
    """

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup | None = None) -> None:
        """Binds the layer to a process group.

        Args:
            config: The layer's shape.
            group: The expert-parallel group, gloo for CPU tensors or NCCL for GPU tensors; ``None``
                for one rank.

        Raises:
            ConfigError: The group's size is not ``config.num_ranks``.
        """
        num_ranks = 1 if group is None else dist.get_world_size(group)
        if num_ranks != config.num_ranks:
            raise ConfigError(
                f"num_ranks={config.num_ranks}, but the process group has {num_ranks} ranks"
            )
        self.config = config
        self.keep: Keep = "all"
        self.traffic = TrafficCounters()
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._epoch = 0
        self._records: deque[LaunchRecord] = deque(maxlen=MOST_RECORDS)

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
        layer: int = 0,
        gate: Gate | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Applies the routed experts; collective over the group, see the protocol.

        Raises:
            ShapeError: A tensor is not what the layer was built for.
            RoutingError: On every rank, if any rank's token selects more than ``topk`` experts or
                has a NaN among its selected probabilities.
            PeerTimeoutError: A rank is gone or did not call in time, here and in backward.
        """
        check_tokens(self.config, x, probs, routing_map)
        check_weights(self.config, x, weights)
        watch = _Stopwatch(x.device)
        if gate is not None:
            gate.run(x, self.config.topk)
        plan = self._plan(probs, routing_map)
        watch.lap("plan")
        row_probs = self._dispatch(probs[plan.token_idx, plan.expert_idx], plan)
        rows = self._dispatch(x[plan.token_idx], plan)
        watch.lap("dispatch")
        self.traffic.pad_rows_local += plan.is_route.shape[0] - sum(plan.recv_counts)

        pre_activation = x.new_zeros(rows.shape[0], self.config.fc1_rows)
        expert_out = torch.zeros_like(rows)
        for local_expert, (start, count) in enumerate(plan.segments):
            segment = slice(start, start + count)
            fc1, fc2 = _oriented(weights, local_expert)
            torch.mm(rows[segment], fc1.t(), out=pre_activation[segment])
            if weights.fc1_bias:
                pre_activation[segment] += weights.fc1_bias[local_expert]
            weighted = self._activate(pre_activation[segment], row_probs[segment])
            torch.mm(weighted, fc2.t(), out=expert_out[segment])
            if weights.fc2_bias:
                bias = weights.fc2_bias[local_expert].to(_accumulation_dtype(x.dtype))
                expert_out[segment] += torch.outer(row_probs[segment].to(bias.dtype), bias)
        watch.lap("experts")
        out = self._combine(expert_out, plan, num_tokens=x.shape[0])
        watch.lap("combine")
        self._record(watch, plan, layer, "forward", num_tokens=x.shape[0])
        if not training:
            return out, None
        kept, tokens = (rows, None) if self.keep != "preactivations" else (None, x)
        return out, _Saved(plan, len(x), kept, tokens, row_probs, pre_activation, layer)

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
        check_grad_out(self.config, grad_out, saved.num_tokens)
        plan: _Plan = saved.plan
        wide = _accumulation_dtype(grad_out.dtype)
        watch = _Stopwatch(grad_out.device)
        x_rows = saved.rows
        if x_rows is None:
            x_rows = self._dispatch(saved.x[plan.token_idx], plan)
        grad_rows = self._dispatch(grad_out[plan.token_idx], plan)
        watch.lap("dispatch")
        grad_x_rows = torch.zeros_like(x_rows)
        grad_row_probs = saved.row_probs.new_zeros(saved.row_probs.shape, dtype=wide)
        for local_expert, (start, count) in enumerate(plan.segments):
            segment = slice(start, start + count)
            fc1, fc2 = _oriented(weights, local_expert)
            grad_y = grad_rows[segment].to(wide)
            # The gradient before the routing weight gives that weight's own gradient without a
            # division, so a weight of 0 needs no special case.
            grad_weighted = grad_y @ fc2.to(wide)
            weighted, grad_prob, grad_pre = self._activate_backward(
                saved.pre_activation[segment], saved.row_probs[segment], grad_weighted
            )
            if weights.fc1_bias:
                _store(grad_fc1_bias[local_expert], grad_pre.to(wide).sum(0))
            if weights.fc2_bias:
                grad_prob = grad_prob + grad_y @ weights.fc2_bias[local_expert].to(wide)
                _store(grad_fc2_bias[local_expert], saved.row_probs[segment].to(wide) @ grad_y)
            grad_row_probs[segment] = grad_prob
            torch.mm(grad_pre, fc1, out=grad_x_rows[segment])
            rows = x_rows[segment]
            for grad, value in (
                (grad_fc1[local_expert], grad_pre.to(wide).t() @ rows.to(wide)),
                (grad_fc2[local_expert], grad_y.t() @ weighted.to(wide)),
            ):
                _store(grad, value.t() if weights.transposed else value)

        watch.lap("experts")
        num_tokens = saved.num_tokens
        grad_x = self._combine(grad_x_rows, plan, num_tokens=num_tokens)
        grad_probs = saved.row_probs.new_zeros(num_tokens, self.config.num_experts)
        returned = self._return(grad_row_probs, plan).to(grad_probs.dtype)
        grad_probs[plan.token_idx, plan.expert_idx] = returned
        watch.lap("combine")
        self._record(watch, plan, saved.layer, "backward", num_tokens=num_tokens)
        return grad_x, grad_probs

    def _record(
        self,
        watch: "_Stopwatch",
        plan: _Plan,
        layer: int,
        direction: Direction,
        *,
        num_tokens: int,
    ) -> None:
        self._epoch += 1
        expert_rows = tuple(count for _, count in plan.segments)
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
                num_rows=sum(expert_rows),
                num_row_blocks=plan.is_route.shape[0] // TILE_M,
                expert_rows=expert_rows,
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
            )
        )

    def _plan(self, probs: torch.Tensor, routing_map: torch.Tensor) -> _Plan:
        """Exchanges the counts of rows between all ranks and lays out the receive buffer."""
        config = self.config
        device = probs.device
        selected = routing_map & (probs != 0) if config.skip_zero_probs else routing_map
        problem = self._routing_problem(probs, selected)
        send = selected.sum(0)
        if problem is not None:
            send.fill_(_UNUSABLE)
        recv = self._exchange_counts(send).view(config.num_ranks, config.num_local_experts)
        if problem is not None:
            raise RoutingError(problem)
        unusable = (recv < 0).any(1).nonzero().flatten().tolist()
        if unusable:
            raise RoutingError(f"rank {unusable[0]} has unusable routing; its own error says why")

        expert_idx, token_idx = selected.t().nonzero(as_tuple=True)
        rank_in_token = (selected.cumsum(1) - 1)[token_idx, expert_idx]
        most_routes = int(selected.sum(1).max()) if selected.shape[0] else 0
        route_of_token = torch.full((selected.shape[0], most_routes), -1, device=device)
        route_of_token[token_idx, rank_in_token] = torch.arange(len(token_idx), device=device)

        # Rows arrive by source rank, then expert; they are stored by expert, then source rank.
        rows_per_expert = recv.sum(0).tolist()
        starts: list[int] = []
        buffer_rows = 0
        for rows in rows_per_expert:
            starts.append(buffer_rows)
            buffer_rows += align_capacity(rows)
        first_slot = torch.tensor(starts, device=device) + recv.cumsum(0) - recv
        chunk = recv.flatten()
        shift = first_slot.flatten() - (chunk.cumsum(0) - chunk)
        slot = shift.repeat_interleave(chunk) + torch.arange(sum(rows_per_expert), device=device)
        is_route = torch.zeros(buffer_rows, dtype=torch.bool, device=device)
        is_route[slot] = True
        return _Plan(
            token_idx=token_idx,
            expert_idx=expert_idx,
            route_of_token=route_of_token,
            send_counts=tuple(send.view(config.num_ranks, -1).sum(1).tolist()),
            recv_counts=tuple(recv.sum(1).tolist()),
            slot=slot,
            is_route=is_route,
            segments=tuple(zip(starts, rows_per_expert, strict=True)),
        )

    def _routing_problem(self, probs: torch.Tensor, selected: torch.Tensor) -> str | None:
        """What makes this rank's routing unusable, if anything."""
        nan = (probs.isnan() & selected).nonzero()
        if len(nan):
            token, expert = nan[0].tolist()
            return (
                f"rank {self._rank}: the probability of token {token} for expert {expert} is NaN "
                f"({len(nan)} NaN in all), wanted a number"
            )
        experts_per_token = selected.sum(1)
        too_many = (experts_per_token > self.config.topk).nonzero()
        if len(too_many):
            token = int(too_many[0])
            return (
                f"rank {self._rank}: token {token} selects {int(experts_per_token[token])} experts "
                f"({len(too_many)} such tokens in all), wanted at most topk={self.config.topk}"
            )
        return None

    def _exchange_counts(self, send: torch.Tensor) -> torch.Tensor:
        """Sends each rank the counts for its experts, ``[num_experts]``; returns the received."""
        if self._group is None:
            return send
        recv = torch.empty_like(send)
        self._all_to_all(recv, send)
        return recv

    def _all_to_all(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        recv_counts: list[int] | None = None,
        send_counts: list[int] | None = None,
    ) -> None:
        """The group's exchange; its bound is the timeout of the process group.

        Raises:
            PeerTimeoutError: A rank is gone or did not come in time. The process group cannot be
                used again.
        """
        try:
            dist.all_to_all_single(recv, send, recv_counts, send_counts, group=self._group)
        except RuntimeError as error:  # what torch.distributed raises for it
            raise PeerTimeoutError(
                f"rank {self._rank}: an exchange with the other {self.config.num_ranks - 1} ranks "
                f"failed, since one of them is gone or did not come: {error}"
            ) from error

    def _dispatch(self, routed: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """Sends one entry per route to the rank of its expert.

        Args:
            routed: ``[num_routes, ...]``, in the order of the plan.
            plan: The routes.

        Returns:
            The receive buffer ``[buffer rows, ...]``, zero at the pad rows.
        """
        self.traffic.pad_rows_sent += routed.shape[0] - len(plan.token_idx)
        received = self._exchange(routed, plan.send_counts, plan.recv_counts)
        buffer = received.new_zeros(plan.is_route.shape[0], *received.shape[1:])
        buffer[plan.slot] = received
        return buffer

    def _return(self, buffer: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """Sends the buffer's rows back to where they came from, in the order of the plan."""
        self.traffic.pad_rows_sent += int((~plan.is_route[plan.slot]).sum())
        return self._exchange(buffer[plan.slot], plan.recv_counts, plan.send_counts)

    def _combine(self, buffer: torch.Tensor, plan: _Plan, *, num_tokens: int) -> torch.Tensor:
        """Returns the buffer's rows and sums each token's, by ascending expert."""
        returned = self._return(buffer, plan)
        total = torch.zeros(
            num_tokens,
            self.config.hidden,
            dtype=_accumulation_dtype(buffer.dtype),
            device=buffer.device,
        )
        for routes in plan.route_of_token.unbind(1):
            tokens = (routes >= 0).nonzero().squeeze(1)
            total[tokens] += returned[routes[tokens]].to(total.dtype)
        return total.to(buffer.dtype)

    def _exchange(
        self, send: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> torch.Tensor:
        """Uneven all-to-all of rows; counts what leaves this rank."""
        rows_leaving = send.shape[0] - send_counts[self._rank]
        if send.dim() > 1:
            self.traffic.rows_sent += rows_leaving
        self.traffic.bytes_sent += rows_leaving * math.prod(send.shape[1:]) * send.element_size()
        if self._group is None:
            return send
        recv = send.new_empty(sum(recv_counts), *send.shape[1:])
        self._all_to_all(recv, send, list(recv_counts), list(send_counts))
        return recv

    def _activate(self, pre_activation: torch.Tensor, row_probs: torch.Tensor) -> torch.Tensor:
        """Activation times routing weight, ``[rows, intermediate]`` in the rows' dtype."""
        wide = _accumulation_dtype(pre_activation.dtype)
        value_and_slope = _ACTIVATIONS[self.config.activation]
        if self.config.gated:
            gate, up = pre_activation.to(wide).chunk(2, dim=1)
            activated = value_and_slope(gate)[0] * up
        else:
            activated = value_and_slope(pre_activation.to(wide))[0]
        return (activated * row_probs.to(wide).unsqueeze(1)).to(pre_activation.dtype)

    def _activate_backward(
        self, pre_activation: torch.Tensor, row_probs: torch.Tensor, grad_weighted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Differentiates :meth:`_activate`.

        Args:
            pre_activation: ``[rows, fc1_rows]``.
            row_probs: ``[rows]``.
            grad_weighted: ``[rows, intermediate]``, gradient of :meth:`_activate`'s result.

        Returns:
            That result again, the gradient of ``row_probs`` in the accumulation dtype, and the
            gradient of ``pre_activation`` in its dtype.
        """
        wide = _accumulation_dtype(pre_activation.dtype)
        value_and_slope = _ACTIVATIONS[self.config.activation]
        weight = row_probs.to(wide).unsqueeze(1)
        grad_activated = grad_weighted * weight
        if self.config.gated:
            gate, up = pre_activation.to(wide).chunk(2, dim=1)
            value, slope = value_and_slope(gate)
            activated = value * up
            grad_pre = torch.cat((grad_activated * up * slope, grad_activated * value), dim=1)
        else:
            activated, slope = value_and_slope(pre_activation.to(wide))
            grad_pre = grad_activated * slope
        grad_prob = (grad_weighted * activated).sum(1)
        dtype = pre_activation.dtype
        return (activated * weight).to(dtype), grad_prob, grad_pre.to(dtype)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _oriented(weights: ExpertWeights, local_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's weights as ``[fc1_rows, hidden]`` and ``[hidden, intermediate]``."""
    fc1, fc2 = weights.fc1[local_expert], weights.fc2[local_expert]
    return (fc1.t(), fc2.t()) if weights.transposed else (fc1, fc2)


def _store(grad: WeightGrad, value: torch.Tensor) -> None:
    if grad.accumulate:
        grad.buffer.add_(value)
    else:
        grad.buffer.copy_(value)


_ValueAndSlope = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _silu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(z)
    return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))


def _gelu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return z * cdf, cdf + z * density


def _gelu_tanh(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    tanh = torch.tanh(scale * (z + cubic * z**3))
    inner_slope = scale * (1 + 3 * cubic * z * z)
    return 0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * inner_slope


def _relu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return z.clamp(min=0), (z > 0).to(z.dtype)


def _squared_relu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive = z.clamp(min=0)
    return positive * positive, 2 * positive


_ACTIVATIONS: dict[Activation, _ValueAndSlope] = {
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: _relu,
    Activation.SQUARED_RELU: _squared_relu,
}
