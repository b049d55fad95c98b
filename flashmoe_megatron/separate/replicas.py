"""How replicas travel on the reference backend: weights to the spare slots, gradients to the owner.

Both are one uneven all-to-all of flat tensors, in the order of hosts, slots and kinds of weights.
"""

from collections.abc import Iterator, Sequence

import torch

from flashmoe_megatron.backend import ExpertWeights
from flashmoe_megatron.replicas.placement import Placement
from flashmoe_megatron.separate.rows import RowExchange

Values = list[torch.Tensor]
"""One tensor of each kind that an expert has: fc1, fc2 and their biases."""

_KINDS = ("fc1", "fc2", "fc1_bias", "fc2_bias")


def with_replicas(
    rows: RowExchange, weights: ExpertWeights, placement: Placement
) -> tuple[ExpertWeights, int]:
    """Fetches the weights of the experts in this rank's spare slots. Collective.

    Args:
        rows: The group.
        weights: The local experts, one tensor for each expert.
        placement: Which experts are where.

    Returns:
        The weights of all slots that hold an expert, and the bytes that have come.
    """
    own = list(zip(*(getattr(weights, kind) for kind in _kinds(weights)), strict=True))
    local = placement.num_local_experts
    sent = _Parcels(len(placement.hosts))
    for host, _, expert in placement.replicas_of(rows.rank):
        sent.put(host, own[expert % local])
    held = placement.hosts[rows.rank]
    sizes = [0] * len(placement.hosts)
    size = sum(tensor.numel() for tensor in own[0])
    for expert in held:
        sizes[expert // local] += size
    received = sent.exchange(rows, sizes, own[0][0])
    # They come by owner, and of one owner in the order of the slots.
    order = sorted(range(len(held)), key=lambda slot: held[slot] // local)
    found = {slot: list(_cut(received[place * size :], own[0])) for place, slot in enumerate(order)}
    lists = zip(*own, *(found[slot] for slot in range(len(held))), strict=True)
    tensors = dict(zip(_kinds(weights), map(tuple, lists), strict=True))
    all_slots = ExpertWeights(**tensors, transposed=weights.transposed, split=False)
    return all_slots, received.numel() * received.element_size()


def add_replica_grads(
    rows: RowExchange,
    placement: Placement,
    own: dict[int, Values],
    spare: Sequence[Values],
    *,
    like: torch.Tensor,
) -> int:
    """Brings gradients from the spare slots to their owners, which add them. Collective.

    Args:
        rows: The group.
        placement: Which experts are where.
        own: This rank's gradients of its experts that have replicas, by local expert; replicas'
            are added, by ascending rank of their host.
        spare: The gradients of this rank's spare slots that hold an expert, in order.
        like: Has the gradients' dtype and device.

    Returns:
        The bytes that have come.
    """
    local = placement.num_local_experts
    sent = _Parcels(len(placement.hosts))
    for expert, values in zip(placement.hosts[rows.rank], spare, strict=True):
        sent.put(expert // local, values)
    replicas = placement.replicas_of(rows.rank)
    sizes = [0] * len(placement.hosts)
    for host, _, expert in replicas:
        sizes[host] += sum(tensor.numel() for tensor in own[expert % local])
    received = sent.exchange(rows, sizes, like)
    first = 0
    for _, _, expert in replicas:
        totals = own[expert % local]
        for total, value in zip(totals, _cut(received[first:], totals), strict=True):
            total += value
        first += sum(tensor.numel() for tensor in totals)
    return received.numel() * received.element_size()


def _kinds(weights: ExpertWeights) -> list[str]:
    return [kind for kind in _KINDS if getattr(weights, kind)]


def _cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The beginning of a flat tensor, in pieces of the shapes of others."""
    first = 0
    for tensor in like:
        yield flat[first : first + tensor.numel()].view(tensor.shape)
        first += tensor.numel()


class _Parcels:
    """What one rank sends to each of the others."""

    def __init__(self, num_ranks: int) -> None:
        self._of_rank: list[Values] = [[] for _ in range(num_ranks)]

    def put(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        self._of_rank[rank] += (tensor.reshape(-1) for tensor in tensors)

    def exchange(
        self, rows: RowExchange, recv_counts: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        """Sends all; returns what comes, by rank."""
        flat = [tensor for tensors in self._of_rank for tensor in tensors]
        send = torch.cat(flat) if flat else like.new_empty(0)
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in self._of_rank]
        return rows.exchange(send, counts, recv_counts)
