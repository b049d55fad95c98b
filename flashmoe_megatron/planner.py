"""Sizes that can be known before training: capacities, buffer rows, bytes on the links.

Pure arithmetic on a layer's shape; needs neither torch nor a GPU.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from flashmoe_megatron.config import (
    TILE_M,
    Keep,
    KeepOption,
    MoEConfig,
    align_capacity,
    check_config,
    got,
    is_count,
    is_number,
)
from flashmoe_megatron.errors import ConfigError

_MOST = 2**53
"""The largest whole number in Megatron's arithmetic, which is that of float64."""


def expert_capacity(
    num_tokens: int, topk: int, num_experts: int, capacity_factor: float, *, min_capacity: int = 0
) -> int:
    """Tokens that one rank may send to one expert, as Megatron's router computes it.

    It is ``ceil(num_tokens * topk / num_experts * capacity_factor)``, at least ``min_capacity``,
    where ``num_tokens`` are those of one rank and call. The router drops what exceeds this number;
    alignment never changes it. Example: 4096 tokens, top-2 of 64 experts and a factor of 1.25 give
    160.

    Raises:
        ConfigError: An argument is negative or ``num_experts`` or ``capacity_factor`` is not
            positive.
    """
    for name, value in (("num_tokens", num_tokens), ("topk", topk), ("min_capacity", min_capacity)):
        if not is_count(value, least=0, most=_MOST):
            raise ConfigError(f"{got(name, value)}: must be an int, 0 to 2^53")
    if not is_count(num_experts, least=1, most=_MOST):
        raise ConfigError(f"{got('num_experts', num_experts)}: must be an int, 1 to 2^53")
    if not is_number(capacity_factor, least=0, most=_MOST) or not capacity_factor:
        raise ConfigError(
            f"capacity_factor={capacity_factor!r}: must be positive and finite, at most 2^53"
        )
    # The order of operations is Megatron's, so that a product that rounds gives the same ceiling.
    return max(math.ceil((num_tokens * topk / num_experts) * capacity_factor), min_capacity)


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """The room of a capacity in a receiver's buffer.

    Every expert has one segment of rows, filled by all ranks without gaps between them. Only the
    segment as a whole is aligned, so the padding is at most one tile less a row per expert, exists
    only in the receiver's memory and is never sent.

    Attributes:
        capacity: Rows that one rank may send to one expert, as the router enforces it.
        aligned_capacity: ``capacity`` rounded up to whole tiles, the segment of an expert that is
            served by one rank alone (section 3.2.1 of the paper).
        expert_rows: Most rows that one expert receives, ``num_ranks * capacity``.
        aligned_expert_rows: Rows of the segment that holds them.
    """

    capacity: int
    aligned_capacity: int
    expert_rows: int
    aligned_expert_rows: int
    tile: int

    @property
    def pad_rows(self) -> int:
        """Rows of a full segment that only align it."""
        return self.aligned_expert_rows - self.expert_rows


def plan_capacity(
    num_tokens: int,
    topk: int,
    num_experts: int,
    capacity_factor: float,
    *,
    num_ranks: int = 1,
    min_capacity: int = 0,
    tile: int = TILE_M,
) -> CapacityPlan:
    """Answers, before training, what capacity a factor gives and how it is aligned.

    The capacity is that of :func:`expert_capacity`, for each rank and expert; the tile is in rows.

    Raises:
        ConfigError: An argument is out of range.
    """
    if not is_count(num_ranks, least=1):
        raise ConfigError(f"{got('num_ranks', num_ranks)}: must be an int, at least 1")
    capacity = expert_capacity(
        num_tokens, topk, num_experts, capacity_factor, min_capacity=min_capacity
    )
    return CapacityPlan(
        capacity=capacity,
        aligned_capacity=align_capacity(capacity, tile),
        expert_rows=num_ranks * capacity,
        aligned_expert_rows=align_capacity(num_ranks * capacity, tile),
        tile=tile,
    )


