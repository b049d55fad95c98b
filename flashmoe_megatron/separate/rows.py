"""How rows travel on the reference backend: unpadded, by ``torch.distributed``.

Each expert's segment starts at a multiple of :data:`~flashmoe_megatron.config.TILE_M` in the
receiver's buffer only, and every sum has a fixed order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashmoe_megatron.backend import TrafficCounters
from flashmoe_megatron.checks import choices_problem, map_problem
from flashmoe_megatron.config import MoEConfig, align_capacity, count_row_blocks
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    RoutingError,
    RowBoundError,
    reason_of,
    told_error,
)
from flashmoe_megatron.planner import bounded_row_blocks
from flashmoe_megatron.ranks import REFUSED, UNFOLLOWED, Ranks, unfollowed_ranks
from flashmoe_megatron.replicas.placement import Counts, Hosts, Placement
from flashmoe_megatron.separate.activations import accumulation_dtype

Planner = Callable[[Counts, Hosts | None], Placement]
"""Plans replicas from all ranks' routes and, if they are settled, the experts in spare slots."""


@dataclass(frozen=True)
class RowPlan:
    """Where every route of one call goes.

    A route is a pair of a token and an expert that it selected. Routes are ordered by the slot that
    computes them, then by token, so that the routes to one rank are consecutive; without replicas
    slots are in the order of experts.

    Attributes:
        token_idx: ``[num_routes]`` int64, the token of each route of this rank.
        column_idx: ``[num_routes]`` int64, where its probability is among the token's: at its
            global expert or, with indices, at its choice.
        route_of_token: ``[num_tokens, most routes of a token]`` int64, each token's routes by
            ascending expert, then -1.
        send_counts: Routes to each rank.
        recv_counts: Rows from each rank.
        slot: ``[num_rows]`` int64, where each received row lies in the receive buffer.
        is_route: ``[buffer rows]`` bool, false for the pad rows.
        segments: First row and number of rows of each local expert in the receive buffer, then of
            each replica.
        placement: Where replicas are; ``None`` if there are no spare slots.
        unfollowed: The ranks that have no backward of this call.
    """

    token_idx: torch.Tensor
    column_idx: torch.Tensor
    route_of_token: torch.Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    slot: torch.Tensor
    is_route: torch.Tensor
    segments: tuple[tuple[int, int], ...]
    placement: Placement | None = None
    unfollowed: tuple[int, ...] = ()


