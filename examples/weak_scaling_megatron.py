"""Times training iterations of pretrain_moe.py's model on the ranks of one torchrun.

Started by weak_scaling.py, once for each number of ranks.
"""

import argparse
from typing import NoReturn

from leave import leave
from weak_scaling_report import take_report_argument, timed, write_report

REPORT = take_report_argument()

from pretrain_moe import (  # prepares Megatron, which nobody may import before
    GPTDataset,
    batches,
    build_datasets,
    build_training,
    initialize,
    parse_args,
    prepare_text,
    run_batches,
)


def run(
    dispatcher: str, dataset: GPTDataset, args: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Trains a new model; returns times and losses of its iterations."""
    training = build_training(args, dispatcher)
    training.model.train()
    iterator = batches(dataset, args)

    def iteration() -> float:
        training.model.zero_grad_buffer()
        training.optimizer.zero_grad()
        loss = run_batches(training.model, iterator, args, forward_only=False)
        is_updated, _, _ = training.optimizer.step()
        if not is_updated:
            raise RuntimeError("the optimizer found a gradient that is not finite")
        training.scheduler.step(1)
        return loss

    return timed(iteration, args.train_iters)


def main() -> NoReturn:
    from megatron.core import __version__ as version

    args = parse_args()
    initialize(args)
    dataset, _ = build_datasets(args, prepare_text(args))
    runs = {name: run(name, dataset, args) for name in ("flashmoe", "alltoall")}
    write_report(REPORT, f"Megatron-Core {version}", args, runs)
    leave(0)


if __name__ == "__main__":
    main()
