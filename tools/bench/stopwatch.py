"""Times of work as it runs: on the GPU's stream, or on the processor without a GPU."""

import time
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
"""Asked before anything else may answer in torch's place."""


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
