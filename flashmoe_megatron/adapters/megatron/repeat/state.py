"""Finds what an iteration of Megatron changes besides gradients.

A forward draws random numbers, counts tokens, and keeps maxima, losses and scales of FP8; the end
of the backward moves the experts' biases. Each of these is named here. Parameters and the
optimizer's state change in the step after the iteration alone.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron.routed import built_experts
from flashmoe_megatron.adapters.metrics import Figures
from flashmoe_megatron.saved import Saved, Table, save_tracker

_QK_MAXIMA = "current_max_attn_logits"
"""The attribute of an attention that has its largest logits since the last step, or ``None``."""
_COUNTS = ("num_calls", "num_tokens")
"""The attributes of our layers that calls count."""
_RANDOM = "megatron.core.tensor_parallel.random"
_REPLAY = "megatron.core.transformer.moe.router_replay"
_LOSSES = (
    ("megatron.core.transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker", None),
    ("megatron.core.transformer.moe.moe_logging", "get_moe_metrics_tracker", "metrics"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper", "tracker"),
    (
        "megatron.core.transformer.experimental_attention_variant.dsa",
        "DSAIndexerLossLoggingHelper",
        "tracker",
    ),
)
"""The tables of losses that are logged: a module, a function or class in it, and an attribute."""


class Changing:
    """The modules of a model's chunks that an iteration may change, found once."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._modules = [module for chunk in model for module in chunk.modules()]
        self._with_maxima = [module for module in self._modules if hasattr(module, _QK_MAXIMA)]

    def save(self) -> Saved:
        """Saves the state of now."""
        tables: list[tuple[Table, Iterable[str] | None]] = [
            *((vars(module), (_QK_MAXIMA,)) for module in self._with_maxima),
            *((vars(routed), _COUNTS) for routed in built_experts()),
            *((table, None) for table in _losses()),
            *((vars(replay), None) for replay in _replays()),
        ]
        return Saved(self._modules, tables, [_save_tracker, lambda: Figures.forget_records])


def _save_tracker() -> Callable[[], None]:
    """Saves the generators of Megatron's tracker; returns what restores them."""
    return save_tracker(sys.modules[_RANDOM].get_cuda_rng_tracker())


def _losses() -> Iterator[Table]:
    for module, name, attribute in _LOSSES:
        owner: Any = getattr(sys.modules.get(module), name, None)
        if owner is not None:
            found: Any = owner if isinstance(owner, type) else owner()
            yield found if attribute is None else getattr(found, attribute)


def _replays() -> list[Any]:
    replay = getattr(sys.modules.get(_REPLAY), "RouterReplay", None)
    return list(getattr(replay, "global_router_replay_instances", ()))
