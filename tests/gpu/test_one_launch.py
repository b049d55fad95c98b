"""A stated bound of rows: the whole layer is one launch, which plans for itself."""

import gc
import weakref

import pytest
import torch

from flashmoe_megatron.config import Keep
from flashmoe_megatron.errors import RoutingError, RowBoundError
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.weights import WeightGrad
from tests.gpu import steps
from tests.gpu.expected import assert_as_good, expected
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.spinner import Spinner
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu


def enough_blocks(layer: VirtualLayer) -> int:
    layer.prepare()
    return int(layer.backends[0]._sizes.max_row_blocks)


def bounded(layer, inputs, weights, blocks, *, training=True):
    return layer.forward(
        inputs.x,
        inputs.probs,
        inputs.routing_map,
        weights,
        training=training,
        num_row_blocks=blocks,
    )


@pytest.mark.parametrize("case", ["uniform", "to_one_rank", "with_empty_experts"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_same_bits_as_with_a_plan_launch(num_ranks: int, case: str):
    config = make_config(num_ranks)
    inputs = steps.make_inputs(config, getattr(cases, case), TOKENS[num_ranks])
    weights = steps.weights_of(config, inputs)
    planned = VirtualLayer(config)
    want = steps.step(planned, inputs, weights)
    assert_as_good(want, expected(config, inputs))
    layer = VirtualLayer(config)
    blocks = enough_blocks(layer)
    for _ in range(3):
        got = steps.backward(layer, inputs, weights, bounded(layer, inputs, weights, blocks))
        torch.cuda.synchronize()
        steps.assert_same_bits(got, want)
    layer.check_guards()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_too_many_rows_are_an_error_on_every_rank(num_ranks: int):
    config = make_config(num_ranks)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config)
    enough = enough_blocks(layer)
    out, _ = bounded(layer, inputs, weights, 1, training=False)
    torch.cuda.synchronize()
    for rank, backend in enumerate(layer.backends):
        assert out[rank].isnan().all()
        with pytest.raises(RowBoundError, match="blocks of 128 rows, but its buffers hold 1"):
            backend.raise_pending_fault()
    got = steps.backward(layer, inputs, weights, bounded(layer, inputs, weights, enough))
    assert_as_good(got, expected(config, inputs))


def test_bad_routing_is_an_error_on_every_rank():
    config = make_config(4)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[4])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config)
    blocks = enough_blocks(layer)
    inputs.probs[2][3] = float("nan")
    out, _ = bounded(layer, inputs, weights, blocks, training=False)
    torch.cuda.synchronize()
    for rank, backend in enumerate(layer.backends):
        assert out[rank].isnan().all()
        with pytest.raises(RoutingError):
            backend.raise_pending_fault()


@pytest.mark.parametrize("keep", ["all", "preactivations"])
@pytest.mark.parametrize("error", [RowBoundError, RoutingError])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_backward_that_is_launched_before_the_host_hears_of_a_fault(
    num_ranks: int, error: type[Exception], keep: Keep
):
    """There is no plan that it could follow: it finds one of no rows, and ends."""
    config = make_config(num_ranks)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    weights = steps.weights_of(config, inputs)
    want = expected(config, inputs)
    layer = VirtualLayer(config)
    for backend in layer.backends:
        backend.keep = keep
    enough = enough_blocks(layer)
    steps.backward(layer, inputs, weights, bounded(layer, inputs, weights, enough))
    probs = [probs.clone() for probs in inputs.probs]
    if error is RoutingError:
        probs[-1][3] = float("nan")
    fc1, fc2 = steps.make_grads(layer, weights)
    torch.cuda.synchronize()
    grad_x = []
    spinner = Spinner()
    with spinner.hold(torch.cuda.get_device_properties(0).multi_processor_count):
        saved = []
        for rank, backend in enumerate(layer.backends):
            with layer._on_stream(rank):
                pending = backend.begin(
                    inputs.x[rank],
                    probs[rank],
                    inputs.routing_map[rank],
                    1 if error is RowBoundError else enough,
                )
                _, kept = backend.finish(pending, weights[rank], training=True)
                saved.append(kept)
        for rank, backend in enumerate(layer.backends):
            with layer._on_stream(rank):
                grads = backend.backward(
                    inputs.grad_out[rank], saved[rank], weights[rank], fc1[rank], fc2[rank]
                )
                grad_x.append(grads[0])
        assert spinner.is_running, "the host waited for a launch"
    torch.cuda.synchronize()
    layer.check_guards()
    for rank, backend in enumerate(layer.backends):
        assert grad_x[rank].isnan().all()
        for grad in (*fc1[rank], *fc2[rank]):
            assert not grad.buffer.any()
        with pytest.raises(error):
            backend.raise_pending_fault()
    again = steps.backward(layer, inputs, weights, bounded(layer, inputs, weights, enough))
    assert_as_good(again, want)


