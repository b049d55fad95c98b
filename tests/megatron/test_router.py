"""The fused router beside the function of Megatron's router that it stands for."""

import pytest
import torch

from flashmoe_megatron import RouterConfig
from flashmoe_megatron.router import Router


@pytest.mark.parametrize("topk", [2, 5])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (RouterConfig(), {}),
        (RouterConfig(pre_softmax=True), {"use_pre_softmax": True}),
        (RouterConfig(score="sigmoid"), {"score_function": "sigmoid"}),
        (
            RouterConfig(score="sigmoid", scaling_factor=2.5),
            {"score_function": "sigmoid", "scaling_factor": 2.5},
        ),
    ],
)
def test_megatrons_router(config: RouterConfig, options: dict, topk: int) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    torch.manual_seed(topk)
    x, weight = torch.randn(50, 64), torch.randn(12, 64) / 8
    logits, probs = torch.empty(2, 50, 12)
    router = Router(config, weight, logits, probs, torch.empty(50, 12, dtype=torch.bool))
    router.run(x, topk)
    want, routing_map = topk_routing_with_score_function(x @ weight.t(), topk, **options)
    assert torch.equal(router.routing_map, routing_map)
    torch.testing.assert_close(router.probs, want)
