"""The seat of experts that a framework calls with each token's choices as indices."""

from collections.abc import Callable
from typing import ClassVar, TypeAlias

import torch

from flashmoe_megatron.adapters.experts import GroupBackends, LayerExperts
from flashmoe_megatron.backend import Backend, ExpertWeights, Together
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.layer import moe_forward
from flashmoe_megatron.weights import SplitWeights

ReadWeights: TypeAlias = Callable[[], ExpertWeights | SplitWeights]
"""Checks a layer's experts, and gives the local ones as they are now. Not collective over the
expert-parallel group."""


class IndexedExperts(LayerExperts):
    """Applies a layer's routed experts to tokens that the framework has routed.

    Making one is collective over the group, and so is every call. The layer tells ``is_training``
    before each.

    Args:
        shape: The layer's; its ``max_tokens`` does not count.
        backends: The backends of the layer's group.
        dtype: The dtype that the experts compute in.
        layer: The layer's number in the model, for the records.
        capacity_factor: The router's capacity factor; 1 where nothing is dropped.
    """

    ORDERED_GRADS: ClassVar[bool] = False
    """See :func:`~flashmoe_megatron.autograd.moe_apply`."""

    def __init__(
        self,
        shape: MoEConfig,
        backends: GroupBackends,
        dtype: torch.dtype,
        *,
        layer: int = 0,
        capacity_factor: float = 1.0,
    ) -> None:
        super().__init__(backends.group, dtype, layer=layer, capacity_factor=capacity_factor)
        self._shape, self._backends = shape, backends
        self.open()  # what cannot run is to fail now, not in the first step

    def __call__(
        self,
        x: torch.Tensor,
        expert_idx: torch.Tensor,
        expert_weight: torch.Tensor,
        read_weights: ReadWeights,
    ) -> torch.Tensor:
        """Applies the experts. Collective over the group.

        Args:
            x: ``[num_tokens, hidden]``.
            expert_idx: ``[num_tokens, k]`` int32 or int64, -1 for a choice that does not count.
            expert_weight: ``[num_tokens, k]``, the routing weights.
            read_weights: Asked once; what it raises is raised on every rank.

        Returns:
            ``[num_tokens, hidden]`` in ``x.dtype``.

        Raises:
            RoutingError: A weight is NaN, unless tokens are float16: see :meth:`LayerExperts.run`.
            ShapeError: A tensor is not what the layer was built for, or there are more tokens than
                the user said.
        """

        def compute(
            backend: Backend, rows: torch.Tensor, finite_weight: torch.Tensor, number: int
        ) -> torch.Tensor:
            with Together(backend):  # made by now for as many tokens as all ranks have
                weights = read_weights()
            return moe_forward(
                rows,
                expert_idx,
                finite_weight,
                weights,
                backend=backend,
                check_routing=False,
                ordered_grads=self.ORDERED_GRADS,
                layer=number,
            )

        return self.run(x, expert_weight, compute)

    def locate(self) -> tuple[MoEConfig, GroupBackends]:
        """See :meth:`LayerExperts.locate`."""
        return self._shape, self._backends
