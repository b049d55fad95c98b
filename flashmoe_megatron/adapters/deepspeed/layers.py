"""The two families of DeepSpeed's MoE layers as the adapter sees them: what both have."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed.forwards import Watched
from flashmoe_megatron.adapters.deepspeed.routed import RoutedExperts
from flashmoe_megatron.adapters.deepspeed.routes import RouteCounter
from flashmoe_megatron.config import MoEConfig

LATE = (
    "it has no expert-parallel group: it was added after deepspeed.initialize, which has to see "
    "the whole model"
)
"""Why a layer is left alone that DeepSpeed has not prepared."""


@dataclass(frozen=True)
class LayerInfo:
    """A layer that has the right structure.

    Attributes:
        shape: The layer's shape; ``max_tokens`` does not count.
        watched: What the experts are, and all modules in them.
        form: What its experts compute, as its family says it.
        is_split: Its experts' gate and up projections are not one parameter with the gate first.
        biases: Whether its experts' first projection has a bias, and whether their second has one.
    """

    shape: MoEConfig
    group: dist.ProcessGroup
    dtype: torch.dtype
    watched: Watched
    form: Any
    is_split: bool
    biases: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class Served:
    """Applies the experts of a fused layer, and counts its routes."""

    experts: RoutedExperts
    routes: RouteCounter

    def set_training(self, is_training: bool) -> None:
        """Tells both, before a call, whether the layer is in training mode."""
        self.experts.is_training = self.routes.is_training = is_training


def fuse(layer: Any, fused: type, info: LayerInfo, served: Served) -> None:
    """Gives a layer our class; its modules and parameters stay."""
    layer.__class__ = fused
    layer.flashmoe, layer.watched, layer.form = served, info.watched, info.form
