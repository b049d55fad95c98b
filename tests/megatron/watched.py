"""Runs a stock script of Megatron's with flashmoe installed, and sees what its GPU does.

    torchrun --nproc-per-node 1 -m tests.megatron.watched seen.json pretrain_gpt.py ...

Writes, for every iteration, how long the host waited for batches, and how long the GPU was busy in
the last iterations, in which CUDA's activities are recorded; those before are as they are without.
For what the GPU waits there is listed by the activity that comes next.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from flashmoe_megatron import run
from flashmoe_megatron.adapters.patch import patch, when_imported

RECORDED = 3
"""The last iterations, whose activities are recorded."""
LISTED = 12
"""Names of activities that are listed, those for which the GPU waits longest."""


class Watch:
    """What happens in a training, written when it is complete.

    Args:
        out: The file.
        iterations: Iterations of the training.
    """

    def __init__(self, out: Path, iterations: int) -> None:
        self.out, self.iterations = out, iterations
        self.batch_ms: list[float] = []
        self.profiler: Any = None

    def next_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Adds the time of a call to the iteration's."""

        def next_batch(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args)
            finally:
                if self.batch_ms:
                    self.batch_ms[-1] += 1e3 * (time.perf_counter() - begin)

        return next_batch

    def train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Counts iterations, and records the last ones."""

        def train_step(*args: Any, **kwargs: Any) -> Any:
            self.batch_ms.append(0.0)
            if len(self.batch_ms) == self.iterations - RECORDED + 1:
                torch.cuda.synchronize()
                activities = [torch.profiler.ProfilerActivity.CUDA]
                self.profiler = torch.profiler.profile(activities=activities)
                self.profiler.start()
            result = original(*args, **kwargs)
            if len(self.batch_ms) == self.iterations:
                torch.cuda.synchronize()
                self.profiler.stop()
                self.write(self.profiler.profiler.kineto_results.events())
            return result

        return train_step

    def write(self, events: Iterable[Any]) -> None:
        """Writes what has been seen, all in milliseconds."""
        on_gpu = [
            (each.start_ns(), each.start_ns() + each.duration_ns(), each.name())
            for each in events
            if each.device_type() == torch.autograd.DeviceType.CUDA
            and not each.is_user_annotation()
        ]
        spans = [(begin, end) for begin, end, _ in on_gpu]
        idle = sorted(idle_before(on_gpu).items(), key=lambda item: -item[1])
        seen = {
            "batch_ms": [round(ms, 3) for ms in self.batch_ms],
            "busy_ms": round(covered(spans) / 1e6 / RECORDED, 3),
            "idle_before_ms": {
                name[:100]: round(ns / 1e6 / RECORDED, 3) for name, ns in idle[:LISTED]
            },
            "kernels": len(spans) // RECORDED,
            "most_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        self.out.write_text(json.dumps(seen))


def idle_before(activities: Iterable[tuple[int, int, str]]) -> dict[str, int]:
    """How long nothing works until an activity begins, summed by the names of those that begin."""
    idle: dict[str, int] = {}
    until = None
    for begin, end, name in sorted(activities):
        if until is not None and begin > until:
            idle[name] = idle.get(name, 0) + begin - until
        until = max(until or end, end)
    return idle


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """How long at least one of several spans of time lasts."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def main(arguments: list[str]) -> None:
    """Runs ``arguments[1]``, whose ``--train-iters`` says when it ends; see the module."""
    iterations = int(arguments[arguments.index("--train-iters") + 1])
    watch = Watch(Path(arguments[0]), iterations)
    when_imported(
        "megatron.core.rerun_state_machine",
        lambda module: patch(module.RerunDataIterator, "__next__", watch.next_batch),
    )
    when_imported(
        "megatron.training.training", lambda module: patch(module, "train_step", watch.train_step)
    )
    run.main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
