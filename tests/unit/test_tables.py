"""When the tables of weights' addresses are made anew."""

import types

import pytest
import torch

from flashmoe_megatron.kernel import bindings, tables
from flashmoe_megatron.kernel.memory import plan_memory
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases, native

pytestmark = pytest.mark.library

HEAP = 0x7F0000000000


def test_a_heap_of_another_layout_at_the_same_address_has_its_slots_elsewhere(monkeypatch):
    config = cases.make_config(num_ranks=2)
    encoded: list[list[int]] = []
    call = bindings.call

    def without_a_gpu(name: str, *args):
        return encoded.append(list(args[1])) if name == "encode_weights" else call(name, *args)

    monkeypatch.setattr(bindings, "call", without_a_gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tables.AddressTables, "_upload", lambda self, table: table)
    monkeypatch.setattr(tables, "check_kernel_tensor", lambda *args, **kwargs: None)
    memory = types.SimpleNamespace(own_heap=HEAP, captured=types.SimpleNamespace(keep=lambda _: 0))
    cache = tables.AddressTables(config, memory, torch.device("cpu"))
    fc1, fc2 = ((torch.zeros(n, 64, dtype=torch.bfloat16),) * 4 for n in (128, 64))
    weights = ExpertWeights(fc1, fc2)
    small = bindings.HeapBounds.of(config, 2)
    for heap in (small, small, small.joined(bindings.HeapBounds(2048, 2))):
        problem = native.problem_of(config, heap=heap, spare_slots=2)
        cache.of_weights(weights, problem, native.sizes_of(problem))
    assert len(encoded) == 2
    assert encoded[0] != encoded[1]


def test_layers_in_fp8_share_the_copies_of_their_weights(monkeypatch):
    config = cases.make_config(hidden=128, intermediate=128, experts="fp8")
    call = bindings.call
    given: list[int] = []

    def without_a_gpu(name: str, *args):
        return given.append(args[3]) if name == "encode_weights" else call(name, *args)

    monkeypatch.setattr(bindings, "call", without_a_gpu)
    is_capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    monkeypatch.setattr(tables.AddressTables, "_upload", lambda self, table: table)
    monkeypatch.setattr(tables, "check_kernel_tensor", lambda *args, **kwargs: None)
    kept: list[torch.Tensor] = []
    memory = types.SimpleNamespace(captured=types.SimpleNamespace(keep=kept.append))
    problem = native.problem_of(config)
    sizes = native.sizes_of(problem)

    def weights() -> ExpertWeights:
        fc1, fc2 = (torch.zeros(8, n, 128, dtype=torch.bfloat16) for n in (256, 128))
        return ExpertWeights(tuple(fc1), tuple(fc2))

    cache = tables.AddressTables(config, memory, torch.device("cpu"))
    layers = [weights() for _ in range(3)]
    is_capturing[0] = True  # a graph's memory is another's once the graph is gone
    captured = cache.of_weights(layers[0], problem, sizes).copies
    assert captured is not None
    assert captured is kept[0]
    is_capturing[0] = False
    first, second = (cache.of_weights(one, problem, sizes).copies for one in layers[1:])
    assert first is second
    assert first is not captured
    assert first is not None
    assert first.nbytes == max(sizes.weight_copy_bytes) == 2 * 8 * 128 * (256 + 128)
    assert given == [captured.data_ptr(), first.data_ptr(), first.data_ptr()]


@pytest.mark.parametrize("experts", ["bf16", "fp8", "fp8_dgrad"])
def test_copies_of_a_step_are_planned_for_each_direction_in_fp8(experts):
    config = cases.make_config(hidden=128, intermediate=128, experts=experts)
    forward, backward = native.sizes_of(native.problem_of(config)).weight_copy_bytes
    kept = {"bf16": 0, "fp8": forward, "fp8_dgrad": forward + backward}[experts]
    assert plan_memory(config).own_copies == kept
