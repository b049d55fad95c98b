"""One training of a model, as both frameworks' benchmarks record it."""

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """The training of one kind of experts.

    Attributes:
        run: The kind's name.
        losses: The mean of all ranks, for every iteration.
        iteration_ms: The slowest rank's time of every iteration.
    """

    run: str
    losses: list[float]
    iteration_ms: list[float]

    def median_ms(self, warm: int) -> float:
        """The median iteration, without the first ones unless there are no others."""
        return statistics.median(self.iteration_ms[warm:] or self.iteration_ms)

    def as_dict(self) -> dict[str, Any]:
        """The run for a record, times in microseconds."""
        return {**vars(self), "iteration_ms": [round(ms, 3) for ms in self.iteration_ms]}
