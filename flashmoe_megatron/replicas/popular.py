"""The placement of CCFuser (PPoPP 2025), which keeps rows off slow links.

``csrc/flashmoe/placement/popular.h`` is the same in C++. A launch gives it no rates, so that all
links are equal there.

A rank whose spare slots let it compute half of its own tokens' routes has enough of them at hand
to work on while the others' rows arrive.
"""

from collections.abc import Sequence

from flashmoe_megatron.replicas.placement import Counts, Placement, placement_of

OWN_BANDWIDTH, LINK_BANDWIDTH = 8, 1
"""A Hopper GPU's own memory against NVLink, roughly; the default of ``popular``."""


def popular(
    counts: Counts,
    spare_slots: int,
    bandwidth: Sequence[Sequence[int]] | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
) -> Placement:
    """Plans replicas so that most routes stay on their token's rank.

    The head of a rank's own routes, its most popular experts with together more than half of them,
    is computed there, as far as spare slots go. Unpopular experts, which are in no rank's head,
    leave ranks that have more than the mean of rows: each goes, with all its tokens, to the rank
    that is nearest to most of them among all with room below the mean and an empty slot.

    Args:
        counts: ``[rank][expert]`` routes.
        spare_slots: Spare slots of each rank.
        bandwidth: ``[from][to]`` whole numbers, how fast rows travel; by default all links are
            equal and a rank's own memory is faster.
        hosts: The experts in each rank's spare slots, if these are settled: a rank's tokens use
            its own replicas alone.

    Returns:
        The placement.
    """
    ranks, experts = range(len(counts)), range(len(counts[0]))
    local = len(experts) // len(ranks)
    rank_of = [[expert // local for expert in experts] for _ in ranks]
    if hosts is not None:
        for rank, held in enumerate(hosts):
            for expert in held:
                rank_of[rank][expert] = rank
        return placement_of(rank_of, hosts, spare_slots)
    chosen: list[list[int]] = [[] for _ in ranks]
    in_heads: set[int] = set()
    for rank, routes in enumerate(counts):
        left = sum(routes)
        for expert in sorted(experts, key=lambda e: (-routes[e], e)):
            if 2 * left < sum(routes) or not routes[expert]:
                break
            in_heads.add(expert)
            left -= routes[expert]
            if rank_of[rank][expert] != rank and len(chosen[rank]) < spare_slots:
                chosen[rank].append(expert)
                rank_of[rank][expert] = rank
    rows = [0 for _ in ranks]
    for routes, table in zip(counts, rank_of, strict=True):
        for count, rank in zip(routes, table, strict=True):
            rows[rank] += count
    total = [sum(routes[expert] for routes in counts) for expert in experts]
    near = bandwidth or [
        [OWN_BANDWIDTH if a == b else LINK_BANDWIDTH for b in ranks] for a in ranks
    ]
    for expert in sorted(experts, key=lambda e: (total[e], e)):
        owner = expert // local
        is_busy = rows[owner] * len(ranks) > sum(rows)
        takers = [
            rank
            for rank in ranks
            if rank != owner
            and len(chosen[rank]) < spare_slots
            and (rows[rank] + total[expert]) * len(ranks) <= sum(rows)
        ]
        if expert in in_heads or not total[expert] or not is_busy or not takers:
            continue

        def worth(taker: int, expert: int = expert) -> tuple[int, int]:
            return sum(counts[rank][expert] * near[rank][taker] for rank in ranks), -taker

        taker = max(takers, key=worth)
        chosen[taker].append(expert)
        rows[owner] -= total[expert]
        rows[taker] += total[expert]
        for table in rank_of:
            table[expert] = taker
    return placement_of(rank_of, [sorted(held) for held in chosen], spare_slots)
