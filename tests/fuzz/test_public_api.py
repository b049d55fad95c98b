"""Whatever tensors and settings a caller gives, there is a result or one of the package's errors.

Types are as annotated; all else is drawn: shapes, dtypes, strides, devices, layouts, values. Half
of the draws of a layer's call are well-formed, on any backend that a CPU has: such a call succeeds
and gives the oracle's results and gradients. In the others something may be spoiled. What succeeds
then has to give what its docstring says, and its backward has to succeed as well; and some of them
have to be refused.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashmoe_megatron
from flashmoe_megatron import (
    ConfigError,
    ExpertWeights,
    FlashMoEError,
    FlashMoELayer,
    MoEConfig,
    ReferenceBackend,
    RepeatedSteps,
    RouterConfig,
    SplitWeights,
    expert_parameters,
    moe_apply,
    moe_forward,
    moe_router_forward,
    prepare_for_ddp,
    select_backend,
    unchanged_weights,
)
from flashmoe_megatron.call import Backend
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.hosts.grid import HostGrid, host_groups
from flashmoe_megatron.hosts.rail import Rail
from flashmoe_megatron.oracle import assert_close, moe_reference
from flashmoe_megatron.separate.backend import ScheduledBackend
from tests.fuzz import tensors
from tests.unit import cases

EXAMPLES = int(os.environ.get("FLASHMOE_FUZZ_EXAMPLES", "60"))
"""Each test has so many; thousands find what tens do not."""

slow = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
half = settings(slow, max_examples=max(EXAMPLES // 2, 1))
"""For tests that draw well-formed calls and then others."""
TOKENS = 6
CONFIG = cases.make_config(num_experts=4, max_tokens=32)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float64: 1e-12}
OF_GRADIENTS = {torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float64: 1e-10}
"""Wider, since a router's are differences of what its experts give, which may be small."""
SEEDS = st.integers(0, 2**16)


@pytest.fixture(scope="module")
def backends() -> Iterator[list[Backend]]:
    """Every backend of a CPU. That over hosts has one host of one rank here, but its own ways."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = host_groups(dist.group.WORLD, HostGrid(1, 1, 0), timeout=60)
        yield [
            ReferenceBackend(CONFIG),
            ScheduledBackend(CONFIG, degrees=(2, 3)),
            HostsBackend(CONFIG, Rail(groups), lambda part, _: ReferenceBackend(part)),
        ]
    finally:
        dist.destroy_process_group()


class Tally:
    """How a test's draws have ended: a test in which everything is refused shows nothing."""

    def __init__(self) -> None:
        self.well = self.refused = 0

    @contextlib.contextmanager
    def of(self, *, is_well: bool) -> Iterator[None]:
        """Counts a draw, which may be refused unless it is well-formed."""
        try:
            yield
        except FlashMoEError:
            if is_well:
                raise
            self.refused += 1
        else:
            self.well += is_well

    def check(self) -> None:
        """Wants a share of each kind, far below what is drawn."""
        assert self.well >= EXAMPLES / 8
        assert self.refused >= EXAMPLES / 12


@contextlib.contextmanager
def tallied() -> Iterator[Tally]:
    """A tally that is checked once all draws are over."""
    tally = Tally()
    yield tally
    tally.check()


def good_call(dtype: torch.dtype, routing: cases.Routing, seed: int = 0) -> dict[str, Any]:
    inputs = cases.make_inputs(CONFIG, routing, [TOKENS], dtype=dtype, seed=seed)
    return {
        "x": inputs.x[0],
        "probs": inputs.probs[0].to(torch.float32 if dtype == torch.bfloat16 else dtype),
        "routing_map": inputs.routing_map[0],
        "fc1": tuple(inputs.fc1),
        "fc2": tuple(inputs.fc2),
    }


