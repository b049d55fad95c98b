"""From the library's records of launches to what telemetry reads."""

import re
from pathlib import Path

import pytest

from flashmoe_megatron.config import TILE_M
from flashmoe_megatron.kernel import bindings, records
from flashmoe_megatron.kernel.backend import CLUSTER_SIZE
from flashmoe_megatron.telemetry.record import LaunchRecord, Phase, ReplicaRecord
from tools.timeline.records import KINDS_HEADER, enumerators

CSRC = Path(__file__).resolve().parents[2] / "csrc" / "flashmoe"
SPANS = enumerators(KINDS_HEADER.read_text(), "Span")


def constant(name: str) -> int:
    """A number of the machine, as the kernel's sources define it."""
    text = (CSRC / "base" / "hopper.cuh").read_text()
    (found,) = re.findall(rf"^constexpr int {name} = (\d+);", text, re.M)
    return int(found)


NUM_CTAS = 4
NUM_WARPS = constant("kLayerThreads") // 32
NUM_PROCESSOR_WARPS = constant("kNumProcessors") * constant("kProcessorWarps")
WRAP_NS = 2**32


def test_numbers_are_the_kernels() -> None:
    assert (records.WARPS, records.PROCESSOR_WARPS) == (NUM_WARPS, NUM_PROCESSOR_WARPS)
    assert (constant("BLOCK_M"), constant("kClusterSize")) == (TILE_M, CLUSTER_SIZE)
    names = ["k" + span.name.title().replace("_", "") for span in records.Span]
    assert names == SPANS[: bindings.NUM_SPANS]
    assert [span.value for span in records.Span] == list(range(bindings.NUM_SPANS))


def record_after(before: bindings.FlashMoERecord, duration_ns: int) -> LaunchRecord:
    """The record of a backward whose CTAs count as the kernel does, in words of 32 bits that wrap.

    Processors are busy for half of it and wait for operands for a quarter; all warps deliver for a
    third.
    """
    record = bindings.FlashMoERecord(
        sequence=before.sequence + 1,
        epoch=before.epoch + 1,
        is_backward=1,
        num_ctas=NUM_CTAS,
        begin_ns=10**18,
        end_ns=10**18 + duration_ns,
        counters=before.counters,
    )
    for span, warps, busy_ns in (
        ("kProcess", NUM_PROCESSOR_WARPS, duration_ns // 2),
        ("kStageWait", NUM_PROCESSOR_WARPS, duration_ns // 4),
        ("kDeliver", NUM_WARPS, duration_ns // 3),
    ):
        counted = NUM_CTAS * (warps * busy_ns % WRAP_NS)
        record.counters.nanoseconds[SPANS.index(span)] += counted
    record.counters.rows_pulled[1] += 7
    return records.launch_record(record, before, num_ranks=2)


@pytest.fixture
def before() -> bindings.FlashMoERecord:
    record = bindings.FlashMoERecord(sequence=5, epoch=9)
    for span in range(bindings.NUM_SPANS):
        record.counters.nanoseconds[span] = 3 * WRAP_NS + span
    record.counters.rows_pulled[1] = 100
    return record


@pytest.mark.parametrize("duration_ns", [1_000_000, WRAP_NS // NUM_WARPS - 1])
def test_phases_are_means_over_ctas(before: bindings.FlashMoERecord, duration_ns: int) -> None:
    one = record_after(before, duration_ns)
    wanted = {
        Phase.STAGE_WAIT: duration_ns / 4,
        Phase.GEMM: duration_ns / 4,
        Phase.DELIVER: duration_ns / 3,
        Phase.TAIL: duration_ns / 2,
    }
    for phase in Phase:
        assert one.phase_ns[phase] == pytest.approx(wanted.get(phase, 0), abs=1), phase


@pytest.mark.parametrize("duration_ns", [WRAP_NS // NUM_WARPS, 2 * 10**9])
def test_a_launch_too_long_to_count_has_no_phases(
    before: bindings.FlashMoERecord, duration_ns: int
) -> None:
    """As a backward that waits for a late peer: what counters lost would look like a tail."""
    one = record_after(before, duration_ns)
    assert one.phase_ns == {}
    assert one.duration_ns == duration_ns
    assert one.rows_pulled == (0, 7), "rows are counted one by one"


@pytest.mark.parametrize("is_backward", [False, True])
def test_words_of_replicas_and_routes(is_backward: bool) -> None:
    """Two home slots and two spare ones, of which one is empty; two replicas of own experts."""
    words = [10, 20, 30, 0, 7, -1, 2, 3, 40, 90]
    record = bindings.FlashMoERecord(
        sequence=1, num_ctas=1, num_counts=len(words), spare_slots=2, is_backward=is_backward
    )
    record.expert_rows[: len(words)] = words
    one = records.launch_record(record, bindings.FlashMoERecord(), num_ranks=2)
    assert one.expert_rows == (10, 20)
    moved = 2 + 4 * 2 * is_backward
    assert one.replicas == ReplicaRecord(rows=((7, 30),), num_bytes=64 * 3 * moved)
    assert one.routes == (None if is_backward else (40, 90))


def test_nothing_is_known_of_a_launch_whose_predecessor_is_not(
    before: bindings.FlashMoERecord,
) -> None:
    one = record_after(before, 1_000_000)
    assert one.phase_ns
    before.epoch = 0  # its record was overwritten before it was read
    one = record_after(before, 1_000_000)
    assert (one.phase_ns, one.rows_pulled, one.results_pushed) == ({}, (), ())
