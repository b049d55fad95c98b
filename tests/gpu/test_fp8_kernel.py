"""Experts in blockwise FP8 on the kernel, forward and backward, on virtual ranks of one GPU.

``test_fp8_forward.py`` has the forward's operands, bit by bit, by the C interface.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_megatron import FlashMoELayer
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.blockwise import ROW, SQUARE, pack, quantize, rounded
from flashmoe_megatron.config import TILE_M, Activation, MoEConfig, fp8_row_bytes
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel import ops
from flashmoe_megatron.kernel.backend import COPIES, TRANSPOSES
from flashmoe_megatron.low_rank import FactorGrads, Factors
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.weights import ExpertWeights, SplitWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.expected import Results
from tests.gpu.test_batch_invariance import of_tokens
from tests.gpu.virtual import VirtualLayer, device
from tests.gpu.virtual_hosts import VirtualHosts
from tests.unit import cases, test_fp8
from tests.unit.separate import Found, compare, oracle, run
from tests.unit.test_fp8 import FURTHER, uneven_inputs

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "hidden": 256,
    "intermediate": 384,
    "num_experts": 8,
    "topk": 2,
    "experts": "fp8",
    "max_tokens": 640,
}
EXPERTS = test_fp8.EXPERTS
TOKENS = {1: [600], 2: [300, 411], 4: [133, 0, 640, 256]}
FORMS: dict[str, dict[str, Any]] = {
    "swiglu": {"gated": True, "activation": Activation.SILU},
    "plain": {"gated": False, "activation": Activation.SQUARED_RELU},
    "narrow": {"gated": True, "activation": Activation.SILU, "intermediate": 128},
    "interleaved": {"gated": True, "activation": Activation.GELU, "glu_interleave": 128},
    "wide": {
        "gated": True,
        "activation": Activation.SILU,
        "hidden": 640,
        "intermediate": 1152,
        "num_experts": 4,
    },
}


def make(num_ranks: int, **form: Any) -> tuple[MoEConfig, cases.Inputs]:
    config = cases.make_config(num_ranks=num_ranks, **{**SIZES, **form})
    return config, steps.to_device(uneven_inputs(config, TOKENS[num_ranks]), device())


def found_of(results: Results) -> Found:
    return {
        "out": results.out,
        "grad x": results.grad_x,
        "grad probs": results.grad_probs,
        "grad fc1": results.grad_fc1,
        "grad fc2": results.grad_fc2,
    }


@pytest.mark.parametrize("num_ranks", list(TOKENS))
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("experts", EXPERTS)
def test_results_are_those_of_rounded_operands(
    experts: str, form: dict[str, Any], num_ranks: int
) -> None:
    config, inputs = make(num_ranks, **form, experts=experts)
    layer = VirtualLayer(config)
    weights = steps.weights_of(config, inputs)
    want = oracle(config, inputs, hands_over=config.has_fp8_dgrad)
    steps.spoil(layer, inputs, weights)
    got = steps.step(layer, inputs, weights)
    torch.cuda.synchronize()
    for rank, its in enumerate(want):
        share = found_of(got.share(config, TOKENS[num_ranks], rank))
        compare(share, its, torch.bfloat16, times=1.3 * FURTHER)
    steps.assert_same_bits(steps.step(layer, inputs, weights), got)
    layer.check_guards()


def test_two_hosts_quantize_within_each() -> None:
    """Between hosts tokens are bfloat16, and each token is quantized once."""
    config, inputs = make(4)
    weights = steps.weights_of(config, inputs)
    layer = VirtualHosts(config, 2)
    got = layer.step(inputs, weights)
    torch.cuda.synchronize()
    for rank, its in enumerate(oracle(config, inputs)):
        share = found_of(got.share(config, TOKENS[4], rank))
        compare(share, its, torch.bfloat16, times=2 * FURTHER)
    steps.assert_same_bits(layer.step(inputs, weights), got)
    layer.allocator.check()


def test_tokens_travel_as_bytes_with_their_scales() -> None:
    """Rows of a forward count with their bytes; results and gradients are of 16 bits."""
    bytes_of = {}
    for experts in ("bf16", "fp8"):
        config, inputs = make(2, experts=experts, hidden=1024)
        layer = VirtualLayer(config)
        weights = steps.weights_of(config, inputs)
        layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
        forward = [backend.traffic for backend in layer.backends]
        steps.step(layer, inputs, weights)
        both = [backend.traffic for backend in layer.backends]
        bytes_of[experts] = [[one.bytes_sent for one in each] for each in (forward, both)]
    local = config.num_local_experts
    for rank, experts in enumerate((slice(0, local), slice(local, None))):
        served = int(inputs.routing_map[1 - rank][:, experts].any(1).sum())
        for number, launches in enumerate((1, 3)):
            plain, in_fp8 = (bytes_of[kind][number][rank] for kind in ("bf16", "fp8"))
            assert plain == launches * 2 * served * 2 * 1024
            forwards = number + 1
            assert plain - in_fp8 == forwards * served * (2 * 1024 - (1024 + 8 * 4))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hooks_see_what_rows_stand_for(num_ranks: int) -> None:
    config, inputs = make(num_ranks)
    layer = VirtualLayer(config)
    seen = steps.rows_seen(layer)
    weights = steps.weights_of(config, inputs)
    layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights, training=False)
    torch.cuda.synchronize()
    x, chosen = rounded(torch.cat(inputs.x), ROW).double(), torch.cat(inputs.routing_map)
    for rank in range(num_ranks):
        begin = 0
        for expert in range(rank * config.num_local_experts, (rank + 1) * config.num_local_experts):
            own = x[chosen[:, expert]]
            end = begin + -(-len(own) // TILE_M) * TILE_M
            torch.testing.assert_close(seen[rank][begin:end].sum(0), own.sum(0))
            begin = end
        assert begin == len(seen[rank])


@pytest.mark.parametrize("form", ["swiglu", "plain"])
def test_a_tokens_bits_do_not_depend_on_others(form: str) -> None:
    config, inputs = make(1, **FORMS[form])
    (num_tokens,) = TOKENS[1]
    everyone = of_tokens(config, inputs, torch.arange(num_tokens, device=device()))
    shuffled = torch.randperm(num_tokens, generator=cases.generator(1)).to(device())
    for tokens in (shuffled, shuffled[:300], shuffled[:57], shuffled[:1]):
        for some, every in zip(of_tokens(config, inputs, tokens), everyone, strict=True):
            assert torch.equal(some, every[tokens]), len(tokens)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("experts", EXPERTS)
def test_factors_are_given_rows_in_16_bits(experts: str, num_ranks: int) -> None:
    """Their gradients are the products with what tokens stand for that full gradients are."""
    config, inputs = make(num_ranks, experts=experts)
    layer, weights = VirtualLayer(config), steps.weights_of(config, inputs)
    want = steps.step(layer, inputs, weights)
    factors, made = [], []
    for _ in range(num_ranks):
        local, kinds = config.num_local_experts, []
        for num_in, num_out in (
            (config.hidden, config.fc1_rows),
            (config.intermediate, config.hidden),
        ):
            down = torch.eye(16, num_in, device=device()).bfloat16().expand(local, -1, -1)
            up = torch.eye(num_out, 16, device=device()).bfloat16().expand(local, -1, -1)
            kinds.append(FactorGrads((down.contiguous(),), (up.contiguous(),), 1.0, [True, True]))
        made.append(kinds)
        factors.append(Factors(*kinds))
    _, saved = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
    grads = steps.make_grads(layer, weights)
    layer.backward(inputs.grad_out, saved, weights, *grads, factors=factors)
    torch.cuda.synchronize()
    for rank, kinds in enumerate(made):
        its = want.share(config, TOKENS[num_ranks], rank)
        for kind, full in zip(kinds, (its.grad_fc1, its.grad_fc2), strict=True):
            of_down, of_up = kind.grads()
            assert of_down is not None
            assert of_up is not None
            assert_close("down", of_down.float(), full[:, :16].float(), rel_l2=1e-2)
            assert_close("up", of_up.float(), full[:, :, :16].float(), rel_l2=1e-2)


@pytest.mark.parametrize("keep", ["preactivations", "inputs"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_what_is_kept_changes_no_bit(experts: str, keep: str) -> None:
    config, inputs = make(1, experts=experts)
    want, got = (
        run(select_backend(config, None, device(), kind="kernel", keep=kept), inputs)
        for kept in ("all", keep)
    )
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_rows_that_come_again_from_another_rank_change_no_bit() -> None:
    config, inputs = make(2)
    weights = steps.weights_of(config, inputs)
    want, got = (
        steps.step(VirtualLayer(config, keep=kept), inputs, weights)
        for kept in ("all", "preactivations")
    )
    steps.assert_same_bits(got, want)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("experts", EXPERTS)
def test_the_scheduled_backend_computes_the_same(experts: str, form: dict[str, Any]) -> None:
    """Each is as far from the oracle as the other, and from each other no further than both."""
    config, inputs = make(1, **form, experts=experts)
    scheduled = ScheduledBackend(config, device=device(), options=BackendOptions(), degrees=(1, 1))
    kernel = select_backend(config, None, device(), kind="kernel")
    want = {name: value.double() for name, value in run(scheduled, inputs).items()}
    found, of_tokens = run(kernel, inputs), "grad x"
    if config.has_fp8_dgrad:  # with the kernel's own rounding ahead of a quantization
        close = {of_tokens: want.pop(of_tokens)}
        compare({of_tokens: found.pop(of_tokens)}, close, torch.bfloat16, times=3 * FURTHER)
    compare(found, want, torch.bfloat16, times=2 * FURTHER)


def test_weights_are_quantized_bit_by_bit_at_each_pass() -> None:
    config, inputs = make(1)
    layer = VirtualLayer(config, is_guarded=False)
    weights = steps.weights_of(config, inputs)
    (backend,) = layer.backends
    forward = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
    torch.cuda.synchronize()
    copies = backend._tables._copies
    assert copies is not None
    at = 0
    for weight in (*weights[0].fc1, *weights[0].fc2):
        blocks = quantize(weight, SQUARE)
        values = copies[at : at + weight.numel()].view(weight.shape)
        assert torch.equal(values, blocks.values.view(torch.uint8))
        at += weight.numel()
        rows, columns = blocks.scales.shape
        pitch = (columns + 3) // 4 * 4
        scales = copies[at : at + 4 * rows * pitch].view(torch.float32).view(rows, pitch)
        assert torch.equal(scales[:, :columns], blocks.scales)
        at += 4 * rows * pitch
    steps.backward(layer, inputs, weights, forward)
    torch.cuda.synchronize()
    at = 0
    for weight in (*weights[0].fc1, *weights[0].fc2):
        read = copies[at : at + 2 * weight.numel()].view(torch.bfloat16).view(weight.shape)
        assert torch.equal(read, rounded(weight, SQUARE))
        at += 2 * weight.numel()


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_backward_in_fp8_has_transposes_of_weights_bit_by_bit(form: dict[str, Any]) -> None:
    config, inputs = make(1, **form, experts="fp8_dgrad")
    layer = VirtualLayer(config, is_guarded=False)
    weights = steps.weights_of(config, inputs)
    steps.step(layer, inputs, weights)
    torch.cuda.synchronize()
    copies = layer.backends[0]._tables._copies
    assert copies is not None
    at = 0
    for weight in (*weights[0].fc1, *weights[0].fc2):
        blocks = quantize(weight, SQUARE)
        turned, scales = blocks.values.view(torch.uint8).t(), blocks.scales.t()
        assert torch.equal(copies[at : at + weight.numel()].view(turned.shape), turned)
        at += weight.numel()
        rows, columns = scales.shape
        pitch = (columns + 3) // 4 * 4
        found = copies[at : at + 4 * rows * pitch].view(torch.float32).view(rows, pitch)
        assert torch.equal(found[:, :columns], scales)
        at += 4 * rows * pitch


@pytest.mark.parametrize("form", ["swiglu", "plain"])
def test_a_backward_in_fp8_quantizes_gradients_bit_by_bit(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of outputs and of pre-activations have the bytes of the package's quantizer.

    Each expert has all tokens, whose rows fill whole blocks, so that no row is a pad.
    """
    shape = {"num_experts": 2, "experts": "fp8_dgrad"}
    config = cases.make_config(num_ranks=1, **{**SIZES, **FORMS[form], **shape})
    inputs = steps.to_device(uneven_inputs(config, [TILE_M * 4]), device())
    assert inputs.routing_map[0].all()
    scratches: list[torch.Tensor] = []
    backward = ops.backward

    def keep(*arguments: Any) -> None:
        scratches.append(arguments[8])
        backward(*arguments)

    monkeypatch.setattr(ops, "backward", keep)
    layer = VirtualLayer(config, is_guarded=False)
    steps.step(layer, inputs, steps.weights_of(config, inputs))
    torch.cuda.synchronize()
    (scratch,) = scratches
    rows, hidden, fc1_rows = 2 * TILE_M * 4, config.hidden, config.fc1_rows
    begin = rows * 2 * (config.intermediate + hidden)  # after activations and results
    parts = []
    for width in (fp8_row_bytes(hidden), fp8_row_bytes(fc1_rows), 2 * fc1_rows):
        parts.append(scratch[begin : begin + rows * width].view(rows, width))
        begin += rows * width
    of_outputs, of_preacts, in_16_bits = parts
    want = pack(quantize(inputs.grad_out[0], ROW))
    assert torch.equal(of_outputs.unique(dim=0), want.unique(dim=0))
    end = fc1_rows + fc1_rows // 32  # pads follow, which are not written
    exact = in_16_bits.view(torch.bfloat16)
    assert exact.isfinite().all()
    assert torch.equal(of_preacts[:, :end], pack(quantize(exact, ROW))[:, :end])


