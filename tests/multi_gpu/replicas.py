"""Replicas of hot experts on several GPUs: what a training takes and says, and what stands it.

    python -m tests.multi_gpu.replicas --gpus 2 --megatron FOLDER [--parts step training ...]

| part | what |
| --- | --- |
| step | an iteration of Megatron's stock script with four of Qwen3-30B's layers: routing as |
| | the router learns it, balanced and skewed, with slots and without, and alltoall |
| training | a thousand iterations of a small model with the distributed optimizer and both of |
| | its overlaps, with one hardware queue and with several (CUDA_DEVICE_MAX_CONNECTIONS) |
| lookahead | trainings that settle on replicas ahead of attention, with one hardware queue and |
| | with several, whose losses are those of trainings that plan in the launch |
| early | reductions of fc2's gradients that begin before the backward's stream may go on |
| stress | :mod:`tests.multi_gpu.stress` with slots, in the library that FLASHMOE_LIBRARY names |

Four layers fit two GPUs of 80 GB: a rank's 64 experts of a layer are 302 million parameters of 18
bytes each, 22 GB in all four, and such a training took 39 GB at most.

Megatron's ``--moe-router-force-biased``, which 0.16.1 does not have, makes the skew: logits are
drawn at random, as where loads are balanced by force, and each expert has a bias. With the seed of
"skewed", the biases that a GPU draws give one of two ranks 1.26 to 1.32 times the mean in each of
the four layers. Slots take no more than two experts from there, after which the planner leaves 1.00
to 1.06 times the mean. In "moving", each forward has other biases, so that owners change with it.

``--gpus 0`` is a dry run of the first three parts with a smaller model on two processors.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.megatron.stock_script import BRIDGE, MODEL
from tests.megatron.trainings import COMMON, QWEN3, WARM
from tests.multi_gpu import stock_training
from tests.multi_gpu.jobs import run_job, tell
from tests.multi_gpu.runs import Named
from tests.multi_gpu.stock_training import LAUNCHER, SMALL, Outcome, agree

ROUTINGS = {
    "learned": "",
    "balanced": "--moe-router-force-load-balancing",
    "skewed": "--moe-router-force-biased -1 --seed 1943",
    "moving": "--moe-router-force-biased 1",
}
ASKED = 1.03
"""An iteration with slots, routed as learned, over one that is balanced."""
LEAST_MOVED = {"skewed": 1.0, "moving": 0.5}
"""Share of iterations with replicas, by routing; what "moving" draws is even at times."""
COMPARED = 10
"""First iterations, whose losses have to agree with and without slots."""
METRICS = "layer_ms,rank_imbalance,rank_imbalance_before,replicas,replica_mib,expert_rows"


@dataclass(frozen=True)
class Run(Named):
    """One training.

    Attributes:
        routing: Key of ``ROUTINGS``.
        dispatcher: flashmoe or alltoall.
        slots: Spare slots of each rank.
        queues: CUDA_DEVICE_MAX_CONNECTIONS.
        placement: When replicas are planned.
        row_bound: Rows that a rank may receive over the mean; 0 if the host waits for counts.
        ends: The iteration behind which it ends, the last one by default.
    """

    routing: str
    dispatcher: str = "flashmoe"
    slots: int = 0
    queues: int = 1
    placement: str = "launch"
    row_bound: float = 0.0
    ends: int | None = None

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ValueError(f"{self.routing}: wanted one of {[*ROUTINGS]}")

    @property
    def is_ours(self) -> bool:
        return self.dispatcher == "flashmoe"

    def arguments(self, num_ranks: int, num_iterations: int) -> list[str]:
        """The flags that differ between trainings."""
        flags = [*ROUTINGS[self.routing].split(), "--expert-model-parallel-size", str(num_ranks)]
        flags += ["--train-iters", str(num_iterations)]
        flags += ["--exit-interval", str(self.ends)] if self.ends else []
        flags += ["--moe-token-dispatcher-type", self.dispatcher]
        if not self.is_ours:
            return flags
        flags += ["--flashmoe-metrics", METRICS, "--flashmoe-timeout", "30"]
        flags += ["--flashmoe-row-bound", str(self.row_bound)] if self.row_bound else []
        if self.slots:
            flags += ["--flashmoe-spare-slots", str(self.slots)]
            flags += ["--flashmoe-placement", self.placement]
        return flags


STEPS = [
    Run("learned", slots=2),
    Run("balanced"),
    Run("learned"),
    Run("skewed", slots=2),
    Run("skewed"),
    Run("learned", dispatcher="alltoall"),
    Run("balanced", slots=2),
    Run("skewed", slots=4),
]
TRAININGS = [
    Run("learned", slots=2),
    Run("moving", slots=2, queues=8),
    Run("learned", queues=8),
    Run("moving", queues=8),
]
LOOKAHEADS = [
    Run("learned", slots=2, placement="lookahead"),
    Run("learned", slots=2, placement="lookahead", queues=8),
    Run("learned", slots=2),
]


@dataclass(frozen=True)
class Loads:
    """What the reports of a training say, means of those behind the first iterations.

    Attributes:
        home: Busiest rank over mean as the router has it, the mean of layers.
        before: The same in the worst layer, where there are slots.
        after: Busiest rank over mean in the worst layer, as computed.
        replicas: In a forward, per rank.
        moved: The share of reports that have some replicas.
        forward_ms: One launch.
        backward_ms: One launch.
    """

    home: float
    before: float | None
    after: float
    replicas: float
    moved: float
    forward_ms: float
    backward_ms: float

    @classmethod
    def of(cls, reports: Sequence[dict[str, float]], num_ranks: int) -> "Loads":
        """From at least one report."""

        def mean(key: str) -> float:
            return statistics.mean(report[f"flashmoe/{key}"] for report in reports)

        has_slots = "flashmoe/rank_imbalance_before" in reports[0]
        moved = [report.get("flashmoe/replicas", 0.0) for report in reports]
        return cls(
            home=statistics.mean(home_imbalance(report, num_ranks) for report in reports),
            before=mean("rank_imbalance_before") if has_slots else None,
            after=mean("rank_imbalance"),
            replicas=statistics.mean(moved),
            moved=statistics.mean(map(bool, moved)),
            forward_ms=mean("forward/layer_ms"),
            backward_ms=mean("backward/layer_ms"),
        )

    def __str__(self) -> str:
        worst = "" if self.before is None else f" ({self.before:.3f} in the worst layer)"
        return (
            f"busiest rank over mean {self.home:.3f} at home{worst}, computed {self.after:.3f} in "
            f"the worst layer; {self.replicas:.2f} replicas a rank, some in {self.moved:.0%} of "
            f"iterations; a launch takes {self.forward_ms:.3f} and {self.backward_ms:.3f} ms"
        )


def home_imbalance(report: dict[str, float], num_ranks: int) -> float:
    """Busiest rank over mean, if each expert is computed where it lives; the mean of layers."""
    layers: dict[str, list[tuple[int, float]]] = {}
    for key, rows in report.items():
        if "/expert_rows/" in key and key.startswith("flashmoe/layer_"):
            layer, expert = key.split("/expert_rows/")
            layers.setdefault(layer, []).append((int(expert), rows))
    found = []
    for experts in layers.values():
        rows = [count for _, count in sorted(experts)]
        local = len(rows) // num_ranks
        of_ranks = [sum(rows[first : first + local]) for first in range(0, len(rows), local)]
        found.append(max(of_ranks) * num_ranks / sum(of_ranks))
    return statistics.mean(found)


def small_on_processors() -> list[str]:
    """A model's flags, with replicas although each expert's rows are one block."""
    return [*MODEL, "--moe-aux-loss-coeff", "0"]


def train(
    args: argparse.Namespace, run: Run, model: list[str], iterations: int, limit_s: float
) -> tuple[Outcome, Loads | None]:
    """One training, and what it reports; says and writes down both."""
    num_ranks, launcher = args.gpus or 2, LAUNCHER
    arguments = [*model, *run.arguments(num_ranks, iterations)]
    if not args.gpus:
        launcher = (str(BRIDGE), *LAUNCHER)
        arguments += ["--flashmoe-replica-policy", "popular"] if run.slots else []
    found = stock_training.train(
        args.megatron,
        arguments,
        ranks_per_host=num_ranks,
        limit_s=limit_s,
        environments=[{"CUDA_DEVICE_MAX_CONNECTIONS": str(run.queues)}],
        launcher=launcher,
        with_reports=True,
    )
    late = [report for report in found.reports if report["step"] > WARM]
    loads = Loads.of(late or found.reports, num_ranks) if found.reports else None
    losses, ms = found.losses, found.median_ms(WARM)
    said = f"{run}: {len(losses)} iterations, exit codes {found.codes}, {found.seconds} s"
    if losses:
        said += f", {ms:.1f} ms an iteration, loss {losses[0]:.4f} to {losses[-1]:.4f}"
    print(said, *([str(loads)] if loads else []), sep="; ", flush=True)
    tell(
        args.out,
        run=str(run),
        ms=ms,
        losses=losses[:COMPARED] + losses[-1:],
        seconds=found.seconds,
        loads=loads and asdict(loads),
    )
    return found, loads


def what_is_wrong(
    run: Run,
    outcome: Outcome,
    loads: Loads | None,
    count: int,
    kind: str,
    least_moved: float = 0.0,
) -> list[str]:
    """Sentences on a training that did not do what was asked, in our code."""
    wrong = outcome.what_is_wrong(count, kind if run.is_ours else None)
    if not run.is_ours:
        return wrong
    log = outcome.logs[0]
    if loads is None or not loads.forward_ms > 0:
        wrong.append("no launch is reported")
    if run.slots and f"replicas of at most {run.slots} experts" not in log:
        wrong.append("no layer says that it has slots")
    if run.placement == "lookahead" and "planned ahead of attention" not in log:
        wrong.append("no layer says that it looks ahead")
    least = LEAST_MOVED.get(run.routing, least_moved)
    if run.slots and loads is not None and loads.moved < least:
        wrong.append(f"wanted replicas in {least:.0%} of iterations")
    return wrong


def check_step(args: argparse.Namespace) -> bool:
    """Times of an iteration by routing and slots."""
    model = small_on_processors()
    if args.gpus:
        batch = ["--global-batch-size", str(8 * args.gpus)]  # four micro-batches
        model = [*COMMON.split(), *QWEN3.split(), "--num-experts", "128", *batch]
    end = time.monotonic() + args.step_seconds
    outcomes: dict[Run, Outcome] = {}
    right = True
    for run in args.steps:
        if time.monotonic() > end:
            print(f"{run}: not begun, {args.step_seconds:.0f} s are over", flush=True)
            continue
        outcome, loads = train(args, run, model, args.step_iterations, args.limit)
        wrong = what_is_wrong(run, outcome, loads, args.step_iterations, args.kind)
        right &= outcome.say_wrong(str(run), wrong)
        outcomes[run] = outcome
    for routing in ROUTINGS:
        same = [one.losses[:5] for run, one in outcomes.items() if run.routing == routing]
        if len(same) > 1 and not agree(same):
            print(f"wrong, {routing}: first losses differ: {same}", flush=True)
            right = False
    say_ratios({run: one.median_ms(WARM) for run, one in outcomes.items()}, args)
    return right


def say_ratios(ms: dict[Run, float], args: argparse.Namespace) -> None:
    """Says what each training takes over balanced ones, and alltoall over ours."""
    for base in ms:
        for run, each in ms.items():
            ratio = each / ms[base]
            if base.routing == "balanced" != run.routing and run.is_ours:
                verdict = ""
                if run.routing == "learned" and run.slots and not base.slots:
                    verdict = f", asked {ASKED}: {'kept' if ratio <= ASKED else 'missed'}"
                print(f"{run} over {base}: {ratio:.3f}{verdict}", flush=True)
                tell(args.out, run=str(run), over=str(base), ratio=ratio)
            if base.is_ours and not run.is_ours and run.routing == base.routing:
                print(f"{run} over {base}: {ratio:.3f}", flush=True)


def check_training(args: argparse.Namespace) -> bool:
    """Long trainings with slots, whose first losses are those of short ones without."""
    runs = []
    for run in args.trainings:
        ends = None if run.slots else min(COMPARED, args.train_iterations)
        runs.append(replace(run, ends=ends))
    return trainings_agree(args, runs, args.train_iterations)


def check_lookahead(args: argparse.Namespace) -> bool:
    """Trainings that settle on replicas ahead of attention."""
    # What is predicted is less uneven than what is routed.
    return trainings_agree(args, args.lookaheads, args.lookahead_iterations, micro_batch=32)


def trainings_agree(
    args: argparse.Namespace, runs: Sequence[Run], iterations: int, micro_batch: int = 16
) -> bool:
    """Whether trainings are right, and the first losses of those that are routed alike agree."""
    model = small_on_processors()
    if args.gpus:
        # So many rows that replicas are worth their pushes: a rank that is routed to by 1.05 times
        # the mean has 3,300 too many, and at 381 GB/s a replica is worth it from 2,450 on.
        model = [*SMALL.split(), *["--micro-batch-size", str(micro_batch)]]
        model += ["--global-batch-size", str(micro_batch * args.gpus), "--moe-router-topk", "4"]
        # Nothing makes the learned routing even, so that there is something to move.
        model += ["--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0"]
    by_routing: dict[str, list[list[float]]] = {}
    for run in runs:
        outcome, loads = train(args, run, model, iterations, args.training_limit)
        count = run.ends or iterations
        wrong = what_is_wrong(run, outcome, loads, count, args.kind, least_moved=0.1)
        if not outcome.say_wrong(str(run), wrong):
            return False  # the others may take as long to fail
        by_routing.setdefault(run.routing, []).append(outcome.losses[:COMPARED])
    right = True
    for routing, losses in by_routing.items():
        is_same = agree(losses)
        said = "agree" if is_same else f"differ: {losses}"
        print(f"{routing}: first losses of {len(losses)} trainings {said}", flush=True)
        right &= is_same
    return right


def check_early(args: argparse.Namespace) -> bool:
    """The cases of the job on real ranks, without slots and with."""
    cases = ("early_reductions", "early_reductions_with_slots")
    records, log = run_job(
        "tests.multi_gpu.worker", args.gpus, "--cases", *cases, timeout_s=args.limit, grace_s=15
    )
    right = all(records.get(case, {}).get("passed") for case in cases)
    for record in records.values():
        print(f"{record['case']}: {'passed' if record['passed'] else 'failed'}", flush=True)
        tell(args.out, **record)
    if not right:
        print(log, flush=True)
    return right


def check_stress(args: argparse.Namespace) -> bool:
    """Random launches of all ranks, with replicas, most of them settled on ahead."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.gpus), "-m", "tests.multi_gpu.stress"]
    command += ["--slots", "2", "--ahead", "--seconds", str(args.seconds)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "stress.json")
        process = subprocess.Popen([*command, "--out", str(out)])
        try:
            process.wait(args.seconds + args.limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks
        code = process.wait()
        report: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    tell(args.out, stress=report)
    shown = ("library", "steps", "launches", "replicas", "compared", "differences", "failure")
    print(f"stress: exit code {code}, { {key: report.get(key) for key in shown} }", flush=True)
    has_run = bool(report) and report["compared"] > 0 and report["replicas"] > 0
    return has_run and not code and not report["differences"] and not report["failure"]


PARTS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "step": check_step,
    "training": check_training,
    "lookahead": check_lookahead,
    "early": check_early,
    "stress": check_stress,
}
ON_PROCESSORS = ("step", "training", "lookahead")


