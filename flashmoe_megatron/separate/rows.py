"""How many rows travel: what the ranks of a group tell each other before any does."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError, RowBoundError
from flashmoe_megatron.ranks import Ranks


class RowExchange:
    """The numbers of rows between the ranks of a group; every method is collective over it.

    Attributes:
        ranks: The ranks of the group.
        rank: This one among them.
        traffic: What was sent and padded so far.
    """

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup | None) -> None:
        """Binds the layer to a process group.

        Args:
            config: The layer's shape.
            group: The expert-parallel group, ``None`` for one rank.

        Raises:
            ConfigError: The group's size is not ``config.num_ranks``.
        """
        self.ranks = Ranks(group)
        if self.ranks.num_ranks != config.num_ranks:
            raise ConfigError(
                f"num_ranks={config.num_ranks}, but the process group has {self.ranks.num_ranks} "
                "ranks"
            )
        self.traffic = TrafficCounters()
        self._config = config
        self._group = group
        self.rank = self.ranks.rank

    def check_bound(self, blocks: int, most: int, counts: torch.Tensor) -> None:
        """Refuses, on every rank, the blocks of rows that the fullest rank is to receive."""
        of_ranks = self._exchange_counts(counts.new_full((self._config.num_ranks,), blocks))
        refuse_beyond(of_ranks.tolist(), most)

    def tell_counts(self, send: torch.Tensor) -> torch.Tensor:
        """Tells the others how many routes this rank has to each expert.

        Args:
            send: ``[num_experts]`` int64, the numbers of routes.

        Returns:
            ``[num_ranks, num_local_experts]``, the routes of each rank to this one's experts.
        """
        recv = self._exchange_counts(send)
        return recv.view(self._config.num_ranks, self._config.num_local_experts)

    def gather_counts(self, send: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' routes to each expert, ``[num_ranks, num_experts]``.

        Args:
            send: ``[num_experts]`` int64, this rank's.
        """
        if self._group is None:
            return send[None]
        everyone = send.new_empty(self._config.num_ranks * len(send))
        # torch has renamed the function and warns of its old name.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        with self.ranks.bounded:
            gather(everyone, send, group=self._group)
        return everyone.view(self._config.num_ranks, -1)

    def _exchange_counts(self, send: torch.Tensor) -> torch.Tensor:
        """Sends each rank its share of the counts, all shares alike; returns the received."""
        if self._group is None:
            return send
        recv = torch.empty_like(send)
        with self.ranks.bounded:
            dist.all_to_all_single(recv, send, group=self._group)
        return recv


def refuse_beyond(blocks: Sequence[int], most: int) -> None:
    """Refuses what the fullest rank is to receive, by the blocks of rows of each, beyond a bound.

    Raises:
        RowBoundError: It names that rank.
    """
    fullest = max(range(len(blocks)), key=blocks.__getitem__)
    if blocks[fullest] > most:
        raise RowBoundError.of(fullest, blocks[fullest], most)
