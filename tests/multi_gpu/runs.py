"""Runs that are named on the command line, as "learned,slots=2,queues=8"."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, TypeVar

R = TypeVar("R", bound="Named")


class Named:
    """Base of a dataclass: its first field is the name, and the others have defaults.

    Whole numbers, floats and strings can be given; a field whose default is ``None`` cannot.
    """

    @classmethod
    def _options(cls) -> dict[str, Field[Any]]:
        _, *others = fields(cls)  # type: ignore[arg-type]
        return {one.name: one for one in others if one.default is not None}

    @classmethod
    def of(cls: type[R], text: str) -> R:
        """From the name and what differs from the defaults.

        Raises:
            ArgumentTypeError: A name is unknown, or a value is not of its default's type.
        """
        name, *given = text.split(",")
        options = cls._options()
        values = {}
        make: Callable[..., R] = cls
        try:
            for each in given:
                option, _, value = each.partition("=")
                if option not in options:
                    raise ValueError(f"{each}: wanted NAME=VALUE with a name of {[*options]}")
                kind: Callable[[str], object] = type(options[option].default)
                values[option] = kind(value)
            return make(name, **values)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None  # others' words argparse does not show

    def __str__(self) -> str:
        """As :meth:`of` reads it."""
        name = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
        differing = [
            f"{option}={getattr(self, option)}"
            for option, one in self._options().items()
            if getattr(self, option) != one.default
        ]
        return ",".join([name, *differing])
