"""The fused kernel as a backend: memory shared by all layers of a group, and the calls."""

import ctypes
import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from flashmoe_megatron import _native, ops, symmetric
from flashmoe_megatron.backend import ExpertWeights, TrafficCounters, WeightGrad
from flashmoe_megatron.checks import check_weights
from flashmoe_megatron.config import (
    MAX_RANKS,
    MAX_ROW_BOUND,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    TILE_M,
    MoEConfig,
    is_count,
    is_number,
)
from flashmoe_megatron.errors import ConfigError, DeviceError, FlashMoEError, ShapeError
from flashmoe_megatron.gradients import UniformGrads
from flashmoe_megatron.records import launch_record
from flashmoe_megatron.telemetry.record import LaunchRecord

logger = logging.getLogger("flashmoe_megatron")

DEFAULT_TIMEOUT_S = 120.0
TRANSIENT_BYTES = 8 * 2**30
"""A forward that keeps nothing may take this much for the most rows that there can be."""
CLUSTER_SIZE = 2
"""CTAs that work together, on neighbouring SMs: the grid is a multiple of it."""
DEFAULT_RESERVED_SMS = 4
"""SMs that the persistent kernel leaves to other kernels, NCCL's above all."""


@dataclass(frozen=True)
class KernelOptions:
    """How the kernel runs; the same on every rank.

    Attributes:
        symmetric_backend: "cuda" or "nvshmem".
        timeout_s: Bound of every wait for a peer, seconds.
        reserved_sms: SMs left to other kernels.
        row_bound: What every buffer of received rows holds, as a multiple of the mean number of
            rows per rank; a rank that is to receive more is an error, nothing is ever dropped. The
            layer is then one launch that the host never waits for, and CUDA graphs can capture it.
            ``None``: buffers are exact, for which the host waits until the rows are counted.
    """

    symmetric_backend: symmetric.SymmetricBackend = "cuda"
    timeout_s: float = DEFAULT_TIMEOUT_S
    reserved_sms: int = DEFAULT_RESERVED_SMS
    row_bound: float | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot work."""
        if not is_number(self.timeout_s, least=MIN_TIMEOUT_S, most=MAX_TIMEOUT_S):
            raise ConfigError(
                f"timeout_s={self.timeout_s!r}: must be positive, wanted {MIN_TIMEOUT_S:g} to "
                f"{MAX_TIMEOUT_S:g} seconds"
            )
        if not is_count(self.reserved_sms, least=0):
            raise ConfigError(f"reserved_sms={self.reserved_sms!r}: must not be negative")
        if self.row_bound is not None and not is_number(
            self.row_bound, least=1, most=MAX_ROW_BOUND
        ):
            raise ConfigError(
                f"row_bound={self.row_bound!r}: wanted None, or at least 1, at most "
                f"{MAX_ROW_BOUND:g}"
            )


DTYPES = (torch.bfloat16, torch.float16)
"""What tokens and weights may be."""


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


class GroupMemory:
    """What all layers of one expert-parallel group share: heap, workspace and mailbox.

    Sized by the largest layer registered so far, allocated at the first call that needs it. All
    ranks build the same layers in the same order, so they allocate together.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, options: KernelOptions
    ) -> None:
        self.group = group
        self.device = device
        self.options = options
        self.trace: torch.Tensor | None = None  # for a library built to trace
        self.max_tokens = 0
        self._heap: symmetric.SymmetricAllocation | None = None
        self.heap_bytes = 0
        """Bytes of the symmetric heap; 0 before the first call."""
        self._workspace = torch.empty(0)
        self._workspace_bytes = 0
        self._mailbox = torch.empty(0)
        self._fault_code = ctypes.c_uint32()
        self._groups: dict[int, _native.FlashMoEGroup] = {}  # by stream
        self.is_void = False
        """Some rank has given up waiting: ranks no longer agree on the launches, and all have to
        allocate anew."""
        self._last_record = _native.FlashMoERecord()
        self._last_stream: int | None = None

    def register(self, config: MoEConfig) -> None:
        """Adds a layer; a larger one than any before grows the memory at its first call."""
        self.max_tokens = max(self.max_tokens, config.max_tokens)

    def needs(self, sizes: _native.FlashMoESizes) -> bool:
        """Whether the memory is smaller than ``sizes``."""
        return (
            self._heap is None
            or self.is_void
            or self.heap_bytes < sizes.heap_bytes
            or self._workspace_bytes < sizes.workspace_bytes
        )

    def allocate(self, sizes: _native.FlashMoESizes) -> None:
        """Allocates anew, never less than before. Collective over the group."""
        heap_bytes = max(int(sizes.heap_bytes), self.heap_bytes)
        workspace_bytes = max(int(sizes.workspace_bytes), self._workspace_bytes)
        torch.cuda.synchronize(self.device)
        self._heap, self.heap_bytes = None, 0
        self._heap = symmetric.allocate(
            heap_bytes, self.group, self.device, self.options.symmetric_backend
        )
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=self.device)
        self._mailbox = torch.zeros(sizes.mailbox_bytes, dtype=torch.uint8).pin_memory()
        self._fault_code = ctypes.c_uint32.from_address(self._mailbox.data_ptr())
        self.heap_bytes, self._workspace_bytes = heap_bytes, workspace_bytes
        self._groups.clear()
        self._last_record = _native.FlashMoERecord()
        self.is_void = False
        if self.group is None or dist.get_rank(self.group) == 0:
            logger.warning(
                "symmetric heap: %.1f MiB on each of %d ranks (%s), shared by all MoE layers",
                heap_bytes / 2**20,
                len(self._heap.addresses),
                self.options.symmetric_backend,
            )

    def open(self) -> _native.FlashMoEGroup:
        """The group as the library sees it, on the current stream."""
        assert self._heap is not None
        # What torch.cuda.current_stream() asks, without a stream object for every launch.
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._last_stream:
            self._follow(stream)
        group = self._groups.get(stream)
        if group is None:
            group = self._groups[stream] = _native.FlashMoEGroup(
                heaps=(ctypes.c_void_p * MAX_RANKS)(*self._heap.addresses),
                workspace=self._workspace.data_ptr(),
                mailbox=self._mailbox.data_ptr(),
                stream=stream,
            )
        group.trace = self.trace.data_ptr() if self.trace is not None else None
        return group

    def _follow(self, stream: int) -> None:
        """Puts the launches on this stream behind those on the last one: all share their memory."""
        last, self._last_stream = self._last_stream, stream
        if last is not None and not torch.cuda.is_current_stream_capturing():
            before = torch.cuda.ExternalStream(last, device=self.device)  # type: ignore[no-untyped-call]
            torch.cuda.current_stream(self.device).wait_stream(before)

    @property
    def has_fault(self) -> bool:
        """Whether a launch has left a fault that nobody has been told of."""
        return self._heap is not None and self._fault_code.value != 0

    def take_fault(self) -> FlashMoEError | None:
        """The error that a launch has left, once."""
        if not self.has_fault:
            return None
        group = self.open()
        fault = _native.read_fault(group)
        if fault is None:
            return None
        self.is_void = fault.code == _native.PEER_TIMEOUT
        _native.clear_fault(group)
        return _native.fault_error(fault)

    def take_records(self, num_ranks: int) -> list[LaunchRecord]:
        """What launches have ended since the last call, oldest first; waits for none."""
        if self._heap is None:
            return []
        group = self.open()
        records: list[LaunchRecord] = []
        while True:
            last, record = self._last_record, _native.FlashMoERecord()
            sequence = last.sequence + 1
            _native.call("read_record", group, ctypes.c_uint64(sequence), record)
            if record.sequence == 0:
                return records
            if record.sequence == sequence:
                records.append(launch_record(record, last, num_ranks))
                self._last_record = record
            else:  # the ring has gone round: go on with what it still holds
                self._last_record = _native.FlashMoERecord(sequence=record.sequence - 1)


