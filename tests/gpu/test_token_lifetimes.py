"""Tokens that a backward reads or copies: whatever their owner does with them meanwhile.

Experts of one rank keep no rows by default. Their backward reads the forward's tokens where they
are, or copies them first. Gradients have to be those of rows, or autograd has to raise.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import KeepOption, MoEConfig
from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.layers import make_config
from tests.gpu.virtual import device
from tests.unit import cases

pytestmark = pytest.mark.gpu

HIDDEN = make_config(1).hidden
TOKENS = 300
MICRO_BATCHES = 4


@functools.cache
def make_inputs(config: MoEConfig, micro_batch: int) -> cases.Inputs:
    return steps.make_inputs(config, cases.uniform, [TOKENS], seed=micro_batch)


class Layer:
    """A layer behind a projection, whose output is the tokens: a backward goes through both."""

    width = 0
    """The intermediate size of its experts."""

    def __init__(self, keep: KeepOption) -> None:
        options = BackendOptions(keep=keep)
        memory = GroupMemory(None, device(), options)
        config = make_config(1, intermediate=self.width)
        self.backend = KernelBackend(config, None, device(), memory=memory, rank=0, options=options)
        assert self.backend.reads_tokens
        self.inputs = [make_inputs(config, number) for number in range(MICRO_BATCHES)]
        torch.manual_seed(0)
        width = HIDDEN
        projection = torch.randn(width, width, dtype=torch.bfloat16, device=device()) / width**0.5
        self.projection = projection.requires_grad_()
        given = self.inputs[0]
        self.weights = [one.clone().requires_grad_() for one in (*given.fc1, *given.fc2)]

    def tokens(self, micro_batch: int) -> torch.Tensor:
        return self.inputs[micro_batch].x[0] @ self.projection

    def experts(self, x: torch.Tensor, micro_batch: int) -> torch.Tensor:
        given, num = self.inputs[micro_batch], len(self.weights) // 2
        weights = ExpertWeights(tuple(self.weights[:num]), tuple(self.weights[num:]))
        return moe_apply(self.backend, x, given.probs[0], given.routing_map[0], weights)

    def grad(self, micro_batch: int) -> torch.Tensor:
        return self.inputs[micro_batch].grad_out[0]

    def grads(self) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        found = [one.grad for one in (self.projection, *self.weights)]
        assert all(grad is not None for grad in found)
        return [grad for grad in found if grad is not None]


@pytest.fixture(
    params=[192, 320, 704], ids=["read", "copied", "copied by both passes"], autouse=True
)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with experts whose backward reads tokens in place, and with some that copy them."""
    monkeypatch.setattr(Layer, "width", request.param)


def poison() -> None:
    """Takes the memory that is free, a few times over, and leaves NaN in it."""
    for _ in range(4):
        taken = [torch.full((TOKENS, HIDDEN), torch.nan, device=device()) for _ in range(32)]
        del taken


def check(run: Callable[[Layer], None]) -> None:
    """Compares the gradients of a layer that reads tokens with those of one that keeps rows."""
    found = []
    for keep in ("all", "auto"):
        layer = Layer(keep)
        run(layer)
        assert (layer.backend.weight_grads.row_bytes > 0) == (keep == "all")
        found.append(layer.grads())
    assert not any(grad.isnan().any() for grad in found[0])
    for got, want in zip(found[1], found[0], strict=True):
        assert torch.equal(got, want)


def test_micro_batches_whose_owner_lets_go_of_their_tokens() -> None:
    def run(layer: Layer) -> None:
        pending = []
        for number in range(MICRO_BATCHES):
            pending.append(layer.experts(layer.tokens(number), number))
            poison()
        for number, out in enumerate(pending):
            out.backward(layer.grad(number))
            poison()

    check(run)


def test_tokens_that_are_computed_again() -> None:
    def run(layer: Layer) -> None:
        pending = [
            checkpoint(
                lambda number=number: layer.experts(layer.tokens(number), number),
                use_reentrant=False,
            )
            for number in range(MICRO_BATCHES)
        ]
        poison()
        for number, out in enumerate(pending):
            out.backward(layer.grad(number))

    check(run)


def test_tokens_whose_memory_is_given_back_until_the_backward() -> None:
    """As Megatron does for the outputs of a layer norm that it computes again."""

    def run(layer: Layer) -> None:
        pending = []
        for number in range(MICRO_BATCHES):
            x = layer.tokens(number)
            out = layer.experts(x, number)
            x.untyped_storage().resize_(0)

            def restore(grad: torch.Tensor, x: torch.Tensor = x, number: int = number) -> None:
                with torch.no_grad():
                    again = layer.tokens(number).untyped_storage()
                x.untyped_storage().resize_(again.nbytes())
                x.untyped_storage().copy_(again)

            out.register_hook(restore)
            pending.append(out)
            poison()
        for number, out in enumerate(pending):
            out.backward(layer.grad(number))

    check(run)


