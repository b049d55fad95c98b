"""Softcapped experts against the formula in torch, differentiated by autograd."""

import pytest
import torch

from flashmoe_megatron.checks import check_kernel_experts
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.separate.kernels import KERNELS
from flashmoe_megatron.separate.steps import activate, activate_backward
from tests.unit import cases

CAPS = [(2.0, 3.0), (None, 0.5), (0.5, None)]


def capped(z: torch.Tensor, cap: float | None) -> torch.Tensor:
    return z if cap is None else torch.tanh(z / cap) * cap


def formula(gate: torch.Tensor, up: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    return capped(gate, config.gate_softcap) * torch.sigmoid(gate) * capped(up, config.up_softcap)


def make(caps: tuple[float | None, float | None], **more: object) -> MoEConfig:
    gate, up = caps
    form = {"activation": Activation.SILU, "gated": True, "gate_softcap": gate, "up_softcap": up}
    return cases.make_config(**form, **more)


@pytest.mark.parametrize("interleave", [0, 1, 32])
@pytest.mark.parametrize("caps", CAPS)
def test_the_function_and_its_gradient(caps: tuple[float | None, float | None], interleave: int):
    config = make(caps, glu_interleave=interleave)
    rows = 4 * torch.randn(9, 2 * config.intermediate, dtype=torch.float64)
    rows.requires_grad_()
    block = interleave or config.intermediate
    blocks = rows.unflatten(1, (-1, 2, block))
    want = formula(blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1), config)
    grad = torch.randn_like(want)
    (want_grad,) = torch.autograd.grad(want, rows, grad)
    torch.testing.assert_close(activate(rows, config), want)
    value, found = activate_backward(rows.detach(), grad, config)
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(found, want_grad)


def test_triton_leaves_softcaps_to_torch():
    """On processors without Triton's interpreter its own kernel would fail."""
    config = make(CAPS[0])
    rows, weight = torch.randn(9, 2 * config.intermediate), torch.rand(9)
    out = KERNELS.weighted_activation(config, rows, weight)
    torch.testing.assert_close(out, activate(rows, config) * weight[:, None])
    assert len(KERNELS.weighted_activation_backward(config, rows, weight, out)) == 3


@pytest.mark.parametrize("backend", ["reference", "scheduled"])
@pytest.mark.parametrize("caps", CAPS)
def test_a_layer(caps: tuple[float | None, float | None], backend: str):
    config = make(caps, num_ranks=1, num_experts=4, topk=2)
    torch.manual_seed(1)
    layer = FlashMoELayer(config, dtype=torch.float32, backend=backend)
    x = torch.randn(12, config.hidden, requires_grad=True)
    index = torch.stack([torch.arange(12) % 4, (torch.arange(12) + 1) % 4], dim=1)
    weight = torch.rand(12, 2, requires_grad=True)
    given = [x, weight, *layer.parameters()]
    out = layer(x, index, weight)
    want = torch.zeros_like(x)
    for token in range(12):
        for slot in range(2):
            expert = int(index[token, slot])
            gate, up = (layer.fc1[expert] @ x[token]).chunk(2)
            row = layer.fc2[expert] @ formula(gate, up, config) * weight[token, slot]
            want = want.index_add(0, torch.tensor([token]), row[None])
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    pairs = zip(
        *(torch.autograd.grad(one.square().sum(), given) for one in (out, want)), strict=True
    )
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gate_softcap", "up_softcap"])
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({}, "=0.0: wanted None or a positive number"),
        ({"activation": Activation.GELU}, "wanted a gated silu without a clamp"),
        ({"gated": False}, "wanted a gated silu without a clamp"),
        ({"clamp_value": 7.0}, "wanted a gated silu without a clamp"),
        ({"linear_offset": 1.0}, "wanted a gated silu without a clamp"),
        ({"experts": "fp8"}, "experts='fp8' with"),
    ],
)
def test_refusals(name: str, more: dict[str, object], sentence: str):
    form = {"activation": Activation.SILU, "gated": True, "hidden": 128, "intermediate": 128}
    with pytest.raises(ConfigError, match=f"{name}.*{sentence}|{sentence}.*{name}"):
        cases.make_config(**{**form, **more, name: 2.0 if more else 0.0})


def test_the_kernel_refuses_them():
    with pytest.raises(ConfigError, match="gate_softcap=2.0, up_softcap=3.0 on the backend 'kern"):
        check_kernel_experts(make(CAPS[0]))
