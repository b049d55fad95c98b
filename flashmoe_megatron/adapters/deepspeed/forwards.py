"""Refuses experts of DeepSpeed whose forwards would do more than compute: they are not called."""

from collections.abc import Callable, Sequence

from torch import nn

from flashmoe_megatron.adapters.forwards import Classes, name_of, refuse_touched, with_all_below
from flashmoe_megatron.adapters.held import Held, Holding
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.touched import find_touched


class Watched:
    """Remembers what experts of one of DeepSpeed's MoE layers were when flashmoe was attached.

    Raises:
        ConfigError: A module has hooks, or a ``forward`` that is not its class's; names both.
    """

    def __init__(self, experts: nn.Module) -> None:
        modules = _untouched(experts)
        self._classes = tuple(map(type, modules))
        self._held = Held(_holding(modules))

    def check_unchanged(
        self, experts: nn.Module, is_as_before: Callable[[], bool] = lambda: False
    ) -> None:
        """Checks that the same experts are what they were.

        ``is_as_before`` reads them again and says whether they compute the same; it is asked where
        an attribute holds something else.

        Raises:
            ConfigError: Names the module and what it has or is.
        """
        modules = _untouched(experts)
        if tuple(map(type, modules)) != self._classes:
            _refuse_classes(modules, self._classes, experts)
        holding = _holding(modules)
        change = self._held.change(holding)
        if change is None:
            return
        if is_as_before():
            self._held.note(holding)
            return
        module, what = change
        if module is not None:
            what = f"{what} of {name_of(module, experts)} ({type(module).__name__})"
        raise ConfigError(
            f"{what} is not what it was when flashmoe was attached, and the experts compute "
            "something else: change them before"
        )


def _holding(modules: Sequence[nn.Module]) -> Holding:
    """The modules, and the functions of their classes that compute."""
    classes: Classes = tuple(map(type, modules))
    return Holding(modules, [cls.forward for cls in dict.fromkeys(classes)])


def _untouched(experts: nn.Module) -> list[nn.Module]:
    """All modules of experts, whose calls do nothing but compute."""
    modules = with_all_below(experts)
    if touched := find_touched(modules):
        refuse_touched(touched, experts)
    return modules


def _refuse_classes(modules: Sequence[nn.Module], wanted: Classes, experts: nn.Module) -> None:
    problem = f"experts have {len(modules)} modules, wanted {len(wanted)}"
    for module, kind in zip(modules, wanted, strict=False):
        if type(module) is not kind:
            got = type(module).__name__
            problem = f"{name_of(module, experts)} is a {got}, wanted a {kind.__name__}"
            break
    raise ConfigError(
        f"{problem}, as when flashmoe was attached: convert no experts afterwards (LoRA, "
        "quantization), their forward is not called"
    )
