"""fc2's gradients are complete before the launch is, and who waits for them alone may go on.

A copy of them on a stream of its own has to have the final bits, also where it is made while the
launch still computes fc1's.
"""

import time

import pytest
import torch

from flashmoe_megatron.errors import PeerTimeoutError
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config, zipf
from tests.gpu.test_one_launch import enough_blocks
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


@pytest.mark.alone
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


@pytest.mark.alone
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


class LayerWithSlots:
    """A layer on virtual ranks, whose experts' replicas their owners add."""

    def __init__(
        self,
        num_ranks: int,
        dtype: torch.dtype,
        initial: float | None,
        *,
        width: int,
        tokens: list[int],
        routing: cases.Routing = zipf,
    ) -> None:
        config = make_config(
            num_ranks, hidden=width, intermediate=width, topk=2, max_tokens=max(tokens)
        )
        self.initial = initial
        self.layer = VirtualLayer(config, is_guarded=False, spare_slots=2)
        self.inputs = steps.make_inputs(config, routing, tokens)
        self.weights = steps.weights_of(config, self.inputs)
        self.fc1, self.fc2 = steps.make_grads(
            self.layer, self.weights, dtype=dtype, initial=initial
        )
        self.num_replicas = 0  # counted over all backwards
        for memory in self.layer.group.memories:
            # Its hardware queue is not that of another rank's stream, as torch's next might be.
            memory.early_fc2._stream = torch.cuda.Stream(priority=-1)
        # Made before, since to allocate may wait for launches, which wait for later ranks'.
        self.copies = [[torch.empty_like(grad.buffer) for grad in share] for share in self.fc2]

    def check(self) -> list[float]:
        """A step and early copies.

        Returns:
            For each rank, the share of its backward that comes behind the first copy.
        """
        inputs, layer = self.inputs, self.layer
        _, saved = layer.forward(inputs.x, inputs.probs, inputs.routing_map, self.weights)
        for share in (*self.fc1, *self.fc2):
            for grad in share:
                grad.buffer.fill_(float("nan") if self.initial is None else self.initial)
        torch.cuda.synchronize()
        end, copied = (
            [torch.cuda.Event(enable_timing=True) for _ in layer.backends] for _ in range(2)
        )
        layer.backward(inputs.grad_out, saved, self.weights, self.fc1, self.fc2)
        for rank, event in enumerate(end):
            event.record(streams()[rank])
        for backend, share, copies, event in zip(
            layer.backends, self.fc2, self.copies, copied, strict=True
        ):
            early = backend.early_fc2_grads()
            assert early is not None
            with early:
                for i, (grad, copy) in enumerate(zip(share, copies, strict=True)):
                    copy.copy_(grad.buffer)
                    if i == 0:
                        event.record()
        torch.cuda.synchronize()
        for share, copies in zip(self.fc2, self.copies, strict=True):
            for grad, copy in zip(share, copies, strict=True):
                torch.testing.assert_close(copy, grad.buffer, rtol=0, atol=0, equal_nan=False)
        return [
            copy.elapsed_time(last) / self._backward_ms(backend)
            for copy, last, backend in zip(copied, end, layer.backends, strict=True)
        ]

    def _backward_ms(self, backend: KernelBackend) -> float:
        record = backend.take_records()[-1]
        assert record.direction == "backward"
        assert record.replicas is not None
        self.num_replicas += len(record.replicas.rows)
        return record.duration_ns / 1e6


kinds = pytest.mark.parametrize(
    ("dtype", "initial"),
    [(torch.float32, 1.0), (torch.float32, None), (torch.bfloat16, 1.0), (torch.bfloat16, None)],
    ids=["main_grad", "float32", "added", "bfloat16"],
)


@pytest.mark.alone
@kinds
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_are_added_before_the_end(
    num_ranks: int, dtype: torch.dtype, initial: float | None
):
    layer = LayerWithSlots(num_ranks, dtype, initial, width=LARGE, tokens=[16_384] * num_ranks)
    first = None
    most = [0.0] * num_ranks
    for _ in range(8):
        shares = layer.check()
        most = list(map(max, most, shares))
        if first is None:
            first = [[copy.clone() for copy in copies] for copies in layer.copies]
        for before, copies in zip(first, layer.copies, strict=True):
            assert all(map(torch.equal, before, copies)), "bits are not repeated"
    assert layer.num_replicas > 0
    # Warps that add have combined before. So a rank that waits for the busiest one's results to the
    # end adds there, and tells of fc2's gradients with little left; the busiest one has some of
    # fc1's left. It would have nothing if they were told of behind the launch.
    assert max(most) > 0.03, f"shares behind the first copies, by rank: {most}"
    assert min(most) > 0, f"shares behind the first copies, by rank: {most}"


@kinds
@pytest.mark.parametrize("routing", [zipf, cases.to_one_expert, cases.to_nobody])
@pytest.mark.parametrize("width", [64, 192])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_whoever_waits_sees_replicas_added(
    num_ranks: int,
    width: int,
    routing: cases.Routing,
    dtype: torch.dtype,
    initial: float | None,
):
    """Also where a CTA has no tile of fc1, or where nothing moves."""
    layer = LayerWithSlots(
        num_ranks, dtype, initial, width=width, tokens=TOKENS[num_ranks], routing=routing
    )
    for _ in range(3):
        layer.check()
    if routing is cases.to_one_expert:
        assert layer.num_replicas > 0


def test_graphs_with_slots_tell_nobody():
    """What a replay computes is what launches compute, and its waits are for its own epoch."""
    config = make_config(2, topk=2)
    inputs = steps.make_inputs(config, zipf, TOKENS[2])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, is_guarded=False, spare_slots=2)
    grads = steps.make_grads(layer, weights, initial=1.0)

    def reset() -> None:
        for grad in (grad for kind in grads for share in kind for grad in share):
            grad.buffer.fill_(1.0)
        torch.cuda.synchronize()

    reset()
    want = steps.step(layer, inputs, weights, grads)
    torch.cuda.synchronize()
    blocks = enough_blocks(layer)
    graphs = []
    for rank, backend in enumerate(layer.backends):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams()[rank]):
            pending = backend.begin(
                inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank], blocks
            )
            out, saved = backend.finish(pending, weights[rank], training=True)
            found = backend.backward(
                inputs.grad_out[rank], saved, weights[rank], grads[0][rank], grads[1][rank]
            )
            assert backend.early_fc2_grads() is None
        graphs.append((graph, out, *found))
    for _ in range(3):
        reset()
        for rank, (graph, *_) in enumerate(graphs):
            with torch.cuda.stream(streams()[rank]):
                graph.replay()
        torch.cuda.synchronize()
        out, grad_x, grad_probs = ([each[i] for each in graphs] for i in (1, 2, 3))
        steps.assert_same_bits(steps.collect(out, grad_x, grad_probs, *grads), want)
    assert all(backend.early_fc2_grads() is None for backend in layer.backends)
