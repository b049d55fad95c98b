"""The memory of a process group that is destroyed: it is free before another group has its own."""

import contextlib

import pytest
import torch

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel.captured import dropped_by
from tests.gpu import steps
from tests.gpu.expected import assert_as_good, expected
from tests.gpu.layers import make_config
from tests.gpu.virtual import VirtualGroup, VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu


def end(group: VirtualGroup) -> int:
    """Ends what the ranks share, as before a destruction; how many bytes are free by that."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for step in ("leave", "free"):  # all ranks leave before any frees
        for memory in group.memories:
            assert memory.is_left() or step == "leave"
            getattr(memory, step)()
    return held - torch.cuda.memory_allocated()


def test_memory_is_free_between_two_groups():
    config = make_config(2, hidden=128, intermediate=128, num_experts=8, topk=2)
    inputs = steps.make_inputs(config, cases.uniform, [70, 33])
    weights = steps.weights_of(config, inputs)
    want = expected(config, inputs)
    for _ in range(3):
        layer = VirtualLayer(config, is_guarded=False)
        assert_as_good(steps.step(layer, inputs, weights), want)
        heap_bytes = sum(memory.heap_bytes for memory in layer.group.memories)
        assert end(layer.group) >= heap_bytes > 0
        with pytest.raises(ConfigError, match="has been destroyed, and with it the memory"):
            layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)


@pytest.mark.parametrize("owner", ["ours", "another's"])
def test_a_graph_of_a_group_that_is_destroyed_reads_no_memory_of_others(owner: str):
    config = make_config(1)
    inputs = steps.make_inputs(config, cases.uniform, [64])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, is_guarded=False)
    (backend,) = layer.backends
    layer.prepare()
    blocks = int(backend._sizes.max_row_blocks)

    def forward() -> torch.Tensor:
        pending = backend.begin(inputs.x[0], inputs.probs[0], inputs.routing_map[0], blocks)
        return backend.finish(pending, weights[0], training=False)[0]

    want = forward().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    is_ours = owner == "ours"
    with dropped_by(graph.reset) if is_ours else contextlib.nullcontext(), torch.cuda.graph(graph):
        out = forward()
    heap_bytes = backend.memory.heap_bytes
    freed = end(layer.group)
    if is_ours:
        assert freed >= heap_bytes
        with pytest.raises(RuntimeError, match="replay"):
            graph.replay()
        return
    assert freed < heap_bytes, "a graph that nobody can drop keeps what it reads"
    others = torch.full((heap_bytes,), 255, dtype=torch.uint8, device=out.device)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    assert bool((others == 255).all())
