"""Compares a function of a framework's experts with a formula of ours."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from flashmoe_megatron.eager import unseen

PROBE_ROWS = 8
PROBE_SCALES = (1.0, 32.0, 1000.0)
"""Sizes of the probe's rows: functions differ around 1, and clamps act far from there."""

PROBE_TOLERANCE = 1e-5
"""Relative error; the two forms of GELU differ by 1e-4, and the probe computes in float64."""

_HOOKS_OF_ALL = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)


def is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Tells whether a tensor is another up to rounding in float64."""
    return bool((got - want).norm() <= PROBE_TOLERANCE * want.norm())


@contextlib.contextmanager
def as_in_no_other_call(device: torch.device) -> Iterator[None]:
    """Lets a function run forward and backward, outside of the modes of the caller.

    The call may be a forward of evaluation, or it may be checkpointed or watched. Modes, hooks on
    saved tensors and hooks on all modules then count or record what runs, and would take the
    probe's rows for the caller's. The modules' own hooks are the business of who asks.
    """
    hooks = [dict(registry) for registry in _HOOKS_OF_ALL]
    for registry in _HOOKS_OF_ALL:
        registry.clear()
    try:
        with (
            unseen(),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        ):
            yield
    finally:
        for registry, known in zip(_HOOKS_OF_ALL, hooks, strict=True):
            registry.update(known)


@contextlib.contextmanager
def in_mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Has these modules alone in training or evaluation mode, and afterwards as they were."""
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = training
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
