"""Routed experts of runs in FP8: they compute in bfloat16 or, if asked, in blockwise FP8.

Their parameters are bfloat16 in either case.

Attention, dense layers and shared experts are Transformer Engine's, which decides by its autocast
in every call; nothing here changes them.
"""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.scales import fp8_manager

BFLOAT16_EXPERTS = (
    "routed experts compute in bfloat16 (--flashmoe-experts bf16); attention, dense layers and "
    "shared experts in FP8, as Transformer Engine does; with --flashmoe-experts fp8 tokens would "
    "travel, and be kept, in 0.52 of their bytes, and forwards of wide experts take less time: "
    "FP8.md has measurements"
)
"""The notice that the user of such a run receives."""

FP8_EXPERTS = (
    "routed experts compute forwards in blockwise FP8 (--flashmoe-experts fp8), with scales of "
    "1 x 128 and 128 x 128 that are powers of two, and backwards in bfloat16 from the same operands"
)
"""The notice that the user receives who has asked for it, with --fp8-format and without."""

FP8_DGRAD = (
    "routed experts compute forwards and gradients of tokens in blockwise FP8 (--flashmoe-experts "
    "fp8_dgrad), all of it E4M3, with scales of 1 x 128 and 128 x 128 that are powers of two, and "
    "gradients of weights in bfloat16"
)
"""The notice that the user receives who has asked for that."""

BFLOAT16_PARAMETERS = (
    "parameters of routed experts stay in bfloat16 with --fp8-param-gather, and are gathered so"
)
"""The notice that the user of that flag receives."""

_CLASSES = ("SequentialMLP", "TEGroupedMLP", "GroupedMLP")
"""The experts' classes in ``megatron.core.transformer.moe.experts``; releases differ."""

_builds_fused = ContextVar("builds_fused", default=False)


def bfloat16_layers(config: Any) -> str:
    """The notice of layers that stay in bfloat16 in a run with routed experts in FP8."""
    return (
        f"routed experts of the first {config.num_layers_at_start_in_bf16} and last "
        f"{config.num_layers_at_end_in_bf16} of {config.num_layers} layers compute in bfloat16 "
        "(--first-last-layers-bf16)"
    )


def fp8_is_on() -> bool:
    """Tells whether Transformer Engine's autocast is on in this call."""
    manager = fp8_manager()
    return manager is not None and bool(manager.is_fp8_enabled())


def patch_experts(module: ModuleType) -> None:
    """Lets experts' parameters be made in high precision within :func:`bfloat16_experts`."""
    for name in _CLASSES:
        if hasattr(module, name):
            patch(getattr(module, name), "__init__", _outside_fp8_parameters)


@contextlib.contextmanager
def bfloat16_experts() -> Iterator[None]:
    """Experts that are built within get bfloat16 parameters, also with ``--fp8-param-gather``.

    Megatron saves FP8 parameters dequantized, so a checkpoint is the same with either.
    """
    token = _builds_fused.set(True)
    try:
        yield
    finally:
        _builds_fused.reset(token)


def _outside_fp8_parameters(original: Function) -> Function:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        manager = fp8_manager()
        if not _builds_fused.get() or manager is None or not manager.with_fp8_parameters():
            original(self, *args, **kwargs)
            return
        engine = sys.modules["transformer_engine.pytorch"]
        # fp8_model_init is the older name.
        context = getattr(engine, "quantized_model_init", None) or engine.fp8_model_init
        with context(enabled=False):
            original(self, *args, **kwargs)

    return init
