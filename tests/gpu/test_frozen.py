"""Frozen weights get no product and no buffer on the kernel; all else keeps its bits."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Keep
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights, SplitWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config, zipf
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu

IsFrozen = Callable[[str, int, int], bool]
"""Tells of a kind of weights, a rank and a local expert whether its weight is frozen."""

FROZEN: dict[str, IsFrozen] = {
    "fc1": lambda kind, rank, expert: kind == "fc1",
    "fc2": lambda kind, rank, expert: kind == "fc2",
    "both": lambda kind, rank, expert: True,
    "an expert": lambda kind, rank, expert: expert == 1,
    "an expert's fc2": lambda kind, rank, expert: (kind, expert) == ("fc2", 1),
    "a rank": lambda kind, rank, expert: rank == 0,
    "fc1 on a rank": lambda kind, rank, expert: (kind, rank) == ("fc1", 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spare_slots", [0, 2])
@pytest.mark.parametrize("what", FROZEN)
def test_what_is_frozen_on_ranks(what: str, spare_slots: int, dtype: torch.dtype) -> None:
    """Beside a backward that wants everything, after which all memory has what it left."""
    config = make_config(4)
    layer = VirtualLayer(config, spare_slots=spare_slots)
    inputs = steps.make_inputs(config, zipf, TOKENS[4])
    weights = steps.weights_of(config, inputs)
    every = steps.make_grads(layer, weights, dtype=dtype)
    want = steps.step(layer, inputs, weights, every)
    torch.cuda.synchronize()
    some = steps.make_grads(layer, weights, dtype=dtype)
    chosen = [
        [
            [
                None if FROZEN[what](kind, rank, expert) else grad
                for expert, grad in enumerate(share)
            ]
            for rank, share in enumerate(of_kind)
        ]
        for kind, of_kind in zip(("fc1", "fc2"), some, strict=True)
    ]
    _, saved = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
    kept = [
        one if spare_slots or any(share) else replace(one, rows=None)
        for one, share in zip(saved, chosen[0], strict=True)
    ]
    grad_x, grad_probs = layer.backward(inputs.grad_out, kept, weights, *chosen)
    torch.cuda.synchronize()
    assert torch.equal(torch.cat(grad_x), want.grad_x)
    assert torch.equal(torch.cat(grad_probs), want.grad_probs)
    for kept_kind, whole, buffers in zip(chosen, every, some, strict=True):
        for target, full, buffer in zip(
            *map(itertools.chain.from_iterable, (kept_kind, whole, buffers)), strict=True
        ):
            if target is None:
                assert buffer.buffer.isnan().all(), "a frozen weight's gradient was written"
            else:
                assert torch.equal(buffer.buffer, full.buffer)
    layer.check_guards()


class Layer:
    """Experts of one rank with biases, of which some are frozen."""

    def __init__(self, keep: Keep, *frozen: str, is_split: bool = False) -> None:
        config = make_config(1, gated=True, activation="silu")
        options = BackendOptions(keep=keep, row_bound=4.0)
        memory = GroupMemory(None, device(), options)
        self.backend = KernelBackend(config, None, device(), memory=memory, rank=0, options=options)
        self.inputs = steps.make_inputs(config, cases.with_empty_experts, [300])
        fc1, fc2 = (torch.stack(each) for each in (self.inputs.fc1, self.inputs.fc2))
        generator = torch.Generator(device()).manual_seed(3)
        biases = (
            torch.randn(each.shape[:2], generator=generator, device=device()).to(each)
            for each in (fc1, fc2)
        )
        tensors = dict(
            zip(("fc1", "fc2", "fc1_bias", "fc2_bias"), (fc1, fc2, *biases), strict=True)
        )
        if is_split:
            gate, up = tensors.pop("fc1").chunk(2, dim=1)
            tensors = {"gate": gate.contiguous(), "up": up.contiguous(), **tensors}
        self.weights = {
            name: torch.nn.Parameter(one, requires_grad=name not in frozen)
            for name, one in tensors.items()
        }

    def step(self) -> dict[str, torch.Tensor | None]:
        """Returns the output and all gradients."""
        x = self.inputs.x[0].clone().requires_grad_()
        probs = self.inputs.probs[0].clone().requires_grad_()
        stacks = {name: (one,) for name, one in self.weights.items()}
        if "gate" in stacks:
            stacks["down"] = stacks.pop("fc2")
            weights: ExpertWeights | SplitWeights = SplitWeights(**stacks)
        else:
            weights = ExpertWeights(**stacks)
        for one in self.weights.values():
            one.grad = None
        out = moe_apply(self.backend, x, probs, self.inputs.routing_map[0], weights)
        out.backward(self.inputs.grad_out[0])
        grads = {name: one.grad for name, one in self.weights.items()}
        return {"out": out.detach(), "x": x.grad, "probs": probs.grad, **grads}


def check(layer: Layer, want: dict[str, torch.Tensor | None], *frozen: str) -> None:
    before = replace(layer.backend.weight_grads)
    got = layer.step()
    for name, one in got.items():
        if name in frozen:
            assert one is None
        else:
            assert torch.equal(one, want[name]), name
    counters = layer.backend.weight_grads
    assert counters.left_out - before.left_out == len(frozen)
    assert counters.computed - before.computed == len(layer.weights) - len(frozen)
    keeps = layer.backend.keep == "all" and not {"fc1", "gate", "up"} & set(frozen)
    assert (counters.row_bytes > before.row_bytes) == keeps


ALL = ("fc1", "fc2", "fc1_bias", "fc2_bias")


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("frozen", [(), ("fc1",), ("fc2",), ("fc1_bias", "fc2"), ALL], ids=str)
def test_what_is_frozen_on_one_rank(frozen: tuple[str, ...], keep: Keep) -> None:
    check(Layer(keep, *frozen), Layer(keep).step(), *frozen)


@pytest.mark.parametrize("frozen", [("gate",), ("up",), ("gate", "up")], ids=str)
def test_gate_and_up_projections_of_their_own(frozen: tuple[str, ...]) -> None:
    layer = Layer("all", *frozen, is_split=True)
    got, want = layer.step(), Layer("all", is_split=True).step()
    for name, one in got.items():
        assert one is None if name in frozen else torch.equal(one, want[name]), name
    assert layer.backend.weight_grads.left_out == len(frozen)
    assert (layer.backend.weight_grads.row_bytes > 0) == (len(frozen) == 1)


def test_a_graph_captured_before_thawing() -> None:
    """Its replays compute what was captured; what is thawed needs a new capture."""
    layer, want = Layer("all", "fc1", "fc1_bias"), Layer("all").step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = layer.step()
    for name in ("fc1", "fc1_bias"):
        layer.weights[name].requires_grad_()
    graph.replay()
    torch.cuda.synchronize()
    for name, one in captured.items():
        assert one is None if name in ("fc1", "fc1_bias") else torch.equal(one, want[name]), name
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again, stream=stream):
        thawed = layer.step()
    again.replay()
    torch.cuda.synchronize()
    for name, one in thawed.items():
        assert torch.equal(one, want[name]), name


def test_frozen_experts_take_less_memory() -> None:
    """The peak of a backward is lower by the gradients, and by the rows that are not kept."""
    peaks = {}
    for frozen in ((), ALL):
        layer = Layer("all", *frozen)
        layer.step()
        for one in layer.weights.values():
            one.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        layer.step()
        torch.cuda.synchronize()
        peaks[bool(frozen)] = torch.cuda.max_memory_allocated() - begin
    gradients = sum(one.nbytes for one in layer.weights.values())
    assert peaks[False] - peaks[True] >= gradients


def test_one_expert_of_several_parameters() -> None:
    config = make_config(1)
    options = BackendOptions()
    memory = GroupMemory(None, device(), options)
    backend = KernelBackend(config, None, device(), memory=memory, rank=0, options=options)
    inputs = steps.make_inputs(config, cases.uniform, [300])
    found = []
    for frozen in (None, 2):
        kinds = [[torch.nn.Parameter(one) for one in each] for each in (inputs.fc1, inputs.fc2)]
        for kind in kinds:
            if frozen is not None:
                kind[frozen].requires_grad_(False)
        out = moe_apply(
            backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], ExpertWeights(*kinds)
        )
        out.backward(inputs.grad_out[0])
        found.append([one.grad for kind in kinds for one in kind])
    every, some = found
    num = config.num_experts
    for place, (one, full) in enumerate(zip(some, every, strict=True)):
        assert one is None if place % num == 2 else torch.equal(one, full)
    assert backend.weight_grads.left_out == 2


def test_a_target_that_is_missing_for_up_rows_alone() -> None:
    """Gate and up rows are one product."""
    layer = Layer("all", is_split=True)
    inputs, stacks = layer.inputs, {name: one.detach() for name, one in layer.weights.items()}
    weights = ExpertWeights(
        (stacks["gate"], stacks["up"]),
        (stacks["fc2"],),
        split=True,
        fc1_bias=(stacks["fc1_bias"],),
        fc2_bias=(stacks["fc2_bias"],),
    )
    _, saved = layer.backend.forward(
        inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights, training=True
    )
    num = layer.backend.config.num_experts
    targets = [WeightGrad(torch.empty_like(one), False) for one in stacks["gate"]]
    none = [None] * num
    with pytest.raises(Exception, match="wanted both or none"):
        layer.backend.backward(
            inputs.grad_out[0], saved, weights, [*targets, *none], none, none, none
        )
