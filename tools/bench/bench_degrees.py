"""Times the scheduled layer at several degrees, and compares them with the degree of a fit.

    torchrun --nproc-per-node 4 -m flashmoe_megatron.schedule fit fit.json
    torchrun --nproc-per-node 4 -m flashmoe_megatron.schedule fit copies.json --exchange copies
    torchrun --nproc-per-node 4 -m tools.bench.bench_degrees fit.json copies.json

For every shape, in one run, are timed by each fit's exchange: forwards at each degree, then
forwards and backwards whose backward has each degree and whose forward has the fit's; the fit's
choice is compared with one part by the faster exchange. The same run times the kernel, the unfused
baseline of ``unfused.py``, and Megatron-Core's own layer of ``megatron_layer.py`` with its
``alltoall`` dispatcher, which is left out with a line where it is not installed. Each has to pass
the correctness gate of ``bench_layer`` first, the scheduled layer at the fit's degrees. Times are
medians over iterations of the slowest rank, each from an idle GPU. The last lines say at how many
shapes the fit's degree is the fastest one or a neighbour of it among the measured ones.

``--allow-cpu`` runs over gloo where there is no GPU, without the kernel: to try, not to tell.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from examples import cpu_bridge
from examples.arguments import count
from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import relative_errors
from flashmoe_megatron.bench.layers import FusedLayer, UnfusedLayer, kernel_layer, without_grad
from flashmoe_megatron.bench.megatron_layer import MegatronLayer
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import Shape, shape_of, shares_of
from flashmoe_megatron.bench.timer import Timer
from flashmoe_megatron.measured.fit import read_fit
from tools.arguments import not_negative, parser_of
from tools.bench import common
from tools.bench.common import Record, log
from tools.bench.gate import pass_gate

Layer = FusedLayer | UnfusedLayer | MegatronLayer

DEGREES = (1, 2, 3, 4, 6, 8)
SIZES = (
    "2048x768x128x8 2048x2048x64x2 4096x14336x8x2 7168x2048x64x8 2048x1408x64x6 4096x1536x32x8 "
    "1024x4096x16x2 5120x1536x32x6"
)
SHAPES = [f"{tokens}x{sizes}" for tokens in (2048, 4096, 8192) for sizes in SIZES.split()]
"""Gated, by tokens of a rank, hidden, intermediate, experts and top-k."""


def megatron_layer(problem: Problem) -> MegatronLayer:
    """Megatron's own layer; without a GPU something answers for one.

    Raises:
        ImportError: Megatron-Core or Transformer Engine is not installed.
    """
    if not problem.x.is_cuda:
        cpu_bridge.enable()
    return MegatronLayer(problem)


BESIDE: dict[str, Callable[[Problem], Layer]] = {
    "kernel": partial(kernel_layer, use_main_grad=False, row_bound=common.ROW_BOUND),
    "unfused": partial(UnfusedLayer, use_main_grad=False),
    "megatron": megatron_layer,
}
"""Other layers that can be timed in the same run, by name."""


def near(predicted: int, ms: dict[int, float]) -> bool:
    """Tells whether a degree is the fastest one, or the next one below or above it."""
    ordered = sorted(ms)
    fastest = min(ordered, key=lambda degree: ms[degree])
    return abs(ordered.index(predicted) - ordered.index(fastest)) <= 1


def measure_beside(
    name: str, problem: Problem, names: list[str], timer: Timer
) -> dict[str, list[float]]:
    """Milliseconds of others' forwards, and forwards and backwards. Collective as above.

    Layers that are not installed are removed from ``names``.
    """
    found = {}
    for other in list(names):
        layer = common.made_if_installed(other, names, partial(BESIDE[other], problem))
        if layer is None:
            continue
        pass_gate(f"{name} {other}", relative_errors(problem, layer.results()))
        calls = (without_grad(layer), layer.forward_and_backward)
        found[other] = [timer(call).median_ms for call in calls]
    return found


@dataclass(frozen=True)
class Degrees:
    """Times of the scheduled layer by one exchange: forwards, then forwards and backwards.

    Attributes:
        exchange: How rows travel.
        predicted: The fit's degrees of forward and backward.
        ms: Milliseconds by degree.
        near: Whether the fit's degree is the fastest one or a neighbour of it.
    """

    exchange: str
    predicted: tuple[int, int]
    ms: tuple[dict[int, float], dict[int, float]]
    near: tuple[bool, bool]

    def chosen_ms(self, place: int) -> float:
        """Milliseconds at the fit's degree."""
        return self.ms[place][self.predicted[place]]


def exchange_of(fit: Path) -> str:
    """How rows travel in the layers that a fit is for, as the option ``exchange`` has it."""
    return "copies" if read_fit(fit, None).machine.by_copies else "auto"


