"""The correctness gate before any timing: all results against float32, on all ranks.

Every rank gathers all tokens and computes its own experts' share by the oracle, in float32 and
expert by expert; the shares are summed over the ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.reference.oracle import moe_reference
from tools.bench.shapes import Problem


@dataclass
class LayerResults:
    """One rank's results of a forward and a backward.

    Attributes:
        out: ``[tokens, hidden]``.
        grad_x: ``[tokens, hidden]``.
        grad_probs: ``[tokens, num_experts]``.
        grad_fc1: ``[fc1_rows, hidden]`` per local expert.
        grad_fc2: ``[hidden, intermediate]`` per local expert.
    """

    out: torch.Tensor
    grad_x: torch.Tensor
    grad_probs: torch.Tensor
    grad_fc1: list[torch.Tensor]
    grad_fc2: list[torch.Tensor]


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
    sums = {name: torch.zeros(2, dtype=torch.float64, device=x.device) for name in vars(got)}
    first = dist.get_rank() * config.num_local_experts if config.num_ranks > 1 else 0
    for local in range(config.num_local_experts):
        expert = slice(first + local, first + local + 1)
        result, *grads = expert_results(
            config,
            (x, probs[:, expert], problem.weights.fc1[local], problem.weights.fc2[local]),
            routing_map[:, expert],
            grad_out,
            torch.float32,
        )
        out += result
        grad_x += grads[0]
        grad_probs[:, expert] = grads[1]
        _add_errors(sums["grad_fc1"], got.grad_fc1[local], grads[2])
        _add_errors(sums["grad_fc2"], got.grad_fc2[local], grads[3])
    for name, total in (("out", out), ("grad_x", grad_x), ("grad_probs", grad_probs)):
        _add_errors(sums[name], getattr(got, name), _own_share(problem, total))
    if config.num_ranks > 1:
        for pair in sums.values():
            dist.all_reduce(pair)
    return {name: float((pair[0] / pair[1]).sqrt()) for name, pair in sums.items()}


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

    These are tokens, their probabilities ``[num_tokens, 1]``, and the expert's two weights.
    """
    leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in inputs]
    x, prob, fc1, fc2 = leaves
    how = {"activation": config.activation, "gated": config.gated, "dtype": dtype}
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


def _add_errors(pair: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> None:
    pair[0] += (got.detach().float() - want).square().sum(dtype=torch.float64)
    pair[1] += want.square().sum(dtype=torch.float64)
