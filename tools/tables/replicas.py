"""Makes the table of how well replicas even out loads, by drawing routers and balancing them."""

import statistics

from flashmoe_megatron.replicas.balance import balance
from tools import markdown
from tools.simulate.skew import Zipf, home_placement, imbalance

RANKS, SPARE_SLOTS, DRAWS = 8, 2, 50


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
