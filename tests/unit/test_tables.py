"""When the tables of weights' addresses are made anew."""

import gc
import types
import weakref
from collections.abc import Callable

import pytest
import torch

from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.kernel import bindings, tables
from flashmoe_megatron.kernel.captured import Captured
from flashmoe_megatron.kernel.gradients import UniformGrads
from flashmoe_megatron.kernel.memory import plan_memory
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.unit import cases, native

pytestmark = pytest.mark.library

HEAP = 0x7F0000000000


def on_processor(
    monkeypatch: pytest.MonkeyPatch, encode: Callable[..., object] = lambda *_: None
) -> list[bool]:
    """Leaves tables of weights on the processor; ``encode`` gets what descriptors are made of.

    Returns whether a graph captures, to be changed in place.
    """
    call, is_capturing = bindings.call, [False]

    def without_a_gpu(name: str, *args: object) -> object:
        return encode(*args) if name == "encode_weights" else call(name, *args)

    monkeypatch.setattr(bindings, "call", without_a_gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    monkeypatch.setattr(tables.AddressTables, "_upload", lambda self, table: table)
    monkeypatch.setattr(tables, "check_kernel_tensor", lambda *args, **kwargs: None)
    return is_capturing


def test_a_heap_of_another_layout_at_the_same_address_has_its_slots_elsewhere(monkeypatch):
    config = cases.make_config(num_ranks=2)
    encoded: list[list[int]] = []
    on_processor(monkeypatch, lambda *args: encoded.append(list(args[1])))
    memory = types.SimpleNamespace(own_heap=HEAP, captured=Captured())
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
    given: list[int] = []
    is_capturing = on_processor(monkeypatch, lambda *args: given.append(args[3]))
    kept: list[torch.Tensor] = []
    memory = types.SimpleNamespace(captured=Captured())
    monkeypatch.setattr(memory.captured, "keep", kept.append)
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


class GradTables:
    """Tables of gradients on a processor, and how many have been made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        call = bindings.call

        def count(name: str, *args):
            self.made += name == "encode_grads"
            return call(name, *args)

        monkeypatch.setattr(bindings, "call", count)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(tables.AddressTables, "_upload", lambda self, table: table)
        self.config = cases.make_config()
        self.captured = Captured()
        memory = types.SimpleNamespace(captured=self.captured)
        self._tables = tables.AddressTables(self.config, memory, torch.device("cpu"))
        self._problem = native.problem_of(self.config)

    def of(self, *buffers: torch.Tensor | None, accumulate: bool = False) -> torch.Tensor:
        grads = [None if each is None else WeightGrad(each, accumulate) for each in buffers]
        sizes = native.sizes_of(self._problem)
        return self._tables.of_grads(UniformGrads(grads), torch.bfloat16, self._problem, sizes)

    def stacks(self, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of both kinds of weights' gradients."""
        config = self.config
        local = config.num_local_experts
        fc1 = torch.zeros(local, config.fc1_rows, config.hidden, dtype=dtype)
        return fc1, torch.zeros(local, config.hidden, config.intermediate, dtype=dtype)


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_where_others_were_have_the_same_table(monkeypatch, accumulate: bool):
    cache = GradTables(monkeypatch)
    fc1, fc2 = cache.stacks()
    table = cache.of(fc1, fc2, accumulate=accumulate)
    assert cache.of(fc1.view_as(fc1), fc2.detach(), accumulate=accumulate) is table
    each = cache.of(*fc1, *fc2, accumulate=accumulate)
    assert torch.equal(each, table)
    assert cache.made == 2
    other = cache.of(*fc1, *fc2[:-1], None, accumulate=accumulate)
    assert not torch.equal(other, each)
    assert not torch.equal(cache.of(*cache.stacks(), accumulate=accumulate), table)


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_of_another_size_at_known_addresses_are_refused(monkeypatch, accumulate: bool):
    cache = GradTables(monkeypatch)
    fc1, fc2 = cache.stacks()
    cache.of(fc1, fc2, accumulate=accumulate)
    for wrong in (fc2[:-1], fc2.expand(2, *fc2.shape)[0, :, :1]):
        with pytest.raises(ShapeError):
            cache.of(fc1, wrong, accumulate=accumulate)
    with pytest.raises(ShapeError, match=r"strides .* wanted contiguous"):
        cache.of(fc1, fc2.transpose(1, 2), accumulate=accumulate)
    if not accumulate:  # what is added to stays, and its owner has one size
        cache.of(*fc1, *fc2)
        with pytest.raises(ShapeError, match="wanted .* elements"):
            cache.of(*fc1, *fc2[:-1], fc2[-1, :1])


def test_graphs_hold_the_tables_of_gradients_that_they_have_captured_alone(monkeypatch):
    """Buffers that move have many tables; graphs or none, these are found again, or forgotten."""
    cache, kept = GradTables(monkeypatch), []
    monkeypatch.setattr(cache.captured, "keep", kept.append)
    monkeypatch.setattr(cache.captured, "keep_left", lambda *given: kept.extend(given))
    monkeypatch.setattr(tables, "MOST_LAYERS", 2)
    buffers = [cache.stacks() for _ in range(4)]
    made = [cache.of(*each) for each in buffers]
    assert cache.of(*buffers[3]) is made[3]
    assert (cache.made, kept) == (4, [])
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert cache.of(*buffers[3]) is made[3]
        cache.of(*buffers[0])  # what is made now is the graph's, which keeps it, too
    assert [id(one) for one in kept] == [id(made[3])]
    cache.of(*buffers[0])
    assert cache.made == 6


@pytest.mark.parametrize("has_graph", [False, True], ids=["no graph", "a graph"])
def test_tables_that_a_graph_reads_outlive_their_layers(monkeypatch, has_graph: bool):
    """Calls before a capture have made the tables of weights, and the capture finds them."""
    is_capturing = on_processor(monkeypatch)
    memory = types.SimpleNamespace(captured=Captured())
    config = cases.make_config()
    problem = native.problem_of(config)
    sizes = native.sizes_of(problem)
    cache = tables.AddressTables(config, memory, torch.device("cpu"))
    shapes = (config.fc1_rows, config.hidden), (config.hidden, config.intermediate)
    fc1, fc2 = (torch.zeros(config.num_local_experts, *each).bfloat16() for each in shapes)
    weights = ExpertWeights(tuple(fc1), tuple(fc2))
    table = cache.of_weights(weights, problem, sizes).maps
    is_capturing[0] = has_graph
    assert cache.of_weights(weights, problem, sizes).maps is table
    memory.captured.note_launch()
    is_capturing[0] = False
    read = weakref.ref(table)
    del cache, table
    gc.collect()
    assert (read() is not None) == has_graph


@pytest.mark.parametrize("experts", ["bf16", "fp8", "fp8_dgrad"])
def test_copies_of_a_step_are_planned_for_each_direction_in_fp8(experts):
    config = cases.make_config(hidden=128, intermediate=128, experts=experts)
    forward, backward = native.sizes_of(native.problem_of(config)).weight_copy_bytes
    kept = {"bf16": 0, "fp8": forward, "fp8_dgrad": forward + backward}[experts]
    assert plan_memory(config).own_copies == kept
