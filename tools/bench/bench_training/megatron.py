"""Trains one GPT-MoE with flashmoe and with Megatron's alltoall, and judges the loss curves.

On all GPUs of a host, from the checkout (needs torch, Megatron-Core and matplotlib):

    torchrun --nproc-per-node 4 -m tools.bench.bench_training megatron --out runs/training

writes ``training.jsonl``, a line for each run, and the plot as ``training.png`` and ``.svg``.
Model, data and optimizer are those of examples/pretrain_moe.py, whose arguments it takes, too:
Megatron's GPTModel with local layers, the distributed optimizer, the sources of Python's library;
every rank is expert and data parallel.

The same model is trained from the same seed with "flashmoe", with "alltoall", and with "alltoall"
again where the ranks change places in every batch: each computes what its neighbour had, so that
nothing differs but the order in which sums are taken. How far these runs drift from alltoall's is
the band of noise, by the rule of ``curves.py``, 20 iterations ahead. The exit status is 1 if
flashmoe leaves it, if the means of the last tenth differ by more than the band there, or if the
loss does not fall. Iteration times are medians.
"""

import argparse
import faulthandler
import gc
import importlib.metadata
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from flashmoe_megatron.bench.stopwatch import HAS_GPU

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import torch.distributed as dist

import pretrain_moe
from flashmoe_megatron.bench.timer import slowest
from leave import leave
from tools.arguments import not_negative
from tools.bench import common
from tools.bench.bench_training.curves import WARM, draw, judge, mean_of_last
from tools.bench.bench_training.runs import Run
from tools.bench.common import Record, log

MODEL = (
    "--train-iters 500 --eval-iters 1 --log-interval 100 --num-layers 4 --hidden-size 512 "
    "--moe-ffn-hidden-size 1024 --num-attention-heads 8 --num-experts 16 --seq-length 512 "
    "--micro-batch-size 8 --num-microbatches 1 --lr 1e-3 --data-megabytes 16 "
    "--output runs/bench_training"
)
"""Arguments of the example; given ones come after them and win."""


class RanksMoved:
    """A dataset in which every rank finds what another rank has in the same batch.

    Args:
        dataset: Samples by index; a batch is ``size`` samples of rank 0, of rank 1, and so on.
        size: Samples of one rank and micro-batch.
        by: How many ranks further.
    """

    def __init__(self, dataset: Any, size: int, by: int) -> None:
        self._dataset = dataset
        self._size = size
        self._by = by

    def __getitem__(self, index: int) -> Any:
        """The sample at another rank's place."""
        block, within = divmod(index, self._size)
        step, rank = divmod(block, dist.get_world_size())
        moved = (rank + self._by) % dist.get_world_size()
        return self._dataset[(step * dist.get_world_size() + moved) * self._size + within]


def train(name: str, dispatcher: str, dataset: Any, args: argparse.Namespace) -> Run:
    """One run from the start. Collective over all ranks."""
    training = pretrain_moe.build_training(args, dispatcher)
    training.model.train()
    batches = pretrain_moe.batches(dataset, args)
    losses, times = [], []
    begin = time.perf_counter()
    for iteration in range(1, args.train_iters + 1):
        training.model.zero_grad_buffer()
        training.optimizer.zero_grad()
        loss = pretrain_moe.run_batches(training.model, batches, args, forward_only=False)
        end = time.perf_counter()  # a loss has waited for the GPU
        losses.append(loss)
        times.append((end - begin) * 1e3)
        begin = end
        is_updated, _, _ = training.optimizer.step()
        if not is_updated:
            raise SystemExit(f"iteration {iteration}: the optimizer found a gradient not finite")
        training.scheduler.step(1)
        if iteration % args.log_interval == 0:
            log(f"  {name} iteration {iteration}: loss {loss:.4f}, {times[-1]:.0f} ms")
    del training, batches
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
    return Run(name, losses, slowest(times))


def parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The benchmark's own arguments, and the example's."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.bench_training megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"of examples/pretrain_moe.py, unless given: {MODEL}",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/training"), help="record and plots, less suffix")
    add(
        "--noise-runs",
        type=not_negative,
        default=2,
        help="at most the ranks less one; 0: judge nothing",
    )
    add("--limit-s", type=float, default=240, help="for all of it; then every stack is printed")
    add("--commit", help="what is measured, where the checkout has no git")
    options, model = parser.parse_known_args(arguments)
    return options, pretrain_moe.parse_args([*MODEL.split(), *model])


def main(arguments: list[str]) -> NoReturn:
    options, args = parse(arguments)
    common.need_torchrun()
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    pretrain_moe.initialize(args)
    num_ranks = dist.get_world_size()
    if not 0 <= options.noise_runs < num_ranks:
        raise SystemExit(f"--noise-runs {options.noise_runs}: wanted 0 to {num_ranks - 1} here")
    dataset, _ = pretrain_moe.build_datasets(args, pretrain_moe.prepare_text(args))
    record_path = options.out.with_suffix(".jsonl")
    if dist.get_rank() == 0:
        record_path.unlink(missing_ok=True)
    record = Record(
        record_path,
        framework=f"Megatron-Core {importlib.metadata.version('megatron-core')}",
        num_ranks=num_ranks,
        tokens_per_rank=args.seq_length * args.micro_batch_size * args.num_microbatches,
        settings={key: value for key, value in vars(args).items() if not isinstance(value, Path)},
        **common.machine(options.commit),
    )
    runs = []
    moved = {
        f"alltoall, ranks moved by {by}": RanksMoved(dataset, args.micro_batch_size, by)
        for by in range(1, options.noise_runs + 1)
    }
    for name, samples in {"flashmoe": dataset, "alltoall": dataset, **moved}.items():
        run = train(name, name.partition(",")[0], samples, args)
        record.write(measurement="training", **run.as_dict())
        log(
            f"{name}: {run.median_ms(WARM):.1f} ms an iteration, loss {run.losses[0]:.4f}, mean of "
            f"the last tenth {mean_of_last(run.losses):.4f}"
        )
        runs.append(run)
    ours, theirs, *_ = runs
    ratio = theirs.median_ms(WARM) / ours.median_ms(WARM)
    log(f"alltoall takes {ratio:.2f}x of flashmoe's time an iteration")
    failures = []
    if moved:
        failures = judge(*(run.losses for run in runs))
        if dist.get_rank() == 0:
            draw(record_path)
    for failure in failures:
        log(f"failed: {failure}")
    leave(1 if failures else 0)
