"""Makes Megatron's MoE layer run on flashmoe where its configuration says so.

Methods of Megatron's classes are wrapped in place, so that every specification, subclass and
``isinstance`` check of Megatron keeps seeing its own class. A layer or configuration of another
dispatcher type takes the original methods unchanged; such a layer only tells its dispatcher to the
other ranks of its group, should these have ours.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from flashmoe_megatron.adapters.megatron.config.asked import OVERLAP, is_megakernel
from flashmoe_megatron.adapters.megatron.config.refusals import CONFIG_REFUSALS, refuse
from flashmoe_megatron.adapters.megatron.config.replaced import OTHER_MEANINGS
from flashmoe_megatron.adapters.megatron.dispatcher import (
    FIELD,
    about,
    effective_name,
    is_ours,
    note_served,
    showing,
)
from flashmoe_megatron.adapters.megatron.fp8 import bfloat16_experts
from flashmoe_megatron.adapters.megatron.gate_routers import with_gate
from flashmoe_megatron.adapters.megatron.peers import check_dispatchers, tell_dispatcher
from flashmoe_megatron.adapters.megatron.routed import RoutedExperts, say_of_process
from flashmoe_megatron.adapters.megatron.schedule import check_schedule, reduce_gradients
from flashmoe_megatron.adapters.megatron.settings import STOCK_DISPATCHER_TYPE, current_settings
from flashmoe_megatron.adapters.megatron.shape import ROUTED, is_kept_in_bf16, number_in_model
from flashmoe_megatron.adapters.patch import Function, patch


class FlashMoETokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Remembers a call's routing for the fused layer, which moves the tokens itself.

    Inside :meth:`fused` its first and its last step hand the tokens on in the shape that they have;
    the steps between are not called. Outside, all six steps are those of Megatron's alltoall
    dispatcher, for code that calls them one by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A CUDA graph of the first step hands these on besides tokens and probabilities.
        self.cudagraph_attrs = ["routing_map"]
        self.routing_map: torch.Tensor | None = None
        self._is_fused = False

    @contextlib.contextmanager
    def fused(self) -> Iterator[None]:
        """Makes the first and the last step those of the fused layer."""
        self._is_fused = True
        try:
            yield
        finally:
            self._is_fused = False

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remembers the routing of a call, and hands tokens and probabilities on as they are.

        Args:
            hidden_states: ``[..., hidden]``.
            routing_map: ``[num_tokens, num_experts]`` bool.
            probs: ``[num_tokens, num_experts]``.
        """
        if self._is_fused:
            self.routing_map = routing_map
            return hidden_states, probs
        result: tuple[torch.Tensor, torch.Tensor] = super().dispatch_preprocess(
            hidden_states, routing_map, probs
        )
        return result

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hands the layer's output on."""
        if self._is_fused:
            return hidden_states
        result: torch.Tensor = super().combine_postprocess(hidden_states)
        return result

    def start_shared(self, hidden_states: torch.Tensor) -> None:
        """Puts the shared expert on its own stream, if ``--moe-shared-expert-overlap`` is on.

        Megatron's own dispatchers put its parts between the steps of their communication.
        """
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
            self.shared_experts.linear_fc1_forward_and_act()
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()

    def add_shared(self, output: torch.Tensor) -> torch.Tensor:
        """Adds what :meth:`start_shared` has put on that stream; waits for it there."""
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output


def patch_layer(moe_layer: ModuleType) -> None:
    """Wraps the methods of ``MoELayer`` that lie between its router and its output."""
    patch(moe_layer.MoELayer, "__init__", _flashmoe_init)
    patch(moe_layer.MoELayer, "preprocess", _fused(_with_whole_tokens))
    patch(moe_layer.MoELayer, "dispatch", _fused(_hand_on))
    patch(moe_layer.MoELayer, "routed_experts_compute", _fused(_compute))
    patch(moe_layer.MoELayer, "combine", _fused(_hand_on))
    patch(moe_layer.MoELayer, "postprocess", _fused(_with_whole_tokens))


def _flashmoe_init(original: Function) -> Function:
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        arguments = call.arguments
        config = arguments["config"]
        say_of_process(about(config))
        if not is_ours(config):
            with bfloat16_experts() if is_megakernel(config) else contextlib.nullcontext():
                original(self, *args, **kwargs)
            tell_dispatcher(getattr(self, "ep_group", None), effective_name(config))
            return
        # A configuration can be changed after it was made, so it is checked again.
        refuse(config, OTHER_MEANINGS)
        refuse(config, CONFIG_REFUSALS)
        if getattr(config, OVERLAP, False):
            check_schedule()
        arguments["submodules"] = with_gate(config, arguments.get("submodules"))
        note_served(config)
        with showing(config, {FIELD: STOCK_DISPATCHER_TYPE}), bfloat16_experts():
            original(*call.args, **call.kwargs)
        groups = arguments.get("pg_collection") or get_default_pg_collection()
        self.token_dispatcher = FlashMoETokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
        )
        if self.use_shared_expert and self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
        tell_dispatcher(self.ep_group, effective_name(config))
        check_dispatchers(self.ep_group, timeout=current_settings().backend_options()["timeout"])
        tensor_group = getattr(groups, "expt_tp", None)
        setattr(self, ROUTED, RoutedExperts(config, self.experts, self.ep_group, tensor_group))
        self.experts.backward_dw = functools.partial(reduce_gradients, self.experts)

    return init


def _fused(step: Function) -> Callable[[Function], Function]:
    """Makes a step of MoELayer another one in layers that run on flashmoe.

    Args:
        step: Gets the layer, Megatron's own step, and what that would get.
    """

    def make(original: Function) -> Function:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, ROUTED):
                return original(self, *args, **kwargs)
            return step(self, original, *args, **kwargs)

        return run

    return make


def _with_whole_tokens(layer: Any, original: Function, *args: Any, **kwargs: Any) -> Any:
    with layer.token_dispatcher.fused():
        return original(layer, *args, **kwargs)


def _hand_on(layer: Any, original: Function, *args: Any, **kwargs: Any) -> Any:
    tensors = (*args, *kwargs.values())
    return tensors[0] if len(tensors) == 1 else tensors


def _compute(
    layer: Any,
    original: Function,
    hidden_states: torch.Tensor,
    probs: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    routed, dispatcher = getattr(layer, ROUTED), layer.token_dispatcher
    dispatcher.start_shared(hidden_states)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    if not routed.num_calls and is_kept_in_bf16(layer):
        routed.keep_in_bf16()
    output = routed(
        tokens, probs, dispatcher.routing_map, layer=number_in_model(layer), experts=layer.experts
    )
    return dispatcher.add_shared(output.view(hidden_states.shape)), None
