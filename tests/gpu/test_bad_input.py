"""What the kernel's backend refuses, and that a group can be used again afterwards."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_megatron import errors
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.kernel import bindings, symmetric
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.expected import assert_as_good, expected
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.virtual import VirtualGroup, VirtualLayer, device, streams
from tests.unit import cases

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
CONFIG = make_config(1)


def make_backend(config: Any = CONFIG, **options: Any) -> KernelBackend:
    """Makes a backend with memory of its own, so that no other test sees what it registers."""
    memory = GroupMemory(None, device(), BackendOptions())
    return KernelBackend(
        config, None, device(), memory=memory, rank=0, options=BackendOptions(**options)
    )


def make_call() -> dict[str, Any]:
    inputs = steps.make_inputs(CONFIG, cases.uniform, [64])
    (weights,) = steps.weights_of(CONFIG, inputs)
    return {
        "x": inputs.x[0],
        "probs": inputs.probs[0],
        "routing_map": inputs.routing_map[0],
        "weights": weights,
    }


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, 2 bytes past a 16-byte boundary."""
    base = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return base[1:].view(tensor.shape).copy_(tensor)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return tensor.t().contiguous().t()


def with_fc1(call: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> ExpertWeights:
    weights = call["weights"]
    return replace(weights, fc1=(change(weights.fc1[0]), *weights.fc1[1:]))


BAD_CALLS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "x of another width": (
        lambda call: {"x": call["x"][:, :128].contiguous()},
        errors.ShapeError,
        r"x has shape \(64, 128\), wanted \[num_tokens, 256\]",
    ),
    "x of another rank": (
        lambda call: {"x": call["x"].unsqueeze(0)},
        errors.ShapeError,
        r"x has shape \(1, 64, 256\)",
    ),
    "x in float32": (
        lambda call: {"x": call["x"].float()},
        errors.ShapeError,
        "x.*float32, wanted .*bfloat16",
    ),
    "x in float16": (
        lambda call: {"x": call["x"].half()},
        errors.ShapeError,
        "x.*float16, wanted .*bfloat16",
    ),
    "x on the CPU": (
        lambda call: {name: call[name].cpu() for name in ("x", "probs", "routing_map")},
        errors.ShapeError,
        "x.* on cpu, wanted cuda:0",
    ),
    "probs on the CPU": (
        lambda call: {"probs": call["probs"].cpu()},
        errors.ShapeError,
        "probs is on cpu, wanted cuda:0",
    ),
    "x not contiguous": (
        lambda call: {"x": spread(call["x"])},
        errors.ShapeError,
        "x has .* strides .* wanted contiguous",
    ),
    "x misaligned": (
        lambda call: {"x": misaligned(call["x"])},
        errors.ShapeError,
        "x starts 2 bytes past .* 16-byte alignment",
    ),
    "too many tokens": (
        lambda call: {name: torch.cat([call[name]] * 6) for name in ("x", "probs", "routing_map")},
        errors.ShapeError,
        "x has 384 tokens, .* at most max_tokens=320",
    ),
    "probs of other tokens": (
        lambda call: {"probs": call["probs"][:32]},
        errors.ShapeError,
        r"probs has shape \(32, 16\), wanted \[64, 16\]",
    ),
    "probs in float64": (
        lambda call: {"probs": call["probs"].double()},
        errors.ShapeError,
        "probs is torch.float64, wanted torch.float32 or torch.bfloat16",
    ),
    "routing map of numbers": (
        lambda call: {"routing_map": call["routing_map"].int()},
        errors.ShapeError,
        "routing_map is torch.int32, wanted torch.bool",
    ),
    "weight of another shape": (
        lambda call: {"weights": with_fc1(call, lambda weight: weight[:128])},
        errors.ShapeError,
        r"shape \(128, 256\), wanted .384, 256.",
    ),
    "weight in float32": (
        lambda call: {"weights": with_fc1(call, torch.Tensor.float)},
        errors.ShapeError,
        "float32, wanted .*bfloat16",
    ),
    "weight on the CPU": (
        lambda call: {"weights": with_fc1(call, torch.Tensor.cpu)},
        errors.ShapeError,
        "on cpu, wanted cuda:0",
    ),
    "weight misaligned": (
        lambda call: {"weights": with_fc1(call, misaligned)},
        errors.ShapeError,
        "16-byte align",
    ),
    "weight not contiguous": (
        lambda call: {"weights": with_fc1(call, spread)},
        errors.ShapeError,
        "strides .* wanted",
    ),
    "weight missing": (
        lambda call: {"weights": replace(call["weights"], fc1=call["weights"].fc1[1:])},
        errors.ShapeError,
        "15 fc1 weights, wanted .* 16",
    ),
}


