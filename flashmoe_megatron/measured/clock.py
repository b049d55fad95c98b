"""Times calls on all ranks of a group: the GPU's time of them, or the host's.

A time is the slowest rank's, the median of several turns, of calls that follow one another. For a
GPU's time the host issues them while the GPU sleeps, as it is ahead of the GPU in a large layer.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.separate import lanes

CALLS = 5
CYCLES_PER_SECOND = 2e9
"""A GPU's clock, about."""
MOST_SLOWDOWN = 8
"""What runs beside calls lasts until they take so many times as long as alone."""
MOST_BESIDE = 128
"""More would not fit what the driver queues while the GPU sleeps."""
Work = Callable[[], object]


class Clock:
    """Times calls; every time is collective over the group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, turns: int) -> None:
        """Binds it to the ranks that measure together, ``None`` for one alone.

        Args:
            group: The ranks.
            device: This one's.
            turns: How often each call is timed.
        """
        self.device = device
        self._ranks = Ranks(group)
        self._turns = turns
        self._lane = lanes.Lane(device)

    def seconds(self, calls: Sequence[Work], *, of_host: bool = False) -> list[float]:
        """What each of several calls takes, on a GPU without the host's, or of a host that waits.

        All are timed once in each turn, so that what changes in between changes all of them alike.
        """
        is_of_host = of_host or self.device.type != "cuda"
        turns = [
            self._turn_of_host(call) if is_of_host else self._turn_of_gpu(call, _nothing, call)
            for call in calls
        ]
        return self._medians(turns)

    def factor(self, call: Work, call_s: float, other: Work, other_s: float, meet: Work) -> float:
        """How many times as long as alone a call takes while another one runs beside it.

        A processor does one after the other, so both take twice as long as alone.

        Args:
            call: Is timed on the current stream.
            call_s: What it takes alone.
            other: Is called again and again on another stream, until all timed calls have ended.
            other_s: What it takes alone.
            meet: Has ranks that begin late waited for.
        """
        if self.device.type != "cuda":
            return 2.0
        times = math.ceil(CALLS * min(1.0, other_s / call_s))
        num_beside = min(math.ceil(MOST_SLOWDOWN * times * call_s / other_s), MOST_BESIDE)

        def beside() -> None:
            with self._lane.after(lanes.mark(self.device)):
                for _ in range(num_beside):
                    other()

        (taken,) = self._medians([self._turn_of_gpu(meet, beside, call, times)])
        return max(taken / call_s, 1.0)

    def _turn_of_gpu(
        self, meet: Work, beside: Work, call: Work, times: int = CALLS
    ) -> Callable[[], float]:
        """One call's of several, behind what ranks meet in and beside what is on another stream."""

        def issue() -> list[torch.cuda.Event]:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            meet()
            beside()
            events[0].record()
            for _ in range(times):
                call()
            events[1].record()
            return events

        def turn() -> float:
            self._meet()
            torch.cuda._sleep(int(2 * issue_s * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
            begin, end = issue()
            self._synchronize()
            return float(begin.elapsed_time(end)) / times / 1e3

        call()
        issue()  # which takes longer the first time
        self._meet()
        begin = time.perf_counter()
        issue()
        issue_s = time.perf_counter() - begin
        return turn

    def _turn_of_host(self, call: Work) -> Callable[[], float]:
        def turn() -> float:
            self._meet()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            self._synchronize()
            return (time.perf_counter() - begin) / CALLS

        call()
        return turn

    def _medians(self, turns: Sequence[Callable[[], float]]) -> list[float]:
        rows = [[turn() for turn in turns] for _ in range(self._turns)]
        taken = self._ranks.most(torch.tensor(rows, device=self.device))
        return [float(each) for each in taken.median(0).values]

    def _meet(self) -> None:
        """Has all ranks begin a turn together, with nothing left of the last one."""
        self._ranks.meet()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _nothing() -> None:
    """Is beside calls that are timed alone."""
