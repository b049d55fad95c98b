"""Runs Megatron's stock script with flashmoe installed, and sees what its GPU does.

    torchrun --nproc-per-node 1 -m tools.bench.cards.watched seen.json pretrain_gpt.py ...

Writes what a log does not tell: which attention Transformer Engine has chosen, the FLOPs of an
iteration by Megatron's formula, the most memory, the most blocks of rows that a launch has had
buffers for, and how long the GPU was busy in the last iterations. CUDA's activities are recorded in
these alone; the iterations before are as they are without this module. A run whose attention is
unfused ends after its first iteration.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron import run
from flashmoe_megatron.adapters.patch import patch, when_imported
from flashmoe_megatron.doctor import attention
from tools.bench.cards.models import RECORDED

LISTED = 12
"""Names of activities that are listed; the GPU waits longest for these."""
TURN = "CARDS_TURN"
"""The variable that names a file; a run builds its model when the file is there."""
UNFUSED_STATUS = 3
"""The exit status of a run whose attention is unfused."""


class Watch:
    """Records a training, and writes each fact as soon as it is known.

    Args:
        out: The file.
        iterations: Iterations of the training; 0 records no activities.
    """

    def __init__(self, out: Path, iterations: int) -> None:
        self.out, self.iterations = out, iterations
        self.iteration = 0
        self.seen: dict[str, Any] = {"attention": [], "row_blocks": 0}
        self.profiler: Any = None

    def chosen_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Notes every answer of Transformer Engine, which asks once for each kind of layer."""

        def get_attention_backend(*args: Any, **kwargs: Any) -> Any:
            answer = original(*args, **kwargs)
            name = attention.name_of_attention(answer)
            if name not in self.seen["attention"]:
                self.seen["attention"].append(name)
            return answer

        return get_attention_backend

    def buffers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Notes the most blocks of rows that a training launch has had buffers for."""

        def make_buffers(backend: Any, num_row_blocks: int, *args: Any, **kwargs: Any) -> Any:
            self.seen["row_blocks"] = max(self.seen["row_blocks"], num_row_blocks)
            return original(backend, num_row_blocks, *args, **kwargs)

        return make_buffers

    def install(self) -> None:
        """Watches the training that Megatron's script begins in this process."""
        when_imported("flashmoe_megatron.kernel.backend", self.watch_launches)
        when_imported(
            attention.MODULE, lambda m: patch(m, "get_attention_backend", self.chosen_attention)
        )
        when_imported(
            "megatron.training.training", lambda m: patch(m, "train_step", self.train_step)
        )

    def watch_launches(self, backend: ModuleType) -> None:
        """Has the module of the kernel's backend tell of its buffers."""
        patch(backend.KernelBackend, "_make_buffers", self.buffers)

    def train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Counts iterations, looks at the first, and records the last ones."""

        def train_step(*args: Any, **kwargs: Any) -> Any:
            self.iteration += 1
            if self.iteration == self.iterations - RECORDED + 1:
                torch.cuda.synchronize()
                # CUDA's activities cost memory themselves.
                self.seen["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                self.seen["flops"] = flops_of_an_iteration()
                self.write()
                activities = [torch.profiler.ProfilerActivity.CUDA]
                self.profiler = torch.profiler.profile(activities=activities)
                self.profiler.start()
            result = original(*args, **kwargs)
            if self.iteration == 1:
                self.write()
                self.refuse_unfused()
            if self.iteration == self.iterations:
                torch.cuda.synchronize()
                self.profiler.stop()
                self.seen |= activities_of(self.profiler.profiler.kineto_results.events())
                self.write()
                leave(0)
            return result

        return train_step

    def refuse_unfused(self) -> None:
        """Ends a run that would be measured with another attention than users have.

        Raises:
            SystemExit: Transformer Engine has said that attention is unfused, or nothing.
        """
        if attention.is_fused(self.seen["attention"]):
            return
        got = ", ".join(self.seen["attention"]) or "no attention of Transformer Engine's"
        print(f"error: got {got}, wanted fused attention in all layers", file=sys.stderr)
        leave(UNFUSED_STATUS)

    def write(self) -> None:
        """Writes what is known, on the first rank."""
        if int(os.environ.get("RANK", "0")) == 0:
            self.out.write_text(json.dumps(self.seen))


def leave(status: int) -> None:
    """Ends the process at once: Megatron's end takes seconds, or minutes, of the next arm's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait_for_turn(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has Megatron build its model when it is this run's turn, at once where it takes no turns."""

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        turn, parent = os.environ.get(TURN), os.getppid()
        while turn and not os.path.exists(turn):
            if os.getppid() != parent:
                raise SystemExit("error: the launcher is gone, so that no turn comes")
            time.sleep(0.02)
        return original(*args, **kwargs)

    return setup_model_and_optimizer


def take_turns() -> None:
    """Has the training of this process wait for its turn until Megatron is to build its model.

    Megatron's imports and its start are over then. They take the GPU's context, and little memory.
    """
    when_imported(
        "megatron.training.training",
        lambda m: patch(m, "setup_model_and_optimizer", wait_for_turn),
    )


def flops_of_an_iteration() -> float:
    """Returns all GPUs' FLOPs by Megatron's formula, which also gives its logged throughput."""
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    args = get_args()
    return float(num_floating_point_operations(args, args.global_batch_size))


def activities_of(events: Iterable[Any]) -> dict[str, Any]:
    """Returns the GPU's work in an iteration, and its waits, in milliseconds."""
    on_gpu = [
        (each.start_ns(), each.start_ns() + each.duration_ns(), each.name())
        for each in events
        if each.device_type() == torch.autograd.DeviceType.CUDA and not each.is_user_annotation()
    ]
    spans = [(begin, end) for begin, end, _ in on_gpu]
    idle = sorted(idle_before(on_gpu).items(), key=lambda item: -item[1])
    return {
        "busy_ms": round(covered(spans) / 1e6 / RECORDED, 3),
        "idle_before_ms": {name[:100]: round(ns / 1e6 / RECORDED, 3) for name, ns in idle[:LISTED]},
        "kernels": len(spans) // RECORDED,
    }


def idle_before(activities: Iterable[tuple[int, int, str]]) -> dict[str, int]:
    """Sums the idle time before each activity, by the activity's name."""
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
    Watch(Path(arguments[0]), iterations).install()
    take_turns()
    run.main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
