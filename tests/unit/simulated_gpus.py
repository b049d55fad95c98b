"""Stands in for the library and the ranks' GPUs, as far as hosts see them: order, waits and faults.

Each rank's GPU is a thread that runs launches one behind the other, after times of its own. What it
computes is zeros, or NaN where the kernel would leave NaN. Ranks exchange what they launch, so that
a launch of another kind than the other ranks' is found.
"""

import contextlib
import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flashmoe_megatron.config import TILE_M, MoEConfig, fp8_row_bytes
from flashmoe_megatron.kernel import backend, bindings, ops, symmetric
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions

PATIENCE_S = 20.0
MOST_BLOCKS = 64
NUMBER_BYTES = 12
"""Where a plan has its number here, as the kernel's has the mask of ranks without a backward."""
CPU = torch.device("cpu")


class OutOfStepError(Exception):
    """Ranks have launched different things together, or one has launched nothing."""


class Gpus:
    """The GPUs of a group's ranks.

    Args:
        num_ranks: How many.
        seed: Draws the times that launches take.
        slow: The rank whose launches take longest.
    """

    def __init__(self, num_ranks: int, seed: int, slow: int) -> None:
        self.num_ranks = num_ranks
        self.slow = slow
        self.problems: list[str] = []
        self.mailboxes: dict[int, int] = {}
        """Ranks, by the addresses of their mailboxes."""
        self.raised: list[bindings.FlashMoEFault | None] = [None] * num_ranks
        self._random = random.Random(seed)
        self._told: dict[tuple[int, str], dict[int, Any]] = {}
        self._change = threading.Condition()
        self._queues = [ThreadPoolExecutor(1) for _ in range(num_ranks)]
        self._counts = [0] * num_ranks
        self.plans: list[tuple[int, bool] | None] = [None] * num_ranks
        self.numbers = itertools.count()
        self.unfollowed: dict[int, int] = {}
        """Masks of the ranks without a backward, by the number of the plan."""
        self.settled: list[list[bool]] = [[] for _ in range(num_ranks)]
        """By rank, which plans that went on used replicas that were settled on before."""

    def _run(self, rank: int, work: Callable[[], object]) -> None:
        time.sleep(self._random.random() * (4e-3 if rank == self.slow else 1e-3))
        try:
            work()
        except Exception as error:  # noqa: BLE001 - told by the test
            self.problems.append(f"rank {rank}: {error!r}")

    def launch(self, rank: int, work: Callable[[], object]) -> None:
        """Puts work behind what a rank has launched."""
        self._queues[rank].submit(self._run, rank, work)

    def wait(self, rank: int) -> None:
        """Waits for all that a rank has launched."""
        self._queues[rank].submit(lambda: None).result()

    def exchange(self, rank: int, kind: str, value: object) -> list[Any]:
        """All ranks' values, once all have come to a step of that kind."""
        self._counts[rank] += 1
        key = (self._counts[rank], kind)
        with self._change:
            here = self._told.setdefault(key, {})
            here[rank] = value
            self._change.notify_all()
            if not self._change.wait_for(lambda: len(here) == self.num_ranks, PATIENCE_S):
                raise OutOfStepError(f"step {key[0]} is a {kind} here alone: {self._told}")
            return [here[one] for one in range(self.num_ranks)]

    def plan(
        self,
        rank: int,
        refusal: bytes | None,
        is_bad: bool,
        bound: int | None,
        is_settled: bool = False,
        *,
        number: int,
        has_no_backward: bool = False,
        first_plan: int | None = None,
    ) -> bool:
        """What planning does to the fault and to the plan of a number; whether it goes on."""
        if first_plan is not None and self.leaves(rank, first_plan):
            self.unfollowed[number] = self.unfollowed[first_plan]
            self.plans[rank] = (0, False)
            return False
        if self.raised[rank] is None and (refusal is not None or is_bad):
            self._raise(rank, _fault(rank, refusal))
        told = self.exchange(rank, "plan", (self.raised[rank], bound, is_settled, has_no_backward))
        faults = [fault for fault, *_ in told if fault is not None]
        self.unfollowed[number] = sum(each[3] << one for one, each in enumerate(told))
        if faults and self.raised[rank] is None:
            self._raise(rank, faults[0])
        self.plans[rank] = (int(not faults), any(bound is not None for _, bound, *_ in told))
        if not faults:
            self.settled[rank].append(is_settled)
            if any(theirs != is_settled for _, _, theirs, _ in told):
                raise OutOfStepError(f"ranks disagree on replicas: {told}")
        return not faults

    def leaves(self, rank: int, plan: int) -> bool:
        """Whether a launch of a backward along a plan leaves, since some rank has none."""
        ranks = self.unfollowed[plan]
        if ranks and self.raised[rank] is None:
            fault = bindings.FlashMoEFault(code=bindings.UNMATCHED, rank=rank, seen=ranks)
            self._raise(rank, fault)
        return bool(ranks)

    def _raise(self, rank: int, fault: bindings.FlashMoEFault) -> None:
        self.raised[rank] = fault
        for mailbox, owner in list(self.mailboxes.items()):
            if owner == rank:
                ctypes.c_uint32.from_address(mailbox).value = fault.code


