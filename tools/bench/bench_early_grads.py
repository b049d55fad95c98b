"""Times what may begin before a backward ends, because fc2's gradients are complete early.

    python -m tools.bench.bench_early_grads --out results.jsonl

On one GPU a copy of fc2's gradients to pinned host memory stands for their reduction over replicas
on other hosts: it takes a link that the layer does not use, at about the rate of a network. Timed
is a forward and a backward, from an idle GPU to the end of that copy, which is begun behind the
whole backward, or behind fc2's gradients alone; both take turns. The copy has to have the bits that
the gradients have in the end.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

from tools.bench import common, stopwatch
from tools.bench.bench_layer import FusedLayer
from tools.bench.common import log
from tools.bench.counters_cost import layer_of
from tools.bench.shapes import SHAPES, make_problem


class Reduced:
    """A layer whose fc2 gradients are copied to the host behind each backward.

    Args:
        layer: Adds them to main_grad.
        is_early: Whether the copy waits for them alone.
    """

    def __init__(self, layer: FusedLayer, *, is_early: bool) -> None:
        self._layer = layer
        self._is_early = is_early
        self._grads = [weight.main_grad for weight in layer.problem.weights.fc2]
        self._copies = [torch.empty_like(grad, device="cpu").pin_memory() for grad in self._grads]
        self._side = torch.cuda.Stream()

    def __call__(self) -> tuple[float, float, float]:
        """Milliseconds from the start to the backward's end, to the copy's begin and to its end."""
        torch.cuda.synchronize()
        start = stopwatch.now()
        self._layer.forward_and_backward()
        end = stopwatch.now()
        early = self._layer.backend.early_fc2_grads() if self._is_early else None
        if self._is_early and early is None:
            raise RuntimeError("this backend's gradients are not early")
        self._side.wait_event(end)
        with early or torch.cuda.stream(self._side):
            begin = stopwatch.now()
            for copy, grad in zip(self._copies, self._grads, strict=True):
                copy.copy_(grad, non_blocking=True)
            copied = stopwatch.now()
        torch.cuda.synchronize()
        for copy, grad in zip(self._copies[:2], self._grads, strict=False):
            if not torch.equal(copy, grad.cpu()):
                raise RuntimeError("a gradient was copied before it was complete")
        first, second, third = (stopwatch.between_ms(start, mark) for mark in (end, begin, copied))
        return first, second, third


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ["paper-8k", "qwen3-30b", "mixtral-8x7b", "deepseek-v3-e64"]
    parser.add_argument("--shapes", nargs="+", default=default, choices=SHAPES)
    parser.add_argument("--one-of", type=int, default=4, help="1/N of the experts")
    parser.add_argument("--turns", type=int, default=20, help="of each")
    parser.add_argument("--commit", help="what is measured, where the checkout has no git")
    parser.add_argument("--out", type=Path, help="file that takes a JSON object per shape")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not common.has_gpu():
        return 2
    record = common.Record(options.out, **common.machine(options.commit))
    device = torch.device("cuda", 0)
    for shape in options.shapes:
        problem = make_problem(
            SHAPES[shape].one_of(options.one_of), 1, rank=0, device=device, zipf=0.0, seed=1
        )
        layer = layer_of(problem, True, device)
        layer.forward_and_backward()
        ways = {name: Reduced(layer, is_early=name == "early") for name in ("late", "early")}
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for turn in range(-3, options.turns):  # the first ones warm up
            for name, run in ways.items():
                taken = run()
                if turn >= 0:
                    times[name].append(taken)
        medians = {
            name: [statistics.median(column) for column in zip(*taken, strict=True)]
            for name, taken in times.items()
        }
        (end, _, late), (_, begin, early) = medians["late"], medians["early"]
        log(
            f"{shape}: backward ends at {end:.3f} ms, fc2's gradients are complete at {begin:.3f}; "
            f"copied at {late:.3f}, early at {early:.3f} ms ({early / late - 1:+.1%})"
        )
        record.write(measurement="early gradients", shape=shape, milliseconds=times)
        del ways, layer, problem
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
