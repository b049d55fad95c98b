"""Traffic between hosts, over torch.distributed: small words of every rank, and rows.

NCCL carries it on any fabric that it knows, gloo on CPUs. Messages are few and large: one for each
other host of a rail, whatever the number of tokens.

On a GPU the host goes on while exchanges are under way, and NCCL's watchdog ends the process if one
fails. A thread looks at what the watchdog knows of each, so that the log says first what it was.
"""

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import reason_of
from flashmoe_megatron.hosts.grid import HostGroups
from flashmoe_megatron.ranks import OfGroup, Ranks, Value
from flashmoe_megatron.streams import Stamp

logger = logging.getLogger("flashmoe_megatron")

MOST_PENDING = 1024
"""Exchanges whose events wait to be read."""
_PERIOD_S = 0.02


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

    def add(self, entries: int, like: torch.Tensor, *, is_rows: bool) -> None:
        """Adds entries of a tensor's first dimension that leave for other hosts."""
        self.rows += entries * is_rows
        self.bytes += entries * math.prod(like.shape[1:]) * like.element_size()

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


class _Expected(NamedTuple):
    """An exchange under way: as :meth:`Lookout.expect` is given it, with the end of its time."""

    result: Any
    deadline: float
    describe: Callable[[str], str]
    is_over: Callable[[], bool]

    def problem(self) -> str | None:
        """Returns its error: empty if it had none, ``None`` while it is under way."""
        if self.result.done():
            kind = int(self.result.value())
            return "" if kind == 0 else f"NCCL's watchdog found an error of kind {kind}"
        return "it did not end in time" if time.monotonic() > self.deadline else None


class Lookout:
    """Looks after exchanges, in a thread that begins with the first of them."""

    def __init__(self) -> None:
        self._expected: deque[_Expected] = deque()
        self._thread: threading.Thread | None = None
        self._is_said = False

    def expect(
        self,
        result: Any,
        timeout: float,
        describe: Callable[[str], str],
        *,
        is_over: Callable[[], bool],
    ) -> None:
        """Says it if an exchange fails or does not end in time; the first one alone.

        Args:
            result: The exchange's future, which is 0 where it has succeeded
                (``torch.distributed.Work.get_future_result``).
            timeout: Seconds from now.
            describe: Makes the sentence, from the reason.
            is_over: Whether the process groups are gone, and with them who waited for it.
        """
        if self._is_said:
            return
        self._expected.append(_Expected(result, time.monotonic() + timeout, describe, is_over))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="flashmoe-hosts", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._is_said:
            time.sleep(_PERIOD_S)
            for _ in range(len(self._expected)):
                one = self._expected.popleft()
                problem = one.problem()
                if problem is None:
                    self._expected.append(one)
                elif problem and not self._is_said and not one.is_over():
                    self._is_said = True
                    logger.error("%s", one.describe(problem))


lookout = Lookout()
"""The process's."""


class GridRanks(Ranks):
    """The ranks of an expert-parallel group over several hosts.

    Values go along the rail, then within the host, within the time limit of these exchanges.
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


class Rail(OfGroup):
    """Exchanges of one rank; all are collective, over the rail or over the whole grid.

    Args:
        groups: The grid's process groups.

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
        """Every rank's ``[count]`` int64 words, ``[num_ranks, count]`` by rank. Over the grid."""
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
        leaving = sum(send_counts) - send_counts[self.grid.host]
        self.crossed.add(leaving, send, is_rows=is_rows)
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
        """Sends every host of the rail the same rows of ``hidden`` elements.

        Args:
            send: ``[num_rows, hidden]``, contiguous; as many on every rank.
            received: ``[num_hosts * num_rows, hidden]``, contiguous; is filled by host.
        """
        self.crossed.add(len(send) * (self.grid.num_hosts - 1), send, is_rows=True)
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
