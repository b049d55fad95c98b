"""Records the times of calls, which are read once the device has passed them."""

import time
from collections import deque
from collections.abc import Callable

import torch

from flashmoe_megatron.config import MoEConfig, count_row_blocks
from flashmoe_megatron.replicas.placement import Placement
from flashmoe_megatron.separate.plan import Routes, rows_of_experts
from flashmoe_megatron.streams import Stamp
from flashmoe_megatron.telemetry.record import (
    Direction,
    LaunchRecord,
    Phase,
    ReplicaRecord,
    read_launch_number,
)

MOST_RECORDS = 4096
"""Records that are kept until a caller takes them."""


IN_PARTS = frozenset({"begin", "plan", "parts", "weights", "combine"})
"""The moments of a call whose parts overlap."""
IN_TURN = IN_PARTS | {"dispatch", "products"}
"""The moments of a call without overlap."""


class Laps:
    """Moments of one call, on the device or, on a processor, on the host."""

    def __init__(self, device: torch.device, names: frozenset[str]) -> None:
        """Begins a call on a device, and keeps its moments of these names."""
        self._device, self._names = device, names
        self.moments: list[tuple[str, Stamp]] = []
        self.begin_ns = time.monotonic_ns()
        self.lap("begin")

    def lap(self, name: str) -> None:
        """Gives this moment a name."""
        if name in self._names:
            self.moments.append((name, Stamp(self._device)))

    def are_over(self) -> bool:
        """Returns whether the device has passed the last one."""
        return self.moments[-1][1].has_passed()

    def nanoseconds(self) -> dict[str, int]:
        """Time from one moment to the next, by the later one's name."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return {name: int(b.ns_since(a)) for (_, a), (name, b) in pairs}


class Records:
    """The records of one rank's calls, in order, if any are kept."""

    def __init__(self, config: MoEConfig, rank: int, names: frozenset[str]) -> None:
        """Begins without any record, and keeps none where no moments of calls are named.

        The names are :data:`IN_PARTS` or :data:`IN_TURN`.
        """
        self._config, self._rank, self._names = config, rank, names
        self._epoch = 0
        self._unread: deque[tuple[Laps, Callable[[dict[str, int]], LaunchRecord]]] = deque(
            maxlen=MOST_RECORDS
        )

    def begin(self, device: torch.device) -> Laps:
        """Begins a call."""
        return Laps(device, self._names)

    def end(
        self,
        laps: Laps,
        routes: Routes,
        number: int,
        direction: Direction,
        *,
        num_tokens: int,
        placement: Placement | None = None,
        replica_bytes: int = 0,
    ) -> None:
        """Ends a call, whose number is the caller's.

        ``num_tokens`` are this rank's. ``placement`` is ``None`` where there are no spare slots,
        and ``replica_bytes`` have come for replicas or from them.
        """
        if not self._names:
            return
        self._epoch += 1
        epoch = self._epoch
        layer, is_evaluation, owner = read_launch_number(number)
        from_ranks, to_ranks = routes.from_ranks, routes.host_sent  # no tensor is kept alive
        every, local = routes.host_received, self._config.num_local_experts

        def make(ns: dict[str, int]) -> LaunchRecord:
            rows = tuple(rows_of_experts(every))
            replicas = None
            if placement is not None:
                held = zip(placement.hosts[self._rank], rows[local:], strict=True)
                replicas = ReplicaRecord(rows=tuple(held), num_bytes=replica_bytes)
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
                expert_rows=rows[:local],
                rows_pulled=pulled,
                results_pushed=pulled,
                phase_ns=_phases(ns),
                is_evaluation=is_evaluation,
                owner=owner,
                routes=(sent[self._rank], sum(sent)),
                replicas=replicas,
            )

        self._unread.append((laps, make))

    def take(self) -> list[LaunchRecord]:
        """Takes those of the calls that have ended."""
        records = []
        while self._unread and self._unread[0][0].are_over():
            laps, make = self._unread.popleft()
            records.append(make(laps.nanoseconds()))
        return records


def _phases(ns: dict[str, int]) -> dict[Phase, int]:
    """Names the time between moments; that of an exchange only where nothing overlaps it."""
    weights = ns.get("weights", 0)
    if "dispatch" not in ns:
        return {
            Phase.HEAD: ns["plan"],
            Phase.STAGE_WAIT: 0,
            Phase.GEMM: ns["parts"] + weights,
            Phase.TAIL: ns["combine"],
        }
    back = ns["parts"] + ns["combine"]
    return {
        Phase.HEAD: ns["plan"] + ns["dispatch"],
        Phase.ROWS_WAIT: ns["dispatch"],
        Phase.STAGE_WAIT: 0,
        Phase.GEMM: ns["products"] + weights,
        Phase.DISPATCH: ns["dispatch"],
        Phase.DELIVER: back,
        Phase.TAIL: back,
    }
