"""DeepSpeed's native MoE layer on flashmoe. Imported after DeepSpeed."""

from typing import Any

import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOE_TIMER, MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from flashmoe_megatron.adapters.deepspeed.experts import (
    ExpertForm,
    has_biases,
    read_weights,
    recognise,
)
from flashmoe_megatron.adapters.deepspeed.forwards import Watched
from flashmoe_megatron.adapters.deepspeed.gates import PaperGate
from flashmoe_megatron.adapters.deepspeed.layers import LayerInfo, Served, check_groups
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.weights import ExpertWeights, SplitWeights


class FlashMOELayer(MOELayer):  # type: ignore[misc]
    """Takes the place of a layer's class ``MOELayer``: DeepSpeed's gate, then our experts.

    Parameters, buffers and their names are those of ``MOELayer``; see ``layers.fuse`` for the
    further attributes.
    """

    flashmoe: Served
    watched: Watched
    form: ExpertForm

    def forward(self, *inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Routes and applies the experts. Collective over the layer's expert-parallel group.

        Sets ``l_aux`` and ``exp_counts`` as ``MOELayer`` does, and returns tokens in their shape.

        Args:
            *inputs: ``[..., hidden]`` tokens, and for k=1 a mask ``[num_tokens]`` of those in use.
            **kwargs: Not used by DeepSpeed either.

        Raises:
            ConfigError: The experts have changed.
        """
        if self.wall_clock_breakdown:
            self.timers(MOE_TIMER).start()
        hidden_states, used_token = inputs
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.l_aux, _, _, indices, _, gates, self.exp_counts = self.gate(x, used_token, True)
        self.flashmoe.set_training(self.training)
        out = self.flashmoe.experts(x, indices.t(), gates.t(), self._checked_weights)
        self.flashmoe.routes.count(self.exp_counts, indices)
        if self.wall_clock_breakdown:
            # The exchanges overlap with the experts, so neither has a time of its own.
            self.timers(MOE_TIMER).stop()
            self.time_moe = self.timers(MOE_TIMER).elapsed(reset=False)
        return out.reshape(hidden_states.shape)

    def _checked_weights(self) -> ExpertWeights | SplitWeights:
        """The experts' weights, where these still compute what the layer was attached for."""
        self.watched.check_unchanged(self.experts, lambda: _read_form(self)[0] == self.form)
        return read_weights(self.experts.deepspeed_experts, self.form)


STOCK_CLASS = MOELayer
FUSED_CLASS = FlashMOELayer
SUFFIX = ".deepspeed_moe"
"""Ends this layer's name, after the name of the MoE module that a model's author writes."""


def inspect(layer: MOELayer) -> LayerInfo:
    """Reads the structure of a layer in an engine.

    Raises:
        ConfigError: It cannot be served; says why.
    """
    if type(layer) is not MOELayer:
        raise ConfigError(f"{type(layer).__name__} is a subclass of MOELayer that is not known")
    if type(layer.gate) is not TopKGate and not isinstance(layer.gate, PaperGate):
        raise ConfigError(f"its gate is a {type(layer.gate).__name__}, wanted a TopKGate")
    if type(layer.experts) is not Experts:
        raise ConfigError(f"its experts are {type(layer.experts).__name__}, wanted Experts")
    if layer.use_tutel:
        raise ConfigError("it uses Tutel; leave use_tutel out")
    check_groups(layer, bwc_tensor_model_parallel_world_size(groups.mpu))
    watched = Watched(layer.experts)
    form, biases = _read_form(layer)
    shape = MoEConfig(
        hidden=form.hidden,
        intermediate=form.intermediate,
        num_experts=layer.num_local_experts * layer.ep_size,
        topk=layer.gate.k,
        activation=form.activation,
        gated=form.gated,
        num_ranks=layer.ep_size,
        max_tokens=1,
    )
    dtype = next(layer.experts.parameters()).dtype
    return LayerInfo(
        shape, layer.ep_group, dtype, watched, form, is_split=form.is_split, biases=biases
    )


def _read_form(layer: MOELayer) -> tuple[ExpertForm, tuple[bool, bool]]:
    """Finds out which function the experts compute, and which projections have biases."""
    experts = layer.experts.deepspeed_experts
    recognised = [recognise(expert, layer.gate.wg.in_features) for expert in experts]
    forms = {
        (form, has_biases(expert, form)) for expert, form in zip(experts, recognised, strict=True)
    }
    if len(forms) != 1:
        raise ConfigError(f"its experts differ from each other: {sorted(map(str, forms))}")
    (found,) = forms
    return found
