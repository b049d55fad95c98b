"""Expert parallelism over hosts against the oracle, on four processes that are 2 or 4 hosts."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import planner
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Backend, TrafficCounters
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError, FlashMoEError, HeapError, ShapeError
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.hosts.crossing import Share, sum_of_shares
from flashmoe_megatron.hosts.grid import HOST_VARIABLE, HostGrid, arrange
from flashmoe_megatron.hosts.guests import GuestPlan, Guests, plan_guests
from flashmoe_megatron.hosts.rail import Crossed, Lookout
from flashmoe_megatron.layer import moe_router_forward
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.select import (
    check_combine,
    check_fp8_on_kernel,
    check_over_hosts,
    select_backend,
)
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.telemetry.record import LaunchRecord, ReplicaRecord
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.distributed import RankPool
from tests.unit import additions, cases, records
from tests.unit.separate import ROUTINGS, TOKENS, compare, oracle

CONFIG = cases.make_config(num_ranks=4, num_experts=16, topk=4, max_tokens=40)
Found = dict[str, torch.Tensor]


@contextlib.contextmanager
def on_host(name: object) -> Iterator[None]:
    """Makes this process one of a host's."""
    with mock.patch.dict(os.environ, {HOST_VARIABLE: f"host{name}"}):
        yield


def make_backend(
    group: dist.ProcessGroup, config: MoEConfig, hosts: int, **options: Any
) -> HostsBackend:
    with on_host(dist.get_rank(group) // (config.num_ranks // hosts)):
        backend = select_backend(config, group, "cpu", **options)
    assert isinstance(backend, HostsBackend)
    return backend


def leaves_of(config: MoEConfig, inputs: cases.Inputs, rank: int) -> list[torch.Tensor]:
    """Copies of a rank's tokens, probabilities and experts, which take gradients."""
    first = rank * config.num_local_experts
    experts = slice(first, first + config.num_local_experts)
    own = (inputs.x[rank], inputs.probs[rank], *inputs.fc1[experts], *inputs.fc2[experts])
    return [tensor.clone().requires_grad_() for tensor in own]


def weights_of(config: MoEConfig, leaves: list[torch.Tensor]) -> ExpertWeights:
    count = config.num_local_experts
    return ExpertWeights(tuple(leaves[2 : 2 + count]), tuple(leaves[2 + count : 2 + 2 * count]))


def found_in(config: MoEConfig, out: torch.Tensor, leaves: list[torch.Tensor]) -> Found:
    """Results by the oracle's names."""
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    count = config.num_local_experts
    fc1, fc2 = torch.stack(grads[2 : 2 + count]), torch.stack(grads[2 + count : 2 + 2 * count])
    found = {"out": out.detach(), "grad x": grads[0], "grad probs": grads[1]}
    return {**found, "grad fc1": fc1, "grad fc2": fc2}


def step(backend: HostsBackend, inputs: cases.Inputs, *, by_choices: bool = False) -> Found:
    """One forward and backward of this rank."""
    config, rank = backend.config, backend.rank
    leaves = leaves_of(config, inputs, rank)
    x, probs, routing_map = leaves[0], leaves[1], inputs.routing_map[rank]
    routing: dict[str, torch.Tensor] = {}
    given: tuple[torch.Tensor | None, torch.Tensor | None] = (probs, routing_map)
    if by_choices:
        idx, _ = cases.as_choices(config, probs.detach(), routing_map)
        weight = probs.gather(1, idx.clamp(min=0)).masked_fill(idx < 0, float("nan"))
        routing, given = {"topk_idx": idx, "topk_weight": weight}, (None, None)
    out = moe_apply(backend, x, *given, weights_of(config, leaves), **routing)
    out.backward(inputs.grad_out[rank])
    return found_in(config, out, leaves)


def assert_same(got: Found, want: Found) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), name


def run_forms(
    group: dist.ProcessGroup, config: MoEConfig, hosts: int, inputs: cases.Inputs
) -> tuple[list[Found], TrafficCounters]:
    """One layer in every form: what a forward keeps, choices, fixed sizes, overlap."""
    backend = make_backend(group, config, hosts)
    found = step(backend, inputs)
    traffic = backend.traffic
    crossed = backend.take_crossed()
    assert (crossed.calls, crossed.rows) == (2, traffic.rows_crossed)
    assert crossed.ns > 0
    assert backend.take_crossed().calls == 0
    assert_same(step(backend, inputs), found)
    assert_same(step(backend, inputs, by_choices=True), found)
    for keep in ("preactivations", "inputs"):
        assert_same(step(make_backend(group, config, hosts, keep=keep), inputs), found)
    forms = [found]
    for options in ({"row_bound": 1e6}, {"host_overlap": 1}, {"host_overlap": 2}):
        other = make_backend(group, config, hosts, **options)
        forms.append(step(other, inputs))
        assert_same(step(other, inputs), forms[-1])
        if "row_bound" in options:  # twice out and back with every token, also to and from others
            assert other.traffic.rows_crossed == 2 * 4 * (hosts - 1) * config.max_tokens
        if "host_overlap" in options:
            assert other.traffic.bytes_crossed == 2 * traffic.bytes_crossed
            for name in ("out", "grad x", "grad probs"):
                assert_close(name, forms[-1][name], found[name], rel_l2=2e-2)
    return forms, traffic


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
def test_two_levels_compute_what_one_does(ranks: RankPool, routing: cases.Routing, hosts: int):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = cases.make_inputs(CONFIG, routing, TOKENS[4], dtype=dtype)
        found = ranks.run(run_forms, CONFIG, hosts, inputs)
        for (forms, _), want in zip(found, oracle(CONFIG, inputs), strict=True):
            for got in forms:
                compare(got, want, dtype, times=1.2)


