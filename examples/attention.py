"""Causal attention, as the models of plain PyTorch have it."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Every position attends to itself and those before it."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies it to ``[batch, sequence, hidden]``."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))
