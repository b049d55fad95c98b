"""Times builds of the library, or with and without counters, alternately on one GPU.

    python -m tools.bench.compare_libraries before.so now.so --out results.jsonl
    python -m tools.bench.compare_libraries --uncounted --out results.jsonl
    python -m tools.bench.compare_libraries --rank-invariant --out results.jsonl

The second command says what counters cost: the same kernel counts, or does not. The third says so
of the option ``rank_invariant``.

A change of some tenths of a per cent is less than what two hosts differ by, or one host from minute
to minute. So every library has a process of its own, all of them at once on one GPU, which take
turns of some launches each: clocks and temperature are the same for all. Each has to pass the
correctness gate of ``bench_layer`` at a shape first, with random values, and the results whose bits
are not the first library's are named. Launches of a turn follow
one another without a pause, and both passes are replayed from CUDA graphs: Python takes up to 4 ms
for a forward and its backward, which is more than most layers do. With values of zero
the GPU stays below its power limit, and times repeat within one per cent; random values show what
training sees.
"""

import argparse
import hashlib
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examples.arguments import count
from flashmoe_megatron.bench.correctness import LayerResults, relative_errors
from flashmoe_megatron.bench.layers import FusedLayer, kernel_layer, replayed, without_grad
from flashmoe_megatron.bench.problem import make_problem
from flashmoe_megatron.bench.shapes import Shape, shares_of
from flashmoe_megatron.bench.stopwatch import in_turns, turn_ms
from flashmoe_megatron.kernel import bindings
from tools.arguments import add_one_of, add_shapes, add_turns, parse_with_shapes, parser_of
from tools.bench import common
from tools.bench.common import log
from tools.bench.gate import pass_gate

PASSES = ("forward", "forward_and_backward")


class Turn(NamedTuple):
    """What a library has done in its turn.

    Attributes:
        times_ms: Milliseconds of a launch, of each pass.
        bits: A digest of each result of random values, by name.
    """

    times_ms: dict[str, float]
    bits: dict[str, str]


def bits_of(results: LayerResults) -> dict[str, str]:
    """A digest of each result."""

    def digest(tensors: torch.Tensor | list[torch.Tensor]) -> str:
        sha = hashlib.sha256()
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            sha.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy())
        return sha.hexdigest()

    return {name: digest(value) for name, value in vars(results).items() if value is not None}


def differing(bits: dict[str, dict[str, str]], first: str) -> dict[str, list[str]]:
    """The results of each library whose bits are not the first's, by the libraries' names."""
    wanted = bits[first]
    return {
        name: [what for what in wanted if of[what] != wanted[what]] for name, of in bits.items()
    }


def graphs_of(layer: FusedLayer) -> dict[str, Callable[[], object]]:
    """The layer's passes as graphs."""
    calls = dict(zip(PASSES, (without_grad(layer), layer.forward_and_backward), strict=True))
    for call in calls.values():
        call()  # what only a first call does has no place in a graph
    return {passes: replayed(call) for passes, call in calls.items()}


def work(library: Path, orders: Connection, launches: int, one_of: int, **changed: Any) -> None:
    """Takes orders of a named shape and whether its values are zeros; answers with turns."""
    os.environ["FLASHMOE_LIBRARY"] = str(library)  # this process has loaded none yet
    calls: dict[tuple[str, Shape, bool], dict[str, Callable[[], object]]] = {}
    bits: dict[str, str] = {}
    while (order := orders.recv()) is not None:
        if order not in calls:
            name, shape, is_zero = order
            calls.clear()  # frees the last shape's memory
            torch.cuda.empty_cache()
            problem = make_problem(shape.one_of(one_of))
            layer = kernel_layer(problem, row_bound=common.ROW_BOUND, **changed)
            results = layer.results()
            pass_gate(f"{name}, {library}", relative_errors(problem, results))
            bits = bits_of(results)
            del results
            if is_zero:
                problem.zero_values()
            calls[order] = graphs_of(layer)
        times_ms = {passes: turn_ms(call, launches) for passes, call in calls[order].items()}
        orders.send(Turn(times_ms, bits))


