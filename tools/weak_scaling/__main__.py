"""The command line; see the package."""

import argparse
import logging
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools import weak_scaling
from tools.bench.common import commit_of_checkout
from tools.weak_scaling import training
from tools.weak_scaling.jobs import Begun, Limits, run_points
from tools.weak_scaling.points import Point, Settings, paper_settings, small_settings
from tools.weak_scaling.report import write_report
from tools.weak_scaling.results import FolderError, Results
from tools.weak_scaling.wandb_log import ExperimentLog

USAGE_ERROR = 2


def positive(text: str) -> int:
    """An argument that has to be a positive number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, wanted at least 1")
    return value


def powers_of_two_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, ..."""
    return tuple(2**power for power in range(most.bit_length()))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.weak_scaling",
        description=weak_scaling.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write the report")
    add = run.add_argument
    add("--out", type=Path, default=Path("runs/weak_scaling"), help="folder, must not exist")
    add("--resume", action="store_true", help="go on in a folder, leaving out what it has")
    add("--retry-failed", action="store_true", help="with --resume: also what failed in it")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--gpus", type=positive, nargs="+", help="default: 1, 2, 4, ... of this machine")
    add("--tokens", type=positive, nargs="+", help="per GPU, of the sweep over tokens")
    add("--experts", type=positive, nargs="+", help="of the layer, of the sweep over experts")
    add("--base-tokens", type=positive, help="per GPU, of the weak scaling")
    add("--base-experts", type=positive, help="of weak scaling and of the sweep over tokens")
    add("--expert-tokens", type=positive, help="per GPU, of the sweep over experts")
    add("--hidden", type=positive, help="a multiple of 64")
    add("--intermediate", type=positive, help="a multiple of 64")
    add("--topk", type=positive)
    add("--iterations", type=positive)
    add("--gate", type=float, help="largest relative L2 error of any result")
    add("--symmetric", choices=("cuda", "nvshmem"))
    add("--start-timeout", type=float, default=Limits.start_s, help="seconds, of a job")
    add("--point-timeout", type=float, default=Limits.point_s, help="seconds, of a point")
    add("--commit", help="what is measured, where the checkout has no git")
    commands.add_parser("training", help="whole training iterations; has a --help of its own")
    for name, what in (
        ("report", "write tables and figures of a folder again"),
        ("log", "log a folder's points to wandb"),
    ):
        commands.add_parser(name, help=what).add_argument("folder", type=Path)
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """Makes settings of the options.

    Raises:
        FolderError: There are no GPUs, or fewer than are asked for.
    """
    if options.device == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found == 0:
            raise FolderError("no CUDA GPU is usable here: --device cpu runs the small version")
        gpus = tuple(sorted(set(options.gpus or powers_of_two_up_to(found))))
        if gpus[-1] > found:
            raise FolderError(f"--gpus {gpus[-1]}: this machine has {found}")
        settings = paper_settings(gpus)
    else:
        settings = small_settings(tuple(sorted(set(options.gpus or (1, 2)))))
    given: dict[str, Any] = {
        name: tuple(sorted(set(value))) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in Settings.__dataclass_fields__ and value is not None and name != "gpus"
    }
    return replace(settings, **given)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measures what is missing.

    Returns:
        0 if no point has failed, else 1.
    """
    settings = settings_of(options)
    if options.resume:
        results = Results.resume(options.out, settings, options.commit or commit_of_checkout())
    else:
        results = Results.create(options.out, settings)
    points = results.missing(retry_failed=options.retry_failed)
    kept = len(settings.points()) - len(points)
    console.print(f"{len(points)} points to measure{f', {kept} are there' if kept else ''}")
    log = ExperimentLog(options.out, settings)
    try:
        with _progress(console) as progress:
            _measure(points, settings, results, log, progress, options)
    finally:
        if results.rows:
            for path in write_report(results):
                console.print(f"wrote {path}", soft_wrap=True)
    failed = results.failed()
    if failed:
        console.print(f"{len(failed)} points failed, see report.md")
    return int(bool(failed))


def _measure(
    points: list[Point],
    settings: Settings,
    results: Results,
    log: ExperimentLog,
    progress: Progress,
    options: argparse.Namespace,
) -> None:
    limits = Limits(options.start_timeout, options.point_timeout)
    task = progress.add_task("starting", total=len(points))
    happenings = run_points(points, settings, options.out / "jobs", limits, options.commit)
    try:
        for happening in happenings:
            if isinstance(happening, Begun):
                progress.update(task, description=_short(happening.point))
                continue
            row = results.add(happening)
            progress.console.print(_line(row), soft_wrap=True)
            log.add(row)
            progress.advance(task)
    finally:
        happenings.close()  # ends a job that runs


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _short(point: Point) -> str:
    return f"{point.num_gpus} ranks, {point.tokens} tokens, {point.num_experts} experts"


def _line(row: dict[str, object]) -> str:
    point = Point(**row["point"])  # type: ignore[arg-type]
    if row["status"] != "ok":
        return f"{_short(point)}: failed: {row['reason']}"
    times = row["result"]["times"]  # type: ignore[index]
    parts = [
        f"{which} {times['fused'][which]['median_ms']:.3f} ms "
        f"(unfused {times['unfused'][which]['median_ms']:.3f})"
        for which in times["fused"]
    ]
    return f"{_short(point)}: {', '.join(parts)}"


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["training"]:
        return training.main(arguments[1:])
    options = parse(arguments)
    console = Console(highlight=False, markup=False, emoji=False)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False, markup=False)],
    )
    signal.signal(signal.SIGTERM, _stop)
    try:
        if options.command == "run":
            return run(options, console)
        results = Results(options.folder)
        if options.command == "report":
            for path in write_report(results):
                console.print(f"wrote {path}", soft_wrap=True)
            return 0
        log = ExperimentLog(options.folder, results.settings)
        for row in results.rows.values():
            log.add(row)
    except FolderError as error:
        console.print(f"error: {error}", soft_wrap=True)
        return USAGE_ERROR
    except KeyboardInterrupt:
        console.print("stopped; the points so far are kept, go on with --resume")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
