"""Every wrong input gets an error that names what was got and what was wanted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import deepspeed
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Backend
from flashmoe_megatron.checks import (
    check_kernel_tensor,
    check_kinds,
    check_split,
    check_weight_grads,
    check_weights,
)
from flashmoe_megatron.errors import (
    ConfigError,
    DeviceError,
    FlashMoEError,
    RoutingError,
    ShapeError,
)
from flashmoe_megatron.gates import GatedExperts, GShardGate, XMoEGate
from flashmoe_megatron.hooks import Hooks
from flashmoe_megatron.layer import FlashMoELayer, moe_forward, moe_router_forward
from flashmoe_megatron.multipath import Multipath
from flashmoe_megatron.oracle import moe_reference
from flashmoe_megatron.planner import plan_buffer_rows
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.repeats import RepeatedSteps
from flashmoe_megatron.router import RouterConfig
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights, SplitWeights, WeightGrad
from tests.distributed import RankPool
from tests.unit import cases
from tests.unit.simulated_gpus import Gpus, install, make_backend

NUM_TOKENS = 6
CPU = torch.device("cpu")
BACKEND = ReferenceBackend(cases.CONFIG)


def good() -> dict[str, Any]:
    inputs = cases.make_inputs(cases.CONFIG, cases.uniform, [NUM_TOKENS], dtype=torch.float32)
    return {
        "x": inputs.x[0],
        "probs": inputs.probs[0],
        "routing_map": inputs.routing_map[0],
        "weights": ExpertWeights(tuple(inputs.fc1), tuple(inputs.fc2)),
    }


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element past a 16-byte boundary."""
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    buffer[1:] = tensor.flatten()
    return buffer[1:].view(tensor.shape)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def nan_at(tensor: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    first = tuple(where.nonzero()[0].tolist())
    tensor[first] = float("nan")
    return tensor


def gates_and_ups(call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    halves = [weight.chunk(2) for weight in call["weights"].fc1]
    return (*(gate for gate, _ in halves), *(up for _, up in halves))


def with_weights(call: dict[str, Any], **changes: Any) -> ExpertWeights:
    weights = call["weights"]
    fields = {"fc1": weights.fc1, "fc2": weights.fc2, "transposed": weights.transposed}
    return ExpertWeights(**{**fields, **changes})


BAD = {
    "x has one dimension": (
        lambda c: {"x": c["x"].flatten()},
        ShapeError,
        r"x has shape \(384,\), wanted \[num_tokens, 64\]",
    ),
    "x is too wide": (
        lambda c: {"x": torch.zeros(NUM_TOKENS, 128)},
        ShapeError,
        r"x has shape \(6, 128\), wanted \[num_tokens, 64\]",
    ),
    "x is of 8 bits": (
        lambda c: {"x": c["x"].to(torch.float8_e4m3fn)},
        ShapeError,
        "x is torch.float8_e4m3fn, wanted torch.float32, the dtype of the experts' weights$",
    ),
    "x is long": (
        lambda c: {"x": c["x"].long()},
        ShapeError,
        "x is torch.int64, wanted torch.float32",
    ),
    "x is strided": (lambda c: {"x": strided(c["x"])}, ShapeError, "x .*wanted contiguous rows"),
    "x is misaligned": (
        lambda c: {"x": misaligned(c["x"])},
        ShapeError,
        "x starts 4 bytes past .* wanted 16-byte alignment",
    ),
    "too many tokens": (
        lambda c: {"x": torch.zeros(513, 64)},
        ShapeError,
        "x has 513 tokens, .* at most max_tokens=512",
    ),
    "too many tokens of everything": (
        lambda c: {
            "x": torch.zeros(513, 64),
            "probs": torch.zeros(513, 8),
            "routing_map": torch.zeros(513, 8, dtype=torch.bool),
        },
        ShapeError,
        "x has 513 tokens, .* at most max_tokens=512",
    ),
    "probs of other tokens": (
        lambda c: {"probs": c["probs"][1:]},
        ShapeError,
        r"probs has shape \(5, 8\), wanted \[6, 8\]",
    ),
    "probs of too few experts": (
        lambda c: {"probs": c["probs"][:, 1:].contiguous()},
        ShapeError,
        r"probs has shape \(6, 7\), wanted \[6, 8\]",
    ),
    "probs are double": (
        lambda c: {"probs": c["probs"].double()},
        ShapeError,
        "probs is torch.float64, wanted torch.float32",
    ),
    "probs are strided": (
        lambda c: {"probs": strided(c["probs"])},
        ShapeError,
        "probs .*wanted contiguous rows",
    ),
    "probs are elsewhere": (
        lambda c: {"probs": c["probs"].to("meta")},
        ShapeError,
        "probs is on meta, wanted cpu",
    ),
    "routing_map of other tokens": (
        lambda c: {"routing_map": c["routing_map"][1:]},
        ShapeError,
        r"routing_map has shape \(5, 8\), wanted \[6, 8\]",
    ),
    "routing_map is int": (
        lambda c: {"routing_map": c["routing_map"].int()},
        ShapeError,
        "routing_map is torch.int32, wanted torch.bool",
    ),
    "routing_map is strided": (
        lambda c: {"routing_map": strided(c["routing_map"])},
        ShapeError,
        "routing_map .*wanted contiguous rows",
    ),
    "NaN among selected probs": (
        lambda c: {"probs": nan_at(c["probs"], c["routing_map"])},
        RoutingError,
        r"rank 0: the probability of token 0 for expert \d is NaN \(1 NaN in all\)",
    ),
    "too many experts": (
        lambda c: {"routing_map": torch.ones_like(c["routing_map"])},
        RoutingError,
        r"token 0 selects 8 experts \(6 such tokens in all\), wanted at most topk=2",
    ),
    "an fc1 is missing": (
        lambda c: {"weights": with_weights(c, fc1=c["weights"].fc1[1:])},
        ShapeError,
        "7 fc1 weights, wanted one for each of the 8 local experts",
    ),
    "all fc2 are missing": (
        lambda c: {"weights": with_weights(c, fc2=())},
        ShapeError,
        "0 fc2 weights, wanted one for each of the 8 local experts",
    ),
    "an up projection is missing": (
        lambda c: {"weights": with_weights(c, fc1=gates_and_ups(c)[:-1], split=True)},
        ShapeError,
        "15 fc1 weights, wanted a gate and an up projection for each of the 8 local experts",
    ),
    "an up projection is a whole fc1": (
        lambda c: {
            "weights": with_weights(
                c, fc1=(*gates_and_ups(c)[:-1], c["weights"].fc1[7]), split=True
            )
        },
        ShapeError,
        r"up of local expert 7 has shape \(128, 64\), wanted \[64, 64\]",
    ),
    "gates and ups are transposed": (
        lambda c: {"weights": with_weights(c, fc1=gates_and_ups(c), split=True, transposed=True)},
        ConfigError,
        "gate and up projections apart, with transposed=True, .*: wanted False, True, 0",
    ),
    "an fc2 is transposed": (
        lambda c: {
            "weights": with_weights(c, fc2=(*c["weights"].fc2[:7], torch.zeros(128, 64).t()))
        },
        ShapeError,
        r"fc2 of local expert 7 has shape \(64, 128\), wanted \[64, 64\]",
    ),
    "fc1 is not transposed": (
        lambda c: {"weights": with_weights(c, transposed=True)},
        ShapeError,
        r"fc1 of local expert 0 has shape \(128, 64\), wanted \[64, 128\]",
    ),
    "weights are bf16": (
        lambda c: {"weights": with_weights(c, fc1=tuple(w.bfloat16() for w in c["weights"].fc1))},
        ShapeError,
        "fc2 of local expert 0 is torch.float32, wanted torch.bfloat16, as fc1 of local expert 0",
    ),
    "x is bf16": (
        lambda c: {"x": c["x"].bfloat16()},
        ShapeError,
        "x is torch.bfloat16, wanted torch.float32, the dtype of the experts' weights$",
    ),
    "weights are of 8 bits": (
        lambda c: {
            "weights": with_weights(c, fc1=tuple(w.to(torch.int8) for w in c["weights"].fc1))
        },
        ShapeError,
        "the experts' weights are torch.int8, wanted one of torch.bfloat16 or ",
    ),
    "weights are elsewhere": (
        lambda c: {"weights": with_weights(c, fc2=tuple(w.to("meta") for w in c["weights"].fc2))},
        ShapeError,
        r"fc2\[0\] is on meta and has no values, wanted a processor or a GPU",
    ),
    "weights are strided": (
        lambda c: {"weights": with_weights(c, fc2=tuple(strided(w) for w in c["weights"].fc2))},
        ShapeError,
        "fc2 of local expert 0 has strides .* wanted rows of consecutive elements",
    ),
    "a stack of stacks": (
        lambda c: {"weights": with_weights(c, fc1=(torch.stack(c["weights"].fc1)[None],))},
        ShapeError,
        r"fc1\[0\] has shape \(1, 8, 128, 64\), wanted \[128, 64\] or a stack "
        r"\[num_experts, 128, 64\]",
    ),
    "a stack of one too few": (
        lambda c: {"weights": with_weights(c, fc1=(torch.stack(c["weights"].fc1[1:]),))},
        ShapeError,
        "7 fc1 weights, wanted one for each of the 8 local experts",
    ),
    "a stack beside experts": (
        lambda c: {
            "weights": with_weights(c, fc1=(torch.stack(c["weights"].fc1), c["weights"].fc1[0]))
        },
        ShapeError,
        "9 fc1 weights, wanted one for each of the 8 local experts",
    ),
    "a stack of other matrices": (
        lambda c: {"weights": with_weights(c, fc2=(torch.zeros(8, 64, 32),))},
        ShapeError,
        r"fc2 of local expert 0 has shape \(64, 32\), wanted \[64, 64\]",
    ),
    "a stack is strided": (
        lambda c: {"weights": with_weights(c, fc2=(strided(torch.stack(c["weights"].fc2)),))},
        ShapeError,
        "fc2 of local expert 0 has strides .* wanted rows of consecutive elements",
    ),
    "a stack is bf16": (
        lambda c: {"weights": with_weights(c, fc2=(torch.stack(c["weights"].fc2).bfloat16(),))},
        ShapeError,
        "fc2 of local expert 0 is torch.bfloat16, wanted torch.float32, as fc1 of local expert 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_moe_apply(name: str):
    change, error, message = BAD[name]
    call = good()
    call.update(change(call))
    with pytest.raises(error, match=message):
        moe_apply(BACKEND, **call)


def test_a_dtype_of_autocast_is_named():
    call = good()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call["x"] = call["x"] @ torch.eye(64)
        with pytest.raises(
            ShapeError, match="x is torch.bfloat16, wanted torch.float32.*; torch.autocast"
        ):
            moe_apply(BACKEND, **call)


def test_nan_that_nobody_selected_is_harmless():
    call = good()
    call["probs"] = nan_at(call["probs"], ~call["routing_map"])
    assert moe_apply(BACKEND, **call).isfinite().all()


def choice(idx: Any = None, weight: Any = None) -> dict[str, torch.Tensor]:
    return {
        "topk_idx": torch.tensor([[0, 1]] * NUM_TOKENS) if idx is None else idx,
        "topk_weight": torch.full((NUM_TOKENS, 2), 0.5) if weight is None else weight,
    }


BAD_CHOICES = {
    "id too large": (
        choice(idx=torch.tensor([[-1, 1]] * 5 + [[0, 8]])),
        RoutingError,
        r"topk_idx\[5, 1\] is 8, wanted an expert id of 0 to 7, or -1",
    ),
    "id too small": (
        choice(idx=torch.tensor([[0, 1]] * 5 + [[-2, 1]])),
        RoutingError,
        r"topk_idx\[5, 0\] is -2",
    ),
    "id twice": (
        choice(idx=torch.tensor([[-1, -1]] * 5 + [[0, 0]])),
        RoutingError,
        r"topk_idx\[5\] names expert 0 2 times, wanted distinct experts",
    ),
    "NaN": (
        choice(
            idx=torch.tensor([[-1, 0]] * NUM_TOKENS),
            weight=torch.tensor([[float("nan"), 0.5]] * 5 + [[0.5, float("nan")]]),
        ),
        RoutingError,
        r"topk_weight\[5, 1\] is NaN",
    ),
    "too many choices": (
        choice(idx=torch.zeros(NUM_TOKENS, 3, dtype=torch.int64)),
        ShapeError,
        r"topk_idx has shape \(6, 3\), wanted \[6, topk\] with topk <= 2",
    ),
    "ids of other tokens": (
        choice(idx=torch.zeros(5, 2, dtype=torch.int64)),
        ShapeError,
        r"topk_idx has shape \(5, 2\)",
    ),
    "ids have one dimension": (
        choice(idx=torch.zeros(NUM_TOKENS, dtype=torch.int64)),
        ShapeError,
        r"topk_idx has shape \(6,\), wanted \[6, topk\]",
    ),
    "ids are floats": (
        choice(idx=torch.zeros(NUM_TOKENS, 2)),
        ShapeError,
        "topk_idx is torch.float32, wanted torch.int32 or torch.int64",
    ),
    "weights of fewer choices": (
        choice(weight=torch.zeros(NUM_TOKENS, 1)),
        ShapeError,
        r"topk_weight has shape \(6, 1\), wanted \(6, 2\), as topk_idx",
    ),
    "weights are double": (
        choice(weight=torch.zeros(NUM_TOKENS, 2, dtype=torch.float64)),
        ShapeError,
        "topk_weight is torch.float64",
    ),
    "ids are elsewhere": (
        choice(idx=torch.zeros(NUM_TOKENS, 2, dtype=torch.int64, device="meta")),
        ShapeError,
        "topk_idx is on meta and has no values, wanted a processor",
    ),
}


@pytest.mark.parametrize("name", BAD_CHOICES)
def test_moe_forward(name: str):
    choices, error, message = BAD_CHOICES[name]
    call = good()
    with pytest.raises(error, match=message):
        moe_forward(call["x"], **choices, weights=call["weights"], backend=BACKEND)


def test_good_input_is_accepted():
    """The cases above differ from this in one thing each."""
    call = good()
    assert moe_apply(BACKEND, **call).shape == (NUM_TOKENS, 64)
    out = moe_forward(call["x"], **choice(), weights=call["weights"], backend=BACKEND)
    assert out.shape == (NUM_TOKENS, 64)


def layer(**changes: Any) -> FlashMoELayer:
    return FlashMoELayer(changes.pop("config", cases.CONFIG), device="cpu", **changes)


NO_TENSOR = "is a %s, wanted a torch.Tensor"
IS_DICT = "config is of class dict: wanted a MoEConfig"
NOT_A_BACKEND = "backend is of class %s: wanted .*what select_backend gives"
DTYPES = "wanted one of torch.bfloat16 or torch.float16 or torch.float32 or torch.float64"
WRONG_KINDS: dict[str, tuple[Callable[[], object], str]] = {
    "a layer's shape as a dictionary": (lambda: layer(config={"hidden": 64}), IS_DICT),
    "a backend's": (lambda: select_backend(cast(Any, {}), None, "cpu"), IS_DICT),
    "buffers'": (lambda: plan_buffer_rows(cast(Any, {})), IS_DICT),
    "a backend as a number": (lambda: layer(backend=3), NOT_A_BACKEND % "int"),
    "a backend's name in a call": (
        lambda: moe_forward(**choice(), **inputs_of_a_call(), backend=cast(Any, "auto")),
        NOT_A_BACKEND % "str",
    ),
    "a gate's name as a switch": (
        lambda: layer(router="gshard"),
        "router='gshard': wanted True or False",
    ),
    "a switch as a number": (lambda: layer(bias=1), "bias=1: wanted True or False"),
    "a dtype's name": (lambda: layer(dtype="bf16"), f"dtype 'bf16': {DTYPES}"),
    "a dtype in an array": (lambda: layer(dtype=np.zeros(2)), rf"dtype array\(.*: {DTYPES}"),
    "a precision in an array": (
        lambda: cases.make_config(experts=np.zeros(2)),
        r"experts=array\(.*: wanted one of bf16, fp8, fp8_dgrad",
    ),
    "a rule in an array": (
        lambda: RouterConfig(score=cast(Any, np.zeros(2))),
        r"score=array\(.*: wanted one of softmax, sigmoid",
    ),
    "a backend's name in an array": (
        lambda: select_backend(cases.CONFIG, None, "cpu", kind=cast(Any, np.zeros(2))),
        r"backend array\(.*: wanted one of auto, kernel, scheduled, reference",
    ),
    "a bound in an array": (
        lambda: select_backend(cases.CONFIG, None, "cpu", row_bound=np.zeros(2)),
        r"row_bound=array\(.*: wanted a number of at least 1",
    ),
    "parts in an array": (
        lambda: select_backend(cases.CONFIG, None, "cpu", degree=np.zeros(2)),
        r"degree=array\(.*: wanted auto, N or N,M",
    ),
    "an activation in an array": (
        lambda: XMoEGate(64, 8, activation=cast(Any, np.zeros(2))),
        r"activation=array\(.*: wanted one of softmax, sigmoid",
    ),
    "a dtype of a backend": (
        lambda: select_backend(cases.CONFIG, None, "cpu", dtype=torch.int8),
        f"dtype torch.int8: {DTYPES}",
    ),
    "the precision of experts beside their shape": (
        lambda: layer(experts="fp8"),
        "option 'experts' is a field of MoEConfig: wanted it there",
    ),
    "a device": (
        lambda: select_backend(cases.CONFIG, None, cast(Any, None)),
        "device=None: wanted a torch.device, or its name, as 'cuda:0'",
    ),
    "a router's rule as a word": (
        lambda: moe_router_forward(
            **inputs_of_a_call(),
            router_weight=torch.zeros(8, 64),
            backend=BACKEND,
            router=cast(Any, "softmax"),
        ),
        "router is of class str: wanted a RouterConfig",
    ),
    "a gate": (
        lambda: GatedExperts(cast(Any, "gshard"), layer()),
        "gate is of class str: wanted a Gate of flashmoe_megatron.gates",
    ),
    "a gate's switch": (
        lambda: GShardGate(64, 8, random_second=cast(Any, "no")),
        "random_second='no': wanted True or False",
    ),
    "a gate's draws": (
        lambda: GShardGate(64, 8, generator=cast(Any, 3)),
        "generator is of class int: wanted a torch.Generator, or None",
    ),
    "tokens of a gate": (
        lambda: GatedExperts(GShardGate(64, 8), layer())(cast(Any, None)),
        f"x {NO_TENSOR % 'NoneType'}",
    ),
    "a hook": (
        lambda: Hooks().add("after", "gate", cast(Any, "print")),
        "hook='print' after gate: wanted a function",
    ),
    "a stage in an array": (
        lambda: Hooks().add("after", cast(Any, np.zeros(2)), print),
        r"stage=array\(.* of a hook: wanted one of gate, capacity",
    ),
    "a device of links": (
        lambda: Multipath(device=cast(Any, "cpu")),
        "device is of class str: wanted a torch.device, or None",
    ),
    "a gate's layer": (
        lambda: GatedExperts(GShardGate(64, 8), cast(Any, torch.nn.Linear(64, 8))),
        "layer is of class Linear: wanted a FlashMoELayer",
    ),
    "a reference's shape": (lambda: ReferenceBackend(cast(Any, {})), IS_DICT),
    "a reference's group": (
        lambda: ReferenceBackend(cases.CONFIG, cast(Any, 3)),
        "group=3 is no group of this rank",
    ),
    "an oracle's activation": (
        lambda: moe_reference(**of_the_oracle(activation="silu")),
        "activation is of class str: wanted an Activation",
    ),
    "an oracle's tokens": (
        lambda: moe_reference(**of_the_oracle(x=None)),
        f"x {NO_TENSOR % 'NoneType'}",
    ),
    "an oracle's routing": (
        lambda: moe_reference(**of_the_oracle(probs=torch.zeros(6))),
        r"probs has shape \(6,\), wanted two dimensions",
    ),
    "an oracle's experts": (
        lambda: moe_reference(**of_the_oracle(fc2=None)),
        "fc2 is a NoneType, wanted a sequence of tensors",
    ),
    "an oracle's expert": (
        lambda: moe_reference(**of_the_oracle(fc1=(None,))),
        rf"fc1\[0\] {NO_TENSOR % 'NoneType'}",
    ),
    "an oracle's experts in a word": (
        lambda: moe_reference(**of_the_oracle(fc1="fc1")),
        "fc1 is a str, wanted a sequence of tensors",
    ),
    "an oracle without experts": (
        lambda: moe_reference(**of_the_oracle(fc1=())),
        "fc2 has 8 experts, wanted 0, as fc1",
    ),
    "an oracle's experts in a matrix": (
        lambda: moe_reference(**of_the_oracle(fc1=torch.zeros(8, 64))),
        r"fc1\[0\] has shape \(64,\), wanted 2 dimensions",
    ),
    "too few biases of an oracle": (
        lambda: moe_reference(**of_the_oracle(fc2_bias=torch.zeros(7, 64))),
        "fc2_bias has 7 experts, wanted 8, as fc1",
    ),
    "an oracle's map of more experts": (
        lambda: moe_reference(**of_the_oracle(routing_map=torch.ones(NUM_TOKENS, 9).bool())),
        r"routing_map has shape \(6, 9\), wanted \[6, 8\]",
    ),
    "an oracle's map of floats": (
        lambda: moe_reference(**of_the_oracle(routing_map=torch.ones(NUM_TOKENS, 8))),
        "routing_map is torch.float32, wanted torch.bool",
    ),
    "an oracle's gate": (
        lambda: moe_reference(**of_the_oracle(gated="no")),
        "gated='no': wanted True or False",
    ),
    "an oracle's dtype": (
        lambda: moe_reference(**of_the_oracle(dtype=torch.int64)),
        "dtype torch.int64: wanted a float dtype",
    ),
    "an oracle's clamp": (
        lambda: moe_reference(**of_the_oracle(clamp_value=-1)),
        "clamp_value=-1: wanted None or a number, 0 or more",
    ),
    "an oracle's offset": (
        lambda: moe_reference(**of_the_oracle(linear_offset=float("nan"))),
        "linear_offset=nan: wanted a number",
    ),
    "an oracle's blocks": (
        lambda: moe_reference(**of_the_oracle(glu_interleave=-1)),
        r"glu_interleave=-1 with fc1\[0\] of 128 rows: wanted an int, 0 or what divides half",
    ),
    "a reference's options": (
        lambda: ReferenceBackend(cases.CONFIG, options=cast(Any, {})),
        "options is of class dict: wanted a BackendOptions, or None",
    ),
    "a reference's device": (
        lambda: ReferenceBackend(cases.CONFIG, device=cast(Any, "cpu")),
        "device is of class str: wanted a torch.device, or None",
    ),
    "a reference's planner": (
        lambda: ReferenceBackend(cases.CONFIG, planner=cast(Any, "popular")),
        "planner='popular': wanted a function, or None",
    ),
    "a step that is none": (
        lambda: RepeatedSteps(layer(), lambda: None).run(cast(Any, None)),
        "step=None: wanted a function that runs a step",
    ),
    "tokens of a router's own": (
        lambda: layer(router=True).route(cast(Any, None)),
        f"tokens {NO_TENSOR % 'NoneType'}",
    ),
    "too many dimensions of a router's tokens": (
        lambda: layer(router=True).route(torch.zeros(2, 3, 64)),
        r"tokens have shape \(2, 3, 64\), wanted \[num_tokens, 64\]",
    ),
    "an engine": (
        lambda: deepspeed.attach(("engine", "optimizer")),
        "engine is of class tuple: wanted the first result of deepspeed.initialize",
    ),
    "an engine whose steps repeat": (
        lambda: deepspeed.repeated_steps(None),
        "engine is of class NoneType: wanted the first result of deepspeed.initialize",
    ),
    "a model": (
        lambda: RepeatedSteps(cast(Any, [layer()]), lambda: None),
        "the model is of class list: wanted a torch.nn.Module",
    ),
}


def of_the_oracle(**changes: Any) -> dict[str, Any]:
    call, config = good(), cases.CONFIG
    weights = call.pop("weights")
    experts = {"fc1": weights.fc1, "fc2": weights.fc2}
    return {**call, **experts, "activation": config.activation, "gated": config.gated, **changes}


def given(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """A call of :func:`moe_apply` with other arguments."""
    return lambda call: moe_apply(**{**call, **changes})


def by_choices(call: dict[str, Any], **changes: Any) -> object:
    return moe_apply(**{**call, "probs": None, "routing_map": None, **choice(), **changes})


def of_weights(call: dict[str, Any], **changes: Any) -> object:
    return moe_apply(**{**call, "weights": with_weights(call, **changes)})


def forward_by_choices(call: dict[str, Any], **changes: Any) -> object:
    return moe_forward(
        call["x"], **choice(), weights=call["weights"], backend=call["backend"], **changes
    )


A_NUMBER = "wanted an int, 0 to 65535, or what launch_number makes of one"
NO_WEIGHTS = "weights is of class %s: wanted an ExpertWeights or a SplitWeights"
OTHER_CLASSES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no backend": (given(backend=None), NOT_A_BACKEND % "NoneType"),
    "a backend's name": (given(backend="auto"), NOT_A_BACKEND % "str"),
    "no tokens": (given(x=None), f"x {NO_TENSOR % 'NoneType'}"),
    "tokens in a list": (given(x=[1.0]), f"x {NO_TENSOR % 'list'}"),
    "probabilities in a tuple": (given(probs=(1.0,)), f"probs {NO_TENSOR % 'tuple'}"),
    "a map in a list": (given(routing_map=[True]), f"routing_map {NO_TENSOR % 'list'}"),
    "no weights": (given(weights=None), NO_WEIGHTS % "NoneType"),
    "weights in a tuple": (given(weights=(1, 2)), NO_WEIGHTS % "tuple"),
    "a tensor for weights": (given(weights=torch.zeros(8, 64)), NO_WEIGHTS % "Tensor"),
    "indices in a list": (lambda c: by_choices(c, topk_idx=[0]), f"topk_idx {NO_TENSOR % 'list'}"),
    "a routing weight": (
        lambda c: by_choices(c, topk_weight=0.5),
        f"topk_weight {NO_TENSOR % 'float'}",
    ),
    "a router's name": (given(router="softmax"), "router is of class str: wanted what open_router"),
    "a layer's name": (given(layer="first"), f"layer='first': {A_NUMBER}"),
    "a layer between two": (given(layer=1.5), f"layer=1.5: {A_NUMBER}"),
    "a layer as a switch": (given(layer=True), f"layer=True: {A_NUMBER}"),
    "a layer in an array": (given(layer=np.arange(2)), rf"layer=array\(.*: {A_NUMBER}"),
    "a layer that no record holds": (given(layer=2**31), f"layer=2147483648: {A_NUMBER}"),
    "another layer that no record holds": (given(layer=-(2**31) - 1), f"layer=-.*: {A_NUMBER}"),
    "a switch of the fusion": (
        given(accumulate_into_main_grad="no"),
        "accumulate_into_main_grad='no': wanted True or False",
    ),
    "an order": (
        given(ordered_grads=np.zeros(2)),
        r"ordered_grads=array\(.*: wanted True or False",
    ),
    "what follows a backward": (given(after_backward=3), "after_backward=3: wanted a function"),
    "what is saved": (given(on_saved="x"), "on_saved='x': wanted a function"),
    "main_grad as a list": (
        given(main_grads=[]),
        "main_grads is of class list: wanted a MainGrads",
    ),
    "tokens in an array": (given(x=np.zeros((6, 64))), f"x {NO_TENSOR % 'ndarray'}"),
    "routing weights in an array": (
        given(probs=np.zeros((6, 8))),
        f"probs {NO_TENSOR % 'ndarray'}",
    ),
    "experts in an array": (
        lambda c: of_weights(c, fc2=np.zeros((8, 64, 64))),
        rf"fc2\[0\] {NO_TENSOR % 'ndarray'}",
    ),
    "sparse experts": (
        lambda c: of_weights(c, fc2=[w.detach().to_sparse() for w in c["weights"].fc2]),
        r"fc2\[0\] is torch.sparse_coo, wanted torch.strided",
    ),
    "a layout in an array": (
        lambda c: of_weights(c, transposed=np.zeros(2)),
        r"transposed=array\(.*of weights: wanted True or False",
    ),
    "halves in a tensor": (
        lambda c: of_weights(c, split=torch.zeros(2)),
        r"split=tensor\(.*of weights: wanted True or False",
    ),
    "a switch of choices": (
        lambda c: forward_by_choices(c, check_routing="no"),
        "check_routing='no': wanted True or False",
    ),
    "an order of choices": (
        lambda c: forward_by_choices(c, ordered_grads=1),
        "ordered_grads=1: wanted True or False",
    ),
    "a layer of choices": (lambda c: forward_by_choices(c, layer=1.5), f"layer=1.5: {A_NUMBER}"),
    "an fc1 that is none": (
        lambda c: of_weights(c, fc1=(*c["weights"].fc1[:7], None)),
        rf"fc1\[7\] {NO_TENSOR % 'NoneType'}",
    ),
    "the first fc1 is none": (
        lambda c: of_weights(c, fc1=(None, *c["weights"].fc1[1:])),
        rf"fc1\[0\] {NO_TENSOR % 'NoneType'}",
    ),
    "an fc2 is a number": (
        lambda c: of_weights(c, fc2=(3, *c["weights"].fc2[1:])),
        rf"fc2\[0\] {NO_TENSOR % 'int'}",
    ),
    "an up projection is none": (
        lambda c: moe_apply(
            **{**c, "weights": SplitWeights(c["weights"].fc2, (None,), c["weights"].fc2)}
        ),
        rf"up\[0\] {NO_TENSOR % 'NoneType'}",
    ),
    "a layout that is no switch": (
        lambda c: of_weights(c, transposed="no"),
        "transposed='no' of weights: wanted True or False",
    ),
    "no weights of choices": (
        lambda c: moe_forward(c["x"], **choice(), weights=cast(Any, None), backend=c["backend"]),
        NO_WEIGHTS % "NoneType",
    ),
    "no weights of a router": (
        lambda c: moe_router_forward(
            c["x"],
            torch.zeros(8, 64, dtype=c["x"].dtype),
            cast(Any, ()),
            backend=c["backend"],
        ),
        NO_WEIGHTS % "tuple",
    ),
}


@pytest.fixture(params=["reference", "kernel"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    if request.param == "reference":
        yield BACKEND
    else:
        gpus = Gpus(1, 0, slow=0)
        install(gpus, monkeypatch)
        yield make_backend(cases.CONFIG, 0)
        gpus.wait(0)  # which writes to the outputs


def good_for(backend: Backend) -> dict[str, Any]:
    """A well-formed call of a backend; the kernel's takes tokens and weights of 16 bits alone."""
    call = {**good(), "backend": backend}
    if backend is not BACKEND:
        weights = call["weights"]
        fc1, fc2 = ([w.bfloat16() for w in kind] for kind in (weights.fc1, weights.fc2))
        call.update(x=call["x"].bfloat16(), weights=ExpertWeights(fc1, fc2))
    return call


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_arguments_of_other_classes(name: str, backend: Backend):
    """The error names the argument, whether or not a backward may follow, and the backend lives."""
    call, message = OTHER_CLASSES[name]
    for training in (True, False):
        arguments = good_for(backend)
        arguments["x"].requires_grad_(training)
        with pytest.raises(FlashMoEError, match=f"^{message}"):
            call(arguments)
        assert moe_apply(**good_for(backend)).shape == (NUM_TOKENS, 64)


def test_a_promise_of_another_class() -> None:
    """Only experts in FP8 ask for it, and then it is what the error is about."""
    weights = with_weights(good())
    check_kinds(replace(weights, promise=Promise()))
    with pytest.raises(ConfigError, match="promise is of class str: wanted a Promise, or None"):
        check_kinds(replace(weights, promise=cast(Any, "of mine")))


@pytest.mark.parametrize("kind", [np.zeros, list])
def test_a_main_grad_of_another_class(kind: Callable[[Any], object], backend: Backend) -> None:
    """The backward says so; the backend lives."""
    call = good_for(backend)
    for weight in (*call["weights"].fc1, *call["weights"].fc2):
        weight.requires_grad_().main_grad = kind(tuple(weight.shape))
    out = moe_apply(**call, accumulate_into_main_grad=True)
    wanted = "^the buffer of a weight gradient is a (ndarray|list), wanted a torch.Tensor"
    with pytest.raises(ShapeError, match=wanted):
        out.sum().backward()
    assert moe_apply(**good_for(backend)).shape == (NUM_TOKENS, 64)


def inputs_of_a_call() -> dict[str, Any]:
    call = good()
    return {"x": call["x"], "weights": call["weights"]}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_an_argument_of_another_kind(name: str):
    call, message = WRONG_KINDS[name]
    with pytest.raises((ConfigError, DeviceError, ShapeError), match=f"^{message}"):
        call()


def test_fc2_is_transposed_with_fc1():
    config = cases.make_config(hidden=128, intermediate=64, num_experts=1, topk=1)
    fc1, fc2 = torch.zeros(128, 128), torch.zeros(128, 64)
    padded = torch.zeros(128, 65)[:, :64]  # rows need not follow each other
    for matrix in (fc2, padded):
        check_weights(config, ExpertWeights((fc1,), (matrix,)), CPU)
    turned = fc2.t().contiguous()
    check_weights(config, ExpertWeights((fc1,), (turned,), transposed=True), CPU)
    for matrix, transposed, wanted in ((turned, False, "128, 64"), (fc2, True, "64, 128")):
        weights = ExpertWeights((fc1,), (matrix,), transposed=transposed)
        with pytest.raises(ShapeError, match=rf"fc2 of local expert 0 .*, wanted \[{wanted}\]"):
            check_weights(config, weights, CPU)


@pytest.mark.parametrize("changes", [{"gated": False}, {"glu_interleave": 1}])
def test_gates_and_ups_need_a_gate_and_no_blocks(changes: dict[str, Any]):
    call = good()
    weights = with_weights(call, fc1=gates_and_ups(call), split=True)
    check_split(cases.CONFIG, weights)
    with pytest.raises(ConfigError, match="gate and up projections apart"):
        check_split(cases.make_config(**changes), weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda grads: grads[1:], "7 weight gradients, wanted 8"),
        (lambda grads: [grads[0][1:], *grads[1:]], r"shape \(127, 64\) .* wanted \(128, 64\)"),
        (lambda grads: [grads[0].to("meta"), *grads[1:]], "on meta, wanted .* on cpu"),
        (lambda grads: [grads[0].int(), *grads[1:]], "is torch.int32 .* of a float dtype"),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_gradients_that_no_weight_has(stacked: bool, change: Any, words: str):
    weights = good()["weights"]
    fc1 = [torch.empty_like(weight) for weight in weights.fc1]
    fc2 = [WeightGrad(torch.empty_like(weight), False) for weight in weights.fc2]
    if stacked:
        weights = with_weights({"weights": weights}, fc1=(torch.stack(weights.fc1),))
    check_weight_grads(weights, [[WeightGrad(one, False) for one in fc1], fc2, (), ()])
    bad = [WeightGrad(one, False) for one in change(fc1)]
    with pytest.raises(ShapeError, match=words):
        check_weight_grads(weights, [bad, fc2, (), ()])


def test_what_the_kernel_cannot_read():
    dtypes = (torch.bfloat16, torch.float32)
    plain = torch.zeros(4, 8, dtype=torch.bfloat16)
    # Single numbers are read from wherever they are, and nothing from nowhere.
    for tensor in (plain, misaligned(plain.float()), misaligned(plain)[:0]):
        check_kernel_tensor("out", tensor, CPU, *dtypes)
    for tensor, words in (
        (plain.to("meta"), "out: on meta, wanted cpu"),
        (plain.half(), "out: dtype torch.float16, wanted torch.bfloat16 or torch.float32"),
        (strided(plain), "out: strides .*, wanted contiguous"),
        (misaligned(plain), "out: at address .*, wanted 16-byte aligned"),
    ):
        with pytest.raises(ShapeError, match=words):
            check_kernel_tensor("out", tensor, CPU, *dtypes)


def call_with_trouble_on_rank_one(group: dist.ProcessGroup, trouble: str) -> str:
    rank = dist.get_rank(group)
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.uniform, [5, 5], dtype=torch.float32)
    experts = slice(4 * rank, 4 * rank + 4)
    weights = ExpertWeights(tuple(inputs.fc1[experts]), tuple(inputs.fc2[experts]))
    backend = ReferenceBackend(config, group)
    call: dict[str, Any] = {
        "x": inputs.x[rank],
        "probs": inputs.probs[rank],
        "routing_map": inputs.routing_map[rank],
        "weights": weights,
    }
    bad = dict(call)
    if rank == 1 and trouble == "NaN":
        bad["probs"] = nan_at(call["probs"].clone(), call["routing_map"])
    elif rank == 1:
        bad[trouble] = None if trouble == "weights" else []
    try:
        moe_apply(backend, **bad)
    except FlashMoEError as error:
        moe_apply(backend, **call)  # the ranks are still in step
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("NaN", "RoutingError: rank 1: the probability of token"),
        ("weights", "ConfigError: rank 1: weights is of class NoneType: wanted an Expert"),
        ("main_grads", "ConfigError: rank 1: main_grads is of class list: wanted a MainGrads"),
        ("ordered_grads", "ConfigError: rank 1: ordered_grads=[]: wanted True or False"),
    ],
)
def test_what_one_rank_refuses_is_an_error_on_all(trouble: str, message: str, ranks: RankPool):
    for told in ranks.run(call_with_trouble_on_rank_one, trouble, num_ranks=2):
        assert told.startswith(message)


@pytest.mark.parametrize("shape", [(NUM_TOKENS, 32), (NUM_TOKENS - 1, 64), (NUM_TOKENS * 64,)])
def test_gradient_of_another_shape(shape: tuple[int, ...]):
    call = good()
    _, saved = BACKEND.forward(**call, training=True)
    grads = [
        [WeightGrad(torch.empty_like(weight), False) for weight in weights]
        for weights in (call["weights"].fc1, call["weights"].fc2)
    ]
    with pytest.raises(ShapeError, match=rf"grad_out has shape .*, wanted \[{NUM_TOKENS}, 64\]"):
        BACKEND.backward(torch.ones(shape), saved, call["weights"], *grads)
