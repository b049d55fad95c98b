"""Operators that torch dispatches, and checkpointing that saves what one of them returns."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class Operators(TorchDispatchMode):
    """Takes note of all operators in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def saving(operator: Any) -> Callable[..., Any]:
    """Checkpointing that saves what an operator returns, and recomputes all else."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = op is operator
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """An output, and the gradients of the sum of its squares."""
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
