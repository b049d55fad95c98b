"""``experts_implementation="flashmoe"``: the experts of one module of transformers, one call."""

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashmoe_megatron.adapters.experts import shared_backends
from flashmoe_megatron.adapters.indexed import IndexedExperts
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.adapters.transformers.form import read_shape, read_weights
from flashmoe_megatron.eager import eager
from flashmoe_megatron.options import make_options

_settings = ModuleOptions()


def configure(**options: Any) -> ModuleOptions:
    """Chooses how experts run whose first call is still to come; the same on every rank.

    Args:
        **options: Fields of :class:`~flashmoe_megatron.adapters.options.ModuleOptions`; what is
            left out has its default.

    Returns:
        The options.

    Raises:
        ConfigError: A name is unknown, or a value has no meaning.
    """
    global _settings
    _settings = make_options(ModuleOptions, options)
    return _settings


class RoutedExperts(IndexedExperts):
    """Applies the routed experts of one module of transformers."""

    WAYS_OUT_OF_DTYPE = (
        "load the model with dtype=torch.bfloat16, train it under autocast (bf16=True of the "
        'Trainer), or call flashmoe_megatron.transformers.configure(backend="auto") first'
    )

    def allow_more(self, num_tokens: int) -> str:
        """See :meth:`LayerExperts.allow_more`."""
        return (
            f"call flashmoe_megatron.transformers.configure(max_tokens={num_tokens}) before the "
            "first step, or leave max_tokens out"
        )


_Seats = dict[tuple[torch.device, int, torch.dtype], RoutedExperts]
_seats: weakref.WeakKeyDictionary[nn.Module, _Seats] = weakref.WeakKeyDictionary()
"""By module, device, choices of a token and dtype; beside the modules and not in them, so that
copies and checkpoints know nothing of it."""


@eager
def apply_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Applies a module's experts to tokens that the model has routed. Collective over the group.

    Under ``torch.autocast`` the experts compute in autocast's dtype, as ``nn.Linear`` does.

    Args:
        experts: The module, with the plain parameters of this rank's experts.
        hidden_states: ``[num_tokens, hidden]``.
        top_k_index: ``[num_tokens, k]`` int32 or int64, distinct for each token: ids of the group's
            experts, or -1 for none.
        top_k_weights: ``[num_tokens, k]``.
        group: The expert-parallel group, ``None`` if the module has all experts.

    Returns:
        ``[num_tokens, hidden]`` in the dtype of ``hidden_states``.

    Raises:
        ConfigError: The experts compute something that no backend does, or have a dtype in which
            the kernel cannot compute.
        ShapeError: A tensor is not what the experts were made for.
    """
    device = hidden_states.device
    is_autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if is_autocast else experts.down_proj.dtype
    seats = _seats.setdefault(experts, {})
    key = device, top_k_index.shape[-1], dtype
    if key not in seats:
        seats[key] = _seat(experts, key[1], dtype, device, group)
    seat = seats[key]
    seat.is_training = experts.training
    x = hidden_states.to(dtype) if is_autocast else hidden_states
    with torch.autocast(device.type, enabled=False):
        read = functools.partial(read_weights, experts, dtype)
        out = seat(x, top_k_index, top_k_weights, read)
    return out.to(hidden_states.dtype)


def _seat(
    experts: nn.Module,
    topk: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> RoutedExperts:
    """Makes what applies a module's experts. Collective over the group."""
    shape = read_shape(experts, topk, 1 if group is None else dist.get_world_size(group))
    backends = shared_backends(group, device, _settings, _settings.max_tokens)
    return RoutedExperts(shape, backends, dtype, layer=len(_seats) - 1)


def experts_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What ``experts_implementation="flashmoe"`` calls, with the arguments of the module's forward.

    Where transformers spreads the experts over ranks itself, an id of their number stands for an
    expert of another rank; its choice is left out.
    """
    if getattr(experts, "_is_expert_parallel", True):
        is_elsewhere = top_k_index == experts.down_proj.shape[0]
        top_k_index = top_k_index.masked_fill(is_elsewhere, -1)
    return apply_experts(experts, hidden_states, top_k_index, top_k_weights)
