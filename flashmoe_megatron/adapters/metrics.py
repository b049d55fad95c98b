"""The part of the metrics that is the same in every framework."""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
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


class Figures:
    """Collects for a report what its layers and their backends count, as long as the layers live.

    Backends give each record once, and layers may share backends, or backends their records. So a
    report that asks hands each record to all that report the record's layer. Without ``backends``,
    which gives them at each call, it asks the layers' own.
    """

    _all: ClassVar[weakref.WeakSet["Figures"]] = weakref.WeakSet()

    def __init__(
        self,
        layers: Iterable[LayerExperts],
        backends: Callable[[], Iterable[Backend]] | None = None,
    ) -> None:
        self._layers = weakref.WeakSet(layers)
        self._backends = backends
        self._owners = {one.owner for one in self._layers}
        self._tokens = {id(one): one.num_tokens for one in self._layers}
        self._untaken: deque[LaunchRecord] = deque(maxlen=MOST_RECORDS)
        self._all.add(self)

    def take_records(self) -> list[LaunchRecord]:
        """Returns the records that have come since the last call."""
        for record in (one for backend in self._living() for one in backend.take_records()):
            for other in self._all:
                if record.owner in other._owners:
                    other._untaken.append(record)
        taken = list(self._untaken)
        self._untaken.clear()
        return taken

    @classmethod
    def forget_records(cls) -> None:
        """Drops the records that no report has taken, in favour of launches that come again."""
        for figures in cls._all:
            figures.take_records()

    def annotate(self, totals: Totals) -> None:
        """Adds the largest symmetric heap, and tokens and crossings since the last call."""
        backends = self._living()
        sizes = [getattr(backend, "heap_bytes", 0) for backend in backends]
        totals.heap_bytes = float(max(sizes, default=0))
        for backend in backends:
            if isinstance(backend, HostsBackend):
                crossed = backend.take_crossed()
                totals.crossing_calls += crossed.calls
                totals.crossed_rows += crossed.rows
                totals.crossed_bytes += crossed.bytes
                totals.crossing_ns += crossed.ns
        for one in self._layers:
            if one.layer in totals.tokens:
                totals.tokens[one.layer] += one.num_tokens - self._tokens[id(one)]
            self._tokens[id(one)] = one.num_tokens

    def _living(self) -> list[Backend]:
        if self._backends is not None:
            return list(self._backends())
        return list({id(one.backend): one.backend for one in self._layers}.values())


def warn_without_wandb(error: Exception, kept: object) -> None:
    """Says that wandb does not start, and where flashmoe's metrics are kept."""
    logger.warning(
        "wandb does not start: %s: %s; training goes on without it, and %s has flashmoe's "
        "metrics. WANDB_MODE=offline keeps a run here, for wandb sync",
        type(error).__name__,
        error,
        kept,
    )
