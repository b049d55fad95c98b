"""Finds what a call of a module does besides the forward of its class."""

from collections.abc import Sequence

from torch import nn


def find_touched(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that have hooks or a ``forward`` that is not their class's, in their order."""
    return [
        module
        for module in modules
        if (own := module.__dict__)["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    ]
