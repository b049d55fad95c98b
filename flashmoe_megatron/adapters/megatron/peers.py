"""Finds out at the start that ranks of an expert-parallel group have different dispatchers.

Such ranks would wait for each other in different collectives, in silence, until the process group's
timeout. They talk through the store with which the job's ranks have met, since no collective can be
called by some of them alone.
"""

import datetime
import weakref
from typing import Any

import torch.distributed as dist

from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE, STOCK_DISPATCHER_TYPE
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.per_group import next_name
from flashmoe_megatron.torch_groups import torch_group

_names: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()
"""Under which name the ranks of a group tell each other something, where this one has."""
_checked: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def tell_dispatcher(group: dist.ProcessGroup | None, dispatcher: str) -> None:
    """Tells the other ranks the dispatcher of this rank's first MoE layer in a group.

    Not collective, and never waits.

    Args:
        group: The layer's expert-parallel group.
        dispatcher: A value of ``--moe-token-dispatcher-type``.
    """
    group = torch_group(group)
    store = _store_of(group)
    if store is None or group is None or group in _names:
        return
    _names[group] = next_name(group)
    store.set(_key(group, dist.get_rank()), dispatcher)


def check_dispatchers(group: dist.ProcessGroup | None, *, timeout: float) -> None:
    """Waits until all ranks of a group have told their first layer's dispatcher, and compares them.

    Does nothing for a group whose ranks have been found to agree.

    Args:
        group: The expert-parallel group; this rank has told its own.
        timeout: Longest wait, in seconds.

    Raises:
        ConfigError: They differ, or a rank has built no MoE layer within the timeout.
    """
    group = torch_group(group)
    store = _store_of(group)
    if store is None or group is None or group in _checked:
        return
    ranks = dist.get_process_group_ranks(group)
    keys = [_key(group, rank) for rank in ranks]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError:
        silent = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        if not silent:
            raise
        raise ConfigError(
            f"ranks {silent} of the expert-parallel group {ranks} have built no MoE layer within "
            f"{timeout:g} s; wanted --moe-token-dispatcher-type {DISPATCHER_TYPE} on every rank, "
            "with flashmoe_megatron installed on every host"
        ) from None
    told = [store.get(key).decode() for key in keys]
    if len(set(told)) > 1:
        listed = ", ".join(f"{name} on rank {rank}" for rank, name in zip(ranks, told, strict=True))
        raise ConfigError(
            f"the ranks of an expert-parallel group have different token dispatchers: {listed}; "
            f"pass one --moe-token-dispatcher-type, {DISPATCHER_TYPE} or {STOCK_DISPATCHER_TYPE}, "
            "on every rank"
        )
    _checked.add(group)


def _store_of(group: dist.ProcessGroup | None) -> Any:
    """The job's store, ``None`` where there is no other rank to talk to."""
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    if dist.get_backend(group) == "fake":  # ranks that are made up, for a dry run of one process
        return None
    return dist.distributed_c10d._get_default_store()


def _key(group: dist.ProcessGroup, rank: int) -> str:
    return f"flashmoe/dispatcher/{_names[group]}/{rank}"
