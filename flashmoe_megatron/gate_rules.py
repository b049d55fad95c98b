"""The rules by which gates choose experts from logits, each the formula of a paper.

Modules of plain PyTorch and the routers of frameworks compute with them, so that a rule is written
once. Logits are float32 or float64, and so is what comes back.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

LEAST_TEMPERATURE = 0.01
"""The bound of X-MoE's learned temperature."""


@dataclass(frozen=True)
class Choice:
    """The decision of a gate for one call, from its logits.

    Attributes:
        topk_idx: ``[tokens, choices]`` int64, the experts of each token; -1 selects none.
        topk_weight: ``[tokens, choices]``, their weights, 0 where none; differentiable.
        scores: ``[tokens, experts]``, each token's shares of the experts, whose sum is 1;
            differentiable. An auxiliary loss balances their means.
        counted: ``[tokens, counted choices]``, the experts that an auxiliary loss counts.
        asked: ``topk_idx`` before routes were dropped that found their expert full.
    """

    topk_idx: torch.Tensor
    topk_weight: torch.Tensor
    scores: torch.Tensor
    counted: torch.Tensor
    asked: torch.Tensor

    @property
    def dropped(self) -> torch.Tensor:
        """Counts the routes that were asked for and dropped."""
        return (self.asked >= 0).sum() - (self.topk_idx >= 0).sum()


def gshard_capacity(num_tokens: int, num_experts: int, factor: float | None) -> int | None:
    """Rows that an expert takes of a call, ``None`` for any number."""
    return None if factor is None else math.ceil(2 * num_tokens * factor / num_experts)


def choose_gshard(
    logits: torch.Tensor, *, capacity: int | None, drawn: torch.Tensor | None
) -> Choice:
    """Chooses as algorithm 1 of GShard does; the auxiliary loss counts first choices.

    Weights are the two largest softmax scores, divided by their sum. In the order of tokens first
    choices and then second choices take places; what finds its expert full is dropped.

    Args:
        logits: ``[tokens, experts]``.
        capacity: Rows of an expert.
        drawn: ``[tokens]`` random numbers from 0 to 1; a second choice of weight ``w`` is tried
            where ``2 w`` is larger. ``None`` tries all.
    """
    scores = logits.softmax(1)
    first = scores.argmax(1)
    others = scores.detach().scatter(1, first[:, None], -math.inf)
    topk_idx = torch.stack((first, others.argmax(1)), 1)
    weights = scores.gather(1, topk_idx)
    weights = weights / weights.sum(1, keepdim=True)
    tried = torch.ones_like(topk_idx, dtype=torch.bool)
    if drawn is not None:
        tried[:, 1] = 2 * weights[:, 1].detach() > drawn
    kept = tried
    if capacity is not None:
        kept = tried & (_places(topk_idx, tried, logits.shape[1]) < capacity)
    return Choice(
        topk_idx.masked_fill(~kept, -1),
        weights * kept,
        scores,
        first[:, None],
        topk_idx.masked_fill(~tried, -1),
    )


def choose_sigmoid(logits: torch.Tensor, topk: int) -> Choice:
    """Chooses the largest logits, whose sigmoids are the weights, as BASE does in evaluation."""
    topk_idx = logits.detach().topk(topk, dim=1).indices
    sigmoids = logits.sigmoid()
    shares = sigmoids / sigmoids.sum(1, keepdim=True)
    return Choice(topk_idx, sigmoids.gather(1, topk_idx), shares, topk_idx, topk_idx)


def choose_xmoe(logits: torch.Tensor, topk: int, *, is_softmax: bool = True) -> Choice:
    """Chooses the largest logits; weights are their softmax over all experts, or their sigmoids."""
    topk_idx = logits.detach().topk(topk, dim=1).indices
    softmax = logits.softmax(1)
    weights = (softmax if is_softmax else logits.sigmoid()).gather(1, topk_idx)
    return Choice(topk_idx, weights, softmax, topk_idx, topk_idx)


def xmoe_width(num_experts: int) -> int:
    """Dimensions of X-MoE's space in the paper: half the number of experts."""
    return max(num_experts // 2, 1)


def xmoe_logits(
    tokens: torch.Tensor,
    projection: torch.Tensor,
    embeddings: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """Cosines of projected tokens and experts' embeddings, divided by the temperature.

    Args:
        tokens: ``[..., hidden]``, float32 or float64; parameters are cast to their dtype.
        projection: ``[width, hidden]``.
        embeddings: ``[experts, width]``.
        temperature: One number.

    Returns:
        ``[..., experts]``.
    """
    projected = normalize(tokens @ projection.to(tokens).t(), dim=-1)
    cosines = projected @ normalize(embeddings.to(tokens), dim=1).t()
    return cosines / temperature.to(tokens).clamp(min=LEAST_TEMPERATURE)


def routes_to(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Counts how often each expert is chosen; -1 stands for no choice.

    The host waits for nothing, as it would in ``torch.bincount``, so that a CUDA graph can have it.
    """
    places = experts.flatten()
    places = places.masked_fill(places < 0, num_experts)
    counts = places.new_zeros(num_experts + 1)
    return counts.index_add(0, places, torch.ones_like(places))[:num_experts]


def balance_loss(choice: Choice) -> torch.Tensor:
    """``E * sum(mean score * share of counted choices)``, 1 where all is even."""
    num_tokens, num_experts = choice.scores.shape
    counts = routes_to(choice.counted, num_experts)
    share = (counts.double() / max(choice.counted.numel(), 1)).to(choice.scores)
    return num_experts * (choice.scores.sum(0) / max(num_tokens, 1) * share).sum()


def _places(topk_idx: torch.Tensor, tried: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``[tokens, 2]``, how many took a place at the same expert before."""
    in_order = topk_idx.t().reshape(-1, 1)  # all first choices, then all second ones
    taken = in_order.new_zeros(len(in_order), num_experts)
    taken.scatter_(1, in_order, tried.t().reshape(-1, 1).long())
    places = (taken.cumsum(0) - taken).gather(1, in_order)
    return places.view(2, -1).t()
