"""One step of a layer on separate kernels, by either name, and what the oracle has of it."""

from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Backend
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close, moe_reference
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases, fp8

NAMES = ("reference", "scheduled")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-14, torch.bfloat16: 6e-3}
TOKENS = {1: [37], 2: [37, 20], 4: [9, 0, 33, 16]}
ROUTINGS = (
    cases.uniform,
    cases.skewed,
    cases.to_one_expert,
    cases.to_one_rank,
    cases.with_empty_experts,
    cases.with_dropped_tokens,
    cases.to_nobody,
)

Found = dict[str, torch.Tensor]
"""Results by name: those of a rank's tokens, and ``[local experts, ...]`` gradients of weights."""


def make(
    name: str,
    config: MoEConfig,
    group: dist.ProcessGroup | None = None,
    *,
    degrees: tuple[int, int] = (2, 3),
    **options: Any,
) -> Backend:
    """A backend by its name; the reference always has one part."""
    if name == "reference":
        return ReferenceBackend(config, group, options=BackendOptions(**options))
    return ScheduledBackend(config, group, options=BackendOptions(**options), degrees=degrees)


def run(
    backend: Backend,
    inputs: cases.Inputs,
    *,
    rank: int = 0,
    as_indices: bool = False,
    transposed: bool = False,
    is_stacked: bool = True,
) -> Found:
    """Forward and backward of one rank's share through the autograd function."""
    config = backend.config
    first = rank * config.num_local_experts
    mine = slice(first, first + config.num_local_experts)
    parameters = []
    for all_experts in (inputs.fc1, inputs.fc2):
        one_by_one = [w.t().contiguous() if transposed else w.clone() for w in all_experts[mine]]
        kind = [torch.stack(one_by_one)] if is_stacked else one_by_one
        parameters.append([weight.requires_grad_() for weight in kind])
    x = inputs.x[rank].clone().requires_grad_()
    probs, routing_map = inputs.probs[rank].clone(), inputs.routing_map[rank]
    weights = ExpertWeights(tuple(parameters[0]), tuple(parameters[1]), transposed=transposed)
    if as_indices:
        topk_idx, weight = cases.as_choices(config, probs, routing_map)
        weight.requires_grad_()
        out = moe_apply(backend, x, None, None, weights, topk_idx=topk_idx, topk_weight=weight)
    else:
        weight = probs.requires_grad_()
        out = moe_apply(backend, x, weight, routing_map, weights)
    out.backward(inputs.grad_out[rank])
    assert weight.grad is not None
    grad_probs = cases.spread(config, topk_idx, weight.grad) if as_indices else weight.grad
    found = {"out": out.detach(), "grad x": x.grad, "grad probs": grad_probs}
    for name, leaves in zip(("fc1", "fc2"), parameters, strict=True):
        assert all(leaf.grad is not None for leaf in leaves), "also experts without tokens have one"
        grads = torch.cat([leaf.grad.view(-1, *leaf.shape[-2:]) for leaf in leaves])
        found[f"grad {name}"] = grads.transpose(1, 2) if transposed else grads
    return found


def oracle(config: MoEConfig, inputs: cases.Inputs, **how: Any) -> list[Found]:
    """What every rank should find, by autograd through the oracle, which ``how`` is for."""
    x = torch.cat(inputs.x).double().requires_grad_()
    probs = torch.cat(inputs.probs).double().requires_grad_()
    fc1, fc2 = (
        [weight.to(torch.float64, copy=True).requires_grad_() for weight in weights]
        for weights in (inputs.fc1, inputs.fc2)
    )
    routing_map = torch.cat(inputs.routing_map)
    layer = fp8.moe_in_fp8 if config.in_fp8 else moe_reference
    if config.has_fp8_dgrad:
        how = {"backward": "fp8_dgrad", **how}
    out = layer(x, probs, routing_map, fc1, fc2, **cases.form_of(config), **how)
    leaves = (x, probs, *fc1, *fc2)
    grads = torch.autograd.grad(
        out, leaves, torch.cat(inputs.grad_out).double(), materialize_grads=True
    )
    sizes = [len(tokens) for tokens in inputs.x]
    experts = [config.num_local_experts] * config.num_ranks
    shares = {
        "out": out.detach().split(sizes),
        "grad x": grads[0].split(sizes),
        "grad probs": grads[1].split(sizes),
        "grad fc1": torch.stack(grads[2 : 2 + len(fc1)]).split(experts),
        "grad fc2": torch.stack(grads[2 + len(fc1) :]).split(experts),
    }
    return [{name: share[rank] for name, share in shares.items()} for rank in range(len(experts))]


def compare(found: Found, want: Found, dtype: torch.dtype, *, times: float = 1.0) -> None:
    """Each tensor, and each expert's gradients by themselves."""
    assert found.keys() == want.keys()
    for name, value in want.items():
        pairs = [(name, found[name], value)]
        if name.startswith("grad fc"):
            each = zip(found[name], value, strict=True)
            pairs = [(f"{name} of expert {i}", got, its) for i, (got, its) in enumerate(each)]
        for what, got, its in pairs:
            assert_close(what, got, its, rel_l2=times * TOLERANCE[dtype])
