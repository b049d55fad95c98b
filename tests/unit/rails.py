"""Rails within one process, for tests that make up the other hosts."""

from typing import Any

from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.hosts.rail import Crossed, Rail, Stopwatch
from flashmoe_megatron.ranks import Ranks, Value


class QuietRanks(Ranks):
    """Ranks of a grid of which only this one ever has an error."""

    def __init__(self, grid: HostGrid) -> None:
        super().__init__(None)
        self.rank, self.num_ranks = grid.rank, grid.num_hosts * grid.ranks_per_host

    def gather(self, value: Value) -> list[Value]:
        of_others: Any = (None, None) if isinstance(value, tuple) else None
        return [value if rank == self.rank else of_others for rank in range(self.num_ranks)]


class LocalRail(Rail):
    """A rail without process groups, whose exchanges a test makes up."""

    def __init__(self, grid: HostGrid, ranks: Ranks | None = None) -> None:
        self.grid, self.ranks = grid, ranks or QuietRanks(grid)
        self.crossed = Crossed()
        self.watch = Stopwatch(self.crossed)
