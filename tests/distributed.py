"""Runs functions on several gloo processes from inside pytest, in bounded time.

A :class:`RankPool` keeps its processes, so that many tests pay once for starting them. If a rank
fails, the parent raises with that rank's traceback; if the ranks do not finish in time, they are
killed and the pool starts anew with the next call.
"""

import contextlib
import faulthandler
import functools
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import Forked, ForkServer

GRACE_S = 3.0
"""How long the other ranks may take to fail too once one has failed."""

WRITING_S = 2.0
"""How long a rank may take to write its stacks."""

PATIENCE_S = 240.0
"""How long a test waits for processes, be it that they start or that they answer.

It ends what hangs and says nothing of speed: on a busy machine it takes minutes until all of them
have imported torch and a framework.
"""

PLAIN = (
    "pytest",
    "hypothesis",
    "torch._dynamo",  # which optimizers import
    "tests.unit.cases",
    "flashmoe_megatron.layer",
    "flashmoe_megatron.separate.reference",
)
"""What most tests import that need no framework."""


class RankError(Exception):
    """A rank raised, died or did not finish; the message has what is known of every rank."""


@functools.cache
def plain_servers() -> tuple[ForkServer, ForkServer]:
    """Fork what needs no framework; they live as long as the process of the tests."""
    return ForkServer(*PLAIN), ForkServer(*PLAIN)


class RankPool:
    """``num_ranks`` processes that share a gloo process group.

    Ranks in turn are forked by the given servers: those of two differ in the order of their sets.
    """

    def __init__(self, num_ranks: int, servers: Sequence[ForkServer] = ()) -> None:
        self.num_ranks = num_ranks
        self._servers = servers or plain_servers()
        self._processes: list[Forked] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> list[Any]:
        """Calls ``function(group, *args)`` on the first ``num_ranks`` ranks at once.

        Args:
            function: Defined at the top level of a module.
            *args: Anything picklable; tensors are copied.
            num_ranks: How many ranks take part; all by default. ``group`` is theirs.
            timeout_s: For all of them together.

        Returns:
            Each rank's result, by rank.

        Raises:
            RankError: A rank raised, died or did not finish.
        """
        num_ranks = num_ranks or self.num_ranks
        assert num_ranks <= self.num_ranks, "the pool has fewer ranks"
        if not self._processes:
            self._start()
        # The callee needs the module path before it can load the function.
        message = (sys.path, pickle.dumps((num_ranks, function, args)))
        for pipe in self._pipes[:num_ranks]:
            pipe.send(message)
        outcomes = self._collect(num_ranks, timeout_s)
        failed = {rank: text for rank, (ok, text) in outcomes.items() if not ok}
        silent = sorted(set(range(num_ranks)) - set(outcomes))
        if failed or silent:
            self._tell_stacks(silent)
            self.close()
            parts = [f"rank {rank}:\n{text}" for rank, text in sorted(failed.items())]
            if silent:
                parts.append(f"ranks {silent} did not finish within {timeout_s} s")
            raise RankError("\n".join(parts))
        return [outcomes[rank][1] for rank in range(num_ranks)]

    def _tell_stacks(self, ranks: list[int]) -> None:
        """Has ranks write to stderr where their threads are, one rank after the other."""
        for rank in ranks:
            process = self._processes[rank]
            if process.is_alive():
                os.write(2, f"rank {rank} stands here:\n".encode())
                os.kill(process.pid, signal.SIGUSR1)
                process.join(WRITING_S)

    def close(self) -> None:
        """Ends the processes; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        store = Path(tempfile.mkdtemp(prefix="flashmoe-ranks-")) / "store"
        for server in self._servers[: self.num_ranks]:
            server.start()
        for rank in range(self.num_ranks):
            server = self._servers[rank % len(self._servers)]
            process, pipe = server.fork(_serve, rank, self.num_ranks, str(store))
            self._processes.append(process)
            self._pipes.append(pipe)
        ready = self._collect(self.num_ranks, PATIENCE_S)
        if len(ready) < self.num_ranks or not all(ok for ok, _ in ready.values()):
            self.close()
            raise RankError(f"the ranks did not start: {ready}")

    def _collect(self, num_ranks: int, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        """Waits for one answer of each rank; shortly, once one has failed."""
        deadline = time.monotonic() + timeout_s
        pending = {self._pipes[rank]: rank for rank in range(num_ranks)}
        outcomes: dict[int, tuple[bool, Any]] = {}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(GRACE_S)
                    code = self._processes[rank].exitcode
                    outcomes[rank] = (False, f"the process died with exit code {code}")
                if not outcomes[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = PATIENCE_S
) -> list[Any]:
    """Calls ``function(group, *args)`` on fresh processes; see :meth:`RankPool.run`."""
    with contextlib.closing(RankPool(num_ranks)) as pool:
        return pool.run(function, *args, timeout_s=timeout_s)


@contextlib.contextmanager
def renamed(group: dist.ProcessGroup, name: str) -> Iterator[None]:
    """Gives a group another name within, which the ranks of a mesh's groups can have."""
    own = group.group_name
    group._set_group_name(name)
    try:
        yield
    finally:
        group._set_group_name(own)


def refusal(group: dist.ProcessGroup, function: Callable[..., Any], *args: Any) -> str:
    """What a call raises, for errors of all ranks behind which their pool goes on.

    A pool ends whose ranks fail, and the next test waits until new ones have imported a framework.
    """
    try:
        function(group, *args)
    except Exception as error:  # noqa: BLE001 - the test says which it has to be
        return f"{type(error).__name__}: {error}"
    return "no error"


def assert_waited(said: str, ranks: list[int], timeout: int) -> None:
    """Finds in a message that a link waited for some ranks, and longer than its time limit."""
    pattern = rf"has waited ([\d.]+) s for ranks {re.escape(str(ranks))}, longer than {timeout} s"
    found = re.search(pattern, said)
    assert found, said
    assert float(found[1]) >= timeout


def _serve(pipe: Connection, rank: int, num_ranks: int, store: str) -> None:
    """The life of one process: joins the group, then answers calls until the pipe closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    groups = {size: dist.new_group(list(range(size))) for size in range(1, num_ranks + 1)}
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            sys.path[:], call = pipe.recv()
        except EOFError:
            return
        try:
            taking_part, function, args = pickle.loads(call)
            num_groups = dist.distributed_c10d._world.group_count
            result = function(groups[taking_part], *args)
            # The next group would have another name in the processes that have not made this one.
            if taking_part < num_ranks and dist.distributed_c10d._world.group_count > num_groups:
                raise RuntimeError(f"groups are made by {taking_part} of {num_ranks} processes")
            answer = pickle.dumps((True, result))
        except BaseException:  # noqa: BLE001 - whatever it is, the parent has to see it
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
