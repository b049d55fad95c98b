"""What the scheduled backend's calls have taken, read once the device has passed them."""

import time
from collections import deque
from collections.abc import Callable

import torch

from flashmoe_megatron.config import count_row_blocks
from flashmoe_megatron.separate.plan import Routes, rows_of_experts
from flashmoe_megatron.streams import Stamp
from flashmoe_megatron.telemetry.record import (
    Direction,
    LaunchRecord,
    Phase,
    read_launch_number,
)

MOST_RECORDS = 4096
"""Records kept for whoever takes them."""


class Laps:
    """Moments of one call, on the device or, on a processor, on the host."""

    def __init__(self, device: torch.device, *, counts: bool) -> None:
        self._device, self._counts = device, counts
        self.moments: list[tuple[str, Stamp]] = []
        self.begin_ns = time.monotonic_ns()
        self.lap("begin")

    def lap(self, name: str) -> None:
        """Gives this moment a name."""
        if self._counts:
            self.moments.append((name, Stamp(self._device)))

    def are_over(self) -> bool:
        """Whether the device has passed the last one."""
        return self.moments[-1][1].has_passed()

    def nanoseconds(self) -> dict[str, int]:
        """Time from one moment to the next, by the later one's name."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return {name: int(b.ns_since(a)) for (_, a), (name, b) in pairs}


class Records:
    """The records of one rank's calls, in order, if any are kept."""

    def __init__(self, rank: int, *, counts: bool) -> None:
        self._rank, self._counts = rank, counts
        self._epoch = 0
        self._unread: deque[tuple[Laps, Callable[[dict[str, int]], LaunchRecord]]] = deque(
            maxlen=MOST_RECORDS
        )

    def begin(self, device: torch.device) -> Laps:
        """Begins a call."""
        return Laps(device, counts=self._counts)

    def end(
        self, laps: Laps, routes: Routes, number: int, direction: Direction, *, num_tokens: int
    ) -> None:
        """Ends a call, whose laps are "plan", "experts", in a backward "weights", and "combine"."""
        if not self._counts:
            return
        self._epoch += 1
        epoch = self._epoch
        layer, is_evaluation, owner = read_launch_number(number)
        from_ranks, to_ranks = routes.from_ranks, routes.host_sent  # no tensor is kept alive
        every = routes.host_received

        def make(ns: dict[str, int]) -> LaunchRecord:
            rows = tuple(rows_of_experts(every))
            pulled = tuple(sum(row) for row in from_ranks)
            sent = [sum(row) for row in to_ranks]
            return LaunchRecord(
                layer=layer,
                direction=direction,
                epoch=epoch,
                begin_ns=laps.begin_ns,
                end_ns=laps.begin_ns + sum(ns.values()),
                num_ctas=1,
                num_tokens=num_tokens,
                num_rows=sum(rows),
                num_row_blocks=count_row_blocks(rows),
                expert_rows=rows,
                rows_pulled=pulled,
                results_pushed=pulled,
                phase_ns={
                    Phase.HEAD: ns["plan"],
                    Phase.STAGE_WAIT: 0,
                    Phase.GEMM: ns["experts"] + ns.get("weights", 0),
                    Phase.TAIL: ns["combine"],
                },
                is_evaluation=is_evaluation,
                owner=owner,
                routes=(sent[self._rank], sum(sent)),
            )

        self._unread.append((laps, make))

    def take(self) -> list[LaunchRecord]:
        """Takes those of the calls that have ended."""
        records = []
        while self._unread and self._unread[0][0].are_over():
            laps, make = self._unread.popleft()
            records.append(make(laps.nanoseconds()))
        return records
