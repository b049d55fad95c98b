"""Launch after launch in random order, late and early, in poisoned memory: the bits stay the same.

    python -m tests.gpu.stress --ranks 4 --seconds 120
    python -m tests.gpu.stress --ranks 4 --seconds 120 --slots 2
    python -m tests.gpu.stress --ranks 4 --seconds 120 --slots 2 --ahead
    python -m tests.gpu.stress --ranks 4 --seconds 120 --experts fp8
    python -m tests.gpu.stress --ranks 4 --seconds 90 --experts fp8 --scenarios 8 --launches 5000
    FLASHMOE_LIBRARY=$PWD/flashmoe_megatron/libflashmoe_delays.so python -m tests.gpu.stress ...

A scenario is a layer of random shape, dtype and routing, all of it from one seed. Its first run is
compared with the oracle and kept; every later run has to repeat all results bit for bit: output,
gradients of tokens, probabilities and weights. Runs of all scenarios are mixed at random, share one
heap and one workspace, and follow one another without waiting. Before every launch its buffers are
filled with NaN; now and then a whole run on NaN leaves them in the heap as well. Ranks launch in
random order, after random pauses of the host and of the GPU. With ``--ahead`` the replicas of some
forwards are settled on ahead of them, from another routing: these repeat the bits of one another.

Here all ranks are virtual ones on one GPU; :mod:`tests.multi_gpu.stress` is the same on real ranks.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import faulthandler
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, get_args

import torch

from examples.arguments import count as positive
from flashmoe_megatron.blockwise import rounded
from flashmoe_megatron.config import FP8_GRANULE, Activation, Experts, MoEConfig
from flashmoe_megatron.errors import FlashMoEError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.backend import KernelBackend, count_routes
from flashmoe_megatron.replicas.policy import When
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.expected import Results, assert_as_good, expected, to_device
from tests.gpu.layers import zipf
from tests.gpu.virtual import (
    VirtualGroup,
    VirtualLayer,
    device,
    mispredicted,
    poisoned_empties,
    streams,
)
from tests.unit import cases
from tests.unit.separate import compare, oracle
from tests.unit.test_fp8 import FURTHER

TIMEOUT_S = 30.0
LATE_S = 8.0
"""A step on virtual ranks, which takes milliseconds, is late then."""
SCENARIOS = 48  # distinct ones; each is then run again and again
NAN_EVERY = 8  # steps on NaN among them
EVALUATION_EVERY = 6  # forwards that keep nothing
CHECK_EVERY = 40  # steps between two looks at the differences
MAX_TOKENS = 320
MANY_TOKENS = 16 * MAX_TOKENS
"""Half of the layers of one rank expect these: with so many rows, groups end with experts."""
FEWEST_ACTIVATIONS = 4096
"""Fewer of them in FP8 may give results further from the oracle's than a tolerance of many allows.

