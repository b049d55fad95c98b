"""Compares a model with our layers and one with Megatron's, on processes without GPUs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.wrapped_groups import FORMS, unwrapping

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


@contextlib.contextmanager
def wrapping(form: str) -> Iterator[Any]:
    """Has Megatron hand out a wrapper of all ranks as its group of experts; gives the wrapper."""
    from megatron.core import parallel_state

    name = "_EXPERT_MODEL_PARALLEL_GROUP"
    before = getattr(parallel_state, name)
    wrapper = FORMS[form]([range(dist.get_world_size())])
    setattr(parallel_state, name, wrapper)
    try:
        with unwrapping():
            yield wrapper
    finally:
        setattr(parallel_state, name, before)


def compare_over_sleeps(build: Callable[[bool], Any]) -> str:
    """Compares models whose group of experts is a wrapper, before and after it sleeps.

    Args:
        build: Builds Megatron's own model if its argument is true, else one with our layers.

    Raises:
        AssertionError: Megatron has wrapped groups by itself, or a number is another.
    """
    from megatron.core import parallel_state

    plain = parallel_state.get_expert_model_parallel_group()
    assert type(plain).__module__.startswith("torch."), type(plain)
    for form in FORMS:
        with wrapping(form) as wrapper:
            models = [build(is_stock) for is_stock in (False, True)]
            assert all(layer.ep_group is wrapper for model in models for layer in layers(model))
            backends: list[Any] = []
            for sleeps in range(3):
                if sleeps:
                    dist.barrier()
                    wrapper.destroy()
                    wrapper.reload()
                for model in models:
                    model.zero_grad()
                compare(*models)
                backends += {each.flashmoe_routed_experts.backend for each in layers(models[0])}
            assert len(backends) == 3, "a group that is made again has a backend of its own"
            wrapper.destroy()
    return f"{', '.join(FORMS)} of process groups, each destroyed and made again twice"
