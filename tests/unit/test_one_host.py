"""One host of several, whose others are made up: what processes that are hosts do not show."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron import planner
from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import FlashMoEError, HeapError, PeerTimeoutError, ShapeError
from flashmoe_megatron.hosts import grid, rail
from flashmoe_megatron.hosts.backend import HostsBackend, SavedOverHosts
from flashmoe_megatron.hosts.crossing import FixedCrossing, Share, sum_of_shares
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.hosts.rail import MOST_PENDING, Crossed, Stopwatch
from flashmoe_megatron.hosts.routes import Choices, routing_problem
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.telemetry.record import LaunchRecord
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases
from tests.unit.rails import LocalRail

CPU = torch.device("cpu")
CONFIG = cases.make_config(num_ranks=2, num_experts=8, topk=4, max_tokens=128)


class MadeUp(LocalRail):
    """A rail whose other hosts have no tokens, and refuse nothing.

    Attributes:
        spread_dtypes: The dtypes of rows that went to all hosts.
        is_lost: Whether the other hosts have gone.
    """

    def __init__(self, grid: HostGrid) -> None:
        super().__init__(grid)
        self.spread_dtypes: list[torch.dtype] = []
        self.is_lost = False

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        num_ranks = self.grid.num_hosts * self.grid.ranks_per_host
        told = words.new_zeros(num_ranks, len(words))
        told[self.grid.rank] = words
        return told

    def exchange(self, send: torch.Tensor, received: torch.Tensor, *_: Any, **__: Any) -> Any:
        if self.is_lost:
            raise PeerTimeoutError("the other hosts have gone")
        received.zero_()
        return lambda: None

    def spread(self, send: torch.Tensor, received: torch.Tensor) -> None:
        self.spread_dtypes.append(send.dtype)
        received.zero_()


class Within:
    """Stands in for the backend within the host."""

    def __init__(self, config: MoEConfig, options: BackendOptions, memory: object) -> None:
        self.config, self.options, self.memory = config, options, memory
        self.traffic = TrafficCounters(rows_sent=7, bytes_sent=70)
        self.refusals: list[str] = []
        self.failure: FlashMoEError | None = None
        self.rail: MadeUp | None = None

    def forward(self, tokens: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        if self.failure is not None:
            assert self.rail is not None
            self.rail.is_lost = True
            raise self.failure
        return tokens, None

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)

    def take_records(self) -> Iterable[LaunchRecord]:
        numbers = dict.fromkeys(("layer", "epoch", "begin_ns", "end_ns", "num_ctas"), 0)
        numbers |= dict.fromkeys(("num_tokens", "num_rows", "num_row_blocks"), 0)
        moved = {"rows_pulled": (3, 4), "results_pushed": (5, 6)}
        rows: Any = {"expert_rows": (), "phase_ns": {}}
        return [LaunchRecord(direction="forward", **numbers, **moved, **rows)]


def make(
    config: MoEConfig = CONFIG,
    where: HostGrid | None = None,
    *,
    is_shared: bool = True,
    **given: Any,
) -> tuple[HostsBackend, MadeUp, list[Within]]:
    """A rank's backend, its rail and what it has made within its host."""
    made: list[Within] = []
    memory = object()

    def within(share: MoEConfig, options: BackendOptions) -> Any:
        made.append(Within(share, options, memory if is_shared else object()))
        return made[-1]

    road = MadeUp(where or HostGrid(2, 1, 0))
    return HostsBackend(config, road, within, options=BackendOptions(**given)), road, made


def weights_of(config: MoEConfig) -> ExpertWeights:
    count = config.num_local_experts
    fc1 = torch.zeros(count, config.fc1_rows, config.hidden)
    return ExpertWeights((fc1,), (torch.zeros(count, config.hidden, config.intermediate),))