def test_a_backward_in_fp8_joins_gate_and_up_matrices() -> None:
    """Both are one transpose, whose products are those of one matrix."""
    config, inputs = make(1, experts="fp8_dgrad", intermediate=640)
    results = []
    for is_split in (False, True):
        backend = select_backend(config, None, device(), kind="kernel")
        x = inputs.x[0].clone().requires_grad_()
        fc1, down = (torch.stack(list(kind)).requires_grad_() for kind in (inputs.fc1, inputs.fc2))
        weights: ExpertWeights | SplitWeights = ExpertWeights((fc1,), (down,))
        if is_split:
            gate, up = (half.detach().contiguous().requires_grad_() for half in fc1.chunk(2, 1))
            weights = SplitWeights(gate=(gate,), up=(up,), down=(down,))
        moe_apply(backend, x, inputs.probs[0], inputs.routing_map[0], weights).backward(
            inputs.grad_out[0]
        )
        of_fc1 = torch.cat((gate.grad, up.grad), 1) if is_split else fc1.grad
        results.append((x.grad, of_fc1, down.grad))
    for joined, split in zip(*results, strict=True):
        assert torch.equal(joined, split)


def test_gradients_travel_as_bytes_with_their_scales() -> None:
    """Rows of a backward in FP8 count as those of its forward."""
    bytes_of = []
    for experts in EXPERTS:
        config, inputs = make(2, experts=experts, hidden=1024)
        layer = VirtualLayer(config)
        steps.step(layer, inputs, steps.weights_of(config, inputs))
        bytes_of.append([backend.traffic.bytes_sent for backend in layer.backends])
    local = config.num_local_experts
    for rank, mine in enumerate((slice(0, local), slice(local, None))):
        served = int(inputs.routing_map[1 - rank][:, mine].any(1).sum())
        assert bytes_of[0][rank] - bytes_of[1][rank] == served * (2 * 1024 - (1024 + 8 * 4))


