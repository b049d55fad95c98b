"""Measures how late ranks are in exchanges of a layer that follow one another.

    torchrun --nproc-per-node 8 -m tools.bench.late_ranks --out late.jsonl

This is table 2 of FlashMoE's paper. In every step each rank computes its experts and then sends
their outputs back by an all-to-all of torch.distributed, without a barrier between steps, as in a
training. An all-to-all ends when the last rank has come, so that the rank for which it is shortest
has not waited. The delay of a step is the longest rank's time over the shortest one's. The same is
taken of our layer, from what its calls record of themselves, in steps of their own.

``--zipf`` skews the routing, and with it how long ranks compute. Without a GPU the same runs over
gloo, with the reference as our layer: to try, not to tell.
"""

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from examples.arguments import count
from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.layers import kernel_layer, without_grad
from flashmoe_megatron.bench.problem import Problem, Router, make_problem
from flashmoe_megatron.bench.shapes import shares_of
from flashmoe_megatron.bench.timer import everyone, wait_for_all
from flashmoe_megatron.bench.unfused import GroupedWeights, dispatch, experts
from tools.arguments import add_shapes, exponent, parse_with_shapes, parser_of
from tools.bench import common
from tools.bench.common import Record, log

PERCENTILE = 0.95
WARM = 5
"""Steps before the first that counts."""


@dataclass(frozen=True)
class Delays:
    """How much longer the slowest rank takes than the fastest, over all steps.

    Attributes:
        steps: Steps that were measured.
        median: Median over steps of the slowest rank's time over the fastest one's.
        percentile_95: The same that 95 of 100 steps do not exceed.
        most: The same of the worst step.
        median_ms: Median of the slowest rank's milliseconds.
    """

    steps: int
    median: float
    percentile_95: float
    most: float
    median_ms: float


def delays_of(times_of_ranks: list[list[float]]) -> Delays:
    """Compares ranks step by step.

    Args:
        times_of_ranks: Each rank's milliseconds of all steps.
    """
    steps = list(zip(*times_of_ranks, strict=True))
    ratios = sorted(max(step) / min(step) for step in steps)
    return Delays(
        len(steps),
        statistics.median(ratios),
        ratios[min(int(PERCENTILE * len(ratios)), len(ratios) - 1)],
        ratios[-1],
        statistics.median(max(step) for step in steps),
    )


def exchange_times(problem: Problem, num_steps: int) -> list[float]:
    """Returns this rank's milliseconds in each step's all-to-all. Collective."""
    weights = GroupedWeights.of(problem)
    found = []
    with torch.no_grad():
        there = dispatch(problem)
        for _ in range(num_steps + WARM):
            rows = experts(there.rows, there.ends, weights, problem.config)
            results = rows.new_empty(sum(there.send), rows.shape[1])
            begin = stopwatch.now()
            dist.all_to_all_single(results, rows, there.send, there.receive)
            found.append((begin, stopwatch.now()))
    stopwatch.synchronize()
    return [stopwatch.between_ms(*pair) for pair in found[WARM:]]


def layer_times(problem: Problem, kind: str, num_steps: int) -> list[float]:
    """Returns this rank's milliseconds in each of our layer's forwards. Collective."""
    layer = kernel_layer(problem, use_main_grad=False, kind=kind)
    call = without_grad(layer)
    for _ in range(WARM):
        call()
    wait_for_all()
    layer.backend.take_records()
    found = []
    for step in range(num_steps):
        call()
        if step % 100 == 99:  # before the kernel's ring of records is full
            stopwatch.synchronize()
            found += layer.backend.take_records()
    stopwatch.synchronize()
    found += layer.backend.take_records()
    return [record.duration_ns / 1e6 for record in found]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_shapes(parser, ["paper-8k"] if stopwatch.HAS_GPU else ["256x128x128x16x2"])
    parser.add_argument("--steps", type=count, default=500)
    parser.add_argument(
        "--zipf", type=exponent, default=0.0, help="exponent of a skewed routing; 0: none"
    )
    parser.add_argument(
        "--backend",
        choices=("kernel", "scheduled", "reference"),
        default="kernel" if stopwatch.HAS_GPU else "reference",
        help="what our layer runs on",
    )
    common.add_record_flags(parser, a_line="shape and way")
    return parse_with_shapes(parser, arguments)


def measure(options: argparse.Namespace, arguments: list[str]) -> None:
    """Measures all shapes, and writes the record. Collective over the default group."""
    num_ranks = dist.get_world_size()
    record = Record(
        options.out,
        **common.machine(options.commit),
        command=common.called("tools.bench.late_ranks", arguments),
        num_ranks=num_ranks,
    )
    for name, shape in shares_of(options.shapes, 1, num_ranks).items():
        problem = make_problem(shape, num_ranks, router=Router(options.zipf))
        for way in ("all-to-all", options.backend):
            if way == "all-to-all":
                times = exchange_times(problem, options.steps)
            else:
                times = layer_times(problem, way, options.steps)
            delays = delays_of(everyone().gather(times))
            log(
                f"{name}, {way}: the slowest rank takes {delays.median:.2f} times as long as the "
                f"fastest (median), {delays.percentile_95:.2f} (95 of 100), {delays.most:.2f} "
                f"(worst); median {delays.median_ms:.3f} ms"
            )
            record.write(
                measurement="late_ranks",
                shape=name,
                **vars(shape),
                zipf=options.zipf,
                imbalance=round(problem.imbalance(), 3),
                way=way,
                **asdict(delays),
            )


def main(arguments: list[str]) -> int:
    """Runs the command line on several ranks."""
    options = parse(arguments)
    common.need_torchrun()
    if common.join_group() == 1:
        raise SystemExit("1 rank, for which nobody is late: wanted several, by torchrun")
    measure(options, arguments)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
