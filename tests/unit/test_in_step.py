"""Hosts ahead of their GPUs hear of an error in one call, and the group goes on in step."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.unit import cases, in_step
from tests.unit.in_step import BAD, BAD_STEP, CONFIG, RANKS, Call, Rank, check_in_step
from tests.unit.simulated_gpus import Gpus, install, make_backend


def train(
    change: Callable[[Call], Call],
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: int,
    waits: bool = False,
    **options: Any,
) -> list[Rank]:
    """A training's ranks, once it is over; with lookahead every call's replicas were settled on."""
    gpus = Gpus(RANKS, seed, slow=seed % RANKS)
    install(gpus, monkeypatch)
    backends = [make_backend(CONFIG, rank, row_bound=2.0, **options) for rank in range(RANKS)]
    ranks = [Rank(one, change, partial(gpus.wait, one.rank), waits=waits) for one in backends]
    for one in ranks:
        one.looks_ahead = options.get("placement") == "lookahead"
    in_step.run_ranks(ranks)
    assert not gpus.problems
    for one in ranks:
        assert gpus.settled[one.rank]
        assert set(gpus.settled[one.rank]) == {one.looks_ahead}
    return ranks


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("name", BAD)
def test_all_raise_in_one_call(name: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = BAD[name]
    seed = 3 * list(BAD).index(name) + len(keep)
    check_in_step(train(change, monkeypatch, seed=seed, keep=keep), message)


@pytest.mark.parametrize("name", BAD)
def test_all_raise_in_one_call_with_lookahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settling tells of nothing that is wrong, and holds nobody up."""
    change, message = BAD[name]
    seed = 5 + list(BAD).index(name)
    ranks = train(change, monkeypatch, seed=seed, spare_slots=2, placement="lookahead")
    check_in_step(ranks, message)


def test_another_launch_ends_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers share their slots, and each forward is another's if its number or layer differs."""
    gpus = Gpus(1, 0, slow=0)
    install(gpus, monkeypatch)
    config = cases.make_config(num_ranks=2, num_experts=6, topk=2, max_tokens=16)
    options = {"spare_slots": 1, "placement": "lookahead", "row_bound": 2.0}
    first = make_backend(config, 0, **options)
    second = make_backend(config, 0, first.memory, **options)
    tokens = torch.ones(4, config.hidden, dtype=torch.bfloat16)
    chosen = torch.arange(2).repeat(4, 1)
    weights = ExpertWeights(
        (torch.zeros(3, config.fc1_rows, config.hidden, dtype=torch.bfloat16),),
        (torch.zeros(3, config.hidden, config.intermediate, dtype=torch.bfloat16),),
    )

    def settle(backend: KernelBackend, layer: int = 0) -> None:
        backend.settle(torch.ones(4, 6, dtype=torch.bool), lambda: weights, layer=layer)

    def forward(backend: KernelBackend, layer: int = 0) -> Any:
        out, saved = backend.forward(
            tokens, torch.ones(4, 2), chosen, weights, training=True, layer=layer
        )
        gpus.wait(0)
        return out, saved

    def backward(backend: KernelBackend, saved: Any) -> None:
        grads = [
            [WeightGrad(torch.zeros(one[0].shape), False)] for one in (weights.fc1, weights.fc2)
        ]
        backend.backward(tokens, saved, weights, *grads)

    forward(first)
    settle(first)
    _, saved = forward(first)
    forward(first)
    settle(first)
    backward(first, saved)
    forward(first)
    settle(first)
    settle(second)
    forward(first)
    forward(second)
    settle(second)
    forward(second)
    settle(first, layer=1)
    forward(first)
    settle(first, layer=1)
    forward(first, layer=1)
    assert gpus.settled[0] == [False, True, False, False, False, False, True, False, True]
    settle(first)
    with pytest.raises(ShapeError):
        first.forward(tokens.float(), torch.ones(4, 2), chosen, weights, training=True)
    forward(first)
    assert gpus.settled[0][-1:] == [False], "a call that was refused is another one, too"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="placement='lookahead' in a CUDA graph"):
        settle(first)


