"""What times of layers in FP8 have in common: the command line, the gate, turns and the record."""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch

from examples.arguments import count
from flashmoe_megatron.bench.correctness import GATE, LayerResults, relative_errors
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import shares_of
from flashmoe_megatron.bench.stopwatch import in_turns
from flashmoe_megatron.config import FP8_GRANULE
from tools.arguments import (
    add_one_of,
    add_settling,
    add_shapes,
    add_turns,
    parse_with_shapes,
    parser_of,
)
from tools.bench import common
from tools.bench.common import log
from tools.bench.gate import pass_gate

FP8_GATE = 0.08
"""The most that results in FP8 may differ from float32's of weights and tokens as they are, by
relative L2: E4M3 rounds each operand by 2.6 % in the mean."""

Takers = dict[str, Callable[[], float]]
"""What takes milliseconds, by name; the first is ``"bf16"``, which others are compared with."""


def parse(arguments: Sequence[str], text: str | None, times: int) -> argparse.Namespace:
    """Reads shapes, turns that settle and a record of a command line.

    Args:
        arguments: The command line.
        text: The docstring of the tool.
        times: Calls of a turn that are timed, unless the command line says it.
    """
    parser = parser_of(text)
    add_shapes(parser, ["qwen3-30b", "mixtral-8x7b", "deepseek-v3-e64"])
    add_one_of(parser)
    add_turns(parser, each="kind")
    parser.add_argument("--times", type=count, default=times, help="calls that a turn times")
    add_settling(parser)
    common.add_record_flags(parser, a_line="shape")
    return parse_with_shapes(parser, arguments)


def pass_own_gate(name: str, problem: Problem, got: LayerResults, *, in_fp8: bool) -> None:
    """Compares results with float32's, before anything is timed.

    Args:
        name: What computed them, for messages.
        problem: Tokens, routing and weights; the oracle rounds none of them.
        got: The results; those that are ``None`` are left out.
        in_fp8: Whether :data:`FP8_GATE` holds for them.

    Raises:
        SystemExit: A result is too far off, or not finite.
    """
    pass_gate(name, relative_errors(problem, got), FP8_GATE if in_fp8 else GATE)


@torch.no_grad()
def make_uneven_(problem: Problem) -> None:
    """Gives neighbouring blocks of values scales of their own, which products take out again.

    All factors are powers of two, so that nothing is rounded. With random values alone almost all
    blocks have one scale, and to read another block's would go unseen.
    """
    config = problem.config
    of_hidden, of_inner = (
        torch.tensor([1.0, 2.0, 8.0], device=problem.x.device)
        .repeat(-(-width // (3 * FP8_GRANULE)))
        .repeat_interleave(FP8_GRANULE)[:width]
        for width in (config.hidden, config.intermediate)
    )
    problem.x.mul_(of_hidden)
    problem.grad_out.div_(of_hidden)
    for fc1, fc2 in zip(problem.weights.fc1, problem.weights.fc2, strict=True):
        fc1.div_(of_hidden)[-config.intermediate :].mul_(of_inner[:, None])
        fc2.div_(of_inner).mul_(of_hidden[:, None])


def run(
    measurement: str,
    options: argparse.Namespace,
    takers_of: Callable[[str, Problem, int, float], Takers],
) -> int:
    """Times kinds of each shape in turns, logs and records them.

    Args:
        measurement: Its name in the record.
        options: From :func:`parse`.
        takers_of: Makes what takes the times for the problem of a shape, given its name, the calls
            that a turn times and the milliseconds that it settles; it is to pass the gate first.

    Returns:
        The status of the program; 2 without a GPU.
    """
    shapes = shares_of(options.shapes, options.one_of)
    if not common.has_gpu():
        return 2
    settings = {"one_of": options.one_of, "settle_ms": options.settle_ms}
    record = common.Record(options.out, **common.machine(options.commit), **settings)
    for name, shape in shapes.items():
        problem = make_problem(shape)
        make_uneven_(problem)
        takers = takers_of(name, problem, options.times, options.settle_ms)
        times = in_turns(takers, options.turns, options.settle_ms)
        plain = statistics.median(times["bf16"])
        medians = [
            f"{kind} {statistics.median(of):.3f} ({min(of):.3f} to {max(of):.3f}), "
            f"{statistics.median(of) / plain:.3f} of bf16"
            for kind, of in times.items()
        ]
        log(f"{name}, ms: {'; '.join(medians)}")
        record.write(measurement=measurement, shape=name, milliseconds=times)
        del problem, takers
        torch.cuda.empty_cache()
    return 0
