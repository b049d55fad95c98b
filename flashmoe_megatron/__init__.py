"""Distributed mixture-of-experts in one persistent GPU kernel.

The public names; each is imported when it is first used, so that importing the package costs
nothing and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flashmoe_megatron._version import __version__

if TYPE_CHECKING:
    from flashmoe_megatron.autograd import moe_apply
    from flashmoe_megatron.backend import Backend, ExpertWeights, TrafficCounters, WeightGrad
    from flashmoe_megatron.config import Activation, MoEConfig, align_capacity
    from flashmoe_megatron.errors import (
        ConfigError,
        DeviceError,
        FlashMoEError,
        HeapError,
        PeerTimeoutError,
        RoutingError,
        RowBoundError,
        ShapeError,
    )
    from flashmoe_megatron.layer import FlashMoELayer, RouterOutput, moe_forward, moe_router_forward
    from flashmoe_megatron.planner import (
        dispatch_volume,
        expert_capacity,
        plan_buffer_rows,
        plan_capacity,
    )
    from flashmoe_megatron.reference.backend import ReferenceBackend
    from flashmoe_megatron.reference.oracle import moe_reference
    from flashmoe_megatron.router import RouterConfig
    from flashmoe_megatron.select import select_backend
    from flashmoe_megatron.weights import SplitWeights

__all__ = [
    "Activation",
    "Backend",
    "ConfigError",
    "DeviceError",
    "ExpertWeights",
    "FlashMoEError",
    "FlashMoELayer",
    "HeapError",
    "MoEConfig",
    "PeerTimeoutError",
    "ReferenceBackend",
    "RouterConfig",
    "RouterOutput",
    "RoutingError",
    "RowBoundError",
    "ShapeError",
    "SplitWeights",
    "TrafficCounters",
    "WeightGrad",
    "__version__",
    "align_capacity",
    "dispatch_volume",
    "expert_capacity",
    "moe_apply",
    "moe_forward",
    "moe_reference",
    "moe_router_forward",
    "plan_buffer_rows",
    "plan_capacity",
    "select_backend",
]

_HOME = {
    name: module
    for module, names in {
        "autograd": ("moe_apply",),
        "backend": ("Backend", "ExpertWeights", "WeightGrad", "TrafficCounters"),
        "config": ("Activation", "MoEConfig", "align_capacity"),
        "errors": (
            "ConfigError",
            "DeviceError",
            "FlashMoEError",
            "HeapError",
            "PeerTimeoutError",
            "RoutingError",
            "RowBoundError",
            "ShapeError",
        ),
        "router": ("RouterConfig",),
        "layer": ("FlashMoELayer", "RouterOutput", "moe_forward", "moe_router_forward"),
        "planner": ("dispatch_volume", "expert_capacity", "plan_buffer_rows", "plan_capacity"),
        "reference.oracle": ("moe_reference",),
        "reference.backend": ("ReferenceBackend",),
        "select": ("select_backend",),
        "weights": ("SplitWeights",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flashmoe_megatron' has no attribute {name!r}")
    return getattr(importlib.import_module(f"flashmoe_megatron.{_HOME[name]}"), name)
