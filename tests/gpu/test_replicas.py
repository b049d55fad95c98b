"""Replicas on the kernel: what the planner says, computed right wherever it is, the same each time.

Every case runs in memory that an earlier launch has filled with NaN, as in ``test_layer``.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import PeerTimeoutError
from flashmoe_megatron.replicas.placement import Counts, Hosts, Placement
from flashmoe_megatron.replicas.policy import Policy, plan_replicas
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps, test_variants
from tests.gpu.expected import Results, assert_as_good, expected
from tests.gpu.layers import TOKENS, make_config, zipf
from tests.gpu.test_choices import by_indices, spread
from tests.gpu.test_split import apart, joined
from tests.gpu.virtual import VirtualLayer, mispredicted
from tests.unit import cases
from tools.simulate.skew import rows_of_ranks

pytestmark = pytest.mark.gpu

Options = dict[str, Any]
LAUNCH: Options = {"spare_slots": 2}
AHEAD: Options = {"spare_slots": 2, "placement": "lookahead", "replica_policy": "popular"}
WHEN = ["launch", "lookahead"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def counts_of(inputs: cases.Inputs) -> Counts:
    return [selected.sum(0).tolist() for selected in inputs.routing_map]


def check_steps(layer: VirtualLayer, inputs: cases.Inputs, weights: list[ExpertWeights]) -> None:
    """Two steps, each over spoiled memory, are as good as asked and equal bit by bit."""
    want = expected(layer.config, inputs)
    first = None
    for _ in range(2):
        steps.spoil(layer, inputs, weights)
        got = steps.step(layer, inputs, weights)
        assert_as_good(got, want)
        steps.assert_same_bits(got, first or got)
        first = got
    layer.check_guards()


def check_planned(
    layer: VirtualLayer,
    counts: Counts,
    spare_slots: int,
    policy: Policy = "balance",
    hosts: Hosts | None = None,
) -> Placement:
    """Compares every launch that has left a record with what the planner makes of the counts.

    Args:
        layer: The layer, of which all steps have been alike.
        counts: Routes.
        spare_slots: Spare slots of each rank.
        policy: The layer's.
        hosts: The experts in spare slots, if these were settled on ahead of every forward.
    """
    placement = plan_replicas(policy, counts, spare_slots, hosts)
    local = layer.config.num_local_experts
    for rank, (backend, rows) in enumerate(
        zip(layer.backends, rows_of_ranks(counts, placement), strict=True)
    ):
        first = rank * placement.slots_per_rank
        records = backend.take_records()
        assert {record.direction for record in records} == {"forward", "backward"}
        for record in records:
            assert record.expert_rows == tuple(rows.get(first + i, 0) for i in range(local))
            assert record.replicas is not None
            spare = enumerate(placement.hosts[rank], start=first + local)
            assert record.replicas.rows == tuple(
                (expert, rows[slot]) for slot, expert in spare if slot in rows
            )
            assert record.num_rows == sum(rows.values())
            if record.direction == "forward":
                routes = counts[rank]
                stay = sum(n for e, n in enumerate(routes) if placement.rank_of(rank, e) == rank)
                assert record.routes == (stay, sum(routes))
    return placement


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "routing",
    [cases.uniform, zipf, cases.skewed, cases.to_one_rank, cases.to_one_expert, cases.to_nobody],
    ids=lambda routing: routing.__name__,
)
def test_routing(routing: cases.Routing, num_ranks: int):
    config = make_config(num_ranks, topk=2)
    inputs = steps.make_inputs(config, routing, TOKENS[num_ranks])
    layer = VirtualLayer(config, spare_slots=2)
    weights = steps.weights_of(config, inputs)
    check_steps(layer, inputs, weights)
    check_planned(layer, counts_of(inputs), 2)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "routing", [zipf, cases.skewed, cases.to_one_expert], ids=lambda routing: routing.__name__
)
def test_rows_stay_where_their_tokens_are(routing: cases.Routing, num_ranks: int):
    config = make_config(num_ranks, topk=2)
    inputs = steps.make_inputs(config, routing, TOKENS[num_ranks])
    layer = VirtualLayer(config, spare_slots=2, replica_policy="popular")
    weights = steps.weights_of(config, inputs)
    got = steps.step(layer, inputs, weights)
    assert_as_good(got, expected(config, inputs))
    steps.assert_same_bits(steps.step(layer, inputs, weights), got)
    layer.check_guards()
    placement = check_planned(layer, counts_of(inputs), 2, "popular")
    assert any(placement.hosts)


def to_the_last(config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator) -> torch.Tensor:
    """All tokens choose the same experts, the last ones."""
    scores = cases.uniform(config, rank, num_tokens, g)
    scores[:, : config.num_experts - config.topk] = -torch.inf
    return scores


def test_a_token_may_have_more_routes_on_a_rank_than_the_rank_has_experts():
    config = make_config(8, topk=8)
    tokens = [config.max_tokens] * 8
    inputs = steps.make_inputs(config, to_the_last, tokens)
    layer = VirtualLayer(config, spare_slots=2, replica_policy="popular")
    check_steps(layer, inputs, steps.weights_of(config, inputs))
    counts = counts_of(inputs)
    placement = check_planned(layer, counts, 2, "popular")
    most = max(sum(rows.values()) for rows in rows_of_ranks(counts, placement))
    assert most > sum(tokens) * config.num_local_experts


@pytest.mark.parametrize("policy", ["balance", "popular"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_replicas_are_settled_on_ahead(num_ranks: int, policy: Policy):
    """From another routing than the forward has, so that some slots are of no use to it."""
    config = make_config(
        num_ranks, hidden=128, intermediate=128, num_experts=64, topk=2, max_tokens=1200
    )
    inputs = steps.make_inputs(config, zipf, [1200 - 50 * rank for rank in range(num_ranks)])
    layer = VirtualLayer(config, spare_slots=2, placement="lookahead", replica_policy=policy)
    weights = steps.weights_of(config, inputs)
    check_steps(layer, inputs, weights)
    counts = counts_of(inputs)
    foreseen = [mispredicted(selected).sum(0).tolist() for selected in inputs.routing_map]
    hosts = plan_replicas(policy, foreseen, 2).hosts
    assert any(hosts)
    assert hosts != plan_replicas(policy, counts, 2).hosts
    check_planned(layer, counts, 2, policy, hosts)


def test_another_launch_ends_what_was_settled():
    """Two layers share the slots; then a forward plans as if nothing had been settled."""
    config = make_config(4, hidden=128, intermediate=128, num_experts=64, topk=2, max_tokens=1200)
    group = VirtualLayer(config, spare_slots=2, placement="lookahead").group
    layers = []
    for seed in range(2):
        inputs = steps.make_inputs(config, zipf, [1200, 900, 1100, 1000], seed=seed)
        layers.append((VirtualLayer(config, group), inputs, steps.weights_of(config, inputs)))
    for layer, inputs, weights in layers * 2:  # settles, and takes the records of both
        assert_as_good(steps.step(layer, inputs, weights), expected(config, inputs))
        layer.check_guards()
    (layer, inputs, weights), (other, others_inputs, others_weights) = layers
    layer.settle([*map(mispredicted, inputs.routing_map)], weights)
    steps.step(other, others_inputs, others_weights)
    torch.cuda.synchronize()  # or its records come after these are taken
    for backend in layer.backends:
        backend.take_records()
    pending = layer.begin(inputs.x, inputs.probs, inputs.routing_map)
    got = steps.backward(layer, inputs, weights, layer.finish(pending, weights))
    assert_as_good(got, expected(config, inputs))
    assert any(check_planned(layer, counts_of(inputs), 2).hosts)


def test_a_rank_that_does_not_settle_is_named():
    config = make_config(2, topk=2)
    inputs = steps.make_inputs(config, zipf, TOKENS[2])
    layer = VirtualLayer(
        config, timeout_s=1.0, is_guarded=False, spare_slots=1, placement="lookahead"
    )
    layer.settle(inputs.routing_map[:1], steps.weights_of(config, inputs))
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeoutError, match="rank 0 waited too long from rank 1 .*routing of a"):
        layer.backends[0].raise_pending_fault()


@pytest.mark.parametrize("spare_slots", [0, 2])
def test_more_own_rows_first_change_no_bit(spare_slots: int):
    """As over a slow link; a rank has more than three steps of its own rows."""
    config = make_config(2, hidden=64, intermediate=768, topk=1, max_tokens=16_384, num_experts=4)
    inputs = steps.make_inputs(config, zipf, [16_384, 9_000])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, spare_slots=spare_slots)
    want = steps.step(layer, inputs, weights)
    for rate in (1.0, 1e9):
        for memory in layer.group.memories:
            assert memory._heap is not None
            memory._heap = replace(memory._heap, link_bytes_per_s=rate)
            memory._groups.clear()
        steps.assert_same_bits(steps.step(layer, inputs, weights), want)
    layer.check_guards()


def test_many_experts_and_tokens():
    """Attempts of the planner beyond the first, and replicas of many tiles."""
    config = make_config(8, hidden=128, intermediate=128, num_experts=64, topk=2, max_tokens=1200)
    moved = 0
    for seed in range(4):
        inputs = steps.make_inputs(config, zipf, [1200, 900, 1100, 1200, 300, 1200, 1000, 1200])
        order = torch.randperm(64, generator=cases.generator(seed))
        for values in (inputs.probs, inputs.routing_map):
            values[:] = [value[:, order] for value in values]
        layer = VirtualLayer(config, spare_slots=2)
        weights = steps.weights_of(config, inputs)
        assert_as_good(steps.step(layer, inputs, weights), expected(config, inputs))
        layer.check_guards()
        moved += sum(map(len, check_planned(layer, counts_of(inputs), 2).hosts))
    assert moved > 16


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forms(dtype: str, gated: bool, transposed: bool):
    activation = Activation.SILU if gated else Activation.GELU
    config = make_config(4, hidden=320, activation=activation, gated=gated)
    inputs = steps.make_inputs(config, zipf, TOKENS[4], dtype=DTYPES[dtype])
    steps.check(config, inputs, transposed=transposed, spare_slots=3)


def test_rows_are_fetched_again_and_indices():
    config = make_config(4, topk=3)
    inputs = steps.make_inputs(config, zipf, TOKENS[4])
    choices = by_indices(config, inputs, torch.int32)
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, spare_slots=1)
    want = steps.step(layer, inputs, weights)
    for backend in layer.backends:
        backend.keep = "preactivations"
    steps.assert_same_bits(spread(config, choices, steps.step(layer, choices, weights)), want)
    layer.check_guards()


@pytest.mark.parametrize("options", [LAUNCH, AHEAD], ids=WHEN)
def test_one_launch_is_two(options: Options):
    config = make_config(8, topk=2)
    inputs = steps.make_inputs(config, zipf, TOKENS[8])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, **options)
    want = steps.step(layer, inputs, weights)
    most = int(layer.backends[0]._sizes.max_row_blocks)
    given = (inputs.x, inputs.probs, inputs.routing_map, weights)
    forward = layer.forward(*given, num_row_blocks=most)
    steps.assert_same_bits(steps.backward(layer, inputs, weights, forward), want)


@pytest.mark.parametrize("is_main", [True, False], ids=["main_grad", "grad"])
@pytest.mark.parametrize("initial", [None, 1.0], ids=["written", "added"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kinds_of_gradients(dtype: str, initial: float | None, is_main: bool):
    config = make_config(4, topk=2)
    inputs = steps.make_inputs(config, zipf, TOKENS[4], dtype=DTYPES[dtype])
    into = torch.float32 if is_main else DTYPES[dtype]
    weights = steps.weights_of(config, inputs)
    plain, layer = VirtualLayer(config), VirtualLayer(config, spare_slots=2)
    want, got = (
        steps.step(
            each, inputs, weights, steps.make_grads(each, weights, dtype=into, initial=initial)
        )
        for each in (plain, layer)
    )
    assert_as_good(steps.step(layer, inputs, weights), expected(config, inputs))
    bound = 1e-6 if is_main else 2.5 * torch.finfo(into).eps
    for name in ("grad_fc1", "grad_fc2"):
        ours, theirs = (getattr(each, name).double() for each in (got, want))
        assert float((ours - theirs).norm() / theirs.norm()) < bound, name


@pytest.mark.parametrize("options", [LAUNCH, AHEAD], ids=WHEN)
def test_layers_of_other_shapes_share_slots(options: Options):
    """A heap of layers with other experts and in both types, whose launches come in turn."""
    group = VirtualLayer(make_config(4), **options).group
    layers, held = [], []
    for dtype, changes in (
        (torch.bfloat16, {"hidden": 128, "num_experts": 8}),
        (torch.float16, {"intermediate": 320}),
        (torch.bfloat16, {"topk": 1}),
    ):
        config = make_config(4, **changes)
        inputs = steps.make_inputs(config, zipf, TOKENS[4], seed=len(layers), dtype=dtype)
        layers.append((VirtualLayer(config, group), inputs, steps.weights_of(config, inputs)))
    for layer, inputs, weights in layers * 2:
        held.append(layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights))
    for (layer, inputs, weights), forward in reversed(list(zip(layers * 2, held, strict=True))):
        got = steps.backward(layer, inputs, weights, forward)
        assert_as_good(got, expected(layer.config, inputs))


def test_a_balanced_routing_moves_nothing():
    config = make_config(4, topk=1, max_tokens=512)
    inputs = steps.make_inputs(config, cases.uniform, [512] * 4)
    chosen = torch.arange(512, device=inputs.x[0].device) % config.num_experts
    maps = [torch.nn.functional.one_hot(chosen, config.num_experts).bool()] * 4
    inputs = replace(inputs, routing_map=maps, probs=[each.float() for each in maps])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, spare_slots=2)
    got = steps.step(layer, inputs, weights)
    steps.assert_same_bits(got, steps.step(VirtualLayer(config), inputs, weights))
    placement = check_planned(layer, counts_of(inputs), 2)
    assert not any(placement.hosts)


@pytest.mark.parametrize("options", [LAUNCH, AHEAD], ids=WHEN)
@pytest.mark.parametrize("form", test_variants.FORMS)
@pytest.mark.parametrize("grads_in", ["main_grad", "grad", "both"])
def test_biases(form: str, grads_in: str, options: Options):
    test_variants.check_biases(4, form, grads_in, torch.bfloat16, **options)


@pytest.mark.parametrize("grads_in", ["main_grad", "grad", "both"])
def test_biases_in_float16(grads_in: str):
    test_variants.check_biases(4, "gated", grads_in, torch.float16, **LAUNCH)


@pytest.mark.parametrize("options", [LAUNCH, AHEAD], ids=WHEN)
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=["main_grad", "grad"])
def test_split_weights_change_no_bit(into: torch.dtype, options: Options):
    config = make_config(2, intermediate=192)
    inputs = steps.make_inputs(config, zipf, TOKENS[2])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, **options)
    initial = 0.5 if into == torch.float32 else None
    grads = steps.make_grads(layer, weights, dtype=into, initial=initial)
    want = steps.step(layer, inputs, weights, grads)
    split = [apart(share, stacked=False) for share in weights]
    fc1, fc2 = steps.make_grads(layer, split, dtype=into, initial=initial)
    out, saved = layer.forward(inputs.x, inputs.probs, inputs.routing_map, split)
    grad_x, grad_probs = layer.backward(inputs.grad_out, saved, split, fc1, fc2)
    found = torch.cat([joined(grads) for grads in fc1])
    of_fc2 = torch.stack([grad.buffer for share in fc2 for grad in share])
    got = Results(torch.cat(out), torch.cat(grad_x), torch.cat(grad_probs), found, of_fc2)
    steps.assert_same_bits(got, want)
    layer.check_guards()
