"""Distributed mixture-of-experts in one persistent GPU kernel.

The public names are those of ``__init__.pyi``, where type checkers find them, too. Each is imported
when it is first used, so that importing the package costs nothing and needs no torch.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

_HOME = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
"""The module of each public name."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(str(_HOME[name])), name)


def __dir__() -> list[str]:
    return list(__all__)
