"""Hears of what launches have found wrong that are replayed in Megatron's graph of an iteration.

A launch looks for the faults of those before it. In a replay nothing of the layer runs on the host,
which looks before it and behind it. Nor does a replay find out that the experts' process group has
been destroyed, so that the graph is dropped with the group.
"""

import functools
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron.routed import live_experts
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.ending import end_destroyed
from flashmoe_megatron.kernel.captured import Drop, dropped_by


def patch_full_graph(module: ModuleType) -> None:
    """Makes the wrapper of an iteration raise what the experts' launches have found.

    Args:
        module: ``megatron.core.full_cuda_graph``.
    """
    wrapper = module.FullCudaGraphWrapper
    drop = functools.partial(_drop_graphs, wrapper)
    patch(wrapper, "__call__", lambda original: _raise_faults(original, drop))


def _drop_graphs(wrapper: Any) -> None:
    """Has Megatron capture its graphs again, after the iterations with which it warms up."""
    for stage, graph in wrapper.cuda_graph.items():
        if graph is not None:
            graph.reset()
            wrapper.cuda_graph[stage] = wrapper.result[stage] = None
            wrapper.curr_iteration[stage] = 0


def _raise_faults(original: Function, drop: Drop) -> Function:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        end_destroyed()
        _raise_pending()
        with dropped_by(drop):
            result = original(self, *args, **kwargs)
        if any(routed.backend.config.num_ranks > 1 for routed in live_experts()):
            # Every rank's host hears of a fault here, before it steps, or some would an iteration
            # later. It waits for the norm of gradients soon anyway.
            torch.cuda.current_stream().synchronize()
        _raise_pending()
        return result

    return call


def _raise_pending() -> None:
    for routed in live_experts():
        routed.backend.raise_pending_fault()
