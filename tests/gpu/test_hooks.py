"""Hooks of the kernel: ahead of its launch, behind it, and in a CUDA graph."""

from typing import Any

import pytest
import torch

from flashmoe_megatron.config import TILE_M
from flashmoe_megatron.hooks import Call, Hooks
from flashmoe_megatron.layer import FlashMoELayer
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu

CAPACITY = 20


def cap(capacity: torch.Tensor, call: Call) -> torch.Tensor:
    return torch.full_like(capacity, CAPACITY)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_routes_beyond_a_capacity_are_dropped(num_ranks: int, policy: Any) -> None:
    """The launch gives the bits of one whose routing never had them."""
    config = make_config(num_ranks)
    inputs = steps.make_inputs(config, cases.skewed, TOKENS[num_ranks])
    fewer = steps.make_inputs(config, cases.skewed, TOKENS[num_ranks])
    alone = Hooks()
    alone.drop_policy = policy
    alone.add("after", "capacity", cap)
    fewer.routing_map = [
        alone.capped(config, probs.cpu(), routing_map.cpu(), Call("forward")).to(device())
        for probs, routing_map in zip(inputs.probs, inputs.routing_map, strict=True)
    ]
    assert all(int(one.sum(0).max()) <= CAPACITY for one in fewer.routing_map)
    weights = steps.weights_of(config, inputs)
    want = steps.step(VirtualLayer(config), fewer, weights)
    layer = VirtualLayer(config)
    for backend in layer.backends:
        backend.hooks.drop_policy = policy
        backend.hooks.add("after", "capacity", cap)
    steps.assert_same_bits(steps.step(layer, inputs, weights), want)


@pytest.mark.parametrize("intermediate", [192, 64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_rows_are_shown_behind_the_launch(
    num_ranks: int, training: bool, intermediate: int
) -> None:
    """Each expert's segment has its tokens and, up to a whole block, zeros."""
    config = make_config(num_ranks, intermediate=intermediate)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    layer = VirtualLayer(config)
    seen = steps.rows_seen(layer)
    for backend in layer.backends:
        backend.hooks.add("before", "padding", lambda value, _: value)
    weights = steps.weights_of(config, inputs)
    layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights, training=training)
    torch.cuda.synchronize()
    x, chosen = torch.cat(inputs.x).double(), torch.cat(inputs.routing_map)
    for rank, rows in seen.items():
        begin = 0
        for expert in range(rank * config.num_local_experts, (rank + 1) * config.num_local_experts):
            own = x[chosen[:, expert]]
            end = begin + -(-len(own) // TILE_M) * TILE_M
            segment = rows[begin:end]
            torch.testing.assert_close(segment.sum(0), own.sum(0))
            assert int((segment == 0).all(1).sum()) == end - begin - len(own)
            begin = end
        assert begin == len(rows)
    assert len(seen) == num_ranks


def test_a_graph_replays_what_hooks_do() -> None:
    config = make_config(1, max_tokens=256)
    layer = FlashMoELayer(config, device=device(), dtype=torch.bfloat16, row_bound=4.0)
    num_rows = torch.zeros((), dtype=torch.int64, device=device())

    def count(rows: torch.Tensor, call: Call) -> None:
        num_rows.copy_((rows[:TILE_M] != 0).any(1).sum())

    layer.backend.hooks.add("after", "capacity", cap)
    layer.backend.hooks.add("after", "padding", count)
    torch.manual_seed(1)
    x = torch.randn(256, config.hidden, dtype=torch.bfloat16, device=device())
    idx = torch.rand(256, config.num_experts, device=device()).topk(config.topk).indices
    weight = torch.rand(256, config.topk, device=device())
    layer.check_routing = False
    with torch.no_grad():
        layer(x, idx, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, idx, weight)
        for seed in (2, 3):
            torch.manual_seed(seed)
            x.normal_()
            idx.copy_(
                torch.rand(256, config.num_experts, device=device()).topk(config.topk).indices
            )
            weight.uniform_()
            graph.replay()
            torch.cuda.synchronize()
            assert int(num_rows) == CAPACITY
            assert torch.equal(out, layer(x, idx, weight))
            assert out.abs().sum() > 0
