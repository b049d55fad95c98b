"""Faults on one GPU, with virtual ranks: each ends in an error or in the right result, in time.

After every error the process, its CUDA context and the group are used again.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import FlashMoEError, HeapError, PeerTimeoutError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.backend import KernelBackend, PendingForward
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.expected import assert_as_good, assert_void, expected
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.spinner import Spinner
from tests.gpu.virtual import VirtualLayer, device, streams
from tests.unit import cases

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(90)]

TIMEOUT_S = 1.0
MARGIN_S = 4.0


class Case:
    """A layer on virtual ranks with a short patience, and what it should compute."""

    def __init__(self, num_ranks: int = 2, **changes: Any) -> None:
        self.config = make_config(num_ranks, **changes)
        self.inputs = steps.make_inputs(self.config, cases.uniform, TOKENS[num_ranks])
        self.weights = steps.weights_of(self.config, self.inputs)
        self.layer = VirtualLayer(self.config, timeout_s=TIMEOUT_S, is_guarded=False)
        self.want = expected(self.config, self.inputs)

    def check(self) -> None:
        assert_as_good(steps.step(self.layer, self.inputs, self.weights), self.want)

    def begin(self) -> list[PendingForward]:
        inputs = self.inputs
        return self.layer.begin(inputs.x, inputs.probs, inputs.routing_map)

    def gives_up(self, rank: int, call: Callable[..., Any], *arguments: Any) -> str:
        """The error of a rank whose call, or the look after it, has to time out.

        What a call gives all the same is NaN.
        """

        def call_and_look() -> None:
            results = call(*arguments)
            torch.cuda.synchronize()
            assert_void(results)
            self.layer.backends[rank].raise_pending_fault()

        start = time.monotonic()
        with torch.cuda.stream(streams()[rank]), pytest.raises(PeerTimeoutError) as error:
            call_and_look()
        assert time.monotonic() - start < TIMEOUT_S + MARGIN_S
        return str(error.value)


def finish(case: Case, pending: list[PendingForward], rank: int) -> object:
    return case.layer.backends[rank].finish(pending[rank], case.weights[rank], training=True)


def test_a_rank_that_stops_after_its_plan():
    case = Case()
    case.check()
    pending = case.begin()
    message = case.gives_up(0, finish, case, pending, 0)
    assert "rank 0 waited too long" in message
    # The other comes late: it learns that it was given up, and does not wait as long.
    start = time.monotonic()
    case.gives_up(1, finish, case, pending, 1)
    assert time.monotonic() - start < TIMEOUT_S + 1
    for _ in range(2):
        case.check()


def test_a_rank_that_stops_before_its_backward():
    case = Case()
    inputs, weights = case.inputs, case.weights
    for _ in range(2):
        _, saved = case.layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
        torch.cuda.synchronize()
        grads = steps.make_grads(case.layer, weights)
        for rank in range(2):  # the second one late
            message = case.gives_up(
                rank,
                case.layer.backends[rank].backward,
                inputs.grad_out[rank],
                saved[rank],
                weights[rank],
                grads[0][rank],
                grads[1][rank],
            )
            assert rank == 1 or "waited too long" in message
        case.check()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_signals_that_never_arrive(num_ranks: int):
    """The last rank writes elsewhere what is meant for rank 0."""
    case = Case(num_ranks)
    case.check()
    memories = case.layer.group.memories
    heap = memories[0]._heap
    assert heap is not None
    elsewhere = torch.zeros_like(heap.local)
    faulty = memories[-1]
    honest_open = faulty.open

    def open_elsewhere() -> bindings.FlashMoEGroup:
        group = honest_open()
        group.heaps[0] = elsewhere.data_ptr()
        return group

    faulty.open = open_elsewhere  # type: ignore[method-assign]
    pending = case.begin()
    messages = [case.gives_up(rank, finish, case, pending, rank) for rank in range(num_ranks)]
    del faulty.open
    assert f"rank 0 waited too long from rank {num_ranks - 1}" in messages[0]
    case.check()


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_not_a_number_stays_with_its_token(value: float):
    """As in the unfused path, it spoils its own row and the weights that it met, nothing else."""
    case = Case(4)
    clean = steps.step(case.layer, case.inputs, case.weights)
    victim_rank, victim = 2, 5
    x = [tensor.clone() for tensor in case.inputs.x]
    x[victim_rank][victim, 7] = value
    spoiled = replace(case.inputs, x=x)
    got = steps.step(case.layer, spoiled, case.weights)
    torch.cuda.synchronize()
    index = sum(len(tensor) for tensor in case.inputs.x[:victim_rank]) + victim
    others = torch.arange(len(got.out), device=device()) != index
    for name in ("out", "grad_x", "grad_probs"):
        assert torch.equal(getattr(got, name)[others], getattr(clean, name)[others]), name
    assert not got.out[index].isfinite().all()
    met = case.inputs.routing_map[victim_rank][victim]
    for name in ("grad_fc1", "grad_fc2"):
        grad = getattr(got, name)
        assert torch.equal(grad[~met], getattr(clean, name)[~met]), name
        assert all(not grad[expert].isfinite().all() for expert in met.nonzero().flatten())
    again = steps.step(case.layer, case.inputs, case.weights)
    steps.assert_same_bits(again, clean)


def lone_backend(config: MoEConfig, num_ctas: int | None = None, **options: Any) -> KernelBackend:
    memory = GroupMemory(None, device(), BackendOptions())
    return KernelBackend(
        config,
        None,
        device(),
        memory=memory,
        rank=0,
        num_ctas=num_ctas,
        options=BackendOptions(**options),
    )


def lone_step(backend: KernelBackend, case: Case) -> torch.Tensor:
    inputs = case.inputs
    given = inputs.x[0], inputs.probs[0], inputs.routing_map[0], case.weights[0]
    return backend.forward(*given, training=True)[0]


def test_multiprocessors_held_by_another_kernel():
    """Beside a kernel on the reserved SMs the layer runs; beyond them it waits, and is right."""
    case = Case(1)
    backend = lone_backend(case.config)
    want = lone_step(backend, case)
    torch.cuda.synchronize()
    spinner = Spinner()
    with spinner.hold(2):
        assert torch.equal(lone_step(backend, case), want)
        torch.cuda.current_stream().synchronize()
        assert spinner.is_running, "the layer waited for the other kernel to leave"
    for hold_s in (0.5, 2.0):
        with spinner.hold(24, at_most_s=hold_s):
            start = time.monotonic()
            got = lone_step(backend, case)  # waits on the host for its plan
            torch.cuda.current_stream().synchronize()
            assert time.monotonic() - start < hold_s + MARGIN_S
        assert torch.equal(got, want)


def test_two_streams_at_once():
    """One group's launches share a workspace: on two streams they are an error or in order."""
    case = Case(1)
    backend = lone_backend(case.config, num_ctas=32)  # two launches would fit the GPU together
    want = lone_step(backend, case)
    torch.cuda.synchronize()
    lanes = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(50):
        got = []
        for lane in lanes:
            with torch.cuda.stream(lane):
                torch.cuda._sleep(200_000)
                try:
                    got.append(lone_step(backend, case))
                except FlashMoEError:
                    continue
        torch.cuda.synchronize()
        assert got, "both were refused"
        assert all(torch.equal(one, want) for one in got)


