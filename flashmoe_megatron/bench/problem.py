"""Random tokens, weights and routing of one rank for a layer that is measured."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashmoe_megatron.bench.shapes import Form, Shape
from flashmoe_megatron.bench.stopwatch import device_here
from flashmoe_megatron.bench.timer import everyone
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.weights import ExpertWeights

SEED = 1000


@dataclass
class Problem:
    """One rank's random data for a shape.

    Attributes:
        config: The layer.
        x: ``[tokens, hidden]`` bf16 or fp16, requires a gradient.
        grad_out: As ``x``, without a gradient.
        topk_idx: ``[tokens, topk]`` int64.
        topk_weight: ``[tokens, topk]`` float32, requires a gradient.
        probs: ``[tokens, num_experts]`` float32, the weights where selected; requires a gradient.
        routing_map: ``[tokens, num_experts]`` bool.
        weights: The local experts' parameters.
    """

    config: MoEConfig
    x: torch.Tensor
    grad_out: torch.Tensor
    topk_idx: torch.Tensor
    topk_weight: torch.Tensor
    probs: torch.Tensor
    routing_map: torch.Tensor
    weights: ExpertWeights

    def differentiate(
        self, forward: Callable[[], torch.Tensor], leaves: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """One forward, and its backward from :attr:`grad_out`.

        Args:
            forward: Computes ``[tokens, hidden]``.
            leaves: Forget the gradients of an earlier call, and get new ones.
        """
        for leaf in leaves:
            leaf.grad = None
        out = forward()
        torch.autograd.backward(out, self.grad_out)
        return out.detach()

    @torch.no_grad()
    def zero_values(self) -> None:
        """Makes all but the routing zeros, so that a GPU stays below its power limit.

        Sums of gradients in ``main_grad`` are among it.
        """
        sums = (weight.main_grad for weight in self.parameters if hasattr(weight, "main_grad"))
        for tensor in (self.x, self.grad_out, *self.parameters, *sums):
            tensor.zero_()

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """All local weights, fc1's first, and after them the biases if there are any."""
        return parameters_of(self.weights)

    def remote_rows(self) -> float:
        """Rows that a rank has to send at least, one per token and other rank; the mean of ranks.

        Collective over the default group if there are several ranks.
        """
        config = self.config
        if config.num_ranks == 1:
            return 0.0
        by_rank = self.routing_map.view(-1, config.num_ranks, config.num_local_experts).any(2)
        by_rank[:, dist.get_rank()] = False
        return sum(everyone().gather(int(by_rank.sum()))) / config.num_ranks

    def used_experts(self) -> float:
        """A rank's experts that any token chooses; the mean of ranks. Collective likewise."""
        config = self.config
        chosen = self.routing_map.any(0).tolist()
        ranks = everyone() if config.num_ranks > 1 else Ranks(None)
        return sum(map(any, zip(*ranks.gather(chosen), strict=True))) / config.num_ranks

    def imbalance(self) -> float:
        """Rows of the busiest rank relative to the mean. Collective as :meth:`remote_rows`."""
        config = self.config
        counts = self.routing_map.sum(0).view(config.num_ranks, -1).sum(1).tolist()
        ranks = everyone() if config.num_ranks > 1 else Ranks(None)
        rows = [sum(of_rank) for of_rank in zip(*ranks.gather(counts), strict=True)]
        return float(max(rows) * len(rows) / sum(rows))


def parameters_of(weights: ExpertWeights) -> tuple[torch.Tensor, ...]:
    """Returns all weights, fc1's first, and after them the biases if there are any."""
    return (*weights.fc1, *weights.fc2, *weights.fc1_bias, *weights.fc2_bias)


@dataclass(frozen=True)
class Router:
    """How experts are chosen.

    Attributes:
        zipf: The expert at place ``i`` of an order is chosen with a weight of ``(i + 1) ** -zipf``;
            0 is uniform.
        order: Seed of that order; ``None`` has the first rank's experts first, which no router is
            likely to learn.
        locality: Share of routes that stay on their token's rank, if experts are otherwise alike,
            less than 1; ``None`` prefers none.
    """

    zipf: float = 0.0
    order: int | None = None
    locality: float | None = None

    def weights(self, config: MoEConfig, rank: int, device: torch.device) -> torch.Tensor:
        """``[num_experts]`` float32, what each expert is chosen with by one rank's tokens."""
        places = torch.arange(1, config.num_experts + 1, dtype=torch.float32)
        if self.order is not None:
            g = torch.Generator().manual_seed(self.order)
            places = places[torch.randperm(config.num_experts, generator=g)]
        found = places**-self.zipf
        if self.locality is not None:
            own = slice(rank * config.num_local_experts, (rank + 1) * config.num_local_experts)
            found[own] *= self.locality / (1 - self.locality) * (config.num_ranks - 1)
        return found.to(device)


def make_problem(
    shape: Shape,
    num_ranks: int = 1,
    *,
    device: torch.device | None = None,
    router: Router | None = None,
    dtype: torch.dtype = torch.bfloat16,
    form: Form | None = None,
) -> Problem:
    """Random tokens, weights and routing, others on every rank and the same in every run.

    Args:
        shape: The layer.
        num_ranks: Ranks of the default group; 1 without one.
        device: Where everything is made; this process's GPU, or its processor without a GPU, if
            not given.
        router: How experts are chosen; uniformly if not given.
        dtype: Tokens and weights have it.
        form: What experts compute besides products; plain if not given.
    """
    device = device or device_here()
    rank = dist.get_rank() if num_ranks > 1 else 0
    g = torch.Generator(device).manual_seed(SEED + rank)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(size, dtype=dtype, device=device)
        return values.normal_(std=scale, generator=g)

    config = shape.config(num_ranks, form)
    local = config.num_local_experts

    def biases(width: int) -> tuple[torch.Tensor, ...]:
        count = local if form is not None and form.has_bias else 0
        return tuple(random(width, scale=0.5).requires_grad_() for _ in range(count))

    noise = torch.rand(shape.tokens, shape.num_experts, device=device, generator=g)
    popularity = (router or Router()).weights(config, rank, device)
    scores = -(-noise.clamp(1e-9, 1 - 1e-7).log()).log() + popularity.log()
    topk_weight, topk_idx = scores.softmax(1).topk(shape.topk, dim=1)
    topk_weight = topk_weight / topk_weight.sum(1, keepdim=True)
    empty = torch.zeros_like(noise)
    fc1 = [random(config.fc1_rows, shape.hidden, scale=shape.hidden**-0.5) for _ in range(local)]
    fc2 = [
        random(shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5)
        for _ in range(local)
    ]
    return Problem(
        config=config,
        x=random(shape.tokens, shape.hidden).requires_grad_(),
        grad_out=random(shape.tokens, shape.hidden),
        topk_idx=topk_idx,
        topk_weight=topk_weight.clone().requires_grad_(),
        probs=empty.scatter(1, topk_idx, topk_weight).requires_grad_(),
        routing_map=empty.bool().scatter_(1, topk_idx, True),
        weights=ExpertWeights(
            tuple(weight.requires_grad_() for weight in fc1),
            tuple(weight.requires_grad_() for weight in fc2),
            fc1_bias=biases(config.fc1_rows),
            fc2_bias=biases(shape.hidden),
        ),
    )
