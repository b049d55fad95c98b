"""Messages outside the links between their ranks: addresses, times and failures."""

from collections.abc import Sequence

import torch.distributed as dist

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.ranks import Ranks, StoreRanks, check_member


class Control(StoreRanks):
    """The ranks of a group with links between them.

    Args:
        group: The ranks; ``None`` for all of them.
        timeout: Seconds until a rank that does not answer is an error.

    Raises:
        ConfigError: torch.distributed is not initialized, or the group has one rank, or others than
            this one.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized: wanted a process group")
        check_member(group)
        ranks = Ranks(group or dist.group.WORLD)
        if ranks.num_ranks < 2:
            raise ConfigError("the group has one rank: wanted at least 2, between which links are")
        assert ranks.group is not None
        super().__init__(ranks.group, timeout, purpose="multipath")


def greatest(rows: Sequence[Sequence[float]]) -> list[float]:
    """The greatest of each column."""
    return [max(column) for column in zip(*rows, strict=True)]
