"""The kernel, forward and backward, over a zoo of routings and shapes, on 1 to 8 virtual ranks.

Every case runs in memory that an earlier launch has filled with NaN, with poisoned row buffers
between guard bands, twice, and has to repeat its bits.
"""

from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.config import TILE_M, Activation, MoEConfig
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config, zipf
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu


def exact_rows(rows: list[int], tokens_per_rank: list[int]) -> cases.Routing:
    """A top-1 routing that gives each expert this many rows, its tokens spread over all ranks."""
    assert sum(rows) == sum(tokens_per_rank)
    expert_of_token = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    expert_of_token = expert_of_token[torch.randperm(len(expert_of_token), generator=_seeded())]

    def routing(config: MoEConfig, rank: int, num_tokens: int, g: torch.Generator) -> torch.Tensor:
        first = sum(tokens_per_rank[:rank])
        scores = torch.full((num_tokens, config.num_experts), -torch.inf)
        chosen = expert_of_token[first : first + num_tokens]
        return scores.scatter_(1, chosen.unsqueeze(1), 0.0)

    return routing


def _seeded() -> torch.Generator:
    return cases.generator(7)


ROUTINGS = [
    cases.uniform,
    zipf,
    cases.to_one_expert,
    cases.to_one_rank,
    cases.with_empty_experts,
    cases.with_dropped_tokens,
    cases.to_nobody,
]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
def test_routing(routing: cases.Routing, num_ranks: int):
    # No rank has fewer experts than a token selects, so that all may go to one rank.
    config = make_config(num_ranks, topk=2)
    steps.check(config, steps.make_inputs(config, routing, TOKENS[num_ranks]))


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("activation", Activation, ids=lambda activation: activation.value)
def test_activation(activation: Activation, gated: bool, transposed: bool):
    config = make_config(2, activation=activation, gated=gated, num_experts=8)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    steps.check(config, inputs, transposed=transposed, launches=1)


@pytest.mark.parametrize("topk", [*range(1, 9), 16])
def test_topk(topk: int):
    config = make_config(4, topk=topk)
    steps.check(config, steps.make_inputs(config, cases.uniform, TOKENS[4]), launches=1)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [(64, 64), (64, 320), (320, 64), (192, 448), (448, 192), (256, 512), (1088, 128), (128, 1088)],
)
def test_dimensions(hidden: int, intermediate: int, gated: bool):
    config = make_config(
        2, hidden=hidden, intermediate=intermediate, gated=gated, num_experts=4, topk=2
    )
    steps.check(config, steps.make_inputs(config, cases.uniform, [150, 99]), launches=1)


@pytest.mark.parametrize("num_experts", [1, 5, 60, 130, 512])
def test_number_of_experts(num_experts: int):
    config = make_config(
        1, num_experts=num_experts, topk=1, hidden=64, intermediate=64, max_tokens=640
    )
    steps.check(config, steps.make_inputs(config, cases.uniform, [640]), launches=1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_around_a_tile(num_ranks: int):
    around = [0, 1, TILE_M - 1, TILE_M, TILE_M + 1, 2 * TILE_M, 0, 2 * TILE_M + 1]
    rows = around + around[::-1]
    total = sum(rows)
    tokens = [total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)]
    config = make_config(num_ranks, topk=1, max_tokens=max(tokens))
    inputs = steps.make_inputs(config, exact_rows(rows, tokens), tokens)
    assert torch.cat(inputs.routing_map).sum(0).tolist() == rows
    steps.check(config, inputs)


@pytest.mark.parametrize(
    "tokens",
    [[1, 0], [0, 0], [0, 320], [319, 1], [0, 0, 0, 5], [320, 320, 320, 320], [33, 0, 31, 32]],
    ids=lambda tokens: "-".join(map(str, tokens)),
)
def test_tokens_per_rank(tokens: list[int]):
    config = make_config(len(tokens))
    steps.check(config, steps.make_inputs(config, cases.uniform, tokens))


def test_more_tiles_than_ctas():
    config = make_config(4, hidden=1024, intermediate=768, num_experts=16, topk=6, max_tokens=1000)
    steps.check(config, steps.make_inputs(config, cases.uniform, [1000, 777, 640, 1000]))