@pytest.mark.parametrize("is_listed", [False, True])
def test_shares_of_hosts_are_rounded_once(is_listed: bool):
    """Each of two small shares would be lost if their sum were rounded after each host."""
    tokens = torch.arange(2) if is_listed else None
    shares = [
        Share(host, tokens, torch.full((2, 3), value, dtype=torch.bfloat16), lambda: None)
        for host, value in ((2, 2**-8), (0, 1.0), (1, 2**-8))
    ]
    total = sum_of_shares(shares, 2)
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, torch.full((2, 3), 1 + 2**-7, dtype=torch.bfloat16))


def run_with_replicas(
    group: dist.ProcessGroup, inputs: cases.Inputs, options: dict[str, Any]
) -> tuple[Found, Found, set[int]]:
    """A step without spare slots and one with them, and the experts that had replicas here.

    Each is taken twice, with another step's forward between forward and backward.
    """
    results: list[Found] = []
    held: set[int] = set()
    for slots in ({}, {"spare_slots": 2}):
        backend = make_backend(group, CONFIG, 2, **slots, **options)
        want = step(backend, inputs)
        leaves = leaves_of(CONFIG, inputs, backend.rank)
        routing_map = inputs.routing_map[backend.rank]
        out = moe_apply(backend, *leaves[:2], routing_map, weights_of(CONFIG, leaves))
        other = cases.make_inputs(CONFIG, cases.to_one_rank, TOKENS[4], dtype=inputs.x[0].dtype)
        step(backend, other)
        for record in backend.take_records():
            held |= {expert for expert, _ in record.replicas.rows} if record.replicas else set()
        out.backward(inputs.grad_out[backend.rank])
        assert_same(found_in(CONFIG, out, leaves), want)
        results.append(want)
    return results[0], results[1], held


@pytest.mark.parametrize(
    "options",
    [
        {"replica_policy": "balance"},
        {"replica_policy": "balance", "host_overlap": 2},
        {"replica_policy": "popular", "row_bound": 1e6},
        {"replica_policy": "popular", "keep": "preactivations"},
    ],
    ids=str,
)
def test_replicas_within_hosts_change_no_bit(ranks: RankPool, options: dict[str, Any]):
    """Each host plans from the tokens that have come to it, its own experts alone."""
    for dtype, rel_l2 in {torch.float32: 1e-6, torch.bfloat16: 6e-3}.items():
        inputs = cases.make_inputs(CONFIG, cases.skewed, TOKENS[4], dtype=dtype)
        found = ranks.run(run_with_replicas, inputs, options)
        for rank, (want, got, held) in enumerate(found):
            for name in ("out", "grad x", "grad probs"):
                assert torch.equal(got[name], want[name]), (name, dtype)
            for name in ("grad fc1", "grad fc2"):
                assert_close(name, got[name], want[name], rel_l2=rel_l2)
            local, first = CONFIG.num_local_experts, rank // 2 * (CONFIG.num_experts // 2)
            peer = range(first, first + 2 * local)
            own = range(rank * local, (rank + 1) * local)
            assert all(expert in peer and expert not in own for expert in held)
        assert any(held for _, _, held in found), "there is no replica"


def run_with_guests(
    group: dist.ProcessGroup, inputs: cases.Inputs, hosts: int, options: dict[str, Any]
) -> tuple[list[Found], list[tuple[tuple[int, ...], ...]], list[int]]:
    """Steps by routes without and with guests, each plan's guests, and the rows that crossed."""
    results, held = [], []
    plan = Guests.plan

    def noted(guests: Guests, counts: torch.Tensor) -> GuestPlan:
        held.append(plan(guests, counts).held)
        return plan(guests, counts)

    rows_crossed = []
    with mock.patch.object(Guests, "plan", noted):
        for slots in (0, 2):
            backend = make_backend(
                group, CONFIG, hosts, combine="routes", host_slots=slots, **options
            )
            results.append(step(backend, inputs))
            rows_crossed.append(backend.traffic.rows_crossed)
            assert_same(step(backend, inputs, by_choices=True), results[-1])
            leaves = leaves_of(CONFIG, inputs, backend.rank)
            routing_map = inputs.routing_map[backend.rank]
            out = moe_apply(backend, *leaves[:2], routing_map, weights_of(CONFIG, leaves))
            other = cases.make_inputs(CONFIG, cases.to_one_rank, TOKENS[4], dtype=inputs.x[0].dtype)
            step(backend, other)  # and its guests take the others' room
            out.backward(inputs.grad_out[backend.rank])
            assert_same(found_in(CONFIG, out, leaves), results[-1])
    return results, held, rows_crossed


