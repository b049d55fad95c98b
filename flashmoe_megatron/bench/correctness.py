"""The correctness gate before any timing: all results against float32, on all ranks.

Every rank gathers all tokens and computes its own experts' share by the oracle, in float32 and
expert by expert; the shares are summed over the ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from flashmoe_megatron.bench.problem import Problem
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.layer import RouterOutput
from flashmoe_megatron.oracle import moe_reference

GATE = 6e-3
"""The most that results may differ from float32's, by relative L2."""


@dataclass
class LayerResults:
    """One rank's results of a forward and a backward; gradients are ``None`` of a forward alone.

    Attributes:
        out: ``[tokens, hidden]``.
        grad_x: ``[tokens, hidden]``.
        grad_probs: ``[tokens, num_experts]``.
        grad_fc1: ``[fc1_rows, hidden]`` per local expert.
        grad_fc2: ``[hidden, intermediate]`` per local expert.
        grad_fc1_bias: ``[fc1_rows]`` per local expert, ``None`` without biases.
        grad_fc2_bias: ``[hidden]`` per local expert, likewise.
    """

    out: torch.Tensor
    grad_x: torch.Tensor | None = None
    grad_probs: torch.Tensor | None = None
    grad_fc1: list[torch.Tensor] | None = None
    grad_fc2: list[torch.Tensor] | None = None
    grad_fc1_bias: list[torch.Tensor] | None = None
    grad_fc2_bias: list[torch.Tensor] | None = None


def relative_errors(problem: Problem, got: LayerResults) -> dict[str, float]:
    """Relative L2 errors over all ranks. Collective over the default group if there is one.

    Returns:
        By name of the result; NaN or infinity where a value is not finite.
    """
    config = problem.config
    x, grad_out = _gather(problem, problem.x.detach()), _gather(problem, problem.grad_out)
    probs, routing_map = (
        _gather(problem, tensor) for tensor in (problem.probs.detach(), problem.routing_map)
    )
    out = torch.zeros(x.shape, device=x.device)
    grad_x = torch.zeros_like(out)
    grad_probs = torch.zeros_like(probs)
    results = {name: result for name, result in vars(got).items() if result is not None}
    sums = {name: _no_errors(x.device) for name in results}
    first = dist.get_rank() * config.num_local_experts if config.num_ranks > 1 else 0
    weights = problem.weights
    kinds = [kind for kind in ("fc1", "fc2", "fc1_bias", "fc2_bias") if getattr(weights, kind)]
    for local in range(config.num_local_experts):
        expert = slice(first + local, first + local + 1)
        own = (getattr(weights, kind)[local] for kind in kinds)
        result, *grads = expert_results(
            config,
            (x, probs[:, expert], *own),
            routing_map[:, expert],
            grad_out,
            torch.float32,
        )
        out += result
        grad_x += grads[0]
        grad_probs[:, expert] = grads[1]
        for name, grad in zip((f"grad_{kind}" for kind in kinds), grads[2:], strict=True):
            if name in results:
                _add_errors(sums[name], results[name][local], grad)
    for name, total in (("out", out), ("grad_x", grad_x), ("grad_probs", grad_probs)):
        if name in results:
            _add_errors(sums[name], results[name], _own_share(problem, total))
    return _over_ranks(config, sums)


def routed_errors(
    problem: Problem, router_weight: torch.Tensor, got: RouterOutput
) -> dict[str, float]:
    """Relative L2 errors of a forward after a router. Collective as :func:`relative_errors`.

    The reference's router is a product in float32 with a softmax over the chosen logits. Sums in
    another order may exchange experts of equal logits, so a choice is judged by the probabilities
    of the chosen experts, and everything after it by the choice that was made.

    Args:
        problem: Tokens and experts; its own routing does not matter.
        router_weight: ``[num_experts, hidden]``.
        got: One rank's results.

    Returns:
        As :func:`relative_errors`, of the choice, its probabilities and the output.
    """
    scores = (problem.x.detach().float() @ router_weight.float().t()).softmax(1)
    chosen = scores * got.routing_map
    best = torch.zeros_like(scores)
    best[:, : problem.config.topk] = scores.topk(problem.config.topk, dim=1).values
    probs = chosen / chosen.sum(1, keepdim=True)
    sums = {name: _no_errors(scores.device) for name in ("choice", "probs")}
    _add_errors(sums["choice"], chosen.sort(1, descending=True).values, best)
    _add_errors(sums["probs"], got.probs, probs)
    routed = replace(problem, probs=probs, routing_map=got.routing_map)
    found = _over_ranks(problem.config, sums)
    return {**found, **relative_errors(routed, LayerResults(got.out))}


def worst_of(errors: Iterable[float]) -> float:
    """The largest error; NaN if any is."""
    return float(torch.tensor([*errors], dtype=torch.float64).max())


def expert_results(
    config: MoEConfig,
    inputs: tuple[torch.Tensor, ...],
    chosen: torch.Tensor,
    grad_out: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """One expert's part of the output, by the oracle in ``dtype``, and gradients of ``inputs``.

    These are tokens, their probabilities ``[num_tokens, 1]``, the expert's two weights and, if it
    has any, their two biases.
    """
    leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in inputs]
    x, prob, fc1, fc2, *biases = leaves
    how = {
        "activation": config.activation,
        "gated": config.gated,
        "clamp_value": config.clamp_value,
        "linear_offset": config.linear_offset,
        "fc1_bias": biases[:1],
        "fc2_bias": biases[1:],
        "dtype": dtype,
    }
    out = moe_reference(x, prob, chosen, [fc1], [fc2], **how)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out, leaves, grad_out.to(dtype), materialize_grads=True)
    return out.detach(), *grads


def _gather(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    if problem.config.num_ranks == 1:
        return tensor
    everyone = tensor.new_empty(problem.config.num_ranks * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_into_tensor(everyone, tensor.contiguous())
    return everyone


def _own_share(problem: Problem, total: torch.Tensor) -> torch.Tensor:
    if problem.config.num_ranks == 1:
        return total
    own = total.new_empty(total.shape[0] // problem.config.num_ranks, *total.shape[1:])
    dist.reduce_scatter_tensor(own, total)
    return own


def _no_errors(device: torch.device) -> torch.Tensor:
    """Squares of errors and of wanted values; :func:`_add_errors` adds to both."""
    return torch.zeros(2, dtype=torch.float64, device=device)


def _over_ranks(config: MoEConfig, sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of all ranks together, by name."""
    if config.num_ranks > 1:
        for pair in sums.values():
            dist.all_reduce(pair)
    return {name: float((pair[0] / pair[1]).sqrt()) for name, pair in sums.items()}


def _add_errors(pair: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> None:
    pair[0] += (got.detach().float() - want).square().sum(dtype=torch.float64)
    pair[1] += want.square().sum(dtype=torch.float64)
