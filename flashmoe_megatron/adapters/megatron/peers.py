"""Finds out at the start that ranks of an expert-parallel group have different dispatchers.

Such ranks would wait for each other in different collectives, in silence, until the process group's
timeout. They talk through the store that the job's ranks have met in, since no collective can be
called by some of them alone.
"""

import torch.distributed as dist

from flashmoe_megatron.adapters.megatron.dispatcher import REPLACES, TORCH_LOADS, replaced
from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE, STOCK_DISPATCHER_TYPE
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.ranks import Answers, Ranks, StoreRanks
from flashmoe_megatron.torch_groups import torch_group


class _Dispatchers:
    """The dispatchers of all ranks' first layers in a group, once this rank has waited for them."""

    def __init__(self) -> None:
        self.answers: Answers[str] | None = None
        self.names: list[str] = []


def tell_dispatcher(group: dist.ProcessGroup | None, dispatcher: str) -> None:
    """Tells the other ranks the dispatcher of this rank's first MoE layer in a group.

    Not collective, and never waits.
    """
    known = _of(group)
    if known is not None and known.answers is None:
        # A check has its own timeout.
        ranks = StoreRanks(torch_group(group), timeout=0.0, purpose="dispatcher")
        known.answers = ranks.ask(dispatcher)


def check_dispatchers(group: dist.ProcessGroup | None, *, timeout: float) -> None:
    """Waits until all ranks of a group have stored their first layer's dispatcher, and compares.

    Does nothing for a group whose ranks have been found to agree. The timeout is in seconds.

    Raises:
        ConfigError: They differ, or a rank has built no MoE layer within the timeout.
    """
    known = _of(group)
    if known is None:
        return
    ranks: list[int] = dist.get_process_group_ranks(torch_group(group))
    assert known.answers is not None, "this rank has a layer"
    if not known.names and (silent := [ranks[one] for one in known.answers.silent(timeout)]):
        raise ConfigError(
            f"ranks {silent} of the expert-parallel group {ranks} have built no MoE layer within "
            f"{timeout:g} s; wanted --moe-token-dispatcher-type {DISPATCHER_TYPE} on every rank, "
            "with flashmoe_megatron installed on every host" + _of_environment()
        )
    names = known.names = known.names or known.answers.wait()
    if len(set(names)) > 1:
        pairs = zip(ranks, names, strict=True)
        listed = ", ".join(f"{name} on rank {rank}" for rank, name in pairs)
        raise ConfigError(
            f"the ranks of an expert-parallel group have different token dispatchers: {listed}; "
            f"pass one --moe-token-dispatcher-type, {DISPATCHER_TYPE} or {STOCK_DISPATCHER_TYPE}, "
            "on every rank" + _of_environment()
        )


def _of_environment() -> str:
    """Adds what the environment has to be, where it has chosen this rank's dispatcher."""
    return f", or one {REPLACES} and no {TORCH_LOADS}=0" if replaced() else ""


def _of(group: dist.ProcessGroup | None) -> _Dispatchers | None:
    """Returns what ranks know of a group, ``None`` where no other rank can answer."""
    group = torch_group(group)
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    if dist.get_backend(group) == "fake":  # ranks that are made up, for a dry run of one process
        return None
    return Ranks(group).once(_Dispatchers, make=_Dispatchers)
