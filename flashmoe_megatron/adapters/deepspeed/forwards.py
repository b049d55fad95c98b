"""Refuses experts of DeepSpeed whose forwards would do more than compute: they are not called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from flashmoe_megatron.adapters.forwards import (
    Classes,
    classes_of,
    name_of,
    touch_of,
    with_all_below,
)
from flashmoe_megatron.adapters.held import Held, Holding
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.touched import find_touched


@dataclass(frozen=True)
class Watched:
    """The state of experts when flashmoe was attached.

    Attributes:
        classes: Their classes.
        held: What their attributes held.
    """

    classes: Classes
    held: Held


def check_forwards(experts: nn.Module) -> Watched:
    """Refuses experts with hooks, or with a ``forward`` that is not their class's.

    Args:
        experts: The ``experts`` of one of DeepSpeed's MoE layers.

    Returns:
        What they are, for :func:`check_unchanged`.

    Raises:
        ConfigError: Names the module and what it has.
    """
    modules = with_all_below(experts)
    _check_touched(modules, experts)
    classes = classes_of(modules)
    return Watched(classes, Held(_holding(modules, classes)))


def check_unchanged(
    experts: nn.Module, watched: Watched, is_as_before: Callable[[], bool] = lambda: False
) -> None:
    """Checks that experts are what they were.

    Args:
        experts: The same.
        watched: What they were when flashmoe was attached.
        is_as_before: Reads them again and says whether they compute the same; asked where an
            attribute holds something else.

    Raises:
        ConfigError: Names the module and what it has or is.
    """
    modules = with_all_below(experts)
    _check_touched(modules, experts)
    classes = classes_of(modules)
    if classes != watched.classes:
        _refuse_classes(modules, classes, watched.classes, experts)
    holding = _holding(modules, classes)
    change = watched.held.change(holding)
    if change is None:
        return
    if is_as_before():
        watched.held.note(holding)
        return
    module, what = change
    if module is not None:
        what = f"{what} of {name_of(module, experts)} ({type(module).__name__})"
    raise ConfigError(
        f"{what} is not what it was when flashmoe was attached, and the experts compute something "
        "else: change them before"
    )


def _holding(modules: Sequence[nn.Module], classes: Classes) -> Holding:
    """The modules, and the functions of their classes that compute."""
    return Holding(modules, [cls.forward for cls in dict.fromkeys(classes)])


def _check_touched(modules: Sequence[nn.Module], experts: nn.Module) -> None:
    for module in find_touched(modules):
        touch = touch_of(module)
        if touch is not None:
            name = name_of(module, experts)
            raise ConfigError(
                f"{name} ({type(module).__name__}) has {touch}, which would not be called"
            )


def _refuse_classes(
    modules: Sequence[nn.Module], now: Classes, wanted: Classes, experts: nn.Module
) -> None:
    problem = f"experts have {len(now)} modules, wanted {len(wanted)}"
    for module, kind in zip(modules, wanted, strict=False):
        if type(module) is not kind:
            got = type(module).__name__
            problem = f"{name_of(module, experts)} is a {got}, wanted a {kind.__name__}"
            break
    raise ConfigError(
        f"{problem}, as when flashmoe was attached: convert no experts afterwards (LoRA, "
        "quantization), their forward is not called"
    )
