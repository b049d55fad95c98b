"""Saves what an iteration of Megatron changes besides gradients, and restores it.

A forward draws random numbers, counts tokens, and keeps maxima and losses; the end of the backward
moves the experts' biases. Each of these is named here. Parameters and the optimizer's state change
in the step after the iteration alone.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from flashmoe_megatron.adapters.megatron.routed import built_experts

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

_Table = dict[str, Any]


class Changing:
    """The modules of a model's chunks that an iteration may change, found once."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        modules = [module for chunk in model for module in chunk.modules()]
        self._with_buffers = [module for module in modules if module._buffers]
        self._with_maxima = [module for module in modules if hasattr(module, _QK_MAXIMA)]

    def save(self) -> "Saved":
        """Saves the state of now."""
        buffers = (buffer for module in self._with_buffers for buffer in module._buffers.values())
        tables: list[tuple[_Table, Iterable[str] | None]] = [
            *((vars(module), (_QK_MAXIMA,)) for module in self._with_maxima),
            *((vars(routed), _COUNTS) for routed in built_experts()),
            *((table, None) for table in _losses()),
            *((vars(replay), None) for replay in _replays()),
        ]
        return Saved([one for one in buffers if one is not None], tables)


class Saved:
    """The state before an iteration.

    Args:
        buffers: Tensors that are changed in place.
        tables: Named values, and the names that count; ``None`` for all.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        tables: Iterable[tuple[_Table, Iterable[str] | None]],
    ) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._tables = [
            (table, _copy(table if names is None else {name: table[name] for name in names}))
            for table, names in tables
        ]
        # An iteration may have made a table that has been empty, and its entries go again.
        self._whole = [names is None for _, names in tables]
        self._generators = _Generators()

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back; tensors keep their addresses, which CUDA graphs know."""
        for buffer, saved in self._buffers:
            buffer.copy_(saved)
        for (table, saved), is_whole in zip(self._tables, self._whole, strict=True):
            _put_back(table, saved, is_whole=is_whole)
        self._generators.restore()


class _Generators:
    """The states of all generators that a forward may draw from."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state()
        self._named = {name: _state_of(one) for name, one in _tracker().get_states().items()}

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        torch.cuda.set_rng_state(self._gpu)
        tracker = _tracker()
        states = tracker.get_states()
        for name, saved in self._named.items():
            if isinstance(states.get(name), torch.Generator):  # which graphs have registered
                states[name].set_state(saved)
            else:
                states[name] = saved
        tracker.set_states({name: states[name] for name in self._named})


def _tracker() -> Any:
    return sys.modules[_RANDOM].get_cuda_rng_tracker()


def _state_of(one: torch.Tensor | torch.Generator) -> torch.Tensor:
    return one.get_state() if isinstance(one, torch.Generator) else one.clone()


def _losses() -> Iterator[_Table]:
    for module, name, attribute in _LOSSES:
        owner: Any = getattr(sys.modules.get(module), name, None)
        if owner is not None:
            found: Any = owner if isinstance(owner, type) else owner()
            yield found if attribute is None else getattr(found, attribute)


def _replays() -> list[Any]:
    replay = getattr(sys.modules.get(_REPLAY), "RouterReplay", None)
    return list(getattr(replay, "global_router_replay_instances", ()))


def _copy(value: Any) -> Any:
    """Copies tensors, tables, lists and entries of tables; groups and numbers stay."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copy(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(value)
    if _is_entry(value):
        return _copy(vars(value))
    return value


def _is_entry(value: Any) -> bool:
    """Tells whether a value is an entry with named parts, as newer releases keep losses in."""
    return hasattr(type(value), "__dataclass_fields__")


def _put_back(table: _Table, saved: _Table, *, is_whole: bool = True) -> None:
    for name in [name for name in table if is_whole and name not in saved]:
        del table[name]
    for name, value in saved.items():
        now = table.get(name)
        if isinstance(value, torch.Tensor):
            same = isinstance(now, torch.Tensor) and now.shape == value.shape
            table[name] = now.copy_(value) if same else value.clone()  # type: ignore[union-attr]
        elif isinstance(value, dict) and isinstance(now, dict):
            _put_back(now, value)
        elif isinstance(value, dict) and _is_entry(now):
            _put_back(vars(now), value)
        else:
            table[name] = value