@pytest.mark.parametrize("default_is", ["first", "second"])
def test_a_stream_waits_for_the_one_before(default_is: str):
    """The default stream waits for others, too, and they for it."""
    case = Case(1)
    backend = lone_backend(case.config, num_ctas=32, row_bound=2.0)  # two fit the GPU together
    want = lone_step(backend, case)
    torch.cuda.synchronize()
    lanes = [torch.cuda.default_stream(), torch.cuda.Stream()]
    first, second = lanes if default_is == "first" else reversed(lanes)
    spinner = Spinner()
    with spinner.hold(1):
        with torch.cuda.stream(first):
            first.wait_stream(spinner.stream)
            got = [lone_step(backend, case)]
        with torch.cuda.stream(second):
            got.append(lone_step(backend, case))
            done = second.record_event()
        time.sleep(0.05)  # in which it would end
        assert not done.query(), "the second launch did not wait for the first"
    torch.cuda.synchronize()
    assert all(torch.equal(one, want) for one in got)


def test_no_memory_to_grow_the_heap(monkeypatch: pytest.MonkeyPatch):
    memory = GroupMemory(None, device(), BackendOptions())
    small, large = Case(1), make_config(1, max_tokens=2**17, topk=16)  # 43 MB
    first = KernelBackend(small.config, None, device(), memory=memory, rank=0)
    want = lone_step(first, small)
    second = KernelBackend(large, None, device(), memory=memory, rank=0)
    x = torch.zeros(8, large.hidden, dtype=torch.bfloat16, device=device())
    probs = torch.ones(8, large.num_experts, device=device())
    routing_map = probs.cumsum(1) == 1
    weights = ExpertWeights(
        tuple(x.new_zeros(large.num_experts, large.fc1_rows, large.hidden)),
        tuple(x.new_zeros(large.num_experts, large.hidden, large.intermediate)),
    )
    # Memory that is really full would fail the tests of other processes.
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (2**25, 2**36))
        with pytest.raises(HeapError, match=rf"needs \d+ bytes .* has {2**25} free"):
            second.forward(x, probs, routing_map, weights, training=True)
    out, _ = second.forward(x, probs, routing_map, weights, training=True)
    assert not out.any()
    assert torch.equal(lone_step(first, small), want)
