"""How rows travel by copy engines: straight into the memory of the GPU that wants them.

NCCL's kernels hold multiprocessors, so that a concurrent product begins late and both are slower;
copies hold none. What a rank sends lies on its peer where the lower ranks' rows end, so every rank
has to know all counts.
"""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.multipath.arena import Arena, Region
from flashmoe_megatron.multipath.gpu_queues import GpuQueues
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.separate.exchange import Counts, Exchange, Room, Slot, row_bytes
from flashmoe_megatron.separate.lanes import Lane, Mark
from flashmoe_megatron.streams import current_stream, index_of

_SPIN_S = 0.01
"""So long the host looks without a pause, for a pause is as long as it may be late."""
_PAUSE_S = 5e-5


class _Where(NamedTuple):
    """The region of several calls, and where one of them begins on each peer, in bytes."""

    region: Region
    begins: Mapping[int, int]


class Copies(Exchange):
    """Uneven all-to-all between GPUs of one host, whose layers share one arena."""

    needs_all_counts = True

    def __init__(
        self,
        ranks: Ranks,
        traffic: TrafficCounters,
        device: torch.device,
        timeout: float,
    ) -> None:
        """Binds it to a group.

        Args:
            ranks: Its ranks, two or more.
            traffic: Counts what is sent.
            device: This rank's GPU.
            timeout: Seconds without progress that end an exchange with an error.

        Raises:
            FlashMoEError: The GPUs cannot write into each other's memory.
        """
        super().__init__(ranks, traffic, device)
        self._index = index_of(device)
        self._staying = Lane(device)
        here, group = torch.device("cuda", self._index), ranks.group
        assert group is not None
        self._arena = ranks.once(
            Arena, here, timeout, make=lambda: Arena(group, GpuQueues(here), timeout)
        )
        self.ranks = self._arena.ranks  # which learn of a copy that fails

    def raise_if_broken(self) -> None:
        """See the base class."""
        self._arena.raise_if_broken()

    def restart(self) -> None:
        """See the base class."""
        self._arena.restart(current_stream(self._index))

    def wait_on_host(self, moment: torch.cuda.Event) -> None:
        """See the base class; NCCL alone would wait as long as the group's own timeout."""
        begun = time.monotonic()
        while not moment.query():  # type: ignore[no-untyped-call]
            self.raise_if_broken()
            if time.monotonic() - begun < _SPIN_S:
                os.sched_yield()  # leaves the interpreter to other threads, as query does not
            else:
                time.sleep(_PAUSE_S)

    def room(self, calls: Sequence[Counts], like: torch.Tensor) -> Room:
        """See the base class; collective where more rows arrive than ever before."""
        width = row_bytes(like)
        ranks = range(len(calls[0]))
        sizes = [[sum(row[rank] for row in counts) for rank in ranks] for counts in calls]
        ends = list(itertools.accumulate(sizes, _added, initial=[0 for _ in ranks]))
        region = self._arena.take([count * width for count in ends[-1]])
        rows = region.memory.view(like.dtype).view(ends[-1][self.rank], *like.shape[1:])
        slots = [
            Slot(
                rows[begin[self.rank] : end[self.rank]],
                _Where(region, {peer: begin[peer] * width for peer in self._arena.peers}),
            )
            for begin, end in itertools.pairwise(ends)
        ]
        return Room(rows, slots)

    def guard(self, rows: torch.Tensor) -> None:
        """See the base class."""
        self._arena.guard(rows.view(-1))

    def _send(self, slot: Slot, send: torch.Tensor, counts: Counts, ready: Mark) -> None:
        where: _Where = slot.where
        width, rank = row_bytes(send), self.rank
        sent = list(itertools.accumulate(counts[rank], initial=0))
        begins = [sum(row[target] for row in counts[:rank]) for target in range(len(counts))]
        copies = [
            (
                where.region.place.targets[peer] + where.begins[peer] + begins[peer] * width,
                send.data_ptr() + sent[peer] * width,
                counts[rank][peer] * width,
            )
            for peer in self._arena.peers
            if counts[rank][peer]
        ]
        what = f"{sum(map(sum, counts))} rows of {width} bytes"
        with self._between.after(ready):
            self._arena.write(what, copies, where.region, current_stream(self._index))
        # A copy within a GPU takes multiprocessors. After the copies to peers it would come when
        # a product has them all; here it begins with the first copy to a peer.
        with self._staying.after(ready):
            own = slot.rows[begins[rank] :][: counts[rank][rank]]
            own.copy_(send[sent[rank] : sent[rank + 1]])
        self._between.wait(self._staying.mark())


def _added(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]
