"""Megatron-Core 0.16.1 and newer: ``--moe-token-dispatcher-type flashmoe``.

Importing this imports neither torch nor Megatron; :func:`install` attaches the patches to
Megatron's modules as they are imported, or at once if they are already.
"""

from types import ModuleType

from flashmoe_megatron.adapters.megatron.settings import Settings, configure, current_settings
from flashmoe_megatron.adapters.patch import when_imported

__all__ = ["Settings", "configure", "current_settings", "install"]


def install() -> None:
    """Adds the dispatcher type "flashmoe" to Megatron, on the command line and in code.

    Call it in every process, before Megatron's arguments are parsed or a model is built; a second
    call does nothing. Models with another dispatcher type are not affected.
    """
    when_imported("megatron.core.transformer.transformer_config", _patch_config)
    when_imported("megatron.core.transformer.moe.moe_layer", _patch_layer)
    when_imported("megatron.core.transformer.moe.moe_utils", _fix_router)
    when_imported("megatron.core.distributed.param_and_grad_buffer", _patch_buckets)
    when_imported("megatron.core.datasets.utils", _fix_datasets)
    when_imported("megatron.training.arguments", _patch_arguments)
    when_imported("megatron.training.global_vars", _patch_global_vars)
    when_imported("megatron.training.training", _patch_training)


# The patches import torch, so they are imported when there is something to patch.


def _patch_config(module: ModuleType) -> None:
    from flashmoe_megatron.adapters.megatron.layer import patch_config

    patch_config(module)


def _patch_layer(module: ModuleType) -> None:
    from flashmoe_megatron.adapters.megatron.layer import patch_layer

    patch_layer(module)


def _fix_router(module: ModuleType) -> None:
    from flashmoe_megatron.adapters.megatron.fixes import define_te_general_gemm

    define_te_general_gemm(module)


def _patch_buckets(module: ModuleType) -> None:
    from flashmoe_megatron.adapters.megatron.grad_reduce import patch_buckets

    patch_buckets(module)


def _fix_datasets(module: ModuleType) -> None:
    from flashmoe_megatron.adapters.megatron.fixes import keep_built_helpers

    keep_built_helpers(module)


def _patch_arguments(module: ModuleType) -> None:
    from flashmoe_megatron.adapters.megatron.arguments import patch_arguments

    patch_arguments(module)


def _patch_global_vars(module: ModuleType) -> None:
    from flashmoe_megatron.adapters.megatron.metrics import patch_global_vars

    patch_global_vars(module)


def _patch_training(module: ModuleType) -> None:
    from flashmoe_megatron.adapters.megatron.metrics import patch_training

    patch_training(module)
