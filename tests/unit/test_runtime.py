"""The kernel's backend, as far as it can be seen without a GPU."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron.attempts import Attempts
from flashmoe_megatron.call import Given
from flashmoe_megatron.errors import FlashMoEError, PeerTimeoutError, RoutingError, ShapeError
from flashmoe_megatron.hooks import Hooks
from flashmoe_megatron.kernel import backend as kernel_backend
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.backend import (
    KernelBackend,
    PendingForward,
    _on_own_device,
    _PlanOutcome,
)
from flashmoe_megatron.kernel.group_memory import Promised
from flashmoe_megatron.options import BackendOptions
from tests.unit.cases import make_config


class OnGpu(KernelBackend):
    """Tells which GPU is the current one in its calls."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    @_on_own_device
    def call(self) -> int:
        """The number of the current GPU."""
        return torch._C._cuda_getDevice()


def test_calls_run_on_the_gpu_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", enter)
    for index in (0, 1):
        assert OnGpu(index).call() == index
        assert current == [0]


@pytest.mark.parametrize(
    "name",
    [
        *("_forward", "refuse", "begin", "finish", "_backward"),
        "early_fc2_grads",
    ],
)
def test_all_calls_that_launch_do(name: str) -> None:
    assert hasattr(getattr(KernelBackend, name), "__wrapped__")


class Planned(KernelBackend):
    """A rank of two whose plan ends as it is told, with a fault in its mailbox."""

    def __init__(self, outcome: _PlanOutcome, fault: FlashMoEError | None) -> None:
        self.config = make_config(num_ranks=2)
        self.device = torch.device("cuda", 0)
        self.num_calls = 0
        self.attempts = Attempts()
        self.faults = [fault]
        self.memory: Any = SimpleNamespace(
            open=lambda: bindings.FlashMoEGroup(),
            take_fault=lambda: self.faults.pop() if self.faults else None,
            seconds_of_fault=lambda: self.seconds_of_fault,
            is_void=False,
            has_fault=False,
            has_shared_fault=False,
        )
        self.memory.promised = Promised(self.memory)
        self.seconds_of_fault = 0.0
        self.options, self.keep = BackendOptions(timeout=5.0), "all"
        self._dtype, self._pending = torch.bfloat16, None
        self.outcome = outcome
        self._sizes = bindings.FlashMoESizes(plan_bytes=64)
        self._bounds = {False: None, True: None}
        self.hooks = Hooks()

    def _prepare(self) -> bindings.FlashMoEProblem:
        return bindings.FlashMoEProblem()

    _describe = _prepare

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _await_plan(self, *_: object) -> _PlanOutcome:  # type: ignore[override]
        self.memory.has_fault = bool(self.faults)
        self.memory.has_shared_fault = self.outcome.status != bindings.PEER_TIMEOUT
        return self.outcome

    def _use_weights(self, *_: object) -> Any:
        return None

    def _through_hooks(self, given: Given) -> Given:
        return given

    def _begin(self, given: Given, *_: object) -> PendingForward:
        return PendingForward(given, *[None] * 5)  # type: ignore[arg-type]


def on_processor(backend: Planned) -> Planned:
    backend.device = torch.device("cpu", 0)  # as the current GPU
    return backend


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of the library's calls, none of which is made."""
    calls: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(bindings, "call", lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize("is_heard_late", [False, True])
def test_a_refusal_stays_where_others_hear_of_it_late(
    launched: list[Any], is_heard_late: bool
) -> None:
    """Then the call goes on without a result, and a later one raises on all ranks."""
    backend = on_processor(
        Planned(_PlanOutcome(bindings.REFUSED, 0, 0, is_heard_late), ShapeError("x"))
    )
    void = backend.refuse("ShapeError: x")
    assert (void is not None) == is_heard_late
    assert len(backend.faults) == int(is_heard_late)
    assert backend.num_calls == 1
    ((name, *_, given, _),) = launched
    assert (name, given.refusal, given.num_tokens) == ("plan", b"ShapeError: x", 0)


@pytest.mark.usefixtures("launched")
def test_a_refusal_is_not_put_off_for_ever() -> None:
    """A rank that is gone would never hear of it."""
    backend = on_processor(Planned(_PlanOutcome(bindings.REFUSED, 0, 0, True), ShapeError("x")))
    backend.seconds_of_fault = 6.0
    assert backend.refuse("ShapeError: x") is None
    assert not backend.faults
    assert backend.memory.is_void


@pytest.mark.usefixtures("launched")
def test_a_refusal_whose_plan_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end under the next call, which must not take its report for its own."""
    monkeypatch.setattr(bindings, "error", lambda _: PeerTimeoutError("the plan did not finish"))
    backend = on_processor(Planned(_PlanOutcome(bindings.PEER_TIMEOUT, 0, 0, False), None))
    with pytest.raises(PeerTimeoutError, match="did not finish"):
        backend.refuse("ShapeError: x")
    assert backend.memory.is_void


def test_a_refusal_that_peers_do_not_hear(launched: list[Any]) -> None:
    late = PeerTimeoutError("rank 1 waited too long")
    with pytest.raises(PeerTimeoutError, match="waited too long"):
        Planned(_PlanOutcome(bindings.PEER_TIMEOUT, 0, 0, False), late).refuse("ShapeError: x")


@pytest.mark.parametrize(
    ("fault", "status", "is_void"),
    [
        (RoutingError("NaN"), bindings.BAD_ROUTING, False),
        (ShapeError("rank 1: x"), bindings.REFUSED, False),
        (None, bindings.CUDA_ERROR, True),
    ],
    ids=str,
)
@pytest.mark.usefixtures("launched")
def test_a_plan_that_fails_on_every_rank_leaves_the_memory(
    monkeypatch: pytest.MonkeyPatch, fault: FlashMoEError | None, status: int, is_void: bool
) -> None:
    """Where no fault tells that all ranks have stopped, all make new memory."""
    monkeypatch.setattr(bindings, "error", lambda _: FlashMoEError("the plan failed"))
    monkeypatch.setattr(kernel_backend, "check_tokens", lambda *_, **__: None)  # there are none
    backend = Planned(_PlanOutcome(status, 0, 0, False), fault)
    with pytest.raises(FlashMoEError) as error:
        backend.forward(None, None, None, None, training=True)  # type: ignore[arg-type]
    assert fault in (None, error.value)
    assert backend.memory.is_void == is_void


def test_the_error_of_a_refusal_names_its_rank() -> None:
    fault = bindings.FlashMoEFault(
        code=bindings.REFUSED, rank=3, reason=b"ShapeError: x is long \xc3"
    )
    error = bindings.fault_error(fault)
    assert (type(error), str(error)) == (ShapeError, "rank 3: x is long \ufffd")
