"""Hooks of capacity and padding on every backend, and those of the kernel around its launch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.blockwise import ROW, pack, quantize, rounded
from flashmoe_megatron.config import TILE_M, MoEConfig
from flashmoe_megatron.errors import ConfigError, FlashMoEError, RoutingError, ShapeError
from flashmoe_megatron.hooks import Call, Hooks
from flashmoe_megatron.layer import moe_router_forward
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool
from tests.unit import cases, test_hosts
from tests.unit.separate import NAMES, make, run
from tests.unit.simulated_gpus import Gpus, install, make_backend

CAPACITY = 5


def cap(capacity: torch.Tensor, call: Call) -> torch.Tensor:
    """Lets each expert have so many of a rank's routes."""
    return torch.full_like(capacity, CAPACITY)


def capped_map(probs: torch.Tensor, routing_map: torch.Tensor, policy: str) -> torch.Tensor:
    """What an expert keeps, one route after the other."""
    kept = torch.zeros_like(routing_map)
    for expert in range(routing_map.shape[1]):
        tokens = [token for token in range(len(probs)) if routing_map[token, expert]]
        if policy == "probs":
            tokens.sort(key=lambda token: -float(probs[token, expert]))
        kept[tokens[:CAPACITY], expert] = True
    return kept


def make_inputs(config: MoEConfig = cases.CONFIG, num_tokens: int = 21) -> cases.Inputs:
    tokens = [num_tokens] * config.num_ranks
    return cases.make_inputs(config, cases.skewed, tokens, dtype=torch.float32)


