"""A step of a plain PyTorch training whose rows do not fit is repeated, and nothing shows it."""

import os
import random
import signal
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from flashmoe_megatron import FlashMoELayer, MoEConfig, RepeatedSteps, attempts, gates, repeats
from flashmoe_megatron.errors import ConfigError, RoutingError, RowBoundError
from tests.distributed import RankError, run_ranks

TOKENS, WIDTH, STEPS = 512, 64, 5


class Model(nn.Module):
    """Layers with a bound, behind what a step changes: generators, and buffers of two kinds.

    Where the first overflows, the second gets NaN, and refuses it before its own call.
    """

    mean: torch.Tensor

    def __init__(self, group: dist.ProcessGroup, row_bound: float) -> None:
        super().__init__()
        config = MoEConfig(
            num_experts=4,
            activation="silu",
            gated=True,
            topk=1,
            hidden=WIDTH,
            intermediate=WIDTH,
            num_ranks=dist.get_world_size(group),
            max_tokens=TOKENS,
        )
        options: dict[str, Any] = {
            "group": group,
            "device": "cpu",
            "dtype": torch.float32,
            "backend": "reference",
            "row_bound": row_bound,
        }
        self.norm = nn.BatchNorm1d(WIDTH)
        self.experts = FlashMoELayer(config, router=True, **options)
        self.register_buffer("mean", torch.zeros(WIDTH))
        drawn = torch.Generator().manual_seed(6)
        gate = gates.GShardGate(WIDTH, config.num_experts, generator=drawn)
        self.gated = gates.GatedExperts(gate, FlashMoELayer(replace(config, topk=2), **options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.experts(nn.functional.dropout(self.norm(x), 0.1))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out, routing = self.gated(x - self.mean)
        return out + routing.aux_loss


def train(
    group: dist.ProcessGroup, row_bound: float, room: float = 1.1, most_in_a_row: int = 10
) -> dict[str, Any]:
    """Trains, with tokens that nearly all choose one rank's experts from the second step on."""
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    attempts.ATTEMPTS.blocks = 0
    model = Model(group, row_bound)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = RepeatedSteps(model, optimizer.zero_grad)
    losses, trained = [], []

    def step(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        noise = random.random() + np.random.rand()
        loss = (model(x) * (1 + noise) - wanted).square().mean()
        loss.backward()
        return loss.detach()

    with (
        mock.patch.object(attempts, "ROOM", room),
        mock.patch.object(repeats, "MOST_IN_A_ROW", most_in_a_row),
    ):
        for number in range(STEPS):
            if number == 1:
                with torch.no_grad():
                    router = model.experts.router
                    router.weight.zero_()  # all experts are equal, so that the first is chosen
            drawn = torch.Generator().manual_seed(100 * number + dist.get_rank(group))
            batch = [torch.randn(TOKENS, WIDTH, generator=drawn) for _ in range(2)]
            losses.append(steps.run(step, *batch))
            optimizer.step()
            trained.append(number)
    return {
        "losses": losses,
        "model": {
            name: one.to_local() if hasattr(one, "to_local") else one
            for name, one in model.state_dict().items()
        },
        "moments": [
            {
                name: one.to_local() if hasattr(one, "to_local") else one
                for name, one in state.items()
            }
            for state in optimizer.state_dict()["state"].values()
        ],
        "drawn": [torch.rand(3), random.random(), float(np.random.rand())],
        "repeats": steps.num_repeats,
    }


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
        assert one.isfinite().all(), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_equal(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_equal(first, second, f"{where}[{number}]")
    else:
        assert one == other, where


def test_a_training_with_repeats_equals_one_whose_bound_holds() -> None:
    """Parameters, moments, buffers, losses and generators; every batch is trained once."""
    larger = run_ranks(train, 2, 2.0)
    smaller = run_ranks(train, 2, 1.0)
    for rank in range(2):
        assert larger[rank].pop("repeats") == 0
        assert smaller[rank].pop("repeats") == 1, "the bound has grown behind the first"
        assert_equal(smaller[rank], larger[rank])


def fail_in_a_row(group: dist.ProcessGroup) -> str:
    with pytest.raises(RowBoundError) as error:
        train(group, 1.0, room=0.01, most_in_a_row=1)
    return str(error.value)


def test_repeats_in_a_row_end_on_every_rank() -> None:
    for said in run_ranks(fail_in_a_row, 2):
        assert "the 1 steps before have been repeated already" in said


def die_in_a_repeat(group: dist.ProcessGroup) -> None:
    """Has rank 1 overflow, and die in the repeat, for which rank 0 then waits."""
    runs: list[int] = []

    def step() -> None:
        runs.append(len(runs))
        if dist.get_rank(group) == 1:
            if len(runs) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            attempts.ATTEMPTS.put_off(RowBoundError("too many"))

    RepeatedSteps(nn.Linear(2, 2), lambda: None).run(step)


def test_a_rank_that_dies_in_a_repeat_ends_the_others() -> None:
    with pytest.raises(RankError, match="exit code -9") as ended:
        run_ranks(die_in_a_repeat, 2)
    assert "PeerTimeoutError" in str(ended.value)


def test_engines_of_deepspeed_are_refused_by_name() -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(ConfigError, match="model has DeepSpeed's DeepSpeedEngine"):
        RepeatedSteps(nn.Sequential(engine()), lambda: None)


@pytest.mark.parametrize("attribute", ["_hp_mapping", "ds_id"])
def test_parameters_of_zero_are_refused_by_name(attribute: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    setattr(model[0].bias, attribute, None)
    with pytest.raises(ConfigError, match=r"model's parameter 0\.bias is ZeRO's of DeepSpeed"):
        RepeatedSteps(model, lambda: None)


def overflow(model: nn.Module) -> None:
    """Leaves a gradient and says that rows did not fit."""
    model(torch.ones(1, 2)).sum().backward()
    if not attempts.ATTEMPTS.is_exact:
        attempts.ATTEMPTS.put_off(RowBoundError("too many"))


def test_an_engine_that_comes_later_ends_before_a_repeat() -> None:
    model = nn.Linear(2, 2)
    steps = RepeatedSteps(model, model.zero_grad)
    model.weight._hp_mapping = None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="parameter weight is ZeRO's"):
        steps.run(overflow, model)


def test_a_gradient_that_is_left_ends_before_a_repeat() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="zero_grad has left a gradient of weight"):
        RepeatedSteps(model, lambda: None).run(overflow, model)
    steps = RepeatedSteps(model, model.zero_grad)
    steps.run(overflow, model)
    assert steps.num_repeats == 1


def test_an_error_of_a_repeat_is_raised_behind_it() -> None:
    """All ranks end the step together, also those whose groups have no error."""
    ends: list[bool] = []

    def step() -> None:
        is_repeat = attempts.ATTEMPTS.is_exact
        attempts.ATTEMPTS.put_off(RoutingError("NaN") if is_repeat else RowBoundError("too many"))
        ends.append(is_repeat)

    model = nn.Linear(2, 2)
    steps = RepeatedSteps(model, model.zero_grad)
    with pytest.raises(RoutingError, match="NaN"):
        steps.run(step)
    assert (ends, steps.num_repeats) == ([False, True], 0)


def test_exact_buffers_that_do_not_fit_are_an_error() -> None:
    def step() -> None:
        if attempts.ATTEMPTS.is_exact:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        attempts.ATTEMPTS.put_off(RowBoundError("too many"))

    model = nn.Linear(2, 2)
    with pytest.raises(RowBoundError, match=r"do not fit: give row_bound a number .* 9 GiB"):
        RepeatedSteps(model, model.zero_grad).run(step)


def test_an_update_within_a_step_is_refused_before_it_is_lost() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=r"has changed the parameter weight: .* after run"):
        RepeatedSteps(model, optimizer.zero_grad).run(step)
