"""The two families of DeepSpeed's MoE layers as the adapter sees them: what both have."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed.experts import ExpertForm
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
        group: The layer's expert-parallel group.
        dtype: The dtype of the experts' parameters.
        watched: What the experts are, and all modules in them.
        biases: Whether its experts' first projection has a bias, and whether their second has one.
        form: What each expert module computes; ``None`` where experts are stacked.
    """

    shape: MoEConfig
    group: dist.ProcessGroup
    dtype: torch.dtype
    watched: Watched
    biases: tuple[bool, bool] = (False, False)
    form: ExpertForm | None = None


@dataclass(frozen=True)
class Served:
    """What a fused layer holds besides its own modules.

    Attributes:
        experts: Applies its experts.
        routes: Counts its routes.
    """

    experts: RoutedExperts
    routes: RouteCounter

    def set_training(self, is_training: bool) -> None:
        """Tells both, before a call, whether the layer is in training mode."""
        self.experts.is_training = self.routes.is_training = is_training
