"""The part of the metrics that is the same in every framework."""

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import ClassVar

from flashmoe_megatron.adapters.experts import LayerExperts
from flashmoe_megatron.call import Backend
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.telemetry.record import LaunchRecord
from flashmoe_megatron.telemetry.totals import Totals

logger = logging.getLogger("flashmoe_megatron")

FILE_NAME = "flashmoe_metrics.jsonl"
"""The file that keeps every report of a run."""


MOST_RECORDS = 4096
"""Records kept for layers whose report does not ask."""


class OwnRecords:
    """The records of some layers' launches, whichever layers' report has asked their backends.

    Backends give each record once, and layers may share backends, or backends their records. So
    a report that asks hands each record to all that report the record's layer.

    Args:
        layers: The layers.
    """

    _all: ClassVar[weakref.WeakSet["OwnRecords"]] = weakref.WeakSet()

    def __init__(self, layers: Iterable[LayerExperts]) -> None:
        self._owners = {one.owner for one in layers}
        self._untaken: deque[LaunchRecord] = deque(maxlen=MOST_RECORDS)
        self._all.add(self)

    def take(self, backends: Iterable[Backend]) -> list[LaunchRecord]:
        """Returns what has come since the last call.

        Args:
            backends: The backends of the layers.
        """
        for record in (one for backend in backends for one in backend.take_records()):
            for other in self._all:
                if record.owner in other._owners:
                    other._untaken.append(record)
        taken = list(self._untaken)
        self._untaken.clear()
        return taken


def add_heap(totals: Totals, backends: Iterable[Backend]) -> None:
    """Adds the size of the largest symmetric heap; the reference has none."""
    sizes = [getattr(backend, "heap_bytes", 0) for backend in backends]
    totals.heap_bytes = float(max(sizes, default=0))


def add_crossings(totals: Totals, backends: Iterable[Backend]) -> None:
    """Adds what has crossed between hosts since the last call."""
    for backend in backends:
        if isinstance(backend, HostsBackend):
            crossed = backend.take_crossed()
            totals.crossing_calls += crossed.calls
            totals.crossed_rows += crossed.rows
            totals.crossed_bytes += crossed.bytes
            totals.crossing_ns += crossed.ns


def add_tokens(totals: Totals, layers: Sequence[LayerExperts], counted: dict[int, int]) -> None:
    """Adds the tokens since the last call."""
    for one in layers:
        if one.layer in totals.tokens:
            totals.tokens[one.layer] += one.num_tokens - counted[id(one)]
        counted[id(one)] = one.num_tokens


def warn_without_wandb(error: Exception, kept: object) -> None:
    """Says that wandb does not start, and where flashmoe's metrics are kept."""
    logger.warning(
        "wandb does not start: %s: %s; training goes on without it, and %s has flashmoe's "
        "metrics. WANDB_MODE=offline keeps a run here, for wandb sync",
        type(error).__name__,
        error,
        kept,
    )
