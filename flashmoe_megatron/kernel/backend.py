"""The fused kernel as a backend: the calls of one layer."""

import contextlib
import ctypes
import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from flashmoe_megatron.blockwise import dequantize, unpack
from flashmoe_megatron.call import (
    Backend,
    Given,
    Grads,
    NaNResult,
    Together,
    TrafficCounters,
    unmatched_backward,
)
from flashmoe_megatron.checks import (
    KERNEL_DTYPES,
    check_fp8,
    check_grad_out,
    check_kernel_experts,
    check_kernel_tensor,
    check_split,
    check_tokens,
)
from flashmoe_megatron.config import ALIGNMENT_BYTES, TILE_M, MoEConfig, fp8_row_bytes
from flashmoe_megatron.errors import ConfigError, DeviceError, FlashMoEError, ShapeError, reason_of
from flashmoe_megatron.hooks import Call, Reach, ends_of
from flashmoe_megatron.kernel import bindings, ops
from flashmoe_megatron.kernel.gradients import UniformGrads
from flashmoe_megatron.kernel.group_memory import GroupMemory, shared_memory
from flashmoe_megatron.kernel.memory import check_slots_fit, transient_blocks
from flashmoe_megatron.kernel.rows import BackwardRows
from flashmoe_megatron.kernel.tables import AddressTables, WeightTables
from flashmoe_megatron.low_rank import Factors
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.planner import bounded_row_blocks, choose_keep
from flashmoe_megatron.promise import Making
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.replicas.policy import check_slots
from flashmoe_megatron.telemetry.record import LaunchRecord
from flashmoe_megatron.weights import ExpertWeights

logger = logging.getLogger("flashmoe_megatron")

_REACH = Reach(
    refused={
        ("before", "dispatch"): "the launch sends tokens, and never has rows of routes: wanted a "
        "hook before gate, or the backend 'scheduled'",
        **dict.fromkeys(
            ends_of("experts", "combine"),
            "the launch computes experts and sums their outputs in one piece: wanted the backend "
            "'scheduled'",
        ),
    },
    views=frozenset([("after", "padding"), ("after", "dispatch")]),
    fixed="the launch moves rows and computes experts in one piece: wanted the backend 'scheduled'",
)

COPIES, TRANSPOSES = "kernel", "kernel's backward"
"""Makers of a promise's copies: forwards quantize weights, backwards their transposes."""

CLUSTER_SIZE = 2
"""CTAs that work together, on neighbouring SMs: the grid is a multiple of it."""


@dataclass
class SavedForward:
    """A forward's state for its backward: received rows, or the tokens to read in their place."""

    plan: torch.Tensor
    rows: torch.Tensor | None
    x: torch.Tensor | None
    preact: torch.Tensor
    num_row_blocks: int
    num_tokens: int
    num_columns: int
    """The probabilities have so many, and so has their gradient."""
    probs_dtype: torch.dtype
    layer: int


@dataclass
class PendingForward:
    """A forward that has begun: its plan is under way, or will be part of the layer's launch."""

    given: Given
    problem: bindings.FlashMoEProblem
    group: bindings.FlashMoEGroup
    is_settled: bool
    """Its replicas have been settled on before."""
    plan: torch.Tensor
    num_row_blocks: int | None
    """Blocks of 128 rows that the buffers hold; ``None`` if the plan under way counts them."""


class _Buffers(NamedTuple):
    """Memory that the launch of a layer writes to.

    Without ``scratch``, that is in the plan's memory, where the plan ends. There the rows are, too,
    if ``rows_at`` is not 0, which says where.
    """

    rows: torch.Tensor | None
    preact: torch.Tensor | None
    scratch: torch.Tensor | None
    out: torch.Tensor
    plan: torch.Tensor
    rows_at: int


class _PlanOutcome(NamedTuple):
    """How a plan has ended.

    ``unfollowed`` is a mask of the ranks without a backward. The host of some rank learns of a
    failed plan only at a later call where ``is_heard_late``.
    """

    status: int
    num_row_blocks: int
    unfollowed: int
    is_heard_late: bool


def count_routes(routing_map: torch.Tensor) -> torch.Tensor:
    """Routes to each expert, as :data:`~flashmoe_megatron.kernel.ops.settle` takes them."""
    return routing_map.sum(0, dtype=torch.int32)


