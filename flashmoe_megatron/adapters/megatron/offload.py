"""Lets Megatron move what a launch saves to the host's memory until its backward.

Megatron's experts save the input of their first projection in one group of tensors
(``--offload-modules expert_fc1``) and that of the activation in another (``moe_act``). A launch
saves both at once, so that they are one group here.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron.config.asked import offloads
from flashmoe_megatron.adapters.megatron.settings import flag_of
from flashmoe_megatron.autograd import OnSaved
from flashmoe_megatron.config import Keep

_SAVED_AS = {"expert_fc1": "rows", "moe_act": "preact"}
"""Megatron's name of a module, and what a forward has saved as its input."""

Launch = Callable[[torch.Tensor, OnSaved | None], torch.Tensor]
"""Computes ``[num_tokens, hidden]`` from the same; calls the second argument on what it saves."""


def run_offloaded(config: Any, x: torch.Tensor, launch: Launch) -> torch.Tensor:
    """Launches a layer, and moves the tensors that it saves to the host's memory if asked to."""
    modules = [module for module in _SAVED_AS if offloads(module)(config)]
    if not modules:
        return launch(x, None)
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload

    interface = megatron_offload.FineGrainedActivationOffloadingInterface
    manager = megatron_offload.PipelineOffloadManager.get_instance()
    group = interface(True, x, modules[0])
    with group as tokens, _only_chosen(manager) as chosen:

        def choose(saved: Any) -> None:
            for module in modules:
                kept = getattr(saved, _SAVED_AS[module], None)
                # Over hosts there may be several launches.
                each = kept if isinstance(kept, list) else [kept]
                chosen.extend(filter(torch.is_tensor, each))

        output = launch(tokens, choose)
    # Nothing is released by force: what has been copied has no other owner.
    delays = getattr(config, "delay_offload_until_cuda_graph", False)
    result: torch.Tensor
    if hasattr(group, "group_offload"):
        result = group.group_offload(output, delay_offload=delays)
    else:  # the name before Megatron-Core 0.19
        result = interface.group_commit(output, name=modules[0], delay_offload=delays)
    return result


def unused_modules(config: Any, keep: Keep) -> Iterator[str]:
    """Yields a sentence for each module to be offloaded whose input the layer does not keep."""
    kept = {"all": _SAVED_AS, "preactivations": ("moe_act",), "inputs": ()}[keep]
    for module in _SAVED_AS:
        if offloads(module)(config) and module not in kept:
            yield (
                f"--offload-modules {module} changes nothing with {flag_of('keep')} {keep}, which "
                "keeps no input of it"
            )


@contextlib.contextmanager
def _only_chosen(manager: Any) -> Iterator[list[torch.Tensor]]:
    """Gives Megatron's hooks, which are there already, only some of the tensors that are saved."""
    chosen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> Any:
        is_chosen = any(tensor is one for one in chosen)
        return manager.on_save_for_backward(tensor) if is_chosen else tensor

    def unpack(packed: Any) -> Any:
        return packed if torch.is_tensor(packed) else manager.on_get_saved_tensor(packed)

    if not getattr(manager, "inside_context", False):  # in evaluation, say
        yield chosen
        return
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield chosen