def spoil_experts(
    data: st.DataObject, weights: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """One weight changed, one missing or one too many, or all well."""
    how = data.draw(st.sampled_from(["well", "changed", "all changed", "missing", "one too many"]))
    names = data.draw(tensors.changes())
    if how == "changed":
        return (*weights[:-1], tensors.apply(weights[-1], names))
    if how == "all changed":
        return tuple(tensors.apply(weight, names) for weight in weights)
    if how == "missing":
        return weights[: data.draw(st.integers(0, len(weights) - 1))]
    return (*weights, weights[0]) if how == "one too many" else weights


def check_result(out: torch.Tensor, x: torch.Tensor) -> None:
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    if out.requires_grad:
        out.backward(torch.ones(out.shape, dtype=out.dtype))


def check_against(want: torch.Tensor, out: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """Compares a result, and the gradients of what it is made of, with the oracle's.

    Args:
        want: The oracle's, made of the same leaves.
        out: The result.
        leaves: The tokens first, whose dtype the result has and decides how close that has to be.
    """
    dtype = leaves[0].dtype
    grad_out = torch.randn(want.shape, generator=cases.generator(7), dtype=torch.float64).to(dtype)
    assert out.dtype == dtype
    assert_close("out", out.detach().view(want.shape), want.detach(), rel_l2=TOLERANCE[dtype])
    got = torch.autograd.grad(out, leaves, grad_out.view(out.shape))
    wanted = torch.autograd.grad(want, leaves, grad_out.to(want.dtype))
    for number, (grad, other) in enumerate(zip(got, wanted, strict=True)):
        assert_close(f"gradient {number}", grad, other, rel_l2=OF_GRADIENTS[dtype])


def trained(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies that take gradients."""
    return [one.detach().clone().requires_grad_() for one in tensors]


def oracle(
    x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, *experts: Any, **biases: Any
) -> torch.Tensor:
    form = cases.form_of(CONFIG)
    return moe_reference(x, probs, routing_map, *experts, **form, **biases)


def choose(scores: torch.Tensor) -> torch.Tensor:
    """Each token's experts of the largest scores, by ids."""
    return scores.topk(CONFIG.topk, dim=1).indices


ROUTINGS = st.sampled_from([cases.uniform, cases.to_one_expert, cases.to_nobody])


def check_well_applied(
    backend: Backend, call: dict[str, Any], *, transposed: bool, biased: bool
) -> None:
    experts = [*call["fc1"], *call["fc2"]]
    if transposed:
        experts = [one.t().contiguous() for one in experts]
    x, probs, *experts = trained(call["x"], call["probs"], *experts)
    fc1, fc2 = experts[:4], experts[4:]
    widths = [CONFIG.fc1_rows] * 4 + [CONFIG.hidden] * 4
    biases = trained(*(torch.linspace(-1, 1, width).to(x.dtype) for width in widths * biased))
    kinds = {"fc1_bias": tuple(biases[:4]), "fc2_bias": tuple(biases[4:])}
    weights = ExpertWeights(tuple(fc1), tuple(fc2), transposed=transposed, **kinds)
    out = moe_apply(backend, x, probs, call["routing_map"], weights)
    plain = [[one.t() if transposed else one for one in kind] for kind in (fc1, fc2)]
    want = oracle(x, probs, call["routing_map"], *plain, **kinds)
    check_against(want, out, [x, probs, *experts, *biases])


def test_moe_apply(backends: list[Backend]):
    @half
    @given(
        data=st.data(),
        seed=SEEDS,
        dtype=DTYPES,
        routing=ROUTINGS,
        transposed=st.booleans(),
    )
    def draw(data, is_well, seed, dtype, routing, transposed):
        call, backend = good_call(dtype, routing, seed), data.draw(st.sampled_from(backends))
        with tally.of(is_well=is_well):
            if is_well:
                biased = data.draw(st.booleans())
                check_well_applied(backend, call, transposed=transposed, biased=biased)
                return
            for name in ("x", "probs", "routing_map"):
                call[name] = tensors.apply(call[name], data.draw(tensors.changes()))
            fc1, fc2 = (spoil_experts(data, call.pop(name)) for name in ("fc1", "fc2"))
            biases = tuple(torch.ones(CONFIG.fc1_rows, dtype=dtype) for _ in range(4))
            bias = data.draw(st.sampled_from([(), biases, biases[:1]]))
            weights = ExpertWeights(fc1, fc2, transposed=transposed, fc1_bias=bias)
            check_result(moe_apply(backend, weights=weights, **call), call["x"])

    with tallied() as tally:
        draw(is_well=True)
        draw(is_well=False)


def check_well_split(backend: Backend, call: dict[str, Any], *, stacked: bool) -> None:
    fc1, fc2 = call["fc1"], call["fc2"]
    gates, ups = zip(*(weight.chunk(2) for weight in fc1), strict=True)
    parts: list[list[torch.Tensor]] = [list(part) for part in (gates, ups, fc2)]
    if stacked:
        parts = [[torch.stack(part)] for part in parts]
    x, probs = trained(call["x"], call["probs"])
    parts = [trained(*part) for part in parts]
    out = moe_apply(
        backend, x, probs, call["routing_map"], SplitWeights(*(tuple(part) for part in parts))
    )
    each = [part[0].unbind() if stacked else part for part in parts]
    whole = [torch.cat(pair) for pair in zip(each[0], each[1], strict=True)]
    want = oracle(x, probs, call["routing_map"], whole, each[2])
    check_against(want, out, [x, probs, *parts[0], *parts[1], *parts[2]])


def test_split_weights(backends: list[Backend]):
    @half
    @given(data=st.data(), seed=SEEDS, dtype=DTYPES, stacked=st.booleans())
    def draw(data, is_well, seed, dtype, stacked):
        call, backend = good_call(dtype, cases.uniform, seed), data.draw(st.sampled_from(backends))
        with tally.of(is_well=is_well):
            if is_well:
                check_well_split(backend, call, stacked=stacked)
                return
            fc1, fc2 = call.pop("fc1"), call.pop("fc2")
            gate, up = zip(*(weight.chunk(2) for weight in fc1), strict=True)
            parts = [gate, up, fc2]
            if stacked:
                parts = [(torch.stack(part),) for part in parts]
            parts = [spoil_experts(data, part) for part in parts]
            if data.draw(st.booleans()):
                parts = [
                    tuple(tensors.apply(one, ["with a gradient"]) for one in part) for part in parts
                ]
            check_result(moe_apply(backend, weights=SplitWeights(*parts), **call), call["x"])

    with tallied() as tally:
        draw(is_well=True)
        draw(is_well=False)


def check_well_forward(
    backend: Backend, call: dict[str, Any], idx: torch.Tensor, weight: torch.Tensor
) -> None:
    x, weight, *experts = trained(call["x"], weight, *call["fc1"], *call["fc2"])
    fc1, fc2 = experts[:4], experts[4:]
    out = moe_forward(x, idx, weight, ExpertWeights(tuple(fc1), tuple(fc2)), backend=backend)
    probs, chosen = (
        cases.spread(CONFIG, idx, one.masked_fill(idx < 0, 0))
        for one in (weight, torch.ones_like(weight))
    )
    check_against(oracle(x, probs, chosen > 0, fc1, fc2), out, [x, weight, *experts])


def test_moe_forward(backends: list[Backend]):
    @half
    @given(
        data=st.data(),
        seed=SEEDS,
        dtype=DTYPES,
        ids=st.lists(st.integers(-3, 5), min_size=12, max_size=12),
    )
    def draw(data, is_well, seed, dtype, ids):
        call, backend = good_call(dtype, cases.uniform, seed), data.draw(st.sampled_from(backends))
        g = cases.generator(seed)
        weight = torch.rand(TOKENS, 2, generator=g)
        with tally.of(is_well=is_well):
            if is_well:
                idx = choose(torch.rand(TOKENS, CONFIG.num_experts, generator=g))
                skipped = torch.tensor(ids).view(TOKENS, 2) < 0
                kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
                check_well_forward(backend, call, idx.masked_fill(skipped, -1).to(kind), weight)
                return
            idx = torch.tensor(ids).view(TOKENS, 2)
            if data.draw(st.booleans()):
                idx = torch.tensor([[0, 3]]).repeat(TOKENS, 1)
            idx = tensors.apply(idx, data.draw(tensors.changes()))
            weight = tensors.apply(weight, data.draw(tensors.changes()))
            x = tensors.apply(call["x"], data.draw(tensors.changes(1)))
            weights = ExpertWeights(call["fc1"], call["fc2"])
            check_result(moe_forward(x, idx, weight, weights, backend=backend), x)

    with tallied() as tally:
        draw(is_well=True)
        draw(is_well=False)


def check_well_routed(backend: Backend, call: dict[str, Any], seed: int, router: Any) -> None:
    g = cases.generator(seed)
    drawn = torch.rand(CONFIG.num_experts, CONFIG.hidden, generator=g).to(call["x"].dtype)
    x, weight, *experts = trained(call["x"], drawn, *call["fc1"], *call["fc2"])
    fc1, fc2 = experts[:4], experts[4:]
    found = moe_router_forward(
        x, weight, ExpertWeights(tuple(fc1), tuple(fc2)), backend=backend, router=router
    )
    logits = x.double() @ weight.double().t()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, choose(logits), True)
    if router.score == "sigmoid":
        scores = logits.sigmoid() * chosen
        probs = scores / scores.sum(1, keepdim=True)
    elif router.pre_softmax:
        probs = logits.softmax(1) * chosen
    else:
        probs = logits.exp() * chosen / (logits.exp() * chosen).sum(1, keepdim=True)
    probs = probs * router.scaling_factor
    assert torch.equal(found.routing_map, chosen)
    for name, got, want in (("probs", found.probs, probs), ("logits", found.logits, logits)):
        assert_close(name, got.detach(), want.detach(), rel_l2=1e-5)
    check_against(oracle(x, probs, chosen, fc1, fc2), found.out, [x, weight, *experts])


ROUTERS = st.builds(
    RouterConfig, score=st.just("sigmoid"), scaling_factor=st.floats(0.125, 8)
) | st.builds(RouterConfig, pre_softmax=st.booleans(), scaling_factor=st.floats(0.125, 8))


def test_moe_router_forward(backends: list[Backend]):
    @half
    @given(
        data=st.data(),
        seed=SEEDS,
        dtype=DTYPES,
        options=st.fixed_dictionaries(
            {},
            optional={
                "score": st.sampled_from(["softmax", "sigmoid", "", None]),
                "pre_softmax": st.booleans() | st.none(),
                "scaling_factor": st.floats() | st.integers() | st.text(max_size=3),
            },
        ),
    )
    def draw(data, is_well, seed, dtype, options):
        call, backend = good_call(dtype, cases.uniform, seed), data.draw(st.sampled_from(backends))
        with tally.of(is_well=is_well):
            if is_well:
                check_well_routed(backend, call, seed, data.draw(ROUTERS))
                return
            x = tensors.apply(call["x"], data.draw(tensors.changes(1)))
            weight = torch.rand(CONFIG.num_experts, CONFIG.hidden).to(dtype)
            weight = tensors.apply(weight, data.draw(tensors.changes(1)))
            weights = ExpertWeights(call["fc1"], call["fc2"])
            router = RouterConfig(**options)
            found = moe_router_forward(x, weight, weights, backend=backend, router=router)
            assert found.probs.shape == found.logits.shape == found.routing_map.shape
            check_result(found.out, x)

    with tallied() as tally:
        draw(is_well=True)
        draw(is_well=False)


@pytest.fixture(scope="module")
def layers(backends: list[Backend]) -> list[FlashMoELayer]:
    return [
        FlashMoELayer(CONFIG, router=True, dtype=torch.float32, device="cpu", backend=backend)
        for backend in backends
    ]


def check_well_called(layer: FlashMoELayer, given: torch.Tensor, *, own_choice: bool) -> None:
    router, (x,) = layer.router, trained(given)
    assert router is not None
    tokens = x.view(-1, CONFIG.hidden)
    logits = tokens.double() @ router.weight.double().t()
    idx = choose(logits)
    weight = logits.gather(1, idx).exp()
    weight = weight / weight.sum(1, keepdim=True)
    choice = (idx, weight.detach().float()) if own_choice else ()
    used = weight.detach() if own_choice else weight
    chosen = cases.spread(CONFIG, idx, torch.ones_like(used)) > 0
    want = oracle(tokens, cases.spread(CONFIG, idx, used), chosen, layer.fc1, layer.fc2)
    leaves = [x, layer.fc1, layer.fc2]
    if not own_choice and len(tokens) >= 4:  # a single token may leave nothing but rounding
        leaves.append(router.weight)
    check_against(want, layer(x, *choice), leaves)


def test_layer(layers: list[FlashMoELayer]):
    @half
    @given(
        data=st.data(),
        seed=SEEDS,
        shape=st.lists(st.integers(0, 3), max_size=3),
        own_choice=st.booleans(),
    )
    def draw(data, is_well, seed, shape, own_choice):
        layer = data.draw(st.sampled_from(layers))
        x = torch.randn(*shape, CONFIG.hidden, generator=cases.generator(seed))
        with tally.of(is_well=is_well):
            if is_well:
                check_well_called(layer, x if shape else x[None], own_choice=own_choice)
                return
            x = tensors.apply(x, data.draw(tensors.changes()))
            tokens = x.numel() // CONFIG.hidden
            choice: dict[str, torch.Tensor] = {}
            if own_choice:
                idx = torch.tensor([[0, 3]]).repeat(tokens, 1)
                choice["topk_idx"] = tensors.apply(idx, data.draw(tensors.changes(1)))
                if data.draw(st.booleans()):
                    choice["topk_weight"] = tensors.apply(
                        torch.rand(tokens, 2), data.draw(tensors.changes(1))
                    )
            check_result(layer(x, **choice), x)

    with tallied() as tally:
        draw(is_well=True)
        draw(is_well=False)


@slow
@given(
    kind=st.sampled_from(["auto", "kernel", "reference", "", "CUDA", "none"]),
    device=st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:7", "meta", "tpu", "", "cpu:-1", "🚀"]),
    dtype=st.sampled_from(tensors.DTYPES),
    bias=st.booleans(),
)
def test_making_a_layer(kind: Any, device: str, dtype: torch.dtype, bias: bool):
    try:
        layer = FlashMoELayer(CONFIG, device=device, dtype=dtype, backend=kind, bias=bias)
    except FlashMoEError:
        return
    assert layer.fc1[0].dtype == dtype


@slow
@given(
    kind=st.text(max_size=9) | st.none() | st.integers() | st.sampled_from(["auto", "kernel"]),
    num_ranks=st.integers(1, 8),
)
def test_choosing_a_backend(kind: Any, num_ranks: int):
    config = dataclasses.replace(CONFIG, num_ranks=num_ranks, num_experts=8 * num_ranks)
    try:
        backend = select_backend(config, None, "cpu", kind=kind)
    except FlashMoEError:
        return
    assert backend.config == config
    assert num_ranks == 1


@pytest.mark.parametrize(
    "prepare",
    [
        prepare_for_ddp,
        lambda model: list(expert_parameters(model)),
        lambda model: RepeatedSteps(model, lambda: None),
        lambda model: unchanged_weights(model).__enter__(),
    ],
)
@given(model=st.none() | st.integers() | st.text() | st.lists(st.integers()))
def test_preparing_what_is_no_model(prepare: Callable[[Any], object], model: Any):
    with pytest.raises(ConfigError, match="wanted a torch.nn.Module"):
        prepare(model)


@given(zero_grad=st.none() | st.integers() | st.text() | st.lists(st.integers()))
def test_dropping_gradients_by_what_is_no_function(zero_grad: Any):
    with pytest.raises(ConfigError, match="wanted a function"):
        RepeatedSteps(torch.nn.Linear(2, 2), zero_grad)


def test_everything_public_is_fuzzed_or_carries_no_input():
    """A public name that is added has to be fuzzed here, too."""
    here = {
        *("moe_apply", "moe_forward", "FlashMoELayer", "SplitWeights", "ExpertWeights"),
        *("ReferenceBackend", "select_backend", "moe_router_forward", "RouterConfig"),
        *("prepare_for_ddp", "expert_parameters", "RepeatedSteps", "unchanged_weights"),
    }
    settings_target = {
        *("MoEConfig", "align_capacity", "expert_capacity", "plan_capacity", "plan_buffer_rows"),
        *("dispatch_volume", "Activation"),
    }
    errors = {
        name
        for name in flashmoe_megatron.__all__
        if isinstance(getattr(flashmoe_megatron, name), type)
        and issubclass(getattr(flashmoe_megatron, name), Exception)
    }
    # Protocols, results and the oracle of the tests.
    no_input = {
        *(
            "Backend",
            "TrafficCounters",
            "WeightGrad",
            "RouterOutput",
            "moe_reference",
            "__version__",
        ),
    }
    assert set(flashmoe_megatron.__all__) == here | settings_target | errors | no_input


@given(st.integers() | st.floats() | st.text() | st.none() | st.booleans())
def test_a_layers_shape_takes_numbers_alone(value: Any):
    for name in ("hidden", "num_ranks", "num_experts", "topk", "max_tokens"):
        try:
            config: MoEConfig = dataclasses.replace(CONFIG, **{name: value})
        except ConfigError:
            continue
        assert type(getattr(config, name)) is int
