"""Has ``bench_layer`` measure the points of a layer's sweep, and prints what it finds."""

import argparse
from functools import partial
from pathlib import Path

import torch

from examples.arguments import count
from tools.bench import bench_layer
from tools.bench.common import commit_of_checkout
from tools.weak_scaling.machine import machine_of
from tools.weak_scaling.metrics import times_of
from tools.weak_scaling.points import (
    PASSES,
    Measured,
    Point,
    Settings,
    open_folder,
    points_of,
    read_results,
)
from tools.weak_scaling.progress import Progress
from tools.weak_scaling.ranks import StuckError, UsageError, counts_of, run_job
from tools.weak_scaling.report import write_report
from tools.weak_scaling.wandb_log import log_sweep

SIZES = {
    "tokens": ([1024, 2048, 4096, 8192, 16384, 32768], [32, 128], "per GPU, of all GPUs"),
    "experts": ([8, 16, 32, 64, 128], [4, 16], "of the layer, on the most GPUs"),
    "base_tokens": (8192, 64, "per GPU, of the weak scaling"),
    "base_experts": (64, 8, "of all points but those over experts"),
    "expert_tokens": (16384, 128, "per GPU, of the points over experts"),
    "hidden": (2048, 128, "model width, a multiple of 64"),
    "intermediate": (2048, 128, "FFN width of an expert, a multiple of 64"),
    "topk": (2, 2, "experts that each token selects"),
}
"""The paper's sizes, those without a GPU, and what they are."""
GRADS = ["--grads", "main_grad"]
REPORTED = {
    "zipf": [0.0],
    "locality": [None],
    "spare_slots": [0],
    "grads": "main_grad",
    "backend": "kernel",
}
"""The options of ``bench_layer`` that the report assumes of every point."""
GPU_ARGUMENTS = ["--kernel", "--row-bound", "1.2"]
CPU_ARGUMENTS = ["--allow-cpu", "--iterations", "5", "--warmup", "1"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of :func:`run`."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/weak_scaling"), help="folder, must not exist")
    add("--resume", action="store_true", help="go on in a folder, leaving out what it has")
    add("--gpus", type=int, nargs="+", help="default: 1, 2, 4, ...; processes without a GPU")
    for name, (large, _, what) in SIZES.items():
        several = "+" if isinstance(large, list) else None
        add(f"--{name.replace('_', '-')}", type=count, nargs=several, help=what)
    add("--timeout", type=float, default=600.0, help="seconds for a number of GPUs")
    add("--commit", help="what is measured, where the checkout has no git")


def settings_of(options: argparse.Namespace) -> Settings:
    """Everything that decides what is measured and how; the same in all of a folder's points.

    Raises:
        UsageError: There are fewer GPUs than asked for, or points would not be as reported.
    """
    has_gpu = torch.cuda.is_available()
    sizes = {
        name: getattr(options, name) or (large if has_gpu else small)
        for name, (large, small, _) in SIZES.items()
    }
    bench = [*(GPU_ARGUMENTS if has_gpu else CPU_ARGUMENTS), *options.bench]
    settings = {
        "commit": options.commit or commit_of_checkout(),
        "gpus": counts_of(options.gpus),
        **sizes,
        "bench": bench,
    }
    # An unreadable option is an error at once, and not of every job.
    shapes = [point.shape for point in points_of(settings)]
    parsed = bench_layer.parse(["--shapes", *shapes, *GRADS, *bench])
    for name, wanted in REPORTED.items():
        if (got := getattr(parsed, name)) != wanted:
            raise UsageError(f"{name}={got}: every point of a sweep has {name}={wanted}")
    return settings


def run(options: argparse.Namespace) -> int:
    """Measures what is missing, and writes the report.

    Returns:
        0 if no point has failed, else 1.

    Raises:
        UsageError: The folder or the GPUs are not as asked for.
        KeyboardInterrupt: It was stopped; what was measured is in the report.
    """
    settings, folder = settings_of(options), options.out
    open_folder(folder, settings, resume=options.resume)
    wanted, measured = points_of(settings), read_results(folder)
    left = [point for point in wanted if point not in measured]
    print(f"{len(left)} points to measure, {len(wanted) - len(left)} are there", flush=True)
    progress = Progress(len(wanted) - len(left), len(wanted), "points")
    failed: dict[Point, str] = {}
    stop: StuckError | KeyboardInterrupt | None = None
    while left and stop is None:
        job = [point for point in left if point.ranks == left[0].ranks]
        reason = ""
        try:
            with progress.watching(partial(_count, folder)):
                reason = _measure(job, settings, folder, options.timeout)
        except StuckError as error:
            reason, stop = f"{error}; its ranks may still run: no more are started", error
        except KeyboardInterrupt as error:
            stop = error
        measured = read_results(folder)
        missing = [point for point in job if point not in measured]
        if isinstance(stop, KeyboardInterrupt):
            ended = {}
        elif reason:
            ended = dict.fromkeys(missing[:1], reason)  # which has ended the job
        else:
            ended = dict.fromkeys(missing, f"has not all times of {PASSES}")
        failed |= ended
        for point in job:
            if point in ended:
                print(f"{point}: failed: {ended[point]}", flush=True)
            elif point in measured:
                print(f"{point}: {_line(measured, point)}", flush=True)
        left = [point for point in left if point not in measured and point not in failed]
    log_sweep(folder, write_report(folder, failed))
    if isinstance(stop, KeyboardInterrupt):
        raise stop
    return int(bool(failed))


def _measure(job: list[Point], settings: Settings, folder: Path, limit_s: float) -> str:
    """Measures points of one number of ranks; returns why it ended early, if it did."""
    ranks = job[0].ranks
    results = folder.resolve() / "results.jsonl"
    arguments = ["--shapes", *(point.shape for point in job), *GRADS]
    arguments += ["--out", str(results), "--commit", settings["commit"], *settings["bench"]]
    log = folder / f"ranks{ranks}.log"
    print(f"{ranks} ranks, {len(job)} points ...", flush=True)
    return run_job(ranks, "tools.bench.bench_layer", arguments, log, limit_s)


def _count(folder: Path) -> int:
    """Counts the points in a file that a job writes, by the last of their measurements."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    last = ('"measurement": "forward+backward"', '"implementation": "unfused"')
    return sum(all(word in line for word in last) for line in lines)


def _line(measured: Measured, point: Point) -> str:
    times, ours = times_of(measured, point), machine_of(measured[point]["fused", "forward"]).ours
    return ", ".join(
        f"{ours} {what} {times[f'{what}/{ours}']:.3f} ms (unfused {times[f'{what}/unfused']:.3f})"
        for what in PASSES
    )
