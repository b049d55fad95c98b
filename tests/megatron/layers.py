"""One MoE layer of Megatron's, made in a rank of a pool."""

from typing import Any

import torch

from flashmoe_megatron.bench.megatron_layer import moe_submodules


def make_layer(
    config: Any, experts: Any = None, *, use_te: bool = False, groups: Any = None
) -> Any:
    """A layer with the weights of one seed, and with other experts than Megatron's if wanted.

    ``use_te`` takes Transformer Engine's linear layers and grouped experts; ``groups`` are its
    process groups in place of Megatron's own.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer

    submodules = moe_submodules(config.num_moe_experts, use_te=use_te)
    if experts is not None:
        submodules.experts = experts
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    layer = MoELayer(config, submodules, **({"pg_collection": groups} if groups else {}))
    layer.set_layer_number(1)
    with torch.no_grad():
        for name, parameter in layer.experts.named_parameters():
            if "bias" in name:  # Megatron begins with 0, which would hide them
                parameter.normal_(std=0.5)
    return layer


def megakernel_of(layer: Any, **more: Any) -> Any:
    """FlashMoE behind the megakernel interface, for a layer's experts."""
    from flashmoe_megatron.adapters.megatron.megakernel import FlashMoEMegakernel

    return FlashMoEMegakernel(
        config=layer.config,
        ep_group=layer.ep_group,
        routed_experts=layer.experts,
        shared_experts=layer.shared_experts,
        num_local_experts=layer.num_local_experts,
        **more,
    )
