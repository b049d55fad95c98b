"""Keeps alive what CUDA graphs have captured, since a replay uses the same addresses again."""

import contextlib
from collections.abc import Callable, Iterator

import torch

Drop = Callable[[], None]

_drop: Drop | None = None
"""Drops the graphs that are being captured, if somebody can."""


@contextlib.contextmanager
def dropped_by(drop: Drop) -> Iterator[None]:
    """Says who can drop the graphs that are captured within.

    ``drop`` makes a replay of them an error, and has them captured again when they are needed.
    """
    global _drop
    before, _drop = _drop, drop
    try:
        yield
    finally:
        _drop = before


class Captured:
    """Memory that launches read, as far as some CUDA graph may have captured it.

    CUDA does not report when a graph is gone, so that nothing is given up before the process
    group's end; and then only if all graphs can be dropped.
    """

    def __init__(self) -> None:
        self.has_heap = False
        self._kept: list[tuple[object, ...]] = []
        self._drops: dict[Drop, None] = {}
        self._can_drop = True

    def note_launch(self) -> None:
        """Notes whether the launch that comes next on the current stream is captured."""
        if torch.cuda.is_current_stream_capturing():
            self.has_heap = True
            if _drop is None:
                self._can_drop = False
            else:
                self._drops[_drop] = None

    def keep(self, *objects: object) -> None:
        """Keeps objects that a launch reads which a graph captures, or has captured."""
        self._kept.append(objects)

    def keep_left(self, *objects: object) -> None:
        """Keeps objects that lose their owner, if graphs have captured launches on some heap."""
        if self.has_heap or self._kept:
            self._kept.append(objects)

    def end(self) -> bool:
        """Drops the graphs, whose launches would wait for ranks that have left.

        Returns whether no graph is left, so that nothing is kept any more.
        """
        for drop in self._drops:
            drop()
        self._drops.clear()
        if self._can_drop:
            self.has_heap = False
            self._kept.clear()
        return self._can_drop
