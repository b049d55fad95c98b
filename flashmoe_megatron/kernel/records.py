"""From the library's record of a launch to the one that telemetry reads."""

from enum import IntEnum

from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.telemetry.record import LaunchRecord, Phase, read_launch_number


class Role(IntEnum):
    """Those of flashmoe::Role in csrc/flashmoe/comm/wait.cuh that phases are made of."""

    LOADER_ROWS = 6
    LOADER_ACT = 7
    PROCESSOR_STAGE = 9  # with what they wait for tiles
    PROCESSOR_HANDOVER = 10
    DISPATCH = 36
    DELIVER = 37
    REDUCE = 38
    PLAN = 39
    PROCESS = 40


WARPS = 12  # of a CTA
PROCESSOR_WARPS = 8
_MOST_NS = 2**32 // WARPS
"""A CTA counts time in 32 bits, into which all its warps add: of longer launches it may be lost."""


def launch_record(
    record: bindings.FlashMoERecord, before: bindings.FlashMoERecord, num_ranks: int
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

    def mean(role: Role, warps: int = 1) -> float:
        spent = counters.nanoseconds[role] - earlier.nanoseconds[role]
        return float(spent / (warps * record.num_ctas))

    phases: dict[Phase, float] = {}
    if is_known and record.end_ns - record.begin_ns < _MOST_NS:
        waited = mean(Role.PROCESSOR_STAGE, PROCESSOR_WARPS)
        handed = mean(Role.PROCESSOR_HANDOVER, PROCESSOR_WARPS)
        processed = mean(Role.PROCESS, PROCESSOR_WARPS)
        head = mean(Role.PLAN)
        phases = {
            Phase.HEAD: head,
            Phase.ROWS_WAIT: mean(Role.LOADER_ROWS),
            Phase.ACT_WAIT: mean(Role.LOADER_ACT),
            Phase.STAGE_WAIT: waited,
            Phase.GEMM: processed - waited - handed,
            Phase.EPILOGUE: handed,
            Phase.DISPATCH: mean(Role.DISPATCH),
            # Busy time of all warps of a CTA; one alone is busy while tiles are computed.
            Phase.DELIVER: mean(Role.DELIVER, WARPS),
            Phase.REDUCE: mean(Role.REDUCE, WARPS),
            Phase.TAIL: max(0.0, record.end_ns - record.begin_ns - head - processed),
        }
    layer, is_evaluation = read_launch_number(record.layer)
    return LaunchRecord(
        layer=layer,
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
        is_evaluation=is_evaluation,
    )


def _moved(now: list[int], before: list[int], num_ranks: int, is_known: bool) -> tuple[int, ...]:
    if not is_known:
        return ()
    return tuple(now[rank] - before[rank] for rank in range(num_ranks))