class RowExchange:
    """The rows of one layer between the ranks of its group; every method is collective over it.

    Attributes:
        ranks: The ranks of the group.
        rank: This one among them.
        traffic: What was sent and padded so far.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | None,
        row_bound: float | None = None,
        *,
        spare_slots: int = 0,
        planner: Planner | None = None,
    ) -> None:
        """Binds the layer to a process group.

        Args:
            config: The layer's shape.
            group: The expert-parallel group, ``None`` for one rank.
            row_bound: Most rows that a rank may receive, as a multiple of the mean; the same on
                every rank. ``None`` for any number.
            spare_slots: Slots for replicas on each rank.
            planner: Fills them; ``None`` for no replicas. The same on every rank.

        Raises:
            ConfigError: The group's size is not ``config.num_ranks``.
        """
        self.ranks = Ranks(group)
        if self.ranks.num_ranks != config.num_ranks:
            raise ConfigError(
                f"num_ranks={config.num_ranks}, but the process group has {self.ranks.num_ranks} "
                "ranks"
            )
        self.traffic = TrafficCounters()
        self._most_blocks = None
        if row_bound is not None:  # every spare slot, too, may fill one block in part
            self._most_blocks = bounded_row_blocks(config, row_bound) + spare_slots
        self._planner = planner
        self._spare_slots = spare_slots
        self._config = config
        self._group = group
        self.rank = self.ranks.rank

    def plan(
        self,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        hosts: Hosts | None = None,
        *,
        followed: bool = True,
    ) -> RowPlan:
        """Exchanges the counts of rows between all ranks and lays out the receive buffer.

        Args:
            probs: What a backend's forward takes.
            routing_map: Likewise.
            hosts: The experts in the spare slots, if these are settled.
            followed: Whether this rank has a backward of this call.

        Raises:
            RoutingError: On every rank, if any rank's routing is unusable.
            FlashMoEError: What another rank has refused.
            RowBoundError: On every rank, if any rank is to receive more rows than the bound.
            PeerTimeoutError: A rank is gone or did not come in time, here and in every exchange.
        """
        config = self._config
        device = probs.device
        is_map = routing_map.dtype == torch.bool
        selected = routing_map if is_map else routing_map >= 0
        if config.skip_zero_probs:
            selected = selected & (probs != 0)
        if is_map:
            problem = map_problem(config, probs, selected)
        else:
            problem = choices_problem(config, routing_map, probs)
        if problem is not None:
            reason = reason_of(RoutingError(problem))
            self.refuse(reason, device)
            raise told_error(self.rank, reason)
        # By token, then column: of a map its columns are the experts.
        token_idx, column_idx = selected.nonzero(as_tuple=True)
        expert_idx = column_idx if is_map else routing_map[token_idx, column_idx].long()
        send = torch.bincount(expert_idx, minlength=config.num_experts)
        told = self.tell_counts(send, followed=followed)
        unfollowed = unfollowed_ranks(told[:, 0].tolist())
        if unfollowed:
            told[list(unfollowed)] -= UNFOLLOWED
        if bool((told < 0).any()):
            raise self.hear_refusal(None)
        placement, recv, slot_idx = None, told, expert_idx
        if self._planner is not None:
            placement = self._planner(told.tolist(), hosts)
            placement.check(config.num_ranks, config.num_experts, self._spare_slots)
            slot_of = torch.tensor(placement.slot_of, device=device)
            slot_idx = slot_of[self.rank][expert_idx]
            here = slot_of // placement.slots_per_rank == self.rank
            recv = told.new_zeros(config.num_ranks, placement.slots_per_rank)
            recv[here.nonzero()[:, 0], slot_of[here] % placement.slots_per_rank] = told[here]
            num_slots = config.num_ranks * placement.slots_per_rank
            send = torch.bincount(slot_idx, minlength=num_slots)

        rows_per_expert = recv.sum(0).tolist()
        if self._most_blocks is not None:
            self.check_bound(count_row_blocks(rows_per_expert), self._most_blocks, send)
        by_expert = expert_idx.sort(stable=True).indices
        token_idx, column_idx = token_idx[by_expert], column_idx[by_expert]
        slot_idx = slot_idx[by_expert]
        # Routes of one token are in the order of experts, too, so a stable sort counts them.
        by_token = token_idx.sort(stable=True).indices
        routes_of = torch.bincount(token_idx, minlength=selected.shape[0])
        first_of = (routes_of.cumsum(0) - routes_of)[token_idx[by_token]]
        rank_in_token = torch.empty_like(by_token)
        rank_in_token[by_token] = torch.arange(len(by_token), device=device) - first_of
        if placement is not None:
            by_slot = slot_idx.sort(stable=True).indices
            token_idx, column_idx = token_idx[by_slot], column_idx[by_slot]
            rank_in_token = rank_in_token[by_slot]
        most_routes = int(routes_of.max()) if selected.shape[0] else 0
        route_of_token = torch.full((selected.shape[0], most_routes), -1, device=device)
        route_of_token[token_idx, rank_in_token] = torch.arange(len(token_idx), device=device)

        # Rows arrive by source rank, then expert; they are stored by expert, then source rank.
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
        self.traffic.pad_rows_local += buffer_rows - sum(rows_per_expert)
        return RowPlan(
            token_idx=token_idx,
            column_idx=column_idx,
            route_of_token=route_of_token,
            send_counts=tuple(send.view(config.num_ranks, -1).sum(1).tolist()),
            recv_counts=tuple(recv.sum(1).tolist()),
            slot=slot,
            is_route=is_route,
            segments=tuple(zip(starts, rows_per_expert, strict=True)),
            placement=placement,
            unfollowed=unfollowed,
        )

    def foresee(self, routing_map: torch.Tensor) -> Hosts:
        """The experts that spare slots would hold under a routing.

        Args:
            routing_map: ``[num_tokens, num_experts]`` bool.
        """
        assert self._planner is not None, "there are spare slots"
        return self._planner(self.gather_counts(routing_map.sum(0)).tolist(), None).hosts

    def refuse(self, reason: str, device: torch.device) -> None:
        """Takes part in the exchange of counts of a call that this rank refuses.

        Args:
            reason: What every rank is told.
            device: Where the other ranks' counts are.

        Raises:
            PeerTimeoutError: A rank is gone or did not come in time.
        """
        if self._group is not None:
            self.tell_counts(torch.full((self._config.num_experts,), REFUSED, device=device))
            self.hear_refusal(reason)

    def hear_refusal(self, own: str | None) -> FlashMoEError:
        """What the first rank that refuses this call has refused."""
        with self.ranks.bounded:
            refused = self.ranks.first_error(own)
        assert refused is not None
        return refused

    def dispatch(self, routed: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """Sends one entry per route to the rank of its expert.

        Args:
            routed: ``[num_routes, ...]``, in the order of the plan.
            plan: The routes.

        Returns:
            The receive buffer ``[buffer rows, ...]``, zero at the pad rows.
        """
        self.traffic.pad_rows_sent += routed.shape[0] - len(plan.token_idx)
        received = self.exchange(routed, plan.send_counts, plan.recv_counts)
        buffer = received.new_zeros(plan.is_route.shape[0], *received.shape[1:])
        buffer[plan.slot] = received
        return buffer

    def send_back(self, buffer: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """Sends the buffer's rows back to where they came from, in the order of the plan."""
        self.traffic.pad_rows_sent += int((~plan.is_route[plan.slot]).sum())
        return self.exchange(buffer[plan.slot], plan.recv_counts, plan.send_counts)

    def combine(self, buffer: torch.Tensor, plan: RowPlan, *, num_tokens: int) -> torch.Tensor:
        """Sends the buffer's rows back and sums each token's, by ascending expert."""
        returned = self.send_back(buffer, plan)
        total = torch.zeros(
            num_tokens,
            self._config.hidden,
            dtype=accumulation_dtype(buffer.dtype),
            device=buffer.device,
        )
        for routes in plan.route_of_token.unbind(1):
            tokens = (routes >= 0).nonzero().squeeze(1)
            total[tokens] += returned[routes[tokens]].to(total.dtype)
        return total.to(buffer.dtype)

    def check_bound(self, blocks: int, most: int, counts: torch.Tensor) -> None:
        """Refuses, on every rank, the blocks of rows that the fullest rank is to receive."""
        of_ranks = self._exchange_counts(counts.new_full((self._config.num_ranks,), blocks))
        refuse_beyond(of_ranks.tolist(), most)

    def tell_counts(self, send: torch.Tensor, *, followed: bool = True) -> torch.Tensor:
        """Tells the others how many routes this rank has to each expert.

        Args:
            send: ``[num_experts]`` int64, the numbers of routes.
            followed: Whether this rank has a backward of this call; else :data:`UNFOLLOWED` is
                added to what it tells.

        Returns:
            ``[num_ranks, num_local_experts]``, the routes of each rank to this one's experts; if
            replicas are planned, ``[num_ranks, num_experts]``, to all.
        """
        if not followed and self._group is not None:
            send = send + UNFOLLOWED
        if self._planner is not None:
            return self.gather_counts(send)
        recv = self._exchange_counts(send)
        return recv.view(self._config.num_ranks, self._config.num_local_experts)

    def gather_counts(self, send: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' routes to each expert, ``[num_ranks, num_experts]``.

        Args:
            send: ``[num_experts]`` int64, this rank's.
        """
        if self._group is None:
            return send[None]
        everyone = send.new_empty(self._config.num_ranks * len(send))
        with self.ranks.bounded:
            dist.all_gather_into_tensor(everyone, send, group=self._group)
        return everyone.view(self._config.num_ranks, -1)

    def _exchange_counts(self, send: torch.Tensor) -> torch.Tensor:
        """Sends each rank its share of the counts, all shares alike; returns the received."""
        if self._group is None:
            return send
        recv = torch.empty_like(send)
        self._all_to_all(recv, send)
        return recv

    def exchange(
        self, send: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> torch.Tensor:
        """Uneven all-to-all of rows; counts what leaves this rank."""
        rows_leaving = send.shape[0] - send_counts[self.rank]
        if send.dim() > 1:
            self.traffic.rows_sent += rows_leaving
        self.traffic.bytes_sent += rows_leaving * math.prod(send.shape[1:]) * send.element_size()
        if self._group is None:
            return send
        recv = send.new_empty(sum(recv_counts), *send.shape[1:])
        self._all_to_all(recv, send, list(recv_counts), list(send_counts))
        return recv

    def _all_to_all(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        recv_counts: list[int] | None = None,
        send_counts: list[int] | None = None,
    ) -> None:
        with self.ranks.bounded:
            dist.all_to_all_single(recv, send, recv_counts, send_counts, group=self._group)


def refuse_beyond(blocks: Sequence[int], most: int) -> None:
    """Refuses what the fullest rank is to receive, by the blocks of rows of each, beyond a bound.

    Raises:
        RowBoundError: It names that rank.
    """
    fullest = max(range(len(blocks)), key=blocks.__getitem__)
    if blocks[fullest] > most:
        raise RowBoundError.of(fullest, blocks[fullest], most)
