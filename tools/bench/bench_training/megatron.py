"""Trains one GPT-MoE with flashmoe and with Megatron's alltoall, and judges the loss curves.

On all GPUs of a host, from the checkout (needs torch, Megatron-Core and matplotlib):

    torchrun --nproc-per-node 4 -m tools.bench.bench_training megatron --out runs/training

writes ``training.jsonl``, a line for each run, and the plot as ``training.png`` and ``.svg``.
Model, data and optimizer are those of examples/pretrain_moe.py: Megatron's GPTModel with local
layers, the distributed optimizer, the sources of Python's library; every rank is expert and data
parallel.

The same model is trained from the same seed with "flashmoe", with "alltoall", and with "alltoall"
again where the ranks change places in every batch: each computes what its neighbour had, so that
nothing differs but the order in which sums are taken. How far these runs drift from alltoall's is
the band of noise, by the rule of ``curves.py``, 20 iterations ahead. The exit
status is 1 if flashmoe leaves it, if the means of the last tenth differ by more than the band
there, or if the loss does not fall. Iteration times are medians; those of the MoE layers come from
a few iterations more.
"""

import argparse
import faulthandler
import gc
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from tools.bench.stopwatch import HAS_GPU, between_ms, now, synchronize

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import torch.distributed as dist

import pretrain_moe
from leave import leave
from tools.bench import common
from tools.bench.bench_training.curves import AHEAD, BF16_UNIT, WARM, draw, within_noise
from tools.bench.common import Record, log


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        run: Its name in tables and plots.
        dispatcher: Megatron's name of it.
        losses: The mean of all ranks, for every iteration.
        iteration_ms: The slowest rank's time of every iteration.
        moe_ms: Forward and backward of all MoE layers in one iteration, routers included; the
            median of rank 0 over iterations after those.
        moe_iteration_ms: As ``moe_ms``, of the same iterations as a whole.
    """

    run: str
    dispatcher: str
    losses: list[float]
    iteration_ms: list[float]
    moe_ms: float
    moe_iteration_ms: float

    def median_ms(self) -> float:
        """The median iteration, without the first ones."""
        return statistics.median(self.iteration_ms[WARM:] or self.iteration_ms)


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


class LayerTimes:
    """Times all MoE layers of a model, forward and backward, until it is closed."""

    def __init__(self, model: torch.nn.Module) -> None:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        self._open: dict[torch.nn.Module, Any] = {}
        self._pairs: list[tuple[Any, Any]] = []
        self._hooks = []
        for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
            self._hooks += [
                layer.register_forward_pre_hook(self._begin),
                layer.register_forward_hook(self._end),
                layer.register_full_backward_pre_hook(self._begin),
                layer.register_full_backward_hook(self._end),
            ]

    def take_ms(self) -> float:
        """Milliseconds since the last call; waits for the GPU."""
        synchronize()
        total = sum(between_ms(begin, end) for begin, end in self._pairs)
        self._pairs.clear()
        return total

    def close(self) -> None:
        """Stops to time."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, layer: torch.nn.Module, *_: Any) -> None:
        self._open[layer] = now()

    def _end(self, layer: torch.nn.Module, *_: Any) -> None:
        self._pairs.append((self._open.pop(layer), now()))


def iterations(
    training: pretrain_moe.Training, batches: Iterator[Any], args: argparse.Namespace, number: int
) -> Iterator[float]:
    """Trains; yields the loss of every iteration."""
    for iteration in range(1, number + 1):
        training.model.zero_grad_buffer()
        training.optimizer.zero_grad()
        yield pretrain_moe.run_batches(training.model, batches, args, forward_only=False)
        is_updated, _, _ = training.optimizer.step()
        if not is_updated:
            raise SystemExit(f"iteration {iteration}: the optimizer found a gradient not finite")
        training.scheduler.step(1)


def with_times(losses: Iterator[float]) -> Iterator[tuple[float, float]]:
    """Yields each loss with the milliseconds that it took to come."""
    begin = time.perf_counter()
    for loss in losses:
        end = time.perf_counter()
        yield loss, (end - begin) * 1e3
        begin = end


