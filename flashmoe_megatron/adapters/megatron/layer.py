"""Makes Megatron's MoE layer run on flashmoe where its configuration says so.

Methods of Megatron's classes are wrapped in place, so that every specification, subclass and
``isinstance`` check of Megatron keeps seeing its own class. A layer or configuration of another
dispatcher type takes the original methods unchanged; such a layer only tells its dispatcher to the
other ranks of its group, should these have ours.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron.asked import (
    MEGAKERNEL,
    OVERLAP,
    ROW_BOUND,
    SHARED_OVERLAP,
    is_megakernel,
)
from flashmoe_megatron.adapters.megatron.fp8 import bfloat16_experts
from flashmoe_megatron.adapters.megatron.peers import check_dispatchers, tell_dispatcher
from flashmoe_megatron.adapters.megatron.schedule import check_schedule, reduce_gradients
from flashmoe_megatron.adapters.megatron.settings import (
    DISPATCHER_TYPE,
    STOCK_DISPATCHER_TYPE,
    current_settings,
)
from flashmoe_megatron.adapters.patch import Function, patch

ROUTED = "flashmoe_routed_experts"
"""Attribute of a layer that runs on flashmoe."""


def patch_config(transformer_config: ModuleType) -> None:
    """Refuses, when a configuration is made, what flashmoe cannot honour."""
    patch(transformer_config.TransformerConfig, "__post_init__", _checked_post_init)


def patch_layer(moe_layer: ModuleType) -> None:
    """Wraps the methods of ``MoELayer`` that lie between its router and its output."""
    patch(moe_layer.MoELayer, "__init__", _flashmoe_init)
    patch(moe_layer.MoELayer, "preprocess", _fused_step)
    patch(moe_layer.MoELayer, "dispatch", _identity)
    patch(moe_layer.MoELayer, "routed_experts_compute", _fused_compute)
    patch(moe_layer.MoELayer, "combine", _identity)
    patch(moe_layer.MoELayer, "postprocess", _fused_step)


def _checked_post_init(original: Function) -> Function:
    def post_init(self: Any) -> None:
        is_ours = self.moe_token_dispatcher_type == DISPATCHER_TYPE or is_megakernel(self)
        if is_ours and self.num_moe_experts:
            from flashmoe_megatron.adapters.megatron.refusals import CONFIG_REFUSALS, refuse

            refuse(self, CONFIG_REFUSALS)
            shown: dict[str, Any] = {ROW_BOUND: None}
            if is_megakernel(self):
                shown[MEGAKERNEL] = None  # its checks are of one backend's limits
            elif getattr(self, OVERLAP, False) or getattr(self, SHARED_OVERLAP, False):
                shown["moe_token_dispatcher_type"] = STOCK_DISPATCHER_TYPE
            with _showing(self, shown):
                original(self)
        else:
            original(self)

    return post_init


@contextlib.contextmanager
def _showing(config: Any, shown: dict[str, Any]) -> Iterator[None]:
    """Shows Megatron's checks other values of settings that they allow its own dispatchers alone.

    Settings that a release does not know are left alone.
    """
    held = {name: getattr(config, name) for name in shown if hasattr(config, name)}
    for name in held:
        setattr(config, name, shown[name])
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(config, name, value)


def _flashmoe_init(original: Function) -> Function:
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        config = arguments["config"]
        if config.moe_token_dispatcher_type != DISPATCHER_TYPE:
            with bfloat16_experts() if is_megakernel(config) else contextlib.nullcontext():
                original(self, *args, **kwargs)
            tell_dispatcher(getattr(self, "ep_group", None), config.moe_token_dispatcher_type)
            return
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        from flashmoe_megatron.adapters.megatron.dispatcher import FlashMoETokenDispatcher
        from flashmoe_megatron.adapters.megatron.refusals import CONFIG_REFUSALS, refuse
        from flashmoe_megatron.adapters.megatron.routed import RoutedExperts

        # A configuration can be changed after it was made, so it is checked again.
        refuse(config, CONFIG_REFUSALS)
        if getattr(config, OVERLAP, False):
            check_schedule()
        config.moe_token_dispatcher_type = STOCK_DISPATCHER_TYPE
        try:
            with bfloat16_experts():
                original(self, *args, **kwargs)
        finally:
            config.moe_token_dispatcher_type = DISPATCHER_TYPE
        groups = arguments.get("pg_collection") or get_default_pg_collection()
        self.token_dispatcher = FlashMoETokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
        )
        if self.use_shared_expert and self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
        tell_dispatcher(self.ep_group, DISPATCHER_TYPE)
        check_dispatchers(self.ep_group, timeout=current_settings().backend_options()["timeout"])
        tensor_group = getattr(groups, "expt_tp", None)
        setattr(self, ROUTED, RoutedExperts(config, self.experts, self.ep_group, tensor_group))
        self.experts.backward_dw = functools.partial(reduce_gradients, self.experts)

    return init


def _fused_step(original: Function) -> Function:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, ROUTED):
            return original(self, *args, **kwargs)
        with self.token_dispatcher.fused():
            return original(self, *args, **kwargs)

    return step


def _identity(original: Function) -> Function:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, ROUTED):
            return original(self, *args, **kwargs)
        tensors = (*args, *kwargs.values())
        return tensors[0] if len(tensors) == 1 else tensors

    return step


def _fused_compute(original: Function) -> Function:
    def routed_experts_compute(
        self: Any, hidden_states: torch.Tensor, probs: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not hasattr(self, ROUTED):
            return original(self, hidden_states, probs, *args, **kwargs)
        routed, dispatcher = getattr(self, ROUTED), self.token_dispatcher
        dispatcher.start_shared(hidden_states)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = routed(
            tokens,
            probs,
            dispatcher.routing_map,
            layer=number_in_model(self),
            experts=self.experts,
        )
        return dispatcher.add_shared(output.view(hidden_states.shape)), None

    return routed_experts_compute


def number_in_model(layer: Any) -> int:
    """A layer's number from 0, as Megatron's own metrics have it; 0 if nobody has set it.

    Layers of multi-token prediction follow the decoder's. From Megatron-Core 0.17 on they are
    marked and begin at 1 again.
    """
    number = int(layer.layer_number or 1) - 1
    if getattr(layer, "is_mtp_layer", False):
        number += int(layer.config.num_layers)
    return number
