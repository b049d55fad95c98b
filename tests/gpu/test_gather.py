"""Rows that a rank that is alone reads where its tokens have them."""

import pytest
import torch

from flashmoe_megatron.config import KEEPS, Activation
from flashmoe_megatron.oracle import assert_close
from tests.gpu import steps
from tests.gpu.expected import expected
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu

NARROWER, NARROW, WIDE, WIDER, WIDEST = 384, 512, 640, 704, 1088
"""FFN widths of three tiles of a gated fc1, of four, of five, and twice of too many to read in
place; without a gate the last one's are too many."""


@pytest.mark.parametrize("intermediate", [192, NARROW, WIDE, WIDER])
@pytest.mark.parametrize("case", ["uniform", "to_one_rank", "with_empty_experts"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gathered_rows_give_the_same_bits(
    dtype: torch.dtype, transposed: bool, gated: bool, case: str, intermediate: int
):
    config = make_config(1, gated=gated, activation=Activation.SILU, intermediate=intermediate)
    inputs = steps.make_inputs(config, getattr(cases, case), TOKENS[1], dtype=dtype)
    weights = steps.weights_of(config, inputs, transposed=transposed)
    arguments = (inputs.x, inputs.probs, inputs.routing_map, weights)
    (want,), _ = VirtualLayer(config, keep="all").forward(*arguments)
    layer = VirtualLayer(config, keep="preactivations")
    for training in (False, True, False):
        (got,), _ = layer.forward(*arguments, training=training)
        torch.cuda.synchronize()
        assert torch.equal(got, want)
    assert_close("out", got, expected(config, inputs).exact.out, rel_l2=2e-2)
    layer.check_guards()


@pytest.mark.parametrize("accumulated", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("hidden", [192, 256, 448])
@pytest.mark.parametrize("intermediate", [192, NARROW, WIDE])
@pytest.mark.parametrize("case", ["uniform", "to_one_rank", "with_empty_experts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gathered_rows_of_a_gradient_give_the_bits_of_copies(
    dtype: torch.dtype, case: str, intermediate: int, hidden: int, accumulated: bool
):
    """Transposed weights have rows of dY copied, and are multiplied in the same order.

    At some hidden sizes a tile, or half of it, lies behind the last column.
    """
    config = make_config(
        1, gated=True, activation=Activation.SILU, hidden=hidden, intermediate=intermediate
    )
    inputs = steps.make_inputs(config, getattr(cases, case), TOKENS[1], dtype=dtype)
    results = []
    for transposed in (True, False, False):
        layer = VirtualLayer(config)
        weights = steps.weights_of(config, inputs, transposed=transposed)
        grads = steps.make_grads(layer, weights, initial=1.0 if accumulated else None)
        results.append(steps.guarded_step(layer, inputs, weights, grads))
    for got in results[1:]:
        steps.assert_same_bits(got, results[0])


@pytest.mark.parametrize("accumulated", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("grads_are_rounded", [False, True], ids=["fp32", "rounded"])
@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [
        (192, 192),
        (448, 256),
        (256, NARROWER),
        (448, 320),
        (256, NARROW),
        (256, WIDE),
        (192, WIDEST),
        (256, 1408),
    ],
)
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_steps_that_read_tokens_give_the_bits_of_copied_rows(
    dtype: torch.dtype,
    transposed: bool,
    hidden: int,
    intermediate: int,
    grads_are_rounded: bool,
    accumulated: bool,
):
    """A gradient of few outputs of fc1 is computed as its transpose, and turned round; others
    read copies that the backward makes, one token at a time or several."""
    config = make_config(
        1, gated=True, activation=Activation.SILU, hidden=hidden, intermediate=intermediate
    )
    inputs = steps.make_inputs(config, cases.with_empty_experts, TOKENS[1], dtype=dtype)
    weights = steps.weights_of(config, inputs, transposed=transposed)
    results = []
    for keep in ("all", "preactivations", "preactivations"):
        layer = VirtualLayer(config, keep=keep)
        grads = steps.make_grads(
            layer,
            weights,
            dtype=dtype if grads_are_rounded else torch.float32,
            initial=1.0 if accumulated else None,
        )
        results.append(steps.guarded_step(layer, inputs, weights, grads))
    for got in results[1:]:
        steps.assert_same_bits(got, results[0])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("intermediate", [192, NARROW, WIDE, WIDER])
def test_a_rank_that_is_alone_fetches_no_rows_again(intermediate: int, gated: bool):
    config = make_config(1, gated=gated, activation=Activation.SILU, intermediate=intermediate)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[1])
    weights = steps.weights_of(config, inputs)
    for keep in KEEPS[:2]:
        layer = VirtualLayer(config, keep=keep)
        steps.step(layer, inputs, weights)
        before = layer.group.memories[0].epoch
        forward = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
        (saved,) = forward[1]
        assert (saved.rows is None) == (keep == "preactivations")
        assert (saved.x is None) == (keep == "all")
        steps.backward(layer, inputs, weights, forward)
        # A forward and a backward take an epoch each, and a gather would take two.
        assert layer.group.memories[0].epoch == before + 2


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 191, 193, 300])
def test_gradients_of_any_number_of_rows(rows: int):
    """The last stage of K has pads; the rows of the expert behind it are not among them."""
    config = make_config(1, num_experts=2, topk=1, gated=True, activation=Activation.SILU)
    inputs = steps.make_inputs(config, cases.to_one_expert, [300])
    routing_map = inputs.routing_map[0]
    routing_map.zero_()
    routing_map[:rows, 0] = routing_map[rows:, 1] = True
    inputs.probs[0].copy_(routing_map * 0.75)
    steps.check(config, inputs)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 300])
