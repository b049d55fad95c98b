"""Numbers that the C interface is given: a call that no layer makes is refused by name."""

import ctypes
from typing import Any

import pytest

from flashmoe_megatron.kernel import bindings
from tests.unit import cases, native

pytestmark = pytest.mark.library

CONFIG = cases.make_config(num_ranks=2, num_experts=8, topk=2, max_tokens=64, gated=True)
HEAPS = (0x200000, 0x300000)


def refusal(
    problem: bindings.FlashMoEProblem, *, heaps: tuple[int, ...] = HEAPS, **given: Any
) -> str:
    """What a plan is refused with before it reaches a GPU; no pointer is of anybody."""
    good = native.problem_of(CONFIG)
    mailbox = native.Mailbox(good)
    group = bindings.FlashMoEGroup(
        heaps=(ctypes.c_void_p * 8)(*heaps), workspace=0x100000, mailbox=mailbox.address
    )
    fields = {"num_tokens": 4, "x": 0x500000, "probs": 0x400000, "routing_map": 0x600000, **given}
    status = bindings.load().flashmoe_plan(
        ctypes.byref(problem),
        ctypes.byref(group),
        ctypes.byref(bindings.FlashMoEInput(**fields)),
        0x700000,
    )
    said = bindings.load().flashmoe_last_error().decode()
    assert (status == bindings.BAD_ARGUMENT) == bool(said and status != bindings.CUDA_ERROR)
    return said if status == bindings.BAD_ARGUMENT else ""


def changed(**fields: Any) -> bindings.FlashMoEProblem:
    problem = native.problem_of(CONFIG)
    for name, value in fields.items():
        setattr(problem, name, value)
    return problem


def test_what_a_layer_asks_for_gets_as_far_as_the_launch() -> None:
    assert refusal(changed()) == ""
    assert refusal(changed(rank_invariant=1)) == ""
    indices = {"topk_idx": 0x600000, "routing_map": None, "index_bytes": 8}
    assert refusal(changed(), num_choices=2, **indices) == ""
    assert refusal(changed(), num_tokens=0, refusal=b"ShapeError: x") == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"heap_tokens": 63}, "heap_tokens 63: wanted max_tokens = 64 to 2^24"),
        ({"heap_topk": 1}, "heap_topk 1: wanted topk = 2 to 16"),
        ({"is_split": 1, "is_transposed": 1}, "is_split with is_gated 1, glu_interleave 0, is_t"),
        ({"glu_interleave": 4}, "glu_interleave 4 of intermediate 64, is_gated 1: wanted 0, or"),
        ({"rank_invariant": 1, "num_experts": 12}, "rank_invariant with 12 experts on 2 ranks: w"),
        (
            {"rank_invariant": 1, "num_ranks": 3, "num_experts": 24},
            "rank_invariant with 24 experts on 3 ranks: wanted a multiple of 8 experts on 1, 2, 4",
        ),
        (
            {"rank_invariant": 1, "heap_experts": 8},
            "rank_invariant with experts 0, spare_slots 0, heap_experts 8, heap_slot_elements 0: w",
        ),
    ],
)
def test_a_problem_that_no_layer_has(fields: dict[str, int], said: str) -> None:
    assert refusal(changed(**fields)).startswith(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"num_choices": 3, "topk_idx": 0x600000, "index_bytes": 4},
            "num_choices 3: wanted 0 to topk = 2",
        ),
        ({"is_settled": 1}, "is_settled with spare_slots 0: wanted slots or 0"),
        ({"refusal": b"ShapeError: x"}, "4 tokens of a call that is refused: wanted none"),
        ({"num_tokens": 65}, "65 tokens: wanted 0 to max_tokens = 64"),
    ],
)
def test_an_input_that_no_layer_gives(given: dict[str, Any], said: str) -> None:
    assert refusal(changed(), **given) == said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"experts": 3}, "experts 3: wanted 0, FP8 (1) or FP8 dgrad (2)"),
        ({"dtype": bindings.FLOAT16}, "FP8 experts with dtype 2, hidden 128, intermediate 256: wa"),
        ({"hidden": 192}, "FP8 experts with dtype 1, hidden 192, intermediate 256: wanted bfloat1"),
        ({"intermediate": 64}, "FP8 experts with dtype 1, hidden 128, intermediate 64: wanted bfl"),
        ({"is_transposed": 1}, "FP8 experts with is_transposed 1, spare_slots 0, heap_experts 0, "),
        ({"spare_slots": 1}, "FP8 experts with is_transposed 0, spare_slots 1, heap_experts 0, he"),
        ({"heap_experts": 8}, "FP8 experts with is_transposed 0, spare_slots 0, heap_experts 8, h"),
        ({"clamp_value": 7.0}, "FP8 experts with is_transposed 0, spare_slots 0, heap_experts 0, "),
        ({"glu_interleave": 64}, "FP8 experts with glu_interleave 64: wanted 0 or a multiple of "),
    ],
)
def test_a_problem_that_fp8_does_not_have(fields: dict[str, int], said: str) -> None:
    in_fp8 = {"experts": bindings.FP8, "hidden": 128, "intermediate": 256}
    assert refusal(changed(**in_fp8)) == ""
    assert refusal(changed(**{**in_fp8, "glu_interleave": 128})) == ""
    assert refusal(changed(**{**in_fp8, **fields})).startswith(said)


