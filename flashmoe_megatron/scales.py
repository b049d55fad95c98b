"""Saves the scales of FP8 that Transformer Engine takes from earlier steps, and puts them back.

With its recipe ``DelayedScaling`` a module keeps, for every tensor that it quantizes, a scale and
the largest values of the last calls. A forward and a backward write the newest of these, and the
end of each computes all scales again. Modules keep them outside of their buffers.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_FRESH = {"scale": 1.0, "scale_inv": 1.0, "amax_history": 0.0}
"""The tensors that a module keeps, and the values with which they begin.

Releases before 2 have the inverse, too.
"""
_METAS = ("fp8_meta", "_fp8_metas")
"""Attributes with a module's tables, of its layers and of its operations."""
_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_Place = tuple[int, str, str]
"""A table, a direction and a name."""


def fp8_manager() -> Any:
    """Returns Transformer Engine's state of FP8, ``None`` if it has not been imported."""
    for name in ("quantization", "fp8"):  # "fp8" is the older name
        module = sys.modules.get(f"transformer_engine.pytorch.{name}")
        manager = getattr(module, "FP8GlobalStateManager", None)
        if manager is not None:
            return manager
    return None


def save_scales(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Saves the scales of modules, and the largest values that they come from.

    Returns what restores them. Tensors keep their addresses, which quantizers, reductions over
    ranks and CUDA graphs know. Those that the step has made become as they began.
    """
    modules = [module for module in modules if _has_tables(module)]
    live = dict(_scales(modules))
    copies = {place: torch.empty_like(tensor) for place, tensor in live.items()}
    if live:
        torch._foreach_copy_(list(copies.values()), list(live.values()))

    def restore() -> None:
        for place, tensor in _scales(modules):
            copy = copies.get(place)
            if copy is None or copy.shape != tensor.shape:
                tensor.fill_(_FRESH[place[-1]])
            if copy is not None:  # a step may give a history another length
                rows = min(len(copy), len(tensor))
                tensor[:rows].copy_(copy[:rows])

    return restore


def _has_tables(module: nn.Module) -> bool:
    """Tells whether a module may have scales, in this step or in a later one."""
    return any(name in vars(module) for name in _METAS)


def _scales(modules: Iterable[nn.Module]) -> Iterator[tuple[_Place, torch.Tensor]]:
    """Yields the tensors that modules keep, by their places."""
    for module in modules:
        for table in _tables(module):
            for direction in _DIRECTIONS:
                state = table.get(direction)
                for name in _FRESH:
                    tensor = getattr(state, name, None)
                    if isinstance(tensor, torch.Tensor):
                        yield (id(table), direction, name), tensor


def _tables(module: nn.Module) -> Iterator[dict[str, Any]]:
    for name in _METAS:
        found = vars(module).get(name)
        if isinstance(found, dict):
            # Operations have a table for each pass.
            yield from (one for one in (found, *found.values()) if isinstance(one, dict))
