"""Sizes that are promised before training must hold for every routing."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_megatron.config import TILE_M, Activation, MoEConfig, align_capacity
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.planner import (
    MOST_FETCH_COST,
    bounded_row_blocks,
    choose_keep,
    describe_hosts,
    dispatch_volume,
    expert_capacity,
    fetch_cost,
    forward_over_hosts,
    kept_bytes,
    least_rows_of,
    plan_buffer_rows,
    plan_capacity,
    plan_hosts,
    plan_launches,
    tokens_within,
)
from tests.unit import cases


@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "factor", "want"),
    [
        (4096, 2, 64, 1.25, 160),
        (8192, 2, 8, 1.0, 2048),
        (100, 2, 8, 1.0, 25),
        (101, 2, 8, 1.0, 26),
        (16, 1, 64, 1.0, 1),
        (0, 2, 8, 1.25, 0),
        (1000, 1, 7, 1.1, 158),
        # 50 * 1.1 is a little more than 55 in floating point, so Megatron's ceiling is 56.
        (500, 1, 10, 1.1, 56),
        (10, 1, 10, 1.1, 2),
    ],
)
def test_capacity_by_hand(num_tokens: int, topk: int, num_experts: int, factor: float, want: int):
    assert expert_capacity(num_tokens, topk, num_experts, factor) == want


@given(st.integers(0, 10**6), st.integers(1, 16), st.integers(1, 512), st.floats(0.01, 16))
def test_capacity_is_the_exact_ceiling_but_for_rounding(
    num_tokens: int, topk: int, num_experts: int, factor: float
):
    exact = Fraction(num_tokens * topk, num_experts) * Fraction(factor)
    capacity = expert_capacity(num_tokens, topk, num_experts, factor)
    assert abs(capacity - exact) < 1 + Fraction(1, 10**6)
    # A factor of at least 1 holds a perfectly balanced batch.
    if factor >= 1:
        assert capacity * num_experts >= num_tokens * topk


def test_min_capacity():
    assert expert_capacity(16, 1, 64, 1.0, min_capacity=4) == 4
    assert expert_capacity(4096, 2, 64, 1.25, min_capacity=4) == 160


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_alignment_of_capacity(num_ranks: int):
    plan = plan_capacity(4096, 2, 64, 1.25, num_ranks=num_ranks)
    assert (plan.capacity, plan.aligned_capacity, plan.tile) == (160, 256, TILE_M)
    assert plan.expert_rows == 160 * num_ranks
    assert plan.aligned_expert_rows == {1: 256, 2: 384, 4: 640, 8: 1280}[num_ranks]
    assert plan.pad_rows == plan.aligned_expert_rows - plan.expert_rows < TILE_M


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_tokens": -1}, "num_tokens=-1"),
        ({"topk": -2}, "topk=-2"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"capacity_factor": math.nan}, "capacity_factor=nan"),
        ({"capacity_factor": math.inf}, "capacity_factor=inf"),
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"min_capacity": -1}, "min_capacity=-1"),
        ({"tile": 0}, "tile=0"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, float], named: str):
    arguments = {"num_tokens": 16, "topk": 2, "num_experts": 8, "capacity_factor": 1.0}
    with pytest.raises(ConfigError, match=named):
        plan_capacity(**{**arguments, **changes})


@given(st.data())
def test_no_routing_needs_more_rows_than_planned(data: st.DataObject):
    num_ranks = data.draw(st.integers(1, 4))
    num_local_experts = data.draw(st.integers(1, 4))
    num_experts = num_ranks * num_local_experts
    config = MoEConfig(
        hidden=64,
        intermediate=64,
        num_experts=num_experts,
        topk=data.draw(st.integers(1, num_experts)),
        activation=Activation.SILU,
        gated=True,
        num_ranks=num_ranks,
        max_tokens=data.draw(st.integers(1, 300)),
    )
    capacity = data.draw(st.none() | st.integers(0, 300))
    # Tokens of all ranks, each of which selects some of this rank's experts.
    tokens = num_ranks * config.max_tokens
    most = min(config.topk, num_local_experts)
    remaining = tokens * most
    buffer_rows = 0
    for _ in range(num_local_experts):
        limit = tokens if capacity is None else min(tokens, num_ranks * capacity)
        rows = data.draw(st.integers(0, min(limit, remaining)))
        remaining -= rows
        buffer_rows += align_capacity(rows)
    planned = plan_buffer_rows(config, capacity=capacity)
    assert buffer_rows <= planned.worst_case
    assert planned.worst_case % TILE_M == 0


def test_worst_case_is_reached():
    """The bound is not idle: all tokens of all ranks may select this rank's experts."""
    config = cases.make_config(num_ranks=4, max_tokens=128)
    planned = plan_buffer_rows(config)
    # Two local experts get one tile less a row each from three ranks and the rest of the tokens.
    assert planned.worst_case == 4 * 128 * 2 + TILE_M
    assert planned.expected == 128 * 2 + 2 * TILE_M // 2
    assert plan_buffer_rows(config, capacity=10).worst_case == 2 * TILE_M
    assert plan_buffer_rows(config, capacity=0).worst_case == 0
    with pytest.raises(ConfigError, match="capacity=-1"):
        plan_buffer_rows(config, capacity=-1)


