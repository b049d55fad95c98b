"""Traffic between hosts, over torch.distributed: small words of every rank, and rows.

NCCL carries it on any fabric that it knows, gloo on CPUs. Messages are few and large: one for each
other host of a rail, whatever the number of tokens.
"""

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import reason_of
from flashmoe_megatron.hosts.grid import HostGrid, HostGroups
from flashmoe_megatron.hosts.lookout import lookout
from flashmoe_megatron.ranks import OfGroup, Ranks, Value
from flashmoe_megatron.streams import Stamp

MOST_PENDING = 1024
"""Exchanges whose events wait to be read."""


@dataclass
class Crossed:
    """The amounts that one rank has sent to other hosts.

    Attributes:
        rows: Rows of ``hidden`` elements: tokens, shares of outputs, and gradients of both.
        bytes: Their bytes, and those of routes and of the routes' gradients.
        calls: Forwards and backwards that have done so.
        ns: Nanoseconds that were waited for exchanges and other hosts, as far as these have ended.
    """

    rows: int = 0
    bytes: int = 0
    calls: int = 0
    ns: float = 0.0

    def since(self, before: "Crossed") -> "Crossed":
        """Returns the amounts since then."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return Crossed(*(now - then for now, then in pairs))


class Stopwatch:
    """Times exchanges: by the clock, or on a GPU's stream by events, without a wait."""

    def __init__(self, crossed: Crossed) -> None:
        self._crossed = crossed
        self._pending: deque[tuple[Stamp, Stamp]] = deque()

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Adds the time of its body."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        begin = Stamp(device)
        yield
        self._pending.append((begin, Stamp(device)))
        if device.type != "cuda" or len(self._pending) > MOST_PENDING:
            self.collect()

    def collect(self) -> None:
        """Adds what has ended; waits for nothing."""
        while self._pending and self._pending[0][1].has_passed():
            begin, end = self._pending.popleft()
            self._crossed.ns += end.ns_since(begin)


class Rail(Protocol):
    """Exchanges of one rank; all are collective, over the rail or over the whole grid.

    Attributes:
        grid: The grid.
        ranks: Its ranks.
        crossed: What this rank has sent to other hosts.
        watch: Times that.
    """

    grid: HostGrid
    ranks: Ranks
    crossed: Crossed
    watch: Stopwatch

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        """Every rank's ``[count]`` int64 words, ``[num_ranks, count]`` by rank. Over the grid."""
        ...

    def exchange(
        self,
        send: torch.Tensor,
        received: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        *,
        is_rows: bool,
    ) -> Callable[[], None]:
        """Begins to send each host of the rail its part of a tensor.

        Args:
            send: Contiguous, parted along its first dimension by host.
            received: Is filled likewise; contiguous.
            send_counts: Entries of the first dimension for each host.
            receive_counts: Those from each host.
            is_rows: Whether the entries are rows of ``hidden`` elements, for the counters.

        Returns:
            What has to be called before ``received`` is read; a GPU's host does not wait in it.
        """
        ...

    def spread(self, send: torch.Tensor, received: torch.Tensor) -> None:
        """Sends every host of the rail the same rows of ``hidden`` elements.

        Args:
            send: ``[num_rows, hidden]``, contiguous; as many on every rank.
            received: ``[num_hosts * num_rows, hidden]``, contiguous; is filled by host.
        """
        ...


def count_crossed(crossed: Crossed, entries: int, like: torch.Tensor, *, is_rows: bool) -> None:
    """Adds entries of a tensor's first dimension that leave for other hosts."""
    crossed.rows += entries * is_rows
    crossed.bytes += entries * math.prod(like.shape[1:]) * like.element_size()


class GridRanks(Ranks):
    """The ranks of an expert-parallel group over several hosts.

    Values go along the rail, then within the host, within the time limit of these exchanges.

    Args:
        groups: The grid's.
    """

    def __init__(self, groups: HostGroups) -> None:
        grid = groups.grid
        super().__init__(
            groups.whole,
            exchange=f"rank {grid.rank}, on host {grid.host} of {grid.num_hosts}: an exchange "
            "between hosts",
            peers=f"ranks {list(grid.ranks_of_rail)} (the same place on every host) or "
            f"{list(grid.ranks_within)} (this host)",
        )
        self._rail, self._within = Ranks(groups.rail), Ranks(groups.within)

    def gather(self, value: Value) -> list[Value]:
        """See the base class."""
        with self.bounded:
            of_places = self._within.gather(self._rail.gather(value))
        return [of_one[host] for host in range(self._rail.num_ranks) for of_one in of_places]


class TorchRail(OfGroup):
    """A rail over process groups.

    Args:
        groups: The grid's.

    Attributes:
        grid: The grid.
        ranks: Its ranks.
        crossed: What this rank has sent to other hosts.
        watch: Times that.
    """

    def __init__(self, groups: HostGroups) -> None:
        self.grid = groups.grid
        self.ranks: Ranks = GridRanks(groups)
        self.crossed = Crossed()
        self.watch = Stopwatch(self.crossed)
        self._rail = groups.rail
        self._within = groups.within
        self._timeout = groups.timeout

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        """Along the rail, then within the host; see :class:`Rail`."""
        grid = self.grid
        with self.ranks.bounded, self.watch.timed(words.device):
            of_rail = words.new_empty(grid.num_hosts, *words.shape)
            self._all_gather(of_rail.unbind(), words, self._rail).wait()
            of_places = of_rail.unsqueeze(0)
            if self._within is not None:
                of_places = words.new_empty(grid.ranks_per_host, *of_rail.shape)
                self._all_gather(of_places.unbind(), of_rail, self._within).wait()
        return of_places.transpose(0, 1).reshape(-1, *words.shape)

    def exchange(
        self,
        send: torch.Tensor,
        received: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        *,
        is_rows: bool,
    ) -> Callable[[], None]:
        """See :class:`Rail`."""
        leaving = sum(send_counts) - send_counts[self.grid.host]
        count_crossed(self.crossed, leaving, send, is_rows=is_rows)
        with self.ranks.bounded:
            work = dist.all_to_all_single(
                received,
                send,
                list(receive_counts),
                list(send_counts),
                group=self._rail,
                async_op=True,
            )
            begun = self._looked_after(work, received.device)

        def wait() -> None:
            with self.ranks.bounded, self.watch.timed(received.device):
                begun.wait()

        return wait

    def spread(self, send: torch.Tensor, received: torch.Tensor) -> None:
        """See :class:`Rail`."""
        count_crossed(self.crossed, len(send) * (self.grid.num_hosts - 1), send, is_rows=True)
        with self.ranks.bounded, self.watch.timed(send.device):
            parts = torch.chunk(received, self.grid.num_hosts)
            self._all_gather(parts, send, self._rail).wait()

    def _all_gather(
        self, parts: Sequence[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup
    ) -> dist.Work:
        work = dist.all_gather(list(parts), own, group=group, async_op=True)
        return self._looked_after(work, own.device)

    def _looked_after(self, work: dist.Work | None, device: torch.device) -> dist.Work:
        """Where no host waits for it, what befalls an exchange is said in the log."""
        assert work is not None
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            lookout.expect(
                work.get_future_result(),  # type: ignore[attr-defined]
                self._timeout,
                lambda reason: reason_of(self.ranks.gone(reason)),
                is_over=lambda: not dist.is_initialized(),
            )
        return work
