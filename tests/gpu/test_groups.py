"""Groups of units that end where experts do, against groups of a fixed number of units."""

from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.config import Activation
from tests.gpu import steps
from tests.gpu.layers import make_config, zipf
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu

TOKENS = 6000
UNIT_ROWS = 256
MOST_UNITS = 9
"""Units of the largest group for 48 CTAs, as ``csrc/host/launch.cu`` has it."""


@pytest.mark.parametrize("num_ctas", [48, None], ids=["few", "all"])
@pytest.mark.parametrize("intermediate", [512, 640, 1152])
@pytest.mark.parametrize("routing", [cases.uniform, zipf], ids=["uniform", "zipf"])
@pytest.mark.parametrize("max_tokens", [14_400, 48_000])
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_groups_that_end_with_experts_give_the_same_bits(
    dtype: torch.dtype,
    transposed: bool,
    max_tokens: int,
    routing: cases.Routing,
    intermediate: int,
    num_ctas: int | None,
) -> None:
    """A layer for more tokens than there are expects more rows of each expert, and so cuts groups.

    Rows are read in place, until they are copied, or in copies. With ``zipf`` the first expert has
    several groups, and where 48,000 tokens are expected, the last ones share groups.
    """
    fixed = make_config(
        1,
        num_experts=48,
        topk=2,
        intermediate=intermediate,
        gated=True,
        activation=Activation.SILU,
        max_tokens=TOKENS,
    )
    assert fixed.topk * TOKENS // fixed.num_experts <= UNIT_ROWS
    inputs = steps.make_inputs(fixed, routing, [TOKENS], dtype=dtype)
    rows = inputs.routing_map[0].sum(0)
    assert (int(rows.max()) > MOST_UNITS * UNIT_ROWS) == (routing is zipf)
    weights = steps.weights_of(fixed, inputs, transposed=transposed)
    want = steps.step(VirtualLayer(fixed), inputs, weights)
    layer = VirtualLayer(replace(fixed, max_tokens=max_tokens))
    for backend in layer.backends:
        backend.num_ctas = num_ctas or backend.num_ctas
    for _ in range(2):
        steps.assert_same_bits(steps.step(layer, inputs, weights), want)
        out, _ = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights, training=False)
        torch.cuda.synchronize()
        assert torch.equal(out[0], want.out)
    layer.check_guards()
