"""DeepSpeed's AutoEP layer on flashmoe. Imported after DeepSpeed."""

from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_experts import GroupedExperts

from flashmoe_megatron.adapters.deepspeed.forwards import Watched
from flashmoe_megatron.adapters.deepspeed.layers import LayerInfo, Served, check_groups
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.weights import SplitWeights

_ACTIVATIONS = {
    "swiglu": Activation.SILU,
    "geglu_tanh": Activation.GELU_TANH,
    "swiglu_clamped": Activation.SILU,
    "swiglu_oai": Activation.QUICK_GELU,
}
"""Gated forms that are also ours, by DeepSpeed's names."""

_QUICK_GELU_ALPHA = 1.702


class FlashAutoEPMoELayer(AutoEPMoELayer):  # type: ignore[misc]
    """Takes the place of a layer's class ``AutoEPMoELayer``: its router, our experts.

    Parameters, buffers and their names are those of ``AutoEPMoELayer``; see ``layers.fuse``
    for the further attributes.
    """

    flashmoe: Served
    watched: Watched
    form: dict[str, Any]

    def forward(
        self, hidden_states: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Routes ``[batch, sequence, hidden]`` tokens, and sums up routed and shared experts.

        Collective over the layer's expert-parallel group. Returns what ``AutoEPMoELayer`` does.

        Raises:
            ConfigError: The experts have changed.
        """
        hidden = hidden_states.shape[-1]
        x = hidden_states.reshape(-1, hidden)
        scores, selected, tokens_per_expert = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(tokens_per_expert)
        self.flashmoe.set_training(self.training)
        out = self.flashmoe.experts(x, selected, scores, self._checked_weights)
        self.flashmoe.routes.count(tokens_per_expert, selected)
        output: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self._finalize_output(
            out.view(hidden_states.shape), x, hidden_states, hidden
        )
        return output

    def _checked_weights(self) -> SplitWeights:
        """The experts' weights, where these still compute what the layer was attached for.

        Attributes are read in each call, at which ZeRO-3 gathers them.
        """
        experts = self.experts
        self.watched.check_unchanged(experts, lambda: _form_of(experts) == self.form)
        return SplitWeights(gate=(experts.w1,), up=(experts.w3,), down=(experts.w2,))


STOCK_CLASS = AutoEPMoELayer
FUSED_CLASS = FlashAutoEPMoELayer
SUFFIX = ""


def inspect(layer: AutoEPMoELayer) -> LayerInfo:
    """Reads the structure of a layer in an engine.

    Raises:
        ConfigError: It cannot be served; says why.
    """
    experts = layer.experts
    if type(layer) is not AutoEPMoELayer:
        raise ConfigError(
            f"{type(layer).__name__} is a subclass of AutoEPMoELayer that is not known"
        )
    if not hasattr(layer, "_finalize_output"):
        raise ConfigError("AutoEP of this release is not known; install DeepSpeed 0.19.7 or newer")
    if type(experts) is not GroupedExperts:
        raise ConfigError(f"its experts are {type(experts).__name__}, wanted GroupedExperts")
    folding = layer.folding_group_handles
    check_groups(layer, 1 if folding is None else folding.spec.tp_size)
    if layer.score_apply != "post":
        raise ConfigError(
            f"it multiplies tokens with their scores before the experts (score_apply "
            f"{layer.score_apply!r}), wanted 'post'"
        )
    if layer.comm_backend != "comm":
        raise ConfigError(
            f"expert_parallel.comm_backend is {layer.comm_backend!r}, wanted 'comm' or 'flashmoe'"
        )
    form = _form_of(experts)
    watched = Watched(experts)
    # Sharded parameters are empty between uses, and an attribute carries their shape.
    _, intermediate, hidden = getattr(experts.w1, "ds_shape", experts.w1.shape)
    shape = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=layer.num_experts,
        topk=layer.top_k,
        gated=True,
        **form,
        num_ranks=layer.ep_size,
        max_tokens=1,
    )
    return LayerInfo(shape, layer.ep_group, experts.w1.dtype, watched, form, is_split=True)


def _form_of(experts: GroupedExperts) -> dict[str, Any]:
    """The activation of a layer's experts and its terms, as MoEConfig has them."""
    activation = getattr(experts, "activation", "swiglu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"its experts compute {activation!r}, wanted one of {', '.join(_ACTIVATIONS)}"
        )
    form: dict[str, Any] = {"activation": _ACTIVATIONS[activation]}
    if activation in ("swiglu_clamped", "swiglu_oai"):
        form["clamp_value"] = experts.activation_limit
    if activation == "swiglu_oai":
        form["linear_offset"] = 1.0
        if experts.activation_alpha != _QUICK_GELU_ALPHA:
            raise ConfigError(
                f"its experts' activation_alpha is {experts.activation_alpha}, wanted "
                f"{_QUICK_GELU_ALPHA}"
            )
    return form
