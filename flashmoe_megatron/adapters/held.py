"""Notices that modules hold something else than when they were read.

Their forwards are not called here, so what a call would read at that moment has been read once: a
number, a function, a flag. This runs before every launch, while the GPU may be idle. So it compares
a few identities for each module, and looks closer only where one of them differs.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

_TORCHS = frozenset(vars(nn.Module()))
"""Attributes of every module that are not read: torch's registries, and the mode."""

_ENGINES = frozenset({"applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn"})
_ENGINES_PREFIXES = ("ds_", "__")
"""Prefixes of attributes that DeepSpeed's ZeRO-3 and its profiler change in every step."""

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))
_READ_LIVE = frozenset({nn.Linear, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential})
"""Classes that compute with parameters and modules alone, which are looked at in each call."""

_Ref = Callable[[], Any]
_GONE = object()
_NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})


class Holding(NamedTuple):
    """Modules whose attributes count, and further objects that have to stay the same."""

    modules: Sequence[nn.Module]
    others: Sequence[object] = ()


class Held:
    """Remembers what modules held when they were read, but modules, parameters and hooks.

    It keeps no function and no module alive: what a module holds may hold the module.
    """

    def __init__(self, holding: Holding, ignored: Collection[str] = frozenset()) -> None:
        self._ignored = frozenset(ignored)
        self.note(holding)

    def note(self, holding: Holding) -> None:
        """Notes what the modules hold now as the state that was read."""
        self._size = len(holding.modules), len(holding.others)
        self._others = [_ref(other) for other in holding.others]
        self._modules = [
            (at, _Attributes(vars(module), self._ignored))
            for at, module in enumerate(holding.modules)
            if type(module) not in _READ_LIVE
        ]

    def change(self, holding: Holding) -> tuple[nn.Module | None, str] | None:
        """The first attribute that is not what it was, with its module; ``None`` where all are."""
        modules, others = holding
        if (len(modules), len(others)) != self._size:
            return None, "the number of modules"
        for other, was in zip(others, self._others, strict=True):
            if other is not was():
                return None, getattr(other, "__qualname__", type(other).__name__)
        for at, attributes in self._modules:
            own = modules[at].__dict__
            if not attributes.are_same(own):
                name = attributes.change(own)
                if name is not None:
                    return modules[at], name
        return None


class _Attributes:
    """Remembers what an object held; if that is whole, also what callables in it hold."""

    def __init__(
        self, own: Mapping[str, Any], ignored: frozenset[str], *, is_whole: bool = True
    ) -> None:
        self._ignored, self._prefixes = ignored, tuple(ignored)
        self._is_whole = is_whole
        self._note(own)

    def _note(self, own: Mapping[str, Any]) -> None:
        self._names = [*own]
        self._values: list[tuple[str, Any]] = []
        self._refs: list[tuple[str, _Ref]] = []
        self._tensors: list[tuple[str, _Ref, int]] = []
        self._within: list[tuple[str, _Ref, _Attributes]] = []
        for name, value in self._watched(own):
            if isinstance(value, _BY_VALUE):
                self._values.append((name, value))
                continue
            ref = _ref(value)
            self._refs.append((name, ref))
            if isinstance(value, torch.Tensor):
                self._tensors.append((name, ref, _version_of(value)))
            elif self._is_whole and callable(value) and type(_vars(value)) is dict:
                within = _Attributes(_vars(value), self._ignored, is_whole=False)
                self._within.append((name, ref, within))
        for name, tensor in self._registered(own):
            self._tensors.append((name, _ref(tensor), _version_of(tensor)))
        self._num_registered = len(self._registered(own))

    def are_same(self, own: Mapping[str, Any]) -> bool:
        """Tells whether all are what they were; a difference that it finds need not count."""
        if [*own] != self._names:
            return False
        for name, value in self._values:
            if own[name] is not value:
                return False
        for name, ref in self._refs:
            if own[name] is not ref():
                return False
        for _, ref, within in self._within:
            if not within.are_same(_vars(ref())):
                return False
        if self._tensors and self._changed_tensor(own) is not None:
            return False
        has_any = own.get("_parameters") or own.get("_buffers")
        return not has_any or len(self._registered(own)) == self._num_registered

    def change(self, own: Mapping[str, Any]) -> str | None:
        """The first that differs. If none does, the object is noted again as it is."""
        before = {**dict(self._values), **{name: ref() for name, ref in self._refs}}
        now = dict(self._watched(own))
        for name in {**before, **now}:
            if not _is_same(before.get(name, _GONE), now.get(name, _GONE)):
                return name
        for name, ref, within in self._within:
            if (changed := within.change(_vars(ref()))) is not None:
                return f"{name}.{changed}"
        if (changed := self._changed_tensor(own)) is not None:
            return changed
        registered = self._registered(own)
        if len(registered) != self._num_registered:
            return registered[-1][0] if registered else "parameters"
        self._note(own)
        return None

    def _watched(self, own: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [
            (name, value)
            for name, value in own.items()
            if name not in _TORCHS
            and name not in self._ignored
            and name not in _ENGINES
            and not name.startswith(_ENGINES_PREFIXES)
        ]

    def _registered(self, own: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """The object's own parameters and buffers, if it is a module.

        What torch's pruning and norms of weights keep is named after the parameter.
        """
        return [
            (name, tensor)
            for registry in (own.get("_parameters"), own.get("_buffers"))
            if registry
            for name, tensor in registry.items()
            if tensor is not None and not name.startswith(self._prefixes)
        ]

    def _changed_tensor(self, own: Mapping[str, Any]) -> str | None:
        now = {**dict(self._registered(own)), **own}
        for name, ref, version in self._tensors:
            tensor = now.get(name)
            if tensor is None or tensor is not ref() or _version_of(tensor) != version:
                return name
        return None


def _vars(value: Any) -> Mapping[str, Any]:
    """Returns what an object holds: nothing if it is gone or has no attributes."""
    return getattr(value, "__dict__", _NO_ATTRIBUTES)


def _version_of(tensor: torch.Tensor) -> int:
    """Counts how often a tensor has been written to, as far as torch knows."""
    return 0 if tensor.is_inference() else tensor._version


def _is_same(before: object, now: object) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and isinstance(now, _BY_VALUE) and before == now


def _ref(value: Any) -> _Ref:
    """Gives an object for as long as others keep it."""
    try:
        return weakref.ref(value)
    except TypeError:  # a list, a dict, a tuple
        return lambda: value
