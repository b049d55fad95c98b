"""The routed experts of one MoE layer of DeepSpeed: one call."""

import torch

from flashmoe_megatron.adapters.deepspeed.settings import SECTION
from flashmoe_megatron.adapters.indexed import IndexedExperts
from flashmoe_megatron.eager import eager
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.weights import ExpertWeights, SplitWeights


class RoutedExperts(IndexedExperts):
    """Applies a layer's routed experts to tokens that DeepSpeed has routed."""

    WAYS_OUT_OF_DTYPE = (
        f'enable bf16 or fp16 in the DeepSpeed configuration, or set {SECTION}.backend to "auto"'
    )
    ORDERED_GRADS = True  # ZeRO pairs the ranks' gradients by order

    __call__ = eager(IndexedExperts.__call__)

    def check_weights(self, x: torch.Tensor, weights: ExpertWeights | SplitWeights) -> None:
        """Refuses tokens of another dtype than the weights if ``torch.autocast`` gives them."""
        dtype = (weights.down if isinstance(weights, SplitWeights) else weights.fc2)[0].dtype
        if x.dtype != dtype and torch.is_autocast_enabled(x.device.type):
            raise ConfigError(
                f"torch.autocast gives the layer tokens in {x.dtype} and its experts are "
                f"{dtype}, wanted one dtype: leave torch.autocast out, or cast the tokens "
                "before the layer"
            )

    def allow_more(self, num_tokens: int) -> str:
        """Names the setting that bounds tokens."""
        return f"set {SECTION}.max_tokens to {num_tokens} or more, or leave it out"
