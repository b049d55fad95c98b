"""Routers of Megatron that choose by the gates of papers, in the place of its own.

A router here is Megatron's ``TopKRouter`` with another choice: its parameters are saved, reduced
and counted as the model's, and its z loss, auxiliary losses, their scaling and their logging are
Megatron's functions.
"""

import contextlib
import dataclasses
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.router import TopKRouter

from flashmoe_megatron.adapters.megatron.config.asked import is_other_than, is_set, number
from flashmoe_megatron.adapters.megatron.settings import current_settings, flag_of
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.gate_rules import (
    Choice,
    choose_gshard,
    choose_sigmoid,
    choose_xmoe,
    gshard_capacity,
    xmoe_logits,
    xmoe_width,
)
from flashmoe_megatron.options import GateKind


class GateRouter(TopKRouter):  # type: ignore[misc]
    """Routes by a gate's rule; each gate defines :meth:`choose`."""

    def choose(self, logits: torch.Tensor) -> Choice:
        """Chooses experts by ``[tokens, experts]`` logits in float32 or float64."""
        raise NotImplementedError

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns probabilities and the routing map, ``[tokens, experts]``, as Megatron's does.

        Args:
            logits: ``[sequence, batch, experts]``.
            padding_mask: ``[sequence, batch]`` bool, true where a token is padding: it counts for
                no loss.
        """
        length, batch, num_experts = logits.shape
        logits = logits.reshape(-1, num_experts)
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=padding_mask)
        choice = self.choose(logits if logits.dtype == torch.float64 else logits.float())
        probs, routing_map = self.drop(
            _spread(choice.topk_idx, choice.topk_weight, num_experts),
            _map_of(choice.topk_idx, num_experts),
        )
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            counted, scores = _map_of(choice.counted, num_experts), choice.scores
            is_padded = padding_mask is not None
            if padding_mask is not None:
                counted = counted & ~padding_mask[:, None]
                scores = scores * ~padding_mask[:, None]
            probs = self._apply_aux_loss(probs, scores, counted, with_padding_mask=is_padded)
            probs = self._apply_seq_aux_loss(
                probs, scores, counted, length, batch, with_padding_mask=is_padded
            )
            probs = self._apply_global_aux_loss(probs, scores, counted, with_padding_mask=is_padded)
        return probs, routing_map

    def drop(
        self, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives up routes beyond the capacity, as Megatron does."""
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return probs, routing_map
        dropped: tuple[torch.Tensor, torch.Tensor] = apply_router_token_dropping(
            probs,
            routing_map,
            router_topk=self.config.moe_router_topk,
            capacity_factor=factor,
            drop_policy=self.config.moe_token_drop_policy,
            pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
        )
        return dropped


