"""Megatron's step with all links at once and without, on several GPUs.

    python -m tests.multi_gpu.multipath --gpus 4 --megatron FOLDER --out steps.jsonl

Trains by Megatron's stock script with the distributed optimizer and both of its overlaps, in turns
with ``--flashmoe-multipath`` off and auto. Experts are expert-parallel over half of the GPUs, so
that gathers of their parameters and reductions of their gradients are large.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.megatron.trainings import COMMON, QWEN3, WARM
from tests.multi_gpu import stock_training
from tests.multi_gpu.jobs import tell
from tests.multi_gpu.stock_training import Outcome, agree

BUCKET_ELEMENTS = 2**27
"""A bucket's, so that one is larger than what several links pay for."""


def arguments_of(multipath: str, num_gpus: int, iterations: int) -> list[str]:
    """The script's arguments."""
    given = [*COMMON.split(), *QWEN3.split(), "--moe-token-dispatcher-type", "flashmoe"]
    given += ["--expert-model-parallel-size", str(max(1, num_gpus // 2))]
    given += ["--global-batch-size", str(4 * num_gpus), "--train-iters", str(iterations)]
    given += ["--ddp-bucket-size", str(BUCKET_ELEMENTS), "--flashmoe-multipath", multipath]
    return [*given, "--flashmoe-metrics", "kernel_ms,link_mib,link_gbps,link_share"]


def links_of(outcome: Outcome) -> dict[str, float]:
    """MiB that each link has carried in an iteration, the median of those that tell of some.

    The first report also has what was carried to compare links with torch.distributed.
    """
    found: dict[str, list[float]] = {}
    for report in outcome.reports:
        for key, mib in report.items():
            if key.startswith("flashmoe/link/") and key.endswith("/mib"):
                found.setdefault(key.split("/")[2], []).append(mib)
    return {link: statistics.median(each) for link, each in found.items()}


def what_is_wrong(multipath: str, outcome: Outcome, iterations: int) -> list[str]:
    """Sentences on a training that did not do what was asked, in our code."""
    wrong = outcome.what_is_wrong(iterations, "kernel")
    if (multipath == "auto") != bool(sum(links_of(outcome).values())):
        wrong.append(f"links carried {links_of(outcome)} MiB with multipath {multipath}")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit status is 1 if a training was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, default=2)
    add("--megatron", type=Path, default=Path(".megatron"), help="has pretrain_gpt.py")
    add("--turns", nargs="+", default=["off", "auto", "off", "auto"], choices=["off", "auto"])
    add("--iterations", type=int, default=20)
    add("--limit", type=float, default=110.0, help="seconds for each training")
    add("--out", type=Path, help="takes a line of JSON for each")
    args = parser.parse_args(arguments)
    right = True
    ms: dict[str, list[float]] = {"off": [], "auto": []}
    losses: list[list[float]] = []
    for multipath in args.turns:
        outcome = stock_training.train(
            args.megatron,
            arguments_of(multipath, args.gpus, args.iterations),
            ranks_per_host=args.gpus,
            limit_s=args.limit,
            with_reports=True,
        )
        ms[multipath].append(outcome.median_ms(WARM))
        losses.append(outcome.losses[:5])
        links = {link: round(mib, 1) for link, mib in links_of(outcome).items()}
        print(f"{multipath}: {ms[multipath][-1]:.1f} ms an iteration, links {links}", flush=True)
        right &= outcome.say_wrong(multipath, what_is_wrong(multipath, outcome, args.iterations))
        tell(args.out, multipath=multipath, ms=ms[multipath][-1], links=links, losses=losses[-1])
    if not agree(losses):
        print(f"wrong: first losses differ: {losses}")
        right = False
    if all(ms.values()):
        ratio = statistics.median(ms["auto"]) / statistics.median(ms["off"])
        print(f"auto over off: {ratio:.3f}")
    print("all right" if right else "failed")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
