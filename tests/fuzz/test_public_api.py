"""Whatever tensors and settings a caller gives, there is a result or one of the package's errors.

Types are as annotated; all else is drawn: shapes, dtypes, strides, devices, layouts, values. A call
that succeeds has to give what its docstring says, and its backward has to succeed as well.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
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
    RouterConfig,
    SplitWeights,
    expert_parameters,
    moe_apply,
    moe_forward,
    moe_router_forward,
    prepare_for_ddp,
    select_backend,
)
from tests.fuzz import tensors
from tests.unit import cases

EXAMPLES = int(os.environ.get("FLASHMOE_FUZZ_EXAMPLES", "60"))
"""Each test has so many; thousands find what tens do not."""

slow = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TOKENS = 6
CONFIG = cases.make_config(num_experts=4, max_tokens=32)
BACKEND = ReferenceBackend(CONFIG)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def good_call(dtype: torch.dtype, routing: cases.Routing) -> dict[str, Any]:
    inputs = cases.make_inputs(CONFIG, routing, [TOKENS], dtype=dtype)
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


ROUTINGS = st.sampled_from([cases.uniform, cases.to_one_expert, cases.to_nobody])


@slow
@given(data=st.data(), dtype=DTYPES, routing=ROUTINGS, transposed=st.booleans())
def test_moe_apply(
    data: st.DataObject, dtype: torch.dtype, routing: cases.Routing, transposed: bool
):
    call = good_call(dtype, routing)
    for name in ("x", "probs", "routing_map"):
        call[name] = tensors.apply(call[name], data.draw(tensors.changes()))
    fc1, fc2 = (spoil_experts(data, call.pop(name)) for name in ("fc1", "fc2"))
    biases = tuple(torch.ones(CONFIG.fc1_rows, dtype=dtype) for _ in range(4))
    bias = data.draw(st.sampled_from([(), biases, biases[:1]]))
    weights = ExpertWeights(fc1, fc2, transposed=transposed, fc1_bias=bias)
    try:
        out = moe_apply(BACKEND, weights=weights, **call)
    except FlashMoEError:
        return
    check_result(out, call["x"])


@slow
@given(data=st.data(), dtype=DTYPES, stacked=st.booleans())
def test_split_weights(data: st.DataObject, dtype: torch.dtype, stacked: bool):
    call = good_call(dtype, cases.uniform)
    fc1, fc2 = call.pop("fc1"), call.pop("fc2")
    gate, up = zip(*(weight.chunk(2) for weight in fc1), strict=True)
    parts = [gate, up, fc2]
    if stacked:
        parts = [(torch.stack(part),) for part in parts]
    parts = [spoil_experts(data, part) for part in parts]
    with_grad = data.draw(st.booleans())
    if with_grad:
        parts = [tuple(tensors.apply(weight, ["with a gradient"]) for weight in p) for p in parts]
    try:
        out = moe_apply(BACKEND, weights=SplitWeights(*parts), **call)
    except FlashMoEError:
        return
    check_result(out, call["x"])


@slow
@given(data=st.data(), dtype=DTYPES, ids=st.lists(st.integers(-3, 5), min_size=12, max_size=12))
def test_moe_forward(data: st.DataObject, dtype: torch.dtype, ids: list[int]):
    call = good_call(dtype, cases.uniform)
    idx = tensors.apply(torch.tensor(ids).view(TOKENS, 2), data.draw(tensors.changes()))
    weight = tensors.apply(torch.rand(TOKENS, 2), data.draw(tensors.changes()))
    x = tensors.apply(call["x"], data.draw(tensors.changes(1)))
    weights = ExpertWeights(call["fc1"], call["fc2"])
    try:
        out = moe_forward(x, idx, weight, weights, backend=BACKEND)
    except FlashMoEError:
        return
    check_result(out, x)


@slow
@given(
    data=st.data(),
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
def test_moe_router_forward(data: st.DataObject, dtype: torch.dtype, options: dict[str, Any]):
    call = good_call(dtype, cases.uniform)
    x = tensors.apply(call["x"], data.draw(tensors.changes(1)))
    weight = torch.rand(CONFIG.num_experts, CONFIG.hidden).to(dtype)
    weight = tensors.apply(weight, data.draw(tensors.changes(1)))
    weights = ExpertWeights(call["fc1"], call["fc2"])
    try:
        router = RouterConfig(**options)
        found = moe_router_forward(x, weight, weights, backend=BACKEND, router=router)
    except FlashMoEError:
        return
    assert found.probs.shape == found.logits.shape == found.routing_map.shape
    check_result(found.out, x)


@pytest.fixture(scope="module")
def layer() -> FlashMoELayer:
    return FlashMoELayer(CONFIG, router=True, dtype=torch.float32, device="cpu", backend=BACKEND)


@slow
@given(data=st.data(), shape=st.lists(st.integers(0, 3), max_size=3), own_choice=st.booleans())
def test_layer(layer: FlashMoELayer, data: st.DataObject, shape: list[int], own_choice: bool):
    x = tensors.apply(torch.randn(*shape, CONFIG.hidden), data.draw(tensors.changes()))
    tokens = x.numel() // CONFIG.hidden
    choice: dict[str, torch.Tensor] = {}
    if own_choice:
        idx = torch.tensor([[0, 3]]).repeat(tokens, 1)
        choice["topk_idx"] = tensors.apply(idx, data.draw(tensors.changes(1)))
        if data.draw(st.booleans()):
            choice["topk_weight"] = tensors.apply(
                torch.rand(tokens, 2), data.draw(tensors.changes(1))
            )
    try:
        out = layer(x, **choice)
    except FlashMoEError:
        return
    check_result(out, x)


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


@pytest.mark.parametrize("prepare", [prepare_for_ddp, lambda model: list(expert_parameters(model))])
@given(model=st.none() | st.integers() | st.text() | st.lists(st.integers()))
def test_preparing_what_is_no_model(prepare: Callable[[Any], object], model: Any):
    with pytest.raises(ConfigError, match="wanted a torch.nn.Module"):
        prepare(model)


def test_everything_public_is_fuzzed_or_carries_no_input():
    """A public name that is added has to be fuzzed here, too."""
    here = {
        *("moe_apply", "moe_forward", "FlashMoELayer", "SplitWeights", "ExpertWeights"),
        *("ReferenceBackend", "select_backend", "moe_router_forward", "RouterConfig"),
        *("prepare_for_ddp", "expert_parameters"),
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
