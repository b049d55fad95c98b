"""Hears of what launches have found wrong that are replayed in Megatron's graph of an iteration.

A launch looks for the faults of those before it. In a replay nothing of the layer runs on the host,
which looks before it and behind it.
"""

from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron.routed import live_experts
from flashmoe_megatron.adapters.patch import Function, patch


def patch_full_graph(module: ModuleType) -> None:
    """Makes the wrapper of an iteration raise what the experts' launches have found.

    Args:
        module: ``megatron.core.full_cuda_graph``.
    """
    patch(module.FullCudaGraphWrapper, "__call__", _raise_faults)


def _raise_faults(original: Function) -> Function:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _raise_pending()
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
