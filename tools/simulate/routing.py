"""Rows and bytes that uniform random routing brings to a rank."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashmoe_megatron.bench.shapes import Shape

SEED = 1
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Load:
    """The rows that the busiest rank receives.

    Attributes:
        expert_rows: ``[local experts]`` int, rows of each.
        domain_rows: Distinct tokens of other ranks of its NVLink domain; each is fetched once, and
            one row of results goes back.
        network_rows: The same of other domains.
        imbalance: Its rows relative to the mean.
    """

    expert_rows: NDArray[np.int64]
    domain_rows: float
    network_rows: float
    imbalance: float


def hit_probability(num_experts: int, local_experts: int, topk: int) -> float:
    """Probability that a token selects at least one of a rank's experts, uniform routing."""
    if topk > num_experts - local_experts:
        return 1.0
    return 1.0 - math.comb(num_experts - local_experts, topk) / math.comb(num_experts, topk)


def busiest_rank(shape: Shape, num_gpus: int, domain: int) -> Load:
    """Draws a routing and returns what its busiest rank receives.

    Args:
        shape: The layer; its experts are a multiple of the GPUs.
        num_gpus: Ranks of the expert-parallel group.
        domain: GPUs of an NVLink domain.
    """
    if shape.num_experts % num_gpus:
        raise ValueError(f"{shape.num_experts} experts on {num_gpus} GPUs: not a whole number each")
    local = shape.num_experts // num_gpus
    rng = np.random.default_rng(SEED)
    tokens = num_gpus * shape.tokens
    counts = rng.binomial(tokens, shape.topk / shape.num_experts, (num_gpus, local))
    if num_gpus == 1:  # all routes stay here, however they fall
        counts[0] += _spread(tokens * shape.topk - int(counts.sum()), local)
    rows = counts.sum(axis=1)
    busiest = int(rows.argmax())
    mean = shape.tokens * shape.topk
    imbalance = float(rows[busiest] / mean)
    of_a_peer = shape.tokens * hit_probability(shape.num_experts, local, shape.topk) * imbalance
    peers = min(domain, num_gpus) - 1
    return Load(
        expert_rows=counts[busiest],
        domain_rows=peers * of_a_peer,
        network_rows=(num_gpus - 1 - peers) * of_a_peer,
        imbalance=imbalance,
    )


def maximal_incast_volume(
    tokens: int,
    num_experts: int,
    local_experts: int,
    hidden: int,
    remote_peers: int,
    element_bytes: int = ELEMENT_BYTES,
) -> float:
    """The paper's MIV: bytes that a NIC receives at most in one incast.

    ``MIV = tokens / experts * local experts * precision * hidden * 2 * remote peers``; the 2 stands
    for the rounds, dispatch and combine.

    Args:
        tokens: One rank's tokens.
        num_experts: Experts of the whole group.
        local_experts: One rank's experts.
        hidden: Elements of a row.
        remote_peers: Ranks of other domains.
        element_bytes: Size of an element.
    """
    return tokens / num_experts * local_experts * element_bytes * hidden * 2 * remote_peers


def _spread(total: int, places: int) -> NDArray[np.int64]:
    """A number, positive or negative, as even parts."""
    parts = np.full(places, total // places, dtype=np.int64)
    parts[: total % places] += 1
    return parts
