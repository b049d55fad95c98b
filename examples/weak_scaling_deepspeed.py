"""Times training iterations of pretrain_moe_deepspeed.py's model on the ranks of one torchrun.

Started by weak_scaling.py, once for each number of ranks.
"""

import argparse
import itertools
import logging
import os
from typing import NoReturn

import torch

from leave import leave
from weak_scaling_report import HAS_GPU, take_report_argument, timed, write_report

REPORT = take_report_argument()

from pretrain_moe_deepspeed import (
    Batch,
    batches,
    build_engine,
    deepspeed,
    mean_over_ranks,
    parse_args,
    read_text,
)


def run(*, fused: bool, text: torch.Tensor, args: argparse.Namespace) -> tuple[list, list]:
    """Trains a new model; returns times and losses of its iterations."""
    engine = build_engine(args, fused=fused)
    engine.train()
    torch.manual_seed(args.seed)  # for the noise of the routers
    iterator = batches(text, args)

    def step(batch: Batch) -> float:
        loss, aux_loss = engine(*batch)
        engine.backward(loss + 1e-2 * aux_loss)
        engine.step()
        return mean_over_ranks(loss)

    def iteration() -> float:
        taken = itertools.islice(iterator, args.num_microbatches)
        return sum(map(step, taken)) / args.num_microbatches

    found = timed(iteration, args.train_iters)
    engine.destroy()
    return found


def main() -> NoReturn:
    args = parse_args()
    deepspeed.utils.logger.setLevel(logging.ERROR)  # the schedule warns before its first step
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # An operator for inference on processors that would be compiled first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    text, _ = read_text(args)
    runs = {
        "flashmoe": run(fused=True, text=text, args=args),
        "deepspeed": run(fused=False, text=text, args=args),
    }
    write_report(REPORT, f"DeepSpeed {deepspeed.__version__}", args, runs)
    leave(0)


if __name__ == "__main__":
    main()
