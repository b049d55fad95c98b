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
from tools.bench.cards.models import RECORDED
from tools.bench.cards.watched import activities_of


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
        seen = {
            "batch_ms": [round(ms, 3) for ms in self.batch_ms],
            **activities_of(events),
            "most_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        self.out.write_text(json.dumps(seen))


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
