"""A token's bits depend neither on the other tokens of its batch nor on their order."""

from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.config import Activation, MoEConfig
from tests.gpu import steps
from tests.gpu.layers import make_config
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu

TOKENS = 1000

Bits = tuple[torch.Tensor, ...]


def of_tokens(config: MoEConfig, inputs: cases.Inputs, tokens: torch.Tensor) -> Bits:
    """Returns the outputs, evaluated and trained, and the gradients of some tokens."""
    chosen = replace(
        inputs,
        **{
            name: [getattr(inputs, name)[0][tokens].contiguous()]
            for name in ("x", "probs", "routing_map", "grad_out")
        },
    )
    weights = steps.weights_of(config, chosen)
    layer = VirtualLayer(config)
    arguments = (chosen.x, chosen.probs, chosen.routing_map, weights)
    (evaluated,), _ = layer.forward(*arguments, training=False)
    results = steps.step(layer, chosen, weights)
    torch.cuda.synchronize()
    return evaluated, results.out, results.grad_x, results.grad_probs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("intermediate", [192, 512, 640, 1088])
def test_other_tokens_and_their_order(intermediate: int, gated: bool, dtype: torch.dtype) -> None:
    """On both sides of the widths up to which a forward, or both passes, read rows in place."""
    config = make_config(
        1,
        intermediate=intermediate,
        gated=gated,
        activation=Activation.SILU if gated else Activation.GELU,
        max_tokens=TOKENS,
    )
    inputs = steps.make_inputs(config, cases.uniform, [TOKENS], dtype=dtype)
    everyone = of_tokens(config, inputs, torch.arange(TOKENS, device=device()))
    shuffled = torch.randperm(TOKENS, generator=cases.generator(1)).to(device())
    for tokens in (shuffled, shuffled[:300], shuffled[:57], shuffled[:1]):
        got = of_tokens(config, inputs, tokens)
        for name, some, every in zip(
            ("evaluated", "out", "grad_x", "grad_probs"), got, everyone, strict=True
        ):
            assert torch.equal(some, every[tokens]), f"{name} of {len(tokens)} tokens"
