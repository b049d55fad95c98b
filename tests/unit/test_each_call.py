"""A forward's launch depends on nothing that earlier calls were: whatever has changed is seen."""

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from flashmoe_megatron.attempts import Attempts
from flashmoe_megatron.errors import ConfigError, HeapError, RoutingError, ShapeError
from flashmoe_megatron.kernel import bindings, symmetric
from flashmoe_megatron.kernel.backend import KernelBackend, SavedForward
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.unit import cases
from tests.unit.simulated_gpus import Gpus, Library, install, make_backend

NUM_TOKENS = 4
OWN = {"plan", "rows", "preact", "scratch", "out", "workspace", "mailbox"}
"""Fields of memory that each launch or each group has of its own."""
WIDER = cases.make_config(num_ranks=1, max_tokens=1024)


class Launches:
    """Notes what the library is given on one simulated GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus, self.seen = Gpus(1, 0, slow=0), []
        install(self.gpus, monkeypatch)
        library = bindings.function

        def function(name: str) -> Callable[..., int]:
            if name == "encode_weights":
                return encode_weights
            return (
                self._noted(name, library(name)) if name in ("forward", "plan") else library(name)
            )

        monkeypatch.setattr(bindings, "function", function)

    def _noted(self, name: str, launch: Callable[..., int]) -> Callable[..., int]:
        def run(problem: int, group: int, given: int, *rest: int) -> int:
            structs = [(bindings.FlashMoEProblem, problem), (bindings.FlashMoEGroup, group)]
            structs.append((bindings.FlashMoEInput, given))
            if name == "forward":
                structs.append((bindings.FlashMoELaunch, rest[0]))
            self.seen.append([name, *(fields_at(kind, at) for kind, at in structs), rest[1:]])
            return launch(problem, group, given, *rest)

        return run


def encode_weights(_: Any, fc1: Any, fc2: Any, __: object, table: int) -> int:
    """Leaves the first addresses of each kind in place of descriptors."""
    ctypes.memmove(table, (ctypes.c_void_p * 2)(fc1[0], fc2[0]), 16)
    return bindings.OK


def fields_at(kind: Any, address: int) -> dict[str, object]:
    """A struct's fields, with contents in place of tables, and whether there are buffers."""
    struct = kind.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(kind)))
    found = {}
    for name, _ in kind._fields_:
        value = getattr(struct, name)
        if isinstance(value, ctypes.Array):
            value = tuple(value)
        elif name in ("weight_maps", "biases") and value:
            value = ctypes.string_at(value, 16)
        found[name] = bool(value) if name in OWN else value
    return found


@dataclass
class State:
    """A layer's state, and the arguments of its next forward."""

    backend: KernelBackend
    x: torch.Tensor
    probs: torch.Tensor
    routing_map: torch.Tensor
    weights: ExpertWeights
    options: dict[str, Any] = field(default_factory=dict)

    def with_backward(self, gpus: Gpus) -> Callable[[], None]:
        """Runs one forward, and returns its backward."""
        weights = self.weights
        out, saved = self.backend.forward(
            self.x, self.probs, self.routing_map, weights, **self.options
        )
        gpus.wait(0)

        def backward() -> None:
            kinds = weights.fc1, weights.fc2
            grads = [[WeightGrad(torch.empty_like(one), False) for one in kind] for kind in kinds]
            self.backend.backward(torch.ones_like(out), saved, weights, *grads)
            gpus.wait(0)

        return backward

    def forward(self, gpus: Gpus) -> list[object]:
        """The outcome of one forward, with sizes in place of buffers."""
        given = self.x, self.probs, self.routing_map, self.weights
        out, saved = self.backend.forward(*given, **self.options)
        gpus.wait(0)
        found: list[object] = [out.shape, out.dtype, self.backend.unfollowed]
        if isinstance(saved, SavedForward):
            kept = dict(vars(saved), x=saved.x is self.x)
            for name in ("plan", "rows", "preact"):
                kept[name] = None if kept[name] is None else kept[name].nbytes
            found.append(kept)
        else:
            found.append(None if saved is None else type(saved))
        return found


