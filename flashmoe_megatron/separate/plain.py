"""The steps of a layer in torch's operators, for processors, for float64 and for the reference.

A route's bits do not depend on which others are computed with it, as they do not in the kernel.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.ranks import REFUSED
from flashmoe_megatron.separate.activations import accumulation_dtype, activate, activate_backward
from flashmoe_megatron.separate.plan import Cut, Indices, Sorted
from flashmoe_megatron.separate.products import Matrices, grads_one_by_one, one_by_one, store
from flashmoe_megatron.weights import ExpertWeights, WeightGrad

_ALIKE = 8
"""Products of whole multiples of so many rows give each row the same bits, however many there are;
fewer rows, or odd ones, take other instructions."""


def sort_routes(config: MoEConfig, probs: torch.Tensor, routing_map: torch.Tensor) -> Sorted:
    """Orders the routes of one rank's tokens by expert and then token; the host does not wait.

    Args:
        config: The layer's shape.
        probs: What a backend's forward takes.
        routing_map: Likewise.
    """
    num_experts, device = config.num_experts, probs.device
    is_map = routing_map.dtype == torch.bool
    selected = routing_map if is_map else routing_map >= 0
    if config.skip_zero_probs:
        selected = selected & (probs != 0)
    bad = (probs.isnan() & selected).any()
    if is_map:
        bad = bad | (selected.sum(1) > config.topk).any()
        columns = selected.cumsum(1) - 1
        columns = columns.masked_fill_(~selected | (columns >= config.topk), config.topk)
        experts = torch.arange(num_experts, device=device).expand(selected.shape)
        choices = torch.full((len(probs), config.topk + 1), num_experts, device=device)
        choices = choices.scatter_(1, columns, experts)[:, : config.topk]
        column_of = choices
    else:
        choices = routing_map.long().masked_fill(~selected, num_experts)
        ascending, column_of = choices.sort(dim=1, stable=True)
        again = (ascending.diff(dim=1) == 0) & (ascending[:, 1:] < num_experts)
        outside = (routing_map < -1) | (routing_map >= num_experts)
        bad = bad | again.any() | outside.any()
        choices = ascending.clamp(max=num_experts)
    flat = choices.reshape(-1)
    order = flat.sort(stable=True).indices
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=device)
    token_idx = order // max(choices.shape[1], 1)
    last = max(probs.shape[1] - 1, 0)
    flat_idx = token_idx * probs.shape[1] + column_of.reshape(-1)[order].clamp(max=last)
    return Sorted(
        token_idx=token_idx,
        flat_idx=flat_idx,
        row_probs=probs.reshape(-1)[flat_idx],
        place=place.masked_fill_(place >= counts.sum(), len(flat)).view(choices.shape),
        counts=torch.where(bad, torch.full_like(counts, REFUSED), counts),
        ends=counts.cumsum(0).int(),
    )


def cut_routes(
    token_idx: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, degree: int
) -> Cut:
    """Brings routes into the order of parts; the host does not wait.

    Args:
        token_idx: The token of each route, by expert; any token after the last route.
        place: As :class:`Sorted` has it.
        ends: Likewise.
        degree: The number of parts.
    """
    if degree == 1:
        return Cut(token_idx, place)
    most = place.numel()  # which is the place of no route
    until = ends.long()
    counts = until.diff(prepend=until.new_zeros(1))
    bounds = counts * torch.arange(degree + 1, device=ends.device)[:, None] // degree
    begins = torch.cat([(until - counts + bounds[:-1]).view(-1), until[-1:]])
    sizes = torch.cat([bounds.diff(dim=0).view(-1), most + 1 - until[-1:]])
    order = _runs(begins, sizes, most + 1)
    moved = torch.empty_like(order).scatter_(0, order, torch.arange(most + 1, device=ends.device))
    return Cut(
        token_idx.index_select(0, order[: len(token_idx)]),
        moved.index_select(0, place.view(-1)).view(place.shape),
    )


def index_rows(received: torch.Tensor, num_rows: int, degree: int) -> Indices:
    """Finds where rows are in so many parts, and in one; the host does not wait.

    Args:
        received: ``[sources, experts]`` int64, the rows that have come from each.
        num_rows: Their sum.
        degree: The number of parts.
    """
    device = received.device
    bounds = received * torch.arange(degree + 1, device=device)[:, None, None] // degree
    sizes = bounds.diff(dim=0)  # [part, source, expert]
    by_expert = sizes.transpose(1, 2)
    ends = by_expert.sum(2).cumsum(1)
    first = ends[:, -1].cumsum(0) - ends[:, -1]  # where each part begins

    def starts(lengths: torch.Tensor) -> torch.Tensor:
        """Returns where runs begin in their part."""
        return _starts(lengths) - first[:, None, None]

    found = Indices(
        by_expert=_runs(starts(sizes).transpose(1, 2), by_expert, num_rows),
        by_rank=_runs(starts(by_expert).transpose(1, 2), sizes, num_rows),
        rows=None,
        ends=ends.int(),
    )
    if degree == 1:
        return found
    rows = _runs(_starts(received.t()) + bounds[:-1].transpose(1, 2), by_expert, num_rows)
    return replace(found, rows=rows, whole=index_rows(received, num_rows, 1))


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Returns where successive runs begin."""
    flat = lengths.reshape(-1)
    return (flat.cumsum(0) - flat).view(lengths.shape)


