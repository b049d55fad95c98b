"""The policies by name, and what they cannot be asked for."""

from collections.abc import Sequence
from typing import Literal, get_args

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.replicas.balance import balance
from flashmoe_megatron.replicas.placement import Counts, Placement
from flashmoe_megatron.replicas.popular import popular

When = Literal["launch", "lookahead", "off"]
"""The time at which replicas are planned; the option ``placement`` says what each word means."""
Policy = Literal["balance", "popular"]
"""Aims of their plan; the option ``replica_policy`` says what each word means."""
POLICIES: tuple[Policy, ...] = get_args(Policy)

ONLY_IN_MEGATRON = (
    "wanted launch or off, since only in Megatron is a layer's input seen before its attention"
)
"""The refusal of lookahead in other frameworks."""


def plan_replicas(
    policy: Policy,
    counts: Counts,
    spare_slots: int,
    hosts: Sequence[Sequence[int]] | None = None,
    least_rows: int = 0,
) -> Placement:
    """Plans where a launch computes each expert; the same on every rank that has the same counts.

    ``hosts`` are the experts in each rank's spare slots, if these are settled. Under ``balance`` a
    replica takes at least ``least_rows``; see :func:`flashmoe_megatron.planner.least_rows_of`.
    """
    if policy == "balance":
        return balance(counts, spare_slots, hosts, least_rows)
    return popular(counts, spare_slots, hosts=hosts)


def check_slots(config: MoEConfig, spare_slots: int, placement: When) -> None:
    """Refuses spare slots that a layer cannot have; slots that stay empty do no harm.

    Raises:
        ConfigError: There are more slots than a rank has experts, experts are in FP8, or lookahead
            has no slot to fill.
    """
    if placement == "off":
        return
    local = config.num_local_experts
    if spare_slots > local:
        raise ConfigError(
            f"spare_slots={spare_slots}: wanted at most {local}, as many as a rank has of the "
            f"{config.num_experts} experts"
        )
    if spare_slots and config.in_fp8:
        raise ConfigError(
            f"spare_slots={spare_slots} with experts={config.experts!r}: replicas' weights travel "
            "in bfloat16; wanted spare_slots=0, or experts='bf16'"
        )
    if placement == "lookahead" and not spare_slots:
        raise ConfigError(
            "placement='lookahead' with spare_slots=0: there is no slot for a replica; wanted "
            "spare_slots of 1 or more, or placement='launch'"
        )
