"""What Megatron's schedule may free; that a launch outlives it is in test_training."""

import functools
import importlib
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flashmoe_megatron.adapters.megatron import schedule
from flashmoe_megatron.errors import ConfigError


@pytest.mark.parametrize("node", ["moe_dispatch", "mlp", "moe_combine"])
def test_only_other_dispatchers_free_inputs(node: str) -> None:
    module = ModuleType("callables")
    module.should_free_input = lambda name, is_moe, config, num_local_experts=None: is_moe  # type: ignore[attr-defined]
    schedule.patch_schedule(module)
    for dispatcher, frees in (("alltoall", True), ("flashmoe", False)):
        config = SimpleNamespace(moe_token_dispatcher_type=dispatcher)
        assert module.should_free_input(node, True, config) is frees
        assert module.should_free_input(node, False, config, num_local_experts=2) is False


def test_every_weight_of_a_module_is_reduced_and_the_last_modules_first() -> None:
    """With one weight an expert there are several in each, and fc2's were complete first."""
    experts, called = torch.nn.Module(), list[str]()
    for name in ("fc1", "fc2"):
        setattr(experts, name, torch.nn.Module())
        hooks = [functools.partial(called.append, f"{name} {number}") for number in range(3)]
        getattr(experts, name).wgrad_accumulation_and_reduce_hooks = hooks
    schedule.reduce_gradients(experts)
    assert called == [f"{name} {number}" for name in ("fc2", "fc1") for number in range(3)]


def test_a_release_that_says_it_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule.check_schedule()
    modules = ("core.utils", "core.models.missing")
    monkeypatch.setattr(schedule, "MODULES", modules)
    importlib.import_module("megatron.core.utils")
    with pytest.raises(ConfigError, match="no should_free_input in core.utils or .*leave the flag"):
        schedule.check_schedule()
