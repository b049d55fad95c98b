"""Every mutant of the protocol is caught by the scenario that mutants.py names."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.protocol.mutants import MUTANTS, Mutant
from tests.protocol.programs import AGENTS, build, run, without_agents


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_explorer_catches(mutant: Mutant, tmp_path: Path, tell: Callable[[str], None]) -> None:
    if mutant.scenario == "order":
        outcome = run(build("order", tmp_path / "mutant", mutant), mutant.states)
    else:
        program = build("explore", tmp_path / "mutant", mutant)
        outcome = run(program, mutant.scenario, mutant.states)
    said = f"{outcome.record['failure']}"
    tell(f"{mutant.name}: {mutant.scenario}: {said}")
    assert outcome.code == 1, "the explorer found nothing wrong"
    assert mutant.failure in said


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant", [one for one in MUTANTS if one.by_stress], ids=lambda mutant: mutant.name
)
def test_threads_catch(mutant: Mutant, tmp_path: Path, tell: Callable[[str], None]) -> None:
    program = build("stress", tmp_path / "mutant", mutant)
    outcome = run(program, 400, 1, 5)
    said = next((line for line in outcome.text.splitlines() if "=" * 8 not in line), "")
    tell(f"{mutant.name}: {said}")
    assert outcome.code in (3, 66), outcome.text


@pytest.mark.parametrize("program", AGENTS)
def test_what_all_mutants_share_has_no_function_of_the_protocol(program: str) -> None:
    """It would stay as it was in a mutant of that function."""
    names = subprocess.run(
        ["nm", without_agents(program)], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"[Uu] _ZN13protocol_test5AgentI.*3runEv", names), "it calls agents"
    assert not re.findall(r" [TtWw] _ZNK?8flashmoe8protocol\S+", names)


def test_mutants_have_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutant_that_fits_nothing_is_an_error(tmp_path: Path) -> None:
    stale = Mutant("stale", "ranks2", "", False, (("forward.h", "no such text", ""),))
    with pytest.raises(ValueError, match="found 0 times"):
        build("explore", tmp_path / "mutant", stale)
