"""Weights of experts in FP8 that are quantized once in each call of Megatron's schedule."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron import settings
from flashmoe_megatron.adapters.megatron.shape import ROUTED
from flashmoe_megatron.adapters.megatron.unchanged import unchanged_within
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.separate import precision
from tests.distributed import RankPool
from tests.megatron.harness import Case, Layout, train
from tests.side_by_side import Outcome

IN_FP8 = {
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "hidden_size": 128,
    "moe_ffn_hidden_size": 128,
    "num_moe_experts": 4,
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
STEPS, MICRO_BATCHES = 3, 4
CASES = {
    "ep2": Case(Layout(expert=2)),
    "overlaps": Case(Layout(), ddp=OVERLAP, fuse_main_grad=True),
    "recompute": Case(Layout(expert=2), config=FULL),
    "pp2_vpp2": Case(Layout(pipeline=2, virtual=2)),
    "mtp": Case(Layout(expert=2), config={"mtp_num_layers": 1}),
    "first_last": Case(Layout(expert=2), config={"num_layers": 3, "first_last_layers_bf16": True}),
}


def trained(group: dist.ProcessGroup, case: Case) -> tuple[Outcome, int]:
    """A training, and how many matrices it has quantized."""
    count, quantize = 0, precision.quantize

    def counting(x: torch.Tensor, height: int) -> precision.Blocks:
        nonlocal count
        count += height > 1
        return quantize(x, height)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(precision, "quantize", counting)
        return train(group, case, True), count


@pytest.mark.parametrize("name", CASES)
def test_a_training_has_the_same_bits(name: str, two_ranks: RankPool) -> None:
    """A step and a batch of evaluation quantize each matrix once, whatever lies between."""
    case = replace(
        CASES[name],
        config={**IN_FP8, **CASES[name].config},
        micro_batches=MICRO_BATCHES,
        steps=STEPS,
    )
    found = {
        often: two_ranks.run(trained, replace(case, settings={"experts": "fp8", "quantize": often}))
        for often in ("pass", "step")
    }
    for (want, in_passes), (got, in_steps) in zip(found["pass"], found["step"], strict=True):
        assert got.losses == want.losses
        assert got.eval_losses == want.eval_losses
        assert got.grad_norms == want.grad_norms
        assert got.parameters.keys() == want.parameters.keys()
        for key, value in want.parameters.items():
            assert torch.equal(got.parameters[key], value), key
        forwards = 3 if name == "recompute" else 2  # and the backward
        assert in_passes == in_steps // (STEPS + 1) * MICRO_BATCHES * (STEPS * forwards + 1)
        experts = [key for key in want.parameters if "experts" in key]
        if name == "first_last":  # others compute in bfloat16
            experts = [key for key in experts if ".layers.1." in key]
        assert in_steps == len(experts) * (STEPS + 1)


def test_a_promise_ends_with_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is generated behind it finds weights that somebody may have written."""
    chosen = settings.Settings(experts="fp8", quantize="step")
    monkeypatch.setattr(settings, "_chosen", chosen)
    layer, promise = torch.nn.Linear(2, 2), Promise()
    vars(layer)[ROUTED] = SimpleNamespace(promise=promise)
    weights = [layer.weight]
    for model in (torch.nn.Sequential(layer), [torch.nn.Sequential(layer)]):
        with contextlib.suppress(ZeroDivisionError), unchanged_within(model):
            assert promise.making("test", weights) is not None
            raise ZeroDivisionError
        assert promise.making("test", weights) is None


def test_without_the_setting_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_chosen", settings.Settings(experts="fp8"))
    with unchanged_within(None):  # no model is looked at
        pass
