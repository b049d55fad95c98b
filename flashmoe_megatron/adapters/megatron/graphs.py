"""Hears of what launches have found wrong that are replayed in Megatron's graph of an iteration.

A launch looks for the faults of those before it. In a replay nothing of the layer runs on the host.
"""

from types import ModuleType
from typing import Any

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
        _raise_pending()
        return result

    return call


def _raise_pending() -> None:
    for routed in live_experts():
        routed.backend.raise_pending_fault()