def test_every_ranks_heap_is_needed() -> None:
    assert refusal(changed(), heaps=(0x200000, 0)).startswith("a rank's heap is at ")


def test_gradients_have_a_column_for_each_expert_or_choice() -> None:
    problem = changed()
    group = bindings.FlashMoEGroup(
        heaps=(ctypes.c_void_p * 8)(*HEAPS),
        workspace=0x100000,
        mailbox=native.Mailbox(problem).address,
    )
    said = {}
    for columns in (0, 2, 3, 8, 9, -1):
        launch = bindings.FlashMoELaunch(
            num_tokens=4,
            plan=0x700000,
            weight_maps=0x400000,
            out=0x800000,
            grad_columns=columns,
            grad_probs=0x900000,
            grad_probs_dtype=bindings.FLOAT32,
        )
        status = bindings.load().flashmoe_backward(
            *map(ctypes.byref, (problem, group, launch)), 0xA00000, 0xB00000, bindings.FLOAT32, 0, 1
        )
        if status == bindings.BAD_ARGUMENT:
            said[columns] = bindings.load().flashmoe_last_error().decode()
    wanted = "grad_columns {}: wanted num_experts = 8 or, with indices, 0 to topk = 2"
    assert said == {columns: wanted.format(columns) for columns in (3, 9, -1)}


def test_fp8_needs_copies_of_weights_and_has_no_biases() -> None:
    problem = changed(experts=bindings.FP8, hidden=128, intermediate=256)
    group = bindings.FlashMoEGroup(
        heaps=(ctypes.c_void_p * 8)(*HEAPS),
        workspace=0x100000,
        mailbox=native.Mailbox(problem).address,
    )
    given = bindings.FlashMoEInput(num_tokens=0, x=0x400000, probs=0x500000)
    fields = {"plan": 0x700000, "weight_maps": 0x400000, "out": 0x800000}
    copied = {**fields, "weight_copies": 0x200000}
    library = bindings.load()
    for launch, words in (
        (fields, "weight_copies is at (nil): wanted a 256-byte aligned address"),
        ({**fields, "weight_copies": 0x200080}, "weight_copies is at 0x200080: wanted a 256-byte"),
        ({**copied, "biases": 0x900000}, "biases of FP8 experts: wanted NULL"),
        ({**copied, "copies_are_current": 2}, "copies_are_current 2: wanted 0 or 1"),
    ):
        one_pass = [problem, group, given, bindings.FlashMoELaunch(**launch)]
        assert library.flashmoe_forward(*map(ctypes.byref, one_pass), 0) == bindings.BAD_ARGUMENT
        assert library.flashmoe_last_error().decode().startswith(words)
        del one_pass[2]
        arguments = 0xA00000, 0xB00000, bindings.FLOAT32, 0, 1
        status = library.flashmoe_backward(*map(ctypes.byref, one_pass), *arguments)
        assert status == bindings.BAD_ARGUMENT
        assert library.flashmoe_last_error().decode().startswith(words)


