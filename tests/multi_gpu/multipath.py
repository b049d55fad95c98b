"""Megatron's step with all links at once and without, on several GPUs.

    python -m tests.multi_gpu.multipath --gpus 4 --megatron FOLDER --out steps.jsonl

Trains by Megatron's stock script with the distributed optimizer and both of its overlaps: once with
blocks of iterations that go by torch.distributed and over links in turns, and once without
``--flashmoe-multipath``, whose first losses have to be the same. Experts are expert-parallel over
half of the GPUs, so that gathers of their parameters and reductions of their gradients are large.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.megatron.trainings import COMMON, QWEN3, WARM
from tests.multi_gpu import stock_training
from tests.multi_gpu.alternating import BLOCK, VARIABLE, turn_of
from tests.multi_gpu.jobs import tell
from tests.multi_gpu.stock_training import Outcome, agree

LAUNCHER = ("-m", "tests.multi_gpu.alternating")
BUCKET_ELEMENTS = 2**27
"""A bucket's, so that one is larger than what several links pay for."""


def arguments_of(multipath: str, num_gpus: int, iterations: int) -> list[str]:
    """The script's arguments."""
    given = [*COMMON.split(), *QWEN3.split(), "--moe-token-dispatcher-type", "flashmoe"]
    given += ["--expert-model-parallel-size", str(max(1, num_gpus // 2))]
    given += ["--global-batch-size", str(4 * num_gpus), "--train-iters", str(iterations)]
    given += ["--ddp-bucket-size", str(BUCKET_ELEMENTS), "--flashmoe-multipath", multipath]
    given += ["--flashmoe-timeout", "40"]  # an error is told before the training is ended
    return [*given, "--flashmoe-metrics", "layer_ms,link_mib,link_gbps,link_share"]


def links_of(outcome: Outcome) -> dict[str, float]:
    """MiB that each link has carried in an iteration, the median of those that tell of some.

    The first report also has what was carried to compare links with torch.distributed.
    """
    found: dict[str, list[float]] = {}
    for report in outcome.reports:
        for key, mib in report.items():
            if _is_of_a_link(key):
                found.setdefault(key.split("/")[2], []).append(mib)
    return {link: statistics.median(each) for link, each in found.items()}


def ms_of(outcome: Outcome, turns: list[str]) -> dict[str, float]:
    """The median iteration of each kind of block, without the first iteration of each."""
    times: dict[str, list[float]] = {turn: [] for turn in turns}
    for number, one in outcome.iterations.items():
        if number > WARM * len(turns) and (number - 1) % BLOCK:
            times[turn_of(turns, number)].append(one.ms)
    return {turn: round(statistics.median(each), 1) for turn, each in times.items() if each}


def what_is_wrong(mixed: Outcome, plain: Outcome, turns: list[str], iterations: int) -> list[str]:
    """Sentences on two trainings that did not do what was asked, in our code."""
    wrong = [f"in turns: {one}" for one in mixed.what_is_wrong(iterations, "kernel")]
    wrong += [f"off: {one}" for one in plain.what_is_wrong(BLOCK, "kernel")]
    for report in mixed.reports:
        has_moved = any(map(_is_of_a_link, report))
        # A report can have what the iterations beside it have begun.
        near = {turn_of(turns, max(1, int(report["step"]) + one)) for one in (-1, 0, 1)}
        if has_moved not in {turn != "off" for turn in near}:
            wrong.append(f"{report['step']}: links carried {'some' if has_moved else 'no'}thing")
    if not mixed.reports:
        wrong.append("nothing is reported of links")
    if not agree([mixed.losses[:BLOCK], plain.losses]):
        wrong.append(f"first losses are {mixed.losses[:BLOCK]} and {plain.losses}")
    return wrong


def _is_of_a_link(key: str) -> bool:
    return key.startswith("flashmoe/link/") and key.endswith("/mib")


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit status is 1 if a training was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, default=2)
    add("--megatron", type=Path, default=Path(".megatron"), help="has pretrain_gpt.py")
    add("--turns", nargs="+", default=["auto", "off"], help='"auto", "off", or a link\'s name')
    add("--iterations", type=int, default=80)
    add("--queues", default="1", help="CUDA_DEVICE_MAX_CONNECTIONS: with several, a launch and "
        "reductions of two groups may wait for each other")  # fmt: skip
    add("--limit", type=float, default=150.0, help="seconds for each training")
    add("--out", type=Path, help="takes a line of JSON")
    add("--log", type=Path, help="takes all that a training in turns has printed that was wrong")
    args = parser.parse_args(arguments)

    def run(multipath: str, iterations: int, **rest: Any) -> Outcome:
        given = arguments_of(multipath, args.gpus, iterations)
        return stock_training.train(
            args.megatron, given, ranks_per_host=args.gpus, limit_s=args.limit, **rest
        )

    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": args.queues}
    environments = [{**queues, VARIABLE: ",".join(args.turns)}]
    mixed = run(
        "auto", args.iterations, environments=environments, launcher=LAUNCHER, with_reports=True
    )
    plain = run("off", BLOCK, environments=[queues])
    ms, links = ms_of(mixed, args.turns), links_of(mixed)
    for turn, each in ms.items():
        print(f"{turn}: {each:.1f} ms an iteration, {each / ms.get('off', each):.3f} of off")
    print(f"links carried {links} MiB")
    wrong = what_is_wrong(mixed, plain, args.turns, args.iterations)
    losses = [mixed.losses[:BLOCK], plain.losses]
    told = {"turns": args.turns, "queues": args.queues}
    tell(args.out, **told, ms=ms, links=links, losses=losses, all_ms=_all_ms(mixed))
    if wrong:
        if args.log:
            args.log.write_text("\n".join(mixed.logs))
        print(*(f"wrong, {sentence}" for sentence in wrong), mixed.ends(), plain.ends(), sep="\n")
    print("failed" if wrong else "all right")
    return int(bool(wrong))


def _all_ms(outcome: Outcome) -> list[float]:
    return [one.ms for _, one in sorted(outcome.iterations.items())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
