"""Gate and up projections that the kernel reads and differentiates where they are."""

from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.weights import ExpertWeights, SplitWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.test_bad_input import make_backend, misaligned
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu

WIDTHS = [64, 192, 512]
"""FFN widths that fill half a tile of fc1's, one and a half, and four."""


def apart(weights: ExpertWeights, *, stacked: bool) -> ExpertWeights:
    """The same experts with their gates ahead of all ups, in memory of their own."""
    halves = [weight.chunk(2) for weight in weights.fc1]
    parts = [[half[i].contiguous() for half in halves] for i in range(2)]
    parts.append(list(weights.fc2))
    gate, up, down = ([torch.stack(part)] if stacked else part for part in parts)
    return replace(weights, fc1=(*gate, *up), fc2=tuple(down), split=True)


def joined(grads: list[WeightGrad]) -> torch.Tensor:
    """``[num_experts, fc1_rows, hidden]`` of the gradients of all gates and all ups."""
    flat = torch.cat([grad.buffer.view(-1, *grad.buffer.shape[-2:]) for grad in grads])
    return torch.cat(flat.chunk(2), dim=1)


@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=["main_grad", "grad"])
@pytest.mark.parametrize("intermediate", WIDTHS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_split_weights_change_no_bit(
    num_ranks: int, intermediate: int, into: torch.dtype, stacked: bool
):
    config = make_config(num_ranks, intermediate=intermediate)
    inputs = steps.make_inputs(config, cases.with_empty_experts, TOKENS[num_ranks])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config)
    initial = 0.5 if into == torch.float32 else None
    want = steps.step(
        layer, inputs, weights, steps.make_grads(layer, weights, dtype=into, initial=initial)
    )
    split = [apart(share, stacked=stacked) for share in weights]
    for _ in range(2):
        fc1, fc2 = steps.make_grads(layer, split, dtype=into, initial=initial)
        forward = layer.forward(inputs.x, inputs.probs, inputs.routing_map, split)
        grad_x, grad_probs = layer.backward(inputs.grad_out, forward[1], split, fc1, fc2)
        torch.cuda.synchronize()
        assert torch.equal(torch.cat(forward[0]), want.out)
        assert torch.equal(torch.cat(grad_x), want.grad_x)
        assert torch.equal(torch.cat(grad_probs), want.grad_probs)
        assert torch.equal(torch.cat([joined(grads) for grads in fc1]), want.grad_fc1)
        found = [grad.buffer.view(-1, *grad.buffer.shape[-2:]) for grads in fc2 for grad in grads]
        assert torch.equal(torch.cat(found), want.grad_fc2)
    layer.check_guards()


def test_each_parameter_gets_its_gradient_and_nothing_is_copied():
    config = make_config(1)
    inputs = steps.make_inputs(config, cases.uniform, [300])
    (weights,) = steps.weights_of(config, inputs)
    gate, up, down = (
        tensor.requires_grad_()
        for tensor in (
            *(torch.stack([w.chunk(2)[i] for w in weights.fc1]) for i in range(2)),
            torch.stack(weights.fc2),
        )
    )
    fc1 = torch.stack(weights.fc1).requires_grad_()
    backend = make_backend(config)
    call = (inputs.x[0], inputs.probs[0], inputs.routing_map[0])

    def run(weights: ExpertWeights | SplitWeights, leaves: list[torch.Tensor]):
        out = moe_apply(backend, *call, weights)
        return out, *torch.autograd.grad(out, leaves, inputs.grad_out[0])

    def peak(weights: ExpertWeights | SplitWeights, leaves: list[torch.Tensor]) -> int:
        """Bytes at once, once tables of the weights are there."""
        run(weights, leaves)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated(device())
        torch.cuda.reset_peak_memory_stats(device())
        run(weights, leaves)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device()) - base

    whole = (ExpertWeights((fc1,), (down,)), [fc1, down])
    split = (SplitWeights((gate,), (up,), (down,)), [gate, up, down])
    out, grad_fc1, grad_fc2 = run(*whole)
    split_out, grad_gate, grad_up, grad_down = run(*split)
    assert torch.equal(split_out, out)
    assert torch.equal(torch.cat([grad_gate, grad_up], dim=1), grad_fc1)
    assert torch.equal(grad_down, grad_fc2)
    assert peak(*split) - peak(*whole) < gate.nbytes // 8  # tables have another matrix an expert


BAD_UPS = {
    "of another shape": (lambda up: up[:, :128].contiguous(), ShapeError, "up projections have"),
    "of another rank": (lambda up: up[None], ShapeError, "up projections have shapes"),
    "misaligned": (misaligned, ShapeError, "16-byte align"),
    "not contiguous": (lambda up: up.mT.contiguous().mT, ShapeError, "strides .* wanted"),
    "in float16": (torch.Tensor.half, ShapeError, "float16"),
    "missing": (lambda up: up[1:].contiguous(), ShapeError, "up projections have shapes"),
    "on the CPU": (torch.Tensor.cpu, ShapeError, "cpu"),
}


@pytest.mark.parametrize("name", BAD_UPS)
def test_bad_ups_are_refused(name: str):
    change, error, message = BAD_UPS[name]
    config = make_config(1)
    inputs = steps.make_inputs(config, cases.uniform, [64])
    (weights,) = steps.weights_of(config, inputs)
    gate, up = (torch.stack([w.chunk(2)[i] for w in weights.fc1]) for i in range(2))
    good = SplitWeights((gate,), (up,), weights.fc2)
    backend = make_backend(config)
    call = (inputs.x[0], inputs.probs[0], inputs.routing_map[0])
    want = moe_apply(backend, *call, good)
    with pytest.raises(error, match=message):
        moe_apply(backend, *call, replace(good, up=(change(up),)))
    assert torch.equal(moe_apply(backend, *call, good), want)


def test_transposed_and_plain_experts_cannot_be_split():
    for changes, transposed in (({"gated": False}, False), ({}, True)):
        config = make_config(1, **changes)
        inputs = steps.make_inputs(config, cases.uniform, [64])
        (weights,) = steps.weights_of(config, inputs, transposed=transposed)
        bad = replace(weights, split=True)
        with pytest.raises(ConfigError, match="gate and up projections apart"):
            make_backend(config).forward(
                inputs.x[0], inputs.probs[0], inputs.routing_map[0], bad, training=False
            )
