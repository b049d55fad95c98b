"""Layers, weights and routings that the tests share; one seed gives one of each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_megatron.config import Activation, MoEConfig

CONFIG = MoEConfig(
    hidden=64,
    intermediate=64,
    num_experts=8,
    topk=2,
    activation=Activation.SILU,
    gated=True,
    num_ranks=1,
    max_tokens=512,
)


GPT_OSS = {
    "activation": Activation.QUICK_GELU,
    "clamp_value": 0.7,
    "linear_offset": 1.0,
    "glu_interleave": 1,
}
"""GPT-OSS's expert, with a clamp that acts on values around 1; the model's is at 7."""


def make_config(**changes: Any) -> MoEConfig:
    return replace(CONFIG, **changes)


def form_of(config: MoEConfig) -> dict[str, Any]:
    """What an expert computes, as the oracle takes it."""
    names = ("activation", "gated", "clamp_value", "linear_offset", "glu_interleave")
    return {name: getattr(config, name) for name in names}


@dataclass
class Inputs:
    """All ranks' tokens and routing, and all experts' weights."""

    x: list[torch.Tensor]
    probs: list[torch.Tensor]
    routing_map: list[torch.Tensor]
    grad_out: list[torch.Tensor]
    fc1: list[torch.Tensor]
    fc2: list[torch.Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# A routing makes one rank's scores, [num_tokens, num_experts]; the topk largest finite ones are
# selected.
Routing = Callable[[MoEConfig, int, int, torch.Generator], torch.Tensor]


def uniform(config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator) -> torch.Tensor:
    return torch.rand(num_tokens, config.num_experts, generator=g)


def skewed(config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator) -> torch.Tensor:
    """A few experts get most tokens, as in an untrained router."""
    favour = torch.arange(config.num_experts).mul(-0.5)
    return torch.randn(num_tokens, config.num_experts, generator=g) + favour


def to_one_expert(
    config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator
) -> torch.Tensor:
    scores = torch.full((num_tokens, config.num_experts), -torch.inf)
    scores[:, config.num_experts - 1] = 0
    return scores


def to_one_rank(config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator) -> torch.Tensor:
    """All tokens select experts of the last rank; the others receive nothing."""
    scores = uniform(config, rank, num_tokens, g)
    scores[:, : config.num_experts - config.num_local_experts] = -torch.inf
    return scores


def with_empty_experts(
    config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator
) -> torch.Tensor:
    scores = uniform(config, rank, num_tokens, g)
    scores[:, ::2] = -torch.inf
    return scores


def to_nobody(config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator) -> torch.Tensor:
    return torch.full((num_tokens, config.num_experts), -torch.inf)


def with_dropped_tokens(
    config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator
) -> torch.Tensor:
    """Some tokens keep fewer than topk experts, some none, as after dropping at a capacity."""
    scores = uniform(config, rank, num_tokens, g)
    scores[torch.rand(scores.shape, generator=g) < 0.6] = -torch.inf
    scores[::5] = -torch.inf
    return scores


def make_inputs(
    config: MoEConfig,
    routing: Routing,
    tokens_per_rank: list[int],
    *,
    dtype: torch.dtype,
    seed: int = 0,
) -> Inputs:
    g = generator(seed)
    inputs = Inputs([], [], [], [], [], [])
    for rank, num_tokens in enumerate(tokens_per_rank):
        scores = routing(config, rank, num_tokens, g)
        top = scores.topk(config.topk, dim=1)
        selected = torch.zeros(scores.shape, dtype=torch.bool)
        selected.scatter_(1, top.indices, top.values > -torch.inf)
        probs_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        probs = torch.rand(scores.shape, generator=g, dtype=probs_dtype) * selected
        inputs.x.append(torch.randn(num_tokens, config.hidden, generator=g).to(dtype))
        inputs.grad_out.append(torch.randn(num_tokens, config.hidden, generator=g).to(dtype))
        inputs.probs.append(probs)
        inputs.routing_map.append(selected)
    for _ in range(config.num_experts):
        fc1 = torch.randn(config.fc1_rows, config.hidden, generator=g) / config.hidden**0.5
        fc2 = torch.randn(config.hidden, config.intermediate, generator=g)
        inputs.fc1.append(fc1.to(dtype))
        inputs.fc2.append((fc2 / config.intermediate**0.5).to(dtype))
    return inputs


def as_choices(
    config: MoEConfig,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same routing by indices: a token's experts in any order, with gaps of -1 and NaN."""
    g = generator(11)
    order = torch.rand(routing_map.shape, generator=g).to(probs.device)
    topk_idx = (order + routing_map).topk(config.topk, dim=1).indices
    shuffle = torch.rand(topk_idx.shape, generator=g).argsort(1).to(probs.device)
    topk_idx = topk_idx.gather(1, shuffle)
    is_route = routing_map.gather(1, topk_idx)
    topk_weight = probs.gather(1, topk_idx).masked_fill(~is_route, float("nan"))
    return topk_idx.masked_fill(~is_route, -1).to(dtype), topk_weight


def spread(config: MoEConfig, topk_idx: torch.Tensor, of_choices: torch.Tensor) -> torch.Tensor:
    """What choices have, by expert: ``[num_tokens, num_experts]``, 0 where there is no choice."""
    columns = topk_idx.long() + 1  # the first one takes what is no choice
    wide = of_choices.new_zeros(len(topk_idx), config.num_experts + 1)
    return wide.scatter(1, columns, of_choices)[:, 1:]
