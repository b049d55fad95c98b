"""The policies by name, and what they cannot be asked for."""

from collections.abc import Sequence
from typing import Literal, get_args

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.replicas.balance import balance
from flashmoe_megatron.replicas.placement import Counts, Placement
from flashmoe_megatron.replicas.popular import popular

When = Literal["launch", "lookahead", "off"]
"""When replicas are planned; the option ``placement`` says what each word means."""
Policy = Literal["balance", "popular"]
"""What they are planned for; the option ``replica_policy`` says it."""
POLICIES: tuple[Policy, ...] = get_args(Policy)

PRODUCTS_PER_S = 7e14
"""Floating-point operations of a GPU in a second, in bfloat16."""
HIDDEN_PUSH = 0.5
"""How much of what replicas move is hidden behind rows; measured on two H100s."""

ONLY_IN_MEGATRON = (
    "wanted launch or off, since only in Megatron is a layer's input seen before its attention"
)
"""What is said of lookahead elsewhere."""


def plan_replicas(
    policy: Policy,
    counts: Counts,
    spare_slots: int,
    hosts: Sequence[Sequence[int]] | None = None,
    least_rows: int = 0,
) -> Placement:
    """Plans where a launch computes each expert; the same on every rank that has the same counts.

    Args:
        policy: What for.
        counts: ``[rank][expert]`` routes.
        spare_slots: Spare slots of each rank.
        hosts: The experts in each rank's spare slots, if these are settled.
        least_rows: See :func:`least_rows_of`; read by ``balance``.
    """
    if policy == "balance":
        return balance(counts, spare_slots, hosts, least_rows)
    return popular(counts, spare_slots, hosts=hosts)


def least_rows_of(link_bytes_per_s: float) -> int:
    """Rows of an expert from which on a replica is worth what it moves, whatever the expert's size.

    For each number of an expert's weights, a replica moves 2 bytes in either direction of a layer
    and 4 bytes of its gradient, and each row takes 6 operations: 2 forward and 4 backward.

    Args:
        link_bytes_per_s: How fast another rank's bytes come; 0 where that is not known, and then
            any replica is worth it.
    """
    if not link_bytes_per_s:
        return 0
    push_s = (1 - HIDDEN_PUSH) * 8 / link_bytes_per_s
    return round(push_s / (6 / PRODUCTS_PER_S))


def check_slots(config: MoEConfig, spare_slots: int, placement: When) -> None:
    """Refuses spare slots that a layer cannot have; those that stay empty do no harm.

    Args:
        config: The layer's shape.
        spare_slots: Spare slots of each rank.
        placement: When replicas are planned.

    Raises:
        ConfigError: There are more slots than a rank has experts, or lookahead has no slot to fill.
    """
    if placement == "off":
        return
    local = config.num_local_experts
    if spare_slots > local:
        raise ConfigError(
            f"spare_slots={spare_slots}: wanted at most {local}, as many as a rank has of the "
            f"{config.num_experts} experts"
        )
    if placement == "lookahead" and not spare_slots:
        raise ConfigError(
            "placement='lookahead' with spare_slots=0: there is no slot for a replica; wanted "
            "spare_slots of 1 or more, or placement='launch'"
        )
