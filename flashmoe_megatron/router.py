"""The fused router, which runs in the layer's launch: what it computes, in torch, and its gradient.

:func:`open_router` makes the tensors of one call and their node of autograd; the backend that runs
the layer next fills them in before it reads them. So the gradient of the logits is that of
probabilities which the layer and a user's auxiliary losses have used alike.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import torch

from flashmoe_megatron.config import MoEConfig, check_class, check_switch, is_number, is_word
from flashmoe_megatron.errors import ConfigError, FlashMoEError

Score = Literal["softmax", "sigmoid"]
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a token chooses its ``topk`` experts, as in Megatron's router.

    Every token chooses the experts with its largest logits.

    Attributes:
        score: What makes probabilities of logits. "sigmoid" divides by the sum of those chosen,
            where there are several (``--moe-router-score-function``).
        pre_softmax: Softmax over all experts and not over those chosen
            (``--moe-router-pre-softmax``).
        scaling_factor: What probabilities are multiplied by
            (``--moe-router-topk-scaling-factor``).
    """

    score: Score = "softmax"
    pre_softmax: bool = False
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what has no meaning."""
        if not is_word(self.score, get_args(Score)):
            raise ConfigError(f"score={self.score!r}: wanted one of {', '.join(get_args(Score))}")
        check_switch("pre_softmax", self.pre_softmax)
        if self.pre_softmax and self.score != "softmax":
            raise ConfigError(f"pre_softmax=True with score={self.score!r}: wanted 'softmax'")
        if not is_number(self.scaling_factor, least=-_LARGEST, most=_LARGEST):
            raise ConfigError(
                f"scaling_factor={self.scaling_factor!r}: wanted a finite number of float32"
            )

    def probs_of(self, logits: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """Probabilities of a choice that has been made; differentiable in the logits.

        All are ``[num_tokens, num_experts]``: logits float32 or float64, the map bool,
        probabilities 0 where not chosen.
        """
        if self.score == "sigmoid":
            scores = logits.sigmoid() * routing_map
            is_one = routing_map.sum(1, keepdim=True) == 1
            probs = torch.where(is_one, scores, scores / (scores.sum(1, keepdim=True) + 1e-20))
        elif self.pre_softmax:
            probs = logits.softmax(1) * routing_map
        else:
            probs = logits.masked_fill(~routing_map, -math.inf).softmax(1)
        factor = float(self.scaling_factor)  # an integer may exceed those of torch
        return probs * factor


@dataclass
class Router:
    """The fused router in one call of a layer: what it is to compute, and where that goes.

    Attributes:
        config: How a token chooses.
        weight: ``[num_experts, hidden]`` in the dtype of the tokens.
        logits: ``[num_tokens, num_experts]`` float32 (float64 if the tokens are), ``x @ weight.T``.
            The layer's forward writes these, the probabilities and the map.
        probs: ``[num_tokens, num_experts]`` in the dtype of the logits, 0 where not chosen.
        routing_map: ``[num_tokens, num_experts]`` bool, the experts that each token has chosen.
        versions: Autograd's versions of logits and map once they are filled in, since the gradient
            is computed from them.
    """

    config: RouterConfig
    weight: torch.Tensor
    logits: torch.Tensor
    probs: torch.Tensor
    routing_map: torch.Tensor
    versions: tuple[int, int] | None = None

    def close(self) -> None:
        """Notes that the forward has filled the tensors in: they may not change any more."""
        if not self.logits.is_inference():
            self.versions = self.logits._version, self.routing_map._version

    def check_unchanged(self) -> None:
        """Refuses a gradient from other logits than the forward's.

        Raises:
            FlashMoEError: Logits or map were changed in place.
        """
        if self.versions not in (None, (self.logits._version, self.routing_map._version)):
            raise FlashMoEError(
                "the router's logits or its routing map were changed in place, but its gradient "
                "is computed from them: change a clone"
            )

    def spoil(self) -> None:
        """Fills the tensors in for a call that has no result."""
        self.logits.fill_(math.nan)
        self.probs.fill_(math.nan)
        self.routing_map.zero_()

    def run(self, x: torch.Tensor, topk: int) -> None:
        """Fills the tensors in, on any device."""
        wide = self.logits.dtype
        with torch.no_grad():
            torch.mm(x.to(wide), self.weight.to(wide).t(), out=self.logits)
            # Stable: of equal logits the first is chosen, as in the kernel.
            chosen = self.logits.sort(dim=1, descending=True, stable=True).indices[:, :topk]
            self.routing_map.zero_().scatter_(1, chosen, True)
            self.probs.copy_(self.config.probs_of(self.logits, self.routing_map))


def refuse_second_derivative(what: str) -> None:
    """Raises an error if autograd is to make a graph of a backward whose operations it misses."""
    if torch.is_grad_enabled():
        raise FlashMoEError(
            f"the gradient of the MoE {what} was asked for with create_graph=True, but the {what} "
            "can be differentiated only once"
        )


def refuse_forward_mode(what: str) -> NoReturn:
    """Raises the error of a node whose derivatives autograd is asked for in forward mode."""
    raise FlashMoEError(
        f"the derivative of the MoE {what} was asked for in forward mode "
        "(torch.autograd.forward_ad): use .backward() or torch.autograd.grad"
    )


def open_router(
    moe: MoEConfig, x: torch.Tensor, weight: torch.Tensor, config: RouterConfig
) -> tuple[torch.Tensor, torch.Tensor, Router]:
    """Makes the tensors of a router that the next forward of ``x`` runs.

    Args:
        moe: The layer's shape.
        x: ``[num_tokens, hidden]``.
        weight: ``[num_experts, hidden]``, as ``checks.check_router_weight`` wants it.
        config: How a token chooses.

    Returns:
        Probabilities and logits, both differentiable in ``x`` and ``weight``, without meaning until
        that forward has run, and the router to give to it.

    Raises:
        ConfigError: ``config`` is of another class.
    """
    check_class("router", config, RouterConfig, "a RouterConfig")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = (x.shape[0], moe.num_experts)
    logits, probs = (torch.empty(shape, dtype=wide, device=x.device) for _ in range(2))
    routing_map = torch.empty(shape, dtype=torch.bool, device=x.device)
    router = Router(config, weight.detach(), logits, probs, routing_map)
    probs, logits = _Opened.apply(router, x, weight)  # type: ignore[no-untyped-call]
    return probs, logits, router


class _Opened(torch.autograd.Function):
    """Stands for the router in autograd; its outputs are written after it has run."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode("layer's router")

    @staticmethod
    def forward(
        ctx: Any, router: Router, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight)
        # Not among the saved tensors: they are written later, which autograd would take for a
        # mistake. No outputs of this node either, which would keep it alive.
        ctx.router = router
        return router.probs.detach(), router.logits.detach()

    @staticmethod
    def backward(
        ctx: Any, grad_probs: torch.Tensor, grad_logits: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
        refuse_second_derivative("layer's router")
        x, weight = ctx.saved_tensors
        router = ctx.router
        router.check_unchanged()
        with torch.enable_grad():
            logits = router.logits.detach().requires_grad_()
            probs = router.config.probs_of(logits, router.routing_map)
        grad = torch.autograd.grad(probs, logits, grad_probs)[0] + grad_logits
        grad_x = grad_weight = None
        with torch.autocast(x.device.type, enabled=False):  # which would narrow the products
            if ctx.needs_input_grad[1]:
                grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
            if ctx.needs_input_grad[2]:
                grad_weight = (grad.t() @ x.to(grad.dtype)).to(weight.dtype)
        return None, grad_x, grad_weight
