"""Buffers of made-up launches, packed by hand after ``csrc/flashmoe/ptx/trace.cuh``."""

import struct
from dataclasses import dataclass, field

import numpy as np

WARPS, EVENTS = 12, 1024
HEADER = "<QqII"  # nanoseconds, cycles, count, sm
EVENT = "<Iiqq"  # kind, index, begin, end
ROLES = {
    2: "kDispatchRows",
    3: "kDispatchCopy",
    4: "kLoaderStage",
    6: "kLoaderRows",
    7: "kLoaderAct",
    9: "kProcessorStage",
    10: "kProcessorHandover",
    12: "kFinisherRows",
    13: "kCombineResult",
    14: "kReduceResult",
    32: "kGemm0",
    33: "kGemm1",
    34: "kEpilogue0",
    35: "kEpilogue1",
    36: "kDispatch",
    37: "kDeliver",
    38: "kReduce",
    40: "kProcess",
}
KIND = {name: kind for kind, name in ROLES.items()}


@dataclass
class Warp:
    """What one warp recorded: its header, and events as (kind, index, begin, end) in cycles."""

    nanoseconds: int
    cycles: int
    sm: int
    events: list[tuple[int, int, int, int]] = field(default_factory=list)
    count: int | None = None  # if other than the events here

    def add(self, name: str, begin: int, end: int, index: int = -1) -> None:
        """Adds one event, in cycles since the header's stamp."""
        self.events.append((KIND[name], index, self.cycles + begin, self.cycles + end))


def pack(ctas: list[list[Warp | None]], warps: int = WARPS, events: int = EVENTS) -> np.ndarray:
    """The kernel's buffer, uint8; ``None`` for a warp that did not record."""
    size = struct.calcsize(HEADER) + events * struct.calcsize(EVENT)
    data = bytearray(size * warps * len(ctas))
    for number, cta in enumerate(ctas):
        for place, warp in enumerate(cta):
            if warp is None:
                continue
            at = (number * warps + place) * size
            count = len(warp.events) if warp.count is None else warp.count
            struct.pack_into(HEADER, data, at, warp.nanoseconds, warp.cycles, count, warp.sm)
            at += struct.calcsize(HEADER)
            for event in warp.events[:events]:
                struct.pack_into(EVENT, data, at, *event)
                at += struct.calcsize(EVENT)
    return np.frombuffer(bytes(data), dtype=np.uint8)


def made_up_launch(
    num_ctas: int, *, start_ns: int, rate: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """A launch with every role at work, and the one after it.

    Args:
        num_ctas: One per SM.
        start_ns: %globaltimer when it begins.
        rate: Cycles per ns of all SMs.
        seed: Decides the small differences between CTAs.

    Returns:
        Both buffers.
    """
    rng = np.random.default_rng(seed)
    launches = []
    zero = rng.integers(1_000_000, 2_000_000, num_ctas)  # each SM's clock has a zero of its own
    for begin_ns in (start_ns, start_ns + 900_000):
        ctas = []
        for cta in range(num_ctas):
            delay = int(rng.integers(0, 3_000))
            stamp = begin_ns + delay
            cycles = int(zero[cta] + (stamp - start_ns) * rate)
            ctas.append(_cta(rng, stamp, cycles, sm=cta))
        launches.append(pack(ctas))
    return launches[0], launches[1]


def _cta(rng: np.random.Generator, stamp: int, cycles: int, sm: int) -> list[Warp | None]:
    warps = [Warp(stamp, cycles, sm) for _ in range(WARPS)]
    loader, dispatch, finishers, processors = warps[0], warps[1], warps[2:4], warps[4:]
    head = int(rng.integers(40_000, 70_000))
    dispatch.add("kDispatchRows", 5_000, 20_000)
    for at in range(20_000, 500_000, 6_000):
        dispatch.add("kDispatchCopy", at, at + 4_000)
    dispatch.add("kDispatch", 20_000, 500_000)
    loader.add("kLoaderRows", 30_000, head, 3)
    at = head
    for tile in range(17):
        name = "kGemm0" if tile % 2 == 0 else "kGemm1"
        length = int(rng.integers(38_000, 42_000))
        for at_stage in range(at, at + length - 4_000, 8_000):
            loader.add("kLoaderStage", at_stage, at_stage + 3_000)
        for processor in processors:
            processor.add("kProcessorStage", at + 10_000, at + 12_000)
            processor.add(name, at, at + length, tile)
            processor.add("kProcessorHandover", at + length, at + length + 2_000)
        for finisher in finishers:
            finisher.add("kFinisherRows", at + (12_000 if tile else 0), at + length)
            finisher.add(f"kEpilogue{tile % 2}", at + length, at + length + 12_000, tile)
        at += length + 2_000
    end = at + int(rng.integers(10_000, 40_000))
    for warp in (loader, dispatch, *finishers, *processors):
        first = 520_000 if warp is dispatch else at + 12_000
        warp.add("kCombineResult", first + 1_000, first + 4_000)
        warp.add("kDeliver", first, end + 14_000)
        warp.add("kReduceResult", end + 16_000, end + 20_000)
        warp.add("kReduce", end + 14_000, end + 40_000)
    for processor in processors:
        processor.add("kProcess", head, at)
    return list(warps)
