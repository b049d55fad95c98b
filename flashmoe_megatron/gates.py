"""Gates from their papers, each a module that any backend can follow.

A gate turns tokens into a :class:`Routing`, and :class:`GatedExperts` puts it in front of a
:class:`~flashmoe_megatron.layer.FlashMoELayer`. Scores and weights are float32 (float64 if the
tokens are), also under ``torch.autocast``. Every statistic is that of this rank's tokens, which are
the group that the papers balance within.
"""

import math
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from flashmoe_megatron.call import Together
from flashmoe_megatron.checks import check_tensor
from flashmoe_megatron.config import (
    MAX_TOPK,
    check_class,
    check_switch,
    got,
    is_count,
    is_number,
    is_word,
)
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.gate_rules import (
    Choice,
    balance_loss,
    choose_gshard,
    choose_sigmoid,
    choose_xmoe,
    gshard_capacity,
    routes_to,
    xmoe_logits,
    xmoe_width,
)
from flashmoe_megatron.layer import FlashMoELayer

_Kind = TypeVar("_Kind", bound=nn.Module)


@dataclass(frozen=True)
class Routing:
    """A gate's decision for one call.

    Attributes:
        tokens: ``[rows, hidden]``, what the experts see: the tokens, or SoftMoE's slots.
        topk_idx: ``[rows, choices]`` int64, the experts of each row; -1 selects none.
        topk_weight: ``[rows, choices]``, their weights, 0 where none; differentiable.
        aux_loss: A scalar that a training adds to its loss, times a factor of its own; 0 for gates
            that need none.
        logs: Detached values to look at: ``load``, each expert's ``[num_experts]`` routes;
            ``dropped``, routes that the gate chose and gave up; ``unrouted``, tokens that no expert
            sees.
        mixing: ``[batch, tokens, rows of one sequence]`` for SoftMoE, whose tokens are sums of the
            experts' outputs; else ``None``.
    """

    tokens: torch.Tensor
    topk_idx: torch.Tensor
    topk_weight: torch.Tensor
    aux_loss: torch.Tensor
    logs: dict[str, torch.Tensor] = field(default_factory=dict)
    mixing: torch.Tensor | None = None

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` outputs from the experts' outputs for rows, ``[rows, hidden]``."""
        if self.mixing is None:
            return out
        batch, num_tokens, slots = self.mixing.shape
        rows = out.view(batch, slots, -1).to(self.mixing.dtype)
        with torch.autocast(out.device.type, enabled=False):
            mixed = self.mixing @ rows
        return mixed.to(out.dtype).view(batch * num_tokens, -1)


class Gate(nn.Module):
    """The base class of gates, which score every token for every expert.

    Attributes:
        num_choices: Most experts of one row, the least ``topk`` that the layer must have.
    """

    def __init__(self, hidden: int, num_experts: int, num_choices: int) -> None:
        """Refuses sizes that no layer has.

        Raises:
            ConfigError: A size cannot be served.
        """
        super().__init__()
        for name, value in (("hidden", hidden), ("num_experts", num_experts)):
            if not is_count(value, least=1):
                raise ConfigError(f"{got(name, value)}: wanted an int, at least 1")
        most = min(MAX_TOPK, num_experts)
        if not is_count(num_choices, least=1, most=most):
            raise ConfigError(
                f"{got('experts of a token', num_choices)}: wanted an int, 1 to {most}"
            )
        self.hidden, self.num_experts, self.num_choices = hidden, num_experts, num_choices

    def forward(self, x: torch.Tensor) -> Routing:
        """Routes tokens, ``[tokens, hidden]`` or, for SoftMoE, ``[batch, tokens, hidden]``."""
        with torch.autocast(x.device.type, enabled=False):
            return self.route(x)

    def route(self, x: torch.Tensor) -> Routing:
        """Decides for the tokens; each gate defines it. ``torch.autocast`` does not reach it."""
        raise NotImplementedError

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens in the dtype of scores."""
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ShapeError(f"x has shape {tuple(x.shape)}, wanted [tokens, {self.hidden}]")
        return _widened(x)

    def _routing(self, x: torch.Tensor, choice: Choice) -> Routing:
        """The routing that a rule's choice is."""
        logs = self._logs(choice.topk_idx, choice.dropped)
        return Routing(x, choice.topk_idx, choice.topk_weight, balance_loss(choice), logs)

    def _logs(self, topk_idx: torch.Tensor, dropped: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "load": routes_to(topk_idx, self.num_experts),
            "dropped": dropped,
            "unrouted": (~(topk_idx >= 0).any(1)).sum(),
        }


class GShardGate(Gate):
    """Top-2 with a capacity (Lepikhin et al., GShard, algorithm 1).

    Weights are the two largest softmax scores, divided by their sum. In the order of tokens first
    choices and then second choices take places; what finds its expert full is dropped, and its
    weight with it. A second choice of weight ``w`` is tried with probability ``min(1, 2 w)`` while
    training. The auxiliary loss is ``E * sum(mean score * share of first choices)``, the paper's
    times ``E ** 2``: 1 where all is even.

    Args:
        capacity_factor: An expert takes ``ceil(2 * tokens * factor / experts)`` rows of a rank;
            ``None`` for any number.
        random_second: Whether second choices are tried at random while training.
        generator: Draws these numbers, by default torch's own of the tokens' device.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        *,
        capacity_factor: float | None = 1.0,
        random_second: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(hidden, num_experts, 2)
        if capacity_factor is not None:
            _check_factor("capacity_factor", capacity_factor)
        check_switch("random_second", random_second)
        kinds = (torch.Generator, type(None))
        check_class("generator", generator, kinds, "a torch.Generator, or None")
        self.capacity_factor, self.random_second = capacity_factor, random_second
        self.generator = generator
        self.weight = _scorer(num_experts, hidden)

    def route(self, x: torch.Tensor) -> Routing:
        """Routes ``[tokens, hidden]``."""
        wide = self._wide(x)
        drawn = None
        if self.random_second and self.training:
            drawn = torch.rand(len(x), generator=self.generator, device=x.device, dtype=wide.dtype)
        capacity = gshard_capacity(len(x), self.num_experts, self.capacity_factor)
        logits = wide @ self.weight.to(wide).t()
        return self._routing(x, choose_gshard(logits, capacity=capacity, drawn=drawn))


class SigmoidGate(Gate):
    """The sigmoid of the product of a token and its expert's embedding (Lewis et al., BASE).

    Every token takes the ``topk`` experts of its largest products, as BASE does in evaluation;
    BASE's balanced assignment for training is not computed here. In its place the auxiliary loss is
    ``E * sum(mean score, normalised over experts * share of routes)``: 1 where all is even.

    Args:
        topk: Experts of a token; 1 in the paper.
    """

    def __init__(self, hidden: int, num_experts: int, *, topk: int = 1) -> None:
        super().__init__(hidden, num_experts, topk)
        self.weight = _scorer(num_experts, hidden)

    def route(self, x: torch.Tensor) -> Routing:
        """Routes ``[tokens, hidden]``."""
        wide = self._wide(x)
        logits = wide @ self.weight.to(wide).t()
        return self._routing(x, choose_sigmoid(logits, self.num_choices))


class XMoEGate(Gate):
    """Cosines in a space of few dimensions (Chi et al., On the Representation Collapse, X-MoE).

    A score is ``cos(P x, e) / tau``, of the projected token and the expert's embedding, with a
    learned temperature ``tau`` of at least 0.01. Weights are the scores' softmax over all experts,
    or their sigmoids. The auxiliary loss is ``E * sum(mean softmax * share of routes)``.

    Args:
        topk: Experts of a token; 1 in the paper.
        width: Dimensions of the space; by default half the number of experts, as in the paper.
        activation: "softmax" or "sigmoid".
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        *,
        topk: int = 1,
        width: int | None = None,
        activation: str = "softmax",
    ) -> None:
        super().__init__(hidden, num_experts, topk)
        width = xmoe_width(num_experts) if width is None else width
        if not is_count(width, least=1):
            raise ConfigError(f"{got('width', width)}: wanted an int, at least 1")
        if not is_word(activation, ("softmax", "sigmoid")):
            raise ConfigError(f"activation={activation!r}: wanted one of softmax, sigmoid")
        self.activation = activation
        self.projection = _scorer(width, hidden)
        self.embeddings = _scorer(num_experts, width)
        self.temperature = nn.Parameter(torch.tensor(0.07))

    def route(self, x: torch.Tensor) -> Routing:
        """Routes ``[tokens, hidden]``."""
        wide = self._wide(x)
        logits = xmoe_logits(wide, self.projection, self.embeddings, self.temperature)
        is_softmax = self.activation == "softmax"
        return self._routing(x, choose_xmoe(logits, self.num_choices, is_softmax=is_softmax))


class ExpertChoiceGate(Gate):
    """Every expert takes its best tokens (Zhou et al., Expert Choice Routing).

    An expert takes the ``tokens * capacity_factor / experts`` tokens (rounded down, at least 1) of
    its largest softmax scores, which are the weights. All experts are equally loaded, so there is
    no auxiliary loss. A token may have any number of experts, and keeps the ``max_routes`` of its
    largest scores; the rest is counted as dropped.

    Args:
        capacity_factor: Experts of a token in the mean.
        max_routes: Most experts of a token, at most 16; by default 16, or all.
        allow_future: Has to be true: a token's experts depend on later tokens, which a model that
            predicts the next token must not see.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        *,
        capacity_factor: float = 2.0,
        max_routes: int | None = None,
        allow_future: bool = False,
    ) -> None:
        most = min(MAX_TOPK, num_experts) if is_count(num_experts, least=1) else MAX_TOPK
        super().__init__(hidden, num_experts, most if max_routes is None else max_routes)
        _check_factor("capacity_factor", capacity_factor)
        if capacity_factor > num_experts:
            raise ConfigError(
                f"{got('capacity_factor', capacity_factor)}: an expert would take more tokens than "
                f"there are; wanted at most {num_experts}, the number of experts"
            )
        _check_future("expert choice", allow_future)
        self.capacity_factor = capacity_factor
        self.weight = _scorer(num_experts, hidden)

    def route(self, x: torch.Tensor) -> Routing:
        """Routes ``[tokens, hidden]``."""
        wide = self._wide(x)
        num_tokens = len(x)
        scores = (wide @ self.weight.to(wide).t()).softmax(1)
        places = max(int(num_tokens * self.capacity_factor / self.num_experts), 1)
        taken = scores.detach().topk(min(places, num_tokens), dim=0).indices
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(0, taken, True)
        best = scores.detach().masked_fill(~routing_map, -1).topk(self.num_choices, dim=1).indices
        kept = routing_map.gather(1, best)
        topk_idx = best.masked_fill(~kept, -1)
        weights = scores.gather(1, best) * kept
        dropped = routing_map.sum() - kept.sum()
        return Routing(x, topk_idx, weights, wide.new_zeros(()), self._logs(topk_idx, dropped))


class SoftMoEGate(Gate):
    """Experts see mixtures of tokens (Puigcerver et al., From Sparse to Soft Mixtures of Experts).

    Every expert has slots. A slot is the sum of a sequence's tokens, weighted by the softmax of its
    logits over tokens; a token's output is the sum of the slots' outputs, weighted by the softmax
    of its logits over slots. The slots are what the experts see, each with one expert of weight 1,
    so that every backend computes the layer as it does top-1. Tokens and slot parameters are
    normalised and scaled as the paper does for wide models. There is no auxiliary loss.

    Args:
        slots: Slots of one expert and sequence.
        allow_future: Has to be true: every slot depends on all tokens of a sequence, which a model
            that predicts the next token must not see.
    """

    def __init__(
        self, hidden: int, num_experts: int, *, slots: int = 1, allow_future: bool = False
    ) -> None:
        super().__init__(hidden, num_experts, 1)
        if not is_count(slots, least=1):
            raise ConfigError(f"{got('slots', slots)}: wanted an int, at least 1")
        _check_future("SoftMoE", allow_future)
        self.slots = slots
        self.weight = _scorer(num_experts * slots, hidden)
        self.scale = nn.Parameter(torch.ones(()))

    def route(self, x: torch.Tensor) -> Routing:
        """Mixes ``[batch, tokens, hidden]``, or ``[tokens, hidden]`` as one sequence."""
        sequences = x[None] if x.dim() == 2 else x
        if sequences.dim() != 3 or x.shape[-1] != self.hidden:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, wanted [batch, tokens, {self.hidden}] or "
                f"[tokens, {self.hidden}]"
            )
        if not sequences.shape[1]:
            raise ShapeError(f"x has shape {tuple(x.shape)}, wanted at least one token to mix")
        wide = _widened(sequences)
        keys = nn.functional.normalize(self.weight.to(wide), dim=1) * self.scale.to(wide)
        logits = nn.functional.normalize(wide, dim=2) @ keys.t()  # [batch, tokens, slots]
        slots = logits.softmax(1).transpose(1, 2) @ wide
        rows = slots.to(x.dtype).flatten(0, 1).contiguous()
        experts = torch.arange(self.num_experts, device=x.device).repeat_interleave(self.slots)
        topk_idx = experts.repeat(len(sequences))[:, None]
        return Routing(
            rows,
            topk_idx,
            wide.new_ones(topk_idx.shape),
            wide.new_zeros(()),
            self._logs(topk_idx, topk_idx.new_zeros(())),
            mixing=logits.softmax(2),
        )


class GatedExperts(nn.Module):
    """A gate in front of a layer; the call is collective as the layer's is."""

    def __init__(self, gate: Gate, layer: FlashMoELayer) -> None:
        """Puts the two together.

        Raises:
            ConfigError: Either is of another class, the gate is of another size, or it selects more
                experts than the layer can.
        """
        super().__init__()
        check_class("gate", gate, Gate, "a Gate of flashmoe_megatron.gates")
        check_class("layer", layer, FlashMoELayer, "a FlashMoELayer")
        config = layer.config
        for name in ("hidden", "num_experts"):
            if getattr(gate, name) != getattr(config, name):
                raise ConfigError(
                    f"the gate has {name}={getattr(gate, name)}, wanted the layer's, "
                    f"{getattr(config, name)}"
                )
        if gate.num_choices > config.topk:
            raise ConfigError(
                f"the gate selects up to {gate.num_choices} experts of a token, but the layer has "
                f"topk={config.topk}: wanted a layer of topk {gate.num_choices} or more"
            )
        self.gate, self.layer = gate, layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Routes and applies the experts.

        Args:
            x: ``[..., hidden]``; for SoftMoE the last but one dimension is a sequence.

        Returns:
            The output in the shape of ``x``, and the routing with its auxiliary loss and logs.

        Raises:
            ShapeError: On every rank of the layer's group: the tokens are none of the gate's, or it
                makes more rows of them than the layer was built for.
        """
        layer = _within(self.layer, FlashMoELayer)
        assert layer is not None
        with Together(layer.backend):
            if not isinstance(x, torch.Tensor) or x.dim() < 2:
                check_tensor("x", x)
                raise ShapeError(f"x has shape {tuple(x.shape)}, wanted [..., tokens, hidden]")
            width = x.shape[-1]
            is_soft = _within(self.gate, SoftMoEGate) is not None and x.dim() > 2
            given = x.reshape(-1, x.shape[-2], width) if is_soft else x.reshape(-1, width)
            routing = self.gate(given)
            most = layer.config.max_tokens
            if len(routing.tokens) > most:
                raise ShapeError(
                    f"the gate makes {len(routing.tokens)} rows of x of shape {tuple(x.shape)}, "
                    f"but the layer was built for max_tokens={most} per rank: wanted a layer of "
                    "more, or fewer slots"
                )
        out = self.layer(routing.tokens, routing.topk_idx, routing.topk_weight)
        return routing.finish(out).view(x.shape), routing


def _within(module: nn.Module, kind: type[_Kind]) -> _Kind | None:
    """A module of a kind, or the first that it wraps, as an adapter does."""
    return next((one for one in module.modules() if isinstance(one, kind)), None)


def _scorer(rows: int, width: int) -> nn.Parameter:
    """Drawn as ``nn.Linear`` draws: uniform within ``1 / sqrt(width)``."""
    return nn.Parameter(torch.empty(rows, width).uniform_(-1, 1) / math.sqrt(width))


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _check_factor(name: str, value: object) -> None:
    if not is_number(value, least=1e-6, most=1e6):
        raise ConfigError(f"{got(name, value)}: wanted a number, 1e-6 to 1e6")


def _check_future(what: str, allowed: bool) -> None:
    if allowed is not True:
        raise ConfigError(
            f"allow_future={allowed!r}: {what} lets a token's output depend on the tokens after "
            "it, which a model that predicts the next token must not see; wanted True where that "
            "is no harm"
        )
