"""The token dispatcher of a flashmoe layer. Imported after Megatron-Core."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class FlashMoETokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Remembers a call's routing for the fused layer, which moves the tokens itself.

    Inside :meth:`fused` its first step only flattens the tokens and its last restores their shape;
    the steps between are not called. With ``--moe-shared-expert-overlap`` the first step also puts
    the shared expert on its own stream, in front of the launch, and the last adds its output.
    Outside, all six steps are those of Megatron's alltoall dispatcher, for whoever calls them one
    by one.
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
        if self.shared_experts is not None:
            # Megatron's own dispatchers put these between the steps of their communication.
            self.shared_experts.pre_forward_comm(hidden_states)
            self.shared_experts.linear_fc1_forward_and_act()
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Restores the shape that :meth:`dispatch_preprocess` was given."""
        if not self._is_fused:
            result: torch.Tensor = super().combine_postprocess(hidden_states)
            return result
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output
