"""Counts of routes that planners are judged by."""

from flashmoe_megatron.replicas.placement import Counts, Hosts

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
