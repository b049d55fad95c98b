"""A group's struct in the C interface: its rates, and what a plan has left in its mailbox."""

import ctypes
import math

import pytest

from flashmoe_megatron.kernel import bindings
from tests.unit import cases, native

pytestmark = pytest.mark.library

EPOCH, NUM_ROW_BLOCKS = 0, 1
"""Words of a plan's report, which lies behind two faults in the mailbox."""


class Group:
    """One rank's group, whose memory is of nobody but for the mailbox."""

    def __init__(self, **fields: float) -> None:
        self._problem = native.problem_of(cases.make_config(num_ranks=1))
        self.mailbox = native.Mailbox(self._problem)
        self._struct = bindings.FlashMoEGroup(
            heaps=(ctypes.c_void_p * 8)(0x200000),
            workspace=0x100000,
            mailbox=self.mailbox.address,
            **fields,
        )

    def report(self, word: int, value: int) -> None:
        behind = 2 * ctypes.sizeof(bindings.FlashMoEFault) + 4 * word
        ctypes.c_int32.from_address(self.mailbox.address + behind).value = value

    def await_plan(self) -> tuple[int, str]:
        """Status and sentence of the call."""
        library, counts = bindings.load(), (ctypes.c_int32 * 4)()
        where = [ctypes.byref(counts, 4 * index) for index in range(4)]
        status = library.flashmoe_await_plan(
            ctypes.byref(self._problem), ctypes.byref(self._struct), *where
        )
        return status, library.flashmoe_last_error().decode()


@pytest.mark.parametrize(
    "fields",
    [{"link_bytes_per_s": -1.0}, {"link_bytes_per_s": math.nan}, {"least_replica_rows": -1}],
)
def test_rates_below_0_are_refused(fields: dict[str, float]):
    status, sentence = Group(**fields).await_plan()
    assert status == bindings.BAD_ARGUMENT
    assert sentence.startswith("link_bytes_per_s ")
    assert sentence.endswith("wanted neither below 0")


@pytest.mark.timeout(25)  # the host's bound on a plan is longer
def test_a_failed_plan_that_has_ended_is_not_waited_for():
    group = Group(link_bytes_per_s=25e9, least_replica_rows=9)
    group.report(NUM_ROW_BLOCKS, -1)
    group.report(EPOCH, 1)
    assert group.await_plan() == (
        bindings.PEER_TIMEOUT,
        "the plan failed and left no fault",
    )


def test_the_fault_of_a_failed_plan_is_told():
    group = Group()
    group.report(NUM_ROW_BLOCKS, -1)
    group.report(EPOCH, 1)
    bindings.FlashMoEFault.from_address(group.mailbox.address).code = bindings.BAD_ROUTING
    assert group.await_plan() == (bindings.BAD_ROUTING, "the plan failed")
