"""Keeps what a launch needs in Megatron's schedule of one forward beside one backward.

With ``--overlap-moe-expert-parallel-comm`` a layer is four nodes: attention and routing, dispatch,
experts, combine. The launch is the node of the experts, and the nodes around it hand on what they
get. Megatron frees the storage of a node's inputs behind its forward, for its own dispatchers have
copied them by then; here they are what the launch reads, and what its backward reads again.
"""

import importlib
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.forwards import with_all_below
from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.errors import ConfigError

_FREES = "should_free_input"
"""Megatron's answer to whether a node frees its inputs; its module depends on the release."""


MODULES = ("core.models.gpt.fine_grained_callables", "core.models.common.utils")
"""The modules of Megatron that may have it: the second one in 0.19."""


def patch_schedule(module: ModuleType) -> None:
    """Lets no node of a fused layer free its inputs, if it is this module that says so."""
    if hasattr(module, _FREES):
        patch(module, _FREES, _keep_inputs)


def reduce_gradients(experts: torch.nn.Module) -> None:
    """Takes the place of the experts' ``backward_dw``, with ``--delay-wgrad-compute``.

    Their weights' gradients are there by then: the launch has added them. But Transformer Engine
    has marked the weights, so that Megatron's DDP waits for this call to reduce them.

    Args:
        experts: The ``experts`` of a MoELayer.
    """
    for module in reversed(with_all_below(experts)):  # fc2's gradients were complete first
        for hook in getattr(module, "wgrad_accumulation_and_reduce_hooks", ()):
            hook()


def check_schedule() -> None:
    """Makes sure that what a launch needs is kept, whatever the release.

    Raises:
        ConfigError: None of the modules has the function.
    """
    for name in MODULES:
        try:
            module = importlib.import_module(f"megatron.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, _FREES):
            return
    raise ConfigError(
        f"--overlap-moe-expert-parallel-comm: this release of Megatron-Core has no {_FREES} in "
        f"{' or '.join(MODULES)}, which keeps what a backward needs; leave the flag out"
    )


def _keep_inputs(original: Function) -> Function:
    def should_free_input(name: str, is_moe: bool, config: Any, *more: Any, **options: Any) -> bool:
        if config.moe_token_dispatcher_type == DISPATCHER_TYPE:
            return False
        return bool(original(name, is_moe, config, *more, **options))

    return should_free_input