@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        (2, {"spare_slots": 2}),
        (2, {"host_overlap": 2, "spare_slots": 1, "replica_policy": "popular"}),
        (4, {"keep": "preactivations", "host_overlap": 1}),
    ],
    ids=str,
)
def test_experts_spread_over_hosts_change_no_bit(
    ranks: RankPool, hosts: int, options: dict[str, Any]
):
    for dtype, rel_l2 in {torch.float32: 1e-6, torch.bfloat16: 6e-3}.items():
        inputs = cases.make_inputs(CONFIG, cases.uniform, TOKENS[4], dtype=dtype)
        found = ranks.run(run_with_guests, inputs, hosts, options)
        everything = oracle(CONFIG, inputs)
        for rank, ((want, got), held, crossed) in enumerate(found):
            compare(want, everything[rank], dtype, times=1.2)
            for name in ("out", "grad x", "grad probs"):
                assert torch.equal(got[name], want[name]), (name, dtype)
            for name in ("grad fc1", "grad fc2"):
                assert_close(name, got[name], want[name], rel_l2=rel_l2)
            assert held[0] == found[0][1][0], "plans differ"
            assert any(held[0]), "there is no guest"
            local, places = CONFIG.num_local_experts, 4 // hosts
            for expert in held[0][rank]:
                owner = expert // local
                assert owner % places == rank % places
                assert owner // places != rank // places
            assert crossed[0] > crossed[1]


def run_by_routes(group: dist.ProcessGroup, inputs: cases.Inputs) -> list[Found]:
    """Steps on one host without replicas and with them, and with fixed sizes."""
    forms: list[dict[str, Any]] = [{}, {"spare_slots": 2}, {"row_bound": 1e6}]
    return [
        step(make_backend(group, CONFIG, 1, combine="routes", **options), inputs)
        for options in forms
    ]


def test_routes_travel_alone_on_one_host(ranks: RankPool):
    inputs = cases.make_inputs(CONFIG, cases.skewed, TOKENS[4], dtype=torch.bfloat16)
    found = ranks.run(run_by_routes, inputs)
    for (got, *others), want in zip(found, oracle(CONFIG, inputs), strict=True):
        compare(got, want, torch.bfloat16, times=1.2)
        for other in others:
            for name in ("out", "grad x", "grad probs"):
                assert torch.equal(other[name], got[name]), name


