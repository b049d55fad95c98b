"""Forwards whose experts have few rows: narrow tiles make the bits of wide ones.

Which tiles a forward has follows from the most tokens that its layer takes, and not from those that
a batch has. So the same tokens go through a layer that takes few, and one that takes many.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.expected import Results, assert_as_good, expected
from tests.gpu.layers import ROUTINGS, make_config
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu

NARROW = "flashmoe_narrow_tiles"
MANY = 8192
"""The most tokens of a layer whose tiles are wide, with 16 experts and a top-k of 2 or more."""


def plain(**changes: Any) -> MoEConfig:
    """A layer of one rank that takes few tokens, whose experts have no gate."""
    form = {"gated": False, "activation": Activation.GELU, "topk": 2, "max_tokens": 300}
    return make_config(1, **{**form, **changes})


def kernels_of(
    layer: VirtualLayer, inputs: cases.Inputs, weights: list[ExpertWeights]
) -> tuple[list[str], torch.Tensor]:
    """Returns the names of an evaluation's kernels, and its outputs."""
    arguments = (inputs.x, inputs.probs, inputs.routing_map, weights)
    layer.forward(*arguments, training=False)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        (out,), _ = layer.forward(*arguments, training=False)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    return [name for name in names if "layer_kernel" in name], out


def results_of(
    config: MoEConfig, inputs: cases.Inputs, weights: list[ExpertWeights], *, narrow: bool
) -> tuple[torch.Tensor, Results]:
    """Returns the outputs of an evaluation, and the results of a step."""
    layer = VirtualLayer(config)
    names, evaluated = kernels_of(layer, inputs, weights)
    assert [NARROW in name for name in names] == [narrow], names
    results = steps.step(layer, inputs, weights)
    torch.cuda.synchronize()
    layer.check_guards()
    return evaluated, results


@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [(320, 1280), (448, 1344), (1088, 2048)],
    ids=["whole tiles", "odd tiles", "wide"],
)
def test_bits_are_those_of_wide_tiles(hidden: int, intermediate: int) -> None:
    few = plain(hidden=hidden, intermediate=intermediate)
    many = replace(few, max_tokens=MANY)
    for routing in ROUTINGS:
        inputs = steps.make_inputs(few, routing, [300])
        weights = steps.weights_of(few, inputs)
        got, steps_got = results_of(few, inputs, weights, narrow=True)
        want, steps_want = results_of(many, inputs, weights, narrow=False)
        assert torch.equal(got, want), routing.__name__
        steps.assert_same_bits(steps_got, steps_want)


@pytest.mark.parametrize("activation", list(Activation), ids=lambda activation: activation.name)
def test_activations(activation: Activation) -> None:
    config = plain(intermediate=1280, activation=activation)
    inputs = steps.make_inputs(config, cases.uniform, [300])
    _, results = results_of(config, inputs, steps.weights_of(config, inputs), narrow=True)
    assert_as_good(results, expected(config, inputs))


@pytest.mark.parametrize(
    ("changes", "dtype", "transposed"),
    [
        ({"gated": True, "activation": Activation.SILU}, torch.bfloat16, False),
        ({"intermediate": 1024}, torch.bfloat16, False),
        ({}, torch.float16, False),
        ({}, torch.bfloat16, True),
    ],
    ids=["gated", "gathered", "fp16", "transposed"],
)
def test_others_have_wide_tiles(
    changes: dict[str, Any], dtype: torch.dtype, transposed: bool
) -> None:
    config = plain(**{"intermediate": 1280, **changes})
    inputs = steps.make_inputs(config, cases.uniform, [300], dtype=dtype)
    weights = steps.weights_of(config, inputs, transposed=transposed)
    _, results = results_of(config, inputs, weights, narrow=False)
    assert_as_good(results, expected(config, inputs))
