"""``experts_implementation="flashmoe"``: the experts of one module of transformers, one call."""

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashmoe_megatron.adapters.experts import GroupBackends, shared_backends
from flashmoe_megatron.adapters.indexed import IndexedExperts, KnownExperts
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.adapters.transformers.form import (
    IGNORED,
    holding_of,
    read_shape,
    read_weights,
)
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.eager import eager
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import make_options
from flashmoe_megatron.weights import ExpertWeights

_settings = ModuleOptions()


def configure(**options: Any) -> ModuleOptions:
    """Chooses how experts run from their next call on, which reads again how they compute.

    The same on every rank. The options are fields of
    :class:`~flashmoe_megatron.adapters.options.ModuleOptions`; what is left out has its default.

    Raises:
        ConfigError: A name is unknown, or a value has no meaning.
    """
    global _settings
    _settings = make_options(ModuleOptions, options)
    _known.clear()
    return _settings


_Sizes = tuple[torch.Size, torch.Size]

_WAY_OUT = (
    "make such a change before, or call flashmoe_megatron.transformers.configure() on every rank "
    "after it"
)


class RoutedExperts(IndexedExperts):
    """Applies the experts of one module of transformers, whose two stacks have such ``sizes``."""

    WAYS_OUT_OF_DTYPE = (
        "load the model with dtype=torch.bfloat16, train it under autocast (bf16=True of the "
        'Trainer), or call flashmoe_megatron.transformers.configure(backend="auto") first'
    )

    def __init__(
        self,
        shape: MoEConfig,
        backends: GroupBackends,
        dtype: torch.dtype,
        sizes: _Sizes,
        *,
        layer: int = 0,
    ) -> None:
        super().__init__(shape, backends, dtype, layer=layer)
        self._sizes = sizes

    def check_sizes(self, sizes: _Sizes) -> None:
        """Refuses stacks whose shapes are not the layer's, as after experts were pruned."""
        if sizes != self._sizes:
            got, had = ([tuple(size) for size in both] for both in (sizes, self._sizes))
            raise ConfigError(
                f"the experts' matrices have shapes {got}, and had {had} in their first call; "
                f"{_WAY_OUT}"
            )

    def allow_more(self, num_tokens: int) -> str:
        """Names the call that sets the bound of tokens."""
        return (
            f"call flashmoe_megatron.transformers.configure(max_tokens={num_tokens}) before the "
            "first step, or leave max_tokens out"
        )


_known: weakref.WeakKeyDictionary[nn.Module, KnownExperts[RoutedExperts]] = (
    weakref.WeakKeyDictionary()
)
"""By module; kept outside of the modules, so that copies and checkpoints know nothing of it."""


@eager
def apply_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Applies a module's experts to tokens that the model has routed. Collective over the group.

    Under ``torch.autocast`` the experts compute in autocast's dtype, as ``nn.Linear`` does, else in
    that of their second projection. Where a module holds something else than in its last call,
    such as another activation or fewer experts, what it computes is read again.

    Args:
        experts: The module, with the plain parameters of this rank's experts.
        hidden_states: ``[num_tokens, hidden]``.
        top_k_index: ``[num_tokens, k]`` int32 or int64, distinct for each token: ids of the group's
            experts, or -1 for none.
        top_k_weights: ``[num_tokens, k]``.
        group: The expert-parallel group, ``None`` if the module has all experts.

    Raises:
        ConfigError: The experts compute something that no backend does, have hooks within, or have
            a dtype in which the kernel cannot compute. Experts of several ranks have changed.
        ShapeError: A tensor is not what the experts were made for.
    """
    device, topk = hidden_states.device, top_k_index.shape[-1]
    is_autocast = torch.is_autocast_enabled(device.type)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    with torch.autocast(device.type, enabled=False):
        weights = read_weights(
            experts, torch.get_autocast_dtype(device.type) if is_autocast else None
        )
        sizes, dtype = (weights.fc1[0].shape, weights.fc2[0].shape), weights.fc2[0].dtype
        if (known := _known.get(experts)) is None:
            known = _known[experts] = KnownExperts(IGNORED, _WAY_OUT)
        look = functools.partial(holding_of, experts)
        read = functools.partial(read_shape, experts, topk, num_ranks)

        def make(shape: MoEConfig) -> RoutedExperts:
            backends = shared_backends(group, device, _settings, _settings.max_tokens)
            return RoutedExperts(shape, backends, dtype, sizes, layer=len(_known) - 1)

        # A rank alone may make another seat; of several, each has to be at the same call.
        key = device, topk, dtype, (sizes if num_ranks == 1 else group)
        seat = known.seat(key, group, look, read, make)
        seat.is_training = experts.training

        def checked_weights() -> ExpertWeights:
            if num_ranks > 1:
                known.check_unchanged(seat, look, read)
                seat.check_sizes(sizes)
            return weights

        out = seat(hidden_states.to(dtype), top_k_index, top_k_weights, checked_weights)
    return out.to(hidden_states.dtype)


def experts_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes for ``experts_implementation="flashmoe"``, and gets what the forward would.

    Where transformers spreads the experts over ranks itself, an id of their number stands for an
    expert of another rank; its choice is left out.
    """
    if getattr(experts, "_is_expert_parallel", True):
        is_elsewhere = top_k_index == experts.down_proj.shape[0]
        top_k_index = top_k_index.masked_fill(is_elsewhere, -1)
    return apply_experts(experts, hidden_states, top_k_index, top_k_weights)
