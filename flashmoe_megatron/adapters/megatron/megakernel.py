"""Runs routed and shared experts through Megatron's own megakernel interface.

There a MoE layer hands its routing result to a ``MegakernelBackend``, a module with
``forward(hidden_states, probs, routing_map)`` that replaces dispatch, experts and combine. Three
functions of that package's factory know the backends by the name that a configuration has; each
gets a branch for ours.
"""

import contextlib
import functools
import itertools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from flashmoe_megatron.adapters.megatron.config.asked import OVERLAP, is_megakernel
from flashmoe_megatron.adapters.megatron.config.refusals import CONFIG_REFUSALS, refuse
from flashmoe_megatron.adapters.megatron.routed import RoutedExperts
from flashmoe_megatron.adapters.megatron.settings import current_settings, flag_of
from flashmoe_megatron.adapters.megatron.shape import keeps_layers_in_bf16
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.errors import ConfigError

try:
    from megatron.core.transformer.moe.megakernel.backend import MegakernelBackend
except ImportError:
    # Released versions have no such interface; the module is the same with another base.
    MegakernelBackend = torch.nn.Module


class FlashMoEMegakernel(MegakernelBackend):  # type: ignore[misc]
    """Applies a layer's experts. Owns no parameters and leaves no trace in a checkpoint.

    Args:
        routed_experts: The layer's ``experts``, which keep owning their weights.
        shared_experts: The layer's shared expert, ``None`` if it has none.
        layer_number: Megatron's number of the layer, from 1; metrics count from 0, as Megatron's
            own do. Megatron's factory does not know it; without it, layers are numbered as they
            are built.

    Raises:
        ConfigError: The configuration or the experts' class cannot be honoured.
    """

    def __init__(
        self,
        config: Any,
        ep_group: dist.ProcessGroup,
        routed_experts: torch.nn.Module,
        shared_experts: torch.nn.Module | None,
        num_local_experts: int,
        layer_number: int | None = None,
    ) -> None:
        super().__init__()
        refuse(config, CONFIG_REFUSALS)
        settings, one_call = current_settings(), "has one call for routed and shared experts"
        is_ahead = settings.placement == "lookahead" and settings.filled_slots > 0
        is_mixed = settings.experts != "bf16" and keeps_layers_in_bf16(config)
        is_routed = "is given tokens that are routed"
        for flag, is_asked, interface in (
            ("--moe-latent-size", getattr(config, "moe_latent_size", None), one_call),
            (f"--{OVERLAP.replace('_', '-')}", getattr(config, OVERLAP, None), one_call),
            (flag_of("pre_gate"), settings.pre_gate, is_routed),
            (flag_of("gate"), settings.gate != "router", is_routed),
            (f"{flag_of('placement')} lookahead", is_ahead, is_routed),
            (flag_of("slice_gradients"), settings.slice_gradients, is_routed),
            ("--first-last-layers-bf16", is_mixed, "does not know a layer's number"),
        ):
            if is_asked:
                raise ConfigError(
                    f"{flag} cannot be honoured with the megakernel interface, which "
                    f"{interface}: use --moe-token-dispatcher-type flashmoe"
                )
        wanted = config.num_moe_experts // dist.get_world_size(ep_group)
        if num_local_experts != wanted:
            raise ConfigError(
                f"num_local_experts={num_local_experts}: wanted {wanted}, num_moe_experts="
                f"{config.num_moe_experts} over {dist.get_world_size(ep_group)} ranks"
            )
        self._routed = RoutedExperts(config, routed_experts, ep_group)
        self._layer = _next_number() if layer_number is None else layer_number - 1
        # The layer owns the shared experts; in a tuple they do not become submodules here, too.
        self._shared = () if shared_experts is None else (shared_experts,)

    def forward(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> torch.Tensor:
        """Applies the routed experts, and adds the shared one's output; see :class:`RoutedExperts`.

        Collective over the group. The output has the shape and dtype of ``[..., hidden]`` tokens.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = self._routed(tokens, probs, routing_map, layer=self._layer)
        output = output.view(hidden_states.shape)
        for shared in self._shared:
            output = output + shared(hidden_states)
        return output


def patch_factory(module: ModuleType) -> None:
    """Adds our backend to NVIDIA's factory."""
    patch(module, "build_megakernel_backend", _build)
    # Shared experts are built as without a megakernel: Megatron's own forward computes them.
    for name, ours in (
        ("prepare_megakernel_shared_expert_config", lambda config: config),
        ("megakernel_shared_expert_init_context", lambda _: contextlib.nullcontext()),
    ):
        patch(module, name, functools.partial(_or_ours, ours))


def _build(original: Function) -> Function:
    def build(*, config: Any, **arguments: Any) -> Any:
        make = FlashMoEMegakernel if is_megakernel(config) else original
        return make(config=config, **arguments)

    return build


def _or_ours(ours: Function, original: Function) -> Function:
    return lambda config: (ours if is_megakernel(config) else original)(config)


_built = itertools.count()


def _next_number() -> int:
    """Counts in steps of the number of pipeline stages, so that no two give a layer one number."""
    stage, num_stages = 0, 1
    if parallel_state.is_initialized():
        stage = parallel_state.get_pipeline_model_parallel_rank()
        num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    return stage + num_stages * next(_built)
