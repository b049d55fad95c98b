"""What a step changes in modules is put back: generators, and scales of FP8."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flashmoe_megatron import RepeatedSteps, attempts
from flashmoe_megatron.errors import RowBoundError
from flashmoe_megatron.saved import save_module_generators
from flashmoe_megatron.scales import save_scales

LARGEST = 448.0
"""The largest number of E4M3."""


class Delayed(nn.Module):
    """A factor in FP8 by a delayed scale, kept as Transformer Engine's modules keep theirs.

    A call writes the largest value of now into the history's first row, which the scale of later
    calls comes from. Tables are empty until the first call.
    """

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.fp8_meta: dict[str, Any] = {"fp8_group": None, "recipe": "delayed"}
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.fp8_meta.setdefault("scaling_fwd", fresh(self.length))
        state.amax_history[0] = x.detach().abs().max()
        scale = state.scale.clone()
        quantized = x + ((x * scale).to(torch.float8_e4m3fn).float() / scale - x).detach()
        largest = state.amax_history.amax(0)
        state.scale.copy_(torch.where(largest.isfinite(), LARGEST / largest, state.scale))
        state.amax_history.copy_(state.amax_history.roll(-1, 0))
        state.amax_history[0] = 0
        return quantized * self.weight


def fresh(length: int = 3) -> Any:
    return SimpleNamespace(scale=torch.ones(1), amax_history=torch.zeros(length, 1))


def train(overflows: set[int]) -> dict[str, torch.Tensor]:
    """Trains six steps, some of which are NaN at first and are said to overflow."""
    torch.manual_seed(3)
    model = nn.Sequential(Delayed(), nn.Linear(4, 4), Delayed())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps = RepeatedSteps(model, optimizer.zero_grad)
    losses = []

    def step(x: torch.Tensor, *, overflows: bool) -> torch.Tensor:
        if overflows and not attempts.ATTEMPTS.is_exact:
            attempts.ATTEMPTS.put_off(RowBoundError("too many"))
            x = torch.full_like(x, torch.nan)
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    for number in range(6):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
        losses.append(steps.run(step, x, overflows=number in overflows))
        optimizer.step()
    assert steps.num_repeats == len(overflows)
    found = {"losses": torch.stack(losses)}
    for number in (0, 2):
        state = model[number].fp8_meta["scaling_fwd"]
        found[f"{number}.scale"], found[f"{number}.history"] = state.scale, state.amax_history
        found[f"{number}.weight"] = model[number].weight.detach()
    return found


@pytest.mark.parametrize("overflows", [{0}, {4, 5}, {0, 2, 5}], ids=["first", "last", "three"])
def test_scales_after_a_repeat_are_those_of_a_step_that_fits(overflows: set[int]) -> None:
    """In the first step the tables are made by the attempt that overflows."""
    want, got = train(set()), train(overflows)
    assert bool((want["0.scale"] != 1).all())
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_scales_keep_their_addresses() -> None:
    """Quantizers and CUDA graphs know them."""
    model = Delayed()
    model(torch.ones(2, 4))
    state = model.fp8_meta["scaling_fwd"]
    before = {name: tensor.clone() for name, tensor in vars(state).items()}
    addresses = [tensor.data_ptr() for tensor in vars(state).values()]
    restore = save_scales([model])
    model(torch.full((2, 4), 9.0))
    assert not torch.equal(state.scale, before["scale"])
    restore()
    assert [tensor.data_ptr() for tensor in vars(state).values()] == addresses
    for name, tensor in before.items():
        assert torch.equal(getattr(state, name), tensor), name


def test_tables_of_operations_and_what_a_step_adds() -> None:
    """Operations have a table for each pass, and older releases the inverse of a scale."""
    model = nn.Module()
    state = fresh()
    state.scale_inv = torch.full((1,), 0.5)
    model._fp8_metas = {"forward": {"scaling_fwd": state}, "backward": None}
    restore = save_scales([model])
    state.scale_inv.zero_()
    state.amax_history = torch.full((5, 1), 7.0)  # a longer one, which begins with what there was
    made = fresh()
    made.scale.fill_(9.0)
    made.amax_history.fill_(torch.nan)
    model._fp8_metas["backward"] = {"scaling_bwd": made}
    restore()
    assert state.scale_inv.tolist() == [0.5]
    assert state.amax_history.tolist() == [[0.0]] * 5
    assert made.scale.tolist() == [1.0]
    assert made.amax_history.tolist() == [[0.0]] * 3


def test_a_longer_history_begins_with_what_there_was() -> None:
    model = Delayed()
    model.fp8_meta["scaling_fwd"] = state = fresh()
    state.amax_history[:, 0] = torch.tensor([0.0, 2.0, 3.0])
    restore = save_scales([model])
    state.amax_history = torch.full((4, 1), 7.0)
    restore()
    assert state.amax_history.flatten().tolist() == [0.0, 2.0, 3.0, 0.0]
    state.amax_history = torch.full((2, 1), 7.0)
    restore()
    assert state.amax_history.flatten().tolist() == [0.0, 2.0]


class Drawing(nn.Module):
    """Draws from generators that it has in an attribute, in a list, and from two it makes late."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)
        self.each = [torch.Generator().manual_seed(seed) for seed in (2, 3)]
        self.late: torch.Generator | None = None

    def draw(self) -> list[float]:
        if self.late is None:
            self.late = torch.Generator().manual_seed(4)
            self.further = torch.Generator().manual_seed(5)
        each = (self.own, *self.each, self.late, self.further)
        return [float(torch.rand(1, generator=one)) for one in each]


def test_generators_of_modules_draw_the_same_again() -> None:
    model = Drawing()
    own = model.own
    for _ in range(2):  # in the second step there are all of them
        restore = save_module_generators([model])
        drawn = model.draw()
        model.own = torch.Generator().manual_seed(9)
        model.each = [torch.Generator()]
        restore()
        assert model.own is own
        assert model.draw() == drawn


def test_a_generator_of_the_first_step_is_gone_after_it() -> None:
    model = Drawing()
    restore = save_module_generators([model])
    model.draw()
    restore()
    assert model.late is None
    assert not hasattr(model, "further")
