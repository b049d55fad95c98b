"""Leaves models alone that Megatron-Bridge builds to read or convert a checkpoint.

Its recipes write the names of Megatron's dispatchers, check them and write them over, so that our
layers take their place there (``FLASHMOE_REPLACES=alltoall,flex``); nothing of that is patched. But
Bridge also builds models, often on a host without GPUs, to export what they have loaded.
"""

import logging
from importlib import metadata
from inspect import signature
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.megatron.dispatcher import has_our_name, keep_dispatcher, replaced
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


def _keeping(original: Function) -> Function:
    parameters = signature(original)

    def build_and_load_model(*args: Any, **kwargs: Any) -> Any:
        model = parameters.bind(*args, **kwargs).arguments["model_cfg"]
        config = getattr(model, "transformer", model)  # a newer kind of configuration holds one
        if not has_our_name(config):
            keep_dispatcher(config)
        return original(*args, **kwargs)

    return build_and_load_model
