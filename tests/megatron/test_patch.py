"""Replacing a function of somebody else's module or class, once."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from flashmoe_megatron.adapters.patch import original_of, patch


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