def names_of(libraries: list[Path]) -> list[str]:
    """Names each library: by its file alone where that tells them apart."""
    files = [library.resolve() for library in libraries]
    if len(set(files)) < len(files):
        raise SystemExit(f"a library is named twice: {', '.join(map(str, libraries))}")
    stems = [library.stem for library in libraries]
    return stems if len(set(stems)) == len(stems) else [str(library) for library in libraries]


class Worker:
    """A process that runs one library, with some options of the layer changed."""

    def __init__(
        self, library: Path, launches: int, one_of: int, name: str = "", **changed: Any
    ) -> None:
        if not library.is_file():
            raise SystemExit(f"no library at {library}")
        context = multiprocessing.get_context("spawn")
        self.name = name or library.stem
        self._orders, theirs = context.Pipe()
        arguments = (library.resolve(), theirs, launches, one_of)
        self._process = context.Process(target=work, args=arguments, kwargs=changed, daemon=True)
        self._process.start()
        theirs.close()  # so that its end, if it dies, ends what is waited for

    def turn(self, name: str, shape: Shape, is_zero: bool) -> Turn:
        """Has the library take its turn."""
        try:
            self._orders.send((name, shape, is_zero))
            turn: Turn = self._orders.recv()
        except (BrokenPipeError, EOFError):
            raise SystemExit(f"{self.name} ended at {name}") from None
        return turn

    def end(self) -> None:
        """Waits until the process has ended."""
        self._orders.send(None)
        self._process.join()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("libraries", nargs="*", type=Path, help="others are compared with the first; default: ours")
    add("--uncounted", action="store_true", help="the first also without counters")
    add("--rank-invariant", action="store_true", help="the first also with rank_invariant")
    add_shapes(parser, ["paper-8k", "qwen3-30b"])
    add("--values", nargs="+", default=["zeros"], choices=["zeros", "random"])
    add_one_of(parser)
    add_turns(parser, each="library")
    add("--launches", type=count, default=20, help="of a turn")
    common.add_record_flags(parser, a_line="shape")
    return parse_with_shapes(parser, arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    shares_of(options.shapes, options.one_of)
    if not common.has_gpu():
        return 2
    record = common.Record(options.out, **common.machine(options.commit))
    libraries = options.libraries or [bindings.library_path()]
    sizes = (options.launches, options.one_of)
    names = names_of(libraries)
    workers = [Worker(path, *sizes, name) for path, name in zip(libraries, names, strict=True)]
    if options.uncounted:
        workers.append(Worker(libraries[0], *sizes, f"{names[0]}, uncounted", counters=False))
    if options.rank_invariant:
        name = f"{names[0]}, rank-invariant"
        workers.append(Worker(libraries[0], *sizes, name, rank_invariant=True))
    for shape, layer in options.shapes.items():
        for values in options.values:
            takers = {
                worker.name: partial(worker.turn, shape, layer, values == "zeros")
                for worker in workers
            }
            turns = in_turns(takers, options.turns)
            others = differing({name: of[0].bits for name, of in turns.items()}, workers[0].name)
            for name, found in others.items():
                if found:
                    log(
                        f"{shape}: {name}'s {', '.join(found)}: other bits than {workers[0].name}'s"
                    )
            for passes in PASSES:
                of_library = {
                    name: [turn.times_ms[passes] for turn in of] for name, of in turns.items()
                }
                first = statistics.median(of_library[workers[0].name])
                for name, times_ms in of_library.items():
                    median = statistics.median(times_ms)
                    log(
                        f"{shape}, {values}, {passes}: {name} {1e3 * median:.1f} us "
                        f"({1e3 * min(times_ms):.1f} to {1e3 * max(times_ms):.1f}), "
                        f"{median / first - 1:+.2%}"
                    )
                record.write(
                    measurement="libraries",
                    shape=shape,
                    values=values,
                    passes=passes,
                    milliseconds=of_library,
                    differing_bits=others,
                )
    for worker in workers:
        worker.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
