"""What Megatron's schedule may free; that a launch outlives it is in test_training."""

import importlib
from types import ModuleType, SimpleNamespace

import pytest

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


def test_a_release_that_says_it_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule.check_schedule()
    modules = ("core.utils", "core.models.missing")
    monkeypatch.setattr(schedule, "MODULES", modules)
    importlib.import_module("megatron.core.utils")
    with pytest.raises(ConfigError, match="no should_free_input in core.utils or .*leave the flag"):
        schedule.check_schedule()
