"""Replicas of experts in spare slots: the routes to them, their weights and their gradients.

Weights travel to the spare slots and gradients to the owner. Both are one uneven all-to-all of flat
tensors, in the order of hosts, slots and kinds of weights.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.ranks import REFUSED
from flashmoe_megatron.replicas.placement import Counts, Hosts, Placement
from flashmoe_megatron.separate.agreement import Agreement, Heard, without_marks
from flashmoe_megatron.separate.exchange import Exchange
from flashmoe_megatron.separate.plan import Sorted
from flashmoe_megatron.weights import ExpertWeights

Planner = Callable[[Counts, Hosts | None], Placement]
"""Plans replicas from all ranks' routes and, if they are settled, the experts in spare slots."""

Values = list[torch.Tensor]
"""One tensor of each kind that an expert has: fc1, fc2 and their biases."""

_KINDS = ("fc1", "fc2", "fc1_bias", "fc2_bias")


class Replicas:
    """The spare slots of one backend."""

    def __init__(self, config: MoEConfig, spare_slots: int, planner: Planner) -> None:
        """Makes empty slots, which a planner fills alike on every rank."""
        self._config, self._spare_slots, self._planner = config, spare_slots, planner
        self._settled: dict[int, Hosts] = {}

    def settle(self, counts: Counts, layer: int) -> None:
        """Settles on the experts of a layer's next forward, by the routes that are expected."""
        self._settled[layer] = self._planner(counts, None).hosts

    def forget(self) -> None:
        """Drops what is settled, as all ranks do where one refuses a call."""
        self._settled.clear()

    def place(
        self, agreement: Agreement, found: Sorted, heard: Heard, layer: int
    ) -> tuple[Sorted, Heard, Placement | None]:
        """Plans which slot computes each route; the host waits for the numbers of routes.

        ``agreement`` has sent these numbers, and ``heard`` has the numbers of all ranks. The
        routes in ``found`` are this rank's, by expert.

        Returns:
            The routes by slot, the received numbers by slot, and where replicas are. The arguments
            and ``None`` if a rank refuses the call.
        """
        settled = self._settled.pop(layer, None)
        told = agreement.told_by_all(heard)
        counts = without_marks(told)
        if min(map(min, counts)) == REFUSED:
            self.forget()
            return found, heard, None
        config, rank = self._config, agreement.rank
        placement = self._planner([list(of_rank) for of_rank in counts], settled)
        placement.check(config.num_ranks, config.num_experts, self._spare_slots)
        width = placement.slots_per_rank
        own = [0] * (config.num_ranks * width)
        for expert, slot in enumerate(placement.slot_of[rank]):
            own[slot] = counts[rank][expert]
        filled = config.num_local_experts + len(placement.hosts[rank])
        received = [[0] * filled for _ in counts]
        for source, slots in enumerate(placement.slot_of):
            mark = told[source][0] - counts[source][0]
            for expert, slot in enumerate(slots):
                if slot // width == rank:
                    received[source][slot % width] = counts[source][expert]
            received[source] = [count + mark for count in received[source]]
        host = [*own, *(count for of_rank in received for count in of_rank)]
        device = found.counts.device
        heard = Heard(torch.tensor(received, device=device), lambda: host)
        return _by_slot(found, placement.slot_of[rank], own), heard, placement


def _by_slot(found: Sorted, slot_of: Sequence[int], counts: Sequence[int]) -> Sorted:
    """Returns the routes of one rank's tokens by slot; each slot computes one expert."""
    device, most = found.place.device, found.place.numel()
    slots = torch.tensor(slot_of, device=device)
    order = slots.repeat_interleave(found.counts).sort(stable=True).indices
    moved = torch.full((most + 1,), most, device=device)
    moved[order] = torch.arange(len(order), device=device)
    of_slots = torch.tensor(counts, device=device)
    return Sorted(
        token_idx=found.token_idx[order],
        flat_idx=found.flat_idx[order],
        row_probs=found.row_probs[order],
        place=moved[found.place],
        counts=of_slots,
        ends=of_slots.cumsum(0).int(),
    )


def with_replicas(
    exchange: Exchange, weights: ExpertWeights, placement: Placement
) -> tuple[ExpertWeights, int]:
    """Fetches the weights of the experts in this rank's spare slots. Collective.

    ``weights`` has one tensor for each local expert.

    Returns:
        The weights of all slots that hold an expert, and the bytes that have come.
    """
    own = list(zip(*(getattr(weights, kind) for kind in _kinds(weights)), strict=True))
    local = placement.num_local_experts
    sent: list[Values] = [[] for _ in placement.hosts]
    for host, _, expert in placement.replicas_of(exchange.rank):
        sent[host] += own[expert % local]
    held = placement.hosts[exchange.rank]
    sizes = [0] * len(placement.hosts)
    size = sum(tensor.numel() for tensor in own[0])
    for expert in held:
        sizes[expert // local] += size
    received = _swap(exchange, sent, sizes, own[0][0])
    # They come by owner, and of one owner in the order of the slots.
    order = sorted(range(len(held)), key=lambda slot: held[slot] // local)
    found = {slot: list(_cut(received[place * size :], own[0])) for place, slot in enumerate(order)}
    lists = zip(*own, *(found[slot] for slot in range(len(held))), strict=True)
    tensors: dict[str, Any] = dict(zip(_kinds(weights), map(tuple, lists), strict=True))
    all_slots = ExpertWeights(**tensors, transposed=weights.transposed, split=False)
    return all_slots, received.numel() * received.element_size()


def add_replica_grads(
    exchange: Exchange, placement: Placement, values: Sequence[torch.Tensor]
) -> int:
    """Brings gradients from the spare slots to their owners, which add them. Collective.

    ``values`` are ``[slots, ...]`` gradients of each kind of weights, of the slots of this rank
    that hold an expert. The owner adds replicas' gradients by ascending rank of their host. Returns
    the bytes that have come.
    """
    local = placement.num_local_experts
    sent: list[Values] = [[] for _ in placement.hosts]
    for slot, expert in enumerate(placement.hosts[exchange.rank], local):
        sent[expert // local] += (value[slot] for value in values)
    replicas = placement.replicas_of(exchange.rank)
    size = sum(value[0].numel() for value in values)
    sizes = [0] * len(placement.hosts)
    for host, _, _ in replicas:
        sizes[host] += size
    received = _swap(exchange, sent, sizes, values[0])
    for place, (_, _, expert) in enumerate(replicas):
        totals = [value[expert % local] for value in values]
        for total, value in zip(totals, _cut(received[place * size :], totals), strict=True):
            total += value
    return received.numel() * received.element_size()


def _kinds(weights: ExpertWeights) -> list[str]:
    return [kind for kind in _KINDS if getattr(weights, kind)]


def _cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The beginning of a flat tensor, in pieces that have the shapes of other tensors."""
    first = 0
    for tensor in like:
        yield flat[first : first + tensor.numel()].view(tensor.shape)
        first += tensor.numel()


def _swap(
    exchange: Exchange, sent: Sequence[Values], recv_counts: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """Sends each rank its values; returns the received ones, by rank, in a flat tensor."""
    flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
    send = torch.cat(flat) if flat else like.new_empty(0)
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    return exchange.swap(send, counts, recv_counts)