_memories: dict[tuple[int, torch.device, KernelOptions], GroupMemory] = {}


def _shared_memory(
    group: dist.ProcessGroup | None, device: torch.device, options: KernelOptions
) -> GroupMemory:
    """One memory per group and device. It keeps its group, so the key stays that group's own."""
    key = (id(group), device, options)
    if key not in _memories:
        _memories[key] = GroupMemory(group, device, options)
    return _memories[key]


@dataclass
class SavedForward:
    """What a forward keeps for its backward."""

    plan: torch.Tensor
    kept: torch.Tensor
    num_row_blocks: int
    num_tokens: int
    probs_dtype: torch.dtype
    layer: int


@dataclass(frozen=True)
class WeightTables:
    """Where the kernel finds the experts' weights.

    Attributes:
        maps: TMA descriptors of all matrices, on the device.
        biases: Addresses of fc1's and then fc2's biases, on the device; ``None`` without any.
    """

    maps: torch.Tensor
    biases: torch.Tensor | None


@dataclass
class PendingForward:
    """A forward whose plan is under way."""

    group: _native.FlashMoEGroup
    plan: torch.Tensor
    x: torch.Tensor
    probs: torch.Tensor
    routing_map: torch.Tensor


def _addresses(problem: _native.FlashMoEProblem, group: _native.FlashMoEGroup) -> tuple[int, int]:
    """What an operator takes in place of structs; they have to outlive the call."""
    return ctypes.addressof(problem), ctypes.addressof(group)


