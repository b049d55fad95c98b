"""Replacing a function of somebody else's module or class, once."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashmoe_megatron.adapters.patch import original_of, patch, when_imported


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: 2 * original(*args)


def test_a_function_is_replaced_once() -> None:
    module = ModuleType("somebodys")
    module.answer = answer = lambda: 21  # type: ignore[attr-defined]
    answer.__doc__ = "Answers."
    for _ in range(2):
        patch(module, "answer", doubled)
    assert module.answer() == 42
    assert module.answer.__doc__ == "Answers."
    assert original_of(module.answer) is answer
    assert original_of(answer) is answer


def test_methods_are_replaced_in_place() -> None:
    class Theirs:
        def size(self, more: int) -> int:
            return 1 + more

    theirs = Theirs()
    patch(Theirs, "size", doubled)
    assert theirs.size(4) == 10


def test_a_missing_function_is_an_error() -> None:
    with pytest.raises(AttributeError, match="answer"):
        patch(ModuleType("somebodys"), "answer", doubled)


def test_an_import_that_failed_is_patched_when_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "somebodys_module.py").write_text("def answer():\n    return 21\n")
    monkeypatch.syspath_prepend(tmp_path)
    failures = [RuntimeError("not yet")]

    def fails_once(_: ModuleType) -> None:
        if failures:
            raise failures.pop()

    when_imported("somebodys_module", fails_once)
    when_imported("somebodys_module", lambda module: patch(module, "answer", doubled))
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module("somebodys_module")
    module = importlib.import_module("somebodys_module")
    assert module.answer() == 42
    for _ in range(2):
        assert importlib.reload(module).answer() == 42
    assert type(module.__spec__.loader.__dict__["_loader"]) is not type(module.__spec__.loader)