One that is rounded to its other side moves by a tenth, which is up to 0.5 / sqrt(n) of a gradient
that comes from n of them.
"""
ROUTINGS: tuple[cases.Routing, ...] = (
    cases.uniform,
    cases.uniform,
    zipf,
    cases.skewed,
    cases.to_one_expert,
    cases.to_one_rank,
    cases.with_empty_experts,
    cases.with_dropped_tokens,
    cases.to_nobody,
)
Values = dict[str, torch.Tensor]


@dataclass
class Scenario:
    """One layer and its inputs on all ranks, made of a seed."""

    seed: int
    config: MoEConfig
    dtype: torch.dtype
    transposed: bool
    inputs: cases.Inputs
    foreseen: list[torch.Tensor]  # the routing as lookahead has it
    weights: list[ExpertWeights]

    def on_nan(self) -> "Scenario":
        """The same with NaN for every token and gradient."""
        nan = [torch.full_like(x, float("nan")) for x in self.inputs.x]
        return replace(self, inputs=replace(self.inputs, x=nan, grad_out=nan))

    def __str__(self) -> str:
        config = self.config
        tokens = [len(x) for x in self.inputs.x]
        return (
            f"scenario {self.seed}: H={config.hidden} F={config.intermediate} "
            f"E={config.num_experts} top-{config.topk} {config.activation.value}"
            f"{' gated' if config.gated else ''}{' transposed' if self.transposed else ''} "
            f"{self.dtype}, {tokens} tokens"
        )


def draw_activation(draw: random.Random, experts: Experts) -> Activation:
    """Draws one whose derivative is continuous, if sums may be off by a little.

    Tensor cores add products in FP8 with fewer bits than float32 has: an error of 2 ** -16 of the
    terms' magnitude gives one in a hundred rows another sign before ReLU, and another gradient.
    """
    activation = draw.choice(list(Activation))
    has_step = activation is Activation.RELU and experts != "bf16"
    return Activation.SQUARED_RELU if has_step else activation


def make_scenario(seed: int, num_ranks: int, experts: Experts = "bf16") -> Scenario:
    """Draws one; the same on every rank."""
    draw = random.Random(1000 * num_ranks + seed)
    num_experts = num_ranks * draw.choice((1, 2, 3, 4, 8))
    granule = FP8_GRANULE if experts != "bf16" else 64
    config = MoEConfig(
        hidden=granule * draw.randint(1, 8),
        # On one rank the first are read in place, the next until they are copied, the last never.
        intermediate=granule * draw.choice((1, 2, 3, 4, 5, 6, 8, 10, 17)),
        num_experts=num_experts,
        topk=min(draw.choice((1, 2, 2, 3, 4, 6, 8)), num_experts),
        activation=draw_activation(draw, experts),
        gated=draw.random() < 0.6,
        num_ranks=num_ranks,
        max_tokens=MANY_TOKENS if num_ranks == 1 and seed % 2 else MAX_TOKENS,
        experts=experts,
    )
    most = draw.choice((3, 40, 130, MAX_TOKENS))
    tokens = [draw.choice((0, 1, most, draw.randint(0, most))) for _ in range(num_ranks)]
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16))
    transposed = draw.random() < 0.25
    if experts != "bf16":
        dtype, transposed = torch.bfloat16, False
    inputs = to_device(
        cases.make_inputs(config, draw.choice(ROUTINGS), tokens, dtype=dtype, seed=seed), device()
    )
    foreseen = [mispredicted(routing_map) for routing_map in inputs.routing_map]
    weights = steps.weights_of(config, inputs, transposed=transposed)
    return Scenario(seed, config, dtype, transposed, inputs, foreseen, weights)


@dataclass(frozen=True)
class Way:
    """How one step is run; the same on every rank."""

    training: bool
    bounded: bool  # one launch that plans for itself
    ahead: bool = False  # replicas are settled on before
    keeps_rows: bool = True  # else a rank that is alone reads tokens, or fetches rows


def phases(
    backend: KernelBackend, scenario: Scenario, rank: int, way: Way
) -> Generator[None, None, Values]:
    """One rank's launches, one for each pause; in between other ranks may launch theirs.

    Returns:
        What was computed.
    """
    inputs, weights = scenario.inputs, scenario.weights[rank]
    given = inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank]
    if scenario.config.num_ranks == 1:
        backend.keep = "all" if way.keeps_rows else "preactivations"
    if way.ahead:
        backend.settle(scenario.foreseen[rank], lambda: weights, layer=0)
        yield
    if way.bounded:
        most = int(backend._sizes.max_row_blocks)  # known since the layer was prepared
        out, saved = backend.finish(backend.begin(*given, most), weights, training=way.training)
    else:
        pending = backend.begin(*given)
        yield
        out, saved = backend.finish(pending, weights, training=way.training)
    yield
    found = {"out": out}
    if way.training:
        fc1, fc2 = (
            [WeightGrad(torch.empty_like(weight, dtype=torch.float32), False) for weight in share]
            for share in (weights.fc1, weights.fc2)
        )
        grad_x, grad_probs = backend.backward(inputs.grad_out[rank], saved, weights, fc1, fc2)
        found.update(grad_x=grad_x, grad_probs=grad_probs)
        found.update({f"grad_fc1[{i}]": grad.buffer for i, grad in enumerate(fc1)})
        found.update({f"grad_fc2[{i}]": grad.buffer for i, grad in enumerate(fc2)})
    yield
    return found


@dataclass
class Report:
    """The record of a run.

    Attributes:
        mode: "virtual" or "real" ranks.
        num_ranks: How many ranks took part.
        library: The file that was loaded.
        seed: What the order, the pauses and the poison are drawn from.
        steps: Forwards with or without backward, each by all ranks together.
        launches: Forward, backward or ahead of a forward, each by all ranks together.
        scenarios: Distinct ones that were run.
        compared: Values compared with the first run's.
        differences: Values that differed.
        replicas: What spare slots held in the last launches, on real ranks.
        seconds: How long it took.
        failure: What went wrong, if anything.
    """

    mode: str
    num_ranks: int
    library: str
    seed: int
    steps: int = 0
    launches: int = 0
    scenarios: int = 0
    compared: int = 0
    differences: int = 0
    replicas: int = 0
    seconds: float = 0.0
    failure: str = ""


@dataclass
class Ledger:
    """Keeps the first results of every scenario and counts where later ones differ."""

    report: Report
    first: dict[tuple[int, int, bool], Values] = field(default_factory=dict)
    pending: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )

    def enter(self, scenario: Scenario, way: Way, rank: int, got: Values) -> None:
        """Compares on the current stream; nothing waits."""
        known = self.first.setdefault((scenario.seed, rank, way.ahead), got)
        for name, tensor in got.items():
            want = known.setdefault(name, tensor)
            if want is tensor or not tensor.numel():
                continue
            wrong = unlike(tensor, want).sum()
            self.report.compared += tensor.numel()
            where = f"step {self.report.steps}, rank {rank}, {name} of {scenario}"
            self.pending.append((where, wrong, tensor, want))

    def settle(self) -> None:
        """Waits, and fails with the first difference since the last time.

        Raises:
            AssertionError: Some values differ.
        """
        torch.cuda.synchronize()
        counts = [int(wrong) for _, wrong, _, _ in self.pending]
        self.report.differences += sum(counts)
        for (where, _, got, want), count in zip(self.pending, counts, strict=True):
            assert count == 0, (
                f"{count} values differ from the first run's: {where}: {examples(got, want)}"
            )
        self.pending.clear()


def unlike(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Where the bits of two results differ."""
    bits = torch.int16 if got.dtype.itemsize == 2 else torch.int32
    return got.view(bits) != want.view(bits)


