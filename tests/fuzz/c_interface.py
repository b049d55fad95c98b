"""Calls the C interface with arguments made of bytes, on a machine without a GPU.

Every call has to come back with a status of the header and a sentence about it; nothing may crash,
hang or print. Structs lie at the end of a page behind which nothing may be read, and are as long as
their ``struct_size`` says. Where a problem is accepted its sizes are compared with a model in whole
numbers that cannot overflow.

Arrays that the caller has to provide are there, with whatever is in them: no interface of C can
refuse a wild pointer.
"""

import ctypes
import functools
import math
import struct
from dataclasses import dataclass
from typing import Any

from flashmoe_megatron.kernel import bindings
from tests.fuzz.choices import Choices
from tests.fuzz.guarded import GuardedBytes

STATUSES = range(bindings.REFUSED + 1)
MOST_CTAS = 256
GOOD_PROBLEM: dict[str, float] = {
    "rank": 1,
    "num_ranks": 2,
    "hidden": 128,
    "intermediate": 192,
    "num_experts": 8,
    "topk": 2,
    "max_tokens": 96,
    "activation": 0,
    "is_gated": 1,
    "is_transposed": 0,
    "is_split": 0,
    "skip_zero_probs": 0,
    "num_ctas": 128,
    "heap_tokens": 96,
    "heap_topk": 2,
    "spare_slots": 0,
    "heap_experts": 0,
    "heap_slot_elements": 0,
    "replica_policy": 0,
    "timeout_ns": 10**9,
    "dtype": 1,
    "glu_interleave": 32,
    "clamp_value": 7.0,
    "linear_offset": 1.0,
    "experts": 0,
    "rank_invariant": 0,
}
IN_FP8 = {"experts": 1, "intermediate": 256, "glu_interleave": 0, "clamp_value": 0.0}
IN_FP8 |= {"linear_offset": 0.0}
"""What makes a good problem one in FP8."""
IN_FP8_DGRAD = IN_FP8 | {"experts": 2}
"""The same, whose gradients of tokens are in FP8, too."""


class ContractError(AssertionError):
    """The library did what its header says it never does."""


@dataclass
class Arena:
    """Memory of the calls; made once.

    Attributes:
        problem: Holds the struct ``FlashMoEProblem``, as the next four hold theirs.
        group: Holds ``FlashMoEGroup``.
        input: Holds ``FlashMoEInput``.
        launch: Holds ``FlashMoELaunch``.
        sizes: Holds ``FlashMoESizes``.
        buffer: Stands for every array of the caller.
        tables: Tables of pointers to weights, with exactly as many entries as the call may read.
    """

    problem: GuardedBytes
    group: GuardedBytes
    input: GuardedBytes
    launch: GuardedBytes
    sizes: GuardedBytes
    buffer: GuardedBytes
    tables: GuardedBytes


BUFFER_BYTES = 2**21
"""Bytes of the largest array, which is the mailbox with its ring of records."""


@functools.cache
def arena() -> Arena:
    return Arena(
        **{name: GuardedBytes(256) for name in ("problem", "group", "input", "launch", "sizes")},
        buffer=GuardedBytes(BUFFER_BYTES),
        tables=GuardedBytes(3 * 8 * bindings.MAX_LOCAL_EXPERTS),
    )


def exercise(data: bytes) -> str:
    """Makes one call.

    Returns:
        What came of it: the function, and the sentence about the refusal if there was one.

    Raises:
        ContractError: The interface broke its promise.
    """
    choices = Choices(data)
    library = bindings.load()
    function = choices.pick(list(_CALLS))
    problem, fields = _problem(choices)
    status = _CALLS[function](library, choices, problem, fields)
    if status is None:
        return function
    if status not in STATUSES:
        raise ContractError(f"{function} returned {status}, which the header does not have")
    if status == bindings.OK:
        return function
    sentence = library.flashmoe_last_error()
    if not sentence or not 8 <= len(sentence) < 512:
        raise ContractError(f"{function} failed with status {status} and says {sentence!r}")
    return f"{function}: {sentence.decode('ascii')}"


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _struct(choices: Choices, room: GuardedBytes, kind: type[Any], fields: dict[str, Any]) -> Any:
    """A struct's address, or null, or one that is shorter than it should be and says so."""
    how = choices.integer(1) % 16
    if how == 15:
        return None
    content = bytes(kind(**fields))
    if how == 14:
        size = 4 + choices.integer(1) % len(content)
    elif how == 13:
        size = choices.integer(4)
        content += bytes(max(0, min(size, 256) - len(content)))
    else:
        size = len(content)
    claimed = size.to_bytes(4, "little")
    # A struct that claims to be longer than the room is still refused by its first field.
    return room.place((claimed + content[4:])[: max(4, min(size, room.num_bytes))])