def train(name: str, dispatcher: str, dataset: Any, moved: int, args: argparse.Namespace) -> Run:
    """One run from the start. Collective over all ranks."""
    training = pretrain_moe.build_training(args, dispatcher)
    training.model.train()
    samples = RanksMoved(dataset, args.micro_batch_size, moved) if moved else dataset
    batches = pretrain_moe.batches(samples, args)
    losses, times = [], []
    for loss, milliseconds in with_times(iterations(training, batches, args, args.train_iters)):
        losses.append(loss)
        times.append(milliseconds)
        if len(losses) % args.log_interval == 0:
            log(f"  {name} iteration {len(losses)}: loss {loss:.4f}, {times[-1]:.0f} ms")
    layers = LayerTimes(training.model)
    moe_ms, whole_ms = [], []
    for _, milliseconds in with_times(iterations(training, batches, args, args.moe_iters)):
        moe_ms.append(layers.take_ms())
        whole_ms.append(milliseconds)
    layers.close()
    del training, batches, layers
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
    slowest = torch.tensor(times, dtype=torch.float64, device="cuda" if HAS_GPU else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    medians = map(statistics.median, (moe_ms, whole_ms))
    return Run(name, dispatcher, losses, slowest.tolist(), *medians)


def judge(ours: Run, theirs: Run, noise: list[Run]) -> list[str]:
    """Says what is wrong with our curve; nothing if rounding explains its distance from theirs."""
    failures = []

    def apart(run: Run) -> list[float]:
        return [abs(a - b) / abs(b) for a, b in zip(run.losses, theirs.losses, strict=True)]

    distances = apart(ours)
    spread = [max(column) for column in zip(*map(apart, noise), strict=True)]
    inside = within_noise(distances, spread, ahead=AHEAD)
    log(f"within the band of noise at {sum(inside)} of {len(inside)} iterations")
    if not all(inside):
        first = inside.index(False)
        failures.append(
            f"iteration {first + 1}: flashmoe is {distances[first]:.2e} from alltoall, other "
            f"orders of summation at most {max(spread[: first + AHEAD + 1]):.2e} so far"
        )

    def end(run: Run) -> float:
        return statistics.fmean(run.losses[-max(len(run.losses) // 10, 1) :])

    distance = abs(end(ours) - end(theirs)) / end(theirs)
    allowed = max(BF16_UNIT, 2 * max(abs(end(run) - end(theirs)) / end(theirs) for run in noise))
    log(f"mean of the last tenth: {distance:.2e} apart (allowed: {allowed:.2e})")
    if not distance <= allowed:
        failures.append(
            f"the mean of the last tenth is {distance:.2e} apart, allowed {allowed:.2e}"
        )
    if not end(ours) < ours.losses[0]:
        failures.append("the loss did not fall")
    return failures


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.bench_training megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, pretrain_moe.count
    add("--out", type=Path, default=Path("runs/training"), help="record and plots, less suffix")
    add("--train-iters", type=count, default=500)
    add("--moe-iters", type=count, default=10, help="more, in which the MoE layers are timed")
    add("--noise-runs", type=int, default=2, help="at most the ranks less one; 0: judge nothing")
    add("--log-interval", type=count, default=100)
    add("--num-layers", type=count, default=4)
    add("--hidden-size", type=count, default=512, help="a multiple of 64")
    add("--moe-ffn-hidden-size", type=count, default=1024, help="a multiple of 64")
    add("--num-attention-heads", type=count, default=8)
    add("--num-experts", type=count, default=16, help="of all ranks")
    add("--moe-router-topk", type=count, default=2)
    add("--seq-length", type=count, default=512, help="bytes of a sample")
    add("--micro-batch-size", type=count, default=8, help="samples of a rank and iteration")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=1234)
    add("--data-megabytes", type=count, default=16, help="of sources, at most")
    add("--data", type=Path, default=Path("runs/bench_training"), help="folder of the dataset")
    add("--flashmoe-backend", choices=["auto", "kernel", "reference"], default="auto")
    add("--limit-s", type=float, default=240, help="for all of it; then every stack is printed")
    add("--commit", help="what is measured, where the checkout has no git")
    args = parser.parse_args(arguments)
    # What the functions of the example read besides.
    args.num_microbatches, args.eval_iters, args.output = 1, 1, args.data
    return args


def main(arguments: list[str]) -> NoReturn:
    args = parse(arguments)
    faulthandler.dump_traceback_later(args.limit_s, exit=True)
    pretrain_moe.initialize(args)
    num_ranks = dist.get_world_size()
    if not 0 <= args.noise_runs < num_ranks:
        raise SystemExit(f"--noise-runs {args.noise_runs}: wanted 0 to {num_ranks - 1} here")
    dataset, _ = pretrain_moe.build_datasets(args, pretrain_moe.prepare_text(args))
    record_path = args.out.with_suffix(".jsonl")
    if dist.get_rank() == 0:
        record_path.unlink(missing_ok=True)
    record = Record(
        record_path,
        framework=f"Megatron-Core {importlib.metadata.version('megatron-core')}",
        num_ranks=num_ranks,
        tokens_per_rank=args.seq_length * args.micro_batch_size,
        settings={key: value for key, value in vars(args).items() if not isinstance(value, Path)},
        **common.machine(args.commit),
    )
    orders = [("flashmoe", "flashmoe", 0), ("alltoall", "alltoall", 0)]
    orders += [
        (f"alltoall, ranks moved by {by}", "alltoall", by) for by in range(1, args.noise_runs + 1)
    ]
    runs = []
    for name, dispatcher, moved in orders:
        runs.append(train(name, dispatcher, dataset, moved, args))
        rounded = {"iteration_ms": [round(ms, 2) for ms in runs[-1].iteration_ms]}
        record.write(measurement="training", **{**asdict(runs[-1]), **rounded})

    log("\n| run | iteration, ms | MoE layers, ms | first loss | mean of the last tenth |")
    log("| --- | --- | --- | --- | --- |")
    for run in runs:
        last = statistics.fmean(run.losses[-max(len(run.losses) // 10, 1) :])
        log(
            f"| {run.run} | {run.median_ms():.1f} | {run.moe_ms:.1f} | {run.losses[0]:.4f} | "
            f"{last:.4f} |"
        )
    ours, theirs, *noise = runs
    log(
        f"\nalltoall takes {theirs.median_ms() / ours.median_ms():.2f}x of flashmoe's time an "
        f"iteration, {theirs.moe_ms / ours.moe_ms:.2f}x in the MoE layers"
    )
    failures = judge(ours, theirs, noise) if noise else []
    for failure in failures:
        log(f"failed: {failure}")
    if noise and dist.get_rank() == 0:
        draw(record_path)
    leave(1 if failures else 0)
