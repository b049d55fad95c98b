"""Refuses experts of DeepSpeed whose forwards would do more than compute: they are not called."""

from torch import nn

from flashmoe_megatron.adapters.forwards import (
    Classes,
    classes_of,
    name_of,
    with_all_below,
)
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.touched import find_touched

_HARMLESS = "deepspeed."
"""The package whose hooks gather parameters (ZeRO-3), as reading these does too, or profile."""


def check_forwards(experts: nn.Module) -> Classes:
    """Refuses experts with hooks, or with a ``forward`` that is not their class's.

    Args:
        experts: The ``experts`` of one of DeepSpeed's MoE layers.

    Returns:
        Their classes, for :func:`check_unchanged`.

    Raises:
        ConfigError: Names the module and what it has.
    """
    modules = with_all_below(experts)
    for module in find_touched(modules):
        _check_forward(module, experts)
    return classes_of(modules)


def check_unchanged(experts: nn.Module, classes: Classes) -> None:
    """Checks as :func:`check_forwards`, and that the modules are of the classes that they were.

    Args:
        experts: The same.
        classes: Their classes when the layer was attached to.

    Raises:
        ConfigError: Names the module and what it has or is.
    """
    now = check_forwards(experts)
    if now == classes:
        return
    problem = f"experts have {len(now)} modules, wanted {len(classes)}"
    for module, wanted in zip(with_all_below(experts), classes, strict=False):
        if type(module) is not wanted:
            got = type(module).__name__
            problem = f"{name_of(module, experts)} is a {got}, wanted a {wanted.__name__}"
            break
    raise ConfigError(
        f"{problem}, as when flashmoe was attached: convert no experts afterwards (LoRA, "
        "quantization), their forward is not called"
    )


def _check_forward(module: nn.Module, experts: nn.Module) -> None:
    kinds = {
        "forward": (module._forward_hooks, module._forward_pre_hooks),
        "backward": (module._backward_hooks, module._backward_pre_hooks),
    }
    problem = "a forward of its own" if "forward" in module.__dict__ else None
    for kind, registries in kinds.items():
        hooks = [hook for registry in registries for hook in registry.values()]
        if not all(str(getattr(hook, "__module__", "")).startswith(_HARMLESS) for hook in hooks):
            problem = f"{kind} hooks"
    if problem is not None:
        name = name_of(module, experts)
        raise ConfigError(
            f"{name} ({type(module).__name__}) has {problem}, which would not be called"
        )
