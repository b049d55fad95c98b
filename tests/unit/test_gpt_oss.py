"""GPT-OSS's experts as transformers has them: transposed stacks, alternating rows, biases."""

import importlib.util

import pytest
import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
LIMIT = 0.7
"""The model's clamp is at 7, far beyond the values here."""


def test_experts_of_transformers() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = cases.make_config(num_experts=4, **{**cases.GPT_OSS, "clamp_value": LIMIT})
    theirs = GptOssConfig(
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.topk,
        experts_implementation="eager",
    )
    experts = GptOssExperts(theirs).double()
    experts.limit = LIMIT
    g = cases.generator(5)
    with torch.no_grad():
        for parameter in experts.parameters():
            scale = parameter.shape[1] ** -0.5 if parameter.dim() == 3 else 1.0
            parameter.normal_(generator=g).mul_(scale)
    inputs = cases.make_inputs(config, cases.uniform, [24], dtype=torch.float64)
    probs, chosen = inputs.probs[0].topk(config.topk, dim=1)

    def step(apply, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = apply(*leaves)
        grads = torch.autograd.grad(out, [*leaves, *experts.parameters()], inputs.grad_out[0])
        return [out.detach(), *grads]

    want = step(lambda x, weights: experts(x, chosen, weights), inputs.x[0], probs)
    own = ExpertWeights(
        (experts.gate_up_proj,),
        (experts.down_proj,),
        transposed=True,
        fc1_bias=(experts.gate_up_proj_bias,),
        fc2_bias=(experts.down_proj_bias,),
    )
    got = step(
        lambda x, weights: moe_apply(
            ReferenceBackend(config),
            x,
            torch.zeros_like(inputs.probs[0]).scatter(1, chosen, weights),
            inputs.routing_map[0],
            own,
        ),
        inputs.x[0],
        probs,
    )
    names = ["out", "x", "probs", *(name for name, _ in experts.named_parameters())]
    assert len(names) == 7
    for name, ours, wanted in zip(names, got, want, strict=True):
        assert_close(name, ours, wanted, rel_l2=1e-12)
