"""Counts the routes that DeepSpeed's gates chose and kept, which no record of a launch tells."""

from collections.abc import Sequence

import torch


class RouteCounter:
    """Counts the routes of one layer on the device, without waiting for it.

    Attributes:
        is_read: Whether somebody reads the counts.
        is_training: Whether the layer is being trained now; nothing else is counted.
        counts: ``[2]`` int64, routes that the router chose so far, and how many of them were kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_read = False
        self.is_training = True
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    @torch.no_grad()
    def count(self, per_expert: torch.Tensor, expert_idx: torch.Tensor) -> None:
        """Adds one call's routes.

        Args:
            per_expert: ``[num_experts]``, this rank's routes before dropping.
            expert_idx: Each route's expert, -1 where it was dropped.
        """
        if self.is_read and self.is_training:
            self.counts += torch.stack((per_expert.sum(), (expert_idx >= 0).sum()))


class RouteReader:
    """Reads the counters of all layers; on a GPU a reading late, so that the host never waits."""

    def __init__(self, counters: Sequence[RouteCounter]) -> None:
        self._counters = counters
        self._seen = [0, 0]
        self._copy: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        for counter in counters:
            counter.is_read = True

    def read(self) -> tuple[int, int]:
        """Routes chosen and kept since the last reading, as far as they are known."""
        if self._copied is None or self._copied.query():  # type: ignore[no-untyped-call]
            arrived, self._copy = self._copy, self._start()
            if self._copied is None:  # without a GPU the copy is there already
                arrived = self._copy
        else:
            arrived = None
        if arrived is None:
            return 0, 0
        seen, self._seen = self._seen, arrived.tolist()
        return self._seen[0] - seen[0], self._seen[1] - seen[1]

    def _start(self) -> torch.Tensor:
        if not self._counters:
            return torch.zeros(2, dtype=torch.int64, device="cpu")
        total = torch.stack([counter.counts for counter in self._counters]).sum(0)
        if total.device.type != "cuda":
            return total
        copy = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=True)
        copy.copy_(total, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
        return copy
