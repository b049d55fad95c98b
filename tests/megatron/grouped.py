"""Megatron's grouped experts on processors, whose products are CUDA extensions, in plain torch."""

from typing import Any

import torch
import torch.nn.functional as F


class TorchGroupedLinear(torch.nn.Module):
    """Grouped linear layers as Transformer Engine holds them: ``weight0``, ``weight1``, ..."""

    # Stands for Transformer Engine's own and computes the same: other classes are refused.
    __module__ = "transformer_engine.pytorch.module.grouped_linear"

    def __init__(self, num_gemms: int, num_in: int, num_out: int, **options: Any) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(num_out, num_in))
            options["init_method"](weight)
            self.register_parameter(f"weight{index}", weight)
            bias = torch.nn.Parameter(torch.zeros(num_out)) if options["bias"] else torch.Tensor()
            setattr(self, f"bias{index}", bias)
        self.returns_bias = options["bias"] and options["skip_bias_add"]
        self.adds_bias = options["bias"] and not options["skip_bias_add"]

    def forward(self, x: torch.Tensor, tokens_per_expert: Any, **_: Any) -> tuple[Any, Any]:
        chunks = x.split(list(tokens_per_expert))
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        rows = [c @ w.t() for c, w in zip(chunks, weights, strict=True)]
        if self.adds_bias:
            rows = [row + bias for row, bias in zip(rows, biases, strict=True)]
        return torch.cat(rows), biases if self.returns_bias else None


class GELU(torch.nn.Module):
    """Transformer Engine's operation in plain torch."""

    __module__ = "transformer_engine.pytorch.ops.basic.activation"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


class GEGLU(GELU):
    __module__ = GELU.__module__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return super().forward(gate) * up


class TEActivation:
    """Chooses the operation, as Megatron's TEActivationOp."""

    def __new__(cls, config: Any) -> Any:
        return GEGLU() if config.gated_linear_unit else GELU()


def grouped_experts(kind: str) -> Any:
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.spec_utils import ModuleSpec

    if kind == "te_grouped":
        parts = MLPSubmodules(
            linear_fc1=TorchGroupedLinear,
            linear_fc2=TorchGroupedLinear,
            activation_func=TEActivation,  # where the configuration asks for it
        )
        return ModuleSpec(module=experts.TEGroupedMLP, submodules=parts)
    # GroupedMLP computes with a CUDA extension; its product of groups in plain torch.
    experts.gg.assert_grouped_gemm_is_available = lambda: None
    experts.gg.ops = TorchGroupedGemm
    return ModuleSpec(module=experts.GroupedMLP)


class TorchGroupedGemm:
    """``gmm`` of the grouped_gemm package."""

    @staticmethod
    def gmm(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_b: bool) -> torch.Tensor:
        chunks = a.split([int(size) for size in sizes])
        return torch.cat(
            [c @ (w.t() if trans_b else w) for c, w in zip(chunks, b.unbind(), strict=True)]
        )
