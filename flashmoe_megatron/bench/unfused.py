"""The baseline: a layer of separate kernels, as strong as plain torch and NCCL make it.

Permutation by expert, an all-to-all over NCCL, torch's grouped GEMMs around the activation, the
all-to-all back, and the weighted sum of each token's rows. This is what an all-to-all dispatcher
with grouped experts does; the host waits once, for the numbers of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from flashmoe_megatron.bench.problem import Problem
from flashmoe_megatron.config import Activation, MoEConfig

FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.SQUARED_RELU: lambda rows: F.relu(rows).square(),
    Activation.QUICK_GELU: lambda rows: rows * torch.sigmoid(1.702 * rows),
}


@dataclass
class GroupedWeights:
    """All local experts in two tensors, as torch's grouped GEMM takes them, and their biases.

    Attributes:
        fc1: ``[local experts, hidden, fc1_rows]``.
        fc2: ``[local experts, intermediate, hidden]``.
        fc1_bias: ``[local experts, fc1_rows]``, ``None`` if experts have none.
        fc2_bias: ``[local experts, hidden]``, likewise.
    """

    fc1: torch.Tensor
    fc2: torch.Tensor
    fc1_bias: torch.Tensor | None = None
    fc2_bias: torch.Tensor | None = None

    @staticmethod
    def of(problem: Problem) -> "GroupedWeights":
        """Copies of a problem's weights, as parameters."""
        fc1, fc2 = (
            torch.stack([weight.detach().t() for weight in weights]).contiguous().requires_grad_()
            for weights in (problem.weights.fc1, problem.weights.fc2)
        )
        biases = (
            torch.stack([bias.detach() for bias in each]).requires_grad_() if each else None
            for each in (problem.weights.fc1_bias, problem.weights.fc2_bias)
        )
        return GroupedWeights(fc1, fc2, *biases)

    @property
    def kinds(self) -> dict[str, Any]:
        """The parameters that there are, by name."""
        return {name: one for name, one in vars(self).items() if one is not None}


class _Permute(torch.autograd.Function):
    """Rows in another order; each input row may appear ``copies`` times."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.view(-1, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None


class _AllToAll(torch.autograd.Function):
    """Rows to their ranks; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.send, ctx.receive = send, receive
        return _exchange(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grads[0], ctx.receive, ctx.send), None, None


def _exchange(rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
    received = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), receive, send)
    return received


class _AddBias(torch.autograd.Function):
    """Adds to every row its expert's bias, whose gradient is summed in float32 by one product."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, biases: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(ends)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return rows + biases.repeat_interleave(counts, dim=0, output_size=rows.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ends,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        # Grouped products take strides of 16 bytes, whatever the number of rows.
        ones = grad.new_ones(grad.shape[0], 8).t()
        return grad, torch._grouped_mm(ones, grad, offs=ends)[:, 0], None


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


@dataclass
class Dispatched:
    """The rows that this rank's experts receive, and the way back.

    Attributes:
        rows: ``[received rows, hidden]``, by local expert.
        ends: ``[local experts]`` int32, the end of each expert's rows.
        order, inverse: The token choices by expert, and back.
        send, receive: Rows to and from each rank; empty on one rank.
        regroup, ungroup: Received rows by expert, and back.
    """

    rows: torch.Tensor
    ends: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    send: list[int]
    receive: list[int]
    regroup: torch.Tensor | None
    ungroup: torch.Tensor | None


def dispatch(problem: Problem) -> Dispatched:
    """Brings every token to its experts. Collective over the default group."""
    config = problem.config
    choices = problem.topk_idx.reshape(-1)
    order = choices.sort(stable=True).indices
    inverse = _inverse(order)
    counts = torch.zeros(config.num_experts, dtype=torch.int64, device=choices.device)
    counts.index_add_(0, choices, torch.ones_like(choices))
    rows: torch.Tensor = _Permute.apply(  # type: ignore[no-untyped-call]
        problem.x, order // config.topk, inverse, config.topk
    )
    if config.num_ranks == 1:
        ends = counts.cumsum(0).int()
        return Dispatched(rows, ends, order, inverse, [], [], None, None)

    num_ranks, local = config.num_ranks, config.num_local_experts
    everyone = counts.new_empty(num_ranks * config.num_experts)
    dist.all_gather_into_tensor(everyone, counts)
    first = dist.get_rank() * local
    ours = everyone.view(num_ranks, -1)[:, first : first + local]  # [source rank, local expert]
    host = torch.cat([counts.view(num_ranks, local).sum(1), ours.sum(1)]).tolist()
    send, receive = host[:num_ranks], host[num_ranks:]
    rows = _AllToAll.apply(rows, send, receive)  # type: ignore[no-untyped-call]
    experts = torch.arange(local, device=rows.device).repeat(num_ranks)
    expert_of_row = experts.repeat_interleave(ours.reshape(-1), output_size=sum(receive))
    regroup = expert_of_row.sort(stable=True).indices
    ungroup = _inverse(regroup)
    rows = _Permute.apply(rows, regroup, ungroup, 1)  # type: ignore[no-untyped-call]
    ends = ours.sum(0).cumsum(0).int()
    return Dispatched(rows, ends, order, inverse, send, receive, regroup, ungroup)


def experts(
    rows: torch.Tensor, ends: torch.Tensor, weights: GroupedWeights, config: MoEConfig
) -> torch.Tensor:
    """The local experts alone, without any communication."""
    function = FUNCTIONS[config.activation]
    projected = torch._grouped_mm(rows, weights.fc1, offs=ends)
    if weights.fc1_bias is not None:
        projected = _AddBias.apply(projected, weights.fc1_bias, ends)  # type: ignore[no-untyped-call]
    if config.gated:
        gate, up = projected.chunk(2, dim=1)
        if config.clamp_value is not None:
            gate = gate.clamp(max=config.clamp_value)
            up = up.clamp(-config.clamp_value, config.clamp_value)
        if config.linear_offset:
            up = up + config.linear_offset
        activated = function(gate) * up
    else:
        activated = function(projected)
    result: torch.Tensor = torch._grouped_mm(activated, weights.fc2, offs=ends)
    if weights.fc2_bias is not None:
        result = _AddBias.apply(result, weights.fc2_bias, ends)  # type: ignore[no-untyped-call]
    return result


def unfused_layer(problem: Problem, weights: GroupedWeights) -> torch.Tensor:
    """The whole layer, differentiable. Collective over the default group.

    Returns:
        ``[tokens, hidden]`` bf16.
    """
    there = dispatch(problem)
    rows = experts(there.rows, there.ends, weights, problem.config)
    if there.send:
        rows = _Permute.apply(  # type: ignore[no-untyped-call]
            rows, there.ungroup, there.regroup, 1
        )
        rows = _AllToAll.apply(rows, there.receive, there.send)  # type: ignore[no-untyped-call]
    rows = _Permute.apply(rows, there.inverse, there.order, 1)  # type: ignore[no-untyped-call]
    by_token: torch.Tensor = rows.view(*problem.topk_idx.shape, -1)
    return (by_token * problem.topk_weight.to(rows.dtype).unsqueeze(-1)).sum(1)
