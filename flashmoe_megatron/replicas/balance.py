"""The placement with the least load of the busiest rank, for links that are fast.

``csrc/flashmoe/placement/balance.h`` is the same program in C++, step by step, for a launch to plan
with; a test compares the two. Hence integers alone, and an order for everything that ties.

A launch works in blocks of 128 rows, and each slot fills whole blocks, so a rank's load is
counted in rows of blocks plus rows: blocks are what it computes, and rows tell apart ranks of
equal blocks.

What moves is a piece: the routes of one source rank to one expert. Each step takes pieces of one
expert from the busiest rank to another. Greedy steps can end in a corner, so several attempts, each
with other preferences, start from the home placement, and the best of them counts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flashmoe_megatron.config import TILE_M
from flashmoe_megatron.replicas.placement import Counts, Placement, placement_of

GOOD_PERCENT = 101
"""An attempt ends once the busiest rank has at most so much of the mean load."""
STEPS_PER_SLOT = 4
"""An attempt's steps are bounded by so many for each spare slot of the group."""


class Preference(NamedTuple):
    """The preferences of one attempt.

    Attributes:
        aim_percent: A rank is filled up to so much of the mean rows.
        reserve: A rank that has at most so many empty slots left, and at least one, is filled at
            once with rows of the busiest rank, even if that rank is then below the mean.
        step: Pieces are taken from the taker's own tokens first, then of the source ranks in this
            direction.
    """

    aim_percent: int
    reserve: int
    step: int


PREFERENCES = tuple(
    Preference(aim, reserve, step)
    for aim in (100, 101, 102, 104)
    for reserve in (1, 2)
    for step in (1, -1)
)


class _Move(NamedTuple):
    giver: int
    taker: int
    expert: int
    sources: int  # a bit for each
    rows: int


def balance(
    counts: Counts,
    spare_slots: int,
    hosts: Sequence[Sequence[int]] | None = None,
    least_rows: int = 0,
) -> Placement:
    """Plans replicas so that the busiest rank has as little load as possible.

    Neither its rows nor its blocks are ever more than with every expert at home.

    Args:
        counts: ``[rank][expert]`` routes.
        spare_slots: Spare slots of each rank.
        hosts: The experts in each rank's spare slots, if these are settled; by default the plan
            chooses them.
        least_rows: A replica that would take fewer rows is not made, and a placement whose busiest
            rank is over the mean by no more is good.

    Returns:
        The placement; without replicas if the home one is good.
    """
    best: _Attempt | None = None
    for preference in PREFERENCES:
        attempt = _Attempt(counts, spare_slots, preference, hosts, least_rows)
        attempt.run()
        if best is None or attempt.most() < best.most():
            best = attempt
        if attempt.is_good():
            break
    assert best is not None
    return placement_of(best.rank_of, hosts or best.replicas(), spare_slots)


