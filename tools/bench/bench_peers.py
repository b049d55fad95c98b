"""Times our layer and other libraries' alternately on one GPU, over many shapes.

    python -m tools.bench.bench_peers --out runs/peers.jsonl --minutes 8
    python -m tools.bench.peers_report runs/peers.jsonl --out runs/peers

All layers of a shape get the same tokens, weights and routing, and take turns, so that they share
the GPU's temperature. Each turn begins with calls of the same layer that are not timed, for
``--settle-ms``: a layer is timed at the clock that it sustains itself, not at one that depends on
the layer before it. Every other turn has the opposite order, so that layers from graphs come after
one whose calls wait for the CPU equally often, if that is between them. Calls of a turn follow one
another without a pause; the times of all turns are recorded. The record also has the memory that a
forward keeps for its backward, errors of samples of all results against float64, and whether a
second call gives the same bits. A library that is not installed is left out, with a line that says
so; a library that fails at a shape is recorded as failed.

Every shape is written as soon as it is measured, and a shape that is in the file already, with the
same sizes and settings, is passed over: a call that ends after ``--minutes`` is continued by the
next. Several processes at once can make ready what libraries compile, since that does not depend on
the number of tokens:
``--tokens 512 --turns 2`` without ``--out``, one shape and peer each.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from examples.arguments import count
from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import GATE, expert_results, worst_of
from flashmoe_megatron.bench.layers import replayed, without_grad
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import SHAPES, Shape
from flashmoe_megatron.bench.stopwatch import in_turns, turn_ms
from flashmoe_megatron.bench.timer import Timer
from tools.arguments import add_settling, add_turns, parser_of
from tools.bench import common, peers
from tools.bench.common import Record, log
from tools.bench.peers import PEERS, SONICMOE_TILES, Layer, stacked

PASSES = ("forward", "forward_and_backward")
EXAMINED = ("errors", "repeats", "kept_bytes")
MOST_LAUNCHES = 20
SETTINGS = (
    *("peers", "graphed", "only_graphed", "turns", "turn_ms", "settle_ms"),
    *("row_bound", "sonicmoe_tiles"),  # no options of the command
)
"""The settings of a measurement; rows that differ in them are not comparable."""


def _named(names: str) -> dict[str, Shape]:
    return {name: Shape(*map(int, name.split("x")), gated=True) for name in names.split()}


GROUPS = {
    "ours": {
        "qwen3-30b": SHAPES["qwen3-30b"],
        "qwen3-30b/4": SHAPES["qwen3-30b"].one_of(4),
        "mixtral-8x7b": SHAPES["mixtral-8x7b"],
        "deepseek-v3-e64/4": SHAPES["deepseek-v3-e64"].one_of(4),
    },
    "sonicmoe": _named(
        "40960x768x256x128x8 40960x768x512x64x4 40960x768x1024x32x2 24576x1536x256x128x8 "
        "24576x1536x512x64x4 24576x1536x1024x32x2 32768x4096x256x256x16 32768x4096x512x128x8 "
        "32768x4096x1024x64x4 32768x4096x512x256x16 32768x4096x1024x128x8 32768x4096x2048x64x4"
    ),
    "between": _named(
        "16384x2048x256x128x8 32768x1024x256x64x4 16384x3072x384x96x6 8192x2048x512x128x10 "
        "16384x2048x512x64x8 16384x3072x640x64x8 12288x2560x768x96x6 16384x2048x1408x64x6 "
        "16384x4096x1536x32x8 8192x5120x1536x40x6"
    ),
    "many": _named("16384x2048x512x512x10 16384x2048x512x256x8"),
}
"""Layers that models have here, those of SonicMoE's figures, others between them, and such of
hundreds of experts; gated."""

ALL = {name: shape for group in GROUPS.values() for name, shape in group.items()}


RESULTS = ("out", "grad_x", "grad_probs", "grad_fc1", "grad_fc2")


def samples(problem: Problem, most_tokens: int = 256, experts: int = 3) -> tuple[slice, slice]:
    """Evenly spread tokens and experts, whose results are compared with float64."""
    steps = (len(problem.x) // most_tokens or 1, -(-problem.config.num_experts // experts))
    return slice(None, None, steps[0]), slice(None, None, steps[1])


def expected(problem: Problem) -> list[torch.Tensor]:
    """``RESULTS`` of the samples, in float64; gradients of weights are sums over all tokens."""
    tokens, experts = samples(problem)
    every = range(problem.config.num_experts)

    def of_expert(expert: int, rows: Any) -> tuple[torch.Tensor, ...]:
        of_tokens = (problem.x[rows], problem.probs[rows, expert, None])
        weights = (problem.weights.fc1[0][expert], problem.weights.fc2[0][expert])
        chosen, grad_out = problem.routing_map[rows, expert, None], problem.grad_out[rows]
        inputs = (*of_tokens, *weights)
        return expert_results(problem.config, inputs, chosen, grad_out, torch.float64)

    parts = [of_expert(expert, tokens)[:3] for expert in every]
    out, grad_x = (torch.stack([part[i] for part in parts]).sum(0) for i in range(2))
    its_rows = [(e, problem.routing_map[:, e].nonzero().squeeze(1)) for e in every[experts]]
    by_weight = zip(*(of_expert(expert, rows)[3:] for expert, rows in its_rows), strict=True)
    grad_probs = torch.cat([part[2] for part in parts], dim=1)
    return [out, grad_x, grad_probs, *(torch.stack(grads) for grads in by_weight)]


def taken(
    problem: Problem, layer: Layer, out: torch.Tensor, grads: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """``RESULTS`` of the samples, from one layer's."""
    tokens, experts = samples(problem)
    grad_x, grad_choice, *grad_weights = grads
    empty = grad_choice.new_zeros(len(grad_choice[tokens]), problem.config.num_experts)
    grad_probs = empty.scatter(1, problem.topk_idx[tokens], grad_choice[tokens])
    return [out[tokens], grad_x[tokens], grad_probs] + [
        stack[experts] for stack in layer.stacks(grad_weights)
    ]


