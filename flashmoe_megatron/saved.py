"""Saves what a step of a training changes, and puts it back, so that the step can be repeated.

Parameters and the optimizer's state change after the step alone, and gradients are dropped.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from flashmoe_megatron.scales import save_scales

Table = dict[str, Any]
_MAY_HOLD = frozenset((torch.Generator, list, tuple))
"""Types of attributes that are, or may have, generators."""


class Saved:
    """The state before a step.

    Args:
        modules: Have buffers, which are changed in place or replaced, generators and scales of FP8.
        tables: Named values, and the names that count; ``None`` for all.
        generators: Save the states of the caller's own generators; each gives what restores one.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        tables: Iterable[tuple[Table, Iterable[str] | None]] = (),
        generators: Iterable[Callable[[], Callable[[], object]]] = (),
    ) -> None:
        tables = list(tables)
        modules = list(modules)
        self._buffers = [
            (module._buffers, name, buffer, None if buffer is None else buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        self._tables = [
            (table, _copy(table if names is None else {name: table[name] for name in names}))
            for table, names in tables
        ]
        # A step may have made a table that has been empty, and its entries go again.
        self._whole = [names is None for _, names in tables]
        self._restorers = [
            save_scales(modules),
            save_module_generators(modules),
            *(save() for save in (save_generators, *generators)),
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back; tensors keep their addresses, which CUDA graphs know."""
        for buffers, name, buffer, values in self._buffers:
            buffers[name] = None if buffer is None or values is None else buffer.copy_(values)
        for (table, before), is_whole in zip(self._tables, self._whole, strict=True):
            _put_back(table, before, is_whole=is_whole)
        for restore in self._restorers:
            restore()


def save_generators() -> Callable[[], None]:
    """Saves the generators that every program has; returns what restores them."""
    numpy: Any = sys.modules.get("numpy.random")
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if numpy is not None:
        states.append((numpy.set_state, numpy.get_state()))
    if torch.cuda.is_available():
        states.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))

    def restore() -> None:
        for put, state in states:
            put(state)

    return restore


def save_module_generators(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Saves the generators that modules have, as attributes or in lists and tuples that are.

    Returns what restores them. An attribute that the step has given another generator, or its
    first one, becomes what it was.
    """
    tables = [(vars(module), dict(vars(module))) for module in modules]
    states: dict[torch.Generator, torch.Tensor] = {}
    for _, before in tables:
        # One look at the types of all attributes takes a microsecond.
        if not _MAY_HOLD.isdisjoint(map(type, before.values())):
            states |= {one: one.get_state() for one in _generators(before.values())}

    def restore() -> None:
        for table, before in tables:
            for name, now in list(table.items()):
                if now is before.get(name, table) or not any(_generators((now, before.get(name)))):
                    continue
                if name in before:
                    table[name] = before[name]
                else:
                    del table[name]
        for generator, state in states.items():
            generator.set_state(state)

    return restore


def _generators(values: Iterable[Any]) -> Iterator[torch.Generator]:
    for value in values:
        each = value if isinstance(value, list | tuple) else (value,)
        yield from (one for one in each if isinstance(one, torch.Generator))


def save_tracker(tracker: Any) -> Callable[[], None]:
    """Saves the named generators of a tracker, as Megatron and DeepSpeed have one.

    Returns what restores them.
    """
    saved = {name: _state_of(one) for name, one in tracker.get_states().items()}

    def restore() -> None:
        states = tracker.get_states()
        for name, state in saved.items():
            if isinstance(states.get(name), torch.Generator):  # which graphs have registered
                states[name].set_state(state)
            else:
                states[name] = state
        tracker.set_states({name: states[name] for name in saved})

    return restore


def _state_of(one: torch.Tensor | torch.Generator) -> torch.Tensor:
    return one.get_state() if isinstance(one, torch.Generator) else one.clone()


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


def _put_back(table: Table, saved: Table, *, is_whole: bool = True) -> None:
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
