"""Times both directions of a layer in blockwise FP8 beside bfloat16's, in turns, on one GPU.

    python -m tools.bench.fp8_both --one-of 4 --out results.jsonl

A rank that is alone keeps rows and pre-activations, has a row bound, so that its host waits for
nothing, and adds gradients of weights to float32. All kinds have the same tokens, routing and
weights: "bf16"; "fp8", whose backward is in bfloat16; and "fp8_dgrad", whose gradients of tokens
are in FP8, too. With "step" after it a kind finds what an earlier pass of the step has quantized of
its weights, as all micro-batches of a step but the first do; otherwise each pass quantizes them.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from examples.arguments import count
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import shares_of
from flashmoe_megatron.bench.stopwatch import in_turns, turn_ms
from flashmoe_megatron.config import Experts, MoEConfig
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tools.arguments import add_shapes, add_turns, parse_with_shapes, parser_of
from tools.bench import common
from tools.bench.common import log


class Layer:
    """One layer in one precision, with the tokens, routing and weights of a problem."""

    def __init__(self, problem: Problem, config: MoEConfig, sums: list[list[WeightGrad]]) -> None:
        """Makes the layer; ``sums`` take gradients of fc1's and of fc2's weights."""
        self._backend = select_backend(
            config, None, "cuda", kind="kernel", keep="all", row_bound=common.ROW_BOUND
        )
        self._sums, self._grad_out = sums, problem.grad_out
        self._given = problem.x.detach(), problem.probs.detach(), problem.routing_map
        own = (tuple(one.detach() for one in kind) for kind in _kinds(problem))
        self._weights = ExpertWeights(*own, promise=Promise())

    def both(self) -> None:
        """Runs a forward and its backward."""
        _, saved = self._backend.forward(*self._given, self._weights, training=True)
        self._backend.backward(self._grad_out, saved, self._weights, *self._sums)

    def turn_ms(self, times: int, *, is_step: bool = False) -> float:
        """Returns milliseconds of both directions, of some that follow one another."""
        promise = self._weights.promise
        assert promise is not None
        if is_step:
            promise.give()
        taken = turn_ms(self.both, times)
        promise.end()
        self._backend.raise_pending_fault()
        return taken


def _kinds(problem: Problem) -> tuple[tuple[torch.Tensor, ...], ...]:
    return problem.weights.fc1, problem.weights.fc2


def measure(problem: Problem, turns: int, times: int) -> dict[str, list[float]]:
    """Takes the times of all kinds in turns; milliseconds by name."""
    sums = [
        [WeightGrad(torch.zeros_like(one, dtype=torch.float32), True) for one in kind]
        for kind in _kinds(problem)
    ]
    takers = {}
    for experts in get_args(Experts):
        config = replace(problem.config, experts=experts)
        layer = Layer(problem, config, sums)
        takers[experts] = partial(layer.turn_ms, times)
        if config.in_fp8:
            takers[f"{experts} step"] = partial(layer.turn_ms, times, is_step=True)
    return in_turns(takers, turns)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = parser_of(__doc__)
    add_shapes(parser, ["qwen3-30b", "mixtral-8x7b", "deepseek-v3-e64"])
    add_turns(parser, 7, each="kind")
    parser.add_argument("--times", type=count, default=6, help="both directions in a turn")
    common.add_record_flags(parser, a_line="shape")
    return parse_with_shapes(parser, arguments)


def main(arguments: list[str]) -> int:
    """Runs the command line; the status is 2 without a GPU."""
    options = parse(arguments)
    shapes = shares_of(options.shapes, options.one_of)
    if not common.has_gpu():
        return 2
    record = common.Record(options.out, **common.machine(options.commit))
    for name, shape in shapes.items():
        problem = make_problem(shape)
        times = measure(problem, options.turns, options.times)
        plain = statistics.median(times["bf16"])
        told = [
            f"{kind} {statistics.median(of):.3f} ({min(of):.3f} to {max(of):.3f}), "
            f"{statistics.median(of) / plain:.3f} of bf16"
            for kind, of in times.items()
        ]
        log(f"{name}, ms: {'; '.join(told)}")
        record.write(measurement="fp8_both", shape=name, milliseconds=times)
        del problem
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