def main(arguments: list[str]) -> int:
    """The command line; the exit status is 1 if a part has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, default=2, help="one for each rank; 0 for two processors")
    add("--megatron", type=Path, default=Path(".megatron"), help="has pretrain_gpt.py")
    add("--parts", nargs="+", choices=PARTS, help="default: all that there can be")
    runs = "routing, then what differs, as learned,slots=2,placement=lookahead"
    add("--steps", nargs="+", type=Run.of, default=STEPS, help=runs)
    add("--step-iterations", type=int, default=20)
    add("--step-seconds", type=float, default=300.0, help="in which trainings begin")
    add("--trainings", nargs="+", type=Run.of, default=TRAININGS, help="the same")
    add("--lookaheads", nargs="+", type=Run.of, default=LOOKAHEADS, help="the same")
    add("--lookahead-iterations", type=int, default=40)
    add("--train-iterations", type=int, default=1000)
    add("--training-limit", type=float, default=150.0, help="seconds for each of them")
    add("--seconds", type=float, default=40.0, help="of stress")
    add("--limit", type=float, default=90.0, help="seconds until what hangs is ended")
    add("--out", type=Path, help="takes a line of JSON for each result")
    args = parser.parse_args(arguments)
    args.kind = "kernel" if args.gpus else "reference"
    right = True
    for name in args.parts or (PARTS if args.gpus else ON_PROCESSORS):
        begin = time.monotonic()
        passed = PARTS[name](args)
        right &= passed
        said = "all right" if passed else "failed"
        print(f"{name}: {said}, {time.monotonic() - begin:.0f} s", flush=True)
    print("all right" if right else "failed")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
