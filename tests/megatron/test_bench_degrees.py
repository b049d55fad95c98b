"""The baseline of Megatron's own layer is the layer that is measured beside it."""

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.bench.correctness import GATE, relative_errors
from flashmoe_megatron.bench.megatron_layer import MegatronLayer
from flashmoe_megatron.bench.problem import Router, make_problem
from flashmoe_megatron.bench.shapes import Shape
from tests.distributed import RankPool
from tests.megatron.harness import Layout, prepare


def measured_errors(group: dist.ProcessGroup, gated: bool) -> list[dict[str, float]]:
    """Errors of Megatron's layer, and of the layer with one row of one weight changed."""
    prepare(Layout(expert=2))
    shape = Shape(40, 64, 128, 8, 2, gated=gated)
    problem = make_problem(shape, 2, device=torch.device("cpu"), router=Router(0.7))
    layer = MegatronLayer(problem)
    errors = [relative_errors(problem, layer.results())]
    with torch.no_grad():
        layer.weights.fc1[0][5] *= 2
    return [*errors, relative_errors(problem, layer.results())]


@pytest.mark.parametrize("gated", [True, False])
def test_megatrons_layer_passes_the_gate_and_a_changed_weight_does_not(
    gated: bool, two_ranks: RankPool
) -> None:
    for errors, changed in two_ranks.run(measured_errors, gated):
        assert max(errors.values()) < GATE
        assert changed["out"] > 2 * GATE
        assert changed["grad_fc2"] > 2 * GATE
