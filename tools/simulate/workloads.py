"""Draws kinds of natural routing, which differ in who is hot, where, and for how long."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashmoe_megatron.replicas.placement import Counts
from tools.simulate.skew import TOKENS

HEAT = 9
"""How many times more often than another expert a hot one is chosen."""
Popularity = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """The routing of one step.

    Attributes:
        name: Its kind, and the step where steps differ.
        popularity: How often each expert is chosen, as one vector for each of equal stretches of a
            rank's tokens.
        tokens: Each rank's share of the tokens, over the mean.
    """

    name: str
    popularity: Sequence[Popularity]
    tokens: Sequence[float]

    def scores(self, num_tokens: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """``[tokens, experts]`` of one rank; a token's experts are those with the largest."""
        stretches = np.array_split(np.arange(num_tokens), len(self.popularity))
        with np.errstate(divide="ignore"):  # a token never chooses an expert of popularity 0
            parts = [
                np.log(popularity) + rng.gumbel(size=(len(stretch), len(popularity)))
                for popularity, stretch in zip(self.popularity, stretches, strict=True)
            ]
        return np.concatenate(parts)

    def counts(self, topk: int, rng: np.random.Generator, num_tokens: int = TOKENS) -> Counts:
        """``[rank][expert]`` routes of ranks with so many tokens on average."""
        found = []
        for share in self.tokens:
            scores = self.scores(round(share * num_tokens), rng)
            chosen = np.argpartition(-scores, topk - 1, axis=1)[:, :topk]
            found.append(np.bincount(chosen.ravel(), minlength=scores.shape[1]).tolist())
        return found


def workloads(num_ranks: int, num_experts: int) -> Iterator[Workload]:
    """Lists the kinds of Megatron-LM's token-imbalance benchmark (pull request 7488), then others.

    W0 to W7 have the benchmark's names and isolate what it says; the numbers are ours.
    """
    rng = np.random.default_rng(7)
    local, num_hot = num_experts // num_ranks, max(num_experts // num_ranks // 2, 1)
    even = [1.0] * num_ranks

    def popular(hot: Sequence[int] = (), heat: float = HEAT) -> Popularity:
        weight = np.ones(num_experts)
        weight[list(hot)] = heat
        return weight

    def zipf(exponent: float) -> Popularity:
        words: Popularity = np.arange(1, num_experts + 1) ** -exponent
        return rng.permutation(words)

    yield Workload("W0_balanced", [popular()], even)
    some = rng.choice(num_experts, num_hot, replace=False).tolist()
    yield Workload("W1_hot_expert_set", [popular(some)], even)
    yield Workload("W2_hot_rank", [popular(range(num_hot))], even)
    spread = range(0, num_experts, num_experts // num_hot)
    yield Workload("W3_spread_hot_experts", [popular(spread)], even)
    ragged = [2 * (rank + 1) / (num_ranks + 1) for rank in range(num_ranks)]
    yield Workload("W4_source_ragged", [popular(range(num_hot))], ragged)
    yield Workload("W5_zero_expert_rank", [popular(range(local + local // 2), 0)], even)
    for step in range(3):
        first_hot = step % num_ranks * local
        hot = range(first_hot, first_hot + num_hot)
        yield Workload(f"W6_rotating_hotspot, step {step}", [popular(hot)], even)
    for step in range(3):
        hot = range(local if step == 1 else 0)
        yield Workload(f"W7_burst, step {step}", [popular(hot)], even)
    for exponent in (0.25, 0.5, 0.75, 1.0, 1.25):
        yield Workload(f"Zipf {exponent}", [zipf(exponent)], even)
    yield Workload("one hot expert", [popular([0], 1e6)], even)
    first, last = zipf(1.0), zipf(1.0)
    for step in range(3):
        mixed = first ** (1 - step / 2) * last ** (step / 2)
        yield Workload(f"drift, step {step}", [mixed], even)
    calm = popular()
    burst = popular(range(num_hot), 100)
    yield Workload("burst within a sequence", [calm, burst, calm, calm], even)
