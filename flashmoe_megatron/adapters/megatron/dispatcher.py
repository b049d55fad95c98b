"""Tells which MoE layers are ours: by the dispatcher's name, or in place of another dispatcher.

``FLASHMOE_REPLACES=alltoall`` in the environment gives us the layers that were configured with
Megatron's own dispatcher of that name, for frameworks that know no other names. The configuration
keeps the name that the user gave it. Nothing else compares dispatchers' names.

Left alone are layers that are not for training, and those of configurations that
:func:`keep_dispatcher` has marked.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from flashmoe_megatron.adapters.megatron.settings import (
    DISPATCHER_TYPE,
    STOCK_DISPATCHER_TYPE,
    megatron_args,
)
from flashmoe_megatron.errors import ConfigError

FIELD = "moe_token_dispatcher_type"
"""The field of a TransformerConfig, and the argument of a script, that names the dispatcher."""

REPLACES = "FLASHMOE_REPLACES"
"""Environment variable with the names of the dispatchers whose layers are ours, with commas."""

REPLACEABLE: Mapping[str, str] = {
    STOCK_DISPATCHER_TYPE: "",
    "allgather": "Megatron's gathers all tokens on all ranks and adds up ranks' outputs; here "
    "tokens travel to their experts' ranks alone, and sums have another order",
    "flex": "the settings of DeepEP, HybridEP and NCCL EP have no effect, and sums have another "
    "order",
}
"""The dispatchers whose place can be taken, and what differs from each that the user should know.

Nothing does for the first one.
"""

TORCH_LOADS = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Environment variable of torch: with 0 it loads no plugin, and this package is one."""

_KEEPS = "flashmoe_keeps_dispatcher"
_SERVED = "flashmoe_serves"
"""Attributes of a configuration: it has opted out; its own number once a layer of it is ours."""


@functools.cache
def replaced() -> frozenset[str]:
    """Returns the dispatchers whose layers are ours, as this process's environment has said.

    It is read once, since a layer that has been built stays what it is.

    Raises:
        ConfigError: The environment names a dispatcher that cannot be replaced, or also turns off
            what this needs.
    """
    value = os.environ.get(REPLACES, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    for name in names:
        if name not in REPLACEABLE:
            raise ConfigError(
                f"{REPLACES}={value!r}: wanted {', '.join(REPLACEABLE)} or several of them with "
                f"commas, got {name!r}"
            )
    return frozenset(names)


def setting() -> str:
    """Writes the variable as the user has set it."""
    return f"{REPLACES}={os.environ.get(REPLACES, '')}"


def name_of(config: Any) -> str | None:
    """Returns the dispatcher's name in a TransformerConfig or in a script's arguments."""
    name: str | None = getattr(config, FIELD, None)
    return name


def has_our_name(config: Any) -> bool:
    """Tells whether the configuration itself names our dispatcher."""
    return name_of(config) == DISPATCHER_TYPE


def is_ours(config: Any) -> bool:
    """Tells whether the MoE layers of a TransformerConfig, or of a script's arguments, are ours."""
    if has_our_name(config) or _is_served(config):
        return True
    return name_of(config) in replaced() and not why_kept(config)


def effective_name(config: Any) -> str:
    """Returns the name of the dispatcher that moves a configuration's tokens."""
    return DISPATCHER_TYPE if is_ours(config) else str(name_of(config))


def replaced_name(config: Any) -> str:
    """Returns the dispatcher that a configuration names and we take the place of, else nothing."""
    return "" if has_our_name(config) or not is_ours(config) else str(name_of(config))


def why_kept(config: Any) -> str:
    """Says why a configuration keeps a dispatcher that is replaced elsewhere; empty if it does not.

    Only a choice of the user's and a model that is not trained count: a layer that is trained and
    cannot be ours is an error.
    """
    if getattr(config, _KEEPS, False):
        return "its configuration has opted out"
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        return "its transformer_impl, inference_optimized, is for inference"
    if getattr(config, "moe_megakernel_backend", None):
        return "its moe_megakernel_backend computes the layer"
    if getattr(megatron_args(), "modelopt_enabled", False):
        return "ModelOpt's models are for export"
    import torch  # is there where a layer is built

    return "it is built in torch.inference_mode" if torch.is_inference_mode_enabled() else ""


def keep_dispatcher(config: Any) -> None:
    """Opts a configuration out of ``FLASHMOE_REPLACES``: its layers keep their own dispatcher.

    Copies that are made with :mod:`copy` are opted out, too; ``dataclasses.replace`` makes a new
    configuration, which is not. So two models of one process may have different dispatchers.

    Args:
        config: A TransformerConfig, before a layer of it is built.

    Raises:
        ConfigError: It names our dispatcher, or one of its layers is ours already.
    """
    if has_our_name(config):
        raise ConfigError(
            f"keep_dispatcher: {FIELD} is {DISPATCHER_TYPE}; wanted {STOCK_DISPATCHER_TYPE} or "
            "another of Megatron's own"
        )
    if _is_served(config):
        raise ConfigError(
            "keep_dispatcher: a MoE layer of this configuration runs on flashmoe already; wanted "
            "the call before the model is built"
        )
    setattr(config, _KEEPS, True)


def note_served(config: Any) -> None:
    """Notes that a layer of a configuration is ours, so that :func:`is_ours` cannot change."""
    setattr(config, _SERVED, id(config))  # a copy's number is another


def _is_served(config: Any) -> bool:
    return bool(getattr(config, _SERVED, None) == id(config))


def about(config: Any) -> str:
    """Says what the environment's choice means for a MoE layer; empty where there is none."""
    name = name_of(config)
    if name is None or not replaced():
        return ""
    if has_our_name(config):
        return f"{setting()} changes nothing here: the dispatcher is {name} by its own name"
    if name not in replaced():
        return f"{setting()} leaves a MoE layer alone: its dispatcher is {name}"
    if not is_ours(config):
        return f"{setting()} leaves a MoE layer alone: {why_kept(config)}"
    differs = REPLACEABLE[str(name)]
    return f"{setting()}: MoE layers of {name} run on flashmoe" + (differs and f"; {differs}")


def way_back(config: Any) -> str:
    """Adds to a refusal how a replaced layer came to be ours, and how it is not."""
    name = replaced_name(config)
    return name and (
        f" ({setting()} puts flashmoe in the place of {name}: unset it, or call keep_dispatcher of "
        "flashmoe_megatron.adapters.megatron on the configuration)"
    )


def check_loaded(*, is_attached: bool) -> None:
    """Refuses to go on where the environment replaces a dispatcher and Megatron is not patched.

    Raises:
        ConfigError: Torch loads no plugins, and the program has not called ``install``.
    """
    if not is_attached and replaced() and os.environ.get(TORCH_LOADS) == "0":
        raise ConfigError(
            f"{setting()} has no effect with {TORCH_LOADS}=0, for torch loads no plugins then: "
            "unset that one, or call install of flashmoe_megatron.adapters.megatron first"
        )


@contextlib.contextmanager
def showing(config: Any, shown: Mapping[str, Any]) -> Iterator[None]:
    """Shows code of Megatron's other values of settings, which it allows its own dispatchers alone.

    Settings that a release does not know are left alone; all get the user's values back.
    """
    held = {name: getattr(config, name) for name in shown if hasattr(config, name)}
    for name in held:
        setattr(config, name, shown[name])
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(config, name, value)
