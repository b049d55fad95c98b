"""Takes the layer's figures of a version on the GPUs at hand, the most important first.

    python -m tools.bench.all_figures --out runs/figures --minutes 9

A step is a measuring tool in processes of its own. One is begun only if the time that it takes at
most is left, and never twice in one folder: run again, it goes on with the missing ones. ``--list``
prints the steps and runs none. Each step has a folder with its results and what it printed
(``log.txt``). The folder is called ``STEP.part`` until the step is done; the next attempt begins it
again, except for the sweep, which goes on where it stopped.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashmoe_megatron.bench.shapes import ODD_SHAPES
from tools.arguments import not_negative, parser_of
from tools.gpu_check import run_bounded, torchrun

KERNEL = ["--kernel", "--graph", "--row-bound", "1.2", "--grads", "main_grad"]
ZIPF = "0.47"  # the most popular of 64 experts then has 4 times the mean
TAIL = 100_000  # so many characters of a step's output are kept


@dataclass(frozen=True)
class Step:
    """One run of a measuring tool.

    Attributes:
        folder: Gets its results, and names it.
        module: What is run.
        arguments: The module's arguments, without ``--commit``.
        limit_s: After that it is ended.
        ranks: GPUs that it takes, by torchrun; 0 without torchrun.
    """

    folder: Path
    module: str
    arguments: list[str]
    limit_s: float
    ranks: int = 0

    def command(self, commit: str | None) -> list[str]:
        """Program and arguments."""
        launcher = torchrun(self.ranks) if self.ranks else [sys.executable]
        named = ["--commit", commit] if commit else []
        return [*launcher, "-m", self.module, *self.arguments, *named]

    def variables(self) -> dict[str, str]:
        """Environment variables of its own."""
        # NVLink multicast is for NCCL's reductions alone, and not on every machine.
        chosen = {"NCCL_NVLS_ENABLE": "0"}
        if self.ranks:
            chosen["OMP_NUM_THREADS"] = "4"
        return chosen


def part_of(folder: Path) -> Path:
    """The name of a step's folder until the step is done."""
    return folder.with_name(f"{folder.name}.part")


def steps(num_gpus: int, out: Path) -> Iterator[Step]:
    """All steps for a number of GPUs, the most important first."""
    several = num_gpus if num_gpus > 1 else 0
    of_all = [] if several else ["--one-of", "4"]

    def results(name: str, file: str = "results.jsonl") -> list[str]:
        return ["--out", str(part_of(out / name) / file)]

    def bench(name: str, limit_s: float, *arguments: str, ranks: int = several) -> Step:
        arguments = (*of_all, *KERNEL, *arguments, *results(name))
        return Step(out / name, "tools.bench.bench_layer", list(arguments), limit_s, ranks)

    yield bench("layer", 150)
    if num_gpus > 2:  # overlap efficiency is relative to two
        shapes = ["paper-8k", "paper-16k-e64"]
        yield bench("layer-on-2", 60, "--shapes", *shapes, "--no-baselines", ranks=2)
    capture = ["capture", *results("timeline", "traces"), "--row-bound", "1.2", *of_all]
    yield Step(out / "timeline", "tools.timeline", capture, 60, max(several, 1))
    skewed = ["--zipf", ZIPF, "--row-bound", "2.5"]
    yield bench("zipf", 60, "--shapes", "paper-8k", *skewed, "--no-baselines")
    like_them = ["paper-1k", "qwen3-30b", "deepseek-v3-e64"]
    yield bench("odd-shapes", 90, "--shapes", *like_them, *ODD_SHAPES, "--no-baselines")
    shapes = ["paper-1k", "paper-8k", "paper-16k-e64", "qwen3-30b"]
    both = ["--dtypes", "bf16", "fp16"]
    yield bench("float16", 90, "--shapes", *shapes, *both, "--no-baselines")
    uncounted = ["--uncounted", *results("counters")]
    yield Step(out / "counters", "tools.bench.compare_libraries", uncounted, 60)
    folder = results("weak-scaling", "sweep")
    resume = ["--resume"] if Path(folder[-1]).exists() else []
    yield Step(out / "weak-scaling", "tools.weak_scaling", ["run", *folder, *resume], 400)


def run(todo: list[Step], minutes: float, commit: str | None) -> int:
    """Runs what is not done and fits.

    Returns:
        How many steps failed.
    """
    end = time.monotonic() + 60 * minutes
    failed = 0
    for step in todo:
        name, part = step.folder.name, part_of(step.folder)
        start = time.monotonic()
        if step.folder.exists():
            print(f"{name}: done before", flush=True)
            continue
        if step.limit_s > end - start:
            print(f"{name}: may take {step.limit_s:.0f} s, {end - start:.0f} are left", flush=True)
            continue
        if part.exists() and "--resume" not in step.arguments:
            shutil.rmtree(part)
        part.mkdir(parents=True, exist_ok=True)
        status, output = run_bounded(
            step.command(commit), step.limit_s, tail=TAIL, variables=step.variables()
        )
        (part / "log.txt").write_text(output)
        result = "timed out" if status is None else "done" if status == 0 else "failed"
        print(f"{name}: {result} in {time.monotonic() - start:.0f} s", flush=True)
        if status == 0:
            part.rename(step.folder)
        else:
            failed += 1
            print(output[-2000:], flush=True)
    return failed


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/figures"), help="may hold steps")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all steps together")
    parser.add_argument("--gpus", type=not_negative, help="as if there were so many; default: all")
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
    return int(bool(run(todo, options.minutes, options.commit)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
