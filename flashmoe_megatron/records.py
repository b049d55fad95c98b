"""From the library's record of a launch to the one that telemetry reads."""

from flashmoe_megatron import _native
from flashmoe_megatron.telemetry.record import LaunchRecord, Phase

# flashmoe::Role in csrc/flashmoe/comm/wait.cuh
_LOADER_ROWS, _LOADER_ACT = 6, 7
_PROCESSOR_STAGE, _PROCESSOR_HANDOVER = 9, 10  # the first with what they wait for tiles
_DISPATCH, _DELIVER, _REDUCE, _PLAN, _PROCESS = 36, 37, 38, 39, 40

_WARPS = 12
_PROCESSOR_WARPS = 8
_MOST_NS = 2**32 // _WARPS
"""A CTA counts time in 32 bits, into which all its warps add: of longer launches it may be lost."""


def launch_record(
    record: _native.FlashMoERecord, before: _native.FlashMoERecord, num_ranks: int
) -> LaunchRecord:
    """Takes one launch's share out of counters that run on.

    Phases of a launch that may have been too long to count them are left out, as not measured.

    Args:
        record: The launch's.
        before: That of the launch before, or an empty one.
        num_ranks: Of the group.
    """
    counters, earlier = record.counters, before.counters
    is_known = before.sequence + 1 == record.sequence and (before.epoch or not before.sequence)

    def mean(role: int, warps: int = 1) -> float:
        spent = counters.nanoseconds[role] - earlier.nanoseconds[role]
        return float(spent / (warps * record.num_ctas))

    phases: dict[Phase, float] = {}
    if is_known and record.end_ns - record.begin_ns < _MOST_NS:
        waited = mean(_PROCESSOR_STAGE, _PROCESSOR_WARPS)
        handed = mean(_PROCESSOR_HANDOVER, _PROCESSOR_WARPS)
        processed = mean(_PROCESS, _PROCESSOR_WARPS)
        head = mean(_PLAN)
        phases = {
            Phase.HEAD: head,
            Phase.ROWS_WAIT: mean(_LOADER_ROWS),
            Phase.ACT_WAIT: mean(_LOADER_ACT),
            Phase.STAGE_WAIT: waited,
            Phase.GEMM: processed - waited - handed,
            Phase.EPILOGUE: handed,
            Phase.DISPATCH: mean(_DISPATCH),
            # Busy time of all warps of a CTA; one alone is busy while tiles are computed.
            Phase.DELIVER: mean(_DELIVER, _WARPS),
            Phase.REDUCE: mean(_REDUCE, _WARPS),
            Phase.TAIL: max(0.0, record.end_ns - record.begin_ns - head - processed),
        }
    return LaunchRecord(
        layer=record.layer,
        direction="backward" if record.is_backward else "forward",
        epoch=record.epoch,
        begin_ns=record.begin_ns,
        end_ns=record.end_ns,
        num_ctas=record.num_ctas,
        num_tokens=record.num_tokens,
        num_rows=record.num_rows,
        num_row_blocks=record.num_row_blocks,
        expert_rows=tuple(record.expert_rows[: record.num_experts]),
        rows_pulled=_moved(counters.rows_pulled, earlier.rows_pulled, num_ranks, is_known),
        results_pushed=_moved(counters.results_pushed, earlier.results_pushed, num_ranks, is_known),
        phase_ns=phases,
    )


def _moved(now: list[int], before: list[int], num_ranks: int, is_known: bool) -> tuple[int, ...]:
    if not is_known:
        return ()
    return tuple(now[rank] - before[rank] for rank in range(num_ranks))
