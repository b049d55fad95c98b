"""A job whose rank is killed within a backward goes on from its checkpoint with the same losses."""

import contextlib
import dataclasses
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import PATIENCE_S, RankError, RankPool
from tests.forks import ForkServer
from tests.megatron.harness import Case, Layout, train
from tests.side_by_side import Outcome

pytestmark = [
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
BACKWARDS = 4 + 3
"""The rank dies in this call: two layers and two micro-batches make four calls an iteration."""


def train_and_die(group: dist.ProcessGroup, case: Case) -> Outcome:
    """Kills rank 1 in the middle of its second iteration."""
    left = BACKWARDS
    backward = ReferenceBackend.backward

    def backward_or_die(self: ReferenceBackend, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(self, *args, **options)

    ReferenceBackend.backward = backward_or_die  # type: ignore[method-assign]
    return train(group, case, True)


def test_restart_after_a_kill(tmp_path: Path):
    whole = Case(Layout(expert=2), steps=5)
    checkpoint = str(tmp_path / "checkpoint")
    first = dataclasses.replace(whole, steps=2, save_to=checkpoint)
    rest = dataclasses.replace(whole, steps=3, first_step=2, load_from=checkpoint)
    with (
        contextlib.closing(ForkServer("tests.megatron.preloaded")) as server,
        contextlib.closing(RankPool(2, [server])) as pool,
    ):
        uninterrupted = pool.run(train, whole, True)
        pool.run(train, first, True)
        with pytest.raises(RankError, match="exit code -9"):
            pool.run(train_and_die, rest)
        # A pool whose rank has died starts fresh processes.
        resumed = pool.run(train, rest, True)
    for want, got in zip(uninterrupted, resumed, strict=True):
        assert got.losses == want.losses[2:]
        assert got.grad_norms == want.grad_norms[2:]
        assert got.eval_losses == want.eval_losses
        for name, parameter in got.parameters.items():
            assert torch.equal(parameter, want.parameters[name]), name
