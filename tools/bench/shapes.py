"""The layers that are measured, and random data for them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.weights import ExpertWeights
from tools.bench.stopwatch import device_here

SEED = 1000


@dataclass(frozen=True)
class Shape:
    """One layer, as its expert-parallel group sees it.

    Attributes:
        tokens: Tokens of one rank.
        hidden: Model width.
        intermediate: FFN width of one expert.
        num_experts: Experts of the whole group.
        topk: Experts that each token selects.
        gated: SwiGLU if true, else GELU.
    """

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    gated: bool

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's forward, at a perfect balance."""
        products = 3 if self.gated else 2
        return 2 * products * self.tokens * self.topk * self.hidden * self.intermediate

    def config(self, num_ranks: int) -> MoEConfig:
        """The layer on this many ranks."""
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            topk=self.topk,
            activation=Activation.SILU if self.gated else Activation.GELU,
            gated=self.gated,
            num_ranks=num_ranks,
            max_tokens=self.tokens,
        )

    def one_of(self, num_ranks: int) -> "Shape":
        """One rank's share of the experts with as many rows, for one GPU.

        Raises:
            ConfigError: The experts cannot be shared out evenly.
        """
        if self.num_experts % num_ranks:
            raise ConfigError(f"{self.num_experts} experts: wanted a multiple of {num_ranks} ranks")
        return replace(self, num_experts=self.num_experts // num_ranks)


def _paper(tokens: int, num_experts: int) -> Shape:
    return Shape(tokens, 2048, 2048, num_experts, 2, gated=False)


SHAPES = {
    "paper-1k": _paper(1024, 64),
    "paper-4k": _paper(4096, 64),
    "paper-8k": _paper(8192, 64),
    "paper-16k-e8": _paper(16384, 8),
    "paper-16k-e64": _paper(16384, 64),
    "paper-16k-e128": _paper(16384, 128),
    "qwen3-30b": Shape(8192, 2048, 768, 128, 8, gated=True),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2, gated=True),
    "deepseek-v3-e64": Shape(4096, 7168, 2048, 64, 8, gated=True),
}
"""The kernel is meant for these layers, and measured by them."""

ODD_SHAPES = {
    "qwen3-30b-t777": Shape(777, 2048, 768, 128, 8, gated=True),
    "qwen1.5-a2.7b": Shape(8192, 2048, 1408, 60, 4, gated=True),
    "deepseek-v2-lite": Shape(8192, 2048, 1408, 64, 6, gated=True),
    "deepseek-v2": Shape(4096, 5120, 1536, 160, 6, gated=True),
}
"""Tokens, a rank's experts or columns of a product are no multiple of a tile here."""

CCFUSER_SHAPES = {
    "m-gpt": Shape(8192, 768, 3072, 64, 2, gated=False),
    "m-bert": Shape(16384, 768, 3072, 64, 2, gated=False),
    "m-transxl": Shape(8192, 512, 2048, 64, 2, gated=False),
    **{
        f"m-gpt-e{count}": Shape(8192, 768, 3072, count, 2, gated=False) for count in (4, 8, 16, 32)
    },
}
"""CCFuser's three models and its sweep over experts; FFNs, of unknown width, are four times H."""

ALL_SHAPES = {**SHAPES, **ODD_SHAPES, **CCFUSER_SHAPES}


def shape_of(name: str, *, gated: bool = False) -> Shape:
    """One of ``ALL_SHAPES``, or the layer that ``8192x2048x2048x64x2`` describes.

    Args:
        name: The name or the description.
        gated: A layer that is described has SwiGLU, else GELU.

    Raises:
        ValueError: The name is neither, or a number of it is not positive.
    """
    if name in ALL_SHAPES:
        return ALL_SHAPES[name]
    sizes = name.split("x")
    if len(sizes) != 5 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"shape {name}: wanted TOKENSxHIDDENxINTERMEDIATExEXPERTSxTOPK or one of "
            f"{', '.join(ALL_SHAPES)}"
        )
    return Shape(*map(int, sizes), gated=gated)


def shares_of(shapes: dict[str, Shape], one_of: int, num_ranks: int = 1) -> dict[str, Shape]:
    """The layers that are measured on some ranks, by name.

    Args:
        shapes: The whole layers.
        one_of: One GPU has this part of the experts.
        num_ranks: Ranks of a layer's group.

    Raises:
        SystemExit: A layer cannot be so.
    """
    found = {}
    for name, whole in shapes.items():
        try:
            found[name] = whole.one_of(one_of)
            found[name].config(num_ranks)
        except ConfigError as error:
            raise SystemExit(f"error: shape {name}: {error}") from error
    return found


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
        """All local weights, fc1's first."""
        return (*self.weights.fc1, *self.weights.fc2)

    def remote_rows(self) -> float:
        """Rows that a rank has to send at least, one per token and other rank; the mean of ranks.

        Collective over the default group if there are several ranks.
        """
        config = self.config
        if config.num_ranks == 1:
            return 0.0
        by_rank = self.routing_map.view(-1, config.num_ranks, config.num_local_experts).any(2)
        by_rank[:, dist.get_rank()] = False
        rows = by_rank.sum().double()
        dist.all_reduce(rows)
        return float(rows) / config.num_ranks

    def imbalance(self) -> float:
        """Rows of the busiest rank relative to the mean. Collective as :meth:`remote_rows`."""
        config = self.config
        rows = self.routing_map.sum(0).view(config.num_ranks, -1).sum(1).double()
        if config.num_ranks > 1:
            dist.all_reduce(rows)
        return float(rows.max() / rows.mean())


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
) -> Problem:
    """Random tokens, weights and routing, others on every rank and the same in every run.

    Args:
        shape: The layer.
        num_ranks: Ranks of the default group; 1 without one.
        device: Where everything is made; this process's GPU, or its processor without a GPU, if
            not given.
        router: How experts are chosen; uniformly if not given.
        dtype: Tokens and weights have it.
    """
    device = device or device_here()
    rank = dist.get_rank() if num_ranks > 1 else 0
    g = torch.Generator(device).manual_seed(SEED + rank)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(size, dtype=dtype, device=device)
        return values.normal_(std=scale, generator=g)

    config = shape.config(num_ranks)
    local = config.num_local_experts
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
        ),
    )