_MOST_LAYERS = 1024
_Table = TypeVar("_Table")


def _remember(
    tables: dict[tuple[Hashable, ...], _Table], key: tuple[Hashable, ...], table: _Table
) -> None:
    """Keeps one table per layer that shares the backend; weights that move must not pile up."""
    if len(tables) >= _MOST_LAYERS:
        tables.clear()
    tables[key] = table


class KernelBackend:
    """The routed experts of one layer as one persistent kernel per direction.

    Args:
        config: The layer's shape.
        group: The expert-parallel group, ``None`` for one rank.
        device: This rank's Hopper GPU.
        memory: Shared memory to use in place of the group's own (virtual ranks in one process).
        rank: This rank, where ``memory`` is given.
        **options: Fields of :class:`KernelOptions`.

    Raises:
        DeviceError: The device is not a Hopper GPU, or the library cannot be loaded.
        ConfigError: An option cannot be honoured.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        *,
        memory: GroupMemory | None = None,
        rank: int | None = None,
        num_ctas: int | None = None,
        **options: object,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device(self.device.type, torch.cuda.current_device())
        capability = torch.cuda.get_device_capability(self.device)
        if capability != (9, 0):
            raise DeviceError(
                f"{torch.cuda.get_device_name(self.device)} has compute capability "
                f"{capability[0]}.{capability[1]}: the kernel needs 9.0 (Hopper)"
            )
        _native.load()
        self.options = KernelOptions(**options)  # type: ignore[arg-type]
        size = 1 if group is None else dist.get_world_size(group)
        if memory is None and size != config.num_ranks:
            raise ConfigError(f"the group has {size} ranks, the layer wants {config.num_ranks}")
        self.memory = memory or _shared_memory(group, self.device, self.options)
        self.memory.register(config)
        self.rank = rank if rank is not None else (0 if group is None else dist.get_rank(group))
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.num_ctas = num_ctas or (sms - self.options.reserved_sms) // CLUSTER_SIZE * CLUSTER_SIZE
        if not CLUSTER_SIZE <= self.num_ctas <= sms:
            raise ConfigError(f"reserved_sms={self.options.reserved_sms}: the GPU has {sms} SMs")
        self._transposed = False
        self._dtype = torch.bfloat16
        self._problem: _native.FlashMoEProblem | None = None
        self._heap_tokens = 0
        self._bounds: dict[bool, int | None] = {}
        self._sizes = _native.FlashMoESizes()
        self._tables: dict[tuple[Hashable, ...], WeightTables] = {}
        self._grad_tables: dict[tuple[Hashable, ...], torch.Tensor] = {}

    def forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        weights: ExpertWeights,
        *,
        training: bool,
        layer: int = 0,
    ) -> tuple[torch.Tensor, SavedForward | None]:
        """See :class:`flashmoe_megatron.backend.Backend`."""
        tables = self._encode(weights)  # refuses bad weights while no peer waits for this rank
        self._describe()
        bound = self._bounds[training]
        if bound is None:
            pending = self._begin_forward(x, probs, routing_map)
            try:
                return self._finish_forward(pending, tables, training=training, layer=layer)
            except FlashMoEError:
                raise
            except BaseException:
                # The peers will wait for this rank's layer in vain, and make new memory.
                self.memory.is_void = True
                raise
        return self._bounded_forward(
            x, probs, routing_map, tables, bound, training=training, layer=layer
        )

    def bounded_forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        weights: ExpertWeights,
        num_row_blocks: int,
        *,
        training: bool,
    ) -> tuple[torch.Tensor, SavedForward | None]:
        """The whole layer in one launch that the host never waits for. Collective.

        Args:
            x: See :meth:`forward`, as the others.
            probs: See there.
            routing_map: See there.
            weights: See there.
            training: See there.
            num_row_blocks: What each buffer of received rows holds, in blocks of 128 rows. If some
                rank receives more, the output of every rank is NaN and the next call, or
                :meth:`raise_pending_fault`, raises.
        """
        tables = self._encode(weights)
        return self._bounded_forward(
            x, probs, routing_map, tables, num_row_blocks, training=training, layer=0
        )

    def _bounded_forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        tables: WeightTables,
        num_row_blocks: int,
        *,
        training: bool,
        layer: int,
    ) -> tuple[torch.Tensor, SavedForward | None]:
        self._check_inputs(x, probs, routing_map)
        problem = self._prepare()
        plan = self._empty(self._sizes.plan_bytes)
        pending = PendingForward(self.memory.open(), plan, x, probs, routing_map)
        return self._launch_forward(
            problem,
            pending,
            tables,
            num_row_blocks,
            training=training,
            is_planned=False,
            layer=layer,
        )

    def begin_forward(
        self, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> PendingForward:
        """Launches the plan. Collective."""
        self._adopt(self._transposed, x.dtype)
        return self._begin_forward(x, probs, routing_map)

    def _begin_forward(
        self, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> PendingForward:
        self._check_inputs(x, probs, routing_map)
        problem = self._prepare()
        group = self.memory.open()
        plan = self._empty(self._sizes.plan_bytes)
        ops.plan(x, probs, routing_map, plan, *_addresses(problem, group))
        return PendingForward(group, plan, x, probs, routing_map)

    def finish_forward(
        self, pending: PendingForward, weights: ExpertWeights, *, training: bool
    ) -> tuple[torch.Tensor, SavedForward | None]:
        """Waits for the row count, then launches the layer. Collective."""
        return self._finish_forward(pending, self._encode(weights), training=training, layer=0)

    def _finish_forward(
        self, pending: PendingForward, tables: WeightTables, *, training: bool, layer: int
    ) -> tuple[torch.Tensor, SavedForward | None]:
        problem, group = self._prepare(), pending.group
        blocks, num_rows = ctypes.c_int32(), ctypes.c_int32()
        try:
            _native.call("await_plan", problem, group, ctypes.byref(blocks), ctypes.byref(num_rows))
        except FlashMoEError:
            self.raise_pending_fault()  # says more
            raise
        return self._launch_forward(
            problem,
            pending,
            tables,
            blocks.value,
            training=training,
            is_planned=True,
            layer=layer,
        )

    def _launch_forward(
        self,
        problem: _native.FlashMoEProblem,
        pending: PendingForward,
        tables: WeightTables,
        num_row_blocks: int,
        *,
        training: bool,
        is_planned: bool,
        layer: int,
    ) -> tuple[torch.Tensor, SavedForward | None]:
        sizes = self._sizes
        kept = self._empty(num_row_blocks * sizes.kept_block_bytes[training])
        scratch = self._empty(num_row_blocks * sizes.scratch_block_bytes[False])
        out = torch.empty_like(pending.x)
        ops.forward(
            pending.x,
            pending.probs,
            pending.routing_map,
            pending.plan,
            tables.maps,
            tables.biases,
            kept,
            scratch,
            out,
            num_row_blocks,
            training,
            is_planned,
            layer,
            *_addresses(problem, pending.group),
        )
        if not training:
            return out, None
        saved = SavedForward(
            plan=pending.plan,
            kept=kept,
            num_row_blocks=num_row_blocks,
            num_tokens=pending.x.shape[0],
            probs_dtype=pending.probs.dtype,
            layer=layer,
        )
        return out, saved

    def backward(
        self,
        grad_out: torch.Tensor,
        saved: SavedForward,
        weights: ExpertWeights,
        grad_fc1: Sequence[WeightGrad],
        grad_fc2: Sequence[WeightGrad],
        grad_fc1_bias: Sequence[WeightGrad] = (),
        grad_fc2_bias: Sequence[WeightGrad] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`flashmoe_megatron.backend.Backend`."""
        grad_out = grad_out.contiguous()
        tables = self._encode(weights)
        self._check_input("grad_out", grad_out, self._dtype)
        grads = UniformGrads([*grad_fc1, *grad_fc2, *grad_fc1_bias, *grad_fc2_bias])
        table, grads_dtype, accumulate = self._grad_table(grads.grads)
        problem = self._prepare()
        addresses = _addresses(problem, self.memory.open())
        blocks = saved.num_row_blocks
        scratch = self._empty(blocks * self._sizes.scratch_block_bytes[True])
        grad_x = torch.empty_like(grad_out)
        grad_probs = torch.empty(
            saved.num_tokens, self.config.num_experts, dtype=saved.probs_dtype, device=self.device
        )
        ops.backward(
            grad_out,
            saved.plan,
            tables.maps,
            tables.biases,
            saved.kept,
            scratch,
            grad_x,
            grad_probs,
            blocks,
            saved.layer,
            *addresses,
        )
        ops.wgrad(
            saved.plan,
            tables.biases,
            saved.kept,
            scratch,
            table,
            blocks,
            grads_dtype,
            accumulate,
            *addresses,
        )
        grads.settle()
        return grad_x, grad_probs

    @property
    def traffic(self) -> TrafficCounters:
        """What this rank's kernels have moved for all layers of the group so far.

        Waits for the current stream.
        """
        counts = _native.FlashMoECounters()
        _native.call("read_counters", self.memory.open(), counts)
        rows = sum(counts.rows_pulled) + sum(counts.results_pushed)
        rows -= counts.rows_pulled[self.rank] + counts.results_pushed[self.rank]
        return TrafficCounters(
            rows_sent=rows,
            bytes_sent=rows * self.config.hidden * 2,
            pad_rows_sent=counts.pad_rows_pulled,
            pad_rows_local=counts.pad_rows_made,
        )

    def raise_pending_fault(self) -> None:
        """Raises what a launch found wrong that the host did not wait for.

        Usable after CUDA itself has failed. The group can be used again afterwards; after a timeout
        its next call allocates its memory anew, on all ranks.

        Raises:
            RowBoundError: A rank was to receive more rows than ``row_bound`` allows.
            RoutingError: The routing of some rank cannot be used.
            PeerTimeoutError: A wait ran out of time, on this rank or on another.
        """
        error = self.memory.take_fault()
        if error is not None:
            raise error

    def take_records(self) -> list[LaunchRecord]:
        """See :class:`flashmoe_megatron.backend.Backend`. All layers of a group share them."""
        return self.memory.take_records(self.config.num_ranks)

    @property
    def heap_bytes(self) -> int:
        """Bytes of symmetric memory on every rank, for this layer or for what it shares it with."""
        self._describe()
        return max(int(self._sizes.heap_bytes), self.memory.heap_bytes)

    def _describe(self) -> _native.FlashMoEProblem:
        """The problem on the group's current heap.

        A heap that grows between a forward and its backward changes nothing in the plan, which is
        laid out for this layer's own bound.
        """
        problem, config = self._problem, self.config
        if problem is None or self._heap_tokens != self.memory.max_tokens:
            problem = _native.FlashMoEProblem(
                rank=self.rank,
                num_ranks=config.num_ranks,
                hidden=config.hidden,
                intermediate=config.intermediate,
                num_experts=config.num_experts,
                topk=config.topk,
                max_tokens=config.max_tokens,
                dtype=ops.dtype_code(self._dtype),
                activation=_native.ACTIVATIONS[config.activation],
                is_gated=config.gated,
                is_transposed=self._transposed,
                skip_zero_probs=config.skip_zero_probs,
                num_ctas=self.num_ctas,
                heap_tokens=self.memory.max_tokens,
                timeout_ns=int(self.options.timeout_s * 1e9),
            )
            _native.call("sizes", problem, self._sizes)
            _native.call("preload", problem)
            self._problem, self._heap_tokens = problem, self.memory.max_tokens
            self._bounds = {training: self._row_block_bound(training) for training in (False, True)}
        return problem

    def _row_block_bound(self, training: bool) -> int | None:
        """Blocks of rows that every buffer holds, or ``None`` to count them first.

        Without a stated bound a forward that keeps nothing takes the most that there can be, if
        that is little: its buffers live no longer than the call.
        """
        config, most = self.config, int(self._sizes.max_row_blocks)
        if self.options.row_bound is not None:
            rows = self.options.row_bound * config.max_tokens * config.topk
            return min(most, math.ceil(rows / TILE_M) + config.num_local_experts)
        row_bytes = 2 * (2 * config.hidden + config.intermediate)
        if not training and most * TILE_M * row_bytes <= TRANSIENT_BYTES:
            return most
        return None

    def _check_inputs(
        self, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> None:
        if (  # runs before every launch, while the GPU may be idle
            x.dtype == self._dtype
            and (probs.dtype == torch.float32 or probs.dtype == self._dtype)
            and routing_map.dtype == torch.bool
            and x.device == probs.device == routing_map.device == self.device
            and x.is_contiguous()
            and probs.is_contiguous()
            and routing_map.is_contiguous()
            and x.data_ptr() % 16 == 0
        ):
            return
        self._check_input("x", x, self._dtype)
        self._check_input("probs", probs, torch.float32, self._dtype)
        self._check_input("routing_map", routing_map, torch.bool)

    def _prepare(self) -> _native.FlashMoEProblem:
        """The problem, with memory for it. Collective where the memory is made anew."""
        self.raise_pending_fault()
        problem = self._describe()
        if self.memory.needs(self._sizes):
            self.memory.allocate(self._sizes)
        return problem

    def _encode(self, weights: ExpertWeights) -> WeightTables:
        """Tables of the weights on the device; where they are is read at every call."""
        tensors = (*weights.fc1, *weights.fc2, *weights.fc1_bias, *weights.fc2_bias)
        # One weight stands for the rest of all: this runs before every launch, as the GPU waits.
        first = tensors[0]
        key = (first.shape, first.stride(), first.dtype, *[w.data_ptr() for w in tensors])
        self._adopt(weights.transposed, first.dtype)
        if key in self._tables:
            return self._tables[key]
        check_weights(self.config, torch.empty(0, dtype=self._dtype, device=self.device), weights)
        for weight in tensors:
            self._check_input("expert weight", weight, self._dtype)
        if bool(weights.fc1_bias) != bool(weights.fc2_bias):
            raise ConfigError("one of fc1 and fc2 has biases, the other has none: wanted both")
        array = ctypes.c_void_p * self.config.num_local_experts
        problem = self._describe()
        host = torch.empty(self._sizes.weight_map_bytes, dtype=torch.uint8).pin_memory()
        _native.call(
            "encode_weights",
            problem,
            array(*(weight.data_ptr() for weight in weights.fc1)),
            array(*(weight.data_ptr() for weight in weights.fc2)),
            host.data_ptr(),
        )
        biases = [bias.data_ptr() for bias in (*weights.fc1_bias, *weights.fc2_bias)]
        tables = WeightTables(
            host.to(self.device, non_blocking=True),
            self._address_table(biases) if biases else None,
        )
        _remember(self._tables, key, tables)
        return tables

    def _adopt(self, transposed: bool, dtype: torch.dtype) -> None:
        """Makes the problem one of such weights."""
        if transposed == self._transposed and dtype == self._dtype:
            return
        if dtype not in DTYPES:
            raise ShapeError(f"tokens or weights: dtype {dtype}, wanted {_names(DTYPES)}")
        self._transposed, self._dtype, self._problem = transposed, dtype, None

    def _address_table(self, addresses: Sequence[int]) -> torch.Tensor:
        host = torch.tensor(addresses, dtype=torch.int64).pin_memory()
        return host.to(self.device, non_blocking=True)

    def _grad_table(self, grads: Sequence[WeightGrad]) -> tuple[torch.Tensor, int, bool]:
        """Device array of gradient addresses, their dtype and whether to add to them."""
        first = grads[0]
        for grad in grads:
            self._check_input("weight gradient", grad.buffer, torch.float32, self._dtype)
        addresses = tuple(grad.buffer.data_ptr() for grad in grads)
        table = self._grad_tables.get(addresses)
        if table is None:
            table = self._address_table(addresses)
            if first.accumulate:  # main_grad stays where it is; ordinary gradients do not
                _remember(self._grad_tables, addresses, table)
        return table, ops.dtype_code(first.buffer.dtype), first.accumulate

    def _check_input(self, name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
        if tensor.device != self.device:
            raise ShapeError(f"{name}: on {tensor.device}, wanted {self.device}")
        if tensor.dtype not in dtypes:
            raise ShapeError(f"{name}: dtype {tensor.dtype}, wanted {_names(dtypes)}")
        if not tensor.is_contiguous():
            raise ShapeError(f"{name}: strides {tensor.stride()}, wanted contiguous")
        if tensor.data_ptr() % 16 and tensor.numel() and tensor.dtype == self._dtype:
            raise ShapeError(f"{name}: at address {tensor.data_ptr():#x}, wanted 16-byte aligned")

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