def _blocks(rows: int) -> int:
    return -(-rows // TILE_M)


class _Attempt:
    def __init__(
        self,
        counts: Counts,
        spare_slots: int,
        preference: Preference,
        hosts: Sequence[Sequence[int]] | None,
        least_rows: int,
    ) -> None:
        ranks, experts = range(len(counts)), range(len(counts[0]))
        local = len(experts) // len(ranks)
        self.counts = counts
        self.preference = preference
        self.least_rows = least_rows
        self.local = local
        self.num_ranks, self.num_experts = len(ranks), len(experts)
        self.rank_of = [[expert // local for expert in experts] for _ in ranks]
        self.rows = [
            [sum(counts[s][e] for s in ranks) if e // local == r else 0 for e in experts]
            for r in ranks
        ]
        self.holders = [1 << expert // local for expert in experts]  # a bit for each rank
        self.empty = [0 if hosts else spare_slots for _ in ranks]
        for rank, held in enumerate(hosts or ()):
            for expert in held:
                self.holders[expert] |= 1 << rank
        self.total = [sum(self.rows[r]) for r in ranks]
        self.blocks = [sum(_blocks(rows) for rows in self.rows[r]) for r in ranks]
        self.most_rows, self.most_blocks = max(self.total), max(self.blocks)
        self.aim = -(-sum(self.total) * preference.aim_percent // (100 * len(ranks)))
        self.most_steps = STEPS_PER_SLOT * len(ranks) * max(spare_slots, 1)

    def run(self) -> None:
        for _ in range(self.most_steps):
            if self.is_good() or not self._step():
                return

    def load(self, rank: int) -> int:
        return self.blocks[rank] * TILE_M + self.total[rank]

    def most(self) -> int:
        return max(map(self.load, range(self.num_ranks)))

    def is_good(self) -> bool:
        loads = sum(map(self.load, range(self.num_ranks)))
        over = self.most() * self.num_ranks - loads
        # A row counts twice in a load: once itself, and once in its block.
        most_over = max(loads * (GOOD_PERCENT - 100), 200 * self.least_rows * self.num_ranks)
        return over * 100 <= most_over

    def replicas(self) -> list[list[int]]:
        """The experts that each rank computes rows of and does not own, ascending."""
        return [
            [e for e in range(self.num_experts) if self.rows[r][e] and e // self.local != r]
            for r in range(self.num_ranks)
        ]

    def _step(self) -> bool:
        ranks = sorted(range(self.num_ranks), key=lambda rank: (self.load(rank), -rank))
        *takers, giver = ranks
        return any(self._accept(move) for move in self._candidates(giver, takers) if move)

    def _candidates(self, giver: int, takers: list[int]) -> Iterator[_Move | None]:
        excess, idlest = self.total[giver] - self.aim, takers[0]
        room = self.aim - self.total[idlest]
        is_reserved = 1 <= self.empty[idlest] <= self.preference.reserve
        if is_reserved and self.empty[giver] and 0 < excess < room:
            yield self._largest(giver, idlest, room)
        largest: _Move | None = None
        for taker in takers:
            move = self._largest(giver, taker, min(excess, self.aim - self.total[taker]))
            if move and (largest is None or move.rows > largest.rows):
                largest = move
        yield largest
        for taker in takers:
            yield self._largest(giver, taker, (self.total[giver] - self.total[taker]) // 2)
        for taker in takers:
            yield self._largest(giver, taker, self.total[giver] - self.total[taker] - 1)

    def _largest(self, giver: int, taker: int, most: int) -> _Move | None:
        """The move of most rows, but at most ``most``; of equal ones first without a new slot."""
        best: _Move | None = None
        best_is_new = False
        for expert in range(self.num_experts) if most > 0 else ():
            is_new = not self.holders[expert] >> taker & 1
            if not self.rows[giver][expert] or (is_new and not self.empty[taker]):
                continue
            rows = sources = 0
            for i in range(self.num_ranks):
                source = (taker + i * self.preference.step) % self.num_ranks
                piece = self.counts[source][expert]
                if self.rank_of[source][expert] == giver and piece and rows + piece <= most:
                    rows += piece
                    sources |= 1 << source
            if is_new and rows < self.least_rows:
                continue
            is_better = best is None or rows > best.rows
            if best is not None and rows == best.rows:
                is_better = best_is_new and not is_new
            if rows and is_better:
                best, best_is_new = _Move(giver, taker, expert, sources, rows), is_new
        return best

    def _accept(self, move: _Move) -> bool:
        """Makes a move if the busier of its two ranks has less load after it."""
        giver, taker, expert, sources, rows = move
        given, taken = self.rows[giver][expert], self.rows[taker][expert]
        blocks_left = self.blocks[giver] - _blocks(given) + _blocks(given - rows)
        blocks_there = self.blocks[taker] - _blocks(taken) + _blocks(taken + rows)
        left = blocks_left * TILE_M + self.total[giver] - rows
        there = blocks_there * TILE_M + self.total[taker] + rows
        if (
            max(left, there) >= self.load(giver)
            or max(blocks_left, blocks_there) > self.most_blocks
            or self.total[taker] + rows > self.most_rows
        ):
            return False
        self.blocks[giver], self.blocks[taker] = blocks_left, blocks_there
        self.total[giver] -= rows
        self.total[taker] += rows
        self.rows[giver][expert] -= rows
        self.rows[taker][expert] += rows
        for source in range(self.num_ranks):
            if sources >> source & 1:
                self.rank_of[source][expert] = taker
        if not self.holders[expert] >> taker & 1:
            self.holders[expert] |= 1 << taker
            self.empty[taker] -= 1
        return True
