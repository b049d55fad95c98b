"""Keeps alive what CUDA graphs have captured, since a replay uses the same addresses again."""

import torch


class Captured:
    """What launches read, as far as some CUDA graph may have captured it.

    Nobody tells when a graph is gone, so that nothing is given up.

    Attributes:
        has_heap: Whether some graph has captured a launch on the group's present heap.
    """

    def __init__(self) -> None:
        self.has_heap = False
        self._kept: list[tuple[object, ...]] = []

    def note_launch(self) -> None:
        """Notes whether the launch that comes next on the current stream is captured."""
        self.has_heap = self.has_heap or torch.cuda.is_current_stream_capturing()

    def keep(self, *objects: object) -> None:
        """Keeps objects, if graphs have captured launches on this heap or on an earlier one."""
        self.note_launch()
        if self.has_heap or self._kept:
            self._kept.append(objects)
