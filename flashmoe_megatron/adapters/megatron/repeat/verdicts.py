"""Holds back what Megatron says of losses and gradients until all ranks know of an overflow.

An overflow leaves NaN, which Megatron would take for a fault of the hardware. Whatever it judges
(losses, norms of buckets, unexpectedly large values) goes through one method of its
``RerunStateMachine``. Calls of it are made after the iteration, or not at all.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.patch import Function, patch

_held: list[Callable[[], None]] | None = None
"""The calls that are held back, ``None`` outside of an iteration that may be repeated."""


def patch_state_machine(module: ModuleType) -> None:
    """Lets ``megatron.core.rerun_state_machine`` wait with its verdicts."""
    patch(module.RerunStateMachine, "validate_result", _held_back)


@contextlib.contextmanager
def hold_verdicts() -> Iterator[list[Callable[[], None]]]:
    """Holds verdicts back within; gives a list that gets them, to be called later or forgotten."""
    global _held
    held: list[Callable[[], None]] = []
    _held = held
    try:
        yield held
    finally:
        _held = None


def _held_back(original: Function) -> Function:
    def validate_result(self: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        if _held is None:
            original(self, result, *args, **kwargs)
            return
        # Megatron scales a loss in place afterwards.
        seen = result.detach().clone() if isinstance(result, torch.Tensor) else result
        _held.append(functools.partial(original, self, seen, *args, **kwargs))

    return validate_result
