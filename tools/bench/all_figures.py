"""Takes the layer's figures of a version on the GPUs at hand, the most important first.

    python -m tools.bench.all_figures --out runs/figures --minutes 9

A step is a measuring tool in processes of its own. One is begun only if the time that it takes at
most is left, and never twice in one folder: run again, it goes on with what is missing. ``--list``
prints the steps and runs none. The folder gets each step's results, what it printed
(``STEP.log``), and a line for each in ``steps.jsonl``. What an attempt has left that was not done
is renamed before the next one (``STEP.jsonl.before0``).
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.bench.shapes import ODD_SHAPES
from tools.gpu_check import ROOT, run_bounded

KERNEL = ["--kernel", "--graph", "--row-bound", "1.2", "--grads", "main_grad"]
ZIPF = "0.47"  # the most popular of 64 experts then has 4 times the mean
TAIL = 100_000  # characters of a step's output that are kept


class FolderError(Exception):
    """The folder's list of steps cannot be read."""


@dataclass(frozen=True)
class Step:
    """One run of a measuring tool.

    Attributes:
        name: Names the step and its files.
        module: What is run.
        arguments: The module's arguments, without ``--commit``.
        limit_s: After that it is ended.
        ranks: GPUs that it takes, by torchrun; 0 without torchrun.
        library: The build that it loads, if not the package's own.
    """

    name: str
    module: str
    arguments: list[str]
    limit_s: float
    ranks: int = 0
    library: str = ""

    def command(self, commit: str | None) -> list[str]:
        """Program and arguments."""
        launcher = [sys.executable]
        if self.ranks:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(self.ranks)]
        named = ["--commit", commit] if commit else []
        return [*launcher, "-m", self.module, *self.arguments, *named]

    def variables(self) -> dict[str, str]:
        """Environment variables of its own."""
        # NVLink multicast is for NCCL's reductions alone, and not on every machine.
        chosen = {"NCCL_NVLS_ENABLE": "0"}
        if self.ranks:
            chosen["OMP_NUM_THREADS"] = "4"
        if self.library:
            chosen["FLASHMOE_LIBRARY"] = str(ROOT / "flashmoe_megatron" / self.library)
        return chosen


@dataclass
class Done:
    """A line of ``steps.jsonl``.

    Attributes:
        name: The step's name.
        status: "done", "failed" or "timed out".
        seconds: How long it took.
        command: As it can be run again.
    """

    name: str
    status: str
    seconds: float
    command: list[str]


def steps(num_gpus: int, out: Path) -> Iterator[Step]:
    """All steps for a number of GPUs, the most important first."""
    layer, several = "tools.bench.bench_layer", num_gpus if num_gpus > 1 else 0
    of_all = [] if several else ["--one-of", "4"]

    def bench(name: str, limit_s: float, *arguments: str, ranks: int = several) -> Step:
        kept = ["--out", str(out / f"{name}.jsonl")]
        return Step(name, layer, [*of_all, *KERNEL, *arguments, *kept], limit_s, ranks)

    yield bench("layer", 150)
    if num_gpus > 2:  # overlap efficiency is relative to two
        shapes = ["paper-8k", "paper-16k-e64"]
        yield bench("layer-on-2", 60, "--shapes", *shapes, "--no-baselines", ranks=2)
    timeline = ["capture", "--out", str(out / "timeline"), "--row-bound", "1.2", *of_all]
    yield Step(
        "timeline",
        "tools.timeline",
        timeline,
        60,
        max(several, 1),
        library="libflashmoe_trace.so",
    )
    skewed = ["--zipf", ZIPF, "--row-bound", "2.5"]
    yield bench("zipf", 60, "--shapes", "paper-8k", *skewed, "--no-baselines")
    like_them = ["paper-1k", "qwen3-30b", "deepseek-v3-e64"]
    yield bench("odd-shapes", 90, "--shapes", *like_them, *ODD_SHAPES, "--no-baselines")
    shapes = ["paper-1k", "paper-8k", "paper-16k-e64", "qwen3-30b"]
    both = ["--dtypes", "bf16", "fp16"]
    yield bench("float16", 90, "--shapes", *shapes, *both, "--no-baselines")
    counters = ["--out", str(out / "counters.jsonl")]
    yield Step("counters", "tools.bench.counters_cost", counters, 60)
    folder = out / "weak-scaling"
    sweep = ["run", "--out", str(folder), *(["--resume"] if folder.exists() else [])]
    yield Step("weak-scaling", "tools.weak_scaling", sweep, 400)


def read_done(path: Path) -> list[Done]:
    """Reads what earlier runs have left in a folder.

    Raises:
        FolderError: The list is not one.
    """
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return [Done(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise FolderError(f"{path}: wanted a JSON object of a step a line, got {error}") from error


def put_aside(step: Step, out: Path) -> None:
    """Renames what an earlier attempt has left: the next one would append to it."""
    if "--resume" in step.arguments:
        return
    for left in (out / step.name, out / f"{step.name}.jsonl"):
        if left.exists():
            number = sum(1 for _ in out.glob(f"{left.name}.before*"))
            left.rename(out / f"{left.name}.before{number}")


def run(todo: list[Step], out: Path, minutes: float, commit: str | None) -> int:
    """Runs what is not done and fits.

    Returns:
        How many steps failed.
    """
    path = out / "steps.jsonl"
    finished = {one.name for one in read_done(path) if one.status == "done"}
    end = time.monotonic() + 60 * minutes
    failed = 0
    for step in todo:
        left = end - time.monotonic()
        if step.name in finished:
            print(f"{step.name}: done before", flush=True)
            continue
        if step.limit_s > left:
            print(f"{step.name}: may take {step.limit_s:.0f} s, {left:.0f} are left", flush=True)
            continue
        put_aside(step, out)
        command, start = step.command(commit), time.monotonic()
        status, output = run_bounded(command, step.limit_s, tail=TAIL, variables=step.variables())
        (out / f"{step.name}.log").write_text(output)
        result = "timed out" if status is None else "done" if status == 0 else "failed"
        done = Done(step.name, result, round(time.monotonic() - start, 1), ["python", *command[1:]])
        with path.open("a") as lines:
            lines.write(json.dumps(asdict(done)) + "\n")
        failed += result != "done"
        print(f"{step.name}: {result} in {done.seconds:.0f} s", flush=True)
        if result != "done":
            print(output[-2000:], flush=True)
    return failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/figures"), help="may hold steps")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all steps together")
    parser.add_argument("--gpus", type=int, help="as if there were so many; default: all")
    parser.add_argument("--list", action="store_true", help="print the steps, run none")
    parser.add_argument("--commit", help="what is measured, where the checkout has no git")
    options = parser.parse_args(arguments)
    import torch

    num_gpus = torch.cuda.device_count() if options.gpus is None else options.gpus
    todo = list(steps(num_gpus, options.out.absolute()))
    if options.list:
        for step in todo:
            print(f"{step.limit_s:4.0f} s  {' '.join(['python', *step.command(None)[1:]])}")
        return 0
    if not num_gpus:
        print("no CUDA GPU is usable here: nothing can be measured", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        return int(bool(run(todo, options.out.absolute(), options.minutes, options.commit)))
    except FolderError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
