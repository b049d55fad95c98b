"""The part of the metrics that is the same in every framework."""

import logging
from collections.abc import Iterable, Sequence

from flashmoe_megatron.adapters.experts import LayerExperts
from flashmoe_megatron.backend import Backend
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.telemetry.record import LaunchRecord
from flashmoe_megatron.telemetry.totals import Totals

logger = logging.getLogger("flashmoe_megatron")

FILE_NAME = "flashmoe_metrics.jsonl"
"""The file beside a run that keeps every report."""


def take_records(backends: Iterable[Backend]) -> list[LaunchRecord]:
    """The records of launches that the backends have finished since the last call."""
    return [record for backend in backends for record in backend.take_records()]


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
    """Adds the tokens since the last call.

    Args:
        totals: Holds tokens by layer.
        layers: The layers that are alive.
        counted: The tokens at the last call, by a layer's identity; brought up to date.
    """
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