def examples(got: torch.Tensor, want: torch.Tensor) -> str:
    """The first places where two results differ, with what was got and wanted there."""
    places = unlike(got, want).nonzero().cpu()
    first, last = places[0].tolist(), places[-1].tolist()
    some = [(got[tuple(at)].item(), want[tuple(at)].item()) for at in places[:8].tolist()]
    return f"from {first} to {last} of {list(got.shape)}, (got, wanted) {some}"


class Pauses:
    """Random lateness: of the host before it launches, and of the GPU before it runs that."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def take(self) -> None:
        kind = self._draw.random()
        if kind < 0.15:
            time.sleep(self._draw.uniform(0, 4e-4))
        elif kind < 0.155:
            time.sleep(self._draw.uniform(0, 2e-2))
        if self._draw.random() < 0.2:
            torch.cuda._sleep(int(self._draw.expovariate(1 / 40_000)))  # cycles; on one SM


def schedule(
    seed: int, *, looks_ahead: bool, scenarios: int = SCENARIOS
) -> Iterator[tuple[int, Way, bool]]:
    """Yields which of some scenarios is run, how, and whether on NaN; the same on every rank."""
    draw = random.Random(seed)
    seen = 0
    for step in range(10**9):
        is_new = seen < scenarios and (seen < 4 or draw.random() < 0.05)
        scenario = seen if is_new else draw.randrange(seen)
        seen += is_new
        training = is_new or draw.randrange(EVALUATION_EVERY) != 0
        on_nan = not is_new and step % NAN_EVERY == NAN_EVERY - 1
        bounded, ahead = draw.random() < 0.4, looks_ahead and draw.random() < 0.7
        keeps_rows = draw.random() < 0.5
        yield scenario, Way(training, bounded, ahead, keeps_rows), on_nan


def check_first(scenario: Scenario, got: list[Values], rank: int | None = None) -> None:
    """Compares the first results of all ranks, or those of one, with the oracle's."""

    def all_of(name: str) -> torch.Tensor:
        return torch.cat([values[name] for values in got])

    def stacked(kind: str) -> torch.Tensor:
        grads = torch.stack(
            [value for values in got for name, value in values.items() if name.startswith(kind)]
        )
        return grads.mT if scenario.transposed else grads

    found = Results(
        all_of("out"),
        all_of("grad_x"),
        all_of("grad_probs"),
        stacked("grad_fc1"),
        stacked("grad_fc2"),
    )
    if scenario.config.in_fp8:
        check_first_in_fp8(scenario, found, rank)
        return
    want = expected(scenario.config, scenario.inputs)
    if rank is not None:
        want = want.share(scenario.config, [len(x) for x in scenario.inputs.x], rank)
    assert_as_good(found, want)


