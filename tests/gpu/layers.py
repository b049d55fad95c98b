"""The layers and routings that the tests on GPUs share."""

import torch

from flashmoe_megatron.config import MoEConfig
from tests.unit import cases

TOKENS = {1: [300], 2: [129, 200], 4: [96, 0, 130, 77], 8: [100, 20, 37, 1, 0, 64, 129, 128]}


def make_config(num_ranks: int, **changes: object) -> MoEConfig:
    defaults = {
        "hidden": 256,
        "intermediate": 192,
        "num_experts": 16,
        "topk": 3,
        "max_tokens": 320,
    }
    return cases.make_config(num_ranks=num_ranks, **{**defaults, **changes})


def zipf(config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator) -> torch.Tensor:
    """Expert ``e`` is as popular as ``1 / (e + 1)``."""
    uniform = torch.rand(num_tokens, config.num_experts, generator=g).clamp(1e-6, 1 - 1e-6)
    return -torch.log(-torch.log(uniform)) - torch.arange(1, config.num_experts + 1).log()


ROUTINGS = [
    cases.uniform,
    zipf,
    cases.to_one_expert,
    cases.with_empty_experts,
    cases.with_dropped_tokens,
    cases.to_nobody,
]
"""Kinds of routing with which rows are uneven, few, or none."""
