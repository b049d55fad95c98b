"""When replicas of hot experts pay: a layer's time with a skewed router, with and without them.

All ranks are simulated, and the slowest one's time is the layer's. What replicas move is told
apart, as if none of it were hidden: weights in forward and backward, and gradients in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashmoe_megatron.planner import least_rows_of
from flashmoe_megatron.replicas.balance import balance
from flashmoe_megatron.replicas.placement import Placement, home_placement
from tools.bench.shapes import Shape
from tools.simulate.figures import Figures, Fitted
from tools.simulate.model import simulate_launch
from tools.simulate.routing import ELEMENT_BYTES, SEED, Load

GRAD_BYTES = 4


@dataclass(frozen=True)
class Outcome:
    """One layer under one routing.

    Attributes:
        imbalance: Rows of the busiest rank over the mean, before and after.
        layer_us: Forward and backward of the slowest rank, before and after.
        moved_us: What replicas take on the busiest link, if nothing hides it.
        slot_bytes: One expert's weights.
    """

    imbalance: tuple[float, float]
    layer_us: tuple[float, float]
    moved_us: float
    slot_bytes: int

    @property
    def break_even(self) -> float:
        """The imbalance from which replicas gain more than they move."""
        return 1 + self.moved_us / self.layer_us[1]


def simulate_replicas(
    shape: Shape, num_ranks: int, exponent: float, slots: int, figures: Figures, fitted: Fitted
) -> Outcome:
    """Draws a router whose experts are as popular as words are, and balances it.

    As on the kernel, replicas that would move more than they bring are not made.

    Args:
        shape: The layer.
        num_ranks: Ranks of its group, within one NVLink domain.
        exponent: Zipf's; 0 for uniform choices.
        slots: Spare slots of each rank.
        figures: What GPUs and links do.
        fitted: Efficiencies.

    Raises:
        ConfigError: The layer cannot be on so many ranks.
    """
    shape.config(num_ranks)
    rng = np.random.default_rng(SEED)
    popularity = rng.permutation(np.arange(1, shape.num_experts + 1) ** -exponent)
    choices = []
    for _ in range(num_ranks):
        scores = np.log(popularity) + rng.gumbel(size=(shape.tokens, shape.num_experts))
        choices.append(np.argpartition(-scores, shape.topk - 1, axis=1)[:, : shape.topk])
    counts = [np.bincount(c.ravel(), minlength=shape.num_experts).tolist() for c in choices]
    before = home_placement(num_ranks, shape.num_experts, slots)
    link_bytes_per_s = figures.nvlink_gbps * fitted.link_efficiency * 1e9
    after = balance(counts, slots, least_rows=least_rows_of(link_bytes_per_s))
    loads = [list(_loads(shape, choices, placement)) for placement in (before, after)]
    layer_us = [
        sum(
            max(simulate_launch(shape, load, figures, fitted, backward=way).total for load in ranks)
            + fitted.once_us(backward=way)
            for way in (False, True)
        )
        for ranks in loads
    ]
    fc1_rows = shape.intermediate * (2 if shape.gated else 1)
    elements = shape.hidden * (fc1_rows + shape.intermediate)
    most = max(
        max(len(after.hosts[rank]), len(after.replicas_of(rank))) for rank in range(num_ranks)
    )
    moved = most * elements * (2 * ELEMENT_BYTES + GRAD_BYTES)
    imbalance = [max(load.imbalance for load in ranks) for ranks in loads]
    return Outcome(
        imbalance=(imbalance[0], imbalance[1]),
        layer_us=(layer_us[0], layer_us[1]),
        moved_us=moved / link_bytes_per_s * 1e6,
        slot_bytes=elements * ELEMENT_BYTES,
    )


def _loads(shape: Shape, choices: list[NDArray[np.int64]], placement: Placement) -> Iterator[Load]:
    """What each rank receives."""
    slot_of = np.array(placement.slot_of)
    slots = [table[chosen] for table, chosen in zip(slot_of, choices, strict=True)]
    ranks = [chosen // placement.slots_per_rank for chosen in slots]
    rows = np.bincount(
        np.concatenate(slots).ravel(), minlength=len(slot_of) * placement.slots_per_rank
    ).reshape(len(slot_of), -1)
    for rank, of_slots in enumerate(rows):
        others = (chosen for source, chosen in enumerate(ranks) if source != rank)
        yield Load(
            expert_rows=of_slots,
            domain_rows=float(sum((chosen == rank).any(1).sum() for chosen in others)),
            network_rows=0.0,
            imbalance=float(of_slots.sum() / (shape.tokens * shape.topk)),
        )


def table(rows: list[tuple[str, int, float, Outcome]]) -> list[str]:
    """Outcomes as Markdown: of a layer, on so many ranks, with an exponent."""
    titles = "layer | ranks | Zipf | imbalance | after | layer, ms | after | moved, ms | break-even"
    return [
        f"| {titles} |",
        "| --- " * (titles.count("|") + 1) + "|",
        *(
            f"| {name} | {ranks} | {exponent:g} | {one.imbalance[0]:.2f} | {one.imbalance[1]:.2f} "
            f"| {one.layer_us[0] / 1e3:.2f} | {one.layer_us[1] / 1e3:.2f} "
            f"| {one.moved_us / 1e3:.2f} | {one.break_even:.2f} |"
            for name, ranks, exponent, one in rows
        ),
    ]
