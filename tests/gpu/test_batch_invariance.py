"""A token's bits depend neither on other tokens of its batch, on any rank, nor on their order."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Activation, Keep, MoEConfig
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.layers import make_config, zipf
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu

TOKENS = 1000

Bits = tuple[torch.Tensor, ...]


def of_tokens(config: MoEConfig, inputs: cases.Inputs, tokens: torch.Tensor) -> Bits:
    """Returns the outputs, evaluated and trained, and the gradients of some tokens."""
    chosen = replace(
        inputs,
        **{
            name: [getattr(inputs, name)[0][tokens].contiguous()]
            for name in ("x", "probs", "routing_map", "grad_out")
        },
    )
    weights = steps.weights_of(config, chosen)
    layer = VirtualLayer(config)
    arguments = (chosen.x, chosen.probs, chosen.routing_map, weights)
    (evaluated,), _ = layer.forward(*arguments, training=False)
    results = steps.step(layer, chosen, weights)
    torch.cuda.synchronize()
    return evaluated, results.out, results.grad_x, results.grad_probs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("intermediate", [192, 512, 640, 1088])
def test_other_tokens_and_their_order(intermediate: int, gated: bool, dtype: torch.dtype) -> None:
    """On both sides of the widths up to which a forward, or both passes, read rows in place."""
    config = make_config(
        1,
        intermediate=intermediate,
        gated=gated,
        activation=Activation.SILU if gated else Activation.GELU,
        max_tokens=TOKENS,
    )
    inputs = steps.make_inputs(config, cases.uniform, [TOKENS], dtype=dtype)
    everyone = of_tokens(config, inputs, torch.arange(TOKENS, device=device()))
    shuffled = torch.randperm(TOKENS, generator=cases.generator(1)).to(device())
    for tokens in (shuffled, shuffled[:300], shuffled[:57], shuffled[:1]):
        got = of_tokens(config, inputs, tokens)
        for name, some, every in zip(
            ("evaluated", "out", "grad_x", "grad_probs"), got, everyone, strict=True
        ):
            assert torch.equal(some, every[tokens]), f"{name} of {len(tokens)} tokens"


NAMES = ("x", "probs", "routing_map", "grad_out")


def of_ranks(layer: VirtualLayer, inputs: cases.Inputs, bound: int | None) -> list[Bits]:
    """Returns each rank's outputs and gradients of tokens."""
    weights = steps.weights_of(layer.config, inputs)
    arguments = (inputs.x, inputs.probs, inputs.routing_map, weights)
    out, saved = layer.forward(*arguments, num_row_blocks=bound)
    grads = steps.make_grads(layer, weights)
    grad_x, grad_probs = layer.backward(inputs.grad_out, saved, weights, *grads)
    torch.cuda.synchronize()
    return list(zip(out, grad_x, grad_probs, strict=True))


def with_others(inputs: cases.Inputs, others: cases.Inputs, rank: int) -> cases.Inputs:
    """Returns the inputs of one rank beside those that other ranks have elsewhere."""

    def choose(name: str) -> list[torch.Tensor]:
        ours, theirs = getattr(inputs, name), getattr(others, name)
        return [
            own if at == rank else other
            for at, (own, other) in enumerate(zip(ours, theirs, strict=False))
        ]

    return replace(inputs, **{name: choose(name) for name in NAMES})


@functools.cache
def _inputs_of(num_ranks: int, seed: int, most: int, routing: Any) -> cases.Inputs:
    config = make_config(num_ranks, max_tokens=most)
    generator = cases.generator(seed)
    sizes = torch.randint(0, most + 1, (num_ranks,), generator=generator).tolist()
    sizes[0] = 200
    inputs = steps.make_inputs(config, routing, sizes, seed=seed)
    first = steps.make_inputs(config, cases.uniform, [200] * num_ranks, seed=1)
    return replace(inputs, fc1=first.fc1, fc2=first.fc2)


@pytest.mark.parametrize("is_bounded", [False, True], ids=["counted", "bounded"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_tokens_of_other_ranks(num_ranks: int, is_bounded: bool) -> None:
    """Each rank in turn keeps its tokens; the others' change in number, values and experts."""
    config = make_config(num_ranks, max_tokens=320)
    layer = VirtualLayer(config, is_guarded=False)
    layer.prepare()
    bound = int(layer.backends[0]._sizes.max_row_blocks) if is_bounded else None
    uniform = _inputs_of(num_ranks, 1, 320, cases.uniform)
    mine = of_ranks(layer, uniform, bound)
    for seed, routing in ((2, cases.uniform), (3, cases.with_empty_experts), (4, zipf)):
        others = _inputs_of(num_ranks, seed, 320, routing)
        for rank in range(num_ranks):
            got = of_ranks(layer, with_others(uniform, others, rank), bound)[rank]
            for name, one, want in zip(
                ("out", "grad_x", "grad_probs"), got, mine[rank], strict=True
            ):
                assert torch.equal(one, want), f"{name} of rank {rank} beside others' tokens {seed}"


@pytest.mark.parametrize("hidden", [256, 448])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("intermediate", [192, 512, 640, 1088])
def test_any_number_of_tokens(intermediate: int, gated: bool, hidden: int) -> None:
    """A part of a batch beside all of it, from one row of a tile to many tiles of each expert.

    Tiles are one block's or two blocks' of an expert, inside of a matrix or partly behind its last
    column, and read rows where they lie or as they were copied.
    """
    config = make_config(
        1,
        hidden=hidden,
        intermediate=intermediate,
        gated=gated,
        activation=Activation.SILU if gated else Activation.GELU,
        max_tokens=8192,
    )
    inputs = steps.make_inputs(config, cases.uniform, [8192])
    everyone = of_tokens(config, inputs, torch.arange(8192, device=device()))
    for num_tokens in (1, 7, 64, 129, 1024):
        some = torch.arange(8192 - num_tokens, 8192, device=device())
        for one, every in zip(of_tokens(config, inputs, some), everyone, strict=True):
            assert torch.equal(one, every[some]), num_tokens


@pytest.mark.parametrize("keep", ["preactivations", "inputs", "all"])
def test_other_tokens_beside_biases(keep: Keep) -> None:
    """Through autograd, which a forward that is run again for its backward needs."""
    config = make_config(1, max_tokens=TOKENS)
    inputs = steps.make_inputs(config, cases.uniform, [TOKENS])
    options = BackendOptions(keep=keep)
    memory = GroupMemory(None, device(), options)
    backend = KernelBackend(config, None, device(), memory=memory, rank=0, options=options)
    fc1, fc2 = (torch.stack(each) for each in (inputs.fc1, inputs.fc2))
    weights = ExpertWeights(
        (fc1,), (fc2,), fc1_bias=(fc1[..., 0].contiguous(),), fc2_bias=(fc2[..., 0].contiguous(),)
    )

    def of(tokens: torch.Tensor) -> Bits:
        x, probs, routing_map, grad_out = (getattr(inputs, name)[0][tokens] for name in NAMES)
        x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        out = moe_apply(backend, x, probs, routing_map.contiguous(), weights)
        out.backward(grad_out)
        return out.detach(), x.grad, probs.grad

    shuffled = torch.randperm(TOKENS, generator=cases.generator(1)).to(device())
    everyone = of(torch.arange(TOKENS, device=device()))
    for tokens in (shuffled, shuffled[:300], shuffled[:57], shuffled[:1]):
        for one, every in zip(of(tokens), everyone, strict=True):
            assert torch.equal(one, every[tokens])
