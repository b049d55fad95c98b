"""Keeps the batches of an iteration, so that it can be repeated."""

import copy
from collections.abc import Iterator
from typing import Any


class KeptBatches:
    """An iterator of batches that is read through, and copies of what was read.

    A forward may change its batch in place or move it away. So the iteration reads the batches
    themselves, and a repeat reads copies that were made before.

    Everything else that is asked of it is asked of the iterator.

    Attributes:
        problem: Why a batch has no copy, ``None`` if each has one.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._kept: list[Any] = []
        self.problem: str | None = None

    def __iter__(self) -> Iterator[Any]:
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Reads the next batch, and keeps a copy."""
        batch = next(self._batches)
        if self.problem is None:
            try:
                self._kept.append(copy.deepcopy(batch))
            except Exception as error:  # noqa: BLE001 - whatever a batch of a user's own raises
                self.problem = f"a batch, a {type(batch).__name__}, cannot be copied: {error}"
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def again(self) -> Iterator[Any]:
        """Yields the batches once more, and after them what was not read before."""
        yield from self._kept
        yield from self._batches


def keep_batches(batches: Any) -> Any:
    """Puts iterators in place of Megatron's ``data_iterator``: one, a list of them, or ``None``."""
    if isinstance(batches, list):
        return [keep_batches(each) for each in batches]
    return batches if batches is None else KeptBatches(batches)


def kept_again(batches: Any) -> Any:
    """Returns the iterators of a repeat in place of those of :func:`keep_batches`."""
    if isinstance(batches, list):
        return [kept_again(each) for each in batches]
    return batches if batches is None else batches.again()


def problem_of(batches: Any) -> str | None:
    """Returns why the batches of :func:`keep_batches` cannot be read again."""
    each = batches if isinstance(batches, list) else [batches]
    found = (one.problem for one in each if isinstance(one, KeptBatches))
    return next((problem for problem in found if problem is not None), None)


def is_kept(batches: Any) -> bool:
    """Tells whether :func:`keep_batches` can read what a training loop gives."""
    if isinstance(batches, list):
        return all(map(is_kept, batches))
    return batches is None or hasattr(batches, "__next__")
