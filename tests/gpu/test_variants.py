"""The kernel beyond bfloat16 weights without biases: float16, and experts with biases."""

from typing import Any

import pytest
import torch

from flashmoe_megatron.config import Activation
from flashmoe_megatron.oracle import assert_close, moe_reference
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize(
    ("activation", "gated"),
    [(Activation.SILU, True), (Activation.GELU, False), (Activation.SQUARED_RELU, False)],
)
def test_float16(num_ranks: int, transposed: bool, activation: Activation, gated: bool) -> None:
    config = make_config(num_ranks, activation=activation, gated=gated)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks], dtype=torch.float16)
    steps.check(config, inputs, transposed=transposed)


GPT_OSS = {**cases.GPT_OSS, "clamp_value": 7.0, "gated": True}
FORMS = {
    "gated": {"activation": Activation.GELU, "gated": True},
    "ungated": {"activation": Activation.GELU, "gated": False},
    "gpt-oss": GPT_OSS,
    "gpt-oss in blocks": {**GPT_OSS, "glu_interleave": 32},
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grads_in", ["main_grad", "grad", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_biases(num_ranks: int, form: str, grads_in: str, dtype: torch.dtype) -> None:
    check_biases(num_ranks, form, grads_in, dtype)


def check_biases(
    num_ranks: int, form: str, grads_in: str, dtype: torch.dtype, **group_options: Any
) -> None:
    """All gradients are added to main_grad, or with "both" those of the weights alone."""
    config = make_config(num_ranks, hidden=320, **FORMS[form])
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks], dtype=dtype)
    g = cases.generator(3)

    def biases(width: int) -> list[torch.Tensor]:
        return [
            torch.randn(width, generator=g).to(device(), dtype) for _ in range(config.num_experts)
        ]

    fc1_bias, fc2_bias = biases(config.fc1_rows), biases(config.hidden)
    if config.clamp_value is not None:
        # Some rows are far beyond the clamp, and none near it: there, rounding decides on a slope.
        for bias in fc1_bias:
            bias[::24] += 3 * config.clamp_value
            bias[5::24] -= 3 * config.clamp_value
    layer = VirtualLayer(config, **group_options)
    weights, grads = [], [[], [], [], []]
    adds = [grads_in != "grad"] * 2 + [grads_in == "main_grad"] * 2
    grad_dtypes = [torch.float32] * 2 + [dtype if grads_in == "both" else torch.float32] * 2
    local = config.num_local_experts
    for first in range(0, config.num_experts, local):
        share = slice(first, first + local)
        kinds = [inputs.fc1[share], inputs.fc2[share], fc1_bias[share], fc2_bias[share]]
        weights.append(
            ExpertWeights(
                *map(tuple, kinds[:2]), fc1_bias=tuple(kinds[2]), fc2_bias=tuple(kinds[3])
            )
        )
        for of_kind, tensors, accumulate, into in zip(grads, kinds, adds, grad_dtypes, strict=True):
            fill = 0.5 if accumulate else float("nan")
            of_kind.append(
                [WeightGrad(torch.full_like(t, fill, dtype=into), accumulate) for t in tensors]
            )
    out, saved = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
    grad_x, grad_probs = layer.backward(inputs.grad_out, saved, weights, *grads)
    torch.cuda.synchronize()

    x = torch.cat(inputs.x).double().requires_grad_()
    probs = torch.cat(inputs.probs).double().requires_grad_()
    parameters = [
        [t.double().requires_grad_() for t in kind]
        for kind in (inputs.fc1, inputs.fc2, fc1_bias, fc2_bias)
    ]
    want = moe_reference(
        x,
        probs,
        torch.cat(inputs.routing_map),
        *parameters[:2],
        **cases.form_of(config),
        fc1_bias=parameters[2],
        fc2_bias=parameters[3],
    )
    flat = [t for kind in parameters for t in kind]
    wanted = torch.autograd.grad(want, (x, probs, *flat), torch.cat(inputs.grad_out).double())
    bound = 6e-3 if dtype == torch.bfloat16 else 1e-3
    assert_close("out", torch.cat(out), want.detach(), rel_l2=bound)
    assert_close("grad_x", torch.cat(grad_x), wanted[0], rel_l2=bound)
    assert_close("grad_probs", torch.cat(grad_probs), wanted[1], rel_l2=bound)
    left = iter(wanted[2:])
    names = ("fc1", "fc2", "fc1_bias", "fc2_bias")
    for name, of_kind, accumulate in zip(names, grads, adds, strict=True):
        got = torch.stack([grad.buffer for share in of_kind for grad in share])
        exact = torch.stack([next(left) for _ in range(config.num_experts)])
        assert_close(name, got - (0.5 if accumulate else 0.0), exact, rel_l2=bound)
