"""Lets Megatron-Bridge have our dispatcher, and leaves models alone that it builds for export.

Its recipes write the names of Megatron's dispatchers, so that our layers take their place there
(``FLASHMOE_REPLACES=alltoall,flex``), and its checks pass. A program that writes our own name into
a recipe would fail in those checks, or lose the name to a function that writes "flex": they see
Megatron's name for as long as they run.

Bridge also builds models, often on a host without GPUs, to export what they have loaded. These keep
their dispatcher.
"""

import logging
from collections.abc import Callable
from importlib import metadata
from inspect import signature
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.megatron.dispatcher import (
    FIELD,
    has_our_name,
    keep_dispatcher,
    replaced,
    showing,
)
from flashmoe_megatron.adapters.megatron.settings import STOCK_DISPATCHER_TYPE
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.releases import BRIDGE

_LOADS = "build_and_load_model"


def patch_loading(module: ModuleType) -> None:
    """Opts out the configurations of ``megatron.bridge.training.model_load_save``.

    A release that was not tried is said once.

    Raises:
        ConfigError: The release has no function for it, and a dispatcher is replaced.
    """
    version = metadata.version(BRIDGE.distribution)
    if not hasattr(module, _LOADS):
        if replaced():
            raise ConfigError(
                f"Megatron-Bridge {version} has no {_LOADS} in {module.__name__}, so that models "
                f"for export would be replaced, too; wanted {BRIDGE.wanted}"
            )
        return
    if replaced() and (problem := BRIDGE.problem(version)):
        logging.getLogger("flashmoe_megatron").warning("%s", problem)
    patch(module, _LOADS, _keeping)


def patch_overlaps(module: ModuleType) -> None:
    """Lets ``megatron.bridge.training.comm_overlap`` overlap micro-batches of our layers."""
    patch(module.CommOverlapConfig, "_get_model_comm_overlap_cfgs", _as_stock("model_cfg"))


def patch_dropping(module: ModuleType) -> None:
    """Lets ``megatron.bridge.training.utils.moe_token_drop`` set capacities of our layers."""
    patch(module, "apply_moe_token_drop", _as_stock("model_provider"))


def patch_flex(module: ModuleType) -> None:
    """Keeps our name where ``megatron.bridge.training.flex_dispatcher_backend`` writes another."""
    patch(module, "apply_flex_dispatcher_backend", _as_stock("model_config"))


def _as_stock(parameter: str) -> Callable[[Function], Function]:
    """Shows a function of Bridge's Megatron's name in a configuration with ours."""

    def make(original: Function) -> Function:
        parameters = signature(original)

        def run(*args: Any, **kwargs: Any) -> Any:
            config = parameters.bind(*args, **kwargs).arguments[parameter]
            config = getattr(config, "transformer", config)
            shown = {FIELD: STOCK_DISPATCHER_TYPE} if has_our_name(config) else {}
            with showing(config, shown):
                return original(*args, **kwargs)

        return run

    return make


def _keeping(original: Function) -> Function:
    parameters = signature(original)

    def build_and_load_model(*args: Any, **kwargs: Any) -> Any:
        model = parameters.bind(*args, **kwargs).arguments["model_cfg"]
        config = getattr(model, "transformer", model)  # a newer kind of configuration holds one
        if not has_our_name(config):
            keep_dispatcher(config)
        return original(*args, **kwargs)

    return build_and_load_model