@pytest.fixture(scope="module")
def backend() -> KernelBackend:
    return make_backend()


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_tensors(backend: KernelBackend, name: str):
    change, error, message = BAD_CALLS[name]
    call = make_call()
    # A good call first: what a backend remembers of it must not hide what changed.
    want = moe_apply(backend, **call)
    with pytest.raises(error, match=message):
        moe_apply(backend, **{**call, **change(call)})
    assert torch.equal(moe_apply(backend, **call), want)


def test_a_view_at_the_address_of_a_known_weight_is_refused():
    """A square matrix and its transposed view differ in their strides alone: the table that is
    remembered of the one would make the kernel compute with the other."""
    config = make_config(1, hidden=128, intermediate=128, gated=False)
    inputs = steps.make_inputs(config, cases.uniform, [64])
    (weights,) = steps.weights_of(config, inputs)
    call = {"x": inputs.x[0], "probs": inputs.probs[0], "routing_map": inputs.routing_map[0]}
    square = make_backend(config)
    want = moe_apply(square, **call, weights=weights)
    views = replace(weights, fc1=tuple(weight.t() for weight in weights.fc1))
    with pytest.raises(errors.ShapeError, match="strides .* wanted rows of consecutive elements"):
        moe_apply(square, **call, weights=views)
    assert torch.equal(moe_apply(square, **call, weights=weights), want)


def test_weight_gradients_of_another_dtype(backend: KernelBackend):
    call = make_call()
    weights = call["weights"]
    out, saved = backend.forward(**call, training=True)
    grads = [WeightGrad(torch.empty_like(weight), False) for weight in weights.fc1 + weights.fc2]
    grads[3] = WeightGrad(grads[3].buffer.double(), True)
    with pytest.raises(errors.ShapeError, match="weight gradient: dtype torch.float64, wanted"):
        backend.backward(out, saved, weights, grads[:16], grads[16:])


