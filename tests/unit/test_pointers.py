"""Pointers that the C interface is given: a bad one is refused before it reaches a GPU."""

import ctypes
from typing import Any

import pytest

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.kernel import bindings
from tests.unit import native

pytestmark = pytest.mark.library

CONFIG = MoEConfig(
    hidden=128,
    intermediate=64,
    num_experts=2,
    topk=1,
    activation=Activation.GELU,
    gated=False,
    num_ranks=1,
    max_tokens=64,
)
FLOAT32, BFLOAT16 = 0, 1


def problem() -> bindings.FlashMoEProblem:
    return native.problem_of(CONFIG)


def forward(**changes: int) -> tuple[int, str]:
    """Status and sentence of a forward whose pointers are of nobody, all aligned but these."""
    mailbox = native.Mailbox(problem())
    group = bindings.FlashMoEGroup(
        heaps=(ctypes.c_void_p * 8)(0x200000),
        workspace=0x100000,
        mailbox=mailbox.address,
    )
    given: dict[str, Any] = {"x": 0x500000, "probs": 0x300000, "routing_map": 0x600001}
    launched: dict[str, Any] = {"plan": 0x700000, "weight_maps": 0x400000, "out": 0x800000}
    for name, address in changes.items():
        (given if name in given else launched)[name] = address
    status = bindings.load().flashmoe_forward(
        ctypes.byref(problem()),
        ctypes.byref(group),
        ctypes.byref(bindings.FlashMoEInput(num_tokens=4, probs_dtype=FLOAT32, **given)),
        ctypes.byref(bindings.FlashMoELaunch(num_tokens=4, **launched)),
        0,
    )
    return status, bindings.load().flashmoe_last_error().decode()


def test_good_pointers_get_as_far_as_the_launch():
    assert forward()[0] == bindings.CUDA_ERROR
    assert forward(biases=0x900000)[0] == bindings.CUDA_ERROR


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("x", 0x500001),
        ("probs", 0x300001),
        ("probs", 0),
        ("routing_map", 0),
        ("biases", 0x900001),
        ("weight_maps", 0x400001),
        ("out", 0x800001),
    ],
)
def test_a_forward_refuses(name: str, address: int):
    status, sentence = forward(**{name: address})
    assert status == bindings.BAD_ARGUMENT
    assert sentence.startswith(f"{name} is at ")


@pytest.mark.parametrize(("dtype", "address"), [(FLOAT32, 2), (BFLOAT16, 1)])
def test_a_table_refuses_a_gradient_of_a_bias(dtype: int, address: int):
    sizes = bindings.FlashMoESizes()
    bindings.call("sizes", problem(), sizes)
    table = ctypes.create_string_buffer(int(sizes.grad_table_bytes))
    of_weights = (ctypes.c_void_p * 4)(*(0x10000 * (i + 1) for i in range(4)))
    of_biases = (ctypes.c_void_p * 4)(0x50000, 0x50010, 0x50020, address)
    encode = bindings.load().flashmoe_encode_grads
    status = encode(ctypes.byref(problem()), of_weights, of_biases, dtype, table)
    assert status == bindings.BAD_ARGUMENT
    assert b"a bias's gradient is at " in bindings.load().flashmoe_last_error()
