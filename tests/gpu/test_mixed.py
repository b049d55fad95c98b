"""Evaluations of narrow experts, whose products' tiles alternate, against forwards for training."""

import pytest
import torch

from flashmoe_megatron.config import Activation
from tests.gpu import steps
from tests.gpu.layers import make_config, zipf
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu

UNIT_ROWS = 256
LEAST_GROUP = 8
"""Units of a step of the order, as ``csrc/host/launch.cu`` has it for few CTAs."""


@pytest.mark.parametrize("num_ctas", [6, None], ids=["few", "all"])
@pytest.mark.parametrize("intermediate", [64, 256, 320])
@pytest.mark.parametrize("routing", [cases.uniform, zipf], ids=["uniform", "zipf"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_mixed_products_give_the_same_bits(
    dtype: torch.dtype,
    transposed: bool,
    num_ranks: int,
    routing: cases.Routing,
    intermediate: int,
    num_ctas: int | None,
) -> None:
    """Experts of 320 columns are past the rule's end."""
    config = make_config(
        num_ranks,
        num_experts=120 * num_ranks,
        intermediate=intermediate,
        gated=True,
        activation=Activation.SILU,
        max_tokens=900,
    )
    inputs = steps.make_inputs(config, routing, [900, 700][:num_ranks], dtype=dtype)
    rows = sum(chosen.sum(0) for chosen in inputs.routing_map).view(num_ranks, -1)
    assert ((rows + UNIT_ROWS - 1) // UNIT_ROWS).sum(1).min() > 4 * LEAST_GROUP
    weights = steps.weights_of(config, inputs, transposed=transposed)
    arguments = (inputs.x, inputs.probs, inputs.routing_map, weights)
    want, _ = VirtualLayer(config).forward(*arguments)
    layer = VirtualLayer(config)
    for backend in layer.backends:
        backend.num_ctas = num_ctas or backend.num_ctas
    for _ in range(3):
        got, _ = layer.forward(*arguments, training=False)
        torch.cuda.synchronize()
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)
    layer.check_guards()
