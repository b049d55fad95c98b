"""Megatron's grouped experts on processors, whose products are CUDA extensions, in plain torch."""

from collections.abc import Callable
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


class DelayedGroupedLinear(TorchGroupedLinear):
    """Computes gradients of weights in ``backward_dw``, as Transformer Engine does when told to.

    Its mark on the weights makes Megatron's DDP wait for that call.
    """

    __module__ = TorchGroupedLinear.__module__

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.pending: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        for weight in self.parameters():
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def forward(self, x: torch.Tensor, tokens_per_expert: Any, **_: Any) -> tuple[Any, Any]:
        sizes = [int(size) for size in tokens_per_expert]
        return _DelayedProducts.apply(self, sizes, x, *self.parameters()), None

    def backward_dw(self) -> None:
        x, grad, sizes = self.pending.pop(0)  # an error where there is none, as there
        for weight, rows, of_rows in zip(
            self.parameters(), x.split(sizes), grad.split(sizes), strict=True
        ):
            weight.grad = of_rows.t() @ rows
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class _DelayedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, linear: DelayedGroupedLinear, sizes: list[int], x: torch.Tensor, *weights: Any
    ) -> torch.Tensor:
        ctx.linear, ctx.sizes = linear, sizes
        ctx.save_for_backward(x, *weights)
        return torch.cat([c @ w.t() for c, w in zip(x.split(sizes), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        # The schedule frees the storage of both once the node's backward is done.
        ctx.linear.pending.append((x.clone(), grad.clone(), ctx.sizes))
        chunks = zip(grad.split(ctx.sizes), weights, strict=True)
        return None, None, torch.cat([c @ w for c, w in chunks]), *[None] * len(weights)


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

    if kind != "legacy_grouped":
        linear = DelayedGroupedLinear if kind == "te_grouped_delayed" else TorchGroupedLinear
        parts = MLPSubmodules(
            linear_fc1=linear,
            linear_fc2=linear,
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
