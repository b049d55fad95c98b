"""Routing by indices on the kernel: the bits of the map's, and bad indices end the call."""

from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.options import BackendOptions
from tests.gpu import steps
from tests.gpu.expected import Results
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu

ROUTINGS = [cases.uniform, cases.with_dropped_tokens, cases.to_one_rank, cases.to_nobody]


def by_indices(config: MoEConfig, inputs: cases.Inputs, dtype: torch.dtype) -> cases.Inputs:
    """The same inputs with indices and weights in the places of maps and probabilities."""
    pairs = [
        cases.as_choices(config, probs, selected, dtype=dtype)
        for probs, selected in zip(inputs.probs, inputs.routing_map, strict=True)
    ]
    return replace(inputs, probs=[weight for _, weight in pairs], routing_map=[i for i, _ in pairs])


def spread(config: MoEConfig, inputs: cases.Inputs, got: Results) -> Results:
    """Results by indices with the gradients of weights where a map's are."""
    idx = torch.cat(list(inputs.routing_map))
    return replace(got, grad_probs=cases.spread(config, idx, got.grad_probs))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
def test_both_forms_are_equal_bit_by_bit(
    routing: cases.Routing, num_ranks: int, dtype: torch.dtype
):
    config = make_config(num_ranks, topk=2)
    inputs = steps.make_inputs(config, routing, TOKENS[num_ranks])
    choices = by_indices(config, inputs, dtype)
    weights = steps.weights_of(config, inputs)
    want = steps.step(VirtualLayer(config), inputs, weights)
    layer = VirtualLayer(config)
    for _ in range(2):
        steps.spoil(layer, choices, weights)
        got = steps.step(layer, choices, weights)
        steps.assert_same_bits(spread(config, choices, got), want)
    layer.check_guards()


@pytest.mark.parametrize("topk", [1, 3, 8, 16])
@pytest.mark.parametrize("skip_zero_probs", [False, True])
def test_numbers_of_choices(topk: int, skip_zero_probs: bool):
    config = make_config(2, topk=topk, num_experts=32, skip_zero_probs=skip_zero_probs)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    for probs in inputs.probs:
        probs[::3] *= torch.arange(config.num_experts, device=probs.device) % 2
    choices = by_indices(config, inputs, torch.int64)
    weights = steps.weights_of(config, inputs)
    want = steps.step(VirtualLayer(config), inputs, weights)
    got = steps.step(VirtualLayer(config), choices, weights)
    steps.assert_same_bits(spread(config, choices, got), want)


@pytest.mark.parametrize("row_bound", [None, 4.0], ids=["planned", "one launch"])
def test_through_autograd_in_half_precision(row_bound: float | None):
    """Weights in bfloat16, fewer choices than topk, and their gradient in the caller's order."""
    config = make_config(1)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[1])
    (weights,) = steps.weights_of(config, inputs)
    options = BackendOptions(row_bound=row_bound)
    backend = KernelBackend(config, None, device(), options=options)
    idx = torch.rand(300, 16, device=device()).topk(2, dim=1).indices
    weight = torch.rand(300, 2, device=device()).bfloat16().requires_grad_()
    x = inputs.x[0].clone().requires_grad_()
    out = moe_apply(backend, x, None, None, weights, topk_idx=idx, topk_weight=weight)
    grad_x, grad = torch.autograd.grad(out, (x, weight), inputs.grad_out[0])
    probs = torch.zeros(300, 16, device=device(), dtype=torch.bfloat16)
    probs = probs.scatter(1, idx, weight.detach()).requires_grad_()
    selected = torch.zeros_like(probs, dtype=torch.bool).scatter(1, idx, True)
    want = moe_apply(backend, x, probs, selected, weights)
    want_x, want_probs = torch.autograd.grad(want, (x, probs), inputs.grad_out[0])
    assert torch.equal(out, want)
    assert torch.equal(grad_x, want_x)
    assert grad.dtype == torch.bfloat16
    assert torch.equal(grad, want_probs.gather(1, idx))


BAD = {
    "large": (
        [0, 16],
        r"^topk_idx\[{}, 1\] of rank {} is 16, wanted an expert id of 0 to 15, or -1",
    ),
    "small": ([-2, 1], r"^topk_idx\[{}, 0\] of rank {} is -2, wanted an expert id of 0 to 15"),
    "huge": ([0, 2**40], r"^topk_idx\[{}, 1\] of rank {} is 2147483647, wanted an expert id"),
    "repeated": ([3, 3], r"^topk_idx\[{}, 1\] of rank {} is 3, which the token names before"),
    "nan": ([3, 4], r"^token {} of rank {}: its probability for expert 4 is NaN"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (4, 2)])
def test_bad_indices_of_one_rank_fail_all_and_nothing_else(num_ranks: int, rank: int, kind: str):
    config = make_config(num_ranks, topk=2)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    choices = by_indices(config, inputs, torch.int64)
    indices, message = BAD[kind]
    token = TOKENS[num_ranks][rank] - 5  # which the first CTA does not read
    choices.routing_map[rank][token] = torch.tensor(indices, device=device())
    choices.probs[rank][token] = torch.tensor([0.5, float("nan") if kind == "nan" else 0.5])
    steps.check_bad_routing(config, choices, inputs, message.format(token, rank))