def _addresses(problem: bindings.FlashMoEProblem, group: bindings.FlashMoEGroup) -> tuple[int, int]:
    """Returns addresses for an operator, which takes no structs; they must outlive the call."""
    return ctypes.addressof(problem), ctypes.addressof(group)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_own_device(method: _Method) -> _Method:
    """Makes the backend's GPU the current one, as torch does for operators of its tensors."""

    @functools.wraps(method)
    def run(backend: "KernelBackend", *args: Any, **kwargs: Any) -> Any:
        # Not torch.cuda.current_device(), which asks on the way whether CUDA is initialized.
        if torch._C._cuda_getDevice() == backend.device.index:
            return method(backend, *args, **kwargs)
        with torch.cuda.device(backend.device):
            return method(backend, *args, **kwargs)

    return cast(_Method, run)


class KernelBackend(Backend):
    """The routed experts of one layer as one persistent kernel per direction.

    Args:
        memory: Shared memory to use in place of the group's own (virtual ranks in one process).
        rank: This rank, where ``memory`` is given.
        num_ctas: The kernel's grid; by default all SMs that are not reserved.

    Raises:
        DeviceError: The device is not a Hopper GPU, or the library cannot be loaded.
        ConfigError: An option cannot be honoured.
    """

    kind = "kernel"
    reach = _REACH

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        *,
        memory: GroupMemory | None = None,
        rank: int | None = None,
        num_ctas: int | None = None,
        options: BackendOptions | None = None,
    ) -> None:
        check_kernel_experts(config)
        self.options = options or BackendOptions()
        check_slots(config, self.options.spare_slots, self.options.placement)
        self.spare_slots = self.options.filled_slots if config.num_ranks > 1 else 0
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device(self.device.type, torch.cuda.current_device())
        capability = torch.cuda.get_device_capability(self.device)
        if capability != (9, 0):
            raise DeviceError(
                f"{torch.cuda.get_device_name(self.device)} has compute capability "
                f"{capability[0]}.{capability[1]}: the kernel needs 9.0 (Hopper)"
            )
        bindings.load_on_gpu()
        ranks = Ranks(group)
        if memory is None and ranks.num_ranks != config.num_ranks:
            raise ConfigError(
                f"the group has {ranks.num_ranks} ranks, the layer wants {config.num_ranks}"
            )
        self.memory = memory or shared_memory(group, self.device, self.options)
        super().__init__(
            config,
            keep=choose_keep(self.options.keep, config),
            rank=rank if rank is not None else ranks.rank,
            takes_split=True,
        )
        properties = torch.cuda.get_device_properties(self.device)
        if self.options.filled_slots:  # on one rank, too, which will be several
            check_slots_fit(config, self.options.filled_slots, properties.total_memory)
        sms = properties.multi_processor_count
        self.num_ctas = num_ctas or (sms - self.options.reserved_sms) // CLUSTER_SIZE * CLUSTER_SIZE
        if not CLUSTER_SIZE <= self.num_ctas <= sms:
            raise ConfigError(f"reserved_sms={self.options.reserved_sms}: the GPU has {sms} SMs")
        self._transposed = self._split = False
        self._dtype = torch.bfloat16
        # A layer that cannot be served must not shape the heap of layers that can.
        alone = self._problem_on(bindings.HeapBounds.of(config, self.spare_slots))
        sizes = bindings.FlashMoESizes()
        bindings.call("sizes", alone, sizes)
        self.reads_tokens = bool(sizes.reads_tokens[True])
        self.keep = choose_keep(self.options.keep, config, reads_tokens=self.reads_tokens)
        self.memory.register(config, self.spare_slots)
        self._problem: bindings.FlashMoEProblem | None = None
        self._heap_bounds = self.memory.bounds
        self._bounds: dict[bool, int | None] = {}
        self._sizes = bindings.FlashMoESizes()
        self._tables = AddressTables(config, self.memory, self.device)
        self._early_number = 0
        """Number of the last backward, if fc2's gradients are complete before its end, else 0."""

    @_on_own_device
    def _forward(
        self, given: Given, weights: ExpertWeights
    ) -> tuple[torch.Tensor, SavedForward | NaNResult | torch.Tensor | None]:
        """Leaves it to the backward's launch to look for ranks that have no backward.

        It does so where this host does not wait for the plan, and ``unfollowed`` is empty then.
        """
        num_calls = self.num_calls
        try:
            making = self._making(weights) if self.config.in_fp8 else None
            tables = self._use_weights(weights, making)
        except Exception as error:
            check = functools.partial(given.check_kinds, weights)
            Together(self, num_calls=num_calls).ends(error, check)
            raise
        try:
            if self._pending is not None or self.config.num_ranks > 1:
                self._raise_shared(given.first_plan)
            check_tokens(self.config, *given[:3], dtype=self._dtype, device=self.device)
            if given.router is not None or self.hooks.are_used:
                given = self._through_hooks(given)
            training, bound = given.training, self._bound_now(training=given.training)
            if bound is None:
                pending = self._begin(given, None)
            else:
                # A rank without room for them can still tell the others.
                buffers = self._make_buffers(bound, given, training=training)
                opened = self._open(given)
        except Exception as error:
            check = functools.partial(given.check_kinds, weights)
            together = Together(self, may_be_void=True, num_calls=num_calls)
            if not together.ends(error, check):
                raise
            assert together.void is not None
            return self._end(together.void, given)
        if bound is None:
            return self._finish(pending, tables, making, training=training)
        return self._launch(given, *opened, tables, making, bound, buffers, training=training)

    @_on_own_device
    def settle(
        self, routing_map: torch.Tensor, read_weights: Callable[[], ExpertWeights], *, layer: int
    ) -> None:
        """See :class:`~flashmoe_megatron.call.LooksAhead`; runs on a stream of its own."""
        if not self.spare_slots:
            return
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "placement='lookahead' in a CUDA graph, whose replays would not tell whether "
                "replicas are settled on: wanted 'launch'"
            )
        with self.memory.ahead(routing_map):
            tables: WeightTables | None = None
            # The others are on their way, and this rank's forward sends them the error.
            with contextlib.suppress(ConfigError, ShapeError):
                tables = self._use_weights(read_weights())
            maps, biases = (tables.maps, tables.biases) if tables else (None, None)
            problem = self._prepare()
            with self.memory.promised:
                counts = count_routes(routing_map)
                ops.settle(counts, maps, biases, *_addresses(problem, self.memory.open()))
        self.memory.settled_for = (self, layer)

    def _take_settled(self, layer: int) -> bool:
        """Returns whether the last launch settled this forward's replicas, and forgets it."""
        settled_for, self.memory.settled_for = self.memory.settled_for, None
        return settled_for == (self, layer) and not torch.cuda.is_current_stream_capturing()

    @_on_own_device
    def refuse(self, reason: str) -> NaNResult | None:
        """See :class:`flashmoe_megatron.call.Backend`."""
        self.num_calls += 1
        self.memory.settled_for = None
        if self.config.num_ranks == 1 or torch.cuda.is_current_stream_capturing():
            return None
        problem, group = self._prepare(), self.memory.open()
        is_known = self.memory.has_fault
        with self.memory.promised:
            refusal = bindings.FlashMoEInput(refusal=reason.encode())
            plan = self._empty(self._sizes.plan_bytes)
            bindings.call("plan", problem, group, refusal, plan.data_ptr())
            outcome = self._await_plan(problem, group)
        if self._goes_on(outcome):
            if not is_known:
                logger.error("outputs are NaN until a later call raises on all ranks: %s", reason)
            return self._void(plan, reason)
        error = self._failure(outcome)
        if is_known or outcome.status != bindings.REFUSED:
            raise error
        return None

    def _failure(self, outcome: _PlanOutcome) -> FlashMoEError:
        """Returns a plan's error; without a recorded fault, all ranks allocate new memory."""
        fault = self.memory.take_fault()  # it says more than the status does
        self.memory.is_void = self.memory.is_void or fault is None
        return fault or bindings.error(outcome.status)

    def _goes_on(self, outcome: _PlanOutcome) -> bool:
        """Returns whether a call ends by an error that is raised later, within the timeout."""
        if not (outcome.is_heard_late and self.memory.has_shared_fault):
            return False
        self.memory.is_void = self.memory.seconds_of_fault() > self.options.timeout
        return not self.memory.is_void

    def _void(self, plan: torch.Tensor, reason: str) -> NaNResult:
        """Returns NaN for a failed plan whose error some rank's host learns of later.

        The fault stays. A host that knows of it launches nothing but plans that it waits for, which
        tell it whether all do so. Then all raise, in the same call; until then all go on with NaN,
        and with backwards, so that they are in step however far each is ahead of its GPU.
        """
        keeps_rows = self.keep != "preactivations"
        none = torch.empty(0, self.config.hidden, dtype=self._dtype, device=self.device)
        saved = SavedForward(
            plan=plan,
            rows=self._empty(0) if keeps_rows else None,
            x=None if keeps_rows else none,
            preact=self._empty(0),
            num_row_blocks=0,
            num_tokens=0,
            num_columns=self.config.num_experts,
            probs_dtype=torch.float32,
            layer=0,
        )
        return NaNResult(saved, reason)

    @staticmethod
    def _end(void: NaNResult, given: Given) -> tuple[torch.Tensor, NaNResult]:
        """Returns what a forward gives that ends by an error that is raised later."""
        if given.router is not None:
            given.router.spoil()
        return torch.full_like(given.x, torch.nan), void.of(given.probs)

    def _raise_shared(self, first_plan: torch.Tensor | None) -> None:
        """Raises the error that this rank's host knows of and has to send to all ranks.

        A single rank's host, and a host that captures a graph, raise it at once, as do all whose
        group has given up. A forward that runs again for its backward does not report a backward
        that some rank lacks: it may be a part of one itself, in which that rank learns nothing.
        """
        if first_plan is None:
            self._raise_pending()
        elif self.memory.unfollowed():
            return
        if self._can_share and self.memory.has_shared_fault:
            raise self.memory.fault()

    @property
    def _can_share(self) -> bool:
        return self.config.num_ranks > 1 and not torch.cuda.is_current_stream_capturing()

    @_on_own_device
    def begin(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        num_row_blocks: int | None = None,
        *,
        followed: bool = True,
        first_plan: torch.Tensor | None = None,
    ) -> PendingForward:
        """Begins a forward, for a caller that drives several ranks. Collective.

        With ``num_row_blocks``, the blocks of 128 rows that each buffer of received rows holds,
        nothing is launched yet, and :meth:`finish` launches the whole layer without waiting; if
        some rank receives more, the output of every rank is NaN and the next call, or
        :meth:`raise_pending_fault`, raises. ``None`` launches the plan, which counts the rows. For
        the other arguments see :meth:`~flashmoe_megatron.call.Backend.forward`.
        """
        self._use_layout(self._transposed, self._split, x.dtype)
        self._describe()
        given = Given(x, probs, routing_map, True, followed, first_plan=first_plan)
        check_tokens(self.config, x, probs, routing_map, dtype=self._dtype, device=self.device)
        given = self._through_hooks(given)
        return self._begin(given, num_row_blocks)

    @_on_own_device
    def finish(
        self, pending: PendingForward, weights: ExpertWeights, *, training: bool
    ) -> tuple[torch.Tensor, SavedForward | NaNResult | torch.Tensor | None]:
        """Launches the layer of :meth:`begin`; waits for its plan, if that counts. Collective."""
        making = self._making(weights)
        tables = self._use_weights(weights, making)
        pending.problem = self._describe()
        return self._finish(pending, tables, making, training=training)

    def _through_hooks(self, given: Given) -> Given:
        """Returns a call, whose tokens are checked, as hooks ahead of the launch make it."""
        x, probs, router, hooks = given.x, given.probs, given.router, self.hooks
        if router is not None:
            check_kernel_tensor("router weight", router.weight, self.device, self._dtype)
        if not (hooks.are_used and hooks):
            return given
        if hooks.has("padding") and (value := hooks.pad_value(Call.of("forward", given.layer))):
            raise ConfigError(
                f"a hook before padding returned {value}: wanted 0 on the kernel, whose products "
                "for gradients of weights sum over pad rows, or the backend 'scheduled'"
            )
        if router is None:
            given = self._routed(given)
            tokens = given.x, given.probs, given.routing_map
            check_tokens(self.config, *tokens, dtype=self._dtype, device=self.device)
        elif hooks.has("gate", "capacity"):
            raise ConfigError(
                "a hook of gate or capacity and a router within the launch, before which there is "
                "no routing: wanted fuse_router=False"
            )
        else:
            hooks.probe(self.config, x, probs)
        return given

    def _show_rows(self, rows: torch.Tensor, num_row_blocks: int, layer: int) -> None:
        """Shows hooks the rows that a forward's launch has received, with pads."""
        hidden, row_bytes = self.config.hidden, int(self._sizes.row_block_bytes) // TILE_M
        received = rows.view(num_row_blocks * TILE_M, row_bytes)
        if self.config.in_fp8:
            shown = dequantize(unpack(received, hidden), self._dtype)
        else:
            shown = received.view(self._dtype)
        call = Call.of("forward", layer)
        self.hooks.run("after", "dispatch", shown, call)
        self.hooks.run("after", "padding", shown, call)

    def _make_buffers(
        self,
        num_row_blocks: int,
        given: Given,
        *,
        training: bool,
        plan: torch.Tensor | None = None,
    ) -> _Buffers:
        """Allocates what a launch writes to, also its plan if there is none yet.

        Without ``training`` a plan lives no longer than the scratch, and neither do rows that no
        hook sees. They are one allocation then, since each keeps the GPU waiting for this host.
        """
        sizes = self._sizes
        shows_rows = self.hooks.are_used and self._shows_rows
        has_rows = (
            not sizes.reads_tokens[False] or (training and self._keeps_rows(given)) or shows_rows
        )
        # Without pre-activations one of several ranks may leave rows of its own out.
        has_preact = training or shows_rows
        scratch_bytes = num_row_blocks * sizes.scratch_block_bytes[False]
        row_bytes = num_row_blocks * sizes.row_block_bytes if has_rows else 0
        out = torch.empty_like(given.x)
        if plan is None and not training and not shows_rows:
            rows_at = sizes.plan_bytes + scratch_bytes
            plan = self._empty(rows_at + row_bytes)
            return _Buffers(None, None, None, out, plan, rows_at if has_rows else 0)
        return _Buffers(
            self._empty(row_bytes) if has_rows else None,
            self._empty(num_row_blocks * sizes.preact_block_bytes) if has_preact else None,
            self._empty(scratch_bytes),
            out,
            self._empty(sizes.plan_bytes) if plan is None else plan,
            0,
        )

    @property
    def _shows_rows(self) -> bool:
        """Tells whether hooks see the rows that a forward has received."""
        return self.hooks.has("dispatch", "padding")

    def _keeps_rows(self, given: Given) -> bool:
        """Returns whether a forward for training keeps rows: for gradients of fc1."""
        keep = self.keep
        if given.gives_rows:  # then tokens are no reason to keep none
            keep = choose_keep(self.options.keep, self.config)
        # The experts in spare slots may be trained on other ranks.
        return keep != "preactivations" and (given.trains_fc1 or self.spare_slots > 0)

    def _keeps_tokens(self, given: Given) -> bool:
        """Returns whether a forward for training keeps its tokens, to read or fetch them again."""
        if self.keep != "preactivations" or self._keeps_rows(given):
            return False
        # All ranks fetch rows again, though one may not need them.
        return given.trains_fc1 or self.config.num_ranks > 1

    def _begin(self, given: Given, num_row_blocks: int | None) -> PendingForward:
        plan = self._empty(self._sizes.plan_bytes)
        problem, group, is_settled = self._open(given)
        if num_row_blocks is None:
            with self.memory.promised:
                arguments = ops.arguments(given, given.router, is_settled=is_settled)
                ops.plan(plan, *_addresses(problem, group), *arguments)
        return PendingForward(given, problem, group, is_settled, plan, num_row_blocks)

    def _open(self, given: Given) -> tuple[bindings.FlashMoEProblem, bindings.FlashMoEGroup, bool]:
        """Begins this rank's part in a forward, which concerns every rank from now on.

        Returns the problem, the group, and whether the forward's replicas have been settled on.
        """
        self.num_calls += 1
        self.unfollowed = ()
        memory, problem = self.memory, self._problem
        if problem is None or memory.fault_code.value or memory.needs(self._sizes):
            problem = self._prepare()
        try:
            is_settled = memory.settled_for is not None and self._take_settled(given.layer)
            return problem, memory.open(), is_settled
        except BaseException:  # as `memory.promised`, which takes longer where nothing is wrong
            memory.is_void = True
            raise

    def _finish(
        self,
        pending: PendingForward,
        tables: WeightTables,
        making: Making | None,
        *,
        training: bool,
    ) -> tuple[torch.Tensor, SavedForward | NaNResult | torch.Tensor | None]:
        """Waits for the plan, if that is under way, and launches the layer."""
        given, blocks = pending.given, pending.num_row_blocks
        is_planned = blocks is None
        if blocks is None:
            # A fault that the plan has left by now is its outcome, which every rank has.
            with self.memory.promised:
                outcome = self._await_plan(pending.problem, pending.group)
            if self._goes_on(outcome):
                void = self._void(pending.plan, reason_of(self.memory.fault()))
                return self._end(void, given)
            if outcome.status != bindings.OK:
                if given.first_plan is not None:  # else all ranks have the fault
                    self._put_off_unmatched()
                raise self._failure(outcome)
            self.unfollowed = bindings.ranks_of(outcome.unfollowed)
            blocks = outcome.num_row_blocks
            self.attempts.note(blocks)
        with self.memory.promised:
            buffers = self._make_buffers(blocks, given, training=training, plan=pending.plan)
        opened = pending.problem, pending.group, pending.is_settled
        return self._launch(
            given,
            *opened,
            tables,
            making,
            blocks,
            buffers,
            training=training,
            is_planned=is_planned,
        )

    def _launch(
        self,
        given: Given,
        problem: bindings.FlashMoEProblem,
        group: bindings.FlashMoEGroup,
        is_settled: bool,
        tables: WeightTables,
        making: Making | None,
        num_row_blocks: int,
        buffers: _Buffers,
        *,
        training: bool,
        is_planned: bool = False,
    ) -> tuple[torch.Tensor, SavedForward | torch.Tensor | None]:
        """Launches the layer, which also plans unless its plan has come to its end."""
        rows, preact, scratch, out, plan, rows_at = buffers
        router = None if is_planned else given.router  # which has run in the plan
        try:
            ops.forward(
                plan,
                tables.maps,
                tables.copies,
                tables.biases,
                rows,
                preact,
                scratch,
                out,
                num_row_blocks,
                making is not None and making.is_current,
                is_planned,
                given.layer,
                self._sizes.plan_bytes,
                rows_at,
                ctypes.addressof(problem),
                ctypes.addressof(group),
                *ops.arguments(given, router, is_settled=is_settled),
            )
        except BaseException:
            self.memory.is_void = True
            raise
        if making is not None:
            making.note()
        if rows is not None and self.hooks.are_used and self._shows_rows:
            self._show_rows(rows, num_row_blocks, given.layer)
        if preact is None or not training:
            return out, self._header_of(plan) if given.followed else None
        saved = SavedForward(
            plan=plan,
            rows=rows if self._keeps_rows(given) else None,
            x=given.x if self._keeps_tokens(given) else None,
            preact=preact,
            num_row_blocks=num_row_blocks,
            num_tokens=given.x.shape[0],
            num_columns=given.probs.shape[1],
            probs_dtype=given.probs.dtype,
            layer=given.layer,
        )
        return out, saved

    def _header_of(self, plan: torch.Tensor) -> torch.Tensor | None:
        """Copies what a plan says of other ranks, for a second run of its forward in backward."""
        return plan[: bindings.PLAN_HEADER_BYTES].clone() if self.config.num_ranks > 1 else None

    @staticmethod
    def _await_plan(
        problem: bindings.FlashMoEProblem, group: bindings.FlashMoEGroup
    ) -> _PlanOutcome:
        blocks, num_rows, is_heard_late = (ctypes.c_int32() for _ in range(3))
        unfollowed = ctypes.c_uint32()
        arguments = (problem, group, blocks, num_rows, unfollowed, is_heard_late)
        status = bindings.function("await_plan")(*map(ctypes.byref, arguments))
        return _PlanOutcome(status, blocks.value, unfollowed.value, bool(is_heard_late.value))

    @_on_own_device
    def _backward(
        self,
        grad_out: torch.Tensor,
        saved: SavedForward | NaNResult,
        weights: ExpertWeights,
        grads: Grads,
        factors: Factors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(saved, NaNResult):
            dtype = (weights.fc1 or weights.fc2)[0].dtype
            none = torch.empty(0, self.config.hidden, dtype=dtype, device=self.device)
            self._backward(none, saved.saved, weights, grads, factors)
            return saved.gradients(grad_out)
        try:
            check_grad_out(self.config, grad_out, saved.num_tokens)
            grad_out = grad_out.contiguous()
            if grad_out.data_ptr() % ALIGNMENT_BYTES:  # a slice of something else's gradient
                grad_out = grad_out.clone()
            making = self._making(weights, is_backward=True)
            tables = self._use_weights(weights, making, is_backward=True)
            problem = self._problem
            assert problem is not None
            check_kernel_tensor("grad_out", grad_out, self.device, self._dtype)
            if saved.x is not None:  # which hooks on saved tensors may have moved
                check_kernel_tensor("x of the forward", saved.x, self.device, self._dtype)
            try:
                written, table = self._use_grads(grads, problem)
                is_void = False
            except (AttributeError, TypeError, ShapeError) as error:
                unread = self._for_nobody(self._unusable(error, grads), weights, grads)
                written, table = self._use_grads(unread, problem)
                is_void = True
        except BaseException:
            self.memory.is_void = True
            raise
        memory = self.memory
        if memory.fault_code.value or memory.needs(self._sizes):
            problem = self._prepare()
        try:
            memory.settled_for = None
            addresses = _addresses(problem, memory.open())
            number = memory.early_fc2.next_backward()
            blocks, rows, x = saved.num_row_blocks, saved.rows, saved.x
            reads = self._sizes.reads_tokens[True]
            # Factors of fc1 are given rows, also where none are kept.
            if x is not None and (factors.fc1 is not None or reads != bindings.READS_TOKENS):
                rows = self._empty(blocks * self._sizes.row_block_bytes)
                if reads == bindings.READS_NO_TOKENS:
                    ops.gather(x, saved.plan, rows, blocks, *addresses)
                    x = None
            dtype, accumulate = written.form or (self._dtype, False)
            scratch = self._empty(blocks * self._sizes.scratch_block_bytes[True])
            grad_x = torch.empty_like(grad_out)
            grad_probs = torch.empty(
                saved.num_tokens, saved.num_columns, dtype=saved.probs_dtype, device=self.device
            )
            ops.backward(
                grad_out,
                saved.plan,
                tables.maps,
                tables.copies,
                tables.biases,
                rows,
                x,
                saved.preact,
                scratch,
                grad_x,
                grad_probs,
                table,
                blocks,
                making is not None and making.is_current,
                ops.dtype_code(dtype),
                accumulate,
                number,
                saved.layer,
                *addresses,
            )
        except BaseException:
            self.memory.is_void = True
            raise
        if making is not None:
            making.note()
        if factors.wanted:
            left = BackwardRows(problem, grad_out, rows, saved.plan, scratch, blocks)
            left.give(self.config, factors)
        written.settle()
        self._early_number = number if written.are_own else 0
        if is_void:
            self._spoil(grad_x, grad_probs, factors)
        return grad_x, grad_probs

    def _use_grads(
        self, targets: Grads, problem: bindings.FlashMoEProblem
    ) -> tuple[UniformGrads, torch.Tensor]:
        grads = UniformGrads(list(itertools.chain(*targets)))
        return grads, self._tables.of_grads(grads, self._dtype, problem, self._sizes)

    @_on_own_device
    def early_fc2_grads(self) -> contextlib.AbstractContextManager[object] | None:
        """See :class:`flashmoe_megatron.call.Backend`."""
        number = self._early_number
        if not number or number != self.memory.early_fc2.num_backwards:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = self.memory.early_fc2.stream_behind(self.memory.last_group)
        return None if stream is None else torch.cuda.stream(stream)

    @property
    @_on_own_device
    def traffic(self) -> TrafficCounters:
        """Counts of rows that this rank's kernels have moved so far, for all layers of the group.

        Bytes are those of rows as wide as this layer's. Waits for the current stream.
        """
        if self.memory.heap_bytes == 0:
            return TrafficCounters()
        counts = bindings.FlashMoECounters()
        bindings.call("read_counters", self.memory.open(), counts)
        moved, in_fp8 = (
            sum(by_rank) - by_rank[self.rank]
            for by_rank in (
                [*map(sum, zip(counts.rows_pulled, counts.results_pushed, strict=True))],
                counts.rows_pulled_in_fp8,
            )
        )
        hidden = self.config.hidden
        return TrafficCounters(
            rows_sent=moved,
            bytes_sent=(moved - in_fp8) * hidden * 2 + in_fp8 * fp8_row_bytes(hidden),
            pad_rows_sent=counts.pad_rows_pulled,
            pad_rows_local=counts.pad_rows_made,
        )

    def raise_pending_fault(self) -> None:
        """Raises what a launch found wrong that the host did not wait for; see the base class.

        Ranks are in step after it where each has waited for its GPU before it. Usable after CUDA
        itself has failed. The group can be used again afterwards; after a timeout its next call
        allocates new memory, on all ranks.
        """
        if self.memory.has_fault:  # which is asked before every launch, of host memory alone
            self._raise_fault()

    def _look_for_fault(self) -> None:
        """Raises an earlier launch's fault, or puts it off: then this one goes on without rows."""
        try:
            self.raise_pending_fault()
        except FlashMoEError as error:
            if not self.attempts.put_off(error):
                raise

    @_on_own_device
    def _raise_fault(self) -> None:
        self._put_off_unmatched()
        error = self.memory.take_fault()
        if error is not None:
            raise error

    def _put_off_unmatched(self) -> None:
        """Has ranks that lack a backward which this rank ran learn of it in their next call."""
        if unfollowed := self.memory.unfollowed():
            self.put_off(unmatched_backward(unfollowed))

    def take_records(self) -> list[LaunchRecord]:
        """See :class:`flashmoe_megatron.call.Backend`. All layers of a group share them."""
        return self.memory.take_records(self.config.num_ranks)

    @property
    def heap_bytes(self) -> int:
        """Bytes of symmetric memory on every rank, for this layer or for all that share it."""
        self._describe()
        return max(int(self._sizes.heap_bytes), self.memory.heap_bytes)

    def _describe(self) -> bindings.FlashMoEProblem:
        """The problem on the group's current heap.

        A heap that grows between a forward and its backward changes nothing in the plan, which is
        laid out for this layer's own bound.
        """
        problem = self._problem
        if problem is None or self._heap_bounds != self.memory.bounds:
            problem = self._problem_on(self.memory.bounds)
            bindings.call("sizes", problem, self._sizes)
            bindings.call("preload", problem)
            self._problem, self._heap_bounds = problem, self.memory.bounds
            self._bounds = {training: self._row_block_bound(training) for training in (False, True)}
        return problem

    def _problem_on(self, heap: bindings.HeapBounds) -> bindings.FlashMoEProblem:
        return bindings.problem_of(
            self.config,
            rank=self.rank,
            dtype=ops.dtype_code(self._dtype),
            transposed=self._transposed,
            split=self._split,
            num_ctas=self.num_ctas,
            heap=heap,
            timeout=self.options.timeout,
            spare_slots=self.spare_slots,
            replica_policy=self.options.replica_policy,
            rank_invariant=self.options.rank_invariant,
        )

    def _row_block_bound(self, training: bool) -> int | None:
        """Blocks of rows that every buffer holds, or ``None`` to count them first."""
        most = int(self._sizes.max_row_blocks)
        if self.options.row_bound is not None:
            bound = self.options.row_bound
            return min(most, bounded_row_blocks(self.config, bound, self.spare_slots))
        return None if training else transient_blocks(self._sizes)

    def _bound_now(self, *, training: bool) -> int | None:
        """Returns what :meth:`_row_block_bound` does, in a step that may be repeated."""
        bound = self._bounds[training]
        if self.options.row_bound is None:
            return bound
        bound = self.attempts.bound(bound)
        return None if bound is None else min(self._sizes.max_row_blocks, bound)

    def _prepare(self) -> bindings.FlashMoEProblem:
        """Returns the problem, with memory for it. Collective where new memory is made.

        A launch asks the memory itself first, whether there is a fault or too little of it, and
        comes here where there is; to raise a fault may change what is needed.
        """
        memory = self.memory
        if memory.has_fault and not (self._can_share and memory.has_shared_fault):
            self._look_for_fault()
        problem = self._describe()
        if memory.needs(self._sizes):
            if memory.has_heap:
                torch.cuda.synchronize(self.device)
                self._look_for_fault()  # which every rank has by now, and the new one forgets
            memory.allocate(self._sizes)
        return problem

    def _making(self, weights: ExpertWeights, *, is_backward: bool = False) -> Making | None:
        """Returns what is known of a pass's copies while their owner promises something.

        A backward in bfloat16 has none of its own: what it reads has twice the bytes, and is made
        ahead of each.
        """
        if is_backward:
            return weights.making(TRANSPOSES) if self.config.has_fp8_dgrad else None
        return weights.making(COPIES) if self.config.in_fp8 else None

    def _use_weights(
        self, weights: ExpertWeights, making: Making | None = None, *, is_backward: bool = False
    ) -> WeightTables:
        """Makes the problem one of these weights' dtype and layout; returns their tables.

        A pass that ``making`` is of has copies of its own, and may be a backward.
        """
        layout = weights.transposed, weights.split, (weights.fc1 or weights.fc2)[0].dtype
        if layout != (self._transposed, self._split, self._dtype):
            # As the library would, but in the caller's terms; tables of weights do so, too.
            check_split(self.config, weights)
            has_biases = bool(weights.fc1_bias or weights.fc2_bias)
            check_fp8(self.config, layout[2], transposed=layout[0], has_biases=has_biases)
            self._use_layout(*layout)
        problem = self._describe()
        if self.spare_slots and self.memory.needs(self._sizes):
            self._prepare()  # spare slots are in the heap
        copies = None
        if making is not None:
            copies = self._tables.own_copies(making, self._sizes.weight_copy_bytes[is_backward])
        return self._tables.of_weights(weights, problem, self._sizes, copies)

    def _use_layout(self, transposed: bool, split: bool, dtype: torch.dtype) -> None:
        if (transposed, split, dtype) == (self._transposed, self._split, self._dtype):
            return
        if dtype not in KERNEL_DTYPES:
            wanted = " or ".join(str(one) for one in KERNEL_DTYPES)
            raise ShapeError(f"the experts' weights are {dtype}, wanted {wanted} on the kernel")
        self._transposed, self._split, self._dtype = transposed, split, dtype
        self._problem = None

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
