"""Launch after launch: order, shared memory, gradients that accumulate, a thousand runs."""

from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.config import Activation
from tests.gpu import steps
from tests.gpu.expected import Expected, assert_as_good, expected
from tests.gpu.layers import ROUTINGS, TOKENS, make_config, zipf
from tests.gpu.virtual import VirtualGroup, VirtualLayer, streams
from tests.unit import cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_thousand_launches(num_ranks: int):
    """Routing and tokens change at each launch; every set of inputs gives the same bits again."""
    config = make_config(num_ranks, hidden=128, intermediate=128, num_experts=8, topk=2)
    layer = VirtualLayer(config, is_guarded=False)
    distinct, launches = 48, 1000
    sets = [
        steps.make_inputs(
            config,
            ROUTINGS[index % len(ROUTINGS)],
            [(37 * index + 101 * rank) % 160 for rank in range(num_ranks)],
            seed=index,
        )
        for index in range(distinct)
    ]
    # One set of weights: that they change is another test.
    sets = [replace(inputs, fc1=sets[0].fc1, fc2=sets[0].fc2) for inputs in sets]
    weights = steps.weights_of(config, sets[0])
    first: list[steps.Results] = []
    differences = torch.zeros((), dtype=torch.int64, device=sets[0].fc1[0].device)
    for launch in range(launches):
        inputs = sets[launch % distinct]
        if launch < distinct:
            got = steps.step(layer, inputs, weights)
            assert_as_good(got, expected(config, inputs))
            first.append(got)
        elif launch % 3 == 0:  # an evaluation among them
            forward = layer.forward(
                inputs.x, inputs.probs, inputs.routing_map, weights, training=False
            )
            differences += (torch.cat(forward[0]) != first[launch % distinct].out).sum()
        else:
            got = steps.step(layer, inputs, weights)
            for name, tensor in vars(got).items():
                differences += (tensor != getattr(first[launch % distinct], name)).sum()
    assert int(differences) == 0
    assert all(memory.epoch > launches for memory in layer.group.memories)


