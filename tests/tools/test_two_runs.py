"""The verdict on a training notices a loss that is no number."""

import argparse
import math

import pytest

from examples import two_runs

ARGS = argparse.Namespace(log_interval=10, train_iters=40)
FALLING = [5 - 0.1 * iteration for iteration in range(ARGS.train_iters)]


@pytest.mark.parametrize(("at", "told"), [(3, "first"), (38, "last tenth")])
def test_one_loss_that_is_no_number(monkeypatch, at: int, told: str) -> None:
    monkeypatch.setattr(two_runs, "log", lambda message: None)
    assert two_runs.compare(FALLING, FALLING, "theirs", ARGS) == []
    ours = [math.nan if index == at else loss for index, loss in enumerate(FALLING)]
    (failure,) = two_runs.compare(ours, FALLING, "theirs", ARGS)
    assert told in failure


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2.1])
def test_a_checkpoint_that_gives_another_loss(loss: float) -> None:
    assert two_runs.judge_reload(2.0, 2.0) == []
    assert two_runs.judge_reload(2.0, loss) == two_runs.judge_reload(loss, 2.0) != []


@pytest.mark.parametrize(
    ("losses", "failures", "lines"),
    [
        (FALLING, [], []),
        (FALLING, ["the reason"], ["failed: the reason"]),
        (FALLING[::-1], ["the reason"], ["failed: the reason", "failed: the lm loss did not fall"]),
        ([*FALLING[:-1], math.nan], [], ["failed: the lm loss did not fall"]),
    ],
)
def test_the_verdict_tells_of_every_failure(
    monkeypatch, losses: list[float], failures: list[str], lines: list[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(two_runs, "log", said.append)
    assert two_runs.verdict(losses, failures, ARGS, "lm loss") == bool(lines)
    first, *rest = said
    assert first.startswith(f"lm loss of flashmoe: {losses[0]:.3f} at the first iteration, ")
    assert rest == lines
