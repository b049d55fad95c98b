"""The placement of CCFuser: rows stay where their tokens are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.replicas.placement import (
    Counts,
    Hosts,
    Placement,
    locality,
    placement_of,
)
from flashmoe_megatron.replicas.popular import popular
from flashmoe_megatron.separate.replicas import add_replica_grads
from tests.replicas import cases
from tests.unit import native
from tests.unit.cases import make_config
from tools.simulate import skew


def zipf_counts(exponent: float, seed: int = 0) -> list[list[int]]:
    """Four ranks with 64 experts of one popularity, as the paper's models have them."""
    rng = np.random.default_rng(seed)
    popularity = rng.permutation(np.arange(1, 65) ** -exponent)
    return rng.multinomial(16384, popularity / popularity.sum(), size=4).tolist()


@pytest.mark.parametrize(("exponent", "spare_slots"), [(1.0, 8), (1.0, 16), (1.5, 2), (1.5, 4)])
def test_most_routes_become_local(exponent: float, spare_slots: int):
    for seed in range(20):
        counts = zipf_counts(exponent, seed)
        placement = popular(counts, spare_slots)
        placement.check(4, 64, spare_slots)
        assert locality(counts, skew.home_placement(4, 64, spare_slots)) == pytest.approx(
            0.25, abs=0.01
        )
        assert locality(counts, placement) >= 0.62


def test_heads_are_replicated_and_no_more():
    # Each rank's head is its first two experts by count, which are more than half together.
    counts = [[40, 20, 30, 10], [5, 5, 45, 45]]
    placement = popular(counts, 2)
    assert placement.hosts == ((2,), ())
    assert locality(counts, placement) == (40 + 20 + 30 + 45 + 45) / 200


def test_cold_experts_go_where_most_of_their_tokens_are():
    # Rank 0 has more than the mean; its expert 1 is in no head, and rank 2 has most of its tokens.
    counts = [[90, 1, 0, 0, 0, 0], [60, 2, 20, 20, 0, 0], [0, 6, 0, 0, 40, 40]]
    placement = popular(counts, 1)
    assert placement.hosts == ((), (0,), (1,))
    assert {placement.rank_of(source, 1) for source in range(3)} == {2}
    # A fast link between the other ranks' tokens and rank 1 changes nothing: it has no slot left.
    links = [[8, 9, 1], [9, 8, 9], [1, 9, 8]]
    assert popular(counts, 1, links).hosts[2] == (1,)


@pytest.mark.parametrize(("counts", "hosts"), cases.BY_HAND)
def test_placements_by_hand(counts: Counts, hosts: Hosts):
    assert popular(counts, 1).hosts == hosts


def test_cold_experts_go_where_links_are_fast():
    (counts, hosts), *_ = cases.BY_HAND
    links = [[8, 1, 1], [1, 8, 1], [1, 99, 8]]
    assert hosts == ((), (), (1,))
    assert popular(counts, 1, links).hosts == ((), (1,), ())


def test_placements_that_cannot_be_followed_are_refused():
    good = placement_of([[0, 0, 1, 1], [0, 1, 1, 1]], [(), (1,)], 1)
    good.check(2, 4, 1)
    rows = skew.rows_of_ranks([[1, 2, 3, 4], [5, 6, 7, 8]], good)
    assert rows == [{0: 6, 1: 2}, {5: 6, 3: 10, 4: 12}]
    assert (good.replicas_of(0), good.replicas_of(1)) == ([(1, 0, 1)], [])
    for bad, message in (
        (good._replace(hosts=((), (2,))), r"replicas of the experts \[2\]: wanted at most 1"),
        (good._replace(hosts=((), (0, 1))), r"\[0, 1\]: wanted at most 1 different"),
        (good._replace(hosts=((4,), (1,))), r"\[4\]: wanted .* of 0 to 3"),
        (good._replace(hosts=((), ())), "rank 1's table sends expert 1 to slot 5, which does not"),
        *(
            (good._replace(slot_of=(good.slot_of[0], (0, slot, 3, 4))), f"to slot {slot}, which")
            for slot in (-1, -5, 6, 99)  # from behind, -5 would hold it
        ),
        (good._replace(slot_of=(good.slot_of[0], (0, 5))), "rank 1's table has 2 experts, wanted"),
        (Placement(((),), good.slot_of, 3), "replicas for 1 ranks, tables for 2 and 3 slots"),
    ):
        with pytest.raises(ConfigError, match=message):
            bad.check(2, 4, 1)
    twice = placement_of([[0, 0, 1, 1], [0, 1, 1, 1]], [(), (1, 1)], 2)
    with pytest.raises(ConfigError, match=r"\[1, 1\]: wanted at most 2 different ones"):
        twice.check(2, 4, 2)


def test_routes_that_stay_on_their_rank():
    placement = placement_of([[0, 0, 1, 1], [0, 1, 1, 1]], [(), (1,)], 1)
    assert locality([[1, 2, 3, 4], [5, 6, 7, 8]], placement) == (1 + 2 + 6 + 7 + 8) / 36
    assert locality([[0] * 4] * 2, placement) == 1, "nothing crosses where nothing is routed"


def test_gradients_of_replicas_are_added_and_their_bytes_told():
    placement = placement_of([[0, 0, 1, 1], [1, 0, 1, 1]], [(), (0,)], 1)
    asked: list[list[int]] = []

    def swap(send: torch.Tensor, _: object, sizes: list[int]) -> torch.Tensor:
        asked.append(sizes)
        return torch.arange(float(sum(sizes)))

    values = [torch.ones(2, 2, 3), torch.ones(2, 3)]
    exchange: Any = SimpleNamespace(rank=0, swap=swap)
    assert add_replica_grads(exchange, placement, values) == 9 * 4
    assert asked == [[0, 9]]
    assert torch.equal(values[0][0].flatten(), 1 + torch.arange(6.0))
    assert torch.equal(values[1][0], 1 + torch.arange(6.0, 9.0))
    assert all(torch.equal(value[1], torch.ones_like(value[1])) for value in values)


@pytest.mark.library
@pytest.mark.parametrize("shape", [(4, 8, 4, 2), (8, 16, 8, 2), (8, 32, 8, 4), (4, 16, 8, 4)])
def test_buffers_hold_what_slots_receive_where_all_choose_the_same(shape: tuple[int, ...]):
    """Replicas give a token more routes on a rank than the rank has experts of its own."""
    num_ranks, num_experts, topk, spare = shape
    tokens = 4096
    config = make_config(num_experts=num_experts, topk=topk, num_ranks=num_ranks, max_tokens=tokens)
    sizes = native.sizes_of(native.problem_of(config, spare_slots=spare, replica_policy="popular"))
    counts = [[0] * (num_experts - topk) + [tokens] * topk for _ in range(num_ranks)]
    for rows in skew.rows_of_ranks(counts, popular(counts, spare)):
        assert sum(-(-count // 128) for count in rows.values()) <= sizes.max_row_blocks
