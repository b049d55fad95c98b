"""One time axis for all SMs of all ranks.

Events are stamped with their SM's clock. Every warp's first stamp holds the SM's clock and the
GPU's %globaltimer of one moment; those of two launches in a row give the rate of the first. The
globaltimers of the GPUs of one host agree unless the host's clock proves that they do not.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.timeline.records import LaunchTrace, RankTrace, TraceError


@dataclass(frozen=True)
class Events:
    """One rank's events on the common axis.

    Attributes:
        cta, warp: ``[events]`` int, whose.
        kind: ``[events]`` uint8.
        index: ``[events]`` int32.
        begin, end: ``[events]`` float64, microseconds since the launch's first stamp on any rank.
        first: ``[CTAs]`` float64, each CTA's first stamp on that axis.
        sm: ``[CTAs]`` int.
    """

    cta: NDArray[np.int64]
    warp: NDArray[np.int64]
    kind: NDArray[np.uint8]
    index: NDArray[np.int32]
    begin: NDArray[np.float64]
    end: NDArray[np.float64]
    first: NDArray[np.float64]
    sm: NDArray[np.int64]


def cycles_per_ns(trace: RankTrace) -> float:
    """The SMs' clock rate during the launch, from the same SMs' stamps in this and the next.

    Raises:
        TraceError: No SM has stamps in both launches, or they go backwards.
    """
    origin = _first_stamp(trace)
    first = _stamps_by_sm(trace.nanoseconds, trace.cycles, trace.sm, origin)
    following = _stamps_by_sm(trace.next_nanoseconds, trace.next_cycles, trace.next_sm, origin)
    rates = [
        (following[sm][1] - first[sm][1]) / (following[sm][0] - first[sm][0])
        for sm in first.keys() & following.keys()
        if following[sm][0] > first[sm][0]
    ]
    if not rates:
        raise TraceError("no SM has stamps in this launch and the following one")
    rate = float(np.median(rates))
    if rate <= 0:
        raise TraceError(f"the SMs' clocks run at {rate:g} cycles per ns")
    return rate


def rank_offsets_ns(launch: LaunchTrace) -> list[int]:
    """Finds what to subtract from each rank's globaltimer so that all agree with rank 0's.

    Each rank's timer is known against the host's clock within an interval. Where two intervals
    overlap, the timers may agree, and are taken to; where they do not, the middles differ by more
    than can be an error, and are made equal.
    """
    low, high = map(int, launch.ranks[0].host_offset_ns)
    offsets = []
    for trace in launch.ranks:
        other_low, other_high = map(int, trace.host_offset_ns)
        may_agree = max(low, other_low) <= min(high, other_high)
        offsets.append(0 if may_agree else (other_low + other_high - low - high) // 2)
    return offsets


def on_common_axis(launch: LaunchTrace) -> list[Events]:
    """All ranks' events on one axis."""
    offsets = rank_offsets_ns(launch)
    # Whole numbers until the origin is subtracted: nanoseconds since 1970 do not fit a float.
    origin = min(
        _first_stamp(trace) - offset for trace, offset in zip(launch.ranks, offsets, strict=True)
    )
    found = []
    for trace, offset in zip(launch.ranks, offsets, strict=True):
        rate = cycles_per_ns(trace)
        # The globaltimer ticks coarsely; the warps of an SM share its clock, so their median is
        # finer than any one stamp.
        recorded = trace.nanoseconds > 0
        stamp_ns = trace.nanoseconds.astype(np.int64) - (origin + offset)
        zero = np.where(recorded, stamp_ns - trace.cycles / rate, np.nan)
        zero_of_cta = np.nanmedian(zero, axis=1)
        flat = trace.warp.astype(np.int64)
        warps = trace.nanoseconds.shape[1]
        cta = flat // warps
        begin_cycles = trace.cycles.ravel()[flat] + trace.begin
        begin = (begin_cycles / rate + zero_of_cta[cta]) / 1e3
        first = np.nanmin(
            np.where(recorded, trace.cycles / rate + zero_of_cta[:, None], np.nan), axis=1
        )
        found.append(
            Events(
                cta=cta,
                warp=flat % warps,
                kind=trace.kind,
                index=trace.index,
                begin=begin,
                end=begin + trace.duration / rate / 1e3,
                first=first / 1e3,
                sm=trace.sm[:, 0].astype(np.int64),
            )
        )
    return found


def _first_stamp(trace: RankTrace) -> int:
    return int(trace.nanoseconds[trace.nanoseconds > 0].min())


def _stamps_by_sm(
    nanoseconds: NDArray[np.uint64],
    cycles: NDArray[np.int64],
    sm: NDArray[np.uint32],
    origin: int,
) -> dict[int, tuple[float, float]]:
    """Mean moment of every SM's first stamps, in ns since the origin and in cycles."""
    recorded = nanoseconds > 0
    since = nanoseconds.astype(np.int64) - origin
    return {
        int(which): (
            float(since[recorded & (sm == which)].mean()),
            float(cycles[recorded & (sm == which)].mean()),
        )
        for which in np.unique(sm[recorded])
    }
