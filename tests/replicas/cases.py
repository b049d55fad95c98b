"""Counts of routes that planners are judged by."""

from collections.abc import Iterator

import numpy as np

from flashmoe_megatron.replicas.placement import Counts, Hosts
from tools.simulate.skew import TOKENS

BY_HAND: list[tuple[Counts, Hosts]] = [
    # Rank 0 has more than the mean; most tokens of its expert 1 are rank 2's, which has room.
    ([[2, 0, 0, 0, 0, 0], [50, 1, 90, 0, 0, 0], [50, 3, 0, 0, 90, 0]], ((), (), (1,))),
    # The same where rank 2 then has the mean.
    ([[2, 0, 0, 0, 0, 0], [48, 1, 90, 0, 0, 0], [48, 3, 0, 0, 90, 0]], ((), (), (1,))),
    # Ranks 1 and 2 are as near, so the first one gets it.
    ([[2, 0, 0, 0, 0, 0], [50, 2, 90, 0, 0, 0], [50, 2, 0, 0, 90, 0]], ((), (1,), ())),
    # Nobody chooses expert 1.
    ([[2, 0, 0, 0, 0, 0], [50, 0, 90, 0, 0, 0], [50, 0, 0, 0, 90, 0]], ((), (), ())),
    # Expert 1 is rank 0's head, so it stays.
    ([[0, 2, 0, 0, 0, 0], [50, 0, 90, 0, 0, 0], [50, 0, 0, 0, 90, 0]], ((), (), ())),
    # Rank 0 has the mean, so its expert 1 stays, and rank 1's expert 3 gets the slot.
    ([[0] * 6, [40, 4, 90, 0, 0, 0], [40, 0, 0, 6, 72, 0]], ((), (), (3,))),
    # Experts 2 and 3 have as many routes, so the first of them gets the slot that both could have.
    ([[40, 40, 40, 0, 3, 2], [90, 1, 0, 40, 0, 50], [0, 50, 1, 1, 40, 0]], ((2,), (0,), (1,))),
    # Half of the routes is no head yet, and a rank without tokens has none.
    ([[10, 0, 5, 5], [0, 0, 10, 10]], ((2,), ())),
    ([[10, 10, 10, 10], [0, 0, 0, 0]], ((2,), ())),
]
"""What ``popular`` places in one spare slot of each rank."""


def workloads(num_ranks: int, num_experts: int, topk: int) -> Iterator[tuple[str, Counts]]:
    """The kinds of routing of Megatron-LM's token-imbalance benchmark (pull request 7488).

    Its names and what each isolates are theirs, the numbers are ours: a hot expert gets nine times
    what another one does.
    """
    rng = np.random.default_rng(7)
    local, num_hot = num_experts // num_ranks, num_experts // num_ranks // 2

    def counts(hot, tokens=None, cold=()) -> Counts:
        weight = np.ones(num_experts)
        weight[list(hot)] = 9
        weight[list(cold)] = 0
        tokens = tokens or [TOKENS] * num_ranks
        return [rng.multinomial(each * topk, weight / weight.sum()).tolist() for each in tokens]

    yield "W0_balanced", counts(())
    yield "W1_hot_expert_set", counts(rng.choice(num_experts, num_hot, replace=False))
    yield "W2_hot_rank", counts(range(num_hot))
    yield "W3_spread_hot_experts", counts(range(0, num_experts, num_experts // num_hot))
    ragged = [TOKENS * (rank + 1) * 2 // (num_ranks + 1) for rank in range(num_ranks)]
    yield "W4_source_ragged", counts(range(num_hot), ragged)
    yield "W5_zero_expert_rank", counts((), cold=range(local + local // 2))
    for step in range(3):
        first = step * local
        yield f"W6_rotating_hotspot, step {step}", counts(range(first, first + num_hot))
    for step in range(3):
        yield f"W7_burst, step {step}", counts(range(local) if step == 1 else ())
