"""Replaces functions of other people's modules, once those modules have been imported.

Patches of Megatron are attached this way, so that nothing of Megatron is imported earlier than the
training script itself imports it, and so that this file is cheap enough to load with torch.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]
Function = Callable[..., Any]

_ORIGINAL = "_flashmoe_original"
"""Attribute of a replacement: the function that it was made from."""


def patch(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Puts a replacement in place of a function; does nothing if one of ours is there already.

    The replacement, made from the original, gets its name, docstring and signature.

    Raises:
        AttributeError: The owner, a module or class, has no such function.
    """
    original = getattr(owner, name)
    if original_of(original) is not original:
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _ORIGINAL, original)
    setattr(owner, name, replacement)


def original_of(function: Function) -> Function:
    """The function that :func:`patch` found, or ``function`` itself if it was never patched."""
    original: Function = getattr(function, _ORIGINAL, function)
    return original


def when_imported(name: str, callback: Callback) -> None:
    """Calls ``callback(module)`` right after the code of a module, by its full name, has run.

    It is called at once if the module is already imported; otherwise after its import, before any
    importer sees it, and again where it is imported again. What it raises fails that import.

    The package wrapt offers the same under this name. It is not used because with
    ``FLASHMOE_AUTOLOAD=1`` this file is loaded by every process that imports torch, and a plugin
    that is loaded there must not depend on anything that may be missing.
    """
    module = sys.modules.get(name)
    # A module that is being imported right now is in sys.modules, but not complete.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    _finder().callbacks.setdefault(name, []).append(callback)


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, with a loader that calls back."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.callbacks or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        # A module that is imported again, after its first import has failed, may have its loader.
        if spec is not None and not isinstance(spec.loader, _CallingLoader | None):
            spec.loader = _CallingLoader(spec.loader, self.callbacks[fullname])
        return spec


class _CallingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, callbacks: list[Callback]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def __getattr__(self, name: str) -> object:
        # Tracebacks and torch.jit ask a loader for more, for example get_source.
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback(module)


def _finder() -> _PostImportFinder:
    for finder in sys.meta_path:
        if isinstance(finder, _PostImportFinder):
            return finder
    finder = _PostImportFinder()
    sys.meta_path.insert(0, finder)
    return finder