def test_a_graph_replays_it_with_new_inputs():
    config = make_config(1)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[1])
    other = steps.make_inputs(config, cases.uniform, TOKENS[1], seed=2)
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, is_guarded=False)
    backend = layer.backends[0]
    blocks = enough_blocks(layer)

    def forward(case: cases.Inputs) -> torch.Tensor:
        pending = backend.begin(case.x[0], case.probs[0], case.routing_map[0], blocks)
        return backend.finish(pending, weights[0], training=False)[0]

    want = [forward(case).clone() for case in (inputs, other)]
    static = steps.make_inputs(config, cases.uniform, TOKENS[1])
    forward(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(static)
    for case, result in zip((inputs, other, inputs), (*want, want[0]), strict=True):
        static.x[0].copy_(case.x[0])
        static.probs[0].copy_(case.probs[0])
        static.routing_map[0].copy_(case.routing_map[0])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, result)


def test_a_graph_outlives_its_layer():
    """Others write where the layer alone had memory; the weights are the caller's."""
    config = make_config(1)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[1])
    weights = steps.weights_of(config, inputs)[0]
    given = inputs.x[0], inputs.probs[0], inputs.routing_map[0]
    backend = KernelBackend(config, None, device())

    want, _ = backend.finish(backend.begin(*given), weights, training=False)
    enough = int(backend._sizes.max_row_blocks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = backend.finish(backend.begin(*given, enough), weights, training=False)
    gone = weakref.ref(backend)
    del backend
    gc.collect()
    assert gone() is None
    poison = [
        torch.full((size,), 0xFF, dtype=torch.uint8, device=device())
        for size in (512 << n for n in range(12))
        for _ in range(16)
    ]
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
    assert all(bool((each == 0xFF).all()) for each in poison)


def test_a_graph_replays_a_backward_whose_gradients_are_its_own():
    """Their addresses are first known in the capture, and copied to the GPU at every replay."""
    config = make_config(1)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[1])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, is_guarded=False)
    backend = layer.backends[0]
    blocks = enough_blocks(layer)

    def step() -> list[torch.Tensor]:
        fc1, fc2 = (
            [WeightGrad(torch.empty_like(weight, dtype=torch.float32), False) for weight in each]
            for each in (weights[0].fc1, weights[0].fc2)
        )
        pending = backend.begin(inputs.x[0], inputs.probs[0], inputs.routing_map[0], blocks)
        out, saved = backend.finish(pending, weights[0], training=True)
        grads = backend.backward(inputs.grad_out[0], saved, weights[0], fc1, fc2)
        return [out, *grads, *(grad.buffer for grad in (*fc1, *fc2))]

    want = [tensor.clone() for tensor in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    table_bytes = int(backend._sizes.grad_table_bytes)
    others = [torch.full((table_bytes,), 255, dtype=torch.uint8).pin_memory() for _ in range(64)]
    for tensor in got:
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want)), len(others)
