"""The routed experts of one MoE layer of DeepSpeed: one call, on backends that layers share."""

import dataclasses

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed.settings import SECTION, Settings
from flashmoe_megatron.adapters.overflow import apply_despite_overflow
from flashmoe_megatron.autograd import in_backward
from flashmoe_megatron.backend import Backend, ExpertWeights
from flashmoe_megatron.config import TILE_M, MoEConfig, align_capacity
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.layer import moe_forward
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.telemetry.record import launch_number
from flashmoe_megatron.weights import SplitWeights


class GroupBackends:
    """The backends of all layers of one expert-parallel group, and the tokens they are made for.

    Layers of one shape share a backend, and all backends of a group share its symmetric heap. If
    the user does not bound the tokens of a call, the ranks agree on the most at every call and
    backends are made anew when it exceeds what they were made for.

    Args:
        group: The expert-parallel group.
        device: Where the layers live.
        settings: The user's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, settings: Settings) -> None:
        self.group = group
        self._device = device
        self._settings = settings
        self._max_tokens = settings.max_tokens or TILE_M
        self._backends: dict[MoEConfig, Backend] = {}

    def backend_of(self, shape: MoEConfig, num_tokens: int) -> Backend:
        """The backend for a call. Collective over the group.

        Args:
            shape: The layer's; its ``max_tokens`` does not count.
            num_tokens: This rank's tokens of the call.

        Returns:
            A backend of that shape for that many tokens.

        Raises:
            ShapeError: There are more tokens than the user said.
        """
        if self._settings.max_tokens is None:
            self._agree(num_tokens)
        elif num_tokens > self._max_tokens:
            raise ShapeError(
                f"this rank has {num_tokens} tokens in one call, wanted at most "
                f"{SECTION}.max_tokens={self._max_tokens}: raise it or leave it out"
            )
        config = dataclasses.replace(shape, max_tokens=self._max_tokens)
        if config not in self._backends:
            self._backends[config] = select_backend(
                config,
                self.group,
                self._device,
                kind=self._settings.backend,
                **self._settings.backend_options(),
            )
        return self._backends[config]

    def backends(self) -> tuple[Backend, ...]:
        """All made so far."""
        return tuple(self._backends.values())

    def _agree(self, num_tokens: int) -> None:
        """Raises the bound, on every rank, to what the fullest has; in steps, never down."""
        most = torch.tensor([num_tokens], device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        if int(most) > self._max_tokens:
            self._max_tokens = align_capacity(max(int(most), self._max_tokens * 5 // 4))


class RoutedExperts:
    """Applies a layer's routed experts to tokens that DeepSpeed has routed.

    Not a module: it owns no parameters and leaves no trace in a checkpoint. Making one is
    collective over the group, and so is every call.

    Args:
        shape: The layer's; its ``max_tokens`` does not count.
        backends: Those of the layer's group.
        layer: The layer's number in the model, for the records.

    Attributes:
        num_calls: Forward calls so far, recomputation included.
        num_tokens: Tokens of calls while ``is_training``, recomputation left out.
        is_training: Whether the model is; told by whoever reads ``num_tokens`` and the records.
    """

    def __init__(self, shape: MoEConfig, backends: GroupBackends, layer: int = 0) -> None:
        self.shape = shape
        self.layer = layer
        self.num_calls = 0
        self.num_tokens = 0
        self.is_training = True
        self._backends = backends
        backends.backend_of(shape, 0)  # what cannot run is to fail now, not in the first step

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
            RoutingError: A gate is NaN, but for float16: see :func:`apply_despite_overflow`.
        """
        self.num_calls += 1
        if self.is_training and not in_backward():
            self.num_tokens += x.shape[0]
        dtype = (weights.down if isinstance(weights, SplitWeights) else weights.fc2)[0].dtype
        if x.dtype != dtype and torch.is_autocast_enabled(x.device.type):
            raise ConfigError(
                f"torch.autocast gives the layer tokens in {x.dtype} and its experts are {dtype}, "
                "wanted one dtype: leave torch.autocast out, or cast the tokens before the layer"
            )
        backend = self._backends.backend_of(self.shape, x.shape[0])
        number = launch_number(self.layer, is_training=self.is_training)

        def apply(finite_gates: torch.Tensor) -> torch.Tensor:
            return moe_forward(
                x.contiguous(),
                expert_idx,
                finite_gates,
                weights,
                backend=backend,
                check_routing=False,
                ordered_grads=True,
                layer=number,
            )

        if gates.dtype not in (torch.float32, x.dtype):
            gates = gates.float()
        return apply_despite_overflow(apply, gates, x.dtype)
