"""Megatron-Bridge's wrappers of experts' linears in plain torch, by the names of its classes.

Each computes its low-rank part apart from the linear's, as there, which alltoall calls.
"""

from typing import Any

import torch

_PEFT = "megatron.bridge.peft."


class Adapter(torch.nn.Module):
    """Two factors, each of all experts together or of each of them."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor, alpha: float, *parts: Any) -> None:
        super().__init__()
        self.linear_in, self.linear_out = Factor(down), Factor(up)
        self.alpha, self.dim = alpha, down.shape[-2]
        self.dropout, self.activation = parts or (torch.nn.Identity(), torch.nn.Identity())

    def forward(self, x: torch.Tensor, counts: Any) -> torch.Tensor:
        return self.linear_out(self.linear_in(x, counts), counts) * (self.alpha / self.dim)


class Factor(torch.nn.Module):
    __module__ = f"{_PEFT}utils"
    __qualname__ = "PackedPerExpertLinear"

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor, counts: Any) -> torch.Tensor:
        if self.weight.dim() == 2:
            return x @ self.weight.t()
        chunks = x.split([int(count) for count in counts])
        return torch.cat([c @ w.t() for c, w in zip(chunks, self.weight, strict=True)])


class LoRALinear(torch.nn.Module):
    __module__ = f"{_PEFT}lora_layers"

    def __init__(self, to_wrap: torch.nn.Module, adapter: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter
        self._adapter_enabled = True

    def forward(self, x: torch.Tensor, counts: Any = None) -> tuple[torch.Tensor, Any]:
        out, bias = self.to_wrap(x) if counts is None else self.to_wrap(x, counts)
        if self._adapter_enabled:
            out = out + self.adapter(x, counts)
        return out, bias


class DoRALinear(LoRALinear):
    __module__ = f"{_PEFT}dora_layers"


def adapter_class(name: str) -> type[Adapter]:
    """Makes a class of adapters by a name of Bridge's."""
    return type(name, (Adapter,), {"__module__": f"{_PEFT}utils", "__qualname__": name})
