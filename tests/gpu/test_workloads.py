"""Kinds of natural routing through planner and launch: right values, and loads that are even.

Each kind that ``tools.simulate.workloads`` draws is routed over eight ranks with two spare slots
each. A whole launch whose buffers hold few rows more than the mean computes it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.planner import bounded_row_blocks
from tests.gpu import steps
from tests.gpu.expected import assert_as_good, expected
from tests.gpu.layers import make_config
from tests.gpu.test_replicas import check_planned, counts_of
from tests.gpu.virtual import VirtualLayer
from tests.gpu.virtual_hosts import VirtualHosts
from tests.unit import cases
from tools.simulate.skew import rows_of_ranks
from tools.simulate.workloads import Workload, workloads

pytestmark = pytest.mark.gpu

RANKS, EXPERTS, TOPK, TOKENS, SLOTS = 8, 128, 8, 512, 2
BUSIEST = 1.05
"""Rows of the busiest rank, over the mean, that replicas leave where experts are many."""
MORE_SLOTS = {"W5_zero_expert_rank": (8, 1.08)}
"""A rank without rows gets no more experts than it has slots, so this kind needs more than two."""
KINDS = {kind.name: kind for kind in workloads(RANKS, EXPERTS)}


def inputs_of(kind: Workload, config: MoEConfig) -> cases.Inputs:
    def routing(_: MoEConfig, rank: int, num_tokens: int, g: torch.Generator) -> torch.Tensor:
        del g
        return torch.from_numpy(kind.scores(num_tokens, np.random.default_rng([11, rank])))

    return steps.make_inputs(config, routing, [round(share * TOKENS) for share in kind.tokens])


def config_of(kind: Workload) -> MoEConfig:
    return make_config(
        RANKS,
        hidden=128,
        intermediate=64,
        num_experts=EXPERTS,
        topk=TOPK,
        max_tokens=round(max(kind.tokens) * TOKENS),
    )


@pytest.mark.parametrize("name", KINDS)
def test_loads_are_even_and_values_right(name: str):
    config = config_of(KINDS[name])
    inputs = inputs_of(KINDS[name], config)
    weights = steps.weights_of(config, inputs)
    slots, busiest = MORE_SLOTS.get(name, (SLOTS, BUSIEST))
    layer = VirtualLayer(config, spare_slots=slots)
    blocks = bounded_row_blocks(replace(config, max_tokens=TOKENS), busiest, slots)
    steps.spoil(layer, inputs, weights)
    for backend in layer.backends:
        backend.take_records()
    forward = layer.forward(
        inputs.x, inputs.probs, inputs.routing_map, weights, num_row_blocks=blocks
    )
    got = steps.backward(layer, inputs, weights, forward)
    torch.cuda.synchronize()
    layer.backends[0].raise_pending_fault()
    assert_as_good(got, expected(config, inputs))
    layer.check_guards()
    counts = counts_of(inputs)
    placement = check_planned(layer, counts, slots)
    rows = [sum(of_rank.values()) for of_rank in rows_of_ranks(counts, placement)]
    assert max(rows) * RANKS <= busiest * sum(rows)


@pytest.mark.parametrize("name", ["W2_hot_rank", "W4_source_ragged", "W7_burst, step 1"])
def test_values_are_those_without_slots_where_routes_are_combined(name: str):
    """Shares of ranks are rounded, so that only ``combine`` routes promises a replica's bits."""
    config = config_of(KINDS[name])
    inputs = inputs_of(KINDS[name], config)
    weights = steps.weights_of(config, inputs)
    want = VirtualHosts(config, 1, combine="routes").step(inputs, weights)
    layer = VirtualHosts(config, 1, combine="routes", spare_slots=SLOTS)
    got = layer.step(inputs, weights)
    moved = [record.replicas for one in layer.backends for record in one.take_records()]
    assert any(replicas is not None and replicas.rows for replicas in moved)
    for field in ("out", "grad_x", "grad_probs"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
