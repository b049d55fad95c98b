"""Guests: experts of other hosts that a rank computes for its own host's tokens.

Every forward plans its guests from all ranks' counts of routes. The weights of a guest travel along
the rail, from its owner to the rank at the same place of the other host, in forward and again in
backward; its gradients travel back, and the owner adds them. For the backend within a host a guest
is one more expert of its own, so that spare slots may replicate it there, too.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_megatron.call import Grads
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.hosts.crossing import Later
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.hosts.rail import Rail
from flashmoe_megatron.hosts.routes import Choices
from flashmoe_megatron.planner import least_guest_rows
from flashmoe_megatron.weights import MATRIX, VECTOR, ExpertWeights, WeightGrad, spread, unstacked

_KINDS = {"fc1": MATRIX, "fc2": MATRIX, "fc1_bias": VECTOR, "fc2_bias": VECTOR}


@dataclass(frozen=True)
class GuestPlan:
    """The guests of one call, alike on all ranks.

    Slots are numbered over the whole group: those of a rank's own experts, then its guests'.

    Attributes:
        held: The guests of each rank, ascending.
        slot_of: ``[host][expert]``, the slot that computes an expert for a host's tokens.
        slots_per_rank: Own experts and room for guests.
    """

    held: tuple[tuple[int, ...], ...]
    slot_of: torch.Tensor
    slots_per_rank: int

    @property
    def is_empty(self) -> bool:
        """True if no rank has a guest."""
        return not any(self.held)

    def leaving(self, counts: torch.Tensor, grid: HostGrid) -> list[list[int]]:
        """How many routes of each rank go to each other host, by its routes to experts."""
        hosts = self.slot_of // (self.slots_per_rank * grid.ranks_per_host)
        target = hosts.repeat_interleave(grid.ranks_per_host, 0)
        found = counts.new_zeros(len(counts), grid.num_hosts).scatter_add_(1, target, counts)
        own = torch.arange(len(counts)) // grid.ranks_per_host
        return found.scatter_(1, own[:, None], 0).tolist()

    def placed(self, choices: Choices, host: int) -> Choices:
        """The choices of a host's tokens by slot in place of expert."""
        table = torch.cat([self.slot_of[host], torch.tensor([-1])])  # the last for "no choice"
        slots = table.to(choices.experts.device)[choices.experts.long()]
        return replace(choices, experts=slots.int())


