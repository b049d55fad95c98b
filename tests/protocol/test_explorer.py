"""The protocol under the explorer: every order of small scenarios, random orders of larger ones."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.protocol.programs import run, summary

# States that each has; a search that ends earlier has lost some.
COMPLETE = {
    "ranks2": 55_000,
    "ranks3": 1_300,
    "ranks3_apart": 4_400,
    "ranks3_split": 290,
    "ranks3_refused": 190,
    "ranks3_refused_twice": 50,
    "ranks3_unmatched": 440,
    "ranks3_unfollowed_large": 40,
    "ctas2": 780,
    "ctas2_grads": 1_900,
    "ctas2_grads_slots": 1_200,
    "ctas3": 4_400,
    "first_copied": 4_400,
    "own_routes": 320,
    "few": 17_000,
    "few_split": 1_000,
    "quantized": 510,
    "quantized_plan": 370,
    "in_place": 440,
    "mixed": 340,
    "cut_groups": 35,
    "not_copied": 250,
    "tokens_copied": 280,
    "both_copied": 520,
    "ranks2_own": 8_000,
    "ahead": 76_000,
}
BOUNDED = {
    "ranks2_backward": 10_000,
    "ranks2_gather": 10_000,
    "ranks2_quantized": 10_000,
    "ranks2_layers": 10_000,
    "ranks2_own_backward": 10_000,
    "ranks2_layers_backward": 10_000,
    "ctas2_backward": 10_000,
    "ctas2_agents2": 10_000,
    "both_copied_agents2": 10_000,
    "meanwhile": 10_000,
    "ranks3_absent": 10_000,
    "ranks3_late": 10_000,
    "ranks3_late_backward": 10_000,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", COMPLETE)
def test_no_order_of_a_small_scenario_breaks_a_rule(
    explore: Path, scenario: str, tell: Callable[[str], None]
) -> None:
    outcome = run(explore, scenario, 10_000_000)
    tell(summary(outcome))
    assert outcome.code == 0, f"{outcome.record}\n{outcome.text}"
    assert outcome.record["complete"]
    assert outcome.record["states"] >= COMPLETE[scenario]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", BOUNDED)
def test_no_order_that_is_tried_of_a_larger_scenario_breaks_a_rule(
    explore: Path, scenario: str, tell: Callable[[str], None]
) -> None:
    outcome = run(explore, scenario, BOUNDED[scenario])
    tell(summary(outcome))
    assert outcome.code == 0, f"{outcome.record}\n{outcome.text}"
    assert outcome.record["states"] >= BOUNDED[scenario]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "runs", "ahead"), [("walk", 8000, 1_800), ("late", 20_000, 0)])
def test_no_random_order_of_random_sizes_breaks_a_rule(
    explore: Path, kind: str, runs: int, ahead: int, tell: Callable[[str], None]
) -> None:
    """And so many deliveries are ahead, which few are if who looks for them gives up early."""
    outcome = run(explore, kind, runs, 7)
    tell(summary(outcome))
    assert outcome.code == 0, f"{outcome.record}\n{outcome.text}"
    assert outcome.record["runs"] >= runs
    assert outcome.record["ahead"] >= ahead


def test_every_tile_has_one_ticket_behind_those_that_it_waits_for(
    order: Path, tell: Callable[[str], None]
) -> None:
    outcome = run(order, 9)
    tell(summary(outcome))
    assert outcome.code == 0, outcome.record
    assert outcome.record["tickets"] > 200_000
