"""Buffers of launches: calls give the same bits again, whatever has been in the memory."""

from typing import Any

import pytest
import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.layers import make_config
from tests.gpu.virtual import device
from tests.unit import cases

pytestmark = pytest.mark.gpu

WIDTHS = {"tokens are read": 192, "rows are received": 1152}
NAN_BYTES = 64 << 20


class Layer:
    """One layer on one GPU."""

    def __init__(self, width: int, memory: GroupMemory | None = None, **options: Any) -> None:
        config = make_config(1, intermediate=width)
        chosen = BackendOptions(**options)
        memory = memory or GroupMemory(None, device(), chosen)
        self.backend = KernelBackend(config, None, device(), memory=memory, rank=0, options=chosen)
        self.inputs = steps.make_inputs(config, cases.uniform, [300])
        stacks = (torch.stack(each).requires_grad_() for each in (self.inputs.fc1, self.inputs.fc2))
        self.fc1, self.fc2 = stacks
        self.poisons = True

    def __call__(self, num_tokens: int = 300) -> tuple[torch.Tensor, ...]:
        """The output, and in grad mode all gradients; what is allocated has NaN in it."""
        self.poison()
        x, probs = (
            each[0][:num_tokens].clone().requires_grad_()
            for each in (self.inputs.x, self.inputs.probs)
        )
        routing_map = self.inputs.routing_map[0][:num_tokens].contiguous()
        leaves = (x, probs, self.fc1, self.fc2)
        for leaf in leaves:
            leaf.grad = None
        weights = ExpertWeights((self.fc1,), (self.fc2,))
        out = moe_apply(self.backend, x, probs, routing_map, weights)
        if not torch.is_grad_enabled():
            return (out,)
        self.poison()
        out.float().square().sum().backward()
        return (out.detach(), *(leaf.grad for leaf in leaves))

    def poison(self) -> None:
        """Leaves NaN in memory that is allocated next."""
        if torch.cuda.is_current_stream_capturing() or not self.poisons:
            return
        for num_bytes in (NAN_BYTES, NAN_BYTES >> 6, NAN_BYTES >> 12):
            torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device())


def assert_equal(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)


@pytest.mark.parametrize("row_bound", [None, 4.0])
@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_trainings(width: int, keep: str, row_bound: float | None) -> None:
    layer = Layer(width, keep=keep, row_bound=row_bound)
    want = layer()
    for _ in range(3):
        assert_equal(layer(), want)


@pytest.mark.parametrize("row_bound", [None, 4.0])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_evaluations_of_any_number_of_tokens(width: int, row_bound: float | None) -> None:
    layer = Layer(width, row_bound=row_bound)
    with torch.no_grad():
        want = layer()
        for num_tokens in (300, 17, 128, 17, 300, 128, 1):
            assert_equal(layer(num_tokens), (want[0][:num_tokens],))


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_graph_and_calls_take_turns(width: int) -> None:
    """A wider layer makes the group's memory again after the capture; the graph keeps its own."""
    layer = Layer(width, row_bound=4.0)
    stream = torch.cuda.Stream(device())
    with torch.cuda.stream(stream):
        with torch.no_grad():
            want = layer()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                got = layer()
        trained = layer()
        wider = Layer(2304, layer.backend.memory, row_bound=8.0)
        for _ in range(3):
            got[0].fill_(torch.nan)
            graph.replay()
            stream.synchronize()
            assert_equal(got, want)
            assert_equal(layer(), trained)
            with torch.no_grad():
                assert_equal(layer(), want)
            wider()


def test_streams_take_turns() -> None:
    layer = Layer(WIDTHS["rows are received"], row_bound=4.0)
    layer.poisons = False  # streams run concurrently as far as the layer lets them
    with torch.no_grad():
        want = layer()
        torch.cuda.synchronize()
        found = []
        for _ in range(6):
            with torch.cuda.stream(torch.cuda.Stream(device())):
                found.append(layer())
        torch.cuda.synchronize()
    for got in found:
        assert_equal(got, want)
