"""Replicas on the reference backend: the same bits as without, wherever experts are computed."""

import functools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.replicas.placement import Counts, Hosts, Placement, placement_of
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool
from tests.unit import cases
from tools.simulate.workloads import workloads

SPARE_SLOTS = 2
TOKENS = [160, 0, 97, 130]


class AnyPlacement:
    """Plans a valid placement that no policy would, another one in each call."""

    def __init__(self, num_ranks: int, num_experts: int) -> None:
        self._sizes = num_ranks, num_experts
        self.calls = 0

    def __call__(self, counts: Counts, hosts: Hosts | None = None) -> Placement:
        self.calls += 1
        num_ranks, num_experts = self._sizes
        local, draw = num_experts // num_ranks, random.Random(self.calls)
        chosen = []
        for rank in range(num_ranks):
            others = [expert for expert in range(num_experts) if expert // local != rank]
            chosen.append(draw.sample(others, draw.randint(0, SPARE_SLOTS)))
        rank_of = [
            [
                draw.choice([e // local, *(r for r in range(num_ranks) if e in chosen[r])])
                for e in range(num_experts)
            ]
            for _ in range(num_ranks)
        ]
        return placement_of(rank_of, chosen, SPARE_SLOTS)


Found = dict[str, torch.Tensor]


def train(
    backend: ReferenceBackend,
    inputs: cases.Inputs,
    rank: int,
    *,
    bias: bool,
    transposed: bool,
    main_grad: torch.dtype,
    choices: bool,
) -> Found:
    """Two micro-batches whose forwards both precede their backwards, as in a pipeline."""
    config = backend.config
    first = rank * config.num_local_experts
    experts = slice(first, first + config.num_local_experts)
    g = cases.generator(rank)

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone().requires_grad_()
        made.main_grad = torch.zeros(tensor.shape, dtype=main_grad)  # type: ignore[attr-defined]
        return made

    def matrices(all_experts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(leaf(each.t().contiguous() if transposed else each) for each in all_experts)

    fc1, fc2 = matrices(inputs.fc1[experts]), matrices(inputs.fc2[experts])
    biases: dict[str, tuple[torch.Tensor, ...]] = {}
    if bias:
        for name, width in (("fc1_bias", config.fc1_rows), ("fc2_bias", config.hidden)):
            drawn = torch.randn(config.num_local_experts, width, generator=g)
            biases[name] = tuple(leaf(each.to(fc1[0].dtype)) for each in drawn)
    weights = ExpertWeights(fc1, fc2, transposed=transposed, **biases)
    found: Found = {}
    outs = []
    for batch in range(2):
        x = inputs.x[rank].roll(batch, 0).clone().requires_grad_()
        probs = inputs.probs[rank].roll(batch, 1).contiguous().requires_grad_()
        routing_map = inputs.routing_map[rank].roll(batch, 1).contiguous()
        if choices:
            topk_idx, topk_weight = cases.as_choices(config, probs.detach(), routing_map)
            probs = topk_weight.requires_grad_()
            routing = {"topk_idx": topk_idx, "topk_weight": probs}
            call = functools.partial(moe_apply, backend, x, None, None, weights, **routing)
        else:
            call = functools.partial(moe_apply, backend, x, probs, routing_map, weights)
        out = call(accumulate_into_main_grad=True, layer=batch)
        with torch.no_grad():
            found[f"evaluation {batch}"] = call(layer=batch)
        outs.append((batch, x, probs, out))
    for batch, x, probs, out in outs:
        out.backward(inputs.grad_out[rank])
        found |= {f"out {batch}": out.detach(), f"grad x {batch}": x.grad}
        found[f"grad probs {batch}"] = probs.grad
    for kind in ("fc1", "fc2", "fc1_bias", "fc2_bias"):
        for index, weight in enumerate(getattr(weights, kind)):
            found[f"weight grad {kind} {index}"] = weight.main_grad
    return found


def run_rank(
    group: dist.ProcessGroup, cases_of_rank: list[tuple[MoEConfig, cases.Inputs, dict[str, object]]]
) -> list[tuple[Found, Found, int, int]]:
    rank = dist.get_rank(group)
    results = []
    for config, inputs, given in cases_of_rank:
        options = {key: given[key] for key in ("keep", "row_bound") if key in given}
        form = {key: given[key] for key in ("bias", "transposed", "main_grad", "choices")}
        planner = given.get("planner") or AnyPlacement(config.num_ranks, config.num_experts)
        if isinstance(planner, str):
            options |= {"replica_policy": planner}
            planner = None
        without = ReferenceBackend(config, group, options=BackendOptions(**options))
        within = ReferenceBackend(
            config,
            group,
            options=BackendOptions(spare_slots=SPARE_SLOTS, **options),
            planner=planner,
        )
        got, want = train(within, inputs, rank, **form), train(without, inputs, rank, **form)
        records = within.take_records()
        replicas = sum(len(record.replicas.rows) for record in records)
        num_rows = sum(sum(count for _, count in record.replicas.rows) for record in records)
        assert sum(record.replicas.num_bytes for record in records) or not replicas
        results.append((got, want, replicas, num_rows))
    return results


def test_results_have_the_same_bits(ranks: RankPool):
    """Any valid placement, and the policies' own."""
    drawn = []
    plain = {"bias": False, "transposed": False, "main_grad": torch.float32, "choices": False}
    for dtype, given in (
        (torch.bfloat16, plain),
        (torch.float32, {**plain, "bias": True, "keep": "preactivations"}),
        (torch.float64, {**plain, "main_grad": torch.float64, "transposed": True}),
        (torch.float32, {**plain, "keep": "inputs", "row_bound": 4.0, "transposed": True}),
        (torch.bfloat16, {**plain, "planner": "balance", "bias": True, "choices": True}),
        (torch.float32, {**plain, "planner": "popular"}),
    ):
        config = cases.make_config(num_experts=16, topk=4, num_ranks=4)
        drawn.append((config, cases.make_inputs(config, cases.skewed, TOKENS, dtype=dtype), given))
    everyone = ranks.run(run_rank, drawn)
    for (_, inputs, given), *results in zip(drawn, *everyone, strict=True):
        exact = inputs.x[0].dtype != torch.float64
        for rank, (got, want, _, _) in enumerate(results):
            for name, tensor in got.items():
                label = f"{name} of rank {rank}, {given}"
                if name.startswith("weight grad"):
                    bound = 1e-6 if given["main_grad"] == torch.float32 else 1e-14
                    assert_close(label, tensor, want[name], rel_l2=bound)
                elif exact:
                    assert torch.equal(tensor, want[name]), label
                else:
                    assert_close(label, tensor, want[name], rel_l2=1e-14)
        assert sum(replicas for _, _, replicas, _ in results), "nothing moved"
        assert sum(num_rows for *_, num_rows in results), "no replica was used"


def test_kinds_of_routing_have_the_same_bits(ranks: RankPool):
    """Those that replicas are judged by, placed by the policy that evens out rows."""
    config = cases.make_config(num_experts=16, topk=4, num_ranks=4)
    given = {"bias": False, "transposed": False, "main_grad": torch.float32, "choices": False}
    names, drawn = [], []
    for workload in workloads(4, 16):

        def scores(
            _config: MoEConfig, rank: int, num_tokens: int, _g: torch.Generator, w=workload
        ) -> torch.Tensor:
            return torch.from_numpy(w.scores(num_tokens, np.random.default_rng(rank))).float()

        tokens = [round(192 * share) for share in workload.tokens]
        inputs = cases.make_inputs(config, scores, tokens, dtype=torch.float32)
        names.append(workload.name)
        drawn.append((config, inputs, {**given, "planner": "balance"}))
    for name, *results in zip(names, *ranks.run(run_rank, drawn), strict=True):
        for got, want, _, _ in results:
            for key, tensor in got.items():
                if key.startswith("weight grad"):
                    assert_close(f"{key}, {name}", tensor, want[key], rel_l2=1e-6)
                else:
                    assert torch.equal(tensor, want[key]), (key, name)
        moved = sum(num_rows for *_, num_rows in results)
        assert moved or name in ("W0_balanced", "W3_spread_hot_experts") or "W7" in name, name


def refused(group: dist.ProcessGroup) -> list[str]:
    """What each kind of bad input raises on this rank."""
    from flashmoe_megatron.errors import FlashMoEError
    from flashmoe_megatron.select import select_backend

    rank = dist.get_rank(group)
    config = cases.make_config(num_ranks=2)
    found = []

    def attempt(**options: object) -> None:
        try:
            select_backend(config, group, "cpu", kind="reference", **options)
        except FlashMoEError as error:
            found.append(str(error))

    attempt(spare_slots=5)
    attempt(placement="lookahead")
    attempt(spare_slots=1 + rank)
    attempt(spare_slots=1, replica_policy=("balance", "popular")[rank])

    def lost(counts: Counts, hosts: Hosts | None = None) -> Placement:
        return placement_of([[0] * 4 + [1] * 4] * 2, [(), ()], 1)._replace(hosts=((), (7,)))

    options = BackendOptions(spare_slots=1)
    backend = ReferenceBackend(config, group, options=options, planner=lost)
    inputs = cases.make_inputs(config, cases.uniform, [4, 4], dtype=torch.float32)
    weights = ExpertWeights(tuple(inputs.fc1[:4]), tuple(inputs.fc2[:4]))
    try:
        moe_apply(backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights)
    except FlashMoEError as error:
        found.append(str(error))
    return found


def test_bad_input_is_refused_on_every_rank(ranks: RankPool):
    for found in ranks.run(refused, num_ranks=2):
        wanted = (
            "spare_slots=5: wanted at most 4",
            "placement='lookahead' with spare_slots=0",
            "disagree on spare_slots: 1 on rank 0, 2 on rank 1",
            "disagree on replica_policy: balance on rank 0, popular on rank 1",
            "rank 1 is to hold replicas of the experts [7]",
        )
        assert len(found) == len(wanted)
        for text, part in zip(found, wanted, strict=True):
            assert part in text


def test_slots_that_stay_empty_are_no_replicas():
    from flashmoe_megatron.replicas.policy import check_slots
    from flashmoe_megatron.separate.backend import ScheduledBackend

    off = BackendOptions(spare_slots=9, placement="off")
    assert (off.filled_slots, BackendOptions(spare_slots=9).filled_slots) == (0, 9)
    check_slots(cases.make_config(num_ranks=2), 9, "off")
    ScheduledBackend(cases.CONFIG, options=off)
    backend = ReferenceBackend(cases.CONFIG, options=off)
    inputs = cases.make_inputs(cases.CONFIG, cases.uniform, [4], dtype=torch.float32)
    weights = ExpertWeights(tuple(inputs.fc1), tuple(inputs.fc2))
    moe_apply(backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights)
    assert [record.replicas for record in backend.take_records()] == [None]


def test_a_layer_of_pytorch_has_no_lookahead():
    from flashmoe_megatron.errors import ConfigError
    from flashmoe_megatron.layer import FlashMoELayer

    with pytest.raises(ConfigError, match="placement='lookahead': wanted launch or off, since"):
        FlashMoELayer(cases.CONFIG, device="cpu", spare_slots=2, placement="lookahead")


def settled_twice(group: dist.ProcessGroup) -> list[Hosts | None]:
    """What the planner is told of each forward: behind settling, and behind a refused forward."""
    from flashmoe_megatron.errors import FlashMoEError

    rank = dist.get_rank(group)
    config = cases.make_config(num_ranks=2)
    told: list[Hosts | None] = []

    def plan(counts: Counts, hosts: Hosts | None = None) -> Placement:
        told.append(hosts)
        return placement_of([[0] * 4 + [1] * 4] * 2, [(), ()], 1)

    backend = ReferenceBackend(config, group, options=BackendOptions(spare_slots=1), planner=plan)
    inputs = cases.make_inputs(config, cases.uniform, [4, 4], dtype=torch.float32)
    mine = slice(4 * rank, 4 * rank + 4)
    weights = ExpertWeights(tuple(inputs.fc1[mine]), tuple(inputs.fc2[mine]))
    probs, routing_map = inputs.probs[rank], inputs.routing_map[rank]
    backend.settle(routing_map, lambda: weights, layer=3)
    moe_apply(backend, inputs.x[rank], probs, routing_map, weights, layer=3)
    backend.settle(routing_map, lambda: weights, layer=3)
    backend.settle(routing_map, lambda: weights, layer=5)
    x = inputs.x[rank][:, : 64 - rank]  # rank 1's is too narrow
    with pytest.raises(FlashMoEError, match="rank 1"):
        moe_apply(backend, x, probs, routing_map, weights, layer=3)
    for layer in (3, 5):
        moe_apply(backend, inputs.x[rank], probs, routing_map, weights, layer=layer)
    return told


def test_a_refused_forward_leaves_nothing_settled(ranks: RankPool):
    for told in ranks.run(settled_twice, num_ranks=2):
        # Settling, its forward, settling twice; the refused forward plans nothing, and a rank that
        # refuses does not know which layer's it was.
        assert told == [None, ((), ()), None, None, None, None]


def layers(group: dist.ProcessGroup) -> list[tuple[torch.Tensor, ...]]:
    """A layer's output, and its parameters' gradients, without spare slots and with some."""
    from flashmoe_megatron.expert_group import local_part
    from flashmoe_megatron.layer import FlashMoELayer

    found = []
    for options in ({}, {"spare_slots": 2, "replica_policy": "popular"}):
        torch.manual_seed(3)
        config = cases.make_config(num_ranks=2)
        layer = FlashMoELayer(
            config, group=group, device="cpu", dtype=torch.float32, router=True, **options
        )
        x = torch.randn(40, 64, generator=cases.generator(dist.get_rank(group)))
        out = layer(x)
        out.square().sum().backward()
        grads = [local_part(one.grad).clone() for one in layer.parameters()]
        found.append((out.detach(), *grads))
        records = layer.backend.take_records()
        assert any(record.replicas and record.replicas.rows for record in records) == bool(options)
    return found


def test_a_layer_of_pytorch_takes_spare_slots(ranks: RankPool):
    for without, within in ranks.run(layers, num_ranks=2):
        assert torch.equal(within[0], without[0])
        for got, want in zip(within, without, strict=True):
            assert_close("a gradient", got, want, rel_l2=1e-6)
