"""Draws skewed routings, and says how uneven a placement leaves the loads of ranks."""

from collections.abc import Iterable

import numpy as np

from flashmoe_megatron.config import TILE_M
from flashmoe_megatron.replicas.placement import Counts, Placement, placement_of

TOKENS = 4096
"""Tokens of a rank, unless another number is given."""


class Zipf:
    """Routers whose experts are chosen as often as words are: top-k without replacement.

    Args:
        num_experts: Experts of the group.
        topk: Experts of a token.
        exponent: 0 for uniform choices.
        seed: Draws follow from it.
    """

    def __init__(self, num_experts: int, topk: int, exponent: float, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_experts = num_experts
        popularity = np.arange(1, num_experts + 1) ** -exponent
        noise = self._rng.gumbel(size=(2**15, num_experts))
        scores = np.log(popularity) + noise
        self._choices = np.argpartition(-scores, topk - 1, axis=1)[:, :topk]

    def draw(self, num_ranks: int, num_tokens: int = TOKENS) -> Counts:
        """``[rank][expert]`` routes; which experts are popular is drawn, too."""
        names = self._rng.permutation(self._num_experts)
        drawn = self._rng.integers(0, len(self._choices), (num_ranks, num_tokens))
        return [
            np.bincount(names[self._choices[tokens]].ravel(), minlength=self._num_experts).tolist()
            for tokens in drawn
        ]


def home_placement(num_ranks: int, num_experts: int, spare_slots: int) -> Placement:
    """Every expert at its owner's, and nothing in the spare slots."""
    owners = [expert // (num_experts // num_ranks) for expert in range(num_experts)]
    return placement_of([owners] * num_ranks, [()] * num_ranks, spare_slots)


def rows_of_ranks(counts: Counts, placement: Placement) -> list[dict[int, int]]:
    """Returns each rank's rows by slot under a placement, for slots that have any."""
    rows: list[dict[int, int]] = [{} for _ in placement.hosts]
    for routes, table in zip(counts, placement.slot_of, strict=True):
        for count, slot in zip(routes, table, strict=True):
            if count:
                of_rank = rows[slot // placement.slots_per_rank]
                of_rank[slot] = of_rank.get(slot, 0) + count
    return rows


def imbalance(counts: Counts, placement: Placement) -> tuple[float, float]:
    """Busiest over mean, of rows and of blocks of 128 rows; of blocks over the fewest there are.

    The fewest blocks are those with each expert in one place.
    """
    rows = [sum(of_rank.values()) for of_rank in rows_of_ranks(counts, placement)]
    blocks = [blocks_of(of_rank.values()) for of_rank in rows_of_ranks(counts, placement)]
    fewest = blocks_of([sum(routes) for routes in zip(*counts, strict=True)])
    return max(rows) * len(rows) / sum(rows), max(blocks) * len(rows) / fewest


def blocks_of(rows: Iterable[int]) -> int:
    """Blocks of 128 rows of experts with so many rows each."""
    return sum(-(-count // TILE_M) for count in rows)
