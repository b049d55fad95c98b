"""Turns the library's record of a launch into the record that telemetry reads."""

from enum import IntEnum

from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.telemetry.record import (
    LaunchRecord,
    Phase,
    ReplicaRecord,
    read_launch_number,
)


class Span(IntEnum):
    """Work that a warp's time goes to: spans of csrc/flashmoe/comm/kinds.cuh that counters add up.

    The library counts by these numbers; tests compare them with the header's.
    """

    PLAN = 0
    DISPATCH = 1
    PROCESS = 2
    FINISH = 3
    DELIVER = 4
    REDUCE = 5
    ROWS_WAIT = 6
    ACT_WAIT = 7
    STAGE_WAIT = 8
    HANDOVER_WAIT = 9
    RESULT_WAIT = 10
    SHARE_WAIT = 11


WARPS = 12
"""Warps of a CTA."""
PROCESSOR_WARPS = 8
"""Warps of a CTA that multiply."""
_REPLICA_WORDS = 4
"""A record's words on replicas and routes, besides the rows and experts of the spare slots."""
_MOST_NS = 2**32 // WARPS
"""The longest launch whose times are known: all warps of a CTA add theirs into words of 32 bits."""


def launch_record(
    record: bindings.FlashMoERecord, before: bindings.FlashMoERecord, num_ranks: int
) -> LaunchRecord:
    """Takes one launch's share out of counters that run on, by the record before it.

    Phases of a launch that may have been too long to count them are left out, as not measured.
    """
    counters, earlier = record.counters, before.counters
    is_known = before.sequence + 1 == record.sequence and (before.epoch or not before.sequence)

    def mean(span: Span, warps: int = 1) -> float:
        spent = counters.nanoseconds[span] - earlier.nanoseconds[span]
        return float(spent / (warps * record.num_ctas))

    phases: dict[Phase, float] = {}
    if is_known and record.end_ns - record.begin_ns < _MOST_NS:
        waited = mean(Span.STAGE_WAIT, PROCESSOR_WARPS)
        handed = mean(Span.HANDOVER_WAIT, PROCESSOR_WARPS)
        processed = mean(Span.PROCESS, PROCESSOR_WARPS)
        head = mean(Span.PLAN)
        phases = {
            Phase.HEAD: head,
            Phase.ROWS_WAIT: mean(Span.ROWS_WAIT),
            Phase.ACT_WAIT: mean(Span.ACT_WAIT),
            Phase.STAGE_WAIT: waited,
            Phase.GEMM: processed - waited - handed,
            Phase.EPILOGUE: handed,
            Phase.DISPATCH: mean(Span.DISPATCH),
            # All warps of a CTA deliver and reduce at the end, and one while tiles are computed.
            Phase.DELIVER: mean(Span.DELIVER, WARPS),
            Phase.REDUCE: mean(Span.REDUCE, WARPS),
            Phase.TAIL: max(0.0, record.end_ns - record.begin_ns - head - processed),
        }
    layer, is_evaluation, owner = read_launch_number(record.layer)
    spare = record.spare_slots
    counts = record.expert_rows[: record.num_counts]
    num_experts = record.num_counts - (2 * spare + _REPLICA_WORDS if spare else 0)
    is_backward = bool(record.is_backward)
    return LaunchRecord(
        layer=layer,
        direction="backward" if is_backward else "forward",
        epoch=record.epoch,
        begin_ns=record.begin_ns,
        end_ns=record.end_ns,
        num_ctas=record.num_ctas,
        num_tokens=record.num_tokens,
        num_rows=record.num_rows,
        num_row_blocks=record.num_row_blocks,
        expert_rows=tuple(counts[:num_experts]),
        rows_pulled=_moved(counters.rows_pulled, earlier.rows_pulled, num_ranks, is_known),
        results_pushed=_moved(counters.results_pushed, earlier.results_pushed, num_ranks, is_known),
        phase_ns=phases,
        is_evaluation=is_evaluation,
        owner=owner,
        routes=(counts[-2], counts[-1]) if spare and not is_backward else None,
        replicas=_replicas(counts[num_experts:-2], spare, is_backward) if spare else None,
    )


def _replicas(counts: list[int], spare_slots: int, is_backward: bool) -> ReplicaRecord:
    """The record of spare slots, from their rows, their experts, and the size of a replica."""
    experts = counts[spare_slots : 2 * spare_slots]
    rows = tuple((expert, n) for expert, n in zip(experts, counts, strict=False) if expert >= 0)
    num_replicas, elements = counts[2 * spare_slots :]
    moved = 2 * len(rows) + (4 * num_replicas if is_backward else 0)
    return ReplicaRecord(rows, 64 * elements * moved)


def _moved(now: list[int], before: list[int], num_ranks: int, is_known: bool) -> tuple[int, ...]:
    if not is_known:
        return ()
    return tuple(now[rank] - before[rank] for rank in range(num_ranks))
