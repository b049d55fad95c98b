"""Finds what calling experts would do besides computing: their forwards are not called here.

The walks run before every launch, while the GPU may be idle, so they look into modules' dicts.
"""

from collections.abc import Sequence

from torch import nn

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


def classes_of(modules: Sequence[nn.Module]) -> Classes:
    """The classes of modules, to be compared with what they are later."""
    return tuple(map(type, modules))


def name_of(module: nn.Module, experts: nn.Module) -> str:
    """A module's path, which begins with "experts"."""
    names: dict[int, str] = {
        id(each): name for name, each in experts.named_modules(prefix="experts")
    }
    return names[id(module)]
