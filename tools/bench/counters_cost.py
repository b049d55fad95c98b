"""Times the layer with and without its counters, in turns, on one GPU.

    python -m tools.bench.counters_cost --out results.jsonl

Both are the same kernel, which counts or does not; they take turns of some launches each, so that
clocks and temperature are the same for both. What counters cost is the median over pairs of turns.
Launches follow one another without a pause: what is timed is the kernels. All values are zeros,
since with random ones the GPU is at its power limit, whose control moves its clock by several per
cent; the routing is random.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

from tools.bench import common
from tools.bench.bench_layer import kernel_layer, without_grad
from tools.bench.common import log
from tools.bench.shapes import SHAPES, make_problem
from tools.bench.stopwatch import in_turns, turn_ms

WAYS = {"counted": True, "uncounted": False}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["paper-8k", "qwen3-30b"], choices=SHAPES)
    parser.add_argument("--one-of", type=int, default=4, help="1/N of the experts")
    parser.add_argument("--turns", type=int, default=60, help="of each")
    parser.add_argument("--launches", type=int, default=20, help="of a turn")
    parser.add_argument("--commit", help="what is measured, where the checkout has no git")
    parser.add_argument(
        "--out", type=Path, help="file that takes a JSON object per shape and passes"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not common.has_gpu():
        return 2
    record = common.Record(options.out, **common.machine(options.commit))
    for shape in options.shapes:
        problem = make_problem(SHAPES[shape].one_of(options.one_of))
        problem.zero_values()
        layers = {
            name: kernel_layer(problem, row_bound=common.ROW_BOUND, counters=counts)
            for name, counts in WAYS.items()
        }
        of_passes = {
            "forward": {name: without_grad(layer) for name, layer in layers.items()},
            "forward_and_backward": {
                name: layer.forward_and_backward for name, layer in layers.items()
            },
        }
        for passes, calls in of_passes.items():
            takers = {
                name: partial(turn_ms, call, options.launches) for name, call in calls.items()
            }
            times = in_turns(takers, options.turns)
            pairs = zip(times["counted"], times["uncounted"], strict=True)
            cost = statistics.median(counted / uncounted - 1 for counted, uncounted in pairs)
            medians = {name: statistics.median(taken) for name, taken in times.items()}
            log(
                f"{shape}, {passes}: {medians['counted']:.4f} ms, without counters "
                f"{medians['uncounted']:.4f} ms: {cost:+.2%}"
            )
            record.write(
                measurement="counters",
                shape=shape,
                passes=passes,
                milliseconds=times,
                cost=round(cost, 5),
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
