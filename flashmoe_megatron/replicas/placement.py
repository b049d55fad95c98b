"""Slots: the places that compute an expert, and which place each rank's tokens go to.

An expert is what a router knows. A rank has a home slot for each expert that it owns, followed by
spare slots, which hold replicas of other ranks' experts for the length of a launch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flashmoe_megatron.errors import ConfigError

Counts = Sequence[Sequence[int]]
"""``[rank][expert]``, how many routes the tokens of each rank have to each expert."""

Hosts = Sequence[Sequence[int]]
"""The experts in each rank's spare slots."""


class Placement(NamedTuple):
    """The experts in the spare slots, and the slot that computes an expert for each rank's tokens.

    All tokens of a rank that choose an expert go to one slot, which their rank's table names.

    Attributes:
        hosts: The experts in each rank's spare slots, in the order of the slots; the slots after
            them are empty.
        slot_of: ``[source rank][expert]``, numbers of slots. Slot ``rank * slots_per_rank + i`` is
            the rank's home slot of its expert ``i``, or a spare one after these.
        slots_per_rank: Home slots and spare ones.
    """

    hosts: tuple[tuple[int, ...], ...]
    slot_of: tuple[tuple[int, ...], ...]
    slots_per_rank: int

    @property
    def num_local_experts(self) -> int:
        """Home slots of each rank."""
        return len(self.slot_of[0]) // len(self.hosts)

    def rank_of(self, source: int, expert: int) -> int:
        """The rank that computes an expert for a source rank's tokens."""
        return self.slot_of[source][expert] // self.slots_per_rank

    def replicas_of(self, owner: int) -> list[tuple[int, int, int]]:
        """The replicas of a rank's experts: ``(holder, spare slot, expert)``, ascending."""
        local = self.num_local_experts
        return [
            (host, slot, expert)
            for host, experts in enumerate(self.hosts)
            for slot, expert in enumerate(experts)
            if expert // local == owner
        ]

    def check(self, num_ranks: int, num_experts: int, spare_slots: int) -> None:
        """Refuses a placement that a launch could not follow.

        Raises:
            ConfigError: A rank holds more experts than it has spare slots, its own, one twice or
                one without an owner; or a table names a slot that does not hold the expert.
        """
        local = num_experts // num_ranks
        wanted = (num_ranks, num_ranks, local + spare_slots)
        if (len(self.hosts), len(self.slot_of), self.slots_per_rank) != wanted:
            raise ConfigError(
                f"a placement has replicas for {len(self.hosts)} ranks, tables for "
                f"{len(self.slot_of)} and {self.slots_per_rank} slots per rank: wanted "
                f"{num_ranks}, {num_ranks} and {local + spare_slots}"
            )
        holds: list[int] = []
        for rank, experts in enumerate(self.hosts):
            first = rank * local
            foreign = [e for e in experts if 0 <= e < num_experts and e // local != rank]
            if len(set(foreign)) != len(experts) or len(experts) > spare_slots:
                raise ConfigError(
                    f"rank {rank} is to hold replicas of the experts {list(experts)}: wanted at "
                    f"most {spare_slots} different ones of 0 to {num_experts - 1}, none of its own "
                    f"({first} to {first + local - 1})"
                )
            holds += [*range(first, first + local), *experts, *[-1] * (spare_slots - len(experts))]
        for source, table in enumerate(self.slot_of):
            for expert, slot in enumerate(table):
                if not 0 <= slot < len(holds) or holds[slot] != expert:
                    raise ConfigError(
                        f"rank {source}'s table sends expert {expert} to slot {slot}, which does "
                        "not hold it: wanted its owner's slot or one with a replica"
                    )
            if len(table) != num_experts:
                raise ConfigError(
                    f"rank {source}'s table has {len(table)} experts, wanted {num_experts}"
                )


def placement_of(
    rank_of: Sequence[Sequence[int]], hosts: Sequence[Sequence[int]], spare_slots: int
) -> Placement:
    """Returns a placement from ranks instead of slots.

    ``rank_of`` has ``[source rank][expert]``, the rank that computes an expert for a source's
    tokens, and ``hosts`` the experts in each rank's spare slots.
    """
    local = len(rank_of[0]) // len(hosts)
    slots_per_rank = local + spare_slots
    spare = [{expert: local + i for i, expert in enumerate(experts)} for experts in hosts]

    def slot(expert: int, rank: int) -> int:
        place = expert % local if expert // local == rank else spare[rank][expert]
        return rank * slots_per_rank + place

    return Placement(
        hosts=tuple(map(tuple, hosts)),
        slot_of=tuple(tuple(slot(e, rank) for e, rank in enumerate(row)) for row in rank_of),
        slots_per_rank=slots_per_rank,
    )


def locality(counts: Counts, placement: Placement) -> float:
    """The share of all routes whose token and expert are on one rank; 1 if there are none."""
    pairs = [
        (count, placement.rank_of(source, expert) == source)
        for source, routes in enumerate(counts)
        for expert, count in enumerate(routes)
    ]
    total = sum(count for count, _ in pairs)
    return sum(count for count, stays in pairs if stays) / total if total else 1.0
