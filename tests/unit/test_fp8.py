"""Experts in blockwise FP8 on separate kernels: what they compute, what travels, what is refused.

``test_blockwise.py`` holds the quantizer, and ``test_separate.py`` compares layers of several ranks
with the oracle.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import FlashMoELayer, unchanged_weights
from flashmoe_megatron.adapters.experts import GroupBackends
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Backend
from flashmoe_megatron.checks import check_kernel_experts
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hooks import Call
from flashmoe_megatron.hosts.grid import HOST_VARIABLE
from flashmoe_megatron.options import FrameworkOptions
from flashmoe_megatron.select import resolve_kind, select_backend
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.precision import precision_of
from flashmoe_megatron.separate.steps import PLAIN
from flashmoe_megatron.telemetry.totals import LayerPlace
from flashmoe_megatron.weights import ExpertWeights, SplitWeights
from tests.distributed import RankPool, refusal
from tests.unit import cases, fp8
from tests.unit.separate import NAMES, ROUTINGS, TOKENS, Found, compare, make, oracle, run

SIZES: dict[str, Any] = {"hidden": 256, "intermediate": 128, "num_experts": 4, "experts": "fp8"}
CONFIG = cases.make_config(**SIZES)
EXPERTS = ("fp8", "fp8_dgrad")
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"gated": False, "activation": Activation.SQUARED_RELU},
    {"activation": Activation.GELU, "glu_interleave": 32},
)
FURTHER = 1.5
"""Times bfloat16's tolerance, since a value that is rounded to its other side moves by a tenth."""


