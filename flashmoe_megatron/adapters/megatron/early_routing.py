"""Routing ahead of attention: from a Transformer layer's input, before its attention has run.

``--flashmoe-placement lookahead`` predicts the routing there, to settle on replicas of hot experts
before they are needed; the routing itself stays that of Megatron. ``--flashmoe-pre-gate`` makes the
early routing the layer's routing, as CCFuser does, which is another model.
"""

import math
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron.buckets.hooks import await_parameters
from flashmoe_megatron.adapters.megatron.settings import flag_of
from flashmoe_megatron.adapters.megatron.shape import ROUTED, number_in_model
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.errors import ConfigError

_EARLY = "_flashmoe_early_routing"
"""Attribute of a MoE layer between its Transformer layer's input and its own router's turn."""


def patch_transformer_layer(transformer_layer: ModuleType) -> None:
    """Lets Transformer layers route, or predict the routing, before their attention."""
    patch(transformer_layer.TransformerLayer, "_forward_attention", _routing_first)


def patch_route(moe_layer: ModuleType) -> None:
    """Lets MoE layers take the routing that was found before attention."""
    patch(moe_layer.MoELayer, "route", _early_route)


def _routing_first(original: Function) -> Function:
    def forward_attention(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self, "mlp", None)
        routed = getattr(layer, ROUTED, None)
        if routed is not None and (routed.pre_gates or routed.looks_ahead):
            hidden_states = args[0] if args else kwargs["hidden_states"]
            if routed.pre_gates:
                mask, packed = kwargs.get("padding_mask"), kwargs.get("packed_seq_params")
                setattr(layer, _EARLY, _route(self, hidden_states, mask, packed))
                if routed.looks_ahead:
                    _, routing_map = getattr(layer, _EARLY)
                    routed.settle(routing_map, layer=number_in_model(layer))
            else:
                routed.settle(_predict(self, hidden_states), layer=number_in_model(layer))
        return original(self, *args, **kwargs)

    return forward_attention


def _early_route(original: Function) -> Function:
    def route(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        routed = getattr(self, ROUTED, None)
        if routed is None or not routed.pre_gates:
            return original(self, hidden_states, *args, **kwargs)
        found = self.__dict__.pop(_EARLY, None)
        num_tokens = math.prod(hidden_states.shape[:-1])
        if found is None or len(found[0]) != num_tokens:
            got = "none" if found is None else f"one of {len(found[0])} tokens"
            raise ConfigError(
                f"{flag_of('pre_gate')}: the layer has {num_tokens} tokens and got {got} of the "
                "routings that are found before attention; wanted a MoE layer within a "
                "TransformerLayer of Megatron, called as a whole and on all its tokens"
            )
        return found

    return route


def _route(
    layer: Any, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None, packed: Any
) -> Any:
    """Probabilities and routing map of a Transformer layer's input, in its MoE layer's order."""
    tokens = _normed(layer, hidden_states)
    # From Megatron-Core 0.19 on, packed samples reach the MoE layer side by side.
    if hasattr(layer, "_maybe_unflatten_for_moe"):
        tokens, padding_mask, _ = layer._maybe_unflatten_for_moe(tokens, padding_mask, packed)
    args = () if padding_mask is None else (padding_mask.transpose(0, 1).bool(),)
    return layer.mlp.router(tokens, *args)


def _normed(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Returns the norm's output; a norm that adds the residual also gives the residual."""
    output = layer.pre_mlp_layernorm(hidden_states)
    tokens: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tokens


@torch.no_grad()
def _predict(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The experts of the largest logits of a Transformer layer's input, ``[tokens, experts]``.

    The router's forward would count the tokens and add to the auxiliary losses.
    """
    router = layer.mlp.router
    await_parameters(router)
    logits = router.gating(_normed(layer, hidden_states))
    logits = logits.reshape(-1, logits.shape[-1])
    if getattr(router, "expert_bias", None) is not None:
        logits = logits.sigmoid() + router.expert_bias  # which a router of sigmoids alone has
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    return chosen.scatter_(1, logits.topk(router.config.moe_router_topk, dim=1).indices, True)
