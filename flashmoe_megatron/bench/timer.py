"""Times of calls over all ranks of the default group."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.ranks import Ranks


def everyone() -> Ranks:
    """Returns the ranks of the default group, or this one alone without it. Not collective."""
    return Ranks(dist.group.WORLD if dist.is_initialized() else None)


@dataclass(frozen=True)
class Timing:
    """The times of one call over several iterations, each the slowest rank's, in milliseconds."""

    median_ms: float
    min_ms: float
    max_ms: float
    iterations: int

    def as_dict(self) -> dict[str, Any]:
        """The times for a record, in tenths of microseconds."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def slowest(times: Sequence[float]) -> list[float]:
    """The slowest rank's times, from this one's. Collective over the default group, if any."""
    found = torch.tensor(times, dtype=torch.float64, device=stopwatch.device_here())
    return list(everyone().most(found).tolist())


def timing_of(milliseconds: Sequence[float]) -> Timing:
    """The slowest rank's, from this one's. Collective over the default group, if there is one."""
    ordered = sorted(slowest(milliseconds))
    return Timing(
        median_ms=statistics.median(ordered),
        min_ms=ordered[0],
        max_ms=ordered[-1],
        iterations=len(ordered),
    )


def wait_for_all() -> None:
    """Waits until all GPUs of the default group are idle, or this one without it. Collective."""
    stopwatch.synchronize()
    ranks = everyone()
    if ranks.num_ranks > 1:
        ranks.meet()
        stopwatch.synchronize()


class Timer:
    """Times calls on all ranks of the default group, or on one GPU (or processor) without a group.

    Each iteration starts from an idle GPU and, with several ranks, after a barrier, so that launch
    and synchronization gaps count, as they do for a user. An iteration's time is the slowest
    rank's.

    Args:
        iterations: Timed calls, at least 1.
        warmup: Calls before them.
    """

    def __init__(self, iterations: int, warmup: int) -> None:
        if iterations < 1 or warmup < 0:
            raise ValueError(f"iterations={iterations}, warmup={warmup}: wanted >= 1 and >= 0")
        self.iterations = iterations
        self.warmup = warmup

    def __call__(self, call: Callable[[], object]) -> Timing:
        """Times ``call``. Collective over the default group if there is one."""
        for _ in range(self.warmup):
            call()
        found = []
        for _ in range(self.iterations):
            wait_for_all()
            begin = stopwatch.now()
            call()
            end = stopwatch.now()
            stopwatch.synchronize()
            found.append(stopwatch.between_ms(begin, end))
        return timing_of(found)
