"""Megatron-Core 0.16.1 and newer: ``--moe-token-dispatcher-type flashmoe``.

Importing this imports neither torch nor Megatron; :func:`install` attaches the patches to
Megatron's modules as they are imported, or at once if they are already.
"""

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.megatron import settings
from flashmoe_megatron.adapters.megatron.dispatcher import check_loaded, keep_dispatcher, replaced
from flashmoe_megatron.adapters.megatron.settings import Settings, current_settings
from flashmoe_megatron.adapters.patch import when_imported
from flashmoe_megatron.releases import MEGATRON

__all__ = ["Settings", "configure", "current_settings", "install", "keep_dispatcher"]

_PATCHES = (
    ("core.transformer.transformer_config", "config.refusals", "patch_config"),
    ("core.transformer.moe.moe_layer", "layer", "patch_layer"),
    ("core.transformer.moe.moe_layer", "early_routing", "patch_route"),
    ("core.transformer.transformer_layer", "early_routing", "patch_transformer_layer"),
    ("core.transformer.moe.experts", "fp8", "patch_experts"),
    ("core.transformer.moe.megakernel.factory", "megakernel", "patch_factory"),
    ("core.transformer.moe.moe_utils", "fixes", "define_te_general_gemm"),
    ("core.parallel_state", "config.communicators", "patch_groups"),
    ("core.distributed.param_and_grad_buffer", "buckets.ddp", "patch_buckets"),
    ("core.distributed.distributed_data_parallel", "buckets.ddp", "patch_ddp"),
    ("core.distributed.distributed_data_parallel", "repeat.iteration", "patch_ddp"),
    ("core.pipeline_parallel.schedules", "repeat.iteration", "patch_schedules"),
    ("core.transformer.moe.paged_stash", "repeat.iteration", "patch_stash"),
    ("core.rerun_state_machine", "repeat.verdicts", "patch_state_machine"),
    ("core.full_cuda_graph", "schedule", "patch_full_graph"),
    ("core.models.gpt.fine_grained_callables", "schedule", "patch_schedule"),
    ("core.models.common.utils", "schedule", "patch_schedule"),
    ("core.datasets.utils", "fixes", "keep_built_helpers"),
    ("training.arguments", "arguments", "patch_arguments"),
    ("training.checkpointing", "arguments", "patch_checkpointing"),
    ("training.global_vars", "config.notices", "patch_start"),
    ("training.global_vars", "metrics", "patch_wandb"),
    ("training.training", "metrics", "patch_training"),
    ("training.training", "buckets.sizes", "patch_training"),
    ("bridge.training.model_load_save", "bridge", "patch_loading"),
    ("bridge.training.comm_overlap", "bridge", "patch_overlaps"),
    ("bridge.training.utils.moe_token_drop", "bridge", "patch_dropping"),
    ("bridge.training.flex_dispatcher_backend", "bridge", "patch_flex"),
    ("training.models.dist_utils", "buckets.sizes", "patch_builders"),
)
"""A module of Megatron, and the module here and its function that patch it."""


def install() -> None:
    """Adds the dispatcher type "flashmoe" to Megatron, on the command line and in code.

    Call it in every process, before Megatron's arguments are parsed or a model is built; a second
    call does nothing. Models with another dispatcher type are not affected. Where there is no
    Megatron, a warning says how to install it; Megatron may still be imported later.

    Raises:
        ConfigError: The environment names a dispatcher that cannot be replaced.
    """
    attach()
    if importlib.util.find_spec("megatron") is None:
        import logging  # costs this import some milliseconds, which nothing else of it needs

        logging.getLogger("flashmoe_megatron").warning(
            "install() found no Megatron-Core, and waits for its import: %s", MEGATRON.install
        )


def attach() -> None:
    """Does what :func:`install` does, and says nothing where there is no Megatron.

    Raises:
        ConfigError: The environment names a dispatcher that cannot be replaced.
    """
    global _is_attached
    replaced()
    _is_attached = True
    for theirs, ours, function in _PATCHES:
        when_imported(f"megatron.{theirs}", functools.partial(_apply, ours, function))


def configure(**options: Any) -> Settings:
    """Chooses settings from code, for models that are built without Megatron's arguments.

    Takes effect for layers built later; goes before the command line. The options are fields of
    :class:`Settings`; what is left out has its default.

    Raises:
        ConfigError: A name is unknown, or a value has no meaning. Or ``FLASHMOE_REPLACES`` is set,
            torch does not load this package, and the program has not called ``install``.
    """
    check_loaded(is_attached=_is_attached)
    return settings.configure(**options)


_is_attached = False


def _apply(ours: str, function: str, theirs: ModuleType) -> None:
    """Imports what patches a module, which imports torch, when there is something to patch."""
    getattr(importlib.import_module(f"{__name__}.{ours}"), function)(theirs)