def _problem(choices: Choices) -> tuple[Any, dict[str, Any] | None]:
    """The problem's address, and its fields if its size is right."""
    fields: dict[str, Any] = dict(GOOD_PROBLEM)
    for _ in range(choices.integer(1) % 4):
        name = choices.pick(list(fields))
        value = choices.number()
        fields[name] = value % 2**64 if name == "timeout_ns" else _int32(value)
        if name == "heap_slot_elements":
            fields[name] = value % 2**64 - 2**63 if choices.flag() else value % 2**50
        if isinstance(GOOD_PROBLEM[name], float):
            fields[name] = struct.unpack("f", struct.pack("I", value % 2**32))[0]
    address = _struct(choices, arena().problem, bindings.FlashMoEProblem, fields)
    if address is None:
        return None, None
    size = ctypes.c_uint32.from_address(address).value
    return address, fields if size == ctypes.sizeof(bindings.FlashMoEProblem) else None


def _pointer(choices: Choices) -> int | None:
    """Chooses where an array of the caller is: mostly well, sometimes misaligned or null."""
    how = choices.integer(1) % 8
    if how == 7:
        return None
    base = arena().buffer.end - BUFFER_BYTES
    return base + (choices.pick((1, 2, 4, 8, 24)) if how == 6 else 0)


def _group(choices: Choices) -> Any:
    heaps = (ctypes.c_void_p * 8)(*[_pointer(choices) for _ in range(8)])
    # A mailbox as a device may leave it: a fault or none, a plan or none yet.
    start = arena().buffer.end - BUFFER_BYTES
    faults = 2 * ctypes.sizeof(bindings.FlashMoEFault)  # and the host's own refusal
    ctypes.memset(start, 0, faults)
    ctypes.memset(start, choices.pick(STATUSES), 1)
    ctypes.memset(start + faults, choices.integer(1), 512)
    fields = {"heaps": heaps, "workspace": _pointer(choices), "mailbox": _pointer(choices)}
    if choices.flag():
        fields["link_bytes_per_s"] = choices.pick((25e9, 5e-324, -1.0, math.inf, math.nan))
        fields["least_replica_rows"] = _count(choices)
    return _struct(choices, arena().group, bindings.FlashMoEGroup, fields)


def _input(choices: Choices) -> Any:
    return _struct(
        choices,
        arena().input,
        bindings.FlashMoEInput,
        {
            "num_tokens": _count(choices),
            "probs_dtype": _int32(choices.number()) if choices.flag() else 0,
            "score": _int32(choices.number()) if choices.flag() else choices.integer(1) % 3,
            "router_weight": _pointer(choices) if choices.flag() else None,
            "logits": _pointer(choices),
            "scaling_factor": choices.pick((1.0, -0.5, math.inf, math.nan)),
            "x": _pointer(choices),
            "probs": _pointer(choices),
            "routing_map": _pointer(choices),
            "refusal": b"no" * choices.integer(1) if choices.integer(1) % 8 == 7 else None,
            "index_bytes": choices.pick((0, 4, 8, 5)),
            "num_choices": _count(choices),
            "topk_idx": _pointer(choices),
            "is_settled": int(choices.integer(1) % 8 == 7),
            "has_no_backward": choices.integer(1) % 3,
            "first_plan": _pointer(choices) if choices.flag() else None,
        },
    )


