"""One layer with random tokens and weights, to be timed or traced."""

from typing import Any

import torch

from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad


class RandomLayer:
    """A layer with random inputs; each rank draws its own."""

    def __init__(
        self, backend: ScheduledBackend, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Draws this rank's tokens, their routes and the weights of experts that no rank shares."""
        config = backend.config
        generator = torch.Generator(device).manual_seed(backend.rank)
        noise = torch.rand(num_tokens, config.num_experts, device=device, generator=generator)
        self._map = torch.zeros_like(noise, dtype=torch.bool)
        self._map.scatter_(1, noise.topk(config.topk, dim=1).indices, True)

        def random(*shape: int) -> torch.Tensor:
            values = torch.empty(shape, device=device, dtype=dtype)
            return values.normal_(std=shape[-1] ** -0.5, generator=generator)

        local = config.num_local_experts
        self._weights = ExpertWeights(
            (random(local, config.fc1_rows, config.hidden),),
            (random(local, config.hidden, config.intermediate),),
        )
        self._x, self._grad = random(num_tokens, config.hidden), random(num_tokens, config.hidden)
        self._probs = self._map.float() / config.topk
        self._backend = backend

    def forward(self) -> Any:
        """Runs a forward. Collective over the backend's group.

        Returns:
            What :meth:`backward` takes.
        """
        _, saved = self._backend.forward(
            self._x, self._probs, self._map, self._weights, training=True
        )
        return saved

    def backward(self, saved: Any) -> None:
        """Runs the backward of a forward. Collective over the backend's group."""
        grads = [
            [WeightGrad(torch.empty_like(one), False) for one in kind]
            for kind in (self._weights.fc1, self._weights.fc2)
        ]
        self._backend.backward(self._grad, saved, self._weights, *grads)
