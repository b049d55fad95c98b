"""``experts_implementation="flashmoe"``: the experts of one module of transformers, one call."""

import dataclasses
import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashmoe_megatron.adapters.experts import GroupBackends
from flashmoe_megatron.adapters.indexed import (
    IndexedExperts,
    KnownExperts,
    Reading,
    outside_autocast,
)
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.adapters.transformers.form import (
    IGNORED,
    NORM,
    has_norm,
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
        rows_of_token: int = 1,
    ) -> None:
        super().__init__(shape, backends, dtype, layer=layer)
        self._sizes = sizes
        self._rows_of_token = rows_of_token

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
        wanted = -(-num_tokens // self._rows_of_token)
        counted = (
            f"a norm after each expert makes {self._rows_of_token} rows of a token, which count "
            "here; "
        )
        return (
            f"{counted if self._rows_of_token > 1 else ''}call "
            f"flashmoe_megatron.transformers.configure(max_tokens={wanted}) before the first step, "
            "or leave max_tokens out"
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
    routed = hidden_states, top_k_index, top_k_weights
    return (_apply_normed if has_norm(experts) else _apply)(experts, *routed, group)


def _apply(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    group: dist.ProcessGroup | None,
    rows_of_token: int = 1,
) -> torch.Tensor:
    topk, num_ranks = top_k_index.shape[-1], 1 if group is None else dist.get_world_size(group)
    options = _settings
    if options.max_tokens is not None:
        options = dataclasses.replace(options, max_tokens=options.max_tokens * rows_of_token)
    known = _known.setdefault(experts, KnownExperts(IGNORED, _WAY_OUT))
    with outside_autocast(hidden_states.device) as narrowed:
        weights = read_weights(experts, narrowed)
        sizes, dtype = (weights.fc1[0].shape, weights.fc2[0].shape), weights.fc2[0].dtype

        def make(shape: MoEConfig, backends: GroupBackends) -> RoutedExperts:
            return RoutedExperts(
                shape, backends, dtype, sizes, layer=len(_known) - 1, rows_of_token=rows_of_token
            )

        def checked_weights(seat: RoutedExperts) -> ExpertWeights:
            seat.check_sizes(sizes)
            return weights

        return known.apply(
            Reading(
                look=functools.partial(holding_of, experts),
                shape=functools.partial(read_shape, experts, topk, num_ranks),
                weights=checked_weights,
                make=make,
            ),
            (hidden_states, top_k_index, top_k_weights),
            dtype=dtype,
            group=group,
            options=options,
            is_training=experts.training,
            # A rank alone may make another seat; of several, each has to be at the same call.
            more=(rows_of_token, sizes if num_ranks == 1 else None),
        )


def _apply_normed(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Applies experts with a norm after each, which has to see what each returns for a token.

    So a token is a row for each of its experts, with a routing weight of 1, and the sum over its
    experts is made here. The norm is the module's own, and its weight's gradient autograd's.
    """
    num_tokens, topk = top_k_index.shape
    hidden = hidden_states.shape[-1]
    rows = hidden_states.unsqueeze(1).expand(-1, topk, -1).reshape(-1, hidden)
    choices = top_k_index.reshape(-1, 1)
    ones = torch.ones_like(choices, dtype=torch.float32)
    out = _apply(experts, rows, choices, ones, group, rows_of_token=topk)
    factors = top_k_weights.reshape(-1, 1).masked_fill(choices < 0, 0.0)
    weighted: torch.Tensor = getattr(experts, NORM)(out) * factors
    return weighted.view(num_tokens, topk, hidden).sum(1).to(hidden_states.dtype)


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
