"""Gated experts with clamps and offsets, and fc1's gate and up rows in every order."""

from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.config import Activation
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu

BLOCKS = [(192, 1), (192, 8), (192, 32), (192, 64), (512, 128), (512, 256), (512, 512)]
"""FFN widths and blocks of fc1's rows, which a tile of 128 columns holds wholly or in part."""


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize(
    ("clamp_value", "linear_offset"), [(None, 1.0), (0.7, 0.0), (0.7, 1.0), (3.0, -0.5)]
)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.QUICK_GELU])
def test_terms(
    activation: Activation, clamp_value: float | None, linear_offset: float, transposed: bool
):
    config = make_config(
        2,
        activation=activation,
        clamp_value=clamp_value,
        linear_offset=linear_offset,
        num_experts=8,
    )
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    steps.check(config, inputs, transposed=transposed, launches=1)


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gpt_oss(num_ranks: int, transposed: bool, dtype: torch.dtype):
    config = make_config(num_ranks, **cases.GPT_OSS)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks], dtype=dtype)
    steps.check(config, inputs, transposed=transposed)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU])
@pytest.mark.parametrize(("intermediate", "block"), BLOCKS)
def test_order_of_rows(intermediate: int, block: int, activation: Activation, transposed: bool):
    config = make_config(
        2,
        activation=activation,
        intermediate=intermediate,
        glu_interleave=block,
        num_experts=8,
    )
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    steps.check(config, inputs, transposed=transposed, launches=1)


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=["main_grad", "grad"])
@pytest.mark.parametrize(("intermediate", "block"), BLOCKS)
def test_order_of_rows_changes_no_bit(intermediate: int, block: int, into: torch.dtype):
    """But of the tokens' gradients, in which the rows of fc1 are summed in their order."""
    apart = make_config(2, intermediate=intermediate, num_experts=8)
    inputs = steps.make_inputs(apart, cases.uniform, TOKENS[2])
    order = torch.arange(2 * intermediate).view(2, -1, block).transpose(0, 1).flatten()
    order = order.to(inputs.fc1[0].device)
    blocks = cases.Inputs(**vars(inputs))
    blocks.fc1 = [weight[order].contiguous() for weight in inputs.fc1]
    found = []
    for config, of_order in ((apart, inputs), (replace(apart, glu_interleave=block), blocks)):
        layer = VirtualLayer(config)
        weights = steps.weights_of(config, of_order)
        grads = steps.make_grads(layer, weights, dtype=into, initial=0.5)
        found.append(steps.step(layer, of_order, weights, grads))
    torch.cuda.synchronize()
    want, got = found
    for name in ("out", "grad_probs", "grad_fc2"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.grad_fc1, want.grad_fc1[:, order])
