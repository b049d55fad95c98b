"""Compares a model with our layers and one with Megatron's, on processes without GPUs."""

from collections.abc import Iterator
from typing import Any

import torch

SEQUENCE, VOCABULARY, LAYERS = 32, 128, 2
TOLERANCE = 1e-5
"""Largest relative difference of losses and of the norm of all gradients, in float32."""

LOCAL = {
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "multi_latent_attention": False,  # Megatron's local attention has none
    "use_cpu_initialization": True,
    "cuda_graph_impl": "none",
    "gradient_accumulation_fusion": False,
    "params_dtype": torch.float32,
    "attention_backend": None,
    "fp8": None,
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "masked_softmax_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "persist_layer_norm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
"""What Transformer Engine, Apex or a GPU would do; the numbers are those of Megatron without."""


def numbers(model: Any) -> tuple[float, float]:
    """Computes the loss of a batch, and the norm of all gradients."""
    tokens = torch.arange(2 * SEQUENCE).view(2, -1) % VOCABULARY
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    loss = model(tokens, torch.arange(SEQUENCE).expand(2, -1), mask, labels=tokens).mean()
    loss.backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return float(loss.detach()), float(torch.stack([each.norm() for each in grads]).norm())


def layers(model: Any) -> Iterator[Any]:
    """Yields the MoE layers of a model."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return (module for module in model.modules() if isinstance(module, MoELayer))


def compare(fused: Any, stock: Any) -> tuple[float, float]:
    """Compares the layers, the parameters and the numbers of two models; returns their losses.

    Raises:
        AssertionError: A layer is not ours, or a name, a shape or a number is another.
    """
    models = (fused, stock)
    ours, theirs = ([*layers(model)] for model in models)
    assert len(ours) == len(theirs) == LAYERS, ours
    assert all(hasattr(layer, "flashmoe_routed_experts") for layer in ours)
    assert not any(hasattr(layer, "flashmoe_routed_experts") for layer in theirs)
    shapes = [
        {name: tuple(each.shape) for name, each in model.named_parameters()} for model in models
    ]
    assert shapes[0] == shapes[1]
    pairs = [*zip(*map(numbers, models), strict=True)]
    for got, want in pairs:
        assert abs(got - want) <= TOLERANCE * abs(want), pairs
    return pairs[0]
