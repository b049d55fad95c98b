"""The ring of records in pinned memory, as the library reads what kernels have written there."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.kernel import bindings, group_memory
from tests.unit import native

pytestmark = pytest.mark.library

NUM_RECORDS = bindings.NUM_RECORDS
NUM_EXPERTS = 5
FRONT_BYTES = bindings.FlashMoERecord.expert_rows.offset
MASK = 2**32 - 1


def checksum(data: bytes) -> int:
    """The checksum of moe/record.cuh: every word but the checksum itself, by its place."""
    total = 0
    for index in range(len(data) // 4):
        if 4 * index == bindings.FlashMoERecord.checksum.offset:
            continue
        word = int.from_bytes(data[4 * index : 4 * index + 4], "little")
        mixed = ((word ^ (index * 0x9E3779B9 & MASK)) * 0x85EBCA6B) & MASK
        total += mixed ^ mixed >> 15
    return total & MASK


def record_of(sequence: int) -> bindings.FlashMoERecord:
    """What a kernel would write for its launch of that number."""
    record = bindings.FlashMoERecord(
        sequence=sequence, epoch=sequence + 7, num_counts=NUM_EXPERTS, end_ns=10**18 + sequence
    )
    record.counters.rows_pulled[1] = 3 * sequence
    record.expert_rows[NUM_EXPERTS - 1] = sequence
    record.expert_rows[NUM_EXPERTS] = 99  # an earlier layer had more experts
    record.checksum = checksum(bytes(record)[: FRONT_BYTES + 4 * NUM_EXPERTS])
    return record


class Ring:
    """A mailbox without a GPU."""

    def __init__(self) -> None:
        config = MoEConfig(
            hidden=64,
            intermediate=64,
            num_experts=NUM_EXPERTS,
            topk=1,
            activation=Activation.RELU,
            gated=False,
            num_ranks=1,
            max_tokens=8,
        )
        self._mailbox = native.Mailbox(native.problem_of(config, num_ctas=2))
        end = self._mailbox.address + self._mailbox.nbytes
        self._records = end - NUM_RECORDS * ctypes.sizeof(bindings.FlashMoERecord)
        self._group = bindings.FlashMoEGroup(mailbox=self._mailbox.address)

    def at(self, sequence: int) -> int:
        size = ctypes.sizeof(bindings.FlashMoERecord)
        return self._records + sequence % NUM_RECORDS * size

    def write(self, sequence: int, most: int | None = None) -> None:
        """The first bytes of a record, all if ``most`` is not given."""
        data = bytes(record_of(sequence))
        ctypes.memmove(self.at(sequence), data, len(data) if most is None else most)

    def read(self, sequence: int) -> bindings.FlashMoERecord:
        record = bindings.FlashMoERecord()
        bindings.call("read_record", self._group, ctypes.c_uint64(sequence), record)
        return record


def test_a_record_comes_back_whole():
    ring = Ring()
    assert ring.read(1).sequence == 0
    ring.write(1)
    found = ring.read(1)
    assert found.sequence == 1
    assert bytes(found) == bytes(record_of(1))
    assert ring.read(2).sequence == 0


def test_a_ring_that_has_gone_round_says_so():
    ring = Ring()
    ring.write(3)
    ring.write(3 + NUM_RECORDS)
    assert ring.read(3).sequence == 3 + NUM_RECORDS


@pytest.mark.parametrize("launches", [1, 256, 257, 300, 770])
def test_the_newest_records_are_taken(launches: int, monkeypatch: pytest.MonkeyPatch):
    ring = Ring()
    memory = group_memory.GroupMemory.__new__(group_memory.GroupMemory)
    memory._heap = object()
    memory._is_over = False
    memory._last_record = bindings.FlashMoERecord()
    monkeypatch.setattr(memory, "open", lambda: ring._group, raising=False)
    monkeypatch.setattr(group_memory, "launch_record", lambda record, *_: record.sequence)
    for sequence in range(1, launches + 1):
        ring.write(sequence)
    newest = list(range(max(1, launches - NUM_RECORDS + 1), launches + 1))
    assert memory.take_records(1) == newest
    ring.write(launches + 1)
    assert memory.take_records(1) == [launches + 1]


@given(written=st.integers(1, FRONT_BYTES + 4 * NUM_EXPERTS - 1), before=st.booleans())
@settings(max_examples=200, deadline=None)
def test_half_a_record_is_none(written: int, before: bool):
    ring = Ring()
    if before:
        ring.write(9)
    ring.write(9 + NUM_RECORDS, written)
    found = ring.read(9)
    # What differs may not have begun to arrive, or all be there.
    assert found.sequence in (0, 9, 9 + NUM_RECORDS)
    for sequence in (9, 9 + NUM_RECORDS):
        if found.sequence == sequence:
            size = FRONT_BYTES + 4 * NUM_EXPERTS
            assert bytes(found)[:size] == bytes(record_of(sequence))[:size]


@pytest.mark.parametrize("field", ["epoch", "num_counts", "end_ns", "checksum"])
def test_a_word_of_another_launch_is_found(field: str):
    ring = Ring()
    ring.write(5)
    other = getattr(record_of(5), field) ^ 1
    offset = getattr(bindings.FlashMoERecord, field).offset
    ctypes.memmove(ring.at(5) + offset, other.to_bytes(4 if field != "end_ns" else 8, "little"), 4)
    assert ring.read(5).sequence == 0
