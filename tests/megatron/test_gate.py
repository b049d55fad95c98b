"""The fused gate beside the function of Megatron's router that it stands for."""

import pytest
import torch

from flashmoe_megatron import GateConfig
from flashmoe_megatron.gate import Gate


@pytest.mark.parametrize("topk", [2, 5])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GateConfig(), {}),
        (GateConfig(pre_softmax=True), {"use_pre_softmax": True}),
        (GateConfig(score="sigmoid"), {"score_function": "sigmoid"}),
        (
            GateConfig(score="sigmoid", scaling_factor=2.5),
            {"score_function": "sigmoid", "scaling_factor": 2.5},
        ),
    ],
)
def test_megatrons_router(config: GateConfig, options: dict, topk: int) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    torch.manual_seed(topk)
    x, weight = torch.randn(50, 64), torch.randn(12, 64) / 8
    logits, probs = torch.empty(2, 50, 12)
    gate = Gate(config, weight, logits, probs, torch.empty(50, 12, dtype=torch.bool))
    gate.run(x, topk)
    want, routing_map = topk_routing_with_score_function(x @ weight.t(), topk, **options)
    assert torch.equal(gate.routing_map, routing_map)
    torch.testing.assert_close(gate.probs, want)
