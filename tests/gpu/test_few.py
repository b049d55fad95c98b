"""Few tokens on a rank that is alone: the plan whose CTAs count all routes has the rows of others.

Routing by indices is planned as that of many tokens is, so its bits are those to compare with.
Experts are wide enough that their rows are copied with the plan.
"""

from collections.abc import Iterable

import pytest
import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import RoutingError
from tests.gpu import steps
from tests.gpu.expected import Results, assert_as_good, expected
from tests.gpu.layers import ROUTINGS, make_config
from tests.gpu.test_choices import by_indices, spread
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu

WIDE = 1280


def bounded_steps(
    config: MoEConfig, inputs: cases.Inputs, spoiled_by: cases.Inputs
) -> Iterable[Results]:
    """Three passes of one launch each way, in memory that others have filled with NaN."""
    layer = VirtualLayer(config)
    weights = steps.weights_of(config, inputs)
    layer.prepare()
    blocks = int(layer.backends[0]._sizes.max_row_blocks)
    for _ in range(3):
        steps.spoil(layer, spoiled_by, weights)
        forward = layer.forward(
            inputs.x, inputs.probs, inputs.routing_map, weights, num_row_blocks=blocks
        )
        yield steps.backward(layer, inputs, weights, forward)
    torch.cuda.synchronize()
    layer.check_guards()


@pytest.mark.parametrize("tokens", [1, 31, 300, 1024])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
def test_bits_are_those_of_other_plans(routing: cases.Routing, tokens: int):
    config = make_config(1, topk=2, intermediate=WIDE, max_tokens=max(tokens, 40))
    inputs = steps.make_inputs(config, routing, [tokens])
    choices = by_indices(config, inputs, torch.int64)
    weights = steps.weights_of(config, inputs)
    want = spread(config, choices, steps.step(VirtualLayer(config), choices, weights))
    assert_as_good(want, expected(config, inputs))
    for got in bounded_steps(config, inputs, choices):
        steps.assert_same_bits(got, want)


@pytest.mark.parametrize(
    ("tokens", "experts", "topk"),
    [
        pytest.param(1000, 64, 3, id="most of a map, three rows a warp"),
        pytest.param(1000, 64, 6, id="most of a map, rows for dispatch warps"),
        pytest.param(1030, 64, 2, id="a larger map"),
        pytest.param(120, 480, 5, id="many experts"),
        pytest.param(77, 7, 7, id="all experts, odd"),
    ],
)
@pytest.mark.parametrize("skip_zero_probs", [False, True])
def test_bits_at_the_ends_of_few(tokens: int, experts: int, topk: int, skip_zero_probs: bool):
    config = make_config(
        1,
        topk=topk,
        num_experts=experts,
        intermediate=WIDE,
        max_tokens=tokens,
        skip_zero_probs=skip_zero_probs,
    )
    inputs = steps.make_inputs(config, cases.uniform, [tokens])
    inputs.probs[0][::3] *= torch.arange(experts, device=inputs.probs[0].device) % 2
    choices = by_indices(config, inputs, torch.int64)
    weights = steps.weights_of(config, inputs)
    want = spread(config, choices, steps.step(VirtualLayer(config), choices, weights))
    for got in bounded_steps(config, inputs, choices):
        steps.assert_same_bits(got, want)


@pytest.mark.parametrize("bad", ["many", "nan"])
@pytest.mark.parametrize("intermediate", [192, WIDE])
def test_a_token_that_is_refused_ends_all(bad: str, intermediate: int):
    config = make_config(1, topk=2, intermediate=intermediate)
    inputs = steps.make_inputs(config, cases.uniform, [300])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config)
    layer.prepare()
    blocks = int(layer.backends[0]._sizes.max_row_blocks)
    routing_map, probs = inputs.routing_map[0].clone(), inputs.probs[0].clone()
    if bad == "many":
        routing_map[299] = True
    else:
        routing_map[299, 5], probs[299, 5] = True, float("nan")
        routing_map[299, :5] = routing_map[299, 6:] = False
    out, _ = layer.forward(
        inputs.x, [probs], [routing_map], weights, training=False, num_row_blocks=blocks
    )
    torch.cuda.synchronize()
    assert out[0].isnan().all()
    with pytest.raises(RoutingError, match="token 299"):
        layer.backends[0].raise_pending_fault()
    layer.check_guards()
    assert_as_good(steps.step(layer, inputs, weights), expected(config, inputs))
