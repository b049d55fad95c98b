"""Hooks of the scheduled backend: what they see, what becomes of what they return, bad ones."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.experts import GroupBackends
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.hooks import Call
from flashmoe_megatron.layer import FlashMoELayer, moe_forward
from flashmoe_megatron.options import BackendOptions, FrameworkOptions
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.telemetry.record import launch_number
from tests.distributed import RankPool
from tests.unit import cases
from tests.unit.separate import run

STAGES = ("gate", "capacity", "padding", "dispatch", "experts", "combine")
TOKENS = 21


def make(config: MoEConfig = cases.CONFIG, group: Any = None, keep: Any = "all") -> Any:
    options = BackendOptions(keep=keep)
    return ScheduledBackend(config, group, options=options, degrees=(2, 3))


def make_inputs(config: MoEConfig = cases.CONFIG) -> cases.Inputs:
    tokens = [TOKENS] * config.num_ranks
    return cases.make_inputs(config, cases.skewed, tokens, dtype=torch.float32)


def test_hooks_see_every_stage_in_order_and_change_nothing() -> None:
    backend, inputs = make(keep="preactivations"), make_inputs()
    want = run(backend, inputs)
    seen: list[tuple[str, str, Call, tuple[int, ...]]] = []

    def watch(when: str, stage: str) -> None:
        def hook(rows: torch.Tensor, call: Call) -> None:
            if not call.is_probe:
                seen.append((when, stage, call, tuple(rows.shape)))

        backend.hooks.add(when, stage, hook)

    for when in ("before", "after"):
        for stage in STAGES:
            watch(when, stage)
    found = run(backend, inputs)
    assert all(torch.equal(found[name], value) for name, value in want.items())

    forward = [one for one in seen if one[2].direction == "forward"]
    names = [(when, stage) for when, stage, _, _ in forward]
    # The two dispatches are under way before the first part is computed; the last one fetches rows
    # again in the backward.
    arriving = [("after", "dispatch"), ("before", "experts")]
    assert names == [
        ("before", "gate"),
        ("after", "gate"),
        ("before", "capacity"),
        ("after", "capacity"),
        ("before", "padding"),
        *[("before", "dispatch")] * 2,
        *[*arriving, ("after", "padding"), ("after", "experts"), ("before", "combine")] * 2,
        ("after", "combine"),
        ("before", "dispatch"),
        *arriving,
    ]
    hidden, routes = cases.CONFIG.hidden, int(inputs.routing_map[0].sum())
    shapes = {(when, stage, call.part): shape for when, stage, call, shape in forward[:-3]}
    assert shapes["before", "gate", 0] == shapes["after", "combine", 0] == (TOKENS, hidden)
    assert shapes["after", "gate", 0] == (TOKENS, cases.CONFIG.num_experts)
    for when, stage in [("before", "dispatch"), *arriving, ("after", "experts")]:
        assert sum(shapes[when, stage, part][0] for part in (0, 1)) == routes
    backward = [one for one in seen if one[2].direction == "backward"]
    assert {one[2].part for one in backward} == {0, 1, 2}
    assert {one[1] for one in backward} == {"dispatch", "experts", "combine"}


@pytest.mark.parametrize(
    ("when", "stage", "changes"),
    [
        ("before", "gate", {"out": "x"}),
        ("after", "gate", {"out": "probs"}),
        ("before", "dispatch", {"out": "x"}),
        ("after", "dispatch", {"out": "x"}),
        ("before", "experts", {"out": "x"}),
        ("after", "experts", {"out": "out"}),
        ("before", "combine", {"out": "out"}),
        ("after", "combine", {"out": "out"}),
    ],
)
def test_what_a_hook_returns_goes_on(when: str, stage: str, changes: dict[str, str]) -> None:
    inputs, backend = make_inputs(), make()
    doubled = make_inputs()
    (what,) = changes.values()
    if what in ("x", "probs"):
        getattr(doubled, what)[0] = 2 * getattr(doubled, what)[0]
    want = run(make(), doubled)["out"] * (2 if what == "out" else 1)
    plain = run(make(), inputs)

    def double(rows: torch.Tensor, call: Call) -> torch.Tensor | None:
        return 2 * rows if call.direction == "forward" else None

    handle = backend.hooks.add(when, stage, double)
    assert torch.equal(run(backend, inputs)["out"], want)
    handle.remove()
    assert all(torch.equal(run(backend, inputs)[name], value) for name, value in plain.items())


def test_gradients_pass_hooks_of_the_backward() -> None:
    inputs, backend = make_inputs(), make()
    plain = run(backend, inputs)
    backend.hooks.add(
        "before", "dispatch", lambda rows, call: 2 * rows if call.direction == "backward" else None
    )
    found = run(backend, inputs)
    for name, value in plain.items():
        assert torch.equal(found[name], value if name == "out" else 2 * value), name


@pytest.mark.parametrize("is_training", [True, False])
def test_a_hook_is_told_the_layer_of_the_model(is_training: bool) -> None:
    backend, told = make(keep="preactivations"), set()

    def hook(_: torch.Tensor, call: Call) -> None:
        if not call.is_probe:
            told.add((call.direction, call.layer))

    for when in ("before", "after"):
        backend.hooks.add(when, "combine", hook)
    gaps: list[tuple[str, int]] = []
    backend.slices = SimpleNamespace(
        take=lambda layer, _: gaps.append(("gap of", layer)),
        leave=lambda layer: gaps.append(("behind", layer)),
    )
    layer = FlashMoELayer(cases.CONFIG, router=True, dtype=torch.float32, backend=backend)
    x = torch.randn(TOKENS, cases.CONFIG.hidden)
    number = launch_number(3, is_training=is_training, owner=2)
    weights = layer._weights(None)
    moe_forward(x, *layer.route(x), weights, backend=backend, layer=number).sum().backward()
    assert told == {("forward", 3), ("backward", 3)}
    assert gaps == [("gap of", 3), ("behind", 3)], "plans of reductions have the model's numbers"


def test_what_hooks_return_lies_as_what_they_got() -> None:
    """It is sent to other ranks as it lies, and the next hook may want a view of it."""
    backend, inputs = make(keep="preactivations"), make_inputs()
    want = run(backend, inputs)
    seen = set()

    def turn(rows: torch.Tensor, _: Call) -> torch.Tensor:
        return rows.t().contiguous().t()

    def look(when: str, stage: str) -> Any:
        def hook(rows: torch.Tensor, call: Call) -> None:
            assert rows.is_contiguous()
            seen.add((when, stage))

        return hook

    for when in ("before", "after"):
        for stage in STAGES:
            backend.hooks.add(when, stage, turn)
            backend.hooks.add(when, stage, look(when, stage))
    found = run(backend, inputs)
    assert all(torch.equal(found[name], value) for name, value in want.items())
    assert len(seen) == 2 * len(STAGES)


def test_a_hook_that_cannot_be_is_refused() -> None:
    backend = make()
    for arguments, words in (
        (("behind", "gate"), "when='behind' of a hook: wanted one of before, after"),
        (
            ("before", "router"),
            "stage='router' of a hook: wanted one of gate, capacity, padding, dispatch",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            backend.hooks.add(*arguments, lambda rows, call: None)
    layer = FlashMoELayer(
        cases.CONFIG, router=True, fuse_router=True, dtype=torch.float32, backend=backend
    )
    backend.hooks.add("before", "gate", lambda rows, call: rows.clone())
    with pytest.raises(ConfigError, match="tokens of a router within the launch"):
        layer(torch.randn(3, cases.CONFIG.hidden))


def refused(group: dist.ProcessGroup, config: MoEConfig) -> list[str]:
    """What is said of hooks on one rank that change shapes, what was sent, and the call after."""
    rank, said = dist.get_rank(group), []
    backend, inputs = make(config, group), make_inputs(config)
    bad: dict[str, Any] = {
        "narrow": lambda rows, call: rows[:, :-1],
        "short": lambda rows, call: rows[:1],
        "half": lambda rows, call: rows.bfloat16(),
        "none": lambda rows, call: [],
    }
    for stage in ("gate", "dispatch", "experts", "combine"):
        for when in ("before", "after"):
            for hook in bad.values():
                handle = backend.hooks.add(when, stage, hook if rank == 1 else lambda r, c: None)
                try:
                    run(backend, inputs, rank=rank)
                    said.append("nothing")
                except ShapeError as error:
                    said.append(str(error))
                handle.remove()
    assert backend.traffic.bytes_sent == 0
    backend.hooks.add("before", "combine", lambda rows, call: None)
    run(backend, inputs, rank=rank)
    sent = backend.traffic.bytes_sent
    assert sent > 0
    # A hook that comes behind a call is looked at before the next one, as the first was.
    backend.hooks.add("after", "experts", bad["narrow"] if rank == 1 else lambda r, c: None)
    with pytest.raises(ShapeError, match="rank 1: a hook after experts returned rows of shape"):
        run(backend, inputs, rank=rank)
    assert backend.traffic.bytes_sent == sent
    return said


def test_hooks_that_change_shapes_are_refused_on_every_rank_before_rows_are_sent(
    ranks: RankPool,
) -> None:
    for said in ranks.run(refused, cases.make_config(num_ranks=2), num_ranks=2):
        assert len(said) == 32
        assert said[4] == (
            "rank 1: a hook after gate returned rows of shape (3, 7): wanted (3, 8), as it got them"
        )
        assert said[9] == (
            "rank 1: a hook before dispatch returned rows of shape (1, 64): wanted (3, 64), as it "
            "got them"
        )
        for one in said[2::4]:
            assert "rows of dtype torch.bfloat16: wanted torch.float32" in one
        for one in said[3::4]:
            assert one.endswith("returned a list: wanted a tensor or None")


def test_layers_of_a_framework_keep_their_hooks_when_they_get_more_tokens() -> None:
    settings = FrameworkOptions(backend="scheduled")
    backends = GroupBackends(None, torch.device("cpu"), settings, None)
    small = backends.backend_of(cases.CONFIG, torch.float32)
    other = backends.backend_of(cases.make_config(topk=3), torch.float32)
    backends.agree_on_tokens(10 * small.config.max_tokens)
    large = backends.backend_of(cases.CONFIG, torch.float32)
    assert large is not small
    assert isinstance(small, ScheduledBackend)
    assert isinstance(other, ScheduledBackend)
    assert isinstance(large, ScheduledBackend)
    assert large.hooks is small.hooks
    assert other.hooks is not small.hooks
