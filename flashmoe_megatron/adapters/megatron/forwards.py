"""Refuses experts of Megatron that compute something else, and waits for their parameters."""

import torch

from flashmoe_megatron.adapters.forwards import (
    Classes,
    classes_of,
    name_of,
    with_all_below,
)
from flashmoe_megatron.adapters.megatron.ddp_hooks import waits_for_parameters
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.touched import find_touched

_STOCK = ("megatron.core.", "transformer_engine.", "torch.nn.modules.")
"""Packages whose classes compute with the parameters they own; torch's are the containers."""


def check_forwards(experts: torch.nn.Module) -> Classes:
    """Refuses experts that compute something else than their class in Megatron.

    Their forward is not called here: what a conversion (quantization, LoRA, sparsity) or a hook
    puts there would be lost without a word.

    Args:
        experts: The ``experts`` of a MoELayer.

    Returns:
        Their classes, for :func:`stand_in_for_forwards`.

    Raises:
        ConfigError: A class or a ``forward`` is not Megatron's, or there are hooks around a forward
            or a backward, but for those of Megatron's DDP; names the module.
    """
    modules = with_all_below(experts)
    for module in modules:
        _check_class(module, experts)
    for module in find_touched(modules):
        _check_hooks(module, experts)
    return classes_of(modules)


def check_not_replaced(experts: torch.nn.Module, built: torch.nn.Module) -> None:
    """Refuses another module in the place of the experts that the layer was built with.

    Args:
        experts: The ``experts`` of a MoELayer now.
        built: What they were when the layer was built.

    Raises:
        ConfigError: They are another module, such as a wrapper around the first.
    """
    if experts is not built:
        _refuse(experts, experts, "was put there after the layer was built")


def stand_in_for_forwards(experts: torch.nn.Module, classes: Classes) -> None:
    """Does what calling the experts would do before computing; checks as :func:`check_forwards`.

    With ``--overlap-param-gather`` Megatron waits for the all-gather of a module's parameters in
    the module's forward pre-hooks. The experts' forward is not called here, so their hooks are, as
    often as a module would be called.

    Args:
        experts: The ``experts`` of a MoELayer.
        classes: Their classes when the layer was built; only others are looked at again.
    """
    modules = with_all_below(experts)
    if classes_of(modules) != classes:
        for module in modules:
            _check_class(module, experts)
    for module in find_touched(modules):
        _check_hooks(module, experts)
        await_parameters(module)


def await_parameters(module: torch.nn.Module) -> None:
    """Calls what waits for a module's parameters, as often as its forward would."""
    for hook in tuple(module._forward_pre_hooks.values()):
        if waits_for_parameters(hook):
            hook(module)


def _check_class(module: torch.nn.Module, experts: torch.nn.Module) -> None:
    cls = type(module)
    if not cls.__module__.startswith(_STOCK):
        _refuse(module, experts, f"is of class {cls.__module__}.{cls.__qualname__}")


def _check_hooks(module: torch.nn.Module, experts: torch.nn.Module) -> None:
    for hook in module._forward_pre_hooks.values():
        if not waits_for_parameters(hook):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            _refuse(
                module, experts, f"has a forward pre-hook of others than Megatron's DDP ({name})"
            )
    if module._forward_hooks:
        _refuse(module, experts, "has forward hooks")
    if module._backward_hooks or module._backward_pre_hooks:
        _refuse(module, experts, "has backward hooks")
    if "forward" in module.__dict__:
        _refuse(module, experts, "has a forward of its own")


def _refuse(module: torch.nn.Module, experts: torch.nn.Module, problem: str) -> None:
    raise ConfigError(
        f"{name_of(module, experts)} ({type(module).__name__}) {problem}, which would not be "
        "called; wanted an unchanged module of Megatron-Core or Transformer Engine: convert no "
        "experts (quantization, LoRA, sparsity) and hook none, or use the alltoall dispatcher"
    )
