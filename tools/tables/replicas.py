"""Makes tables of what replicas do to loads and links, by drawing routers and planning for them."""

import statistics

import numpy as np

from flashmoe_megatron.replicas.balance import balance
from flashmoe_megatron.replicas.placement import Counts, Placement, locality
from flashmoe_megatron.replicas.popular import popular
from tools import markdown
from tools.simulate.skew import Zipf, home_placement, imbalance
from tools.simulate.workloads import workloads

RANKS, SPARE_SLOTS, DRAWS = 8, 2, 50
WHEN = "no replicas", "two slots"

FEW_EXPERTS, FEW_TOPK, FEW_SLOTS = 128, 8, (2, 4, 8, 16)

BRIDGED = [
    [1500 if a == b else 300 if a // 2 == b // 2 else 25 for b in range(4)] for a in range(4)
]
"""GB/s between four GPUs: own memory, a bridge between two each, and PCIe between these pairs."""
BRIDGED_EXPERTS, BRIDGED_ROUTES, BRIDGED_DRAWS = 64, 16384, 20


def evened() -> list[str]:
    """The busiest rank over the mean, before and after, of routers by size and exponent."""
    rows = []
    for num_experts, topk in ((64, 2), (128, 8), (256, 8)):
        for exponent in (0.25, 0.5, 0.75, 1.0):
            router = Zipf(num_experts, topk, exponent)
            found = []
            for _ in range(DRAWS):
                counts = router.draw(RANKS)
                placement = balance(counts, SPARE_SLOTS)
                before, _ = imbalance(counts, home_placement(RANKS, num_experts, SPARE_SLOTS))
                found.append(
                    (before, *imbalance(counts, placement), sum(map(len, placement.hosts)))
                )
            before, after, blocks, replicas = zip(*found, strict=True)
            rows.append(
                [
                    f"{num_experts}, top-{topk}",
                    exponent,
                    f"{statistics.mean(before):.2f}",
                    f"{statistics.mean(after):.3f}",
                    f"{max(after):.3f}",
                    f"{max(blocks):.3f}",
                    f"{statistics.mean(replicas):.0f}",
                ]
            )
    titles = ("experts, top-k", "Zipf", "rows before", "rows, mean of draws", "worst draw")
    return markdown.table((*titles, "blocks of 128 rows, worst draw", "replicas in all"), rows)


def kinds() -> list[str]:
    """The busiest rank's rows over the mean, without replicas and with two slots, by routing."""
    rows = []
    shapes = ((128, 8), (64, 2))
    both = zip(*(workloads(RANKS, num_experts) for num_experts, _ in shapes), strict=True)
    for of_shapes in both:
        cells = []
        for (num_experts, topk), workload in zip(shapes, of_shapes, strict=True):
            counts = workload.counts(topk, np.random.default_rng(3))
            for placement in (
                home_placement(RANKS, num_experts, SPARE_SLOTS),
                balance(counts, SPARE_SLOTS),
            ):
                busiest, _ = imbalance(counts, placement)
                cells.append(f"{busiest:.2f}")
        rows.append([of_shapes[0].name, *cells])
    titles = [f"{num} experts, top-{topk}: {when}" for num, topk in shapes for when in WHEN]
    return markdown.table(("routing", *titles), rows)


def few_ranks() -> list[str]:
    """The busiest rank's rows over the mean where one rank is hot, by ranks and spare slots."""
    rows = []
    for num_ranks in (2, 4, 8):
        for name, share in (("W2_hot_rank", 2), ("W7_burst, step 1", 1)):
            kind = next(one for one in workloads(num_ranks, FEW_EXPERTS) if one.name == name)
            counts = kind.counts(FEW_TOPK, np.random.default_rng(3))
            home = home_placement(num_ranks, FEW_EXPERTS, 0)
            busiest = [imbalance(counts, home)[0]]
            busiest += [imbalance(counts, balance(counts, slots))[0] for slots in FEW_SLOTS]
            hot = FEW_EXPERTS // num_ranks // share
            rows.append([num_ranks, hot, *(f"{each:.2f}" for each in busiest)])
    titles = ("ranks", "hot experts, of one rank", "no slots", *map(str, FEW_SLOTS))
    return markdown.table(titles, rows)


def local() -> list[str]:
    """The share of routes that stay on their rank, and the busiest rank over the mean."""
    rows = []
    for exponent, spare in ((1.0, 8), (1.0, 16), (1.5, 2), (1.5, 4)):
        found = []
        for seed in range(BRIDGED_DRAWS):
            counts = _bridged_counts(None, exponent, seed)
            home = home_placement(len(BRIDGED), BRIDGED_EXPERTS, spare)
            placement = popular(counts, spare)
            busiest, _ = imbalance(counts, placement)
            found.append((locality(counts, home), locality(counts, placement), busiest))
        before, after, busiest = zip(*found, strict=True)
        shares = (f"{statistics.mean(each):.2f}" for each in (before, after))
        rows.append([exponent, spare, *shares, f"{min(busiest):.2f} to {max(busiest):.2f}"])
    titles = ("Zipf", "spare slots", "local before", "local with popular", "busiest over mean")
    return markdown.table(titles, rows)


def rates() -> list[str]:
    """The share of routes that cross PCIe, planned with and without rates."""
    rows = []
    for own, exponent, spare in (
        *((None, exponent, spare) for exponent, spare in ((0.5, 4), (1.0, 2), (1.0, 8))),
        *((0.3, exponent, spare) for exponent, spare in ((0.5, 4), (1.0, 2), (1.0, 8))),
    ):
        found = []
        for seed in range(BRIDGED_DRAWS):
            counts = _bridged_counts(own, exponent, seed)
            placements = (
                home_placement(len(BRIDGED), BRIDGED_EXPERTS, spare),
                popular(counts, spare),
                popular(counts, spare, BRIDGED),
            )
            found.append([_between_pairs(counts, one) for one in placements])
        shares = [f"{statistics.mean(each):.3f}" for each in zip(*found, strict=True)]
        rows.append(["one" if own is None else "each rank's own", exponent, spare, *shares])
    titles = ("popularity", "Zipf", "spare slots", "no replicas", "popular", "popular with rates")
    return markdown.table(titles, rows)


def _bridged_counts(own: float | None, exponent: float, seed: int) -> Counts:
    """Routes by one popularity for all ranks, or by ranks' own, further apart for less ``own``."""
    rng = np.random.default_rng(seed)
    popularity = rng.permutation(np.arange(1, BRIDGED_EXPERTS + 1) ** -exponent)
    popularity /= popularity.sum()
    each = [
        popularity if own is None else rng.dirichlet(popularity * BRIDGED_EXPERTS * own)
        for _ in BRIDGED
    ]
    return [rng.multinomial(BRIDGED_ROUTES, one).tolist() for one in each]


def _between_pairs(counts: Counts, placement: Placement) -> float:
    """The share of routes that cross from one pair of bridged GPUs to the other."""
    crossing = sum(
        count
        for source, routes in enumerate(counts)
        for expert, count in enumerate(routes)
        if placement.rank_of(source, expert) // 2 != source // 2
    )
    return crossing / sum(map(sum, counts))