def uneven_inputs(config: MoEConfig, tokens: list[int], seed: int = 0) -> cases.Inputs:
    """Tokens and weights whose blocks have scales of their own, so that none can be another's."""
    inputs = cases.make_inputs(config, cases.uniform, tokens, dtype=torch.bfloat16, seed=seed)
    along = torch.tensor([1.0, 3.0]).repeat_interleave(config.hidden // 2)
    for x in inputs.x:
        x.mul_(along).mul_(torch.linspace(0.2, 2, len(x))[:, None])
    of_rows = torch.tensor([3.0, 0.5]).repeat_interleave(config.fc1_rows // 2)
    for i, (fc1, fc2) in enumerate(zip(inputs.fc1, inputs.fc2, strict=True)):
        fc1.mul_((1 + i) / along).mul_(of_rows[:, None])
        fc2.mul_(along[:, None] / (1 + i))
    return inputs


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("form", FORMS, ids=["swiglu", "plain", "interleaved"])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_rounded_operands(
    name: str, form: dict[str, Any], experts: str
) -> None:
    config = cases.make_config(**{**SIZES, "experts": experts}, **form)
    inputs = uneven_inputs(config, [37])
    (want,) = oracle(config, inputs)
    found = run(make(name, config), inputs)
    compare(found, want, torch.bfloat16, times=FURTHER)
    (in_bf16,) = oracle(cases.make_config(**{**SIZES, "experts": "bf16"}, **form), inputs)
    far = [(found[what].double() - in_bf16[what]).norm() / in_bf16[what].norm() for what in want]
    assert min(far) > 0.02, "a forward in bfloat16 is nearer"


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_in_fp8_rounds_gradients(name: str) -> None:
    """What is computed differs from a backward in bfloat16, whose gradients it does not round."""
    inputs = uneven_inputs(CONFIG, [37])
    (in_bf16,) = oracle(CONFIG, inputs)
    found = run(make(name, dataclasses.replace(CONFIG, experts="fp8_dgrad")), inputs)
    compare({"out": found["out"]}, {"out": in_bf16["out"]}, torch.bfloat16, times=FURTHER)
    for what, least in (("grad x", 0.02), ("grad probs", 0.02), ("grad fc1", 0.02)):
        far = (found[what].double() - in_bf16[what]).norm() / in_bf16[what].norm()
        assert far > least, what


@pytest.mark.parametrize("form", FORMS, ids=["swiglu", "plain", "interleaved"])
def test_gradients_are_as_near_as_transformer_engines(form: dict[str, Any]) -> None:
    """Its blockwise recipe multiplies all of a backward in FP8, here only gradients of tokens."""
    config = cases.make_config(**{**SIZES, "hidden": 512, "experts": "fp8_dgrad"}, **form)
    inputs = uneven_inputs(config, [300])
    (exact,) = oracle(dataclasses.replace(config, experts="bf16"), inputs)
    (theirs,) = oracle(config, inputs, backward="transformer_engine")
    found = run(make("reference", config), inputs)
    for what, value in exact.items():
        got, bound = (float((one[what].double() - value).norm()) for one in (found, theirs))
        assert got <= 1.05 * bound, (what, got / bound)


def test_what_the_kernel_hands_over_moves_gradients_of_tokens() -> None:
    """One rounding to bfloat16 ahead of a quantization has that much to do with them alone."""
    config = dataclasses.replace(CONFIG, experts="fp8_dgrad")
    inputs = uneven_inputs(config, [300])
    (want,), (found,) = (oracle(config, inputs, hands_over=one) for one in (False, True))
    far = {what: float((found[what] - value).norm() / value.norm()) for what, value in want.items()}
    assert 0.005 < far.pop("grad x") < 0.02
    assert max(far.values()) < 0.003


def test_gradients_are_quantized_as_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products of a backward have the bytes that Transformer Engine's quantizer would give."""
    config = dataclasses.replace(CONFIG, experts="fp8_dgrad")
    inputs = uneven_inputs(config, [37])
    multiplied: dict[str, list[torch.Tensor]] = {"product": [], "grad_product": []}
    originals = {kind: getattr(type(PLAIN), kind) for kind in multiplied}
    differentiated: list[torch.Tensor] = []
    for kind, seen in multiplied.items():

        def listen(self: Any, rows: Any, *args: Any, kind: Any = kind, seen: Any = seen) -> Any:
            seen.append(rows)
            return originals[kind](self, rows, *args)

        monkeypatch.setattr(type(PLAIN), kind, listen)
    original = type(PLAIN).weighted_activation_backward

    def differentiate(self: Any, *args: Any) -> Any:
        results = original(self, *args)
        differentiated.append(results[0])
        return results

    monkeypatch.setattr(type(PLAIN), "weighted_activation_backward", differentiate)
    run(make("reference", config), inputs)
    (of_outputs,), (*_, of_preacts) = multiplied["grad_product"], multiplied["product"]
    by_expert = inputs.routing_map[0].t().nonzero()[:, 1]
    for got, exact in (
        (of_outputs, inputs.grad_out[0][by_expert]),
        (of_preacts, differentiated[0]),
    ):
        assert torch.equal(got.double(), fp8.read(*fp8.quantize(exact, 1), 1))
        assert not torch.equal(got, exact)


def compare_rank(
    group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs, wants: list[Found]
) -> None:
    rank = dist.get_rank(group)
    for name in NAMES:
        found = run(make(name, config, group), inputs, rank=rank)
        compare(found, wants[rank], torch.bfloat16, times=FURTHER)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
def test_routing(ranks: RankPool, routing: cases.Routing) -> None:
    config = cases.make_config(**{**SIZES, "hidden": 128}, num_ranks=2)
    inputs = cases.make_inputs(config, routing, TOKENS[2], dtype=torch.bfloat16)
    ranks.run(compare_rank, config, inputs, oracle(config, inputs), num_ranks=2)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_and_how_weights_are_held_change_no_bit(name: str) -> None:
    inputs = uneven_inputs(CONFIG, [37])
    first = run(make(name, CONFIG), inputs)
    for keep in ("all", "preactivations", "inputs"):
        for form in ({}, {"as_indices": True}, {"is_stacked": False}):
            again = run(make(name, CONFIG, keep=keep), inputs, **form)
            for what, value in first.items():
                assert torch.equal(again[what], value), (keep, form, what)


def test_the_first_projection_apart_has_the_same_bits() -> None:
    inputs = uneven_inputs(CONFIG, [37])
    stacks = [torch.stack(kind).requires_grad_() for kind in (inputs.fc1, inputs.fc2)]
    joined = ExpertWeights((stacks[0],), (stacks[1],))
    gate, up = (half.detach().contiguous().requires_grad_() for half in stacks[0].chunk(2, 1))
    down = stacks[1].detach().clone().requires_grad_()
    apart = SplitWeights(gate=(gate,), up=(up,), down=(down,))
    for name in NAMES:
        outs = [
            moe_apply(make(name, CONFIG), inputs.x[0], inputs.probs[0], inputs.routing_map[0], one)
            for one in (joined, apart)
        ]
        assert torch.equal(*outs)
        for out in outs:
            out.backward(inputs.grad_out[0])
        assert torch.equal(torch.cat((gate.grad, up.grad), 1), stacks[0].grad)
        assert torch.equal(down.grad, stacks[1].grad)
        for leaf in (gate, up, down, *stacks):
            leaf.grad = None


def test_a_forward_that_needs_no_counts_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank on a GPU issues all before it knows how many rows there are."""
    inputs = uneven_inputs(CONFIG, [37])
    for keep in ("all", "preactivations"):
        want = run(make("scheduled", CONFIG, degrees=(1, 1), keep=keep), inputs)
        backend = make("scheduled", CONFIG, degrees=(1, 1), keep=keep)
        monkeypatch.setattr(type(PLAIN), "is_grouped", lambda self, rows: True)
        product = type(PLAIN).product

        def by_ends(
            self: Any, rows: Any, of_experts: Any, ends: Any, counts: Any, product: Any = product
        ) -> torch.Tensor:
            """A grouped product, which finds its numbers of rows on the device."""
            sizes = ends.long().diff(prepend=ends.new_zeros(1)).tolist()
            return product(self, rows[: sum(sizes)], of_experts, ends, sizes)

        monkeypatch.setattr(type(PLAIN), "product", by_ends)
        found = run(backend, inputs)
        monkeypatch.undo()
        assert all(torch.equal(found[what], value) for what, value in want.items())


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_kept_as_they_travel(name: str) -> None:
    """A forward keeps bytes of its experts' rows, or of its tokens where rows are fetched again."""
    inputs = uneven_inputs(CONFIG, [37])
    weights = ExpertWeights(tuple(inputs.fc1), tuple(inputs.fc2))
    routing = inputs.probs[0], inputs.routing_map[0]
    num_routes = int(routing[1].sum())
    for keep, num_kept in (("all", num_routes), ("preactivations", 37)):
        backend = make(name, CONFIG, keep=keep)
        _, saved = backend.forward(inputs.x[0], *routing, weights, training=True)
        kept = saved.rows if keep == "all" else saved.x
        assert kept.nbytes == num_kept * (256 + 16)
        assert (saved.rows is None) == (keep == "preactivations")


def test_activations_are_rounded_to_bfloat16_and_then_to_fp8() -> None:
    """Transformer Engine quantizes what its weighted SwiGLU has written, bit by bit."""
    config = cases.make_config(**SIZES, activation=Activation.RELU)
    g = cases.generator(5)
    pre = torch.randn(300, 2 * config.intermediate, generator=g).bfloat16()
    probs = torch.rand(300, generator=g)
    got = precision_of(config).between(PLAIN.weighted_activation(config, pre, probs))
    gate, up = pre.float().chunk(2, 1)
    exact = gate.clamp(min=0) * up * probs[:, None]
    want = fp8.read(*fp8.quantize(exact.bfloat16(), 1), 1)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.double(), want)


def sent_bytes(group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs) -> list[int]:
    """What a rank sends in a forward, by both names."""
    rank, found = dist.get_rank(group), []
    for name in NAMES:
        backend = make(name, config, group)
        first = rank * config.num_local_experts
        mine = slice(first, first + config.num_local_experts)
        weights = ExpertWeights(tuple(inputs.fc1[mine]), tuple(inputs.fc2[mine]))
        routing = inputs.probs[rank], inputs.routing_map[rank]
        with torch.no_grad():
            moe_apply(backend, inputs.x[rank], *routing, weights)
        found.append(backend.traffic.bytes_sent)
    return found


def test_tokens_travel_as_bytes_with_their_scales(ranks: RankPool) -> None:
    bytes_of = {}
    for experts in ("bf16", "fp8"):
        config = cases.make_config(**{**SIZES, "hidden": 1024, "experts": experts}, num_ranks=2)
        inputs = cases.make_inputs(config, cases.uniform, [37, 20], dtype=torch.bfloat16)
        bytes_of[experts] = ranks.run(sent_bytes, config, inputs, num_ranks=2)
    half = config.num_local_experts
    out = [
        int(inputs.routing_map[0][:, half:].sum()),
        int(inputs.routing_map[1][:, :half].sum()),
    ]
    for rank, sent in enumerate(out):
        back = out[1 - rank] * 2 * config.hidden
        weights = sent * 4
        for by_name, row in (("bf16", 2 * 1024), ("fp8", 1024 + 8 * 4)):
            assert bytes_of[by_name][rank] == [sent * row + weights + back] * len(NAMES)


Change = Callable[[torch.Tensor], torch.Tensor | None]


def heard(backend: Backend, change: Change) -> list[torch.Tensor]:
    """Adds hooks around the dispatch, which change tokens; returns what they will have seen."""
    seen: list[torch.Tensor] = []

    def hook(rows: torch.Tensor, call: Call) -> torch.Tensor | None:
        seen.append(rows)
        return change(rows) if call.direction == "forward" else None

    for when in ("before", "after"):
        backend.hooks.add(when, "dispatch", hook)
    return seen


def hear(group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs) -> None:
    """Hooks see tokens as numbers, and what they put in their place is quantized like them."""
    rank = dist.get_rank(group)
    changes: list[Change] = [lambda rows: None, lambda rows: -rows]
    for keep in ("all", "preactivations"):
        want = run(make("scheduled", config, group, keep=keep), inputs, rank=rank)
        for change in changes:
            backend = make("scheduled", config, group, keep=keep)
            seen = heard(backend, change)
            found = run(backend, inputs, rank=rank)
            assert len(seen) > 4
            for rows in seen:
                assert rows.dtype == torch.bfloat16
                assert rows.shape[1] == config.hidden
            for what, value in want.items():
                assert torch.equal(found[what], value), what  # turned around twice


def test_hooks_see_numbers(ranks: RankPool) -> None:
    config = cases.make_config(**SIZES, num_ranks=2)
    ranks.run(hear, config, uneven_inputs(config, [37, 20]), num_ranks=2)


def shared_rank(
    group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs, wants: Found
) -> None:
    """Two ranks that share every expert have halves of its intermediate dimension."""
    rank = dist.get_rank(group)
    backend = ScheduledBackend(config, tensor_group=group)
    half = slice(rank * config.intermediate, (rank + 1) * config.intermediate)
    fc1 = [torch.cat([part[half] for part in one.chunk(2)]) for one in inputs.fc1]
    fc2 = [one[:, half].contiguous() for one in inputs.fc2]
    weights = ExpertWeights(tuple(fc1), tuple(fc2))
    with torch.no_grad():
        out = moe_apply(backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights)
    error = (out.double() - wants["out"]).norm() / wants["out"].norm()
    assert error < 0.01, error


def test_ranks_that_share_experts_quantize_their_slices(ranks: RankPool) -> None:
    """A slice has whole blocks, so that its scales are those of the whole matrix."""
    whole = cases.make_config(**{**SIZES, "intermediate": 256})
    inputs = uneven_inputs(whole, [37])
    (want,) = oracle(whole, inputs)
    ranks.run(shared_rank, CONFIG, inputs, want, num_ranks=2)


def over_hosts(
    group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs, wants: list[Found]
) -> list[str]:
    """Two hosts of two ranks each, by both names; returns what computes."""
    rank, kinds = dist.get_rank(group), []
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv(HOST_VARIABLE, f"host{rank // 2}")
        for name in NAMES:
            backend = select_backend(config, group, "cpu", kind=name, keep="all")  # type: ignore[arg-type]
            compare(run(backend, inputs, rank=rank), wants[rank], torch.bfloat16, times=FURTHER)
            kinds.append(type(backend).__name__)
    return kinds


def test_several_hosts_compute_the_same(ranks: RankPool) -> None:
    """The reference quantizes within each host, what is scheduled sends bytes between them."""
    config = cases.make_config(**{**SIZES, "hidden": 128}, num_ranks=4)
    inputs = cases.make_inputs(config, cases.uniform, TOKENS[4], dtype=torch.bfloat16)
    for kinds in ranks.run(over_hosts, config, inputs, oracle(config, inputs), num_ranks=4):
        assert kinds == ["HostsBackend", "ScheduledBackend"]


def layer_of(config: MoEConfig, seed: int) -> FlashMoELayer:
    torch.manual_seed(seed)
    return FlashMoELayer(config, device="cpu", dtype=torch.bfloat16, router=True)


def step(layer: FlashMoELayer, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(x).square().sum().backward()
    optimizer.step()


def load(layer: FlashMoELayer, x: torch.Tensor) -> None:
    layer.load_state_dict(layer_of(layer.config, 8).state_dict())


def write_data(layer: FlashMoELayer, x: torch.Tensor) -> None:
    """Raises no counter of versions."""
    versions = [parameter._version for parameter in layer.parameters()]
    for parameter in layer.parameters():
        parameter.data.mul_(-1.5)
    assert [parameter._version for parameter in layer.parameters()] == versions


def give_memory(layer: FlashMoELayer, x: torch.Tensor) -> None:
    """As Megatron gives parameters places in its buffers."""
    for parameter in layer.parameters():
        parameter.data = parameter.data.flip(-1).contiguous()


def compare_steps(
    layer: FlashMoELayer, other: FlashMoELayer, x: torch.Tensor, before: torch.Tensor
) -> None:
    """Compares the bits of a step of two layers, whose outputs are no longer those of before."""
    results = []
    for one in (layer, other):
        one.zero_grad()
        inputs = x.clone().requires_grad_()
        out = one(inputs)
        out.backward(torch.ones_like(out))
        results.append((out, inputs.grad, one.fc1.grad, one.fc2.grad))
    assert not torch.equal(results[0][0], before)
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


STEPS, MICRO_BATCHES = 3, 4


def train_both(
    layers: list[FlashMoELayer], x: torch.Tensor, counts: list[int] | None = None
) -> None:
    """Trains equal layers, the first with copies of each step, and compares their bits.

    An optimizer's step ends with a write through ``.data``. ``counts`` gets a number more for each
    layer and step.
    """
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.5) for one in layers]
    for _ in range(STEPS):
        outs: list[list[torch.Tensor]] = []
        for number, (one, optimizer) in enumerate(zip(layers, optimizers, strict=True)):
            optimizer.zero_grad()
            outs.append([])
            with unchanged_weights(one) if number == 0 else contextlib.nullcontext():
                for micro_batch in range(MICRO_BATCHES):
                    outs[-1].append(one(x.roll(micro_batch, 0)))
                    outs[-1][-1].square().mean().backward()
            optimizer.step()
            one.fc2.data.neg_()
            if counts is not None:
                counts.append(0)
        for got, want in zip(*outs, strict=True):
            assert torch.equal(got, want)
        for got, want in zip(*(one.parameters() for one in layers), strict=True):
            assert torch.equal(got, want)
            assert want.isfinite().all()
            assert torch.equal(got.grad, want.grad)


