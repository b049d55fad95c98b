"""Routed experts in place of the forward of Automodel's ``GroupedExperts``."""

import functools
import weakref

import torch
from torch import nn

from flashmoe_megatron.adapters.automodel.form import (
    IGNORED,
    holding_of,
    mesh_of,
    read_shape,
    read_weights,
)
from flashmoe_megatron.adapters.experts import GroupBackends
from flashmoe_megatron.adapters.indexed import (
    IndexedExperts,
    KnownExperts,
    Reading,
    outside_autocast,
)
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.eager import eager

_WAY_OUT = "make such a change before the first step"


class RoutedExperts(IndexedExperts):
    """Applies the routed experts of one layer of Automodel's."""

    WAYS_OUT_OF_DTYPE = (
        "load the model with torch_dtype: bfloat16, or give FSDP's mp_policy "
        "param_dtype=torch.bfloat16"
    )

    def allow_more(self, num_tokens: int) -> str:
        """Names the option that bounds tokens."""
        return f"give backend.flashmoe max_tokens: {num_tokens}, or leave it out"


_known: "weakref.WeakKeyDictionary[nn.Module, KnownExperts[RoutedExperts]]" = (
    weakref.WeakKeyDictionary()
)


@eager
def run_experts(
    experts: nn.Module,
    options: ModuleOptions,
    x: torch.Tensor,
    token_mask: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Applies the experts of all ranks. Collective over the expert-parallel mesh.

    Args:
        experts: An instance of Automodel's ``GroupedExperts``.
        options: The model's.
        x: ``[num_tokens, hidden]``, this rank's, as the result.
        token_mask: ``[num_tokens]`` bool; a token without a mark goes to no expert.
        weights: ``[num_tokens, k]``, the routing weights.
        indices: ``[num_tokens, k]``, ids of all ranks' experts.

    Raises:
        ConfigError: The experts compute something that no backend does, are sharded within, or have
            a dtype in which the kernel cannot compute. Experts of several ranks have changed.
        ShapeError: There are more tokens than the options allow.
    """
    mesh = mesh_of(experts)
    choices = indices.masked_fill(~token_mask.unsqueeze(-1), -1)
    known = _known.setdefault(experts, KnownExperts(IGNORED, _WAY_OUT))
    with outside_autocast(x.device) as narrowed:
        dtype = narrowed or x.dtype

        def make(shape: MoEConfig, backends: GroupBackends) -> RoutedExperts:
            return RoutedExperts(shape, backends, dtype, layer=len(_known) - 1)

        num_ranks = 1 if mesh is None else mesh.size()
        return known.apply(
            Reading(
                look=functools.partial(holding_of, experts),
                shape=functools.partial(read_shape, experts, indices.shape[-1], num_ranks),
                weights=lambda _: read_weights(experts, dtype),
                make=make,
            ),
            (x, choices, weights),
            dtype=dtype,
            group=None if mesh is None else mesh.get_group(),
            options=options,
            is_training=experts.training,
        )