def test_any_number_of_rows(num_tokens: int):
    config = make_config(1, num_experts=1, topk=1)
    inputs = steps.make_inputs(config, cases.uniform, [num_tokens])
    weights = steps.weights_of(config, inputs)
    arguments = (inputs.x, inputs.probs, inputs.routing_map, weights)
    (want,), _ = VirtualLayer(config, keep="all").forward(*arguments)
    (got,), _ = VirtualLayer(config).forward(*arguments, training=False)
    assert torch.equal(got, want)


@pytest.mark.parametrize("routing", [cases.uniform, cases.to_one_expert, cases.with_dropped_tokens])
@pytest.mark.parametrize("intermediate", [NARROW, WIDE, WIDEST])
def test_rows_that_are_read_in_place_until_they_are_copied_or_copied_apart(
    intermediate: int, routing: cases.Routing
):
    """In both directions; of 1,000 tokens only some are in the first tiles."""
    config = make_config(1, intermediate=intermediate, max_tokens=1000)
    steps.check(config, steps.make_inputs(config, routing, [1000]))


@pytest.mark.parametrize(
    ("intermediate", "gathers", "gathers_grads"),
    [(NARROW, True, True), (WIDE, True, False), (WIDER, False, False)],
)
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
def test_only_narrow_experts_gather(
    intermediate: int, gathers: bool, gathers_grads: bool, transposed: bool
):
    """What makes no pads copies no rows; with transposed weights a backward always does."""
    config = make_config(1, intermediate=intermediate, gated=True, activation=Activation.SILU)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[1])
    weights = steps.weights_of(config, inputs, transposed=transposed)
    layer = VirtualLayer(config)
    arguments = (inputs.x, inputs.probs, inputs.routing_map, weights)
    last = 0

    def pads_made() -> int:
        nonlocal last
        before, last = last, layer.backends[0].traffic.pad_rows_local
        return last - before

    layer.forward(*arguments, training=False)
    assert (pads_made() == 0) == gathers
    layer.backends[0].keep = "preactivations"
    layer.forward(*arguments)
    assert (pads_made() == 0) == gathers
    layer.backends[0].keep = "all"
    forward = layer.forward(*arguments)
    assert pads_made() > 0
    steps.backward(layer, inputs, weights, forward)
    assert (pads_made() == 0) == (gathers_grads and not transposed)