@pytest.mark.parametrize("change", [step, load, write_data, give_memory], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_no_quantized_weight_is_older_than_its_parameter(
    name: str, change: Callable[[FlashMoELayer, torch.Tensor], None]
) -> None:
    torch.manual_seed(7)
    layer = FlashMoELayer(CONFIG, device="cpu", dtype=torch.bfloat16, router=True, backend=name)
    x = torch.randn(16, CONFIG.hidden).bfloat16()
    before = layer(x)
    change(layer, x)
    other = FlashMoELayer(CONFIG, device="cpu", dtype=torch.bfloat16, router=True, backend=name)
    other.load_state_dict({key: value.clone() for key, value in layer.state_dict().items()})
    compare_steps(layer, other, x, before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": "int8"}, "experts='int8': wanted one of bf16, fp8, fp8_dgrad"),
        ({"experts": None}, "experts=None: wanted one of bf16, fp8, fp8_dgrad"),
        ({"hidden": 192}, "hidden=192: wanted a multiple of 128, .* or experts='bf16'"),
        ({"intermediate": 64}, "intermediate=64: wanted a multiple of 128"),
        ({"clamp_value": 7.0}, "clamp_value=7.0: wanted none, or experts='bf16'"),
        ({"linear_offset": 1.0}, "linear_offset=1.0: wanted none, or experts='bf16'"),
    ],
)
def test_shapes_that_have_no_fp8_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cases.make_config(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("dtype", "form", "words"),
    [
        (torch.float16, {}, "weights in torch.float16: wanted bfloat16, or experts='bf16'"),
        (torch.float32, {}, "weights in torch.float32: wanted bfloat16"),
        (torch.bfloat16, {"transposed": True}, "transposed weights: wanted "),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_have_no_fp8_are_refused(
    name: str, dtype: torch.dtype, form: dict[str, bool], words: str
) -> None:
    inputs = cases.make_inputs(CONFIG, cases.uniform, [5], dtype=dtype)
    with pytest.raises(ConfigError, match=f"experts='fp8' with {words}"):
        run(make(name, CONFIG), inputs, **form)


def test_biases_are_refused() -> None:
    layer = FlashMoELayer(CONFIG, device="cpu", dtype=torch.bfloat16, bias=True, router=True)
    with pytest.raises(ConfigError, match=r"experts='fp8' with biases: wanted none, or"):
        layer(torch.zeros(3, CONFIG.hidden, dtype=torch.bfloat16))


def refuse_half(group: dist.ProcessGroup, config: MoEConfig) -> None:
    """One rank's weights are float16; every rank gets the error in that call."""
    rank = dist.get_rank(group)
    dtype = torch.float16 if rank else torch.bfloat16
    inputs = cases.make_inputs(config, cases.uniform, [5, 6], dtype=dtype)
    for name in NAMES:
        backend = make(name, config, group)
        error = refusal(group, lambda _, backend=backend: run(backend, inputs, rank=rank))
        assert "weights in torch.float16" in error, error


def test_every_rank_learns_of_the_refusal(ranks: RankPool) -> None:
    ranks.run(refuse_half, cases.make_config(**SIZES, num_ranks=2), num_ranks=2)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (
            "reference",
            {"spare_slots": 2},
            "experts='fp8': .* wanted spare_slots=0",
        ),
        (
            "scheduled",
            {"exchange": "copies"},
            "with experts='fp8'.* wanted another",
        ),
    ],
)
def test_options_that_have_no_fp8_are_refused(
    kind: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        select_backend(CONFIG, None, "cpu", kind=kind, **options)


def test_layers_of_frameworks_get_what_their_option_says() -> None:
    shape = cases.make_config(**{**SIZES, "experts": "bf16"})
    for experts in ("bf16", "fp8"):
        backends = GroupBackends(None, torch.device("cpu"), FrameworkOptions(experts=experts), 64)
        backend = backends.backend_of(shape, torch.bfloat16)
        assert backend.config == dataclasses.replace(shape, experts=experts, max_tokens=64)
        assert FrameworkOptions(experts=experts).agreed["experts"] == experts


def test_metrics_count_the_bytes_that_travel() -> None:
    """Tokens come to experts in fewer bytes; results and gradients as in bfloat16."""
    rows = 2 * CONFIG.hidden
    for config, token in ((dataclasses.replace(CONFIG, experts="bf16"), rows), (CONFIG, 272)):
        place = LayerPlace(config, 0)
        assert place.pulled_bytes("forward") == token
        assert place.pulled_bytes("backward") == place.row_bytes == rows
        forward, backward = (place.padded_bytes(64, way) for way in ("forward", "backward"))
        assert forward * 2 * rows == backward * (token + rows)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU for what only asks for its name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", ["kernel", "auto"])
def test_the_kernel_refuses_blocks_of_gate_and_up_rows_by_name(kind: str) -> None:
    """Before anything touches the GPU, which here is none."""
    words = (
        "experts='fp8' with glu_interleave=32 on the backend 'kernel', .*: wanted 0 or a multiple "
        "of 128, the backend 'scheduled' or 'reference', or experts='bf16'"
    )
    config = dataclasses.replace(CONFIG, glu_interleave=32)
    with pytest.raises(ConfigError, match=words):
        select_backend(config, None, "cuda", kind=kind)  # type: ignore[arg-type]
    for served in (CONFIG, dataclasses.replace(CONFIG, glu_interleave=128), cases.CONFIG):
        check_kernel_experts(served)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_is_chosen_for_fp8_on_its_own_gpus() -> None:
    assert resolve_kind("auto", torch.device("cuda", 0), torch.bfloat16) == "kernel"