def _count(choices: Choices) -> int:
    return _int32(choices.number()) if choices.flag() else choices.integer(1) % 97


def _launch(choices: Choices) -> Any:
    kinds = dict(bindings.FlashMoELaunch._fields_)
    pointers = [name for name, kind in kinds.items() if kind is ctypes.c_void_p and name != "x"]
    return _struct(
        choices,
        arena().launch,
        bindings.FlashMoELaunch,
        {
            "num_row_blocks": _count(choices),
            "num_tokens": _count(choices),
            "grad_probs_dtype": _int32(choices.number()) if choices.flag() else 1,
            **{name: _pointer(choices) for name in pointers},
            "grad_columns": _count(choices),
            "copies_are_current": choices.integer(1) % 3 if choices.flag() else 0,
            "x": _pointer(choices) if choices.flag() else None,
        },
    )


def _sizes(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    sizes = _struct(choices, arena().sizes, bindings.FlashMoESizes, {})
    status: int = library.flashmoe_sizes(problem, sizes)
    if status == bindings.OK:
        if fields is None or sizes is None:
            raise ContractError("sizes accepted a struct of another size")
        check_sizes(fields, bindings.FlashMoESizes.from_address(sizes))
    return status


def _preload(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    return int(library.flashmoe_preload(problem))


def _plan(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    return int(library.flashmoe_plan(problem, _group(choices), _input(choices), _pointer(choices)))


def _await_plan(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    counts = (ctypes.c_int32 * 4)()
    where = [ctypes.byref(counts, 4 * index) if choices.flag() else None for index in range(4)]
    return int(library.flashmoe_await_plan(problem, _group(choices), *where))


def _forward(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    group, given, launch = _group(choices), _input(choices), _launch(choices)
    return int(library.flashmoe_forward(problem, group, given, launch, _int32(choices.number())))


def _settle(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    group, tables = _group(choices), [_pointer(choices) for _ in range(3)]
    return int(library.flashmoe_settle(problem, group, *tables))


def _gather(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    group, launch = _group(choices), _launch(choices)
    return int(library.flashmoe_gather(problem, group, launch, _pointer(choices)))


def _backward(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    group, launch = _group(choices), _launch(choices)
    dtype = _int32(choices.number()) if choices.flag() else 0
    return int(
        library.flashmoe_backward(
            problem,
            group,
            launch,
            _pointer(choices),
            _pointer(choices),
            dtype,
            _int32(choices.number()),
            choices.number() % 2**64,
        )
    )


def _backward_rows(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    launch = _launch(choices)
    rows = _struct(choices, arena().sizes, bindings.FlashMoEBackwardRows, {})
    return int(library.flashmoe_backward_rows(problem, launch, rows))


def _is_split(fields: Any) -> bool:
    return fields is not None and fields["is_split"] != 0


def _tables(choices: Choices, fields: Any, matrices: int) -> list[int | None]:
    """Addresses of two arrays of pointers, of so many for each local slot."""
    local = bindings.MAX_LOCAL_EXPERTS
    if fields is not None and fields["num_ranks"] > 0:
        slots = fields["num_experts"] // fields["num_ranks"] + fields["spare_slots"]
        local = min(max(slots, 1), bindings.MAX_LOCAL_EXPERTS)
    pointers = [_pointer(choices) for _ in range(min(local, 8))]
    count = matrices * local
    table = (ctypes.c_void_p * count)(*(pointers * (count // len(pointers) + 1))[:count])
    tables = arena().tables.place(bytes(table))
    return [None if choices.integer(1) % 8 == 7 else tables for _ in range(2)]


def _encode_weights(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    given = _tables(choices, fields, 1 + _is_split(fields))
    pointers = _pointer(choices), _pointer(choices)
    return int(library.flashmoe_encode_weights(problem, *given, *pointers))


def _encode_grads(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    given = _tables(choices, fields, 2 + _is_split(fields))
    dtype = _int32(choices.number()) if choices.flag() else 0
    return int(library.flashmoe_encode_grads(problem, *given, dtype, _pointer(choices)))


def _slot(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    slot = _struct(choices, arena().sizes, bindings.FlashMoESlot, {})
    number = _int32(choices.number()) if choices.flag() else choices.integer(1) % 3
    return int(library.flashmoe_slot(problem, _pointer(choices), number, slot))


def _await_fc2_grads(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    number = choices.number() % 2**64
    return int(library.flashmoe_await_fc2_grads(_group(choices), number, _pointer(choices)))


def _read_fault(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    fault = bindings.FlashMoEFault()
    where = ctypes.byref(fault) if choices.integer(1) % 8 else None
    return int(library.flashmoe_read_fault(_group(choices), where))


def _clear_fault(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    return int(library.flashmoe_clear_fault(_group(choices)))


def _read_counters(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    counters = bindings.FlashMoECounters()
    where = ctypes.byref(counters) if choices.integer(1) % 8 else None
    return int(library.flashmoe_read_counters(_group(choices), where))


def _read_record(library: Any, choices: Choices, problem: Any, fields: Any) -> int:
    record = bindings.FlashMoERecord()
    where = ctypes.byref(record) if choices.integer(1) % 8 else None
    sequence = choices.number() % 2**64
    status: int = library.flashmoe_read_record(_group(choices), sequence, where)
    if status == bindings.OK and 0 < record.sequence < sequence:
        raise ContractError(f"asked for record {sequence}, got {record.sequence}")
    return status


def _names(library: Any, choices: Choices, problem: Any, fields: Any) -> None:
    if not library.flashmoe_wait_name(choices.integer(4)):
        raise ContractError("a wait has no name")
    name = choices.text().encode() if choices.flag() else None
    known = {struct.__name__.encode() for struct in bindings._STRUCTS}
    size = library.flashmoe_sizeof(name)
    if (size > 0) != (name is not None and name.split(b"\0")[0] in known):
        raise ContractError(f"sizeof({name!r}) is {size}")


_CALLS = {
    "sizes": _sizes,
    "preload": _preload,
    "plan": _plan,
    "await_plan": _await_plan,
    "forward": _forward,
    "gather": _gather,
    "backward": _backward,
    "encode_weights": _encode_weights,
    "encode_grads": _encode_grads,
    "await_fc2_grads": _await_fc2_grads,
    "read_fault": _read_fault,
    "clear_fault": _clear_fault,
    "read_counters": _read_counters,
    "read_record": _read_record,
    "names": _names,
    "slot": _slot,
    "settle": _settle,
    "backward_rows": _backward_rows,
}


def _copy_bytes(fields: dict[str, int]) -> list[int]:
    """Bytes of a layer's weights as forwards in FP8 and as their backwards multiply them."""
    hidden, width = fields["hidden"], fields["intermediate"]
    local = fields["num_experts"] // fields["num_ranks"]
    fc1_rows = width * (2 if fields["is_gated"] else 1)

    def in_fp8(*weights: tuple[int, int]) -> int:
        """The values, and scales of their blocks, four at a time."""
        scales = sum(num_out // 128 * -(-num_in // 512) * 16 for num_out, num_in in weights)
        return local * (hidden * (fc1_rows + width) + scales)

    forward = in_fp8((fc1_rows, hidden), (hidden, width))
    if fields["experts"] == bindings.FP8_DGRAD:  # transposes
        return [forward, in_fp8((hidden, fc1_rows), (width, hidden))]
    return [forward, local * 2 * hidden * (fc1_rows + width)]


def check_sizes(fields: dict[str, int], sizes: Any) -> None:
    """Compares what an accepted problem is told to allocate with sums that cannot overflow.

    Raises:
        ContractError: Something would be too small, or the problem should have been refused.
    """
    ranks, tokens, topk = fields["num_ranks"], fields["max_tokens"], fields["topk"]
    hidden, width = fields["hidden"], fields["intermediate"]
    heap_tokens, heap_topk = fields["heap_tokens"], fields["heap_topk"]
    local, fc1_rows = fields["num_experts"] // ranks, width * (2 if fields["is_gated"] else 1)
    spare = fields["spare_slots"]
    slots, matrices = local + spare, 2 + _is_split(fields)
    blocks = -(-ranks * tokens * min(topk, slots) // 128) + slots
    # What the heap holds at least: signals and routes of all ranks, dprobs, and where there are
    # peers rows and results.
    buffers = 1 + min(topk, ranks) if ranks > 1 else 0
    heap = heap_tokens * (4 * ranks + 2 * ranks * heap_topk * 8 + 2 * hidden * buffers + 4 * topk)
    # In FP8 operands of products have a byte and a share of a scale, and a lone rank its rows, too.
    in_fp8 = fields["experts"] != bindings.AS_GIVEN
    has_fp8_dgrad = fields["experts"] == bindings.FP8_DGRAD

    def operand_bytes(width: int) -> int:
        return -(-(width + width // 32) // 16) * 16 if in_fp8 else 2 * width

    if in_fp8 and ranks == 1:
        heap += heap_tokens * operand_bytes(hidden)
    # And the routes of all ranks by expert, and spare slots with float32 gradients.
    heap += 8 * ranks * fields["heap_experts"] + 6 * fields["heap_slot_elements"]
    plan = blocks * (8 + 128 * (8 + 4)) + 4 * tokens * (ranks * topk + topk + 1)
    plan += 4 * ranks * spare
    # Words: what outlives a launch, the counts of all CTAs, tickets, and the counters of blocks
    # and slots, and of routes by expert and of what is pushed to spare slots, if there are any.
    has_slots = spare or fields["heap_experts"] or fields["heap_slot_elements"]
    workspace = (1024 if has_slots else 256) + bindings.MAX_LOCAL_EXPERTS * MOST_CTAS + 64
    workspace += 3 * blocks + (ranks + 1) * slots
    workspace += fields["num_experts"] + ranks * spare if spare else 0
    # Narrow experts of a rank that is alone read rows of dY where tokens have them.
    copies_grads = bool(ranks > 1 or fields["is_transposed"] or width > 512 or has_slots)
    received = 2 * hidden * copies_grads + 2 * hidden * in_fp8
    if has_fp8_dgrad:  # gradients of outputs and of pre-activations are operands, too
        received = operand_bytes(hidden) + operand_bytes(fc1_rows) + 2 * hidden

    is_alone = ranks == 1 and not in_fp8
    of_backward = bindings.READS_TOKENS if fc1_rows <= 512 else bindings.COPIES_TOKENS
    reads_tokens = [
        int(is_alone and fc1_rows <= (1280 if fields["is_gated"] else 1024)),
        of_backward if is_alone and not spare else bindings.READS_NO_TOKENS,
    ]
    exact = {
        "max_row_blocks": blocks,
        "weight_map_bytes": (3 * 128 + 16 if in_fp8 else 2 * 128) * matrices * slots
        + (2 * (128 + 8) * slots if in_fp8 else 0)
        + (8 * matrices * local if spare else 0),
        "weight_copy_bytes": _copy_bytes(fields) if in_fp8 else [0, 0],
        "grad_table_bytes": (128 * matrices + 8 * (matrices + 2)) * slots + 8 * (1 + slots),
        "row_block_bytes": 128 * operand_bytes(hidden),
        "preact_block_bytes": 256 * fc1_rows,
        "scratch_block_bytes": [
            128 * operand_bytes(width) + 256 * hidden,
            128 * (2 * (width + hidden + fc1_rows) + received) + -(-width // 256) * 128 * 4,
        ],
        "workspace_bytes": 4 * workspace,
        "reads_tokens": reads_tokens,
    }
    for name, want in exact.items():
        got = getattr(sizes, name)
        if (got if isinstance(want, int) else list(got)) != want:
            raise ContractError(f"{name} is {got}, wanted {want}, for {fields}")
    slack = 64 * 1024
    for name, least in (("heap_bytes", heap), ("plan_bytes", plan)):
        if not least <= getattr(sizes, name) <= least + slack:
            raise ContractError(
                f"{name} is {getattr(sizes, name)}, wanted {least} and at most {slack} more, for "
                f"{fields}"
            )