@pytest.mark.parametrize(("topk", "tiles"), [(1, 5), (2, 9), (4, 9)])
def test_a_token_has_no_more_routes_here_than_choices_or_experts(topk: int, tiles: int):
    config = cases.make_config(num_ranks=4, max_tokens=128, topk=topk)
    assert plan_buffer_rows(config).worst_case == tiles * TILE_M


def test_a_bound_holds_whole_blocks_and_one_more_for_each_expert():
    config = cases.make_config(num_ranks=4, max_tokens=100)
    assert bounded_row_blocks(config, 1.28) == 2 + 2  # 256 rows fill two blocks
    assert bounded_row_blocks(config, 1.29) == 3 + 2


def test_no_more_rows_are_expected_than_the_capacity_admits():
    config = cases.make_config(num_ranks=4, max_tokens=128)
    # 10 rows from each of 4 ranks for 2 local experts, each with half a tile of padding.
    assert plan_buffer_rows(config, capacity=10).expected == 4 * 10 * 2 + 2 * TILE_M // 2
    assert plan_buffer_rows(config, capacity=0).expected == 0
    assert plan_buffer_rows(config, capacity=128).expected == plan_buffer_rows(config).expected


def test_volume():
    volume = dispatch_volume(
        num_routes=8192, num_experts=64, capacity=160, hidden=2048, element_bytes=2
    )
    assert volume.padded_bytes == 64 * 160 * 4096
    assert volume.payload_bytes == 8192 * 4096
    assert volume.saved_ratio == pytest.approx(0.2)
    empty = dispatch_volume(num_routes=0, num_experts=64, capacity=0, hidden=2048)
    assert empty.saved_ratio == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_routes": 11}, "num_routes=11"),
        ({"num_routes": -1}, "num_routes=-1"),
        ({"num_routes": 2.5}, "num_routes=2.5"),
        ({"hidden": -64}, "hidden=-64"),
    ],
)
def test_volumes_that_cannot_be_are_refused(changes: dict[str, int], named: str):
    arguments = {"num_routes": 10, "num_experts": 2, "capacity": 5, "hidden": 64}
    with pytest.raises(ConfigError, match=named):
        dispatch_volume(**{**arguments, **changes})


def wide_layer(num_ranks: int = 1, **changes: int) -> MoEConfig:
    sizes = {"hidden": 4096, "intermediate": 1536, "num_experts": 128, "topk": 8, **changes}
    return MoEConfig(
        activation=Activation.SILU, gated=True, num_ranks=num_ranks, max_tokens=8192, **sizes
    )


def test_rows_are_fetched_again_where_that_is_cheap():
    # One rank: 8 rows of 8 KiB are read and written at 3 TB/s, 8 routes have 4 products.
    by_hand = (8 * 2 * 4096 * 2 / 3e12) / (8 * 4 * 4096 * 3 * 1536 / 700e12)
    assert math.isclose(fetch_cost(wide_layer()), by_hand)
    # Eight ranks: a choice of 8 among 128 misses a given rank's 16 experts with this probability.
    missed = math.prod((112 - i) / (128 - i) for i in range(8))
    by_hand = (7 * (1 - missed) * 4096 * 2 / 370e9) / (8 * 4 * 4096 * 3 * 1536 / 700e12)
    assert math.isclose(fetch_cost(wide_layer(8)), by_hand)
    for intermediate in (64, 1536, 2048, 14336):
        config = wide_layer(intermediate=intermediate)
        chosen = choose_keep("auto", config)
        assert chosen == ("all" if fetch_cost(config) > MOST_FETCH_COST else "preactivations")
    assert choose_keep("auto", wide_layer(intermediate=14336)) == "preactivations"
    assert choose_keep("auto", wide_layer(intermediate=64)) == "all"
    assert choose_keep("inputs", wide_layer()) == "inputs"


