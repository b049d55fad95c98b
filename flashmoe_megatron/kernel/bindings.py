"""The C interface of libflashmoe in Python: the only file that knows the library.

Numbers, structs and signatures mirror csrc/include/flashmoe.h, and tests/build compares them with
it. Loading the library compares the sizes of structs with its own.
"""

import ctypes
import functools
import os
import platform
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flashmoe_megatron.call import unmatched_backward
from flashmoe_megatron.config import MAX_RANKS, Activation, MoEConfig
from flashmoe_megatron.driver_release import driver_problem
from flashmoe_megatron.errors import (
    ConfigError,
    DeviceError,
    FlashMoEError,
    PeerTimeoutError,
    RoutingError,
    RowBoundError,
    reason_of,
    told_error,
)
from flashmoe_megatron.replicas.policy import Policy

ABI_VERSION = 28
LIBRARY = Path(__file__).resolve().parents[1] / "libflashmoe.so"
LIBRARY_VARIABLE = "FLASHMOE_LIBRARY"
"""Environment variable with the absolute path of another library; nothing is searched for."""

OK, BAD_ARGUMENT, CUDA_ERROR, PEER_TIMEOUT, BAD_ROUTING, TOO_MANY_ROWS, REFUSED, UNMATCHED = range(
    8
)
FLOAT32, BFLOAT16, FLOAT16 = range(3)
BALANCE, POPULAR = range(2)
AS_GIVEN, FP8, FP8_DGRAD = range(3)
READS_NO_TOKENS, READS_TOKENS, COPIES_TOKENS = range(3)
SOFTMAX_OF_CHOSEN, SOFTMAX, SIGMOID = range(3)
ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU: 1,
    Activation.GELU_TANH: 2,
    Activation.RELU: 3,
    Activation.SQUARED_RELU: 4,
    Activation.QUICK_GELU: 5,
}