def measure_degrees(
    name: str, problem: Problem, fit: Path, options: argparse.Namespace, timer: Timer
) -> Degrees:
    """Measures one shape by the exchange of one fit. Collective over the default group."""
    exchange = options.fits[fit]
    auto = {"degree": "auto", "degree_fit": str(fit), "exchange": exchange}
    layer = kernel_layer(problem, use_main_grad=False, kind="scheduled", **auto)
    backend = layer.backend
    forward, backward = predicted = backend.degrees
    pass_gate(f"{name} {exchange}", relative_errors(problem, layer.results()))
    ms: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for degree in sorted({*options.degrees, forward}):
        backend.degrees = (degree, 1)
        ms[0][degree] = timer(without_grad(layer)).median_ms
    for degree in sorted({*options.degrees, backward}):
        backend.degrees = (forward, degree)
        ms[1][degree] = timer(layer.forward_and_backward).median_ms
    return Degrees(exchange, predicted, ms, (near(forward, ms[0]), near(backward, ms[1])))


def measure(
    name: str, shape: Shape, options: argparse.Namespace, timer: Timer, record: Record
) -> list[tuple[bool, bool]]:
    """Measures one shape. Collective over the default group.

    Returns:
        For each fit whether its degrees of forward and backward are as good as asked.
    """
    problem = make_problem(shape, dist.get_world_size())
    found = [measure_degrees(name, problem, fit, options, timer) for fit in options.fits]
    beside = measure_beside(name, problem, options.beside, timer)
    for one in found:
        record.write(measurement="degrees", shape=name, beside=beside, **asdict(one))
    for place, what in enumerate(("forward", "forward and backward")):
        in_one = min(one.ms[place][1] for one in found)
        for one in found:
            said = ", ".join(f"{each}: {time:.3f}" for each, time in sorted(one.ms[place].items()))
            verdict = "near the fastest" if one.near[place] else "far from the fastest"
            log(
                f"{name} {one.exchange}, {what}: {said} ms; by the fit {one.predicted[place]}, "
                f"{verdict}, {in_one / one.chosen_ms(place):.3f} x as fast as one part"
            )
        chosen = min(one.chosen_ms(place) for one in found)
        for other, both in beside.items():
            ratio = both[place] / chosen
            log(f"{name} {other}, {what}: {both[place]:.3f} ms, {ratio:.3f} x as long as scheduled")
    return [one.near for one in found]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add(
        "fits",
        type=Path,
        nargs="+",
        help="files of flashmoe_megatron.schedule fit, of as many ranks, one for each exchange",
    )
    add("--shapes", nargs="+", default=SHAPES, metavar="SHAPE",
        help="TOKENSxHIDDENxINTERMEDIATExEXPERTSxTOPK, gated, or a name")  # fmt: skip
    add("--degrees", type=count, nargs="+", default=list(DEGREES), help="1 among them")
    add("--beside", nargs="*", choices=BESIDE, default=list(BESIDE))
    add("--iterations", type=count, default=9)
    add("--warmup", type=not_negative, default=2)
    add("--allow-cpu", action="store_true", help="without a GPU: over gloo")
    common.add_record_flags(parser, a_line="shape")
    options = parser.parse_args(arguments)
    if 1 not in options.degrees:
        parser.error(f"--degrees {options.degrees}: wanted 1 among them, which others are beside")
    try:
        options.shapes = {name: shape_of(name, gated=True) for name in options.shapes}
        options.fits = {fit: exchange_of(fit) for fit in options.fits}
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not options.allow_cpu and not common.has_gpu():
        return 2
    if not stopwatch.HAS_GPU and "kernel" in options.beside:
        options.beside.remove("kernel")
    if common.join_group() == 1:
        raise SystemExit("1 rank, with which nothing travels: wanted several, by torchrun")
    shares_of(options.shapes, 1, dist.get_world_size())
    timer = Timer(options.iterations, options.warmup)
    record = Record(
        options.out,
        **common.machine(options.commit),
        command=common.called("tools.bench.bench_degrees", arguments),
        num_ranks=dist.get_world_size(),
    )
    good = []
    for name, shape in options.shapes.items():
        good.append(measure(name, shape, options, timer, record))
        if stopwatch.HAS_GPU:
            torch.cuda.empty_cache()
    for exchange, of_shapes in zip(options.fits.values(), zip(*good, strict=True), strict=True):
        for what, are_near in zip(
            ("forward", "backward"), zip(*of_shapes, strict=True), strict=True
        ):
            count = f"{sum(are_near)} of {len(good)} shapes"
            log(f"{exchange}, {what}: near the fastest degree at {count}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
