"""The form of a fact, and a screen of facts."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WIDTH = 110
"""Characters of a line of the screen."""


@dataclass(frozen=True)
class Fact:
    """One line of the screen.

    Attributes:
        name: Its key in JSON; the screen shows spaces in place of "_".
        value: Its value there.
        text: Its words on the screen; several lines if it has several parts.
        problem: A sentence where something is wrong, else empty.
        is_broken: Whether the problem is one of the installation.
    """

    name: str
    value: Any
    text: str
    problem: str = ""
    is_broken: bool = False


def as_json(facts: Iterable[Fact]) -> dict[str, Any]:
    """Returns the facts by name, and the sentences of all that is wrong."""
    facts = list(facts)
    return {
        **{fact.name: fact.value for fact in facts},
        "problems": [fact.problem for fact in facts if fact.problem],
    }


def as_screen(facts: Iterable[Fact]) -> str:
    """Returns the facts in a column of names and one of texts, and below all that is wrong."""
    facts = list(facts)
    column = max(len(fact.name) for fact in facts) + 2
    lines = []
    for fact in facts:
        name = fact.name.replace("_", " ")
        for line in fact.text.splitlines():
            wrapped = textwrap.wrap(line, WIDTH - column, break_on_hyphens=False) or [""]
            for piece in wrapped:
                lines.append(f"{name:{column}}{piece}")
                name = ""
    for fact in facts:
        if fact.problem:
            lines += ["", *textwrap.wrap(f"! {fact.problem}", WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)