CONFIGS = {
    "more choices than a host has experts": {"topk": 6, "num_experts": 8},
    "topk 16": {"topk": 16, "num_experts": 64},
    "topk 1": {"topk": 1},
    "routes of no weight": {"skip_zero_probs": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes(ranks: RankPool, name: str):
    config = replace(CONFIG, **CONFIGS[name])
    inputs = cases.make_inputs(config, cases.uniform, TOKENS[4], dtype=torch.float32)
    if config.skip_zero_probs:
        for probs, routing_map in zip(inputs.probs, inputs.routing_map, strict=True):
            probs[::2] = 0
            routing_map &= probs != 0  # for the oracle, which knows of no such routes
    for hosts in (2, 4):
        found = ranks.run(run_forms, config, hosts, inputs)
        for (forms, _), want in zip(found, oracle(config, inputs), strict=True):
            for got in forms:
                compare(got, want, torch.float32)


@pytest.mark.parametrize("hosts", [2, 4])
def test_more_tokens_than_one_launch_takes(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, hosts: int
):
    config = replace(CONFIG, max_tokens=150)
    inputs = cases.make_inputs(config, cases.skewed, [150, 0, 80, 7], dtype=torch.float32)
    monkeypatch.setattr(planner, "MOST_LAUNCH_TOKENS", 128)
    assert planner.plan_launches(config, hosts, 300) == (3, 128)
    found = ranks.run(run_in_parts, config, hosts, inputs)
    for (forms, _), want in zip(found, oracle(config, inputs), strict=True):
        for got in forms:
            compare(got, want, torch.float32)


def run_adapted(group: dist.ProcessGroup, inputs: cases.Inputs, options: dict[str, int]) -> Any:
    backend = make_backend(group, CONFIG, 2, **options)
    return additions.results(backend, inputs, "shared outer", adapts="fc1 fc2")


@pytest.mark.parametrize("options", [{}, {"host_overlap": 2}], ids=str)
def test_gradients_of_low_rank_additions(ranks: RankPool, options: dict[str, int]):
    """Gradients of several launches add up."""
    inputs = cases.make_inputs(CONFIG, cases.skewed, TOKENS[4], dtype=torch.float32)
    for found in ranks.run(run_adapted, inputs, options):
        additions.assert_alike(found)


def run_refused(group: dist.ProcessGroup, inputs: cases.Inputs) -> str:
    with pytest.raises(ConfigError) as caught:
        run_adapted(group, inputs, {"spare_slots": 1})
    return str(caught.value)


def test_low_rank_additions_beside_spare_slots_are_refused(ranks: RankPool):
    """The slots are those within a host; every rank is told before anything travels."""
    inputs = cases.make_inputs(CONFIG, cases.skewed, TOKENS[4], dtype=torch.float32)
    for words in ranks.run(run_refused, inputs):
        assert "additions to experts' matrices with spare_slots=1, which compute other" in words


def run_in_parts(group: dist.ProcessGroup, *args: Any) -> Any:
    with mock.patch.object(planner, "MOST_LAUNCH_TOKENS", 128):
        return run_forms(group, *args)


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_token_crosses_once_to_each_host(ranks: RankPool, hosts: int):
    """Out and back, forward and backward; not once for each of its experts there."""
    inputs = cases.make_inputs(CONFIG, cases.uniform, [40] * 4, dtype=torch.bfloat16)
    found = ranks.run(run_forms, CONFIG, hosts, inputs)
    per_host = CONFIG.num_experts // hosts
    needs = [
        routing_map.view(40, hosts, per_host).any(2).float() for routing_map in inputs.routing_map
    ]
    for rank, (_, traffic) in enumerate(found):
        place = rank % (4 // hosts)
        host = rank // (4 // hosts)
        own = int(needs[rank].sum() - needs[rank][:, host].sum())
        others = range(place, 4, 4 // hosts)
        served = int(sum(needs[other][:, host].sum() for other in others if other != rank))
        assert own < int(inputs.routing_map[rank].sum()) / 1.5  # by route it would be many more
        assert traffic.rows_crossed == 2 * (own + served)
        pairs, grads = own * CONFIG.topk * 8, served * CONFIG.topk * 4
        assert traffic.bytes_crossed == traffic.rows_crossed * CONFIG.hidden * 2 + pairs + grads


def run_biased(group: dist.ProcessGroup, inputs: cases.Inputs, hosts: int) -> list[torch.Tensor]:
    """Transposed experts with biases, over hosts or, with none, on one level."""
    rank = dist.get_rank(group)
    backend: Backend = ReferenceBackend(CONFIG, group)
    if hosts:
        backend = make_backend(group, CONFIG, hosts)
    leaves = leaves_of(CONFIG, inputs, rank)
    plain = weights_of(CONFIG, leaves)
    g = cases.generator(rank)
    biases = [
        [torch.randn(width, generator=g).requires_grad_() for _ in plain.fc1]
        for width in (CONFIG.fc1_rows, CONFIG.hidden)
    ]
    weights = ExpertWeights(
        tuple(weight.t().contiguous() for weight in plain.fc1),
        tuple(weight.t().contiguous() for weight in plain.fc2),
        transposed=True,
        fc1_bias=tuple(biases[0]),
        fc2_bias=tuple(biases[1]),
    )
    out = moe_apply(backend, *leaves[:2], inputs.routing_map[rank], weights)
    out.backward(inputs.grad_out[rank])
    grads = [leaf.grad for leaf in (*leaves, *biases[0], *biases[1])]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def run_router(group: dist.ProcessGroup, inputs: cases.Inputs, hosts: int) -> list[torch.Tensor]:
    """A router that the layer runs, over hosts or on one level."""
    rank = dist.get_rank(group)
    backend: Backend = ReferenceBackend(CONFIG, group)
    if hosts:
        backend = make_backend(group, CONFIG, hosts)
    leaves = leaves_of(CONFIG, inputs, rank)
    router = torch.randn(CONFIG.num_experts, CONFIG.hidden, generator=cases.generator(3))
    router.requires_grad_()
    found = moe_router_forward(leaves[0], router, weights_of(CONFIG, leaves), backend=backend)
    (found.out * inputs.grad_out[rank]).sum().backward()
    grads = [leaf.grad for leaf in (router, leaves[0], *leaves[2:])]
    return [found.out.detach(), found.probs.detach(), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("run", [run_biased, run_router])
def test_what_one_level_offers(ranks: RankPool, run: Any):
    inputs = cases.make_inputs(CONFIG, cases.uniform, TOKENS[4], dtype=torch.float32)
    want = ranks.run(run, inputs, 0)
    for hosts in (2, 4):
        for got, wanted in zip(ranks.run(run, inputs, hosts), want, strict=True):
            for ours, theirs in zip(got, wanted, strict=True):
                assert_close("result", ours, theirs, rel_l2=1e-5)


def several_in_flight(group: dist.ProcessGroup, inputs: cases.Inputs) -> None:
    """Forwards of two sizes before their backwards, in the order of a pipeline."""
    backend = make_backend(group, CONFIG, 2)
    small = replace(
        inputs,
        **{
            name: [part[: len(part) // 2] for part in getattr(inputs, name)]
            for name in ("x", "probs", "routing_map", "grad_out")
        },
    )
    alone = [step(backend, each) for each in (small, inputs, small)]
    pending = []
    for each in (small, inputs, small):
        leaves = leaves_of(CONFIG, each, backend.rank)
        routing_map = each.routing_map[backend.rank]
        out = moe_apply(backend, *leaves[:2], routing_map, weights_of(CONFIG, leaves))
        pending.append((each, leaves, out))
    for want, (each, leaves, out) in zip(alone, pending, strict=True):
        out.backward(each.grad_out[backend.rank])
        assert_same(found_in(CONFIG, out, leaves), want)


def growing(group: dist.ProcessGroup, inputs: cases.Inputs) -> list[int]:
    """A launch is laid out for what tokens need; a forward before it grows keeps its own."""
    config = replace(CONFIG, num_experts=64, topk=1, max_tokens=400)
    backend = make_backend(group, config, 4)
    first = backend.within.config.max_tokens
    want = step(backend, inputs)
    leaves = leaves_of(config, inputs, backend.rank)
    routing_map = inputs.routing_map[backend.rank]
    out = moe_apply(backend, *leaves[:2], routing_map, weights_of(config, leaves))
    bounds = [first, backend.within.config.max_tokens]
    skewed = cases.make_inputs(config, cases.to_one_rank, [400] * 4, dtype=torch.float32)
    step(backend, skewed)
    bounds.append(backend.within.config.max_tokens)
    out.backward(inputs.grad_out[backend.rank])
    assert_same(found_in(config, out, leaves), want)
    return bounds


def test_several_in_flight(ranks: RankPool):
    inputs = cases.make_inputs(CONFIG, cases.skewed, TOKENS[4], dtype=torch.float32)
    ranks.run(several_in_flight, inputs)


def test_sizes_follow_the_counts(ranks: RankPool):
    config = replace(CONFIG, num_experts=64, topk=1, max_tokens=400)
    inputs = cases.make_inputs(config, cases.uniform, [100] * 4, dtype=torch.float32)
    for first, before, after in ranks.run(growing, inputs):
        # A token goes to 0.75 other hosts on average.
        assert first == before == 896
        assert after == 1664  # whole tiles


def rows_sent_by(
    group: dist.ProcessGroup, few: cases.Inputs, many: cases.Inputs
) -> tuple[int, int]:
    """Rows of a backend that has grown, and of two that have not had to."""
    config = replace(CONFIG, num_experts=64, topk=1, max_tokens=400)
    grown, *apart = (make_backend(group, config, 2) for _ in range(3))
    step(grown, few)
    before = grown.within
    step(grown, many)
    assert grown.within is not before
    for backend, inputs in zip(apart, (few, many), strict=True):
        step(backend, inputs)
    return grown.traffic.rows_sent, sum(backend.traffic.rows_sent for backend in apart)


def test_a_backend_that_has_grown_counts_what_it_sent_before(ranks: RankPool):
    config = replace(CONFIG, num_experts=64, topk=1, max_tokens=400)
    few, many = (
        cases.make_inputs(config, routing, [tokens] * 4, dtype=torch.float32)
        for routing, tokens in ((cases.uniform, 100), (cases.to_one_rank, 400))
    )
    found = ranks.run(rows_sent_by, few, many)
    assert all(rows == wanted for rows, wanted in found)
    assert all(rows > 0 for rows, _ in found)


class Within:
    """A backend within a host that has records to tell."""

    def __init__(self, config: MoEConfig, *_: object) -> None:
        self.config, self.records = config, [records.record()]

    def take_records(self) -> list[LaunchRecord]:
        return self.records


def test_records_have_ranks_at_their_places_in_the_group():
    rail: Any = SimpleNamespace(grid=HostGrid(2, 2, 3), crossed=Crossed())
    replicas = ReplicaRecord(rows=((1, 5),), num_bytes=6)
    told = records.record(rows_pulled=(1, 2), results_pushed=(3, 4), replicas=replicas)
    backend = HostsBackend(CONFIG, rail, Within)  # type: ignore[arg-type]
    backend.within.records = [told, records.record(rows_pulled=(), results_pushed=())]
    first, second = backend.take_records()
    assert (first.rows_pulled, first.results_pushed) == ((0, 0, 1, 2), (0, 0, 3, 4))
    assert (second.rows_pulled, second.results_pushed) == ((), ())
    assert (first.replicas, second.replicas) == (replicas._replace(rows=((9, 5),)), None)


def growing_alone(group: dist.ProcessGroup, bad: int, inputs: cases.Inputs) -> list[int]:
    """A host that has no room for larger launches ends the call on all of them."""
    config = replace(CONFIG, num_experts=64, topk=1, max_tokens=400)
    backend = make_backend(group, config, 4)
    make = backend._make_within

    def full(*_: object) -> Backend:
        raise HeapError("no room")

    if backend.rank == bad:
        backend._make_within = full
    bounds = []
    said = rf"^rank {bad}: within host {bad} \(ranks {bad} to {bad} .*: no room$"
    with pytest.raises(HeapError, match=said):
        step(backend, inputs)
    bounds.append(backend.within.config.max_tokens)
    backend._make_within = make
    step(backend, inputs)
    return [*bounds, backend.within.config.max_tokens]


@pytest.mark.parametrize("bad", [0, 2])
def test_launches_grow_on_all_hosts_or_on_none(ranks: RankPool, bad: int):
    config = replace(CONFIG, num_experts=64, topk=1, max_tokens=400)
    inputs = cases.make_inputs(config, cases.to_one_rank, [400] * 4, dtype=torch.float32)
    assert ranks.run(growing_alone, bad, inputs) == [[896, 1664]] * 4


NAMES = {
    ("a", "a", "b", "b"): HostGrid(2, 2, 0),
    ("b", "a"): HostGrid(2, 1, 0),
    ("a",) * 8: HostGrid(1, 8, 0),
    tuple(f"h{rank // 8}" for rank in range(256)): HostGrid(32, 8, 0),
}
REFUSED = {
    (
        "a",
        "b",
        "a",
        "b",
    ): r"ranks of a host are not neighbours .*0 to 0 on a, 1 to 1 on b, 2 to 2 on",
    ("a", "a", "b"): r"different numbers of its ranks .*0 to 1 on a, 2 to 2 on b",
    ("a",) * 9: "a host has 9 of its ranks",
    tuple(map(str, range(33))): "there are 33 hosts",
}


def test_what_hosts_cannot_have():
    grid, slots = HostGrid(2, 2, 0), BackendOptions(spare_slots=1)
    for options, said in (
        ({"host_overlap": 1, "row_bound": 2.0}, "host_overlap=1 with row_bound=2.0, .* wanted 0"),
        ({"row_bound": "auto"}, "row_bound='auto' in an expert-parallel group over 2 hosts"),
        ({"host_overlap": 2, "reserved_sms": 2}, "reserved_sms=2: wanted at least 4"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_over_hosts(BackendOptions(**options), grid, is_kernel=True)
    with pytest.raises(ConfigError, match="over 2 hosts of one rank, .*: wanted 0"):
        check_over_hosts(slots, HostGrid(2, 1, 0), is_kernel=False)
    with pytest.raises(ConfigError, match="placement='lookahead', .*: wanted 'launch'"):
        check_over_hosts(replace(slots, placement="lookahead"), grid, is_kernel=False)
    check_over_hosts(slots, grid, is_kernel=False)
    check_over_hosts(slots, grid, is_kernel=True)
    check_over_hosts(BackendOptions(host_overlap=2, reserved_sms=0), grid, is_kernel=False)
    check_over_hosts(BackendOptions(host_overlap=2), grid, is_kernel=True)
    check_over_hosts(replace(slots, placement="off"), HostGrid(2, 1, 0), is_kernel=True)


def test_where_no_row_can_travel_for_each_route():
    grid, routes = HostGrid(2, 2, 0), {"combine": "routes"}
    wide = replace(CONFIG, hidden=128, intermediate=128, experts="fp8")
    for config, options, kind, said in (
        (CONFIG, routes, "scheduled", "'routes' on the backend 'scheduled': wanted 'shares'"),
        (CONFIG, {"host_slots": 1}, "kernel", "host_slots=1 with combine='shares', .*'routes'"),
        (
            CONFIG,
            {**routes, "host_slots": 1, "row_bound": 2.0},
            "reference",
            "row_bound=2.0, .* none",
        ),
        (wide, {**routes, "host_slots": 1}, "reference", "experts='fp8', .* wanted 'bf16'"),
        (CONFIG, {**routes, "host_slots": 5}, "kernel", "2 hosts of 4 .* wanted at most 4,"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_combine(config, BackendOptions(**options), grid, kind, is_alone=False)
    with pytest.raises(ConfigError, match="'routes' without a process group: wanted 'shares'"):
        select_backend(replace(CONFIG, num_ranks=1), None, "cpu", combine="routes")
    most = BackendOptions(**routes, host_slots=4)
    check_combine(CONFIG, most, grid, "kernel", is_alone=False)


def test_fp8_on_the_kernel_is_refused_where_no_gpu_has_run_it():
    shape = {"hidden": 128, "intermediate": 128}
    fp8, dgrad = (replace(CONFIG, **shape, experts=kind) for kind in ("fp8", "fp8_dgrad"))
    plain, by_route = BackendOptions(), BackendOptions(combine="routes")
    one_host, two = HostGrid(1, 4, 0), HostGrid(2, 2, 0)
    for config, options, grid, said in (
        (fp8, by_route, one_host, "='fp8' .* combine='routes', .* wanted 'shares', or"),
        (dgrad, by_route, one_host, "='fp8_dgrad' .* combine='routes', .* wanted 'shares', or"),
        (dgrad, plain, two, "='fp8_dgrad' .* over 2 hosts, .* wanted experts='fp8', or"),
    ):
        with pytest.raises(ConfigError, match=f"experts{said} experts='bf16'"):
            check_fp8_on_kernel(config, options, grid, "kernel")
        check_fp8_on_kernel(config, options, grid, "reference")
    check_fp8_on_kernel(CONFIG, by_route, two, "kernel")
    check_fp8_on_kernel(fp8, plain, two, "kernel")
    check_fp8_on_kernel(dgrad, plain, one_host, "kernel")


def test_each_host_takes_what_most_of_its_own_routes_choose():
    """Two hosts have two ranks with two experts each; a guest is where its owner's place is."""
    counts = torch.tensor(
        [
            [0, 0, 0, 0, 5, 7, 1, 2],
            [9, 0, 0, 0, 0, 0, 1, 2],
            [1, 1, 8, 3, 50, 0, 0, 0],
            [1, 1, 0, 3, 0, 0, 0, 0],
        ]
    )
    grid = HostGrid(2, 2, 0)
    plan = plan_guests(counts, grid, 1, 3)
    assert plan.held == ((5,), (7,), (), (2,))
    assert plan.slot_of.tolist() == [[0, 1, 3, 4, 6, 2, 9, 5], [0, 1, 11, 4, 6, 7, 9, 10]]
    # What the guests are chosen for stays.
    assert plan.leaving(counts, grid) == [[0, 6], [0, 1], [5, 0], [5, 0]]
    assert plan_guests(counts, grid, 2, 1).held == ((4, 5), (6, 7), (0, 1), (2, 3))
    assert plan_guests(counts, grid, 2, 100).is_empty


def test_grids():
    for names, grid in NAMES.items():
        assert arrange(names, 0) == grid
    for names, said in REFUSED.items():
        with pytest.raises(ConfigError, match=said + ".*wanted one block of ranks on every host"):
            arrange(names, 0)


def call_with(
    group: dist.ProcessGroup, hosts: int, bad: int, inputs: cases.Inputs
) -> dict[str, str]:
    """What every rank hears if one alone calls with something wrong; then all is well again."""
    said = {}
    by_route = {"combine": "routes", "host_slots": 2}
    for options in ({}, {"row_bound": 1e6}, by_route):
        backend = make_backend(group, CONFIG, hosts, **options)
        rank = backend.rank
        want = step(backend, inputs)
        nan, many, short = (inputs.probs[rank].clone() for _ in range(3))
        nan[:1][inputs.routing_map[rank][:1]] = torch.nan
        all_experts = torch.ones_like(inputs.routing_map[rank])
        weight_of_nan = short[:, :1].clone()
        weight_of_nan[3:4] = torch.nan
        wrong: dict[str, tuple[Any, ...]] = {
            "nan": (inputs.x[rank], nan, inputs.routing_map[rank]),
            "many": (inputs.x[rank], many, all_experts),
            "shape": (inputs.x[rank][:, :32], short, inputs.routing_map[rank]),
            "again": (inputs.x[rank], short[:, :2].contiguous(), 0 * all_experts[:, :2].int()),
            "outside": (inputs.x[rank], short[:, :1].contiguous(), 16 * all_experts[:, :1].int()),
            "nan weight": (inputs.x[rank], weight_of_nan, all_experts[:, :1].int()),
        }
        for name, call in wrong.items():
            if rank != bad:
                call = (inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank])
            leaves = leaves_of(CONFIG, inputs, rank)
            x, *routing = call
            names = ("probs", "routing_map")
            if routing[1].dtype == torch.int32:
                names = ("topk_weight", "topk_idx")
            given = {"probs": None, "routing_map": None} | dict(zip(names, routing, strict=True))
            with pytest.raises(FlashMoEError) as raised:
                moe_apply(backend, x, weights=weights_of(CONFIG, leaves), **given)
            said[f"{name}, {options}"] = f"{raised.type.__name__}: {raised.value}"
        assert_same(step(backend, inputs), want)
    return said


WRONG = {
    "nan": "RoutingError: rank {}: the probability of token 0 for expert ",
    "many": "RoutingError: rank {}: token 0 selects 16 experts ({} such tokens in all), wanted at",
    "shape": "ShapeError: rank {}: x has shape ({}, 32), wanted [num_tokens, 64]",
    "again": "RoutingError: rank {}: topk_idx[0] names expert 0 2 times, wanted distinct experts",
    "outside": "RoutingError: rank {}: topk_idx[0, 0] is 16, wanted an expert id of 0 to 15",
    "nan weight": "RoutingError: rank {}: topk_weight[3, 0] is NaN, wanted a number",
}


@pytest.mark.parametrize(("hosts", "bad"), [(2, 0), (2, 3), (4, 2)])
def test_a_refusal_of_one_rank_ends_the_call_on_all_hosts(ranks: RankPool, hosts: int, bad: int):
    tokens = [9, 0, 33, 16]
    inputs = cases.make_inputs(CONFIG, cases.uniform, tokens, dtype=torch.float32)
    for said in ranks.run(call_with, hosts, bad, inputs):
        assert len(said) == 3 * len(WRONG)
        for name, message in said.items():
            wanted = WRONG[name.split(",")[0]].format(bad, tokens[bad])
            assert message.startswith(wanted), name


def fail_within(group: dist.ProcessGroup, inputs: cases.Inputs) -> list[str]:
    """A host whose experts receive too many rows fails alone; the others hear in the next call."""
    backend = make_backend(group, CONFIG, 2, row_bound=1.0)
    rank = backend.rank
    said = []
    for _ in range(2):
        leaves = leaves_of(CONFIG, inputs, rank)
        try:
            out = moe_apply(
                backend, *leaves[:2], inputs.routing_map[rank], weights_of(CONFIG, leaves)
            )
            said.append("NaN" if bool(out.isnan().any()) else "finite")
        except FlashMoEError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_failure_within_a_host_reaches_the_others(ranks: RankPool):
    config = CONFIG
    inputs = cases.make_inputs(config, cases.to_one_rank, [40] * 4, dtype=torch.float32)
    found = ranks.run(fail_within, inputs)
    within = "within host 1 (ranks 2 to 3 of the expert-parallel group): rank 1 was to receive"
    assert [said[0][:3] for said in found[:2]] == ["NaN", "NaN"]
    for first, _ in found[2:]:
        assert first.startswith(f"RowBoundError: {within}")
    for rank, (_, second) in enumerate(found):
        assert second.startswith(f"RowBoundError: rank {max(rank, 2)}: {within}")


def refuse_backward(
    group: dist.ProcessGroup, hosts: int, bad: int, inputs: cases.Inputs
) -> list[str]:
    """A gradient that one rank alone cannot use: what each gets, and hears in the next call."""
    said = []
    by_route = {"combine": "routes", "host_slots": 2}
    for options in ({}, {"row_bound": 1e6}, {"host_overlap": 2}, by_route):
        backend = make_backend(group, CONFIG, hosts, **options)
        want = step(backend, inputs)
        rank = backend.rank
        for wrong in ("shape", "dtype"):
            leaves = leaves_of(CONFIG, inputs, rank)
            weights = weights_of(CONFIG, leaves)
            call = leaves[0].detach(), leaves[1].detach(), inputs.routing_map[rank]
            out, saved = backend.forward(*call, weights, training=True)
            grads = [
                [WeightGrad(torch.empty_like(one), False) for one in kind]
                for kind in (weights.fc1, weights.fc2)
            ]
            if rank == bad:
                out = out[:, 1:] if wrong == "shape" else out.double()
            try:
                backend.backward(out, saved, weights, *grads)
                # What that rank's tokens contribute to everyone's experts.
                assert all(one.buffer.isnan().any() for kind in grads for one in kind)
                said.append("NaN")
            except FlashMoEError as error:
                said.append(f"{type(error).__name__}: {error}")
            with pytest.raises(FlashMoEError) as raised:
                backend.forward(*call, weights, training=True)
            said.append(f"{raised.type.__name__}: {raised.value}")
        assert_same(step(backend, inputs), want)
    return said


@pytest.mark.parametrize(("hosts", "bad"), [(2, 1), (4, 2)])
def test_a_backward_that_one_rank_refuses_ends_on_all_hosts(ranks: RankPool, hosts: int, bad: int):
    inputs = cases.make_inputs(CONFIG, cases.uniform, [40] * 4, dtype=torch.float32)
    of_shape = "ShapeError: {}grad_out has shape (40, 63), wanted [40, 64]"
    of_dtype = "ShapeError: {}grad_out is torch.float64 on cpu, wanted torch.float32 on cpu"
    for rank, said in enumerate(ranks.run(refuse_backward, hosts, bad, inputs)):
        for now, later, wanted in zip(said[::2], said[1::2], [of_shape, of_dtype] * 4, strict=True):
            assert now.startswith(wanted.format("") if rank == bad else "NaN")
            assert later.startswith(wanted.format(f"rank {bad}: "))


def other_weights(group: dist.ProcessGroup, inputs: cases.Inputs) -> str:
    """A weight that is where a known one was, until it was freed, is another one."""
    backend = make_backend(group, CONFIG, 2)
    rank = backend.rank
    leaves = [leaf.detach() for leaf in leaves_of(CONFIG, inputs, rank)]
    call = (*leaves[:2], inputs.routing_map[rank])
    weights = weights_of(CONFIG, leaves)
    backend.forward(*call, weights, training=False)
    where = id(weights.fc1[0])
    others = weights.fc1[1:]
    fc2 = weights.fc2
    del leaves, weights
    found = []
    while not found or id(found[-1]) != where:
        assert len(found) < 10_000, "no tensor came to the same place"
        found.append(torch.zeros(3, CONFIG.hidden))
    with pytest.raises(ShapeError) as raised:
        backend.forward(*call, ExpertWeights((found[-1], *others), fc2), training=False)
    return str(raised.value)


def test_weights_are_known_as_long_as_they_live(ranks: RankPool):
    inputs = cases.make_inputs(CONFIG, cases.uniform, [40] * 4, dtype=torch.float32)
    for said in ranks.run(other_weights, inputs):
        assert re.match(r"rank \d: fc1 of local expert 0 has shape \(3, 64\), wanted", said)


@pytest.mark.parametrize(
    ("result", "said"),
    [(2, "NCCL's watchdog found an error of kind 2"), (None, "it did not end in time"), (0, None)],
)
def test_an_exchange_that_no_host_waits_for(
    result: int | None, said: str | None, caplog: pytest.LogCaptureFixture
):
    """What the log says of the first exchange that fails, once."""
    lookout = Lookout()
    for number in range(-1, 3):
        future: torch.futures.Future[int] = torch.futures.Future()
        describe, is_over = f"exchange {number}: {{}}".format, number < 0
        is_late = number > 0 and result is None
        lookout.expect(
            future, 0 if is_late else 600, describe, is_over=lambda is_over=is_over: is_over
        )
        if number < 0:
            future.set_result(2)  # its groups are gone
        elif number == 0:
            future.set_result(0)
        elif result is not None:
            future.set_result(result)
    deadline = time.monotonic() + 60
    while not (caplog.records if said else not lookout._expected):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([f"exchange 1: {said}"] if said else [])
