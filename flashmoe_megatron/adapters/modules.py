"""Walks over modules that run before every launch, while the GPU may be idle."""

from torch import nn


def with_all_below(module: nn.Module) -> list[nn.Module]:
    """A module and all below it, in torch's order.

    As torch's ``modules()``, which makes up names as well, and leaves out what it has met.
    """
    found, left = [], [module]
    while left:
        one = left.pop()
        found.append(one)
        if children := one._modules:
            left += [below for below in reversed(children.values()) if below is not None]
    return found