def check_first_in_fp8(scenario: Scenario, found: Results, rank: int | None) -> None:
    """Compares with products of operands that the package rounds, which is fast on a GPU.

    Few tokens, and experts with few rows, are left to the comparison of bits.
    """
    config, routed = scenario.config, torch.cat(scenario.inputs.routing_map)
    tokens = len(routed) if rank is None else len(scenario.inputs.x[rank])
    if tokens * config.intermediate < FEWEST_ACTIVATIONS:
        return
    rows = routed.sum(0)
    by_torch = partial(rounded, dtype=torch.float64)
    wants = oracle(config, scenario.inputs, rounded=by_torch, hands_over=config.has_fp8_dgrad)
    if rank is not None:
        wants = [wants[rank]]
        rows = rows.view(config.num_ranks, -1)[rank]
    joined = {name: torch.cat([want[name] for want in wants]) for name in wants[0]}
    got = {name.replace("_", " "): value for name, value in vars(found).items()}
    settled = (rows == 0) | (rows * config.intermediate >= FEWEST_ACTIVATIONS)
    for values in (joined, got):
        values |= {name: values[name][settled] for name in values if name.startswith("grad fc")}
    compare(got, joined, torch.bfloat16, times=FURTHER)


class Progress:
    """A line every few seconds, or a bar on a terminal."""

    def __init__(self, report: Report, seconds: float, *, is_shown: bool) -> None:
        from tqdm import tqdm

        self._report = report
        self._start = time.monotonic()
        self._limit = seconds
        self._bar = tqdm(
            total=round(seconds),
            unit="s",
            desc=f"{report.num_ranks} {report.mode} ranks",
            mininterval=1 if sys.stderr.isatty() else 20,
            disable=not is_shown,
        )

    def show(self) -> None:
        passed = time.monotonic() - self._start
        self._bar.set_postfix_str(
            f"{self._report.launches} launches, {self._report.scenarios} scenarios, "
            f"{self._report.differences} differences",
            refresh=False,
        )
        self._bar.update(min(round(passed), round(self._limit)) - self._bar.n)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._start >= self._limit

    def close(self) -> None:
        self._report.seconds = round(time.monotonic() - self._start, 1)
        self.show()
        self._bar.close()


def is_prepared(backend: KernelBackend) -> bool:
    """Whether the memory is large enough, and laid out for the layers that share it by now."""
    backend._describe()
    return not backend.memory.needs(backend._sizes)


