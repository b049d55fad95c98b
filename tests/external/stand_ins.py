"""Lets a framework be imported without packages that it imports and that a test does not need."""

import abc
import importlib.abc
import importlib.machinery
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class _Anything(abc.ABCMeta):
    """Makes classes that have every attribute, each such a class; one in lower case decorates."""

    def __getattr__(cls, name: str) -> Any:
        return _named(cls, cls.__module__, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__[0].isupper():
            return super().__call__()
        return args[0] if len(args) == 1 and callable(args[0]) else lambda function: function


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _named(self, self.__name__, name)


def _named(owner: Any, module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = _Anything(name, (torch.nn.Module,), {"__module__": module})
    setattr(owner, name, made)
    return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of these names and below, whatever is imported from them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def say_installed(distribution: str, version: str) -> None:
    """Gives importlib.metadata a release of a distribution that is not installed."""
    folder = Path(tempfile.mkdtemp())
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    sys.path.append(str(folder))