def test_heap_that_does_not_fit():
    with pytest.raises(errors.HeapError, match=rf"needs {2**40} bytes .* has \d+ free"):
        symmetric.allocate(2**40, None, device(), "cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0.0}, "timeout=0.0: wanted seconds above 0"),
        ({"reserved_sms": -1}, "reserved_sms=-1: wanted an int"),
        ({"reserved_sms": 100_000}, "reserved_sms=100000: the GPU has"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises(errors.ConfigError, match=message):
        make_backend(**options)


def test_a_layer_that_cannot_be_served_leaves_the_heap_to_others():
    memory = GroupMemory(None, device(), BackendOptions())
    KernelBackend(CONFIG, None, device(), memory=memory, rank=0)
    bounds = memory.bounds
    with pytest.raises(errors.FlashMoEError, match="max_tokens"):
        KernelBackend(replace(CONFIG, max_tokens=2**20), None, device(), memory=memory, rank=0)
    assert memory.bounds == bounds


def test_a_gradient_that_begins_anywhere(backend: KernelBackend):
    """Autograd makes such gradients of slices of something larger: no user could align them."""
    call = make_call()
    weights = call["weights"]

    def grads_of(grad_out: torch.Tensor) -> list[torch.Tensor]:
        out, saved = backend.forward(**call, training=True)
        fc1, fc2 = (
            [WeightGrad(torch.empty_like(weight), False) for weight in kind]
            for kind in (weights.fc1, weights.fc2)
        )
        return [*backend.backward(grad_out, saved, weights, fc1, fc2), fc1[0].buffer]

    grad_out = torch.randn_like(call["x"])
    assert all(map(torch.equal, grads_of(misaligned(grad_out)), grads_of(grad_out)))


def test_traffic_before_the_first_call():
    assert make_backend().traffic == TrafficCounters()


def test_group_of_another_size():
    with pytest.raises(errors.ConfigError, match="the group has 1 ranks, the layer wants 2"):
        KernelBackend(make_config(2), None, device())


@pytest.mark.parametrize("kind", ["nan", "too many experts"])
@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (4, 2)])
def test_unusable_routing_of_one_rank_fails_all_and_nothing_else(
    num_ranks: int, rank: int, kind: str
):
    config = make_config(num_ranks)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    token = TOKENS[num_ranks][rank] - 5  # which the first CTA does not read
    probs, routing_map = list(inputs.probs), list(inputs.routing_map)
    if kind == "nan":
        expert = int(routing_map[rank][token].nonzero()[0])
        probs[rank] = probs[rank].clone()
        probs[rank][token, expert] = float("nan")
        message = f"^token {token} of rank {rank}: its probability for expert {expert} is NaN"
    else:
        routing_map[rank] = routing_map[rank].clone()
        routing_map[rank][token] = True
        message = f"^token {token} of rank {rank} selects 16 experts, wanted at most topk=3"
    bad = replace(inputs, probs=probs, routing_map=routing_map)
    steps.check_bad_routing(config, bad, inputs, message)


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_call_that_one_rank_refuses_ends_on_all(is_bounded: bool):
    config = make_config(4)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[4])
    group = VirtualGroup(4)
    # Layers take pairs of SMs of a GPC. If the refuser's plan comes first, it may leave odd numbers
    # of them in all GPCs, and would wait for a layer that finds no room.
    group.num_ctas -= 8
    layer = VirtualLayer(config, group)
    weights = steps.weights_of(config, inputs)
    layer.prepare()
    refuser = layer.backends[3]
    blocks = int(refuser._sizes.max_row_blocks) if is_bounded else None
    pending = layer.begin(inputs.x[:3], inputs.probs[:3], inputs.routing_map[:3], blocks)
    outs = layer.finish(pending, weights)[0] if is_bounded else []
    sentence = "x is wrong. " * 80  # longer than what is told
    with torch.cuda.stream(streams()[3]):
        refuser.refuse(f"ShapeError: {sentence}")
    torch.cuda.synchronize()
    calls: list[Callable[[], object]] = [
        functools.partial(backend.finish, plan, weights[rank], training=True)
        for rank, (backend, plan) in enumerate(zip(layer.backends, pending, strict=False))
    ]
    if is_bounded:  # nobody has waited: all hear of it late, the refuser once more
        assert len(outs) == 3
        assert all(out.isnan().all() for out in outs)
        calls = [backend.raise_pending_fault for backend in layer.backends]
    for rank, call in enumerate(calls):
        with (
            torch.cuda.stream(streams()[rank]),
            pytest.raises(errors.ShapeError, match="^rank 3: x is wrong") as error,
        ):
            call()
        told = str(error.value).removeprefix("rank 3: ")
        assert sentence.startswith(told)
        assert len(f"ShapeError: {told}") == bindings.REASON_BYTES - 1
    assert not any(backend.memory.has_fault for backend in layer.backends)
    for _ in range(2):
        assert_as_good(steps.step(layer, inputs, weights), expected(config, inputs))


@pytest.mark.alone
def test_a_plan_ends_when_a_peer_has_given_up():
    config = make_config(4)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[4])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, timeout_s=1.0)
    patient = layer.backends[1]
    patient.options = replace(patient.options, timeout=60.0)
    start = time.monotonic()
    pending = layer.begin(inputs.x[:2], inputs.probs[:2], inputs.routing_map[:2])
    said = [
        r"rank 0 waited too long from rank [23] in",
        r"rank 1 .* from rank 0 .*gave up in another",
    ]
    for rank, sentence in enumerate(said):
        with (
            torch.cuda.stream(streams()[rank]),
            pytest.raises(errors.PeerTimeoutError, match=sentence),
        ):
            layer.backends[rank].finish(pending[rank], weights[rank], training=True)
    assert time.monotonic() - start < 20.0


@pytest.mark.alone
def test_a_peer_that_never_calls():
    config = make_config(2)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, timeout_s=1.0)
    start = time.monotonic()
    pending = layer.begin(inputs.x[:1], inputs.probs[:1], inputs.routing_map[:1])
    with pytest.raises(errors.PeerTimeoutError, match=r"rank 0 waited too long from rank 1"):
        layer.finish(pending, weights)
    assert time.monotonic() - start < 5.0
    # Neither the GPU nor the process is lost.
    again = VirtualLayer(config)
    assert_as_good(steps.step(again, inputs, weights), expected(config, inputs))
