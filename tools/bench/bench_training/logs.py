"""Compares Megatron's training logs: losses, iteration times, and a bound of noise.

    python -m tools.bench.bench_training logs flashmoe.log alltoall.log --noise alltoall_again.log

The noise run differs from the second log only in an order of rounding (for instance
``--moe-permute-fusion`` left out, or the router in another precision). Within noise means, at every
iteration: the relative distance of the two losses is at most one unit of bfloat16 (2^-8), or twice
the largest distance that the noise run has shown up to there, since training amplifies both alike.

The second log, alltoall's, is the reference: all of its iterations are judged. An iteration that
ours lacks, or has with a loss that is missing or not finite, is outside; such an iteration of the
noise run only adds nothing to the bound. A reference may end early: iterations that it lacks are
not judged, but counted. Prints a markdown table; the exit status is 1 if any iteration is outside.
"""

import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from tools.arguments import parser_of
from tools.bench.bench_training.curves import WARM, apart, within_noise

LINE = re.compile(r"iteration +(\d+)/")
MS = re.compile(r"elapsed time per iteration \(ms\): ([^ |]+) \|")
LOSS = re.compile(r"lm loss: ([^ |]+) \|")


@dataclass(frozen=True)
class Iteration:
    """One line of a log: milliseconds and loss, NaN where they are missing or not finite."""

    ms: float
    loss: float


MISSING = Iteration(math.nan, math.nan)


def read_log(path: Path) -> dict[int, Iteration]:
    """Reads the iterations of a log that was written with ``--log-interval 1``."""
    # Megatron writes INF, and leaves out a loss that is NaN.
    return {
        int(match[1]): Iteration(_number(MS, line), _number(LOSS, line))
        for line in path.read_text(errors="replace").splitlines()
        if (match := LINE.search(line))
    }


def _number(pattern: re.Pattern[str], line: str) -> float:
    found = pattern.search(line)
    try:
        value = float(found[1]) if found else math.nan
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "python -m tools.bench.bench_training logs")
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("--noise", type=Path, required=True)
    options = parser.parse_args(arguments)
    paths = (options.ours, options.theirs, options.noise)
    try:
        logs = [read_log(path) for path in paths]
    except OSError as error:
        parser.error(f"a log cannot be read: {error}")
    for path, log in zip(paths, logs, strict=True):
        if not log:
            parser.error(f"{path} has no iterations")
    iterations = sorted(logs[1])
    ours, theirs, noise = ({i: log.get(i, MISSING) for i in iterations} for log in logs)
    # Megatron writes a loss of 0 where it has skipped the iteration.
    distances, noises = (
        apart([log[i].loss for i in iterations], [theirs[i].loss for i in iterations])
        for log in (ours, noise)
    )
    inside = within_noise(distances, noises)

    print("| iteration | ms | alltoall ms | loss | alltoall loss | noise run | distance | noise |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for i, distance, spread in zip(iterations, distances, noises, strict=True):
        print(
            f"| {i} | {ours[i].ms:.0f} | {theirs[i].ms:.0f} | {ours[i].loss:.5f} | "
            f"{theirs[i].loss:.5f} | {noise[i].loss:.5f} | {distance:.1e} | {spread:.1e} |"
        )
    timed = [i for i in iterations if math.isfinite(ours[i].ms + theirs[i].ms)]
    if warm := [i for i in timed if i > WARM] or timed:
        mine, other = (statistics.median(log[i].ms for i in warm) for log in (ours, theirs))
        print(
            f"\nMedian from iteration {warm[0]} on: {mine:.0f} ms, alltoall {other:.0f} ms, ratio "
            f"{other / mine:.2f}."
        )
    print(f"\nWithin noise at {sum(inside)} of {len(inside)} iterations.")
    if beyond := set(logs[0]) - set(iterations):
        print(f"{options.theirs} lacks {len(beyond)} more of ours, which are not compared.")
    if lacking := set(iterations) - set(logs[2]):
        print(f"{options.noise} lacks {len(lacking)} of them, which have the noise before them.")
    return 0 if all(inside) else 1
