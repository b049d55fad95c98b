"""Times the layer with and without its counters, in turns, on one GPU.

    python -m tools.bench.counters_cost --out results.jsonl

Both are the same kernel, which counts or does not; they take turns of some launches each, so that
clocks and temperature are the same for both. What counters cost is the median over pairs of turns.
Launches follow one another without a pause: what is timed is the kernels.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

from flashmoe_megatron.backend import Backend
from flashmoe_megatron.select import select_backend
from tools.bench import common, stopwatch
from tools.bench.common import log
from tools.bench.shapes import SHAPES, Problem, make_problem

WAYS = {"counted": True, "uncounted": False}


def turn_ms(backend: Backend, problem: Problem, launches: int) -> float:
    """Milliseconds of a forward, of a row of them."""
    given = (problem.x.detach(), problem.probs.detach(), problem.routing_map, problem.weights)
    backend.forward(*given, training=False)
    begin = stopwatch.now()
    for _ in range(launches):
        backend.forward(*given, training=False)
    end = stopwatch.now()
    stopwatch.synchronize()
    return stopwatch.between_ms(begin, end) / launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["paper-8k", "qwen3-30b"], choices=SHAPES)
    parser.add_argument("--one-of", type=int, default=4, help="1/N of the experts")
    parser.add_argument("--turns", type=int, default=40, help="of each")
    parser.add_argument("--launches", type=int, default=50, help="of a turn")
    parser.add_argument("--commit", help="what is measured, where the checkout has no git")
    parser.add_argument("--out", type=Path, help="file that takes one JSON object per shape")
    options = parser.parse_args()
    record = common.Record(options.out, **common.machine(options.commit))
    device = torch.device("cuda", 0)
    for shape in options.shapes:
        problem = make_problem(
            SHAPES[shape].one_of(options.one_of), 1, rank=0, device=device, zipf=0.0, seed=1
        )
        backends = {
            name: select_backend(
                problem.config, None, device, kind="kernel", timeout_s=10.0, counters=counts
            )
            for name, counts in WAYS.items()
        }
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for turn in range(-2, options.turns):  # the first ones warm up
            for name, backend in backends.items():
                taken = turn_ms(backend, problem, options.launches)
                if turn >= 0:
                    times[name].append(taken)
        pairs = zip(times["counted"], times["uncounted"], strict=True)
        cost = statistics.median(counted / uncounted - 1 for counted, uncounted in pairs)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        log(
            f"{shape}: {medians['counted']:.4f} ms, without counters "
            f"{medians['uncounted']:.4f} ms: {cost:+.2%}"
        )
        record.write(measurement="counters", shape=shape, milliseconds=times, cost=round(cost, 5))
    return 0


if __name__ == "__main__":
    sys.exit(main())