class VirtualRun:
    """All ranks in this process."""

    rank = 0

    def __init__(
        self,
        num_ranks: int,
        seed: int,
        spare_slots: int = 0,
        placement: When = "launch",
        experts: Experts = "bf16",
    ) -> None:
        self.num_ranks, self.experts = num_ranks, experts
        self._draw = random.Random(seed)
        self._pauses = Pauses(seed + 1)
        self._group = VirtualGroup(
            num_ranks, timeout_s=TIMEOUT_S, spare_slots=spare_slots, placement=placement
        )
        self._layers: dict[int, tuple[VirtualLayer, list[ExpertWeights]]] = {}

    def prepare(self, scenario: Scenario) -> None:
        """Allocates and loads whatever could wait for a launch that waits for another rank's."""
        torch.cuda.synchronize()
        layer = VirtualLayer(scenario.config, self._group, is_guarded=False)
        layer.prepare()
        self._layers[scenario.seed] = layer, scenario.weights
        for known, of_ranks in self._layers.values():  # spare slots may lie elsewhere now
            for backend, weights in zip(known.backends, of_ranks, strict=True):
                backend._use_weights(weights)
        with poisoned_empties():
            for foreseen in scenario.foreseen:
                count_routes(foreseen)

    def run(self, scenario: Scenario, way: Way) -> list[Values]:
        """One step of all ranks; returns without waiting for its last launches.

        A step that lasts says where the host stands: it may wait for a rank that launches next.
        """
        faulthandler.dump_traceback_later(LATE_S, file=sys.__stderr__)
        try:
            return self._run(scenario, way)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _run(self, scenario: Scenario, way: Way) -> list[Values]:
        layer, _ = self._layers[scenario.seed]
        # Before any rank launches, since memory is made anew once nothing runs, and a launch waits
        # for the other ranks'.
        if not all(map(is_prepared, layer.backends)):
            layer.prepare()
        runs = [phases(backend, scenario, rank, way) for rank, backend in enumerate(layer.backends)]
        found: dict[int, Values] = {}
        while len(found) < self.num_ranks:
            for rank in self._draw.sample(range(self.num_ranks), self.num_ranks):
                with torch.cuda.stream(streams()[rank]), poisoned_empties():
                    self._pauses.take()
                    try:
                        next(runs[rank])
                    except StopIteration as done:
                        found[rank] = done.value
        return [found[rank] for rank in range(self.num_ranks)]

    def faults(self) -> list[tuple[int, FlashMoEError]]:
        """What else ranks have found wrong that nobody has been told of."""
        found = [(rank, memory.take_fault()) for rank, memory in enumerate(self._group.memories)]
        return [(rank, fault) for rank, fault in found if fault is not None]

    def enter(self, ledger: Ledger, scenario: Scenario, way: Way, got: list[Values]) -> None:
        """Compares each rank's results on its stream."""
        for rank, values in enumerate(got):
            with torch.cuda.stream(streams()[rank]):
                ledger.enter(scenario, way, rank, values)

    def check_first(self, scenario: Scenario, got: list[Values]) -> None:
        """Compares with the oracle."""
        check_first(scenario, got)


def load_kernels(seed: int, experts: Experts) -> None:
    """Runs everything once on one rank, which waits for nobody; see ``virtual.load_kernels``."""
    run = VirtualRun(1, seed)
    report = Report("warm-up", 1, "", seed)
    ledger = Ledger(report)
    seen = set()
    for number in range(64):
        scenario = make_scenario(number, 1, experts)
        kind = (scenario.dtype, scenario.transposed)
        if kind in seen:
            continue
        seen.add(kind)
        run.prepare(scenario)
        for bounded in (False, True):
            for training in (True, False):
                way = Way(training, bounded)
                got = run.run(scenario, way)
                run.enter(ledger, scenario, way, got)
        ledger.settle()