def _fields(*kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Fields in the order of the header: a type, and the names of neighbours that have it."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


class _Sized(ctypes.Structure):
    """A struct that begins with its own size, so that the library can refuse another version."""

    def __init__(self, *values: Any, **fields: Any) -> None:
        super().__init__(ctypes.sizeof(self), *values, **fields)


class FlashMoEProblem(_Sized):
    """The problem: shapes and options of a layer."""

    _fields_ = _fields(
        (ctypes.c_uint32, "struct_size"),
        (
            ctypes.c_int32,
            "rank num_ranks hidden intermediate num_experts topk max_tokens dtype activation "
            "is_gated glu_interleave is_transposed is_split skip_zero_probs num_ctas heap_tokens "
            "heap_topk spare_slots heap_experts",
        ),
        (ctypes.c_float, "clamp_value linear_offset"),
        (ctypes.c_int32, "replica_policy experts rank_invariant"),
        (ctypes.c_uint64, "timeout_ns"),
        (ctypes.c_int64, "heap_slot_elements"),
    )


class HeapBounds(NamedTuple):
    """Sizes that a heap is laid out for: the largest of all layers that share it.

    They are the most tokens of a rank, experts of a token, experts of layers with spare slots, and
    elements of weights in all spare slots of a rank.
    """

    tokens: int
    topk: int
    experts: int = 0
    slot_elements: int = 0

    @classmethod
    def of(cls, config: MoEConfig, spare_slots: int = 0) -> "HeapBounds":
        """Bounds of a heap that one layer uses alone."""
        fc1, fc2 = config.fc1_rows, config.hidden
        elements = fc1 * (config.hidden + 1) + fc2 * (config.intermediate + 1)
        experts = config.num_experts if spare_slots else 0
        return cls(config.max_tokens, config.topk, experts, spare_slots * elements)

    def joined(self, other: "HeapBounds") -> "HeapBounds":
        """The larger of each bound."""
        return HeapBounds(*map(max, self, other))


def problem_of(
    config: MoEConfig,
    *,
    rank: int,
    dtype: int,
    transposed: bool,
    split: bool = False,
    num_ctas: int,
    heap: HeapBounds,
    timeout: float,
    spare_slots: int = 0,
    replica_policy: Policy = "balance",
    rank_invariant: bool = False,
) -> FlashMoEProblem:
    """Makes the library's struct of a layer: its fields, and the bound of waits in seconds."""
    same = (
        "num_ranks hidden intermediate num_experts topk max_tokens glu_interleave skip_zero_probs "
        "linear_offset"
    )
    return FlashMoEProblem(
        **{name: getattr(config, name) for name in same.split()},
        rank=rank,
        dtype=dtype,
        activation=ACTIVATIONS[config.activation],
        is_gated=config.gated,
        is_transposed=transposed,
        is_split=split,
        num_ctas=num_ctas,
        heap_tokens=heap.tokens,
        heap_topk=heap.topk,
        spare_slots=spare_slots,
        heap_experts=heap.experts,
        heap_slot_elements=heap.slot_elements,
        clamp_value=config.clamp_value or 0.0,
        replica_policy={"balance": BALANCE, "popular": POPULAR}[replica_policy],
        experts={"bf16": AS_GIVEN, "fp8": FP8, "fp8_dgrad": FP8_DGRAD}[config.experts],
        rank_invariant=rank_invariant,
        timeout_ns=int(timeout * 1e9),
    )


class FlashMoESizes(_Sized):
    """Bytes that a problem needs."""

    _fields_ = _fields(
        (ctypes.c_uint32, "struct_size max_row_blocks"),
        (
            ctypes.c_uint64,
            "heap_bytes workspace_bytes plan_bytes mailbox_bytes weight_map_bytes "
            "grad_table_bytes row_block_bytes preact_block_bytes",
        ),
        (ctypes.c_uint64 * 2, "scratch_block_bytes weight_copy_bytes"),
        (ctypes.c_uint32 * 2, "reads_tokens"),
    )


class FlashMoEGroup(_Sized):
    """Memory of one expert-parallel group."""

    _fields_ = _fields(
        (ctypes.c_uint32, "struct_size counters"),
        (ctypes.c_void_p * MAX_RANKS, "heaps"),
        (ctypes.c_void_p, "workspace mailbox stream trace"),
        (ctypes.c_double, "link_bytes_per_s"),
        (ctypes.c_int32, "least_replica_rows"),
    )


class FlashMoESlot(_Sized):
    """The place of a spare slot in a rank's heap."""

    _fields_ = _fields(
        (ctypes.c_uint32, "struct_size"),
        (
            ctypes.c_void_p,
            "fc1 fc1_up fc2 fc1_bias fc2_bias fc1_grad fc1_up_grad fc2_grad fc1_bias_grad "
            "fc2_bias_grad",
        ),
    )


REASON_BYTES = 480
PLAN_HEADER_BYTES = 16
"""The part of a plan that ``FlashMoEInput.first_plan`` reads."""


class FlashMoEFault(ctypes.Structure):
    """A wait that ran out of time, with the waiting rank; or a rank's refusal."""

    _fields_ = _fields(
        (ctypes.c_uint32, "code wait"),
        (ctypes.c_int32, "rank peer index"),
        (ctypes.c_uint32, "epoch expected seen"),
        (ctypes.c_char * REASON_BYTES, "reason"),
    )


NUM_SPANS = 12
MAX_LOCAL_EXPERTS = 512
NUM_RECORDS = 256
"""Records of launches that a mailbox holds."""
MAX_SPARE_SLOTS = 64


class FlashMoECounters(ctypes.Structure):
    """Counts of a rank's launches so far."""

    _fields_ = _fields(
        (ctypes.c_uint64 * NUM_SPANS, "nanoseconds"),
        (ctypes.c_uint64 * MAX_RANKS, "rows_pulled results_pushed"),
        (ctypes.c_uint64, "pad_rows_pulled pad_rows_made"),
        (ctypes.c_uint64 * MAX_RANKS, "rows_pulled_in_fp8"),
    )


class FlashMoERecord(ctypes.Structure):
    """The record that one launch makes of itself."""

    _fields_ = _fields(
        (ctypes.c_uint64, "sequence"),
        (ctypes.c_uint32, "checksum epoch"),
        (
            ctypes.c_int32,
            "layer is_backward num_ctas num_tokens num_rows num_row_blocks num_counts spare_slots",
        ),
        (ctypes.c_uint64, "begin_ns end_ns"),
        (FlashMoECounters, "counters"),
        (ctypes.c_int32 * MAX_LOCAL_EXPERTS, "expert_rows"),
    )


class FlashMoEInput(_Sized):
    """The input of a rank in a forward."""

    _fields_ = _fields(
        (ctypes.c_uint32, "struct_size"),
        (ctypes.c_int32, "num_tokens probs_dtype score index_bytes num_choices is_settled"),
        (ctypes.c_void_p, "x probs routing_map topk_idx router_weight logits"),
        (ctypes.c_float, "scaling_factor"),
        (ctypes.c_int32, "has_no_backward"),
        (ctypes.c_void_p, "first_plan"),
        (ctypes.c_char_p, "refusal"),
    )


class FlashMoELaunch(_Sized):
    """One call of a pass."""

    _fields_ = _fields(
        (ctypes.c_uint32, "struct_size"),
        (
            ctypes.c_int32,
            "num_row_blocks num_tokens grad_probs_dtype layer grad_columns copies_are_current",
        ),
        (
            ctypes.c_void_p,
            "plan weight_maps weight_copies biases rows preact scratch out grad_probs x",
        ),
    )


class FlashMoEBackwardRows(_Sized):
    """Rows that a backward leaves, which weights' gradients are products of."""

    _fields_ = _fields(
        (ctypes.c_uint32, "struct_size"),
        (ctypes.c_void_p, "grad_out grad_preact act x expert_rows expert_block row_tokens"),
    )


_CODES = {
    ctypes.c_uint32: "I",
    ctypes.c_int32: "i",
    ctypes.c_float: "f",
    ctypes.c_void_p: "P",
    ctypes.c_char_p: "P",
}
"""Letters of the fields' types in formats of Python's ``struct``, which aligns as C does."""


class Packed(threading.local):
    """Memory for one struct that a call passes, written again for the next call of the thread.

    Making a struct takes as long as the library's call; packing its values takes a tenth of it.
    The library has read the struct when its call returns, and each thread has one of its own.

    Args:
        kind: The struct.

    Attributes:
        pack: Writes all fields after the size, pointers as numbers.
        address: The struct's.
    """

    pack: Callable[..., None]
    address: int

    def __init__(self, kind: type[_Sized]) -> None:
        packer = struct.Struct("".join(_CODES[field[1]] for field in kind._fields_))
        size = ctypes.sizeof(kind)
        memory = ctypes.create_string_buffer(size)
        self.pack = functools.partial(packer.pack_into, memory, 0, size)
        self.address = ctypes.addressof(memory)


_STRUCTS = (
    FlashMoEProblem,
    FlashMoESizes,
    FlashMoEGroup,
    FlashMoESlot,
    FlashMoEFault,
    FlashMoECounters,
    FlashMoERecord,
    FlashMoEInput,
    FlashMoELaunch,
    FlashMoEBackwardRows,
)

_STATUS, _INT32, _ADDRESS = ctypes.c_int, ctypes.c_int32, ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "abi_version": (ctypes.c_int,),
    "last_error": (ctypes.c_char_p,),
    "wait_name": (ctypes.c_char_p, ctypes.c_uint32),
    "sizeof": (ctypes.c_uint64, ctypes.c_char_p),
    "sizes": (_STATUS, _ADDRESS, _ADDRESS),
    "preload": (_STATUS, _ADDRESS),
    "plan": (_STATUS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    "await_plan": (_STATUS, *[_ADDRESS] * 6),
    "await_fc2_grads": (_STATUS, _ADDRESS, ctypes.c_uint64, _ADDRESS),
    "read_fault": (_STATUS, _ADDRESS, _ADDRESS),
    "clear_fault": (_STATUS, _ADDRESS),
    "read_counters": (_STATUS, _ADDRESS, _ADDRESS),
    "read_record": (_STATUS, _ADDRESS, ctypes.c_uint64, _ADDRESS),
    "slot": (_STATUS, _ADDRESS, _ADDRESS, _INT32, _ADDRESS),
    "encode_weights": (_STATUS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    "encode_grads": (_STATUS, _ADDRESS, _ADDRESS, _ADDRESS, _INT32, _ADDRESS),
    "forward": (_STATUS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT32),
    "settle": (_STATUS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    "gather": (_STATUS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    "backward": (
        _STATUS,
        _ADDRESS,
        _ADDRESS,
        _ADDRESS,
        _ADDRESS,
        _ADDRESS,
        _INT32,
        _INT32,
        ctypes.c_uint64,
    ),
    "backward_rows": (_STATUS, _ADDRESS, _ADDRESS, _ADDRESS),
}
"""Types of each function, by its name without ``flashmoe_``: its result, then its arguments."""


def library_path() -> Path:
    """The package's own library, or the library at ``$FLASHMOE_LIBRARY``.

    Raises:
        DeviceError: The variable has a relative path, which would depend on the working folder.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if not named:
        return LIBRARY
    if not Path(named).is_absolute():
        raise DeviceError(f"{LIBRARY_VARIABLE}={named}: wanted an absolute path")
    return Path(named)


_PROCESSORS = {"x86_64": 62, "aarch64": 183}
"""The processors' numbers in the header of an ELF file."""


def _check_complete(path: Path) -> None:
    """Refuses another processor's file, and a file whose end is missing.

    The dynamic linker would crash where the end would be.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        raise DeviceError(f"{path.name} is no libflashmoe: it is no shared library")
    # The table of sections comes last in the file.
    start, entry_bytes, num_entries = (
        int.from_bytes(header[at:end], "little") for at, end in ((40, 48), (58, 60), (60, 62))
    )
    wanted, size = start + entry_bytes * num_entries, path.stat().st_size
    if size < wanted:
        raise DeviceError(f"{path.name} is no libflashmoe: {size} bytes of {wanted} are there")
    built_for = int.from_bytes(header[18:20], "little")
    if built_for != _PROCESSORS.get(platform.machine(), built_for):
        names = {number: name for name, number in _PROCESSORS.items()}
        raise DeviceError(
            f"{path} is built for {names.get(built_for, 'another processor')}, wanted "
            f"{platform.machine()}: build it here, with `pip install` of the source distribution"
        )


@functools.cache
def load(path: Path | None = None) -> ctypes.CDLL:
    """Loads the library of :func:`library_path` or another; needs neither a GPU nor a driver.

    Raises:
        DeviceError: The file is missing, is no libflashmoe or another version of it, or its structs
            differ.
    """
    if path is None:
        return load(library_path())
    if not path.is_file():
        raise DeviceError(
            f"{path.name} is not installed: build it with `pip install .` where nvcc is "
            "(without FLASHMOE_SKIP_CUDA_BUILD), or choose the backend 'reference'; pip's cache "
            "may hold a build without it, which --no-cache-dir leaves out"
        )
    _check_complete(path)
    try:
        library = ctypes.CDLL(str(path.resolve()))
        version = library.flashmoe_abi_version
    except (OSError, AttributeError) as error:
        glibc = re.search(r"`GLIBC_([0-9.]+)' not found", str(error))
        if glibc:
            raise DeviceError(
                f"{path} needs glibc {glibc[1]} or newer, got {' '.join(platform.libc_ver())}: "
                "build it here, with `pip install` of the source distribution"
            ) from error
        raise DeviceError(f"{path.name} is no libflashmoe: {error}") from error
    found = version()  # before any symbol that another version may lack
    if found != ABI_VERSION:
        raise DeviceError(f"{path.name} has interface version {found}, wanted {ABI_VERSION}")
    for name, (result, *arguments) in SIGNATURES.items():
        entry = getattr(library, f"flashmoe_{name}")
        entry.restype, entry.argtypes = result, arguments
    for kind in _STRUCTS:
        theirs = library.flashmoe_sizeof(kind.__name__.encode())
        if theirs != ctypes.sizeof(kind):
            raise DeviceError(
                f"{path.name}: {kind.__name__} has {theirs} bytes, its mirror {ctypes.sizeof(kind)}"
            )
    return library


def load_on_gpu() -> None:
    """Loads the library of :func:`library_path`, whose kernels the driver has to know.

    Raises:
        DeviceError: The driver is too old, or as :func:`load` has it.
    """
    load()
    if problem := driver_problem():
        raise DeviceError(
            f"{library_path()} cannot run here, since {problem}; or choose the backend 'scheduled'"
        )


@functools.cache
def function(name: str) -> Any:
    """The library's function of that name, without its ``flashmoe_`` prefix; gives a status."""
    return getattr(load(), f"flashmoe_{name}")


def call(name: str, *arguments: Any) -> None:
    """Calls the library, and turns a status into the error that :func:`error` makes of it.

    The name is the function's without ``flashmoe_``; structs are passed by reference.
    """
    converted = [
        ctypes.byref(argument) if isinstance(argument, ctypes.Structure) else argument
        for argument in arguments
    ]
    status = function(name)(*converted)
    if status != OK:
        raise error(status)


def read_fault(group: FlashMoEGroup) -> FlashMoEFault | None:
    """The fault left in a group's mailbox, if any. Works after any CUDA error."""
    fault = FlashMoEFault()
    load().flashmoe_read_fault(ctypes.byref(group), ctypes.byref(fault))
    return fault if fault.code else None


def clear_fault(group: FlashMoEGroup) -> None:
    """Makes a group usable again; does nothing where the CUDA context is lost."""
    load().flashmoe_clear_fault(ctypes.byref(group))


def ranks_of(mask: int) -> tuple[int, ...]:
    """The ranks of a mask, a bit each."""
    return tuple(rank for rank in range(MAX_RANKS) if mask >> rank & 1)


def fault_error(fault: FlashMoEFault) -> FlashMoEError:
    """The error that a fault means."""
    if fault.code == REFUSED:
        return told_error(fault.rank, fault.reason.decode(errors="replace"))
    if fault.code == BAD_ROUTING:
        if fault.peer >= 0:
            expert = ctypes.c_int32(fault.seen).value
            got = f"topk_idx[{fault.index}, {fault.peer}] of rank {fault.rank} is {expert}"
            if 0 <= expert < fault.expected:
                return RoutingError(f"{got}, which the token names before, wanted distinct experts")
            return RoutingError(
                f"{got}, wanted an expert id of 0 to {fault.expected - 1}, or -1 to skip"
            )
        if fault.expected == 0:
            return RoutingError(
                f"token {fault.index} of rank {fault.rank}: its probability for expert "
                f"{fault.seen} is NaN"
            )
        return RoutingError(
            f"token {fault.index} of rank {fault.rank} selects {fault.seen} experts, wanted at "
            f"most topk={fault.expected}"
        )
    if fault.code == UNMATCHED:
        return told_error(fault.rank, reason_of(unmatched_backward(ranks_of(fault.seen))))
    if fault.code == TOO_MANY_ROWS:
        return RowBoundError.of(fault.peer, fault.seen, fault.expected)
    wait = load().flashmoe_wait_name(fault.wait).decode()
    peer = f" from rank {fault.peer}" if fault.peer >= 0 else ""
    return PeerTimeoutError(
        f"rank {fault.rank} waited too long{peer} in launch {fault.epoch} ({wait}, index "
        f"{fault.index}): expected {fault.expected}, saw {fault.seen}"
    )


def error(status: int) -> FlashMoEError:
    """The error that a status means, with the library's last sentence."""
    message = load().flashmoe_last_error().decode()
    if status == BAD_ARGUMENT:
        return ConfigError(message)
    if status == PEER_TIMEOUT:
        return PeerTimeoutError(message)
    return DeviceError(message)
