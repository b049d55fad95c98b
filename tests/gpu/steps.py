"""Forward and backward of a layer on virtual ranks, from shared inputs to results of all ranks."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import RoutingError
from flashmoe_megatron.hooks import Call
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu.expected import Expected, Results, assert_as_good, expected, to_device
from tests.gpu.virtual import VirtualLayer, device, streams
from tests.unit import cases


def make_inputs(
    config: MoEConfig,
    routing: cases.Routing,
    tokens_per_rank: list[int],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> cases.Inputs:
    """Random inputs of all ranks on the GPU."""
    inputs = cases.make_inputs(config, routing, tokens_per_rank, dtype=dtype, seed=seed)
    return to_device(inputs, device())


def weights_of(
    config: MoEConfig, inputs: cases.Inputs, *, transposed: bool = False
) -> list[ExpertWeights]:
    """Each rank's experts."""
    shares = []
    for first in range(0, config.num_experts, config.num_local_experts):
        experts = slice(first, first + config.num_local_experts)
        fc1, fc2 = (
            tuple(weight.t().contiguous() if transposed else weight for weight in weights[experts])
            for weights in (inputs.fc1, inputs.fc2)
        )
        shares.append(ExpertWeights(fc1, fc2, transposed=transposed))
    return shares


Grads = list[list[WeightGrad]]


def make_grads(
    layer: VirtualLayer,
    weights: list[ExpertWeights],
    *,
    dtype: torch.dtype = torch.float32,
    initial: float | None = None,
) -> tuple[Grads, Grads]:
    """Each rank's gradient buffers: poisoned and to be overwritten, or to be added to."""

    def buffer(weight: torch.Tensor) -> WeightGrad:
        if layer.allocator is None:
            tensor = torch.full_like(weight, float("nan"), dtype=dtype)
        else:
            tensor = layer.allocator(weight.shape, dtype)
        if initial is not None:
            tensor.fill_(initial)
        return WeightGrad(tensor, accumulate=initial is not None)

    return (
        [[buffer(weight) for weight in share.fc1] for share in weights],
        [[buffer(weight) for weight in share.fc2] for share in weights],
    )


def make_main_grads(
    weights: Iterable[torch.Tensor], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Gives each weight a ``main_grad`` of zeros, as Megatron's DDP does, and returns them."""
    made = []
    for weight in weights:
        made.append(torch.zeros_like(weight, dtype=dtype, requires_grad=False))
        weight.main_grad = made[-1]  # type: ignore[attr-defined]
    return made


def collect(
    out: list[torch.Tensor],
    grad_x: list[torch.Tensor],
    grad_probs: list[torch.Tensor],
    grad_fc1: Grads,
    grad_fc2: Grads,
    *,
    transposed: bool = False,
) -> Results:
    """The results of all ranks in one."""

    def stack(grads: Grads) -> torch.Tensor:
        joined = torch.stack([grad.buffer for share in grads for grad in share])
        return joined.transpose(1, 2) if transposed else joined

    return Results(
        torch.cat(out), torch.cat(grad_x), torch.cat(grad_probs), stack(grad_fc1), stack(grad_fc2)
    )


def backward(
    layer: VirtualLayer,
    inputs: cases.Inputs,
    weights: list[ExpertWeights],
    forward: tuple[list[torch.Tensor], list[Any]],
    grads: tuple[Grads, Grads] | None = None,
) -> Results:
    """The backward of a forward, into poisoned float32 buffers unless some are given."""
    out, saved = forward
    fc1, fc2 = grads or make_grads(layer, weights)
    grad_x, grad_probs = layer.backward(inputs.grad_out, saved, weights, fc1, fc2)
    return collect(out, grad_x, grad_probs, fc1, fc2, transposed=weights[0].transposed)


def step(
    layer: VirtualLayer,
    inputs: cases.Inputs,
    weights: list[ExpertWeights],
    grads: tuple[Grads, Grads] | None = None,
) -> Results:
    """One forward and its backward."""
    forward = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
    return backward(layer, inputs, weights, forward, grads)


def guarded_step(
    layer: VirtualLayer,
    inputs: cases.Inputs,
    weights: list[ExpertWeights],
    grads: tuple[Grads, Grads],
) -> Results:
    """One forward and its backward, after which the guards of the layer's memory are whole."""
    results = step(layer, inputs, weights, grads)
    torch.cuda.synchronize()
    layer.check_guards()
    return results


def rows_seen(layer: VirtualLayer) -> dict[int, torch.Tensor]:
    """Has hooks after dispatch note each rank's rows, in float64; returns where they are noted."""
    seen = {}
    for rank, backend in enumerate(layer.backends):

        def look(rows: torch.Tensor, call: Call, rank: int = rank) -> None:
            if not call.is_probe:
                seen[rank] = rows.double().clone()

        backend.hooks.add("after", "dispatch", look)
    return seen


def spoil(layer: VirtualLayer, inputs: cases.Inputs, weights: list[ExpertWeights]) -> None:
    """Leaves NaN in every token, result and gradient that the group's memory holds."""
    nan = cases.Inputs(**vars(inputs))
    nan.x = [torch.full_like(x, float("nan")) for x in inputs.x]
    nan.grad_out = nan.x
    step(layer, nan, weights)


def check(
    config: MoEConfig,
    inputs: cases.Inputs,
    *,
    transposed: bool = False,
    launches: int = 2,
    **group_options: Any,
) -> Expected:
    """Runs a layer in spoiled and guarded memory, and compares everything with the oracle.

    Launch after launch has to give the same bits and to leave its inputs as they were.
    """
    layer = VirtualLayer(config, **group_options)
    weights = weights_of(config, inputs, transposed=transposed)
    want = expected(config, inputs)
    before = {name: [t.clone() for t in tensors] for name, tensors in vars(inputs).items()}
    first: Results | None = None
    for _ in range(launches):
        spoil(layer, inputs, weights)
        got = step(layer, inputs, weights)
        torch.cuda.synchronize()
        assert_as_good(got, want)
        if first is None:
            first = got
        assert_same_bits(got, first)
    layer.check_guards()
    for name, tensors in vars(inputs).items():
        for tensor, copy in zip(tensors, before[name], strict=True):
            assert torch.equal(tensor, copy), f"{name} was written to"
    return want


def check_bad_routing(
    config: MoEConfig, bad: cases.Inputs, inputs: cases.Inputs, message: str
) -> None:
    """Expects that one rank's bad routing is every rank's error, and that the next calls are right.

    Args:
        config: The layer's shape.
        bad: The inputs of which one rank's routing is bad.
        inputs: Good ones, with the same weights.
        message: A pattern of the error.
    """
    layer = VirtualLayer(config)
    weights = weights_of(config, inputs)
    pending = layer.begin(bad.x, bad.probs, bad.routing_map)
    for rank, plan in enumerate(pending):
        with torch.cuda.stream(streams()[rank]), pytest.raises(RoutingError, match=message):
            layer.backends[rank].finish(plan, weights[rank], training=True)
    torch.cuda.synchronize()
    for _ in range(2):
        assert_as_good(step(layer, inputs, weights), expected(config, inputs))


def assert_same_bits(got: Results, want: Results) -> None:
    for name, tensor in vars(got).items():
        assert torch.equal(tensor, getattr(want, name)), f"{name} is not repeated bit by bit"