@pytest.mark.parametrize("as_indices", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("name", NAMES)
def test_routes_beyond_a_capacity_are_dropped(name: str, policy: Any, as_indices: bool) -> None:
    """Results and gradients have the bits of a routing that never had these routes."""
    inputs, fewer = make_inputs(), make_inputs()
    fewer.routing_map[0] = capped_map(inputs.probs[0], inputs.routing_map[0], policy)
    assert 0 < int(fewer.routing_map[0].sum()) < int(inputs.routing_map[0].sum())
    want = run(make(name, cases.CONFIG), fewer, as_indices=as_indices)
    backend = make(name, cases.CONFIG)
    backend.hooks.drop_policy = policy
    handle = backend.hooks.add("after", "capacity", cap)
    found = run(backend, inputs, as_indices=as_indices)
    for each, value in want.items():
        assert torch.equal(found[each], value), each
    handle.remove()
    assert not torch.equal(run(backend, inputs, as_indices=as_indices)["out"], want["out"])


@pytest.mark.parametrize("name", NAMES)
def test_capacities_are_counts_in_whole_blocks(name: str) -> None:
    """A cap of the counts is rounded up, and the default drops nothing."""
    backend, inputs = make(name, cases.CONFIG), make_inputs(num_tokens=3 * TILE_M)
    want, seen = run(backend, inputs), {}

    def look(when: str) -> Callable[[torch.Tensor, Call], None]:
        def hook(numbers: torch.Tensor, call: Call) -> None:
            if not call.is_probe:
                seen[when] = numbers.clone()
                assert call.block == TILE_M

        return hook

    for when in ("before", "after"):
        backend.hooks.add(when, "capacity", look(when))  # type: ignore[arg-type]
    found = run(backend, inputs)
    assert all(torch.equal(found[each], value) for each, value in want.items())
    counts = inputs.routing_map[0].sum(0)
    assert torch.equal(seen["before"], counts)
    assert torch.equal(seen["after"], (counts + TILE_M - 1) // TILE_M * TILE_M)
    assert seen["after"].max() > 2 * TILE_M
    backend.hooks.add("before", "capacity", lambda numbers, _: numbers.clamp(max=TILE_M + 1))
    backend.hooks.add("after", "capacity", look("after"))
    run(backend, inputs)
    assert int(seen["after"].max()) == 2 * TILE_M
    fewer = make_inputs(num_tokens=3 * TILE_M)
    hooks = Hooks()
    hooks.add("after", "capacity", lambda numbers, _: numbers.clamp(max=2 * TILE_M))
    fewer.routing_map[0] = hooks.capped(
        cases.CONFIG, inputs.probs[0], inputs.routing_map[0], Call("forward")
    )
    assert int(fewer.routing_map[0].sum(0).max()) == 2 * TILE_M
    assert torch.equal(run(backend, inputs)["out"], run(make(name, cases.CONFIG), fewer)["out"])


def test_routing_that_is_not_usable_stays_so() -> None:
    """Neither a weight that is NaN nor an index that is no expert's is dropped without a word."""
    inputs = make_inputs()
    backend = make("reference", cases.CONFIG)
    backend.hooks.add("after", "capacity", lambda numbers, _: torch.zeros_like(numbers))
    expert = int(inputs.routing_map[0][-1].nonzero()[0])
    inputs.probs[0][-1, expert] = torch.nan
    for policy in ("probs", "position"):
        backend.hooks.drop_policy = policy  # type: ignore[assignment]
        with pytest.raises(RoutingError, match="is NaN"):
            run(backend, inputs)
    x, topk_idx = torch.zeros(2, cases.CONFIG.hidden), torch.tensor([[0, 1], [99, -1]])
    weights = ExpertWeights((inputs.fc1[0],) * 8, (inputs.fc2[0],) * 8)
    with pytest.raises(RoutingError, match="99"):
        moe_apply(backend, x, None, None, weights, topk_idx=topk_idx, topk_weight=torch.ones(2, 2))
    for when in ("before", "after"):
        handle = backend.hooks.add(when, "capacity", lambda numbers, _: numbers.float())  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match=f"a hook {when} capacity returned rows of dtype"):
            run(backend, make_inputs())
        handle.remove()
    with pytest.raises(ConfigError, match="drop_policy='all' of a hook: wanted one of probs, pos"):
        backend.hooks.drop_policy = "all"  # type: ignore[assignment]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 3.5, float("inf")])
def test_pad_rows_count_for_nothing(name: str, value: float) -> None:
    """Experts compute whole blocks of rows, and no result has anything of the pads."""
    inputs, backend, seen = make_inputs(), make(name, cases.CONFIG), []
    want = run(backend, inputs)

    def look(rows: torch.Tensor, call: Call) -> None:
        if not call.is_probe:
            seen.append(rows.clone())

    backend.hooks.add("before", "padding", lambda pad, _: torch.full_like(pad, value))
    backend.hooks.add("after", "padding", look)
    found = run(backend, inputs)
    for each in want:
        torch.testing.assert_close(found[each], want[each], rtol=1e-6, atol=1e-7)
    assert all(len(rows) % TILE_M == 0 for rows in seen)
    every = torch.cat(seen)
    is_pad = (every == value).all(1)
    assert int((~is_pad).sum()) == int(inputs.routing_map[0].sum())
    assert is_pad.any()


@pytest.mark.parametrize("keep", ["all", "inputs"])
def test_rows_that_a_hook_of_padding_returns_go_on(keep: str) -> None:
    inputs, doubled = make_inputs(), make_inputs()
    doubled.x[0] = 2 * doubled.x[0]
    want = run(make("scheduled", cases.CONFIG), doubled)
    backend = make("scheduled", cases.CONFIG, keep=keep)
    backend.hooks.add("after", "padding", lambda rows, _: 2 * rows)
    found = run(backend, inputs)
    for each in want:
        torch.testing.assert_close(found[each], want[each], rtol=1e-6, atol=1e-6)


def over_hosts(group: dist.ProcessGroup, inputs: cases.Inputs, fewer: cases.Inputs) -> list[str]:
    config = test_hosts.CONFIG
    want = test_hosts.step(test_hosts.make_backend(group, config, 2), fewer)
    backend = test_hosts.make_backend(group, config, 2)
    backend.hooks.add("after", "capacity", cap)
    found = test_hosts.step(backend, inputs)
    said = [name for name, value in want.items() if not torch.equal(found[name], value)]
    for stage in ("padding", "dispatch", "experts", "combine"):
        with pytest.raises(ConfigError, match=rf"a hook after {stage}: a call over hosts has"):
            backend.hooks.add("after", stage, cap)  # type: ignore[arg-type]
    return said


def test_capacities_hold_over_hosts(ranks: RankPool) -> None:
    inputs, fewer = (make_inputs(test_hosts.CONFIG) for _ in range(2))
    fewer.routing_map = [
        capped_map(probs, routing_map, "probs")
        for probs, routing_map in zip(inputs.probs, inputs.routing_map, strict=True)
    ]
    assert sum(int(one.sum()) for one in fewer.routing_map) < sum(
        map(torch.sum, inputs.routing_map)
    )
    assert ranks.run(over_hosts, inputs, fewer) == [[]] * 4


CONFIG = cases.make_config(num_experts=4, max_tokens=16)


class Kernel:
    """The kernel's backend on a simulated GPU, and the routing of its last launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        from flashmoe_megatron.kernel import ops

        self.gpus = Gpus(1, 0, slow=0)
        install(self.gpus, monkeypatch)
        self.launched: list[tuple[Any, ...]] = []
        forward = ops.forward

        def launch(*arguments: Any) -> None:
            self.launched.append(arguments)
            forward(*arguments)

        monkeypatch.setattr(ops, "forward", launch)
        self.backend = make_backend(CONFIG, 0, **options)
        self.x = torch.ones(12, CONFIG.hidden, dtype=torch.bfloat16)
        self.probs = torch.linspace(1, 0.1, 48).view(12, 4)
        self.routing_map = torch.tensor([True, True, False, False]).repeat(12, 1)
        self.weights = ExpertWeights(
            (torch.zeros(4, CONFIG.fc1_rows, CONFIG.hidden, dtype=torch.bfloat16),),
            (torch.zeros(4, CONFIG.hidden, CONFIG.intermediate, dtype=torch.bfloat16),),
        )

    def call(self) -> dict[str, torch.Tensor]:
        """Runs a forward; returns what its launch was given."""
        given = self.x, self.probs, self.routing_map
        self.backend.forward(*given, self.weights, training=False)
        self.gpus.wait(0)
        rows, inputs = self.launched[-1][4], self.launched[-1][16:]
        return {"rows": rows, "x": inputs[0], "probs": inputs[1], "map": inputs[2]}


@pytest.mark.parametrize("row_bound", [None, 2.0])
def test_the_kernel_launches_what_hooks_of_gate_and_capacity_make(
    row_bound: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch, row_bound=row_bound)
    hooks = kernel.backend.hooks
    given = kernel.call()
    assert given["x"] is kernel.x
    assert given["map"] is kernel.routing_map
    hooks.add("before", "gate", lambda rows, _: 2 * rows)
    hooks.add("after", "gate", lambda probs, _: 3 * probs)
    hooks.add("after", "capacity", cap)
    given = kernel.call()
    assert torch.equal(given["x"], 2 * kernel.x)
    assert torch.equal(given["probs"], 3 * kernel.probs)
    assert torch.equal(given["map"], capped_map(kernel.probs, kernel.routing_map, "probs"))
    assert int(given["map"].sum()) == 2 * CAPACITY


def test_the_kernel_shows_its_rows_behind_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, seen = Kernel(monkeypatch), []

    def look(rows: torch.Tensor, call: Call) -> None:
        if not call.is_probe:
            seen.append((len(kernel.launched), rows.data_ptr(), tuple(rows.shape), rows.dtype))

    kernel.call()
    assert kernel.launched.pop()[5] is None, "an evaluation keeps no pre-activations"
    for stage in ("dispatch", "padding"):
        kernel.backend.hooks.add("after", stage, look)  # type: ignore[arg-type]
    given = kernel.call()
    assert kernel.launched[-1][5] is not None, "else one of several ranks leaves own rows out"
    blocks = kernel.launched[-1][8]
    shape = (blocks * TILE_M, CONFIG.hidden)
    assert seen == [(1, given["rows"].data_ptr(), shape, torch.bfloat16)] * 2

    def returns(rows: torch.Tensor, call: Call) -> torch.Tensor:
        return rows.clone()

    def writes(rows: torch.Tensor, call: Call) -> None:
        rows.zero_()

    for hook, words in ((returns, "returned rows"), (writes, "changed rows in place")):
        handle = kernel.backend.hooks.add("after", "dispatch", hook)
        before = len(kernel.launched)
        with pytest.raises(ConfigError, match=f"a hook after dispatch {words}, which the launch"):
            kernel.call()
        assert len(kernel.launched) == before, "it is told before anything is launched"
        handle.remove()


def test_the_kernels_rows_in_fp8_are_shown_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(Gpus(1, 0, slow=0), monkeypatch)
    config = cases.make_config(hidden=256, intermediate=128, experts="fp8")
    backend, seen = make_backend(config, 0), []
    backend._describe()
    for stage in ("dispatch", "padding"):
        backend.hooks.add("after", stage, lambda rows, _: seen.append(rows))  # type: ignore[arg-type]
    x = torch.randn(TILE_M, config.hidden).bfloat16()
    x[100:] = 0
    backend._show_rows(pack(quantize(x, ROW)).view(-1), 1, 0)
    assert len(seen) == 2
    for rows in seen:
        assert torch.equal(rows, rounded(x, ROW))


def test_what_the_kernel_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    hooks = kernel.backend.hooks
    for when, stage, words in (
        ("before", "dispatch", "the launch sends tokens, .* wanted a hook before gate, or"),
        *(
            (when, stage, "the launch computes experts .* wanted the backend 'scheduled'")
            for when in ("before", "after")
            for stage in ("experts", "combine")
        ),
    ):
        with pytest.raises(ConfigError, match=f"a hook {when} {stage}: {words}"):
            hooks.add(when, stage, cap)  # type: ignore[arg-type]
    assert not hooks
    pads = hooks.add("before", "padding", lambda value, _: value)
    kernel.call()
    pads.remove()
    hooks.add("before", "padding", lambda value, _: value + 1)
    before = len(kernel.launched)
    with pytest.raises(ConfigError, match=r"a hook before padding returned 1.0: wanted 0 on the k"):
        kernel.call()
    assert len(kernel.launched) == before


def test_a_router_in_the_launch_has_no_choices_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    kernel.backend.hooks.add("after", "capacity", cap)
    router = torch.zeros(4, CONFIG.hidden, dtype=torch.bfloat16)
    with pytest.raises(
        FlashMoEError, match="a router within the launch, before which .* wanted fu"
    ):
        moe_router_forward(kernel.x, router, kernel.weights, backend=kernel.backend)
    assert not kernel.launched


def test_a_captured_launch_has_what_hooks_made_when_it_was_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that they run on a GPU makes the host wait, which a capture would refuse."""
    kernel = Kernel(monkeypatch, row_bound=2.0)
    kernel.backend.hooks.add("before", "capacity", lambda numbers, _: numbers.clamp(max=100))
    kernel.backend.hooks.add("after", "capacity", cap)
    kernel.backend.hooks.add("before", "padding", lambda value, _: None)
    kernel.call()

    def waits(*_: Any) -> None:
        raise AssertionError("the host looked at a tensor's values")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel.backend.hooks.capped(CONFIG, kernel.probs, kernel.routing_map, Call("forward"))
    with monkeypatch.context() as patches:
        for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__"):
            patches.setattr(torch.Tensor, name, waits, raising=False)
        found = kernel.backend.hooks.capped(
            CONFIG, kernel.probs, kernel.routing_map, Call("forward")
        )
    assert int(found.sum()) == 2 * CAPACITY
    assert int(kernel.call()["map"].sum()) == 2 * CAPACITY