def call_of(config: MoEConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three tokens whose experts are all on the first host."""
    routing_map = torch.zeros(3, config.num_experts, dtype=torch.bool)
    routing_map[:, 0] = True
    return torch.ones(3, config.hidden), routing_map.float(), routing_map


def test_fixed_sizes_have_room_for_the_tokens_of_all_hosts_at_once() -> None:
    """A backend that had to be made anew would have the host wait in the first call."""
    sparse = cases.make_config(num_ranks=4, num_experts=64, topk=1, max_tokens=400)
    backend, *_ = make(sparse, HostGrid(4, 1, 0), row_bound=2.0)
    assert backend.within.config.max_tokens == 4 * 400 + 64  # whole tiles


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_bound_within_a_host_is_of_as_many_rows(hosts: int) -> None:
    config = cases.make_config(num_ranks=4, num_experts=16, topk=4, max_tokens=128)
    backend, _, (within,) = make(config, HostGrid(hosts, 4 // hosts, 0), row_bound=1.5)
    share = backend.within.config
    assert within.options.row_bound is not None
    rows = within.options.row_bound * share.max_tokens * share.topk
    assert rows == pytest.approx(1.5 * config.max_tokens * config.topk)


@pytest.mark.parametrize("is_shared", [True, False])
def test_backends_of_one_memory_count_once(is_shared: bool) -> None:
    backend, _, made = make(is_shared=is_shared)
    backend._backend_for([1000])
    assert len(made) == 2
    assert backend.traffic.rows_sent == (7 if is_shared else 14)
    assert len(backend.take_records()) == (1 if is_shared else 2)


def test_records_have_the_ranks_of_a_host_at_their_places() -> None:
    config = cases.make_config(num_ranks=6, num_experts=24)
    backend, *_ = make(config, HostGrid(3, 2, 2))
    (record,) = backend.take_records()
    assert record.rows_pulled == (0, 0, 3, 4, 0, 0)
    assert record.results_pushed == (0, 0, 5, 6, 0, 0)


def test_each_report_has_what_has_crossed_since_the_last() -> None:
    backend, road, _ = make()
    for rows in (5, 8, 9):
        before = road.crossed.rows
        road.crossed.rows = rows
        assert backend.take_crossed().rows == rows - before


def test_a_refusal_takes_part_in_every_launch_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other ranks launch as often, on rows of the dtype of all calls."""
    monkeypatch.setattr(planner, "MOST_LAUNCH_TOKENS", 128)
    config = cases.make_config(num_ranks=2, max_tokens=150)
    backend, road, (within,) = make(config, row_bound=2.0)
    backend._host_reads = False  # as on a GPU
    backend.refuse("ShapeError: x")
    assert within.refusals == ["ShapeError: x"] * 3
    assert road.spread_dtypes == [torch.bfloat16]


def test_the_reason_of_a_failure_is_told_though_other_hosts_have_gone_since() -> None:
    backend, road, (within,) = make()
    within.failure, within.rail = HeapError("no room"), road
    with pytest.raises(HeapError, match="within host 0 .*: no room"):
        backend.forward(*call_of(CONFIG), weights_of(CONFIG), training=False)


def test_what_a_backward_that_fails_sends_is_as_wide_as_other_hosts_expect() -> None:
    """A token has no more routes on a host than that has experts."""
    config = cases.make_config(num_ranks=2, num_experts=8, topk=6)
    backend, *_ = make(config)
    widths: list[int] = []

    class Leg:
        num_tokens = 0

        def back(self, _: object, rows: torch.Tensor) -> list[Share]:
            return [Share(0, None, rows, lambda: None)]

        def grads_of_choices(self, _: object, grads: torch.Tensor, topk: int) -> Any:
            widths.append(grads.shape[1])
            return lambda: grads

    def fail(*_: object, **__: object) -> Any:
        raise HeapError("no room")

    monkey: Any = backend
    monkey._within[-1].backward = fail
    x, weights, routing_map = call_of(config)
    choices = Choices.of(config, weights, routing_map)
    leg: Any = Leg()
    leg.out = lambda _, grad: lambda: grad
    saved = SavedOverHosts([leg], choices, None, None, backend.within, [None], [[3]], torch.float32)
    with pytest.raises(HeapError):
        backend.backward(x, saved, weights_of(config), [], [])
    assert widths == [4]


def test_weights_that_are_transposed_since_are_looked_at_again() -> None:
    backend, *_ = make()
    good = weights_of(CONFIG)
    backend.forward(*call_of(CONFIG), good, training=False)
    turned = ExpertWeights(good.fc1, good.fc2, transposed=True)
    with pytest.raises(ShapeError, match="rank 0: fc1 of local expert 0 has shape"):
        backend.forward(*call_of(CONFIG), turned, training=False)


@pytest.mark.parametrize("host", [0, 1])
def test_with_fixed_sizes_a_host_refuses_its_own_tokens_routing(host: int) -> None:
    """No host reads it before, so the launch within has to find it."""
    idx = torch.tensor([[0, 5], [3, 8], [6, 1]])
    choices = Choices.of(CONFIG, torch.ones(3, 2), idx)
    crossing = FixedCrossing.of(choices, 4, host=host, num_hosts=2, experts_per_host=4)
    share = planner.share_of_host(CONFIG, 2, 8)
    for other in range(2):
        routes = crossing.sent_routes
        found = routing_problem(share, routes.weights[other], routes.experts[other])
        assert (found is not None) == (other == host)
        if found is not None:
            assert found.startswith("topk_idx[1, 0] is 4")


def test_shares_are_added_in_the_order_of_hosts_whichever_comes_first() -> None:
    rows = (1e8, 1.0, -1e8)  # in this order the second one is lost in float32
    shares = [Share(host, None, torch.full((2, 3), rows[host]), lambda: None) for host in (2, 0, 1)]
    assert sum_of_shares(shares, 2).tolist() == [[0.0] * 3] * 2
    some = torch.tensor([1])
    shares[1] = Share(0, some, torch.full((1, 3), rows[0]), lambda: None)
    shares[2] = Share(1, some, torch.full((1, 3), rows[1]), lambda: None)
    assert sum_of_shares(shares, 2)[1].tolist() == [0.0] * 3


def test_machines_of_one_name_are_hosts_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Containers have names that their machines give out again and again."""
    monkeypatch.delenv(grid.HOST_VARIABLE, raising=False)
    monkeypatch.setattr(grid.socket, "gethostname", lambda: "worker-0")
    names = set()
    for boot in ("6f3a", "91c0"):
        (tmp_path / boot).write_text(f"{boot}\n")
        monkeypatch.setattr(grid, "_BOOT_ID", tmp_path / boot)
        names.add(grid.host_name())
    monkeypatch.setattr(grid, "_BOOT_ID", tmp_path / "none")
    assert names | {grid.host_name()} == {"worker-0 6f3a", "worker-0 91c0", "worker-0"}


def test_layers_with_other_timeouts_have_groups_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Groups:
        def __init__(self, *_: object, timeout: float, max_ctas: int | None) -> None:
            self.of = timeout, max_ctas

    monkeypatch.setattr(grid, "HostGroups", Groups)
    group: Any = "a group"
    where = HostGrid(2, 2, 0)
    found: list[Any] = [
        grid.host_groups(group, where, timeout=timeout, max_ctas=max_ctas)
        for timeout, max_ctas in ((1.0, None), (2.0, None), (1.0, 4), (1.0, None))
    ]
    assert [one.of for one in found] == [(1.0, None), (2.0, None), (1.0, 4), (1.0, None)]
    assert found[3] is found[0]


def test_events_of_exchanges_do_not_pile_up_where_nobody_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stamp = SimpleNamespace(has_passed=lambda: True, ns_since=lambda _: 1e6)
    monkeypatch.setattr(rail, "Stamp", lambda _: stamp)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    crossed = Crossed()
    watch = Stopwatch(crossed)
    for _ in range(MOST_PENDING + 1):
        with watch.timed(torch.device("cuda", 0)):
            pass
    assert crossed.ns == (MOST_PENDING + 1) * 1e6


@pytest.mark.parametrize("skips", [False, True])
def test_both_forms_of_a_routing_have_the_same_choices(skips: bool) -> None:
    """A choice of no weight is none where the layer skips routes without one."""
    config = cases.make_config(num_experts=8, topk=3, skip_zero_probs=skips)
    idx = torch.tensor([[1, 4, 6], [0, 2, 7]])
    weights = torch.tensor([[0.5, 0.0, 0.25], [0.0, 0.0, 1.0]])
    routing_map = torch.zeros(2, 8, dtype=torch.bool).scatter(1, idx, True)
    by_expert = torch.zeros(2, 8).scatter(1, idx, weights)
    for experts, wanted in zip(
        Choices.of(config, weights, idx).experts.tolist(),
        Choices.of(config, by_expert, routing_map).experts.tolist(),
        strict=True,
    ):
        assert sorted(experts) == sorted(wanted)
    gone = Choices.of(config, weights, idx).experts < 0
    assert gone.tolist() == (
        [[False, True, False], [True, True, False]] if skips else [[False] * 3] * 2
    )
