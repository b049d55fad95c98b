"""The judge of trainings with a framework's own experts and with flashmoe's can say no."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.side_by_side import (
    FUSED,
    OWN,
    Framework,
    Outcome,
    Tolerance,
    Training,
    compare_noted,
    note,
)

OWN_ONE = Outcome(
    losses=[3.0, 2.0, 1.0],
    eval_losses=[1.5],
    grad_norms=[0.5, 0.25],
    skipped=[True, False, False],
    gradients={"fc1": torch.ones(4)},
    parameters={"fc1": torch.full((4,), 2.0)},
    layers={"mlp": "own"},
)
FUSED_ONE = replace(OWN_ONE, layers={"mlp": "ours"}, calls=[3], keeps={"all"})


def untrained(*_: Any) -> Outcome:
    raise NotImplementedError


FRAMEWORK = Framework(untrained, serves="ours", tolerance=Tolerance(1e-3, 1e-3, 1e-3))


@pytest.mark.parametrize(
    "change",
    [
        {"losses": [3.0, 2.0, 1.01]},
        {"losses": [3.0, 2.0]},
        {"eval_losses": [float("nan")]},
        {"grad_norms": [0.5, 0.26]},
        {"skipped": [False, False, False]},
        {"gradients": {"fc1": torch.tensor([1.0, 1.0, 1.0, 1.01])}},
        {"gradients": {}},
        {"parameters": {"fc1": torch.full((4,), torch.nan)}},
        {"layers": {"mlp": "ours", "other": "own"}},
        {"calls": [3, 0]},
        {"calls": []},
        {"keeps": {"inputs"}},
        {"over_hosts": True},
    ],
    ids=str,
)
def test_each_difference_is_found(change: dict[str, Any]) -> None:
    FRAMEWORK.check(OWN_ONE, FUSED_ONE, Training())
    with pytest.raises(AssertionError):
        FRAMEWORK.check(OWN_ONE, replace(FUSED_ONE, **change), Training())


def test_flashmoe_on_the_side_of_the_own_experts_is_found() -> None:
    with pytest.raises(AssertionError):
        FRAMEWORK.check(FUSED_ONE, FUSED_ONE, Training())


def test_noted_trainings_are_all_there_and_agree(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    for experts, last in ((OWN, 1.0), (FUSED, 1.01)):
        note(out, "model", experts, [3.0, 2.0, last], release="1.0")
    ((own, fused),) = compare_noted(out, {"model": 0.02}).values()
    assert (own["release"], fused["losses"]) == ("1.0", [3.0, 2.0, 1.01])
    for wanted in ({"model": 0.001}, {"other": 0.02}, {"model": 0.02, "other": 0.02}):
        with pytest.raises(AssertionError):
            compare_noted(out, wanted)
    note(out, "still", OWN, [1.0] * 3)
    note(out, "still", FUSED, [1.0] * 3)
    with pytest.raises(AssertionError, match="still: nothing is learned"):
        compare_noted(out, {"model": 0.02, "still": 0.02})
