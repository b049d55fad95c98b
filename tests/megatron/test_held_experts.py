"""Reading of experts' weights that have changed, or not, since the last call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.adapters.megatron import weights
from flashmoe_megatron.adapters.megatron.buckets import hooks
from flashmoe_megatron.adapters.megatron.weights import HeldExperts
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.weights import ExpertWeights


def make_expert(*, bias: bool) -> Any:
    expert: Any = nn.Module()
    expert.linear_fc1 = nn.Linear(8, 16, bias=bias)
    expert.linear_fc2 = nn.Linear(16, 8, bias=bias)
    return expert


def make_experts(*, bias: bool = False) -> Any:
    experts: Any = nn.Module()
    experts.local_experts = nn.ModuleList([make_expert(bias=bias) for _ in range(3)])
    return experts


def replace_parameter(experts: Any) -> None:
    experts.local_experts[1].linear_fc2.weight = nn.Parameter(torch.zeros(8, 16))


def replace_linear(experts: Any) -> None:
    experts.local_experts[2].linear_fc1 = nn.Linear(8, 16, bias=False)


def replace_expert(experts: Any) -> None:
    experts.local_experts[0] = make_expert(bias=False)


def swap_experts(experts: Any) -> None:
    first, second, third = experts.local_experts
    experts.local_experts = nn.ModuleList([second, first, third])


def swap_weights(experts: Any) -> None:
    first, second, _ = experts.local_experts
    one, other = first.linear_fc1.weight, second.linear_fc1.weight
    first.linear_fc1.weight, second.linear_fc1.weight = other, one


def rename_linears(experts: Any) -> None:
    expert = experts.local_experts[1]
    one, other = expert.linear_fc1, expert.linear_fc2
    del expert.linear_fc1, expert.linear_fc2
    expert.linear_fc2 = one
    expert.linear_fc1 = other


def remove_expert(experts: Any) -> None:
    del experts.local_experts[2]


def add_biases(experts: Any) -> None:
    for expert in experts.local_experts:
        expert.linear_fc1.bias = nn.Parameter(torch.zeros(16))
        expert.linear_fc2.bias = nn.Parameter(torch.zeros(8))


CHANGES = (
    replace_parameter,
    replace_linear,
    replace_expert,
    swap_experts,
    swap_weights,
    rename_linears,
    remove_expert,
    add_biases,
)


def ids_of(found: ExpertWeights) -> list[list[int]]:
    kinds = (found.fc1, found.fc2, found.fc1_bias, found.fc2_bias)
    return [list(map(id, kind)) for kind in kinds]


def test_the_same_experts_are_read_once() -> None:
    held = HeldExperts(make_experts(), hidden=8)
    assert held.read() is held.read()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_experts_that_have_changed_are_read_again(change: Callable[[Any], None]) -> None:
    experts = make_experts()
    held = HeldExperts(experts, hidden=8)
    before = ids_of(held.read())
    change(experts)
    fc1 = [id(expert.linear_fc1.weight) for expert in experts.local_experts]
    fc2 = [id(expert.linear_fc2.weight) for expert in experts.local_experts]
    got = ids_of(held.read())
    assert got[:2] == [fc1, fc2]
    assert got != before


def test_a_parameter_that_becomes_one_of_another_class_is_looked_at_again() -> None:
    class Sharded(nn.Parameter):
        def full_tensor(self) -> torch.Tensor:
            return self

    experts = make_experts()
    held = HeldExperts(experts, hidden=8)
    torch.utils.swap_tensors(experts.local_experts[1].linear_fc1.weight, Sharded(torch.zeros(2, 8)))
    with pytest.raises(ConfigError, match=r"is sharded \(a Sharded\)"):
        held.read()


def test_a_hook_of_ddp_waits_where_a_module_has_parameters() -> None:
    """Modules that hold others alone have none to wait for."""
    waited: list[nn.Module] = []
    make = hooks.make_forward_pre_hook(lambda ddp: waited.append)
    experts = make_experts()
    for module in experts.modules():
        module.register_forward_pre_hook(make(None))
    HeldExperts(experts, hidden=8).read()
    assert waited == [module for module in experts.modules() if isinstance(module, nn.Linear)]


def test_a_scale_of_an_adapter_is_read_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no parameter, so that the same parameters do not tell."""
    scales = iter((1.0, 2.0, 3.0))

    def adapted(experts: Any, hidden: int) -> AdaptedWeights:
        fc1, fc2 = (
            tuple(getattr(expert, name).weight for expert in experts.local_experts)
            for name in ("linear_fc1", "linear_fc2")
        )
        return AdaptedWeights(
            fc1, fc2, fc1_down=(fc1[0],), fc1_up=(fc2[0],), fc1_scale=next(scales)
        )

    monkeypatch.setattr(weights, "expert_weights", adapted)
    held = HeldExperts(make_experts(), hidden=8)
    assert [held.read().fc1_scale, held.read().fc1_scale] == [2.0, 3.0]
