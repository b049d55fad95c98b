"""Layers with low-rank additions, beside sums that autograd differentiates."""

from typing import Any

import torch

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases

RANK, SCALE = 3, 0.5
FORMS = ("shared", "stack", "each", "shared outer")
Tensors = tuple[torch.Tensor, ...]


def factors(form: str, matrices: Tensors, kind: str) -> tuple[Tensors, Tensors]:
    """Draws both factors for matrices of one projection, as leaves."""
    (outputs, inputs), num = matrices[0].shape, len(matrices)
    is_shared = {"down": form == "shared", "up": form == "shared"}
    if form == "shared outer":
        is_shared = {"down": kind == "fc1", "up": kind == "fc2"}
    found = {}
    for name, shape in (("down", (RANK, inputs)), ("up", (outputs, RANK))):
        if is_shared[name]:
            drawn: Tensors = (torch.randn(shape),)
        elif form == "each":
            drawn = tuple(torch.randn(shape) for _ in range(num))
        else:
            drawn = (torch.randn(num, *shape),)
        found[name] = tuple(one.to(matrices[0].dtype).requires_grad_() for one in drawn)
    return found["down"], found["up"]


def summed(matrices: Tensors, down: Tensors, up: Tensors) -> Tensors:
    """Adds factors up one expert at a time, for autograd to differentiate."""
    found = []
    for e, matrix in enumerate(matrices):
        a, b = (
            kind[e] if len(kind) > 1 else kind[0][e] if kind[0].dim() > 2 else kind[0]
            for kind in (down, up)
        )
        found.append(matrix + SCALE * (b @ a))
    return tuple(found)


def results(
    backend: Any, inputs: cases.Inputs, form: str, *, adapts: str, is_stack: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The outputs and gradients with additions, and with sums that autograd has made."""
    rank, config = backend.rank, backend.config
    own = slice(rank * config.num_local_experts, (rank + 1) * config.num_local_experts)
    fc1, fc2 = tuple(inputs.fc1[own]), tuple(inputs.fc2[own])
    torch.manual_seed(0)
    found = []
    of_fc1 = factors(form, fc1, "fc1") if "fc1" in adapts else ((), ())
    of_fc2 = factors(form, fc2, "fc2") if "fc2" in adapts else ((), ())
    leaves = [*of_fc1[0], *of_fc1[1], *of_fc2[0], *of_fc2[1]]
    for joins in (True, False):
        for leaf in leaves:
            leaf.grad = None
        x, probs = (each[rank].clone().requires_grad_() for each in (inputs.x, inputs.probs))
        weights: ExpertWeights
        if joins:
            stacks = [(torch.stack(one),) if is_stack else one for one in (fc1, fc2)]
            weights = AdaptedWeights(
                *stacks,
                fc1_down=of_fc1[0],
                fc1_up=of_fc1[1],
                fc2_down=of_fc2[0],
                fc2_up=of_fc2[1],
                fc1_scale=SCALE,
                fc2_scale=SCALE,
            )
        else:
            sums = [
                summed(one, *of_one) if of_one[0] else one
                for one, of_one in ((fc1, of_fc1), (fc2, of_fc2))
            ]
            weights = ExpertWeights(*sums)
        out = moe_apply(backend, x, probs, inputs.routing_map[rank], weights)
        out.backward(inputs.grad_out[rank])
        named = {f"leaf {i}": leaf.grad for i, leaf in enumerate(leaves)}
        assert x.grad is not None
        assert probs.grad is not None
        got = {"out": out.detach(), "x": x.grad, "probs": probs.grad}
        found.append(got | {name: one for name, one in named.items() if one is not None})
        assert len(found[-1]) == 3 + len(leaves)
    return found


def assert_alike(found: list[dict[str, torch.Tensor]]) -> None:
    got, want = found
    for name, one in want.items():
        assert_close(name, got[name], one, rel_l2=1e-5)
