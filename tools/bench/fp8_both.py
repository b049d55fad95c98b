"""Times both directions of a layer in blockwise FP8 beside bfloat16's, in turns, on one GPU.

    python -m tools.bench.fp8_both --one-of 4 --out results.jsonl

A rank that is alone keeps rows and pre-activations, has a row bound, so that its host waits for
nothing, and adds gradients of weights to float32. All kinds have the same tokens, routing and
weights: "bf16"; "fp8", whose backward is in bfloat16; and "fp8_dgrad", whose gradients of tokens
are in FP8, too. With "step" after it a kind finds what an earlier pass of the step has quantized of
its weights, as all micro-batches of a step but the first do; otherwise each pass quantizes them.
All results of each kind are compared with float32's first. Each turn begins with calls of the same
kind that are not timed, for ``--settle-ms``: a kind is timed at the clock that it sustains itself.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import LayerResults
from flashmoe_megatron.bench.problem import Problem
from flashmoe_megatron.bench.stopwatch import turn_ms
from flashmoe_megatron.config import Experts, MoEConfig
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.select import Kind, select_backend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tools.bench import common, fp8_times
from tools.bench.fp8_times import Takers, pass_own_gate


class Layer:
    """One layer in one precision, with the tokens, routing and weights of a problem.

    On the kernel, or on the reference where there is no GPU: to try, not to tell.
    """

    def __init__(self, problem: Problem, config: MoEConfig, sums: list[list[WeightGrad]]) -> None:
        """Makes the layer; ``sums`` take gradients of fc1's and of fc2's weights."""
        kind: Kind = "kernel" if stopwatch.HAS_GPU else "reference"
        self._backend = select_backend(
            config, None, problem.x.device, kind=kind, keep="all", row_bound=common.ROW_BOUND
        )
        self._sums, self._grad_out = sums, problem.grad_out
        self._given = problem.x.detach(), problem.probs.detach(), problem.routing_map
        self._promise = Promise()
        own = (tuple(one.detach() for one in kind) for kind in _kinds(problem))
        self._weights = ExpertWeights(*own, promise=self._promise)

    def both(self) -> LayerResults:
        """Runs a forward and its backward, which adds to the sums."""
        out, saved = self._backend.forward(*self._given, self._weights, training=True)
        grads = self._backend.backward(self._grad_out, saved, self._weights, *self._sums)
        fc1, fc2 = ([one.buffer for one in kind] for kind in self._sums)
        return LayerResults(out, *grads, fc1, fc2)

    def results(self, *, is_step: bool = False) -> LayerResults:
        """Returns the results of both directions, whose gradients of weights are the sums.

        Args:
            is_step: Whether an earlier pass has quantized the weights.
        """
        with self._promised(is_step):
            if is_step:
                self.both()
            for kind in self._sums:
                for one in kind:
                    one.buffer.zero_()
            return self.both()

    def turn_ms(self, times: int, settle_ms: float, *, is_step: bool = False) -> float:
        """Returns milliseconds of both directions, of some that follow one another.

        Args:
            times: How many are timed.
            settle_ms: How long the same calls run before that.
            is_step: Whether only a first call, which is not timed, quantizes weights.
        """
        with self._promised(is_step):
            return turn_ms(self.both, times, settle_ms)

    @contextmanager
    def _promised(self, is_step: bool) -> Iterator[None]:
        """Promises that weights stay as they are, if passes are of one step; tells of faults."""
        if is_step:
            self._promise.give()
        yield
        self._promise.end()
        self._backend.raise_pending_fault()


def _kinds(problem: Problem) -> tuple[tuple[torch.Tensor, ...], ...]:
    return problem.weights.fc1, problem.weights.fc2


def takers_of(name: str, problem: Problem, times: int, settle_ms: float) -> Takers:
    """Makes the kinds of a problem, which have passed the gate."""
    sums = [
        [WeightGrad(torch.zeros_like(one, dtype=torch.float32), True) for one in kind]
        for kind in _kinds(problem)
    ]
    takers: Takers = {}
    for experts in get_args(Experts):
        config = replace(problem.config, experts=experts)
        layer = Layer(problem, config, sums)
        for is_step in (False, True)[: 1 + config.in_fp8]:
            kind = f"{experts} step" if is_step else experts
            results = layer.results(is_step=is_step)
            pass_own_gate(f"{name}, {kind}", problem, results, in_fp8=config.in_fp8)
            takers[kind] = partial(layer.turn_ms, times, settle_ms, is_step=is_step)
    return takers


def main(arguments: list[str]) -> int:
    """Runs the command line; the status is 2 without a GPU."""
    return fp8_times.run("fp8_both", fp8_times.parse(arguments, __doc__, times=6), takers_of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