@contextlib.contextmanager
def moved(offset: int) -> Iterator[None]:
    """Keeps saved tensors in the host's memory, and brings them back to an address of their own."""

    def unpack(packed: tuple[torch.Tensor, Any]) -> torch.Tensor:
        on_host, like = packed
        if on_host.dtype == torch.uint8:
            return on_host.to(like)
        room = torch.empty(on_host.numel() + offset, dtype=on_host.dtype, device=like)
        return room[offset:].view_as(on_host).copy_(on_host)

    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (tensor.cpu(), tensor.device), unpack
    ):
        yield


def test_tokens_that_were_offloaded() -> None:
    def run(layer: Layer) -> None:
        with moved(0):
            pending = [
                layer.experts(layer.tokens(number), number) for number in range(MICRO_BATCHES)
            ]
        poison()
        for number, out in enumerate(pending):
            out.backward(layer.grad(number))

    check(run)


def test_tokens_that_come_back_where_the_kernel_cannot_read_them() -> None:
    layer = Layer("auto")
    x = layer.tokens(0).detach()
    probs, routing_map = layer.inputs[0].probs[0], layer.inputs[0].routing_map[0]
    fc1 = tuple(weight.clone().requires_grad_() for weight in layer.inputs[0].fc1)
    weights = ExpertWeights(fc1, tuple(layer.inputs[0].fc2))
    saved: list[torch.Tensor] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != x.data_ptr():
            return tensor
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        saved.append(room[1:].view_as(x).copy_(tensor))
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = moe_apply(layer.backend, x, probs, routing_map, weights)
    with pytest.raises(ShapeError, match="x of the forward: at address 0x.*, wanted 16-byte"):
        out.backward(layer.grad(0))
    assert len(saved) == 1


def test_tokens_that_are_written_in_place() -> None:
    """A residual connection that adds to the tokens themselves: a sum of its own is wanted."""
    layer = Layer("auto")
    x = layer.tokens(0)
    x += layer.experts(x, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.backward(layer.grad(0))


def test_tokens_that_are_written_where_no_counter_sees_it() -> None:
    """Ways out: rows are kept, or a copy is given to the layer, and nobody else writes to it."""

    def run(layer: Layer) -> None:
        pending = []
        for number in range(MICRO_BATCHES):
            x = layer.tokens(number)
            keeps_rows = layer.backend.keep == "all"
            pending.append(layer.experts(x if keeps_rows else x.clone(), number))
            x.data.fill_(torch.nan)
        for number, out in enumerate(pending):
            out.backward(layer.grad(number))

    check(run)


def test_tokens_of_a_graph_that_is_replayed_for_each_micro_batch() -> None:
    """As pieces of a model in graphs of their own do, each replayed again behind its backward."""

    def run(layer: Layer) -> None:
        inputs = torch.empty_like(layer.inputs[0].x[0])
        projection = layer.projection.detach()
        stream, graphs = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            inputs @ projection  # cuBLAS makes what it needs outside of a capture
        for _ in range(2):  # as many micro-batches are under way
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                made = inputs @ projection
            graphs.append((graph, made))
        layer.projection.grad = torch.zeros_like(projection)

        def begin(number: int) -> tuple[torch.Tensor, torch.Tensor]:
            graph, made = graphs[number % 2]
            inputs.copy_(layer.inputs[number].x[0])
            graph.replay()
            x = made.detach().requires_grad_()
            return x, layer.experts(x, number)

        def end(x: torch.Tensor, out: torch.Tensor, number: int) -> None:
            out.backward(layer.grad(number))
            assert x.grad is not None
            assert layer.projection.grad is not None
            layer.projection.grad += layer.inputs[number].x[0].t() @ x.grad

        pending = [begin(0)]
        for number in range(1, MICRO_BATCHES):
            pending.append(begin(number))
            poison()
            end(*pending.pop(0), number - 1)
        end(*pending.pop(0), MICRO_BATCHES - 1)

    check(run)


def test_tokens_of_another_stream() -> None:
    def run(layer: Layer) -> None:
        own, other = torch.cuda.current_stream(), torch.cuda.Stream()
        pending = []
        for number in range(MICRO_BATCHES):
            x = layer.tokens(number)
            other.wait_stream(own)
            with torch.cuda.stream(other):
                out = layer.experts(x, number)
            x.record_stream(other)
            del x
            own.wait_stream(other)
            pending.append(out)
            poison()
        for number, out in enumerate(pending):
            out.backward(layer.grad(number))
            poison()

    check(run)