def test_one_problem_in_fp8_has_room_for_both_passes() -> None:
    """A backward in bfloat16 uses the memory that the sizes of its forward's problem tell."""
    for ranks in (1, 2):
        fields = {"num_ranks": ranks, "hidden": 128, "intermediate": 256}
        in_fp8, plain = (
            native.sizes_of(changed(**fields, experts=experts))
            for experts in (bindings.FP8, bindings.AS_GIVEN)
        )
        assert in_fp8.heap_bytes >= plain.heap_bytes
        assert in_fp8.workspace_bytes == plain.workspace_bytes
        read = 128 * 128 * 2  # a block of rows in bfloat16
        assert in_fp8.scratch_block_bytes[1] == plain.scratch_block_bytes[1] + read
        assert in_fp8.row_block_bytes < plain.row_block_bytes
        assert [*plain.weight_copy_bytes] == [0, 0]
        forward, backward = in_fp8.weight_copy_bytes
        local = 8 // ranks
        assert backward == local * 2 * 128 * (512 + 256)
        rows_of_blocks = 512 // 128 + 128 // 128  # each with its scales in 16 bytes
        assert forward == backward // 2 + local * 16 * rows_of_blocks


BUFFERS = {"plan": 0x700000, "weight_maps": 0x400000, "scratch": 0x900000, "out": 0x800000}


def group_of(problem: bindings.FlashMoEProblem) -> bindings.FlashMoEGroup:
    return bindings.FlashMoEGroup(
        heaps=(ctypes.c_void_p * 8)(*HEAPS),
        workspace=0x100000,
        mailbox=native.Mailbox(problem).address,
    )


@pytest.mark.parametrize(
    ("num_ranks", "intermediate", "gated", "can_do"),
    [
        (1, 256, True, (bindings.READS_TOKENS, bindings.READS_TOKENS)),
        (1, 320, True, (bindings.READS_TOKENS, bindings.COPIES_TOKENS)),
        (1, 640, True, (bindings.READS_TOKENS, bindings.COPIES_TOKENS)),
        (1, 704, True, (bindings.READS_NO_TOKENS, bindings.COPIES_TOKENS)),
        (1, 1024, False, (bindings.READS_TOKENS, bindings.COPIES_TOKENS)),
        (1, 1088, False, (bindings.READS_NO_TOKENS, bindings.COPIES_TOKENS)),
        (2, 256, True, (bindings.READS_NO_TOKENS, bindings.READS_NO_TOKENS)),
    ],
)
def test_only_experts_of_one_rank_do_without_received_rows(
    num_ranks: int, intermediate: int, gated: bool, can_do: tuple[int, int]
) -> None:
    """Narrow ones' passes read tokens where they are; wider ones' backwards copy these."""
    config = cases.make_config(
        num_ranks=num_ranks, num_experts=8, topk=2, intermediate=intermediate, gated=gated
    )
    problem, sizes = native.problem_of(config), bindings.FlashMoESizes()
    bindings.call("sizes", problem, sizes)
    assert tuple(sizes.reads_tokens) == can_do
    group, load = group_of(problem), bindings.load()
    given = bindings.FlashMoEInput(num_tokens=4, x=0x500000, probs=0x400000, routing_map=0x600000)

    def said(status: int) -> str:
        return load.flashmoe_last_error().decode() if status == bindings.BAD_ARGUMENT else ""

    launch = bindings.FlashMoELaunch(num_row_blocks=1, num_tokens=4, **BUFFERS)
    forward = load.flashmoe_forward(*map(ctypes.byref, (problem, group, given, launch)), 0)
    assert said(forward).startswith("" if can_do[0] else "rows is at ")
    assert bool(said(forward)) == (can_do[0] == bindings.READS_NO_TOKENS)

    def backward(**given: int) -> str:
        launch = bindings.FlashMoELaunch(
            num_row_blocks=1, num_tokens=4, preact=0x200000, grad_probs=0xC00000, **BUFFERS, **given
        )
        launch.grad_columns = 2
        return said(
            load.flashmoe_backward(
                *map(ctypes.byref, (problem, group, launch)),
                *(0xA00000, 0xB00000, bindings.FLOAT32, 0, 1),
            )
        )

    refused = "x at 0x500000 of a launch that does not read tokens: wanted NULL"
    without_rows = {
        bindings.READS_NO_TOKENS: refused,
        bindings.READS_TOKENS: "",
        bindings.COPIES_TOKENS: "x at 0x500000 of a backward that copies tokens, without rows: "
        "wanted a buffer for them",
    }
    assert backward(x=0x500000) == without_rows[can_do[1]]
    assert backward(x=0x500000, rows=0xD00000) == ("" if can_do[1] else refused)
    misaligned = backward(x=0x500008, rows=0xD00000)
    assert misaligned.startswith("x is at 0x500008" if can_do[1] else "x at 0x500008")
