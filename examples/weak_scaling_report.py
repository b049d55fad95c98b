"""What the two training programs of the weak scaling share: their timing and their report."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HAS_GPU = torch.cuda.is_available()


def take_report_argument() -> Path:
    """Takes ``--report FILE`` out of the command line, whose rest describes the model."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--report", type=Path, required=True)
    known, sys.argv[1:] = parser.parse_known_args()
    return known.report


def timed(iteration: Callable[[], float], count: int) -> tuple[list[float], list[float]]:
    """Runs training iterations.

    Args:
        iteration: Runs one and returns its loss. Collective over the default group.
        count: How many.

    Returns:
        Milliseconds of each, the slowest rank's, and the losses.
    """
    times, losses = [], []
    for _ in range(count):
        begin = time.perf_counter()
        losses.append(iteration())
        if HAS_GPU:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    slowest = torch.tensor(times, dtype=torch.float64, device="cuda" if HAS_GPU else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist(), losses


def write_report(
    path: Path,
    framework: str,
    args: argparse.Namespace,
    runs: dict[str, tuple[list[float], list[float]]],
) -> None:
    """Writes what rank 0 knows.

    Args:
        path: Of the JSON file.
        framework: Name and version.
        args: Of the model.
        runs: Times and losses by kind of MoE layer, flashmoe's first.
    """
    if dist.get_rank() != 0:
        return
    about: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }
    report = {
        "framework": framework,
        "device": torch.cuda.get_device_name() if HAS_GPU else "processors",
        "ranks": dist.get_world_size(),
        "tokens_per_rank": args.seq_length * args.micro_batch_size * args.num_microbatches,
        "milliseconds": {name: times for name, (times, _) in runs.items()},
        "losses": {name: losses for name, (_, losses) in runs.items()},
        "about": {"framework": framework, "ranks": dist.get_world_size(), **about},
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
