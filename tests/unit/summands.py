"""What ranks contribute to reductions, and its sum."""

from collections.abc import Sequence

import torch


def contribution(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-100, 100, (length,), generator=generator).div(7).to(dtype)


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.is_floating_point else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)
