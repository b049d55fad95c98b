"""Finds what calling experts would do besides computing: their forwards are not called here.

The walks run before every launch, while the GPU may be idle, so they look into modules' dicts.
"""

from collections.abc import Iterable

from torch import nn

from flashmoe_megatron.errors import ConfigError

_HARMLESS = "deepspeed."
"""The package whose hooks gather parameters (ZeRO-3), as reading these does too, or profile."""

_WRAPPER = "torchtitan.protocols."
"""The package that puts a forward of its own around a class's, to spread tensors over ranks."""

Classes = tuple[type[nn.Module], ...]
"""The class of a module and of all below it, in torch's order."""


def with_all_below(module: nn.Module) -> list[nn.Module]:
    """A module and all below it, in torch's order.

    Faster than torch's ``modules()``, which makes up names, and remembers what it has met: here a
    module comes as often as it is somebody's.
    """
    found, left = [], [module]
    while left:
        one = left.pop()
        found.append(one)
        if children := one._modules:
            left += [below for below in reversed(children.values()) if below is not None]
    return found


def touch_of(module: nn.Module) -> str | None:
    """Names what a call of a module would do besides its class's ``forward``.

    Returns a noun for a module that :func:`~flashmoe_megatron.touched.find_touched` has found,
    ``None`` if there are only hooks that may be left out.
    """
    kinds = {
        "forward": (module._forward_hooks, module._forward_pre_hooks),
        "backward": (module._backward_hooks, module._backward_pre_hooks),
    }
    own = module.__dict__.get("forward")
    touch = None if own is None or _is_of(own, _WRAPPER) else "a forward of its own"
    for kind, registries in kinds.items():
        hooks = [hook for registry in registries for hook in registry.values()]
        if not all(_is_of(hook, _HARMLESS) for hook in hooks):
            touch = f"{kind} hooks"
    return touch


def _is_of(function: object, package: str) -> bool:
    return str(getattr(function, "__module__", "")).startswith(package)


def refuse_touched(
    touched: Iterable[nn.Module], experts: nn.Module, way_out: str = "", *, name: str = "experts"
) -> None:
    """Refuses modules of experts that do more than compute, which is left out where nothing calls.

    Args:
        touched: What :func:`~flashmoe_megatron.touched.find_touched` has found among them.
        experts: The module that they are below, or are.
        way_out: Ends the message.
        name: The framework's name of that module.

    Raises:
        ConfigError: Names the first module and what it has; there are only hooks that may be left
            out if none is raised.
    """
    for module in touched:
        touch = touch_of(module)
        if touch is not None:
            raise ConfigError(
                f"{name_of(module, experts, name)} ({type(module).__name__}) has {touch}, which "
                f"would not be called{way_out}"
            )


def name_of(module: nn.Module, experts: nn.Module, name: str = "experts") -> str:
    """A module's path, which begins with the name of the experts' module."""
    paths: dict[int, str] = {id(each): path for path, each in experts.named_modules(prefix=name)}
    return paths[id(module)]