def plan_guests(counts: torch.Tensor, grid: HostGrid, slots: int, least_rows: int) -> GuestPlan:
    """Plans the guests of all ranks.

    Each host takes, at each place, the experts of other hosts' ranks at this place that most of its
    own tokens' routes choose.

    Args:
        counts: ``[num_ranks, num_experts]`` int64 routes of each rank's tokens, on the CPU.
        grid: Any rank's.
        slots: Most guests of a rank.
        least_rows: Fewest rows that make an expert worth the way of its weights; at least 1.
    """
    num_hosts, places, num_experts = grid.num_hosts, grid.ranks_per_host, counts.shape[1]
    local = num_experts // len(counts)
    width = local + slots
    of_hosts = counts.view(num_hosts, places, num_experts).sum(1)
    # [host, place, owner's host, expert of the owner]
    pool = of_hosts.view(num_hosts, num_hosts, places, local).transpose(1, 2).clone()
    every = torch.arange(num_hosts)
    pool[every, :, every] = 0
    rows, order = pool.flatten(2).sort(dim=2, descending=True, stable=True)
    experts = torch.arange(num_experts)
    home = experts // local * width + experts % local
    slot_of = home.expand(num_hosts, -1).clone()
    held = []
    for host, place in itertools.product(range(num_hosts), range(places)):
        best = zip(rows[host, place, :slots].tolist(), order[host, place].tolist(), strict=False)
        guests = sorted(
            (chosen // local * places + place) * local + chosen % local
            for count, chosen in best
            if count >= least_rows
        )
        first = (host * places + place) * width + local
        for slot, expert in enumerate(guests, first):
            slot_of[host, expert] = slot
        held.append(tuple(guests))
    return GuestPlan(tuple(held), slot_of, width)


class Guests:
    """The room of one rank for guests, which layers that share a backend share, too.

    A call's weights stay in it until the next call's take their place, on the same stream.
    """

    def __init__(self, config: MoEConfig, grid: HostGrid, slots: int, device: torch.device) -> None:
        """Makes no room yet: its dtype is the weights'.

        Between processors, where nothing is gained, every guest is worth its way.
        """
        self._config, self._grid, self._slots = config, grid, slots
        self._least_rows = 1 if device.type == "cpu" else least_guest_rows(config)
        self._room: torch.Tensor | None = None

    def plan(self, counts: torch.Tensor) -> GuestPlan:
        """See :func:`plan_guests`."""
        return plan_guests(counts, self._grid, self._slots, self._least_rows)

    def with_own(self, weights: ExpertWeights) -> ExpertWeights:
        """This rank's experts and, after them, the room for guests as it is."""
        own = weights.per_expert()
        first = own.fc1[0]
        size = sum(one.numel() for one in _of_expert(own, 0))
        if self._room is None or (self._room.shape[1], self._room.dtype) != (size, first.dtype):
            self._room = first.new_zeros(self._slots, size, requires_grad=False)
        all_of: dict[str, Any] = dict.fromkeys(_KINDS, ())
        for kind, parts in zip(_kinds(own), _parts(self._room, _of_expert(own, 0)), strict=True):
            all_of[kind] = (*getattr(own, kind), *parts)
        return ExpertWeights(**all_of, transposed=weights.transposed, split=False)

    def fetch(self, rail: Rail, plan: GuestPlan, weights: ExpertWeights) -> Later[ExpertWeights]:
        """Begins to bring guests' weights. Collective over the rail, if any rank has a guest."""
        everything = self.with_own(weights)
        if plan.is_empty:
            return lambda: everything
        assert self._room is not None
        own = weights.per_expert()
        lent, taken = self._lent(plan), self._taken(plan)
        rows = [
            torch.cat([one.detach().reshape(-1) for one in _of_expert(own, expert)])
            for _, expert in lent
        ]
        send = torch.stack(rows) if rows else self._room[:0]
        wait = rail.exchange(
            send,
            self._room[: sum(taken)],
            self._by_host(host for host, _ in lent),
            taken,
            is_rows=False,
        )

        def later() -> ExpertWeights:
            wait()
            return everything

        return later

    def targets(self, weights: ExpertWeights, grads: Grads) -> tuple[Grads, torch.Tensor]:
        """Gives guests' gradients buffers of the own ones' form, after the own ones.

        ``grads`` can be written. Returns them with the buffers, ``[slots, numbers of an expert]``.
        """
        own = weights.per_expert()
        of_kinds = {}
        for (kind, num_dims), of_kind in zip(_KINDS.items(), grads, strict=True):
            tensors = getattr(weights, kind)
            if len(of_kind) != len(tensors):  # for one expert each
                tensors = unstacked(tensors, num_dims)
            of_kinds[kind] = spread(of_kind, tensors, num_dims) if of_kind else []
        wanted = list(filter(None, itertools.chain(*of_kinds.values())))
        is_added = any(one.accumulate for one in wanted)
        dtype = wanted[0].buffer.dtype if wanted else own.fc1[0].dtype
        like = _of_expert(own, 0)
        buffers = torch.zeros(
            self._slots, sum(one.numel() for one in like), dtype=dtype, device=like[0].device
        )
        for kind, parts in zip(_kinds(own), _parts(buffers, like), strict=True):
            of_kinds[kind] = [
                *(of_kinds[kind] or [None] * len(getattr(own, kind))),
                *(WeightGrad(part, is_added) for part in parts),
            ]
        return Grads(*of_kinds.values()), buffers

    def bring_back(
        self, rail: Rail, plan: GuestPlan, buffers: torch.Tensor, targets: Grads
    ) -> None:
        """Adds guests' gradients to their owners', in the order of hosts. Collective likewise.

        The arguments are of :meth:`targets`, after a backward.
        """
        if plan.is_empty:
            return
        lent, taken = self._lent(plan), self._taken(plan)
        wide = torch.promote_types(buffers.dtype, torch.float32)
        received = buffers.new_empty(len(lent), buffers.shape[1], dtype=wide)
        send = buffers[: sum(taken)].to(wide)
        wait = rail.exchange(
            send, received, taken, self._by_host(host for host, _ in lent), is_rows=False
        )
        wait()
        for (_, expert), row in zip(lent, received, strict=True):
            first = 0
            for of_kind in filter(None, targets):
                local = len(of_kind) - self._slots
                like = of_kind[local]
                assert like is not None, "guests have all gradients"
                size, target = like.buffer.numel(), of_kind[expert]
                if target is not None:
                    target.buffer.add_(row[first : first + size].view(like.buffer.shape))
                first += size

    def _lent(self, plan: GuestPlan) -> list[tuple[int, int]]:
        """Own experts that are guests elsewhere on the rail, by host: their number on this rank."""
        local, rank = self._config.num_local_experts, self._grid.rank
        return [
            (host, expert % local)
            for host, holder in enumerate(self._grid.ranks_of_rail)
            for expert in plan.held[holder]
            if expert // local == rank
        ]

    def _taken(self, plan: GuestPlan) -> list[int]:
        """How many guests of this rank each host of the rail has."""
        local, grid = self._config.num_local_experts, self._grid
        owners = (expert // local for expert in plan.held[grid.rank])
        return self._by_host(owner // grid.ranks_per_host for owner in owners)

    def _by_host(self, hosts: Iterator[int]) -> list[int]:
        found = [0] * self._grid.num_hosts
        for host in hosts:
            found[host] += 1
        return found


def _kinds(weights: ExpertWeights) -> list[str]:
    return [kind for kind in _KINDS if getattr(weights, kind)]


def _of_expert(weights: ExpertWeights, expert: int) -> list[torch.Tensor]:
    """An expert's tensors, kind by kind; ``weights`` has one for each expert."""
    return [getattr(weights, kind)[expert] for kind in _kinds(weights)]


def _parts(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields, for each kind, the part of each row that has the shape of that kind's tensor."""
    first = 0
    for one in like:
        part = rows[:, first : first + one.numel()]
        yield tuple(row.view(one.shape) for row in part.unbind())
        first += one.numel()