def test_a_bound_has_room_for_a_block_of_each_spare_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for each expert, whose last block may have a single row."""
    install(Gpus(1, 0, slow=0), monkeypatch)
    config = cases.make_config(num_ranks=2, num_experts=6, topk=2, max_tokens=1024)
    blocks = {}
    for spare_slots in (0, 2):
        backend = make_backend(config, 0, spare_slots=spare_slots, row_bound=1.5)
        backend.memory.register(config, spare_slots)
        backend._describe()
        blocks[spare_slots] = backend._bounds[True]
    assert blocks == {0: 24 + 3, 2: 24 + 3 + 2}


@pytest.mark.parametrize("is_lent", [False, True])
def test_gradients_that_are_handed_on_are_complete_with_their_backward_alone(
    is_lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What begins at no multiple of 16 bytes goes to a buffer of ours until the end."""
    gpus = Gpus(1, 0, slow=0)
    install(gpus, monkeypatch)
    config = cases.make_config(num_ranks=1, max_tokens=16)
    backend = make_backend(config, 0, row_bound=2.0, keep="all")
    shapes = (
        (config.num_experts, config.fc1_rows, config.hidden),
        (config.num_experts, config.hidden, config.intermediate),
    )
    weights = ExpertWeights(*((torch.zeros(shape, dtype=torch.bfloat16),) for shape in shapes))
    tokens = torch.ones(4, config.hidden, dtype=torch.bfloat16)
    chosen = torch.arange(config.topk).repeat(4, 1)
    _, saved = backend.forward(tokens, torch.ones(chosen.shape), chosen, weights, training=True)
    grads = [
        [
            WeightGrad(
                torch.zeros(math.prod(shape) + 1)[int(is_lent) :][: math.prod(shape)].view(shape),
                True,
            )
        ]
        for shape in shapes
    ]
    backend.backward(tokens, saved, weights, *grads)
    gpus.wait(0)
    asked: list[object] = []
    monkeypatch.setattr(backend.memory.early_fc2, "stream_behind", asked.append)
    assert backend.early_fc2_grads() is None
    assert len(asked) == (0 if is_lent else 1)


def without_memory(backend: KernelBackend, after: int) -> None:
    """Lets one of the backend's next buffers find no room, behind so many that do."""
    left = iter([True] * after + [False])

    def empty(num_bytes: int) -> torch.Tensor:
        if next(left, True):
            return KernelBackend._empty(backend, num_bytes)
        raise torch.OutOfMemoryError("CUDA out of memory")

    backend._empty = empty  # type: ignore[method-assign]


@pytest.mark.parametrize("after", range(4), ids=["plan", "rows", "preactivations", "scratch"])
def test_a_rank_without_memory_tells_the_others(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it waits for nothing else: its peers launch, and would wait for it in vain."""

    def change(call: Call) -> Call:
        without_memory(call["backend"], after)
        return call

    ranks = train(change, monkeypatch, seed=after, keep="all")
    check_in_step(ranks, "OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize("keep", ["all", "preactivations"])
@pytest.mark.parametrize("row_bound", [None, 2.0])
def test_a_launch_that_peers_count_on_ends_with_the_memory(
    row_bound: float | None, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A next one in the same memory would take part in the peers' launch that lacks this rank."""
    gpus = Gpus(1, 0, slow=0)
    install(gpus, monkeypatch)
    backend = make_backend(cases.make_config(num_ranks=1), 0, keep=keep, row_bound=row_bound)
    config, memory = backend.config, backend.memory
    tokens = torch.ones(4, config.hidden, dtype=torch.bfloat16)
    chosen = torch.arange(config.topk).repeat(4, 1)
    experts = range(config.num_experts)
    weights = ExpertWeights(
        tuple(torch.zeros(config.fc1_rows, config.hidden, dtype=torch.bfloat16) for _ in experts),
        tuple(
            torch.zeros(config.hidden, config.intermediate, dtype=torch.bfloat16) for _ in experts
        ),
    )

    def forward() -> Any:
        saved = backend.forward(tokens, torch.ones(chosen.shape), chosen, weights, training=True)[1]
        gpus.wait(0)
        return saved

    def backward(saved: Any) -> None:
        grads = [
            [WeightGrad(torch.empty_like(one), False) for one in kind]
            for kind in (weights.fc1, weights.fc2)
        ]
        backend.backward(tokens, saved, weights, *grads)
        gpus.wait(0)

    backward(forward())
    saved = forward()
    assert not memory.is_void
    without_memory(backend, 0 if keep == "all" else 1)  # rows are fetched before
    with pytest.raises(torch.OutOfMemoryError):
        backward(saved)
    assert memory.is_void
    forward()
    assert not memory.is_void
    without_memory(backend, 1)
    with pytest.raises(torch.OutOfMemoryError):
        forward()
    assert memory.is_void == (row_bound is None)  # with a bound nothing has begun


@pytest.mark.parametrize("name", ["values", "found by the GPU"])
def test_hosts_that_wait_raise_in_the_next_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in train(BAD[name][0], monkeypatch, seed=1, waits=True, keep="all"):
        ((step, number, _),) = one.errors
        assert (step, number) == (BAD_STEP, 1)


def test_a_backward_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part in the others', and the next forward raises on all."""

    def change(call: Call) -> Call:
        (fc1,) = call["weights"].fc1
        fc1.main_grad = torch.zeros(fc1.shape, dtype=torch.float64)
        return {**call, "accumulate": True}

    for one in train(change, monkeypatch, seed=1, keep="all"):
        ((step, _, message),) = one.errors
        assert step > BAD_STEP
        assert message == (
            "rank 1: weight gradient: dtype torch.float64, wanted torch.float32 or torch.bfloat16"
        )
