"""Times calls on all ranks of a group, by the GPU's clock or by the host's.

Calls follow one another, and their time is the slowest rank's, as the median of several turns. For
a GPU's time the host issues them while the GPU sleeps, as it is ahead of the GPU in a large layer.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.streams import HOST, Lane, Stamp, mark

CALLS = 5
CYCLES_PER_SECOND = 2e9
"""The approximate clock of a GPU."""
MOST_SLOWDOWN = 8
"""Concurrent work lasts until the timed calls take so many times as long as alone."""
MOST_BESIDE = 128
"""The driver cannot queue more while the GPU sleeps."""
Work = Callable[[], object]


class Clock:
    """Times calls; every method is collective over the group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, turns: int) -> None:
        """Takes the ranks, ``None`` for one, this rank's device, and how often calls are timed."""
        self.device = device
        self._ranks = Ranks(group)
        self._turns = turns
        self._lane = Lane(device)

    def seconds(self, calls: Sequence[Work], *, of_host: bool = False) -> list[float]:
        """Returns the seconds of each call, by the GPU's clock unless the host's is asked for.

        Every turn times each call once, so that a change of the machine affects all of them alike.
        """
        is_of_host = of_host or self.device.type != "cuda"
        turns = [
            self._turn_of_host(call) if is_of_host else self._turn_of_gpu(call, _nothing, call)
            for call in calls
        ]
        return self._medians(turns)

    def factor(self, call: Work, call_s: float, other: Work, other_s: float, meet: Work) -> float:
        """Returns how many times as long a call takes while another runs concurrently.

        The other call is repeated on another stream until all timed calls have ended; both have
        taken these seconds alone. ``meet`` waits for ranks that begin late. A CPU does one after
        the other, so both take twice as long as alone.
        """
        if self.device.type != "cuda":
            return 2.0
        times = math.ceil(CALLS * min(1.0, other_s / call_s))
        num_beside = min(math.ceil(MOST_SLOWDOWN * times * call_s / other_s), MOST_BESIDE)

        def beside() -> None:
            with self._lane.after(mark(self.device)):
                for _ in range(num_beside):
                    other()

        (taken,) = self._medians([self._turn_of_gpu(meet, beside, call, times)])
        return max(taken / call_s, 1.0)

    def _turn_of_gpu(
        self, meet: Work, beside: Work, call: Work, times: int = CALLS
    ) -> Callable[[], float]:
        """Returns a turn that times calls after ``meet``, concurrently with ``beside``."""

        def issue() -> tuple[Stamp, Stamp]:
            meet()
            beside()
            begin = Stamp(self.device)
            for _ in range(times):
                call()
            return begin, Stamp(self.device)

        def turn() -> float:
            self._meet()
            torch.cuda._sleep(int(2 * issue_s * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
            begin, end = issue()
            self._synchronize()
            return end.ns_since(begin) / times / 1e9

        call()
        issue()  # which takes longer the first time
        self._meet()
        begin = Stamp(HOST)
        issue()
        issue_s = Stamp(HOST).ns_since(begin) / 1e9
        return turn

    def _turn_of_host(self, call: Work) -> Callable[[], float]:
        def turn() -> float:
            self._meet()
            begin = Stamp(HOST)
            for _ in range(CALLS):
                call()
            self._synchronize()
            return Stamp(HOST).ns_since(begin) / CALLS / 1e9

        call()
        return turn

    def _medians(self, turns: Sequence[Callable[[], float]]) -> list[float]:
        rows = [[turn() for turn in turns] for _ in range(self._turns)]
        taken = self._ranks.most(torch.tensor(rows, device=self.device))
        return [float(each) for each in taken.median(0).values]

    def _meet(self) -> None:
        """Waits until all ranks and their devices have finished the turn before."""
        self._ranks.meet()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _nothing() -> None:
    """Runs concurrently with calls that are timed alone."""