def _runs(begins: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Returns ``[total]``: runs of successive numbers from ``begins``, one after the other."""
    shifts = (begins - _starts(lengths)).reshape(-1)
    moved = shifts.repeat_interleave(lengths.reshape(-1), output_size=total)
    return moved + torch.arange(total, device=lengths.device)


def put_rows(target: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies rows to where they belong.

    Args:
        target: ``[all rows, width]``.
        index: ``[num_rows]`` int64, each row's place in it, no two the same.
        rows: ``[num_rows, width]`` in the target's dtype.
    """
    target.index_copy_(0, index, rows)


def sum_routes(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Each token's rows, summed in the dtype of sums by ascending expert.

    Args:
        rows: ``[num_routes, hidden]``.
        place: From :class:`Sorted`.

    Returns:
        ``[tokens, hidden]`` in the rows' dtype.
    """
    if len(rows) < place.numel():
        place = place.clamp(max=len(rows))
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    picked = rows[place.reshape(-1)].view(*place.shape, rows.shape[1])
    return picked.sum(1, dtype=accumulation_dtype(rows.dtype)).to(rows.dtype)


def weighted_activation(
    config: MoEConfig, preact: torch.Tensor, row_probs: torch.Tensor
) -> torch.Tensor:
    """The activation times the routing weights, ``[rows, intermediate]`` in the rows' dtype."""
    wide = accumulation_dtype(preact.dtype)
    return (activate(preact.to(wide), config) * row_probs.to(wide)[:, None]).to(preact.dtype)


def weighted_activation_backward(
    config: MoEConfig,
    preact: torch.Tensor,
    row_probs: torch.Tensor,
    grad_weighted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiates :func:`weighted_activation`, and gives its result again.

    Returns:
        The gradient of ``preact``; that of ``row_probs``, ``[rows]`` in the dtype of sums; and
        :func:`weighted_activation`'s result.
    """
    wide = accumulation_dtype(preact.dtype)
    weight, grad = row_probs.to(wide)[:, None], grad_weighted.to(wide)
    activated, grad_preact = activate_backward(preact.to(wide), grad * weight, config)
    weighted = (activated * weight).to(preact.dtype)
    return grad_preact.to(preact.dtype), (grad * activated).sum(1), weighted


def is_grouped(rows: torch.Tensor) -> bool:
    """Says that products are made expert by expert."""
    return False


def matrices(weights: ExpertWeights) -> tuple[Matrices, Matrices]:
    """Orients each expert's weights as ``[hidden, fc1_rows]`` and ``[intermediate, hidden]``."""
    weights = weights.per_expert()
    fc1, fc2 = weights.fc1, weights.fc2
    if weights.split:  # all gates and after them all ups
        fc1 = tuple(map(torch.cat, zip(fc1[: len(fc2)], fc1[len(fc2) :], strict=True)))
    return (fc1, fc2) if weights.transposed else ([w.t() for w in fc1], [w.t() for w in fc2])


def product(
    rows: torch.Tensor, of_experts: Matrices, ends: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Multiplies each row by its expert's matrix, in the rows' dtype.

    Args:
        rows: ``[num_rows, width]``, by expert.
        of_experts: ``[width, out]`` of each expert.
        ends: What grouped products need.
        counts: Rows of each expert.
    """
    return one_by_one(rows, of_experts, counts, _ALIKE)


def grad_product(
    rows: torch.Tensor, of_experts: Matrices, ends: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Computes :func:`product` in the dtype of sums, without rounding it."""
    return one_by_one(rows, of_experts, counts, _ALIKE, accumulation_dtype(rows.dtype))


def weight_grad(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Computes ``left.T @ right`` of each expert's rows in the dtype of sums."""
    return grads_one_by_one(left, right, counts, _ALIKE)


def add_weight_grad(
    targets: Sequence[WeightGrad],
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor,
    counts: Sequence[int],
) -> None:
    """Adds or writes :func:`weight_grad` to where it goes."""
    store(targets, weight_grad(left, right, ends, counts))
