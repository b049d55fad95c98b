"""Tokens' choices as hosts exchange them: pairs of an expert and its weight."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flashmoe_megatron.checks import choices_problem, map_problem
from flashmoe_megatron.config import MoEConfig

_NONE = -1


@dataclass(frozen=True)
class Choices:
    """The routing of one call, whichever form it was given in.

    Attributes:
        experts: ``[num_tokens, topk]`` int32, -1 where there is no choice.
        weights: ``[num_tokens, topk]`` float32 (float64 if the probabilities are), 0 there.
        is_bad: ``[num_tokens]`` bool, whose routing cannot be used.
        num_columns: Columns of the probabilities that were given.
        is_map: Whether these were by expert and not by choice.
        dtype: Theirs.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    is_bad: torch.Tensor
    num_columns: int
    is_map: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, config: MoEConfig, probs: torch.Tensor, routing_map: torch.Tensor) -> "Choices":
        """Reads either form that a backend's forward takes; waits for no device."""
        wide = torch.float64 if probs.dtype == torch.float64 else torch.float32
        is_map = routing_map.dtype == torch.bool
        weights = probs.to(wide)
        if is_map:
            selected = routing_map & (probs != 0) if config.skip_zero_probs else routing_map
            is_bad = (selected.sum(1) > config.topk) | (probs.isnan() & selected).any(1)
            experts, weights = _choices_of_map(selected, weights, config.topk)
        else:
            experts = routing_map.to(torch.int64)
            is_bad = ((experts < _NONE) | (experts >= config.num_experts)).any(1)
            ascending = experts.sort(1).values
            is_bad |= ((ascending.diff(dim=1) == 0) & (ascending[:, 1:] >= 0)).any(1)
            is_bad |= (weights.isnan() & (experts >= 0)).any(1)
            experts = experts.clamp(_NONE, config.num_experts).int()
            if config.skip_zero_probs:
                experts = experts.masked_fill(weights == 0, _NONE)
            missing = config.topk - experts.shape[1]
            experts = F.pad(experts, (0, missing), value=_NONE)
            weights = F.pad(weights, (0, missing)).masked_fill(experts < 0, 0)
        return cls(experts, weights, is_bad, probs.shape[1], is_map, probs.dtype)

    def apart(self) -> tuple["Choices", torch.Tensor]:
        """The same with a token for each choice, and the order of each token's choices.

        They are in the order of experts, so that no sum over them depends on how they were given.
        """
        order = self.experts.argsort(dim=1, stable=True)
        experts, weights = (
            each.gather(1, order).view(-1, 1) for each in (self.experts, self.weights)
        )
        is_bad = self.is_bad.repeat_interleave(order.shape[1])
        return Choices(experts, weights, is_bad, 1, False, self.dtype), order

    def counts(self, config: MoEConfig) -> torch.Tensor:
        """``[num_experts]`` int64, how many choices are of each expert."""
        places = self.experts.flatten().long() + 1  # before the first what is no choice
        found = places.new_zeros(config.num_experts + 2)  # after the last what is no expert
        return found.scatter_add_(0, places, torch.ones_like(places))[1:-1]

    def gradient(self, of_choices: torch.Tensor) -> torch.Tensor:
        """The gradient of the probabilities, in their form and dtype, from that of choices.

        The latter is ``[num_tokens, topk]``, 0 where there is no choice.
        """
        if not self.is_map:
            return of_choices[:, : self.num_columns].to(self.dtype).contiguous()
        columns = self.experts.long() + 1  # the first one takes what is no choice
        wide = of_choices.new_zeros(len(columns), self.num_columns + 1)
        return wide.scatter_(1, columns, of_choices)[:, 1:].to(self.dtype).contiguous()


def routing_problem(
    config: MoEConfig, probs: torch.Tensor, routing_map: torch.Tensor
) -> str | None:
    """Says what makes a routing of either form unusable, if anything; the host waits for it."""
    if routing_map.dtype != torch.bool:
        return choices_problem(config, routing_map, probs)
    selected = routing_map & (probs != 0) if config.skip_zero_probs else routing_map
    return map_problem(config, probs, selected)


def _choices_of_map(
    selected: torch.Tensor, weights: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts in ascending order and their weights, ``[num_tokens, topk]`` each."""
    num_tokens, num_experts = selected.shape
    place = torch.where(selected, selected.cumsum(1) - 1, topk).clamp(max=topk)
    ids = torch.arange(num_experts, device=selected.device).expand(num_tokens, -1)
    # One column more takes what is not selected.
    experts = ids.new_full((num_tokens, topk + 1), _NONE).scatter_(1, place, ids)[:, :topk]
    chosen = weights.gather(1, experts.clamp(min=0)).masked_fill(experts < 0, 0)
    return experts.int(), chosen


@dataclass(frozen=True)
class LocalRoutes:
    """Routes to the experts of a host each, for rows of tokens.

    Attributes:
        experts: ``[..., width]`` int32, the number of the expert on its host; -1 for none.
        weights: ``[..., width]``.
        order: ``[..., width]`` int64, whose choice each is among the token's; ``None`` if they are
            the token's own choices in order.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor | None

    @classmethod
    def of(
        cls,
        experts: torch.Tensor,
        weights: torch.Tensor,
        host: torch.Tensor | int,
        experts_per_host: int,
    ) -> "LocalRoutes":
        """Keeps the choices that lie on a host.

        Args:
            experts: ``[..., topk]`` int32, -1 for none.
            weights: ``[..., topk]``.
            host: The host, or integers that broadcast to ``experts``.
            experts_per_host: Experts of each host; a token chooses no more of one.
        """
        local = (experts - host * experts_per_host).int()  # below 0 where there is no choice
        is_away = (local < 0) | (local >= experts_per_host)
        local = local.masked_fill(is_away, _NONE)
        here = weights.masked_fill(is_away, 0)
        if local.shape[-1] <= experts_per_host:
            return cls(local, here, None)
        order = is_away.byte().sort(dim=-1, stable=True).indices
        order = order[..., :experts_per_host]
        return cls(local.gather(-1, order), here.gather(-1, order), order)

    def part(self, span: slice) -> "LocalRoutes":
        """Takes some of the rows."""
        order = None if self.order is None else self.order[span]
        return LocalRoutes(self.experts[span], self.weights[span], order)

    def packed(self) -> torch.Tensor:
        """``[..., width, 2]`` of the weights' size: experts, and the weights' bits."""
        bits = torch.int64 if self.weights.dtype == torch.float64 else torch.int32
        return torch.stack([self.experts.to(bits), self.weights.view(bits)], dim=-1)

    @staticmethod
    def unpacked(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights, as a backend takes them."""
        experts, bits = packed.unbind(-1)
        return experts.contiguous(), bits.contiguous().view(dtype)

    def of_choices(self, grads: torch.Tensor, topk: int) -> torch.Tensor:
        """Gradients of the routes, ``[..., width]``, as those of choices, ``[..., topk]``."""
        grads = torch.where(self.experts >= 0, grads, 0)
        if self.order is None:
            return grads
        return grads.new_zeros(*grads.shape[:-1], topk).scatter_(-1, self.order, grads)
