"""fc2's gradients are complete before the launch is, and who waits for them alone may go on.

A copy of them on a stream of its own has to have the final bits, also where it is made while the
launch still computes fc1's.
"""

import time

import pytest
import torch

from flashmoe_megatron.backend import ExpertWeights, WeightGrad
from flashmoe_megatron.errors import PeerTimeoutError
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.virtual import VirtualLayer, device, streams
from tests.unit import cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

LARGE = 1024  # hidden and intermediate size where every CTA has tiles of both gradients


class Layer:
    """One rank's layer, with gradients that every backward adds to."""

    def __init__(
        self,
        width: int = LARGE,
        routing: cases.Routing = cases.uniform,
        num_tokens: int = 4096,
        dtype: torch.dtype = torch.float32,
        memory: GroupMemory | None = None,
        row_bound: float | None = None,
    ) -> None:
        self.config = make_config(
            1, hidden=width, intermediate=width, max_tokens=max(num_tokens, 1)
        )
        self.memory = memory or GroupMemory(None, device(), BackendOptions())
        self.backend = KernelBackend(
            self.config,
            None,
            device(),
            memory=self.memory,
            rank=0,
            options=BackendOptions(row_bound=row_bound),
        )
        self.inputs = steps.make_inputs(self.config, routing, [num_tokens])
        (self.weights,) = steps.weights_of(self.config, self.inputs)
        self.fc1, self.fc2 = (
            [WeightGrad(torch.ones_like(weight, dtype=dtype), True) for weight in weights]
            for weights in (self.weights.fc1, self.weights.fc2)
        )

    def backward(self) -> None:
        inputs = self.inputs
        _, saved = self.backend.forward(
            inputs.x[0], inputs.probs[0], inputs.routing_map[0], self.weights, training=True
        )
        self.backend.backward(inputs.grad_out[0], saved, self.weights, self.fc1, self.fc2)

    def copies(self) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        """fc2's gradients as who waits for them alone sees them, and when it had the first."""
        early = self.backend.early_fc2_grads()
        assert early is not None
        copied = torch.cuda.Event(enable_timing=True)
        with early:
            copies = []
            for grad in self.fc2:
                copies.append(grad.buffer.clone())
                if len(copies) == 1:
                    copied.record()
        return copies, copied

    def check(self) -> float:
        """A backward and early copies; gives the milliseconds from the first of them to its end."""
        self.backward()
        end = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        copies, copied = self.copies()
        torch.cuda.synchronize()
        for copy, grad in zip(copies, self.fc2, strict=True):
            torch.testing.assert_close(copy, grad.buffer, rtol=0, atol=0, equal_nan=False)
        return copied.elapsed_time(end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_they_are_there_before_the_end(dtype: torch.dtype):
    layer = Layer(dtype=dtype)
    for _ in range(3):  # the first allocates, and loads kernels
        layer.check()
    # Never, if they were told of at the end. A host that is late may miss some of them.
    assert max(layer.check() for _ in range(20)) > 0


@pytest.mark.parametrize("routing", [cases.uniform, cases.with_empty_experts])
@pytest.mark.parametrize("width", [64, 192, LARGE])
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_whoever_waits_sees_all(routing: cases.Routing, width: int, num_tokens: int):
    """Streams that wait see all, also where a CTA has no tile of fc1, or nothing at all to do."""
    layer = Layer(width, routing, num_tokens)
    for _ in range(5):
        layer.check()


def test_one_of_several_layers_is_the_last():
    first = Layer()
    second = Layer(width=512, memory=first.memory)
    for layer, other in ((first, second), (second, first)):
        layer.check()
        assert other.backend.early_fc2_grads() is None


def test_gradients_that_are_copied_behind_the_launch_are_not_early():
    layer = Layer(width=256, num_tokens=300)
    layer.check()
    layer.fc2[0] = WeightGrad(layer.fc2[0].buffer.bfloat16(), True)
    layer.backward()
    assert layer.backend.early_fc2_grads() is None


def test_replays_of_a_graph_tell_nobody():
    layer = Layer(width=256, num_tokens=300, row_bound=4.0)
    layer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.backward()
        assert layer.backend.early_fc2_grads() is None
    assert layer.backend.early_fc2_grads() is None
    layer.backward()
    early = layer.backend.early_fc2_grads()
    assert early is not None
    graph.replay()
    with early:  # which hears of the backward before the replay
        torch.cuda.current_stream().synchronize()
    layer.check()


def test_who_waits_for_a_launch_that_gives_up_goes_on():
    config = make_config(2)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, timeout_s=1.0, is_guarded=False)
    _, saved = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
    torch.cuda.synchronize()
    (fc1, _), (fc2, _) = steps.make_grads(layer, weights)
    backend = layer.backends[0]
    with torch.cuda.stream(streams()[0]):  # the other rank never comes
        backend.backward(inputs.grad_out[0], saved[0], weights[0], fc1, fc2)
        early = backend.early_fc2_grads()
    assert early is not None
    start = time.monotonic()
    with early:
        torch.cuda.current_stream().synchronize()
    assert time.monotonic() - start < 10
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeoutError):
        backend.raise_pending_fault()


def test_transposed_weights():
    """Their products have left and right exchanged, but fc2's still come first."""
    layer = Layer(width=512, num_tokens=1000)
    weights = layer.weights
    layer.weights = ExpertWeights(
        tuple(weight.t().contiguous() for weight in weights.fc1),
        tuple(weight.t().contiguous() for weight in weights.fc2),
        transposed=True,
    )
    layer.fc1, layer.fc2 = (
        [WeightGrad(torch.zeros_like(weight, dtype=torch.float32), True) for weight in matrices]
        for matrices in (layer.weights.fc1, layer.weights.fc2)
    )
    for _ in range(3):
        layer.check()
