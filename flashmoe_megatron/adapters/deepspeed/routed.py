"""The routed experts of one MoE layer of DeepSpeed: one call."""

import torch

from flashmoe_megatron.adapters.deepspeed.settings import SECTION
from flashmoe_megatron.adapters.experts import GroupBackends, LayerExperts
from flashmoe_megatron.backend import Backend, ExpertWeights
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.layer import moe_forward
from flashmoe_megatron.weights import SplitWeights


class RoutedExperts(LayerExperts):
    """Applies a layer's routed experts to tokens that DeepSpeed has routed.

    Making one is collective over the group, and so is every call. Whoever reads the counts and the
    records tells ``is_training``.

    Args:
        shape: The layer's; its ``max_tokens`` does not count.
        backends: The backends of the layer's group.
        dtype: The dtype of the experts' parameters.
        layer: The layer's number in the model, for the records.
        capacity_factor: The gate's capacity factor; 1 where nothing is dropped.
    """

    WAYS_OUT_OF_DTYPE = (
        "enable bf16 or fp16 in the DeepSpeed configuration, or set "
        f'{SECTION}.backend to "reference"'
    )

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
        self._at = shape, backends
        self.open()  # what cannot run is to fail now, not in the first step

    def __call__(
        self,
        x: torch.Tensor,
        expert_idx: torch.Tensor,
        gates: torch.Tensor,
        weights: ExpertWeights | SplitWeights,
    ) -> torch.Tensor:
        """Applies the experts. Collective over the group.

        Args:
            x: ``[num_tokens, hidden]``.
            expert_idx: ``[num_tokens, k]`` int32 or int64, -1 for a route that was dropped.
            gates: ``[num_tokens, k]``, the routes' weights.
            weights: The local experts.

        Returns:
            ``[num_tokens, hidden]`` in ``x.dtype``.

        Raises:
            ConfigError: ``torch.autocast`` is enabled and gives tokens of another dtype.
            RoutingError: A gate is NaN, unless tokens are float16: see :meth:`LayerExperts.run`.
            ShapeError: There are more tokens than the user said.
        """
        dtype = (weights.down if isinstance(weights, SplitWeights) else weights.fc2)[0].dtype
        if x.dtype != dtype and torch.is_autocast_enabled(x.device.type):
            raise ConfigError(
                f"torch.autocast gives the layer tokens in {x.dtype} and its experts are {dtype}, "
                "wanted one dtype: leave torch.autocast out, or cast the tokens before the layer"
            )

        def compute(
            backend: Backend, rows: torch.Tensor, finite_gates: torch.Tensor, number: int
        ) -> torch.Tensor:
            return moe_forward(
                rows,
                expert_idx,
                finite_gates,
                weights,
                backend=backend,
                check_routing=False,
                ordered_grads=True,
                layer=number,
            )

        return self.run(x, gates, compute)

    def locate(self) -> tuple[MoEConfig, GroupBackends]:
        """See :meth:`LayerExperts.locate`."""
        return self._at

    def allow_more(self, num_tokens: int) -> str:
        """See :meth:`LayerExperts.allow_more`."""
        return f"set {SECTION}.max_tokens to {num_tokens} or more, or leave it out"