@pytest.mark.parametrize("change", ["step", "load", "write_data", "give_memory"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_no_quantized_weight_is_older_than_its_parameter(experts: str, change: str) -> None:
    config = replace(test_fp8.CONFIG, num_experts=4, experts=experts)

    def make_layer() -> FlashMoELayer:
        return FlashMoELayer(
            config, device="cuda", dtype=torch.bfloat16, router=True, backend="kernel"
        )

    torch.manual_seed(7)
    layer, other = make_layer(), make_layer()
    x = torch.randn(16, config.hidden, device="cuda").bfloat16()
    before = layer(x)
    if change == "load":
        state = {name: value.flip(-1) for name, value in layer.state_dict().items()}
        layer.load_state_dict(state)
    else:
        getattr(test_fp8, change)(layer, x)
    other.load_state_dict({key: value.clone() for key, value in layer.state_dict().items()})
    test_fp8.compare_steps(layer, other, x, before)


def test_a_graph_quantizes_again_at_each_replay() -> None:
    config, inputs = make(1)
    backend = select_backend(config, None, device(), kind="kernel", row_bound=2.0)
    weights = steps.weights_of(config, inputs)[0]
    x, probs, routing_map = inputs.x[0], inputs.probs[0], inputs.routing_map[0]

    def forward() -> torch.Tensor:
        return backend.forward(x, probs, routing_map, weights, training=True)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = forward().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = forward()
    for weight in (*weights.fc1, *weights.fc2):
        weight.copy_(weight.flip(-1) * 3)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, forward())
    assert not torch.equal(out, before)


MICRO_BATCHES = 4


def watched_copies(monkeypatch: pytest.MonkeyPatch, *, of_backwards: bool = False) -> list[bool]:
    """Returns a list that will have an entry of each forward: whether it finds copies of weights.

    With ``of_backwards`` its entries are of backwards.
    """
    name, place = ("backward", 13) if of_backwards else ("forward", 9)
    entries: list[bool] = []
    launch = getattr(ops, name)

    def tell(*arguments: Any) -> None:
        entries.append(arguments[place])
        launch(*arguments)

    monkeypatch.setattr(ops, name, tell)
    return entries


def change(weights: list[ExpertWeights]) -> None:
    """As an optimizer does, without a count."""
    for share in weights:
        for weight in (*share.fc1, *share.fc2):
            weight.data.copy_(weight.flip(-1) * 1.5)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("experts", EXPERTS)
def test_weights_quantized_once_a_step_change_no_bit(
    experts: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, inputs = make(num_ranks, experts=experts)
    plain = steps.weights_of(config, inputs)
    promised = [replace(share, promise=Promise()) for share in plain]
    layer, other = VirtualLayer(config), VirtualLayer(config)
    for _ in range(3):
        for share in promised:
            share.promise.give()
        forwards_find = watched_copies(monkeypatch)
        backwards_find = watched_copies(monkeypatch, of_backwards=True)
        for number in range(MICRO_BATCHES):
            batch = replace(inputs, x=[x.roll(number, 0) for x in inputs.x])
            got = steps.step(layer, batch, promised)
            wanted = [number > 0] * num_ranks
            assert forwards_find[-num_ranks:] == wanted
            assert backwards_find[-num_ranks:] == (
                wanted if config.has_fp8_dgrad else [False] * num_ranks
            )
            steps.assert_same_bits(got, steps.step(other, batch, plain))
            assert forwards_find[-num_ranks:] == backwards_find[-num_ranks:] == [False] * num_ranks
        torch.cuda.synchronize()
        for share in promised:
            first = share.fc1[0]
            want = quantize(first, SQUARE).values.view(torch.uint8)
            values = share.making(COPIES).made[: first.numel()]
            assert torch.equal(values.view(first.shape), want)
            turned = share.making(TRANSPOSES).made
            assert (turned is None) == (experts == "fp8")
            if turned is not None:
                assert torch.equal(turned[: first.numel()].view(want.t().shape), want.t())
            share.promise.end()
        monkeypatch.undo()
        change(plain)
    layer.check_guards()


@pytest.mark.parametrize("experts", EXPERTS)
def test_a_broken_promise_is_not_noticed(experts: str) -> None:
    """So copies are used; and what the layer can see for itself has them made again."""
    config, inputs = make(1, experts=experts)
    weights = [replace(share, promise=Promise()) for share in steps.weights_of(config, inputs)]
    layer = VirtualLayer(config)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        got = steps.step(layer, inputs, weights)
        return got.out.clone(), got.grad_x.clone()

    weights[0].promise.give()
    before = step()
    change(weights)
    for number, value in enumerate(step()):  # gradients of tokens by weights in bfloat16 change
        assert torch.equal(value, before[number]) == (number == 0 or config.has_fp8_dgrad)
    weights[0].fc1[0].mul_(1)
    after = step()
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(old, new)
    weights[0].promise.end()
    for new, own in zip(after, step(), strict=True):
        assert torch.equal(own, new)


def test_layers_that_take_turns_keep_transposes_of_their_own() -> None:
    """Two layers on one backend, whose backwards come in the other order."""
    config, inputs = make(1, experts="fp8_dgrad")
    layer, other = VirtualLayer(config), VirtualLayer(config)
    plain = [steps.weights_of(config, inputs) for _ in range(2)]
    plain[1] = [
        replace(share, fc1=tuple(-w for w in share.fc1), fc2=tuple(w.flip(0) for w in share.fc2))
        for share in plain[1]
    ]
    promised = [[replace(share, promise=Promise()) for share in one] for one in plain]
    for one in promised:
        one[0].promise.give()
    for number in range(2):
        batch = replace(inputs, x=[x.roll(number, 0) for x in inputs.x])
        given = batch.x, batch.probs, batch.routing_map
        forwards = [layer.forward(*given, one) for one in promised]
        got = [steps.backward(layer, batch, promised[i], forwards[i]) for i in (1, 0)]
        want = [steps.step(other, batch, plain[i]) for i in (1, 0)]
        for one, two in zip(got, want, strict=True):
            steps.assert_same_bits(one, two)


@pytest.mark.parametrize("experts", EXPERTS)
def test_a_graph_of_a_step_quantizes_in_its_first_micro_batch(
    experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, inputs = make(1, experts=experts)
    backend = select_backend(config, None, device(), kind="kernel", row_bound=2.0)
    weights = replace(steps.weights_of(config, inputs)[0], promise=Promise())
    batches = [inputs.x[0].roll(number, 0) for number in range(MICRO_BATCHES)]
    sums = [
        [WeightGrad(torch.zeros_like(weight, dtype=torch.float32), True) for weight in kind]
        for kind in (weights.fc1, weights.fc2)
    ]

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An output and the gradient of tokens."""
        given = x, inputs.probs[0], inputs.routing_map[0], weights
        out, saved = backend.forward(*given, training=True)
        return out, backend.backward(inputs.grad_out[0], saved, weights, *sums)[0]

    def step() -> list[tuple[torch.Tensor, torch.Tensor]]:
        weights.promise.give()
        found = [both(x) for x in batches]
        weights.promise.end()
        return found

    forwards_find = watched_copies(monkeypatch)
    backwards_find = watched_copies(monkeypatch, of_backwards=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph, piece = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            of_step = step()
        weights.promise.give()
        before = [one.clone() for one in both(batches[0])]
        with torch.cuda.graph(piece, stream=stream):
            of_piece = both(batches[0])
        again = both(batches[0])
        wanted = [number > 0 for number in range(MICRO_BATCHES)] * 2 + [False, False, True]
        assert forwards_find == wanted
        assert backwards_find == [one and config.has_fp8_dgrad for one in wanted]
        for got, one in zip(again, before, strict=True):
            assert torch.equal(got, one)
        weights.promise.end()
        for _ in range(2):
            change([weights])
            want = [both(x) for x in batches]
            graph.replay()
            piece.replay()
            torch.cuda.synchronize()
            for pair, wanted in zip((*of_step, of_piece), (*want, want[0]), strict=True):
                for got, one in zip(pair, wanted, strict=True):
                    assert torch.equal(got, one)
            for got, one in zip(of_piece, before, strict=True):
                assert not torch.equal(got, one)


@pytest.mark.parametrize("keep", ["all", "inputs"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_a_training_with_copies_of_each_step_has_the_same_bits(experts: str, keep: str) -> None:
    config = replace(test_fp8.CONFIG, num_experts=4, experts=experts)
    layers = [
        FlashMoELayer(
            config, device="cuda", dtype=torch.bfloat16, router=True, backend="kernel", keep=keep
        )
        for _ in range(2)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    test_fp8.train_both(layers, torch.randn(16, config.hidden, device="cuda").bfloat16())


def test_weights_in_another_form_are_refused() -> None:
    config, inputs = make(1)
    backend = select_backend(config, None, device(), kind="kernel")
    plain = steps.weights_of(config, inputs)[0]
    turned = tuple(tuple(w.t().contiguous() for w in kind) for kind in (plain.fc1, plain.fc2))
    half = tuple(tuple(w.half() for w in kind) for kind in (plain.fc1, plain.fc2))
    given = inputs.x[0], inputs.probs[0], inputs.routing_map[0]
    for weights, words in (
        (ExpertWeights(*turned, transposed=True), "transposed weights: wanted"),
        (ExpertWeights(*half), "float16: wanted bfloat16"),
    ):
        with pytest.raises(ConfigError, match=words):
            backend.forward(*given, weights, training=False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers_of_other_precisions_share_a_heap(num_ranks: int) -> None:
    """As a model has them whose first and last layers stay in bfloat16."""
    group, layers, held = None, [], []
    for experts in ("fp8", "bf16", "fp8_dgrad", "bf16"):
        config, inputs = make(num_ranks, **FORMS["swiglu"], experts=experts)
        inputs = replace(inputs, x=[x.roll(len(layers), 0) for x in inputs.x])
        layer = VirtualLayer(config, group)
        group = layer.group
        weights = steps.weights_of(config, inputs)
        want = steps.step(VirtualLayer(config), inputs, weights)
        layers.append((layer, inputs, weights, want))
    for layer, inputs, weights, _ in layers * 2:
        held.append(layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights))
    for (layer, inputs, weights, want), forward in reversed(
        list(zip(layers * 2, held, strict=True))
    ):
        steps.assert_same_bits(steps.backward(layer, inputs, weights, forward), want)
        layer.check_guards()
