"""Expert tensor parallelism: ranks that each have a slice of the same experts' matrices.

Every one of them computes its slice for the rows of all, so rows are gathered after the exchange
with the expert-parallel ranks, and the results, which are summands, are summed and scattered before
the way back. Rows are as ragged as they are there, and none is padded.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.separate.activations import accumulation_dtype
from flashmoe_megatron.separate.lanes import Lane, Mark


class TensorGroup:
    """Exchanges of the ranks that share experts; every call is collective over them.

    Attributes:
        ranks: These ranks.
        size: How many they are.
        rank: This one's number among them.
    """

    def __init__(
        self, group: dist.ProcessGroup, traffic: TrafficCounters, device: torch.device
    ) -> None:
        """Binds it to a group of two or more ranks."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = Ranks(
            group,
            exchange=f"rank {self.rank} of {self.size} that share experts: an exchange with the "
            "others",
        )
        self._group = group
        self._traffic = traffic
        self._within = Lane(device)

    def every(self, counts: torch.Tensor) -> torch.Tensor:
        """``[size * n, ...]``, the ``[n, ...]`` of all ranks, on the current stream."""
        everyone = [torch.empty_like(counts) for _ in range(self.size)]
        with self.ranks.bounded:
            dist.all_gather(everyone, counts.contiguous(), group=self._group)
        return torch.cat(everyone)

    def gather(
        self, every: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], ready: Mark
    ) -> Mark:
        """All-gathers rows concurrently with the current stream.

        Args:
            every: Is filled by rank, ``[sum of sizes, ...]``, of the current stream. It and
                ``rows`` are kept by the caller until that has waited for the returned mark.
            rows: This rank's.
            sizes: The number of each rank's.
            ready: When ``rows`` are complete.

        Returns:
            When ``every`` is complete.

        Raises:
            PeerTimeoutError: A rank is gone or did not come in time.
        """
        pieces = torch.split(every, list(sizes))
        with self._within.after(ready):
            pieces[self.rank].copy_(rows)
            self._swap([rows] * self.size, pieces)
        return self._within.mark()

    def reduce(
        self, out: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], ready: Mark
    ) -> Mark:
        """Reduce-scatters rows concurrently with the current stream, summed in order of ranks.

        Args:
            out: Is filled, ``[sizes[rank], ...]``. It and ``rows`` are as in :meth:`gather`.
            rows: Summands of all ranks' rows, by rank.
            sizes: The number of each rank's.
            ready: When ``rows`` are complete.

        Returns:
            When ``out`` is complete.

        Raises:
            PeerTimeoutError: A rank is gone or did not come in time.
        """
        pieces = torch.split(rows, list(sizes))
        with self._within.after(ready):
            summands = [torch.empty_like(out) for _ in range(self.size)]
            summands[self.rank] = pieces[self.rank]
            self._swap(pieces, summands)
            total = torch.zeros_like(out, dtype=accumulation_dtype(out.dtype))
            for summand in summands:
                total += summand
            out.copy_(total)
        return self._within.mark()

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Sends every other rank a tensor and fills one of each; empty ones do not travel."""
        ways = []
        for other in range(self.size):
            if other == self.rank:
                continue
            for operation, tensor in ((dist.isend, sent[other]), (dist.irecv, received[other])):
                if tensor.numel():
                    way = dist.P2POp(operation, tensor, group=self._group, group_peer=other)
                    ways.append(way)
            leaving = sent[other]
            self._traffic.rows_sent += len(leaving) if leaving.dim() > 1 else 0
            self._traffic.bytes_sent += leaving.nbytes
        if not ways:
            return
        with self.ranks.bounded:
            for work in dist.batch_isend_irecv(ways):
                work.wait()


def check_tensor_group(group: dist.ProcessGroup | None, backend: str) -> None:
    """Refuses experts whose matrices are cut where a backend computes whole ones.

    Args:
        group: The ranks that share each expert, ``None`` where experts are whole.
        backend: The kind that is chosen.

    Raises:
        ConfigError: The backend is another than the scheduled one.
    """
    if group is not None and backend != "scheduled":
        raise ConfigError(
            f"expert tensor parallelism of {dist.get_world_size(group)} ranks on the backend "
            f"{backend!r}, whose experts are whole: wanted the backend 'scheduled', or 1 rank"
        )