def number_in(plan: int) -> ctypes.c_uint32:
    """The number of a plan, or of the copy of its header, at an address."""
    return ctypes.c_uint32.from_address(plan + NUMBER_BYTES)


def _fault(rank: int, refusal: bytes | None) -> bindings.FlashMoEFault:
    if refusal is not None:
        return bindings.FlashMoEFault(code=bindings.REFUSED, rank=rank, reason=refusal)
    return bindings.FlashMoEFault(code=bindings.BAD_ROUTING, rank=rank, peer=-1, index=0)


class Library:
    """The library's functions, for the ranks of :class:`Gpus`."""

    reads_tokens = (bindings.READS_NO_TOKENS, bindings.READS_NO_TOKENS)
    """How a forward, and a backward, get at rows that are not kept: bindings' READS_NO_TOKENS,
    READS_TOKENS or, in a backward, COPIES_TOKENS."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._last_plans: dict[int, int] = {}

    def __call__(self, name: str) -> Callable[..., int]:
        """The function of that name."""
        return getattr(self, f"_{name}", lambda *_: bindings.OK)

    def read_fault(self, group: bindings.FlashMoEGroup) -> bindings.FlashMoEFault | None:
        return self._gpus.raised[self._gpus.mailboxes[group.mailbox]]

    def clear_fault(self, group: bindings.FlashMoEGroup) -> None:
        rank = self._gpus.mailboxes[group.mailbox]
        self._gpus.wait(rank)
        ctypes.c_uint32.from_address(group.mailbox).value = 0
        self._gpus.raised[rank] = None

    def _sizes(self, problem: Any, sizes: Any) -> int:
        found = sizes._obj
        found.max_row_blocks = MOST_BLOCKS
        for name, kind in bindings.FlashMoESizes._fields_[2:]:
            if kind is ctypes.c_uint64:
                setattr(found, name, 4096)
        wanted = getattr(problem, "_obj", problem)
        in_fp8 = wanted.experts != bindings.AS_GIVEN
        row_bytes = fp8_row_bytes(wanted.hidden) if in_fp8 else 2 * wanted.hidden
        found.row_block_bytes = TILE_M * row_bytes
        found.weight_copy_bytes[:] = (1024, 2048) if in_fp8 else (0, 0)
        found.reads_tokens[:] = self.reads_tokens
        return bindings.OK

    def _plan(self, problem: Any, group: Any, given: Any, plan: Any) -> int:
        rank = self._rank_of(problem, group)
        inputs = _struct(bindings.FlashMoEInput, given)
        refusal, is_bad, tells = inputs.refusal, _is_bad(inputs), self._tells(inputs, plan)
        self._gpus.plans[rank] = None
        self._gpus.launch(rank, lambda: self._gpus.plan(rank, refusal, is_bad, None, **tells))
        self._last_plans[rank] = tells["number"]
        return bindings.OK

    def _await_plan(
        self, problem: Any, group: Any, blocks: Any, rows: Any, ranks: Any, late: Any
    ) -> int:
        rank = self._rank_of(problem, group)
        self._gpus.wait(rank)
        outcome = self._gpus.plans[rank]
        assert outcome is not None, "a plan was waited for that has not run"
        blocks._obj.value, late._obj.value = 1, int(not outcome[0] and outcome[1])
        ranks._obj.value = self._gpus.unfollowed[self._last_plans[rank]]
        fault = self._gpus.raised[rank]
        return bindings.OK if fault is None else int(fault.code)

    def _forward(self, problem: Any, group: Any, given: Any, launch: Any, is_planned: int) -> int:
        rank, wanted = self._rank_of(problem, group), _struct(bindings.FlashMoELaunch, launch)
        inputs = _struct(bindings.FlashMoEInput, given)
        is_bad, out, blocks = _is_bad(inputs), wanted.out, wanted.num_row_blocks
        tells = {} if is_planned else self._tells(inputs, wanted.plan)
        num_bytes = wanted.num_tokens * self._hidden * 2

        def run() -> None:
            if is_planned or self._gpus.plan(rank, None, is_bad, blocks, **tells):
                self._gpus.exchange(rank, "layer", None)
            self._write(rank, out, num_bytes)

        self._gpus.launch(rank, run)
        return bindings.OK

    def _tells(self, given: bindings.FlashMoEInput, plan: int) -> dict[str, Any]:
        """What a rank says in a new plan of replicas and of its backward."""
        number = number_in(plan).value = next(self._gpus.numbers)
        return {
            "is_settled": bool(given.is_settled),
            "number": number,
            "has_no_backward": bool(given.has_no_backward),
            "first_plan": number_in(given.first_plan).value if given.first_plan else None,
        }

    def _settle(self, problem: Any, group: Any, *_: Any) -> int:
        rank = self._rank_of(problem, group)
        self._gpus.launch(rank, lambda: self._gpus.exchange(rank, "settle", None))
        return bindings.OK

    def _gather(self, problem: Any, group: Any, launch: Any, *_: Any) -> int:
        rank, wanted = self._rank_of(problem, group), _struct(bindings.FlashMoELaunch, launch)
        plan = number_in(wanted.plan).value

        def run() -> None:
            if not self._gpus.leaves(rank, plan):
                self._gpus.exchange(rank, "gather", None)

        self._gpus.launch(rank, run)
        return bindings.OK

    def _backward(self, problem: Any, group: Any, launch: Any, *_: Any) -> int:
        rank, wanted = self._rank_of(problem, group), _struct(bindings.FlashMoELaunch, launch)
        plan, out = number_in(wanted.plan).value, wanted.out
        num_bytes = wanted.num_tokens * self._hidden * 2

        def run() -> None:
            if not self._gpus.leaves(rank, plan):
                self._gpus.exchange(rank, "backward", None)
            self._write(rank, out, num_bytes)

        self._gpus.launch(rank, run)
        return bindings.OK

    def _write(self, rank: int, out: int | None, num_bytes: int) -> None:
        if out and num_bytes:
            ctypes.memset(out, 0xFF if self._gpus.raised[rank] else 0, num_bytes)

    def _rank_of(self, problem: Any, group: Any) -> int:
        wanted = _struct(bindings.FlashMoEProblem, problem)
        where = _struct(bindings.FlashMoEGroup, group)
        self._hidden = wanted.hidden
        self._gpus.mailboxes[where.mailbox] = wanted.rank
        return int(wanted.rank)


def _struct(kind: Any, given: Any) -> Any:
    """The struct that a call passes by reference or by its address, which the next call may use."""
    return given._obj if hasattr(given, "_obj") else kind.from_address(given)


def _is_bad(given: bindings.FlashMoEInput) -> bool:
    """Whether the kernel would find the first routing weight to be NaN."""
    if not given.probs or not given.num_tokens:
        return False
    value = ctypes.c_float.from_address(given.probs).value
    return value != value


def install(gpus: Gpus, monkeypatch: Any) -> None:
    """Lets the kernel's backend run on simulated GPUs, whose tensors are processors'."""
    library, empty_like, written = Library(gpus), torch.empty_like, []

    def kept_empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Memory that is given back behind a launch is written to by it, as on a stream."""
        written.append(empty_like(*args, **kwargs))
        return written[-1]

    properties = type("Properties", (), {"multi_processor_count": 132, "total_memory": 2**36})
    for owner, name, replacement in (
        (bindings, "function", library),
        (bindings, "load", lambda *_: None),
        (torch, "empty_like", kept_empty_like),
        (bindings, "read_fault", library.read_fault),
        (bindings, "clear_fault", library.clear_fault),
        (
            symmetric,
            "allocate",
            lambda *_: symmetric.SymmetricAllocation(torch.empty(0), (4096,)),
        ),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch._C, "_cuda_getDevice", lambda: None),  # "cpu" has no number
        (torch.cuda, "synchronize", lambda *_: None),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
        (GroupMemory, "ahead", lambda *_: contextlib.nullcontext()),
        *((ops, name, getattr(ops, f"_{name}")) for name in ("plan", "forward", "settle")),
        *((ops, name, getattr(ops, f"_{name}")) for name in ("gather", "backward")),
    ):
        monkeypatch.setattr(owner, name, replacement, raising=False)


def make_backend(
    config: MoEConfig, rank: int, memory: GroupMemory | None = None, **options: Any
) -> backend.KernelBackend:
    """One rank's backend, behind :func:`install`; another's memory makes it of one group."""
    chosen = BackendOptions(**options)
    made = backend.KernelBackend(
        config,
        None,
        "cpu:0",
        memory=memory or GroupMemory(None, CPU, chosen),
        rank=rank,
        num_ctas=8,
        options=chosen,
    )
    made.device = made._tables._device = CPU
    return made
