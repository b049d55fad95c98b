"""The token dispatcher of a flashmoe layer. Imported after Megatron-Core."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class FlashMoETokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Remembers a call's routing for the fused layer, which moves the tokens itself.

    Inside :meth:`fused` its first and its last step hand the tokens on in the shape that they have;
    the steps between are not called. Outside, all six steps are those of Megatron's alltoall
    dispatcher, for whoever calls them one by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What a CUDA graph of the first step hands on besides tokens and probabilities.
        self.cudagraph_attrs = ["routing_map"]
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
        """Remembers the routing of a call.

        Args:
            hidden_states: ``[..., hidden]``.
            routing_map: ``[num_tokens, num_experts]`` bool.
            probs: ``[num_tokens, num_experts]``.

        Returns:
            Tokens and probabilities as they are.
        """
        if self._is_fused:
            self.routing_map = routing_map
            return hidden_states, probs
        result: tuple[torch.Tensor, torch.Tensor] = super().dispatch_preprocess(
            hidden_states, routing_map, probs
        )
        return result

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hands the layer's output on."""
        if self._is_fused:
            return hidden_states
        result: torch.Tensor = super().combine_postprocess(hidden_states)
        return result

    def start_shared(self, hidden_states: torch.Tensor) -> None:
        """Puts the shared expert on its own stream, if ``--moe-shared-expert-overlap`` is on.

        Megatron's own dispatchers put its parts between the steps of their communication.

        Args:
            hidden_states: ``[..., hidden]``.
        """
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
            self.shared_experts.linear_fc1_forward_and_act()
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()

    def add_shared(self, output: torch.Tensor) -> torch.Tensor:
        """Adds what :meth:`start_shared` has put on that stream; waits for it there."""
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output