class Run(Protocol):
    """Ranks that stress runs: all of them, or this process's."""

    rank: int
    """The rank that this process is; 0 if it is all of them."""
    num_ranks: int
    experts: Experts

    def prepare(self, scenario: Scenario) -> None:
        """Makes a scenario's layer, and whatever a launch of it could have to wait for."""

    def run(self, scenario: Scenario, way: Way) -> list[Values]:
        """Makes one step of a scenario; returns the results of each of these ranks."""

    def enter(self, ledger: Ledger, scenario: Scenario, way: Way, got: list[Values]) -> None:
        """Compares results with those that are known."""

    def check_first(self, scenario: Scenario, got: list[Values]) -> None:
        """Compares a scenario's first results with the oracle."""


def stress(
    run: Run,
    report: Report,
    seconds: float,
    agree_to_stop: Callable[[bool], bool],
    *,
    looks_ahead: bool = False,
    scenarios: int = SCENARIOS,
    launches: int = 0,
) -> None:
    """Runs until the time is over or something is wrong, and fills the report.

    The number of distinct scenarios is a bound, and with a number of launches they end it, too.
    """
    ledger = Ledger(report)
    way: Way | None = None  # how the step under way and its scenario run
    scenario: Scenario | None = None
    known: dict[int, Scenario] = {}
    on_nan: dict[int, Scenario] = {}
    progress = Progress(report, seconds, is_shown=run.rank == 0)
    try:
        for number, way, is_nan in schedule(
            report.seed, looks_ahead=looks_ahead, scenarios=scenarios
        ):
            is_new = number not in known
            if is_new:
                known[number] = make_scenario(number, run.num_ranks, run.experts)
                on_nan[number] = known[number].on_nan()
                run.prepare(known[number])
                report.scenarios = len(known)
            scenario = known[number]
            got = run.run(on_nan[number] if is_nan else scenario, way)
            report.steps += 1
            report.launches += 1 + way.training + way.ahead
            if not is_nan:
                run.enter(ledger, scenario, way, got)
            if is_new:
                torch.cuda.synchronize()
                run.check_first(scenario, got)
            if report.steps % CHECK_EVERY == 0:
                ledger.settle()
                progress.show()
                has_all = 0 < launches <= report.launches
                if agree_to_stop(progress.is_over or has_all):
                    break
        ledger.settle()
    except Exception as error:  # noqa: BLE001 - it is the record of the run
        where = f"step {report.steps}, {way}, {scenario}"
        report.failure = f"{error}: {where}:\n{traceback.format_exc()[-3000:]}"
        # At once, since other ranks may take long to find out.
        print(f"rank {run.rank}: {report.failure}", file=sys.stderr, flush=True)
    finally:
        progress.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=0, help="spare slots for replicas")
    parser.add_argument("--ahead", action="store_true", help="settle on replicas ahead of forwards")
    parser.add_argument("--experts", choices=get_args(Experts), default="bf16")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--launches", type=positive, default=0, help="end after so many, if before")
    parser.add_argument("--scenarios", type=positive, default=SCENARIOS, help="at most so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file that takes the report as JSON")


def placement_of(options: argparse.Namespace) -> When:
    """When replicas are planned."""
    return "lookahead" if options.ahead else "launch"


def bounds_of(options: argparse.Namespace) -> dict[str, int]:
    """Returns what else bounds a run, as :func:`stress` takes it."""
    return {"scenarios": options.scenarios, "launches": options.launches}


def finish(report: Report, out: Path | None) -> int:
    """Prints and writes the report; the program's exit status."""
    print(json.dumps(asdict(report)), flush=True)
    if out is not None:
        out.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return int(bool(report.failure))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, choices=range(1, 9))
    add_arguments(parser)
    options = parser.parse_args(arguments)
    load_kernels(options.seed, options.experts)
    report = Report("virtual", options.ranks, bindings.library_path().name, options.seed)
    given = options.slots, placement_of(options), options.experts
    run = VirtualRun(options.ranks, options.seed, *given)
    bounds = bounds_of(options)
    stress(run, report, options.seconds, bool, looks_ahead=options.ahead, **bounds)
    if report.failure:
        report.failure += "".join(f"\nrank {rank}: {fault}" for rank, fault in run.faults())
    return finish(report, options.out)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a launch that hangs must not keep the process
