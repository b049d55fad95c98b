"""Turns bytes into choices, so that hypothesis and libFuzzer can drive the same targets."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EDGES = tuple(
    sorted(
        {
            sign * (2**power + offset)
            for power in (0, 1, 4, 6, 7, 8, 9, 15, 16, 20, 24, 30, 31, 32, 53, 62, 63, 64)
            for offset in (-64, -1, 0, 1, 64)
            for sign in (-1, 1)
        }
    )
)
"""Whole numbers around which something may wrap."""


class Choices:
    """Reads bytes from the front; past their end every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integer(self, num_bytes: int) -> int:
        """An unsigned number of that many bytes."""
        taken = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return int.from_bytes(taken, "little")

    def flag(self) -> bool:
        return bool(self.integer(1) & 1)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(2) % len(options)]

    def number(self) -> int:
        """Any whole number: small, at an edge, or of up to 9 bytes and either sign."""
        kind = self.integer(1) % 4
        if kind == 0:
            return self.integer(1)
        if kind == 1:
            return self.pick(EDGES)
        value = self.integer(1 + self.integer(1) % 9)
        return value if kind == 2 else -value

    def text(self) -> str:
        """Up to 15 characters, mostly of ASCII."""
        length = self.integer(1) % 16
        taken = self._data[self._at : self._at + length]
        self._at += length
        return taken.decode("utf-8", errors="replace")
