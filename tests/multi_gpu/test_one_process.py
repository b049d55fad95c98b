"""One process and several GPUs."""

import pytest
import torch

from flashmoe_megatron import FlashMoELayer
from tests.unit import cases


@pytest.mark.multi_gpu(2)
def test_a_layer_on_a_gpu_that_is_not_the_current_one() -> None:
    config = cases.make_config(hidden=256, intermediate=128, max_tokens=300)
    first = FlashMoELayer(config, device="cuda:0", router=True)
    second = FlashMoELayer(config, device="cuda:1", router=True)
    second.load_state_dict(first.state_dict())
    x = torch.randn(300, config.hidden, dtype=torch.bfloat16, device="cuda:0")
    results = []
    for layer, device in ((first, "cuda:0"), (second, "cuda:1")):
        own = x.detach().to(device).requires_grad_()
        assert torch.cuda.current_device() == 0
        out = layer(own)
        out.float().square().sum().backward()
        results.append([out, own.grad, *(weight.grad for weight in layer.parameters())])
    torch.cuda.synchronize("cuda:1")
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs.to("cuda:0"))