def test_no_rows_are_kept_where_backwards_read_tokens():
    for intermediate in (256, 320, 14336):
        config = wide_layer(intermediate=intermediate)
        assert choose_keep("auto", config, reads_tokens=True) == "preactivations"
        assert choose_keep("all", config, reads_tokens=True) == "all"
        kept = "all" if intermediate < 1500 else "preactivations"
        assert choose_keep("auto", config) == kept


def test_a_replica_pays_by_hand():
    """For 8 bytes of each weight's number, a link of 350 GB/s needs as long as for 16,000 flops."""
    assert least_rows_of(350e9) == round(16_000 / 6)


def test_what_is_kept_by_hand():
    """64 tokens of two choices: tokens, then outputs of fc1, or these and rows."""
    gated = {"activation": Activation.SILU, "gated": True, "max_tokens": 64, "topk": 2}
    layer = cases.make_config(hidden=64, intermediate=128, num_ranks=1, **gated)
    tokens, outputs, rows = 2 * 64 * 64, 2 * 64 * 2 * 2 * 128, 2 * 64 * 2 * 64
    assert kept_bytes(layer, "inputs") == tokens
    assert kept_bytes(layer, "preactivations") == tokens + outputs
    assert kept_bytes(layer, "all") == outputs + rows


def test_a_forward_over_hosts():
    """By hand: one leg waits for all rows; a card that is slower than the products is the bound."""
    assert forward_over_hosts(1.0, 3.0, num_hosts=2, overlap=0) == 7.0
    assert forward_over_hosts(1.0, 3.0, num_hosts=2, overlap=1) == pytest.approx(3.0 + 0.5 + 3.0)
    assert forward_over_hosts(1.0, 3.0, num_hosts=2, overlap=2) == pytest.approx(3.0 + 3.0)
    assert forward_over_hosts(4.0, 1.0, num_hosts=2, overlap=2) == pytest.approx(4.0 + 0.5)


@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "want"),
    [
        # 1.9 GB are 103 tiles of tokens of 5 rows, of 28,672 bytes each.
        (16, 103 * TILE_M, (1, 103 * TILE_M)),
        (16, 103 * TILE_M + 1, (2, 52 * TILE_M)),
        (16, 0, (1, TILE_M)),
        # A host of one rank has no such heap.
        (2, 2**16, (1, 2**16)),
        (2, 2**16 + 1, (2, 2**15 + TILE_M)),
    ],
)
def test_launches_over_hosts_by_hand(num_ranks: int, num_tokens: int, want: tuple[int, int]):
    config = cases.make_config(hidden=14336, num_experts=256, topk=4, num_ranks=num_ranks)
    assert plan_launches(config, 2, num_tokens) == want


def test_room_over_hosts_by_hand():
    """One choice crosses to one of the other hosts; there are no more tokens than all."""
    one = cases.make_config(topk=1, num_ranks=4, max_tokens=100)
    assert tokens_within(one, 4) == math.ceil(100 * (1 + 3 / 4) * 1.1)
    assert tokens_within(cases.make_config(topk=8, num_ranks=4, max_tokens=100), 4) == 400
    plan = plan_hosts(one, 2)
    assert (plan.rows, plan.launch_tokens) == (pytest.approx(1 / 2), 2 * TILE_M)
    assert plan.heap_bytes == 2 * TILE_M * 64 * 2 * 2  # each token has itself and one result there
    fixed = plan_hosts(one, 4, is_fixed=True)
    assert (fixed.rows, fixed.launch_tokens, fixed.heap_bytes) == (3, 4 * TILE_M, 0)


def test_what_is_said_of_hosts_before_training():
    """DeepSeek-V3 on two hosts: 4,096 rows of 14,400 bytes cross, and the products take 4.12 ms."""
    config = cases.make_config(
        hidden=7168, intermediate=2048, num_experts=256, topk=8, num_ranks=16, max_tokens=4096
    )
    said = describe_hosts(config, 2, is_fixed=False, overlap=0)
    assert "a token of a rank crosses to 1.00 other hosts on average" in said
    assert "56 MiB over its network card each way" in said
    assert said.endswith(
        "at 45 GB/s a card a forward takes 6.74 ms by a model, with products of 4.12 ms and "
        "host_overlap=0"
    )
    assert "takes 4.78 ms by" in describe_hosts(config, 2, is_fixed=False, overlap=2)
