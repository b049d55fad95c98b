"""Times the layer with and without its counters, in turns, on one GPU.

    python tools/build.py && python tools/build.py --uncounted
    python -m tools.bench.counters_cost --out results.jsonl

Both libraries run the same launches, each in processes of their own (a process loads one), one
after the other and again, so that a GPU that warms up is fair to both. Launches follow one another
without a pause: what is timed is the kernels.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from flashmoe_megatron import _native
from flashmoe_megatron.select import select_backend
from tools.bench import common, stopwatch
from tools.bench.shapes import SHAPES, make_problem

LIBRARIES = {
    "counted": _native.LIBRARY,
    "uncounted": _native.LIBRARY.with_name("libflashmoe_uncounted.so"),
}
LAUNCHES = 50


def time_library(name: str, one_of: int) -> float:
    """Milliseconds of a forward with the library that this process loads."""
    device = torch.device("cuda", 0)
    problem = make_problem(SHAPES[name].one_of(one_of), 1, rank=0, device=device, zipf=0.0, seed=1)
    backend = select_backend(problem.config, None, device, kind="kernel", timeout_s=10.0)

    def forward() -> None:
        backend.forward(
            problem.x.detach(),
            problem.probs.detach(),
            problem.routing_map,
            problem.weights,
            training=False,
        )

    for _ in range(10):
        forward()
    stopwatch.synchronize()
    begin = stopwatch.now()
    for _ in range(LAUNCHES):
        forward()
    end = stopwatch.now()
    stopwatch.synchronize()
    return stopwatch.between_ms(begin, end) / LAUNCHES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["paper-8k", "qwen3-30b"])
    parser.add_argument("--one-of", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(time_library(options.child, options.one_of)))
        return 0
    record = common.Record(options.out, **common.machine(options.commit))
    for shape in options.shapes:
        times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
        for _ in range(options.rounds):
            for library, path in LIBRARIES.items():
                command = [sys.executable, "-m", "tools.bench.counters_cost", "--child", shape]
                done = subprocess.run(
                    [*command, "--one-of", str(options.one_of)],
                    env={**os.environ, _native.LIBRARY_VARIABLE: str(path)},
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=120,
                )
                times[library].append(json.loads(done.stdout.splitlines()[-1]))
        medians = {library: statistics.median(taken) for library, taken in times.items()}
        cost = medians["counted"] / medians["uncounted"] - 1
        print(
            f"{shape}: {medians['counted']:.4f} ms, without counters "
            f"{medians['uncounted']:.4f} ms: {cost:+.2%}",
            flush=True,
        )
        record.write(measurement="counters", shape=shape, milliseconds=times, cost=round(cost, 5))
    return 0


if __name__ == "__main__":
    sys.exit(main())