@dataclass(frozen=True, kw_only=True)
class BufferRows:
    """Rows of one rank's receive buffer.

    Attributes:
        worst_case: No routing needs more, padding included; a multiple of the tile.
        expected: Mean under uniform random routing, padding included as half a tile per expert.
    """

    worst_case: int
    expected: int


def plan_buffer_rows(config: MoEConfig, *, capacity: int | None = None) -> BufferRows:
    """Bounds the rows that one rank can receive in one call, every rank having ``max_tokens``.

    Args:
        config: The layer's shape.
        capacity: Rows that one rank may send to one expert; ``None`` if nothing is dropped.

    Raises:
        ConfigError: ``capacity`` is negative, or ``config`` of another class.
    """
    check_config(config)
    if capacity is not None and not is_count(capacity, least=0):
        raise ConfigError(f"{got('capacity', capacity)}: must be an int, and not negative")
    num_experts = config.num_local_experts
    tokens = config.num_ranks * config.max_tokens
    # A token's experts are distinct, so at most num_local_experts of its routes come here.
    rows = tokens * min(config.topk, num_experts)
    expected = config.max_tokens * config.topk
    if capacity is not None:
        rows = min(rows, config.num_ranks * capacity * num_experts)
        expected = min(expected, rows)
    most_padding = min(num_experts, rows) * (TILE_M - 1)
    return BufferRows(
        worst_case=(rows + most_padding) // TILE_M * TILE_M,
        expected=expected + min(num_experts, expected) * (TILE_M // 2),
    )


def crossings(config: MoEConfig, num_hosts: int) -> float:
    """Other hosts that a token crosses to, the mean under uniform random routing.

    The shape is that of all hosts, or any equal parts, together, over which the experts are spread.
    """
    elsewhere = math.comb(config.num_experts - config.num_experts // num_hosts, config.topk)
    return (num_hosts - 1) * (1 - elsewhere / math.comb(config.num_experts, config.topk))


SPARE_TOKENS = 1.1
"""Times the mean, what launches over hosts have room for at first."""
ROUTE_BYTES = 8
"""An expert and its weight, as hosts tell each other."""
HOST_HEAP_BYTES = 1.9e9
MOST_LAUNCH_TOKENS = 2**16
"""A launch over hosts takes no more tokens, so that its symmetric heap is no larger than that and
every grid can take them; where more come, a layer has several launches."""


def share_of_host(config: MoEConfig, num_hosts: int, max_tokens: int) -> MoEConfig:
    """The layer of all hosts as one host's ranks see it, by the most tokens of a rank's launch."""
    experts = config.num_experts // num_hosts
    return dataclasses.replace(
        config,
        num_experts=experts,
        topk=min(config.topk, experts),
        num_ranks=config.num_ranks // num_hosts,
        max_tokens=max_tokens,
    )


def plan_launches(config: MoEConfig, num_hosts: int, num_tokens: int) -> tuple[int, int]:
    """Launches of a layer over hosts, and the most tokens of one, in whole tiles.

    The shape is that of all hosts; ``num_tokens`` are the fullest rank's, with those of other
    hosts.
    """
    share = share_of_host(config, num_hosts, TILE_M)
    buffers = 1 + min(share.topk, share.num_ranks)
    token_bytes = buffers * config.hidden * 2 if share.num_ranks > 1 else 0
    most = min(MOST_LAUNCH_TOKENS, int(HOST_HEAP_BYTES / max(token_bytes, 1)) // TILE_M * TILE_M)
    launches = max(1, math.ceil(num_tokens / most))
    return launches, align_capacity(max(1, math.ceil(num_tokens / launches)))


def tokens_within(config: MoEConfig, num_hosts: int) -> int:
    """Initial token capacity of a rank over hosts: its own tokens and those of other hosts."""
    expected = config.max_tokens * (1 + crossings(config, num_hosts)) * SPARE_TOKENS
    return min(math.ceil(expected), config.max_tokens * num_hosts)


def of_routes(config: MoEConfig, host_slots: int = 0) -> MoEConfig:
    """The layer whose tokens are the routes of another's; each rank has some experts more."""
    return dataclasses.replace(
        config,
        topk=1,
        max_tokens=config.max_tokens * config.topk,
        num_experts=config.num_experts + config.num_ranks * host_slots,
    )


def least_guest_rows(config: MoEConfig) -> int:
    """Returns the fewest rows of an expert that make up for its way to another host.

    For each number of its weights 2 bytes cross in forward, 2 in backward and 4 of its gradient
    return. A row that need not cross spares 2 bytes of each of its numbers four times. Cards carry
    as much of the one as of the other if places are alike.
    """
    return config.fc1_rows + config.intermediate


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """Rows that a layer over hosts sends, and their time, under uniform random routing.

    Attributes:
        rows: Rows that a token of a rank is to other hosts, in each direction; one comes back for
            each.
        row_bytes: A row's with its routes.
        card_bytes: What a rank sends out of its host in one dispatch, or receives in one combine.
        launch_tokens: Most tokens of one, those of other hosts included.
        heap_bytes: Rows of tokens and results in the symmetric heap.
    """

    num_hosts: int
    ranks_per_host: int
    rows: float
    row_bytes: int
    card_bytes: float
    launches: int
    launch_tokens: int
    heap_bytes: int


def plan_hosts(
    config: MoEConfig, num_hosts: int, *, is_fixed: bool = False, element_bytes: int = 2
) -> HostPlan:
    """Answers, before training, what crosses between hosts and what launches take for it.

    Args:
        config: The layer's shape, for all hosts together; every rank has ``config.max_tokens``.
        num_hosts: Hosts that its experts are spread over.
        is_fixed: Whether all tokens go to all hosts.
        element_bytes: Bytes of an element.
    """
    rows = num_hosts - 1.0 if is_fixed else crossings(config, num_hosts)
    every = config.max_tokens * num_hosts
    tokens = every if is_fixed else tokens_within(config, num_hosts)
    launches, most = plan_launches(config, num_hosts, tokens)
    share = share_of_host(config, num_hosts, most)
    row_bytes = config.hidden * element_bytes + share.topk * ROUTE_BYTES
    buffers = 1 + min(share.topk, share.num_ranks) if share.num_ranks > 1 else 0
    return HostPlan(
        num_hosts=num_hosts,
        ranks_per_host=share.num_ranks,
        rows=rows,
        row_bytes=row_bytes,
        card_bytes=rows * config.max_tokens * row_bytes,
        launches=launches,
        launch_tokens=most,
        heap_bytes=most * config.hidden * element_bytes * buffers,
    )


def forward_over_hosts(products: float, card: float, *, num_hosts: int, overlap: int) -> float:
    """The time of a layer's forward over hosts, by a model.

    Exchanges of a rank follow one another on its card, so that shares begin to return when the last
    tokens have arrived. What passes within a host, plans and sums are not in it. ``products`` is
    the time of its products, ``card`` that of its rows on a card in one direction; ``overlap``
    counts the launches for the tokens of other hosts, and 0 exchanges all before and after one.
    """
    if not overlap:
        return products + 2 * card
    remote = products * (1 - 1 / num_hosts) / overlap
    ready, back = products / num_hosts, card  # the own tokens' launch, and the last that arrive
    for leg in range(1, overlap + 1):
        ready = max(ready, card * leg / overlap) + remote
        back = max(back, ready) + card / overlap
    return back


def products_s(config: MoEConfig) -> float:
    """Seconds of a forward's products on one rank, at a perfect balance."""
    flops = config.topk * 2 * config.hidden * (config.fc1_rows + config.intermediate)
    return config.max_tokens * flops / TENSOR_FLOPS


def describe_hosts(
    config: MoEConfig, num_hosts: int, *, is_fixed: bool, overlap: int, by_route: bool = False
) -> str:
    """A sentence that says what :func:`plan_hosts` does, and what a forward takes by it.

    With ``by_route`` what crosses are a token's routes.
    """
    what = "token"
    if by_route:
        config, what = of_routes(config), "route"
    plan = plan_hosts(config, num_hosts, is_fixed=is_fixed)
    card, products = plan.card_bytes / CARD_BYTES_PER_S, products_s(config)
    forward = forward_over_hosts(products, card, num_hosts=num_hosts, overlap=overlap)
    return (
        f"{num_hosts} hosts of {plan.ranks_per_host}: a {what} of a rank crosses to "
        f"{plan.rows:.2f} other hosts{'' if is_fixed else ' on average'}, as a row of "
        f"{plan.row_bytes / 1024:.1f} KiB with its routes out and a row back, "
        f"{plan.card_bytes / 2**20:.0f} MiB over its network card each way; {plan.launches} "
        f"launch{'es' * (plan.launches > 1)} of at most {plan.launch_tokens} {what}s, for which "
        f"the symmetric heap's rows take {plan.heap_bytes / 2**20:.0f} MiB; at "
        f"{CARD_BYTES_PER_S / 1e9:.0f} GB/s a card a forward takes {forward * 1e3:.2f} ms by a "
        f"model, with products of {products * 1e3:.2f} ms and host_overlap={overlap}"
    )


def bounded_row_blocks(
    config: MoEConfig, row_bound: float | Literal["auto"], spare_slots: int = 0
) -> int:
    """Blocks of 128 rows that a rank's buffers hold under a bound; 0 if it is to be measured.

    The bound is a multiple of the mean number of rows per rank, if every rank has ``max_tokens``
    tokens. Every local expert and every spare slot may fill one block in part besides.
    """
    if row_bound == "auto":
        return 0
    rows = row_bound * config.max_tokens * config.topk
    return math.ceil(rows / TILE_M) + config.num_local_experts + spare_slots


@dataclass(frozen=True, kw_only=True)
class DispatchVolume:
    """Bytes that one rank hands to the exchange in one direction of one layer.

    Attributes:
        padded_bytes: What padding to capacity sends: every expert's capacity, filled or not.
        payload_bytes: What is sent here: the selected rows alone.
    """

    padded_bytes: int
    payload_bytes: int

    @property
    def saved_ratio(self) -> float:
        """Share of the padded volume that is not sent; 0 if there is none."""
        if self.padded_bytes == 0:
            return 0.0
        return 1.0 - self.payload_bytes / self.padded_bytes


def dispatch_volume(
    *, num_routes: int, num_experts: int, capacity: int, hidden: int, element_bytes: int = 2
) -> DispatchVolume:
    """Compares the bytes of a dispatch with those of padding to capacity, own experts included.

    Args:
        num_routes: Rows that the rank's tokens really have, after dropping.
        num_experts: Experts of the whole group.
        capacity: Rows per rank and expert that padding fills up.
        hidden: Elements of a row.
        element_bytes: Bytes of an element.

    Raises:
        ConfigError: A number is negative, or ``num_routes`` exceeds what the capacities admit.
    """
    for name, value in (
        ("num_experts", num_experts),
        ("capacity", capacity),
        ("hidden", hidden),
        ("element_bytes", element_bytes),
    ):
        if not is_count(value, least=0):
            raise ConfigError(f"{got(name, value)}: must be an int, and not negative")
    if not is_count(num_routes, least=0) or not 0 <= num_routes <= num_experts * capacity:
        raise ConfigError(
            f"{got('num_routes', num_routes)}: must be an int, 0 to num_experts * capacity = "
            f"{num_experts * capacity}"
        )
    row_bytes = hidden * element_bytes
    return DispatchVolume(
        padded_bytes=num_experts * capacity * row_bytes, payload_bytes=num_routes * row_bytes
    )


TENSOR_FLOPS = 700e12
MEMORY_BYTES_PER_S = 3.0e12
LINK_BYTES_PER_S = 370e9
"""Rates of a Hopper GPU per second: products in 16 bits, its memory, NVLink in one direction."""
CARD_BYTES_PER_S = 45e9
"""Bytes per second of a network card of 400 Gb/s in one direction."""
HIDDEN_PUSH = 0.0
"""The share of replicas' bytes that travels while rows do; none did on four H200s."""


def least_rows_of(link_bytes_per_s: float) -> int:
    """Returns the fewest rows of an expert that make up for a replica's traffic, at any size.

    For each number of an expert's weights, a replica moves 2 bytes in either direction of a layer
    and 4 bytes of its gradient, and each row takes 6 operations: 2 forward and 4 backward. Where
    the rate of the link is not known it is 0, and any replica is worth it.
    """
    if not link_bytes_per_s:
        return 0
    push_s = (1 - HIDDEN_PUSH) * 8 / link_bytes_per_s
    return round(push_s * TENSOR_FLOPS / 6)


MOST_FETCH_COST = 0.05
"""Rows are fetched again if that takes at most this share of a backward's products."""


def fetch_cost(config: MoEConfig, *, element_bytes: int = 2) -> float:
    """Estimates what a backward pays for rows that its forward did not keep.

    It is the time for the rows over the time for the products of a backward, with uniform routing.
    A token crosses a link once for each other rank that has an expert of its choice, and every
    received row is written once, its own rank's too; links and memory work at the same time. It is
    an upper bound as far as other work hides in it, and a lower one as far as tokens are few.
    """
    row_bytes = config.hidden * element_bytes
    fetch_s = max(
        crossings(config, config.num_ranks) * row_bytes / LINK_BYTES_PER_S,
        config.topk * 2 * row_bytes / MEMORY_BYTES_PER_S,
    )
    # fc1 and fc2, each for the gradients of its input and of its weights.
    weights = config.hidden * (config.fc1_rows + config.intermediate)
    return fetch_s / (config.topk * 4 * weights / TENSOR_FLOPS)


def choose_keep(keep: KeepOption, config: MoEConfig, *, reads_tokens: bool = False) -> Keep:
    """Returns what a forward keeps: the given choice or, with "auto", the choice by sizes.

    By sizes it is "preactivations" if backwards read tokens, or if :func:`fetch_cost` is at most
    ``MOST_FETCH_COST``; else it is "all". Rows have ``topk`` times as many bytes as tokens, as
    :func:`kept_bytes` counts both, and a backward that reads tokens copies them while its products
    run: on an H200 both directions take 0.2 to 1.2 % more time than with kept rows, where it was
    measured (tools/bench/results/2026-11-h200-1x.md, "Tokens of wide experts").

    Args:
        keep: The option.
        config: The layer's shape.
        reads_tokens: Whether the backend's backwards take what they need of rows from tokens.
    """
    if keep != "auto":
        return keep
    is_cheap = reads_tokens or fetch_cost(config) <= MOST_FETCH_COST
    return "preactivations" if is_cheap else "all"


def kept_bytes(config: MoEConfig, keep: Keep, *, element_bytes: int = 2) -> int:
    """Bytes that a forward keeps on one rank, at a perfect balance and without pad rows.

    The plan, some bytes a row, is not counted. With "preactivations" the layer's input is, which
    is kept for another fetch and may be another layer's output.
    """
    routes, rows = config.max_tokens * config.topk, config.max_tokens
    elements = {
        "all": routes * (config.hidden + config.fc1_rows),
        "preactivations": routes * config.fc1_rows + rows * config.hidden,
        "inputs": rows * config.hidden,
    }
    return elements[keep] * element_bytes


def describe_choice(config: MoEConfig, *, reads_tokens: bool) -> str:
    """A sentence that says what "auto" chooses for a layer, and why.

    Args:
        config: The layer's shape.
        reads_tokens: Whether the backend's backwards read tokens in place of rows.
    """
    chosen = choose_keep("auto", config, reads_tokens=reads_tokens)
    share = config.fc1_rows / (config.hidden + config.fc1_rows)
    if reads_tokens:
        return (
            f"keep auto is {chosen}: a backward on one GPU takes what it needs of rows from the "
            f"layer's input, and {share:.0%} of what rows and pre-activations take is kept"
        )
    return (
        f"keep auto is {chosen}: to fetch rows again would take {fetch_cost(config):.1%} of the "
        f"time of a backward's products, wanted at most {MOST_FETCH_COST:.0%}, and leave "
        f"{share:.0%} of the kept rows"
    )
