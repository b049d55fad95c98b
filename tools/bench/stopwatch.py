"""Times of work as it runs: on the GPU's stream, or on the processor without a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
"""Asked before anything else may answer in torch's place."""


def device_here() -> torch.device:
    """This process's GPU, or the processor without a GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


def now() -> Any:
    """Marks the work that has been launched so far."""
    if not HAS_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(begin: Any, end: Any) -> float:
    """Milliseconds between two marks; on a GPU both have to have been reached."""
    if HAS_GPU:
        return float(begin.elapsed_time(end))
    return (end - begin) * 1e3


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if HAS_GPU:
        torch.cuda.synchronize()


def turn_ms(call: Callable[[], object], times: int) -> float:
    """Milliseconds of one of a row of calls that follow one another without a pause."""
    call()
    begin = now()
    for _ in range(times):
        call()
    end = now()
    synchronize()
    return between_ms(begin, end) / times


def in_turns(
    calls: dict[str, Callable[[], object]], turns: int, each: int
) -> dict[str, list[float]]:
    """Milliseconds of a call in every turn of each way, so that the clock is the same for all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, turns):  # the first ones warm up
        for name, call in calls.items():
            taken = turn_ms(call, each)
            if turn >= 0:
                times[name].append(taken)
    return times
