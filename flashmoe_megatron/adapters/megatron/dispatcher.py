"""The token dispatcher of a flashmoe layer. Imported after Megatron-Core."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class FlashMoETokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Remembers a call's routing for the fused layer, which moves the tokens itself.

    Inside :meth:`fused` its first step only flattens the tokens and its last restores their shape;
    the steps between are not called. Outside, all six steps are those of Megatron's alltoall
    dispatcher, for whoever calls them one by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.routing_map: torch.Tensor | None = None
        self._is_fused = False

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Makes the first and the last step those of the fused layer."""
        self._is_fused = True
        try:
            yield
        finally:
            self._is_fused = False

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flattens the tokens and remembers their routing.

        Args:
            hidden_states: ``[..., hidden]``.
            routing_map: ``[num_tokens, num_experts]`` bool.
            probs: ``[num_tokens, num_experts]``.

        Returns:
            ``[num_tokens, hidden]`` and the probabilities as they are.
        """
        if not self._is_fused:
            result: tuple[torch.Tensor, torch.Tensor] = super().dispatch_preprocess(
                hidden_states, routing_map, probs
            )
            return result
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Restores the shape that :meth:`dispatch_preprocess` was given."""
        if not self._is_fused:
            result: torch.Tensor = super().combine_postprocess(hidden_states)
            return result
        return hidden_states.view(self.hidden_shape)