@pytest.mark.parametrize("width", [(320, 128), (512, 512)], ids=str)
def test_experts_with_few_rows(width: tuple[int, int]):
    """The shortest tiles: of one stage, or with pads alone for one of two warpgroups. A cluster's
    warps get out of step with them soonest."""
    num_ranks, launches, hidden, intermediate = 8, 300, *width
    config = make_config(
        num_ranks, hidden=hidden, intermediate=intermediate, num_experts=64, topk=4, max_tokens=64
    )
    layer = VirtualLayer(config, is_guarded=False)
    inputs = steps.make_inputs(config, cases.uniform, [0, 1, 0, 40, 0, 1, 40, 1])
    weights = steps.weights_of(config, inputs)
    grads = steps.make_grads(layer, weights)
    first = steps.step(layer, inputs, weights, grads)
    assert_as_good(first, expected(config, inputs))
    differences = torch.zeros((), dtype=torch.int64, device=inputs.fc1[0].device)
    for _ in range(launches):
        got = steps.step(layer, inputs, weights, grads)
        for name, tensor in vars(got).items():
            differences += (tensor != getattr(first, name)).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("last", [0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_epochs_wrap_around(last: int):
    config = make_config(2)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    want = expected(config, inputs)
    layer = VirtualLayer(config)
    weights = steps.weights_of(config, inputs)
    layer.prepare()
    for memory in layer.group.memories:
        memory.epoch = last - 3
    for _ in range(4):
        assert_as_good(steps.step(layer, inputs, weights), want)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_repeats_bit_for_bit_in_fresh_memory(num_ranks: int):
    config = make_config(num_ranks, topk=4)
    inputs = steps.make_inputs(config, zipf, TOKENS[num_ranks])
    weights = steps.weights_of(config, inputs)
    first, second = (steps.step(VirtualLayer(config), inputs, weights) for _ in range(2))
    steps.assert_same_bits(second, first)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("initial", [None, 0.5], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weight_gradients(dtype: torch.dtype, initial: float | None, transposed: bool):
    """Experts without tokens get zeros, or keep what is there where gradients are added to it."""
    config = make_config(2, hidden=192, intermediate=320)
    inputs = steps.make_inputs(config, cases.with_empty_experts, TOKENS[2])
    want = expected(config, inputs)
    for results in (want.exact, want.unfused):
        results.grad_fc1 += initial or 0.0
        results.grad_fc2 += initial or 0.0
    want.unfused.grad_fc1 = want.unfused.grad_fc1.to(dtype)
    want.unfused.grad_fc2 = want.unfused.grad_fc2.to(dtype)
    layer = VirtualLayer(config)
    weights = steps.weights_of(config, inputs, transposed=transposed)
    grads = steps.make_grads(layer, weights, dtype=dtype, initial=initial)
    got = steps.step(layer, inputs, weights, grads)
    assert_as_good(got, want)
    empty = torch.cat(inputs.routing_map).sum(0) == 0
    assert empty.any()
    assert (got.grad_fc1[empty] == (initial or 0.0)).all()
    assert (got.grad_fc2[empty] == (initial or 0.0)).all()
    layer.check_guards()


def test_micro_batches_accumulate():
    config = make_config(4)
    layer = VirtualLayer(config)
    batches = [steps.make_inputs(config, zipf, TOKENS[4], seed=seed) for seed in range(3)]
    batches = [replace(inputs, fc1=batches[0].fc1, fc2=batches[0].fc2) for inputs in batches]
    weights = steps.weights_of(config, batches[0])
    wants = [expected(config, inputs) for inputs in batches]
    grads = steps.make_grads(layer, weights, initial=0.0)
    for inputs in batches:
        got = steps.step(layer, inputs, weights, grads)
    total = Expected(*(_sum_of_weight_grads(wants, path) for path in ("exact", "unfused")))
    assert_as_good(got, total)
    layer.check_guards()


def _sum_of_weight_grads(wants: list[Expected], path: str) -> steps.Results:
    results = [getattr(want, path) for want in wants]
    return replace(
        results[-1],
        grad_fc1=sum(result.grad_fc1 for result in results),
        grad_fc2=sum(result.grad_fc2 for result in results),
    )


@pytest.mark.parametrize("order", ["first in first out", "last in first out"])
def test_several_micro_batches_in_flight(order: str):
    """Pipeline parallelism runs so: forward, forward, evaluation, backward, backward."""
    config = make_config(2, topk=2)
    layer = VirtualLayer(config)
    batches = [
        steps.make_inputs(config, routing, tokens, seed=seed)
        for seed, (routing, tokens) in enumerate(
            [(cases.uniform, [129, 200]), (zipf, [320, 1]), (cases.with_dropped_tokens, [0, 77])]
        )
    ]
    batches = [replace(inputs, fc1=batches[0].fc1, fc2=batches[0].fc2) for inputs in batches]
    weights = steps.weights_of(config, batches[0])
    pending = [
        (inputs, layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights))
        for inputs in batches
    ]
    evaluated, saved = layer.forward(
        batches[0].x, batches[0].probs, batches[0].routing_map, weights, training=False
    )
    assert saved == [None, None]
    assert all(map(torch.equal, evaluated, pending[0][1][0]))
    if order == "last in first out":
        pending.reverse()
    for inputs, forward in pending:
        got = steps.backward(layer, inputs, weights, forward)
        assert_as_good(got, expected(config, inputs))
    layer.check_guards()


def test_weights_that_change_between_forward_and_backward_keep_their_place():
    """An optimizer writes in place; a forward after it uses the new values."""
    config = make_config(2)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    layer = VirtualLayer(config)
    weights = steps.weights_of(config, inputs)
    steps.step(layer, inputs, weights)
    for weight in (*inputs.fc1, *inputs.fc2):
        weight.mul_(-0.5)
    assert_as_good(steps.step(layer, inputs, weights), expected(config, inputs))
    moved = replace(
        inputs,
        fc1=[(weight * 2).clone() for weight in inputs.fc1],
        fc2=[(weight * 2).clone() for weight in inputs.fc2],
    )
    got = steps.step(layer, moved, steps.weights_of(config, moved))
    assert_as_good(got, expected(config, moved))


def test_layers_of_different_shapes_share_memory():
    group = VirtualGroup(2)
    configs = [
        make_config(2, topk=2),
        make_config(2, hidden=512, intermediate=64, num_experts=4, topk=4, max_tokens=77),
        make_config(2, hidden=64, gated=False, activation=Activation.GELU, num_experts=32, topk=1),
    ]
    layers = [VirtualLayer(config, group) for config in configs]
    tokens = [[129, 200], [77, 3], [320, 0]]
    batches = [
        steps.make_inputs(config, zipf, counts)
        for config, counts in zip(configs, tokens, strict=True)
    ]
    weights = [steps.weights_of(layer.config, b) for layer, b in zip(layers, batches, strict=True)]
    wants = [expected(layer.config, b) for layer, b in zip(layers, batches, strict=True)]
    for _ in range(2):
        forwards = [
            layer.forward(inputs.x, inputs.probs, inputs.routing_map, share)
            for layer, inputs, share in zip(layers, batches, weights, strict=True)
        ]
        for index in reversed(range(len(layers))):
            got = steps.backward(layers[index], batches[index], weights[index], forwards[index])
            assert_as_good(got, wants[index])
    for layer in layers:
        layer.check_guards()


def test_a_rank_ahead_with_another_layer_disturbs_nobody():
    """Rank 1 is soon done, and sends the routes of a layer of larger top-k, while rank 0 still
    waits for its own experts before it adds their results to those of rank 1."""
    tokens, few = 8192, 64
    group = VirtualGroup(2)
    slow = make_config(
        2,
        hidden=64,
        intermediate=8192,
        num_experts=8,
        topk=2,
        gated=False,
        activation=Activation.RELU,
        max_tokens=tokens,
    )
    quick = make_config(2, hidden=64, intermediate=64, num_experts=16, topk=8, max_tokens=tokens)
    layers = [VirtualLayer(config, group, is_guarded=False) for config in (slow, quick)]
    batches = [
        steps.make_inputs(slow, cases.uniform, [tokens, 0]),
        steps.make_inputs(quick, cases.uniform, [0, tokens]),
    ]
    to_both = torch.zeros(tokens, 8, dtype=torch.bool)
    to_both[few:, :2] = True
    to_both[:few, 3:5] = True  # rank 0's last expert, and rank 1's first
    batches[0].routing_map[0] = to_both.to(batches[0].x[0].device)
    batches[0].probs[0] = batches[0].routing_map[0].float() / 2
    weights = [steps.weights_of(layer.config, b) for layer, b in zip(layers, batches, strict=True)]

    for layer, share in zip(layers, weights, strict=True):
        for backend, of_rank in zip(layer.backends, share, strict=True):
            backend._use_weights(of_rank)
        layer.prepare()

    def forward(which: int) -> torch.Tensor:
        """Rank 0's output; returns without waiting for it."""
        outs = []
        for rank, backend in enumerate(layers[which].backends):
            batch = batches[which]
            with torch.cuda.stream(streams()[rank]):
                pending = backend.begin(
                    batch.x[rank],
                    batch.probs[rank],
                    batch.routing_map[rank],
                    int(backend._sizes.max_row_blocks),
                )
                out, _ = backend.finish(pending, weights[which][rank], training=False)
            outs.append(out)
        return outs[0]

    def waited(out: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return out

    want = waited(forward(0))
    assert want.isfinite().all()
    assert want.any(dim=1).all()
    for _ in range(2):  # the routes' parity alternates
        got, _ = forward(0), forward(1)
        assert torch.equal(waited(got), want)
        assert torch.equal(waited(forward(0)), want)


@pytest.mark.parametrize(
    "later", [{"topk": 8}, {"max_tokens": 1000}], ids=["larger top-k", "more tokens"]
)
def test_a_heap_is_made_anew_for_another_layout_of_fewer_bytes(later: dict[str, int]):
    group = VirtualGroup(2)
    config = make_config(2, hidden=512, max_tokens=700, topk=4)
    wide = VirtualLayer(config, group)
    inputs = steps.make_inputs(config, cases.uniform, [700, 600])
    weights = steps.weights_of(config, inputs)
    want = expected(config, inputs)
    assert_as_good(steps.step(wide, inputs, weights), want)
    heap = group.memories[0]._heap

    narrow_config = make_config(2, hidden=64, **{"topk": 2, "max_tokens": 100, **later})
    narrow = VirtualLayer(narrow_config, group)
    assert narrow.backends[0].heap_bytes == group.memories[0].heap_bytes
    narrow_inputs = steps.make_inputs(narrow_config, cases.uniform, [100, 100])
    got = steps.step(narrow, narrow_inputs, steps.weights_of(narrow_config, narrow_inputs))
    assert_as_good(got, expected(narrow_config, narrow_inputs))
    assert group.memories[0]._heap is not heap
    assert_as_good(steps.step(wide, inputs, weights), want)


def test_a_wider_layer_within_the_same_bounds_gets_a_larger_heap():
    """Tokens and top-k, which lay the heap out, are the same: its bytes alone tell that it is too
    small."""
    group = VirtualGroup(2)
    narrow, wide = (
        VirtualLayer(make_config(2, hidden=hidden, max_tokens=300), group) for hidden in (64, 1024)
    )
    heap_bytes = []
    for layer in (narrow, wide, narrow):
        inputs = steps.make_inputs(layer.config, cases.uniform, [300, 250])
        weights = steps.weights_of(layer.config, inputs)
        got = steps.step(layer, inputs, weights)
        assert_as_good(got, expected(layer.config, inputs))
        heap_bytes.append(group.memories[0].heap_bytes)
    assert heap_bytes[0] < heap_bytes[1] == heap_bytes[2]
    narrow.check_guards()
    wide.check_guards()


@pytest.mark.parametrize("between", ["steps", "forward and backward"])
def test_a_later_larger_layer_grows_the_memory(between: str):
    group = VirtualGroup(2)
    config = make_config(2, max_tokens=128)
    small = VirtualLayer(config, group)
    inputs = steps.make_inputs(config, cases.uniform, [128, 50])
    weights = steps.weights_of(config, inputs)
    want = expected(config, inputs)
    if between == "steps":
        assert_as_good(steps.step(small, inputs, weights), want)
    else:
        forward = small.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
    heap_bytes = group.memories[0].heap_bytes

    large_config = make_config(2, hidden=512, max_tokens=700, topk=4)
    large = VirtualLayer(large_config, group)
    large_inputs = steps.make_inputs(large_config, cases.uniform, [700, 600])
    large_weights = steps.weights_of(large_config, large_inputs)
    got = steps.step(large, large_inputs, large_weights)
    assert_as_good(got, expected(large_config, large_inputs))
    assert group.memories[0].heap_bytes > heap_bytes

    if between == "steps":
        got = steps.step(small, inputs, weights)
    else:
        got = steps.backward(small, inputs, weights, forward)
    assert_as_good(got, want)
    small.check_guards()
    large.check_guards()
