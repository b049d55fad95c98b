"""The two families of DeepSpeed's MoE layers as the adapter sees them: what both have."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed.forwards import Watched
from flashmoe_megatron.adapters.deepspeed.routed import RoutedExperts
from flashmoe_megatron.adapters.deepspeed.routes import RouteCounter
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError


@dataclass(frozen=True)
class LayerInfo:
    """A layer that has the right structure; the ``max_tokens`` of its shape does not count.

    Attributes:
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


def check_groups(layer: Any, tensor_parallel: int) -> None:
    """Refuses a layer that is in no expert-parallel group, or in a tensor-parallel one.

    Raises:
        ConfigError: It is.
    """
    if layer.ep_group is None:
        raise ConfigError(
            "it has no expert-parallel group: it was added after deepspeed.initialize, which has "
            "to see the whole model"
        )
    if tensor_parallel > 1:
        raise ConfigError(f"it is in a tensor-parallel group of size {tensor_parallel}, wanted 1")


def fuse(layer: Any, fused: type, info: LayerInfo, served: Served) -> None:
    """Gives a layer our class; its modules and parameters stay.

    It gets three attributes: ``flashmoe`` applies its experts, ``watched`` remembers what these
    were, and ``form`` says what they compute.
    """
    layer.__class__ = fused
    layer.flashmoe, layer.watched, layer.form = served, info.watched, info.form
