"""Softcapped experts on the scheduled backend of a GPU, beside the reference in float32."""

import pytest
import torch

from flashmoe_megatron.config import Activation
from flashmoe_megatron.layer import FlashMoELayer
from tests.unit import cases

pytestmark = pytest.mark.gpu

CONFIG = cases.make_config(
    num_ranks=1,
    num_experts=8,
    topk=2,
    max_tokens=512,
    activation=Activation.SILU,
    gated=True,
    gate_softcap=0.5,
    up_softcap=0.7,
)


def test_the_scheduled_backend_is_near_the_reference():
    torch.manual_seed(1)
    kinds = {"scheduled": torch.bfloat16, "reference": torch.float32}
    layers = {
        kind: FlashMoELayer(CONFIG, dtype=dtype, backend=kind).cuda()
        for kind, dtype in kinds.items()
    }
    with torch.no_grad():
        for own, other in zip(*(layer.parameters() for layer in layers.values()), strict=True):
            own.mul_(8)  # far enough for caps to bend
            other.copy_(own)
    x = torch.randn(512, CONFIG.hidden, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(512, CONFIG.num_experts, device="cuda")
    weight, index = scores.topk(CONFIG.topk)
    results = []
    for kind, layer in layers.items():
        rows = x.to(kinds[kind]).requires_grad_()
        out = layer(rows, index, weight)
        given = [rows, *layer.parameters()]
        results.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    for got, want in zip(*results, strict=True):
        difference = (got.float() - want).norm() / want.norm()
        assert difference < 0.02, float(difference)