class GShardRouter(GateRouter):
    """Routes as :class:`~flashmoe_megatron.gates.GShardGate`, with Megatron's capacity factor.

    Attributes:
        random_second: Whether second choices are tried at random while training.
    """

    random_second = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.topk = 1  # Megatron's auxiliary losses divide by it, and first choices alone count

    def choose(self, logits: torch.Tensor) -> Choice:
        """Chooses two experts of each token, as far as these have places."""
        return choose_gshard(
            logits,
            capacity=gshard_capacity(
                len(logits), logits.shape[1], self.config.moe_expert_capacity_factor
            ),
            drawn=self._draw(logits) if self.random_second and self.training else None,
        )

    def drop(
        self, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands both on: the rule has dropped what had no place."""
        return probs, routing_map

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws a number for each token, from the generator that Megatron's dropout has here."""
        # Tensor-parallel ranks have one generator in common, and tokens of their own where
        # sequences are cut.
        is_cut = self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if is_cut else contextlib.nullcontext():
            return torch.rand(len(logits), device=logits.device, dtype=logits.dtype)


class SigmoidRouter(GateRouter):
    """Routes as :class:`~flashmoe_megatron.gates.SigmoidGate`."""

    def choose(self, logits: torch.Tensor) -> Choice:
        """Chooses the largest logits."""
        return choose_sigmoid(logits, self.topk)


class XMoERouter(GateRouter):
    """Routes as :class:`~flashmoe_megatron.gates.XMoEGate` does by default.

    It has ``projection``, ``embeddings`` and ``temperature`` in place of Megatron's ``weight``, so
    that no checkpoint of another gate can be taken for its own.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        width = xmoe_width(config.num_moe_experts)
        self.weight = self.bias = None
        self.projection = torch.nn.Parameter(torch.empty(width, config.hidden_size))
        self.embeddings = torch.nn.Parameter(torch.empty(config.num_moe_experts, width))
        self.temperature = torch.nn.Parameter(torch.full((1,), 0.07))
        if config.perform_initialization:
            config.init_method(self.projection)
            config.init_method(self.embeddings)
        for parameter in (self.projection, self.embeddings, self.temperature):
            parameter.data = parameter.data.to(config.params_dtype)
            # Gradients of ranks that share a sequence are summed, as those of Megatron's weight.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Returns logits of ``[..., hidden]`` tokens in float32, or float64 if asked for."""
        is_double = self.config.moe_router_dtype == "fp64"
        tokens = input.double() if is_double else input.float()
        return xmoe_logits(tokens, self.projection, self.embeddings, self.temperature)

    def choose(self, logits: torch.Tensor) -> Choice:
        """Chooses the largest logits."""
        return choose_xmoe(logits, self.topk)


_ROUTERS: dict[GateKind, type[GateRouter]] = {
    "gshard": GShardRouter,
    "sigmoid": SigmoidRouter,
    "xmoe": XMoERouter,
}

_BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""Ways of Megatron to balance experts that are losses of scores and choices."""


def with_gate(config: Any, submodules: Any) -> Any:
    """Returns the parts of a MoE layer with the gate that the settings ask for as its router.

    Raises:
        ConfigError: The model asks for what that gate does not do.
    """
    kind = current_settings().gate
    if kind == "router":
        return submodules
    _check(kind, config)
    found = getattr(submodules, "router", None)
    if found is not TopKRouter:
        raise ConfigError(
            f"{flag_of('gate')} {kind} with a model whose router is {found!r}: wanted Megatron's "
            f"TopKRouter, or {flag_of('gate')} router"
        )
    return dataclasses.replace(submodules, router=_ROUTERS[kind])


def _check(kind: GateKind, config: Any) -> None:
    """Refuses settings of Megatron's router that a gate would not follow."""
    topk = number(config, "moe_router_topk", 1)
    score = "moe_router_score_function"
    balancing = config.moe_router_load_balancing_type
    names = balancing if isinstance(balancing, list) else [balancing]
    refused: list[tuple[bool, str, str]] = [
        (is_set(name)(config), f"--{name.replace('_', '-')}", "leave it out")
        for name in (
            "moe_router_num_groups",
            "moe_router_topk_scaling_factor",
            "moe_router_enable_expert_bias",
            "moe_enable_routing_replay",
        )
    ]
    refused += [
        (
            # Megatron asks for it where a token has one expert and the score is a softmax.
            is_set("moe_router_pre_softmax")(config) and topk > 1,
            "--moe-router-pre-softmax",
            "leave it out",
        ),
        (
            is_other_than(score, "softmax")(config),
            f"--moe-router-score-function {getattr(config, score, None)}",
            "leave it out",
        ),
        *(
            (
                name not in _BALANCED,
                f"--moe-router-load-balancing-type {name}",
                f"wanted some of {', '.join(_BALANCED)}",
            )
            for name in names
        ),
    ]
    if kind == "gshard":
        policy = config.moe_token_drop_policy
        refused += [
            (topk != 2, f"--moe-router-topk {topk}", "wanted 2"),
            (
                bool(config.moe_pad_expert_input_to_capacity),
                "--moe-pad-expert-input-to-capacity",
                "leave it out",
            ),
            (
                policy != "probs",
                f"--moe-token-drop-policy {policy}",
                "leave it out, since GShard has an order of its own",
            ),
        ]
    for is_asked, what, way_out in refused:
        if is_asked:
            flag = flag_of("gate")
            raise ConfigError(f"{flag} {kind} with {what}: {way_out}, or pass {flag} router")


def _map_of(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``[tokens, experts]`` bool, true at the experts of each token."""
    return _spread(topk_idx, torch.ones_like(topk_idx, dtype=torch.bool), num_experts)


def _spread(topk_idx: torch.Tensor, values: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``[tokens, experts]`` with the values at their experts; an index of -1 is none."""
    nowhere = topk_idx.masked_fill(topk_idx < 0, num_experts)
    table = values.new_zeros(len(topk_idx), num_experts + 1)
    return table.scatter(1, nowhere, values)[:, :num_experts].contiguous()
