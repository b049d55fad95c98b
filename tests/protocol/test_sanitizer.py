"""The protocol on host threads, with random routings and delays, under ThreadSanitizer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.protocol.programs import run, summary

RACE = 66  # ThreadSanitizer's exit status


def test_a_known_race_is_reported(stress: Path) -> None:
    outcome = run(stress, "race")
    assert outcome.code == RACE
    assert "WARNING: ThreadSanitizer: data race" in outcome.text


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_virtual_ranks_finish_with_the_right_sums_and_without_a_race(
    stress: Path, seed: int, tell: Callable[[str], None]
) -> None:
    outcome = run(stress, 1000, seed)
    tell(summary(outcome))
    assert outcome.code == 0, outcome.text
    assert outcome.record["launches"] >= 1000