def forward_and_backward(
    problem: Problem, layer: Layer
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output and all gradients."""
    out = layer.forward()
    return out.detach(), torch.autograd.grad(out, layer.leaves, problem.grad_out)


def examined(problem: Problem, layer: Layer, want: list[torch.Tensor]) -> dict[str, Any]:
    """Examines a layer apart from its times; these calls also compile it."""
    first, again = (forward_and_backward(problem, layer) for _ in range(2))
    pairs = zip((first[0], *first[1]), (again[0], *again[1]), strict=True)
    repeats = all(torch.equal(one, other) for one, other in pairs)
    got = taken(problem, layer, *first)
    del again, first
    errors = {
        name: float((one.double() - other).norm() / other.norm())
        for name, one, other in zip(RESULTS, got, want, strict=True)
    }
    kept = None
    if layer.tells_kept and stopwatch.HAS_GPU:
        before = torch.cuda.memory_allocated()
        out = layer.forward()
        kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    return dict(zip(EXAMINED, (errors, repeats, kept), strict=True))


def measure(shape: Shape, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All that is found of one shape, by the layer's name; drops what is not installed."""
    problem = stacked(make_problem(shape))
    want = expected(problem)
    layers: dict[str, Layer] = {}
    found: dict[str, Any] = {}
    for name in list(names):
        try:
            layers[name] = PEERS[name](problem)
            found[name] = examined(problem, layers[name], want)
            without_grad(layers[name].forward)()  # may be compiled again
        except ImportError as error:
            names.remove(name)
            log(f"{name} is left out: {error}")
        except Exception as error:  # noqa: BLE001 - what a library raises is its result here
            layers.pop(name, None)
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
            log(f"  {name} failed: {found[name]['failed']}")
        gc.collect()
        torch.cuda.empty_cache()
    for passes, products in zip(PASSES, (1, 3), strict=True):
        least_ms = products * shape.flops / options.tflops / 1e9
        launches = min(MOST_LAUNCHES, max(1, round(options.turn_ms / least_ms)))
        takers = {}
        for name, layer in layers.items():
            both = partial(forward_and_backward, problem, layer)
            call = without_grad(layer.forward) if products == 1 else both
            if name not in options.only_graphed:
                takers[name] = partial(turn_ms, call, launches, options.settle_ms)
            if name in {*options.graphed, *options.only_graphed}:
                graphed = f"{name} from a graph"
                found.setdefault(graphed, {key: found[name][key] for key in EXAMINED})
                takers[graphed] = partial(turn_ms, replayed(call), launches, options.settle_ms)
        for name, times in in_turns(takers, options.turns, options.settle_ms).items():
            found[name][passes] = [round(time_ms, 4) for time_ms in times]
    return found


def recorded(out: Path | None, settings: dict[str, Any]) -> list[tuple[str, Shape]]:
    """The shapes that a record has with some settings, by name and sizes."""
    rows = common.read_record(out) if out is not None and out.is_file() else []
    same = (row for row in rows if {**row, **settings} == row)
    return [(row["shape"], Shape(**row["sizes"])) for row in same]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    names = [*GROUPS, *ALL]
    add("--shapes", nargs="+", default=list(GROUPS), choices=names, metavar="SHAPE",
        help=f"groups or names: {', '.join(names)}")  # fmt: skip
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    add("--graphed", nargs="+", default=[], choices=PEERS,
        help="peers that are replayed from CUDA graphs, too, without their host")  # fmt: skip
    add("--only-graphed", nargs="+", default=[], choices=PEERS,
        help="peers that are timed from CUDA graphs alone")  # fmt: skip
    add("--tokens", type=count, help="instead of each shape's own")
    add_turns(parser, each="layer; two more warm up if none settles")
    add("--turn-ms", type=float, default=20.0, help="about as long is one turn")
    add_settling(parser)
    add("--minutes", type=float, default=float("inf"), help="no shape begins later")
    common.add_record_flags(parser, a_line="shape")
    options = parser.parse_args(arguments)
    chosen = [inner for name in options.shapes for inner in GROUPS.get(name, [name])]
    changed = {} if options.tokens is None else {"tokens": options.tokens}
    options.shapes = {name: replace(ALL[name], **changed) for name in chosen}
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not common.has_gpu():
        return 2
    started = time.monotonic()
    fixed = {"row_bound": peers.ROW_BOUND, "sonicmoe_tiles": list(SONICMOE_TILES)}
    settings = {name: {**vars(options), **fixed}[name] for name in SETTINGS}
    done = recorded(options.out, settings)
    options.tflops = common.cublas_tflops(Timer(10, 3))
    record = Record(
        options.out,
        **common.machine(options.commit),
        command=common.called("tools.bench.bench_peers", arguments),
        cublas_tflops=round(options.tflops, 1),
        **settings,
    )
    left = [name for name, shape in options.shapes.items() if (name, shape) not in done]
    names, good = list(options.peers), True
    while left and time.monotonic() - started < 60 * options.minutes:
        name = left.pop(0)
        shape = options.shapes[name]
        try:
            found = measure(shape, names, options)
        except RuntimeError as error:  # memory for all layers at once, above all
            log(f"{name} cannot be measured: {error}")
            good = False
            continue
        record.write(measurement="peers", shape=name, sizes=asdict(shape), layers=found)
        log(f"{name}, {time.monotonic() - started:.0f} s: medians, ms; worst error; bits repeat")
        for peer, what in found.items():
            errors = what.get("errors", {"failed": float("inf")}).values()
            worst = worst_of(errors)
            good = good and (worst <= GATE or not peer.startswith("flashmoe"))
            if PASSES[0] in what:
                both = ", ".join(f"{statistics.median(what[passes]):.3f}" for passes in PASSES)
                log(f"  {peer}: {both}; {worst:.1e}; {what['repeats']}")
    if left:
        log(f"no time for {', '.join(left)}: the same command goes on there")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