def tensors(dtype: torch.dtype = torch.bfloat16, *, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    config = cases.make_config(num_ranks=1)
    fc1 = torch.zeros(config.num_experts, config.fc1_rows, config.hidden, dtype=dtype)
    fc2 = torch.zeros(config.num_experts, config.hidden, config.intermediate, dtype=dtype)
    return {
        "x": torch.ones(num_tokens, config.hidden, dtype=dtype),
        "probs": torch.ones(num_tokens, config.num_experts),
        "routing_map": torch.ones(num_tokens, config.num_experts, dtype=torch.bool),
        "weights": ExpertWeights((fc1,), (fc2,)),
    }


KEPT = {
    name: tensors(dtype, num_tokens=number)
    for name, dtype, number in (
        ("first", torch.bfloat16, NUM_TOKENS),
        ("others", torch.bfloat16, NUM_TOKENS),
        ("fp16", torch.float16, NUM_TOKENS),
        ("fewer", torch.bfloat16, 2),
    )
}
"""Tensors at addresses of their own, for both of two layers that are compared."""


def transposed() -> ExpertWeights:
    first = KEPT["first"]["weights"]
    fc1, fc2 = (kind[0].transpose(1, 2).contiguous() for kind in (first.fc1, first.fc2))
    return ExpertWeights((fc1,), (fc2,), transposed=True)


def with_biases() -> ExpertWeights:
    first, config = KEPT["first"]["weights"], cases.make_config(num_ranks=1)
    biases = [
        (torch.zeros(config.num_experts, rows, dtype=torch.bfloat16),)
        for rows in (config.fc1_rows, config.hidden)
    ]
    return replace(first, fc1_bias=biases[0], fc2_bias=biases[1])


MOVED: dict[str, ExpertWeights] = {"transposed": transposed(), "biases": with_biases()}
CHOICES = {
    "probs": torch.ones(NUM_TOKENS, 2),
    "routing_map": torch.arange(2).repeat(NUM_TOKENS, 1),
}
HALF_PROBS = torch.ones(NUM_TOKENS, 8, dtype=torch.bfloat16)


def put(state: State, **changed: Any) -> None:
    for name, value in changed.items():
        assert hasattr(state, name)
        setattr(state, name, value)


CHANGES: dict[str, Callable[[State], object]] = {
    "weights elsewhere": lambda s: put(s, weights=KEPT["others"]["weights"]),
    "another layout of weights": lambda s: put(s, weights=MOVED["transposed"]),
    "biases": lambda s: put(s, weights=MOVED["biases"]),
    "another dtype": lambda s: put(s, **KEPT["fp16"]),
    "fewer tokens": lambda s: put(s, **{**KEPT["fewer"], "weights": s.weights}),
    "tokens elsewhere": lambda s: put(s, x=KEPT["others"]["x"]),
    "probabilities in bfloat16": lambda s: put(s, probs=HALF_PROBS),
    "indices in place of a map": lambda s: put(s, **CHOICES),
    "an evaluation": lambda s: s.options.update(training=False),
    "an evaluation that a backward follows": lambda s: s.options.update(
        training=False, followed=True
    ),
    "frozen fc1": lambda s: s.options.update(trains_fc1=False),
    "rows for factors": lambda s: s.options.update(gives_rows=True),
    "another layer": lambda s: s.options.update(layer=9),
    "another keep": lambda s: setattr(s.backend, "keep", "all"),
    "a larger bound": lambda s: setattr(s.backend.attempts, "blocks", 50),
    "exact buffers": lambda s: setattr(s.backend.attempts, "is_exact", True),
    "a larger layer of the group": lambda s: s.backend.memory.register(WIDER),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(Library, "reads_tokens", (bindings.READS_TOKENS, bindings.READS_TOKENS))
    return Launches(monkeypatch)


def state(**options: Any) -> State:
    backend = make_backend(cases.make_config(num_ranks=1), 0, keep="auto", **options)
    backend.attempts = Attempts()
    return State(backend, **KEPT["first"], options={"training": True})


BOUNDS = {"a larger bound": [2.0], "exact buffers": [2.0]}
"""Bounds of rows with which there is a change, where not both."""


@pytest.mark.parametrize(
    ("name", "row_bound"),
    [(name, bound) for name in CHANGES for bound in BOUNDS.get(name, [None, 2.0])],
)
def test_a_change_is_seen(name: str, row_bound: float | None, launches: Launches) -> None:
    """The launch is that of a layer which has been like this from the beginning, and back again."""
    fresh, used = (state(row_bound=row_bound) for _ in range(2))
    first, before = used.forward(launches.gpus), launches.seen.pop()
    del launches.seen[:]
    used.forward(launches.gpus)
    for one in (used, fresh):
        del launches.seen[:]
        CHANGES[name](one)
        outcome, seen = one.forward(launches.gpus), launches.seen[:]
        if one is used:
            got = outcome, seen
    assert got == (outcome, seen)
    assert (got[0], got[1][-1]) != (first, before), "nothing has changed"


def test_a_hook_is_called(launches: Launches) -> None:
    one, called = state(row_bound=2.0), []

    def hook(x: torch.Tensor, _: object) -> torch.Tensor:
        called.append(len(x))
        return x

    one.forward(launches.gpus)
    handle = one.backend.hooks.add("before", "gate", hook)
    one.forward(launches.gpus)
    assert called[-1] == NUM_TOKENS
    handle.remove()
    del called[:]
    one.forward(launches.gpus)
    assert called == []


def test_another_stream_is_seen(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    one = state(row_bound=2.0)
    followed: list[int] = []
    monkeypatch.setattr(
        type(one.backend.memory), "_follow", lambda _, stream: followed.append(stream)
    )
    for stream in (0, 5, 0):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, s=stream: s)
        one.forward(launches.gpus)
        assert (launches.seen[-1][2]["stream"] or 0) == stream
    assert followed == [0, 5, 0]


def test_another_gpu_is_seen(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    one, entered = state(row_bound=2.0), []
    one.forward(launches.gpus)

    def device(wanted: object) -> contextlib.AbstractContextManager[None]:
        entered.append(wanted)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", device)
    one.forward(launches.gpus)
    assert entered == [one.backend.device]


@pytest.mark.parametrize("is_backward", [False, True])
def test_memory_that_is_void_is_made_again(is_backward: bool, launches: Launches) -> None:
    one = state(row_bound=2.0)
    for _ in range(2):
        backward = one.with_backward(launches.gpus)
    one.backend.memory.is_void = True
    if is_backward:
        backward()
    else:
        one.forward(launches.gpus)
    assert not one.backend.memory.is_void


def test_memory_that_cannot_be_made_has_no_fault(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of the last fault was in memory that is gone."""
    one = state(row_bound=2.0)
    one.forward(launches.gpus)
    memory = one.backend.memory

    def fail(*_: object) -> None:
        raise HeapError("no room")

    with monkeypatch.context() as full:
        full.setattr(symmetric, "allocate", fail)
        memory.is_void = True
        memory.fault_code.value = bindings.BAD_ROUTING
        with pytest.raises(HeapError):
            memory.allocate(one.backend._sizes)
    assert not memory.has_fault
    one.forward(launches.gpus)


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_fault_is_raised(is_backward: bool, launches: Launches) -> None:
    """A routing weight is NaN, and the host learns of it after the launch."""
    one = state(row_bound=2.0)
    one.forward(launches.gpus)
    one.probs = torch.full_like(one.probs, torch.nan)
    backward = one.with_backward(launches.gpus)
    one.probs = KEPT["first"]["probs"]
    with pytest.raises(RoutingError):
        backward() if is_backward else one.forward(launches.gpus)
    one.with_backward(launches.gpus)()


def test_an_error_that_was_put_off_is_raised(launches: Launches) -> None:
    one = state(row_bound=2.0)
    one.forward(launches.gpus)
    one.backend.put_off(ConfigError("late"))
    with pytest.raises(ConfigError, match="late"):
        one.forward(launches.gpus)
    one.forward(launches.gpus)


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "wide": lambda x: torch.cat([x, x], 1),
    "not contiguous": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "not aligned": lambda x: x.new_ones(x.numel() + 1)[1:].view(x.shape),
    "of another dtype": torch.Tensor.half,
    "numbers": lambda _: [1.0],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tokens_are_refused_after_right_ones(name: str, launches: Launches) -> None:
    one = state(row_bound=2.0)
    for _ in range(2):
        one.forward(launches.gpus)
    one.x = WRONG[name](one.x)
    with pytest.raises(ShapeError, match="x"):
        one.forward(launches.gpus)
    one.x = KEPT["first"]["x"]
    one.forward(launches.gpus)


def test_a_launch_that_fails_ends_with_the_memory(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers may have launched with this rank."""
    one = state(row_bound=2.0)
    one.forward(launches.gpus)
    with monkeypatch.context() as broken:
        library = bindings.function
        broken.setattr(bindings, "error", lambda _: ConfigError("no launch"))
        broken.setattr(
            bindings,
            "function",
            lambda name: (lambda *_: 2) if name == "forward" else library(name),
        )
        with pytest.raises(ConfigError, match="no launch"):
            one.forward(launches.gpus)
    assert one.backend.memory.is_void
    one.forward(launches.gpus)
    assert not one.backend.memory.is_void


def test_layers_of_a_backend_take_turns(launches: Launches) -> None:
    one = state(row_bound=2.0)
    found = []
    for name in ("first", "others", "first", "others"):
        one.weights = KEPT[name]["weights"]
        one.forward(launches.gpus)
        found.append(launches.seen[-1][4]["weight_maps"])
    assert found[0] != found[1]
    assert found[:2] == found[2:]