def test_one_rank_of_many_tiles():
    config = make_config(1, hidden=2048, intermediate=768, num_experts=8, topk=2, max_tokens=2048)
    steps.check(config, steps.make_inputs(config, zipf, [2048]), launches=1)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_zero_and_negative_probs(num_ranks: int):
    config = make_config(num_ranks)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    for index, probs in enumerate(inputs.probs):
        signs = torch.tensor([1.0, -1.0, 0.0, 2.5], device=probs.device)
        pattern = torch.arange(probs.numel(), device=probs.device) % 4
        inputs.probs[index] = probs * signs[pattern].view(probs.shape)
    steps.check(config, inputs)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_bfloat16_probs(num_ranks: int):
    config = make_config(num_ranks)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    inputs.probs = [probs.bfloat16() for probs in inputs.probs]
    steps.check(config, inputs)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_routes_of_probability_zero_can_be_left_out(num_ranks: int):
    """Megatron fills experts up to their capacity so: with many routes, most of probability 0."""
    config = make_config(num_ranks, skip_zero_probs=True)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    inputs.routing_map = [torch.ones_like(selected) for selected in inputs.routing_map]
    steps.check(config, inputs)


def test_values_where_nothing_is_selected_do_not_matter():
    config = make_config(2)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    clean = steps.step(VirtualLayer(config), inputs, steps.weights_of(config, inputs))
    noisy = replace(
        inputs,
        probs=[
            probs.masked_fill(~selected, float("nan"))
            for probs, selected in zip(inputs.probs, inputs.routing_map, strict=True)
        ],
    )
    got = steps.step(VirtualLayer(config), noisy, steps.weights_of(config, inputs))
    steps.assert_same_bits(got, clean)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_output_does_not_depend_on_launch_shape(num_ranks: int):
    """A grid of a few CTAs computes the same bits as one that fills the GPU."""
    config = make_config(num_ranks)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    weights = steps.weights_of(config, inputs)
    wide = steps.step(VirtualLayer(config), inputs, weights)
    narrow_layer = VirtualLayer(config)
    for backend in narrow_layer.backends:
        backend.num_ctas = 6
    steps.assert_same_bits(steps.step(narrow_layer, inputs, weights), wide)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_rows_fetched_again_give_the_same_bits(num_ranks: int):
    config = make_config(num_ranks, topk=2)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    weights = steps.weights_of(config, inputs)
    want = steps.step(VirtualLayer(config), inputs, weights)
    layer = VirtualLayer(config)
    for backend in layer.backends:
        backend.keep = "preactivations"
    for _ in range(3):
        steps.spoil(layer, inputs, weights)
        before = [memory.epoch for memory in layer.group.memories]
        forward = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
        assert [saved.rows for saved in forward[1]] == [None] * num_ranks
        steps.assert_same_bits(steps.backward(layer, inputs, weights, forward), want)
        # One epoch of the forward, two of the gather, one of the backward. Narrow experts of one
        # rank read their tokens in place of rows.
        taken = 2 if num_ranks == 1 else 4
        assert [memory.epoch for memory in layer.group.memories] == [
            last + taken for last in before
        ]
    layer.check_guards()


def test_padding_never_crosses_a_link():
    config = make_config(4)
    inputs = steps.make_inputs(config, cases.with_dropped_tokens, TOKENS[4])
    layer = VirtualLayer(config)
    weights = steps.weights_of(config, inputs)
    steps.step(layer, inputs, weights)
    per_rank = config.num_local_experts
    # [source rank][rank that computes]: tokens with at least one expert there
    tokens = [
        [
            int(selected[:, rank * per_rank : (rank + 1) * per_rank].any(1).sum())
            for rank in range(4)
        ]
        for selected in inputs.routing_map
    ]
    rows = sum(selected.sum(0) for selected in inputs.routing_map).view(4, per_rank)
    for rank, backend in enumerate(layer.backends):
        served = sum(tokens[source][rank] for source in range(4) if source != rank)
        traffic = backend.traffic
        # Forward and backward each fetch a remote token once and deliver its sum once.
        assert traffic.rows_sent == 4 * served
        assert traffic.bytes_sent == 4 * served * config.hidden * 2
        assert traffic.pad_rows_sent == 0
        assert traffic.pad_rows_local == 2 * int((-rows[rank] % TILE_M).sum())
