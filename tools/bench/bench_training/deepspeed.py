"""Times steps of DeepSpeed training with its own MoE layers and with flashmoe, losses side by side.

On all GPUs of a host, from the checkout (needs torch and DeepSpeed installed, nothing compiled):

    torchrun --nproc-per-node 4 -m tools.bench.bench_training deepspeed --out results.jsonl

without a GPU the same in small, with gloo and the reference backend:

    torchrun --nproc-per-node 2 -m tools.bench.bench_training deepspeed

A decoder of attention and MoE layers is trained on the sources of Python's library, with ZeRO-2 and
all ranks in one expert-parallel group: with native layers (``deepspeed.moe.layer.MoE``, capacity
factor 1.25), and with layers of AutoEP (nothing dropped), whose own experts are a loop of matrix
products or torch's grouped GEMM. Every kind of experts begins with the same parameters and sees the
same batches. A step is forward, backward with the reduction of gradients, and optimizer, from an
idle GPU; the slowest rank's time counts. The exit status is 1 if the losses do not agree.
"""

import argparse
import faulthandler
import importlib.metadata
import math
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from examples.arguments import count
from examples.leave import leave
from examples.python_sources import read_sources
from flashmoe_megatron.bench.shapes import SHAPES, Shape
from flashmoe_megatron.bench.stopwatch import synchronize
from flashmoe_megatron.bench.timer import slowest
from flashmoe_megatron.deepspeed import attach
from tools.arguments import not_negative, parser_of, row_bound
from tools.bench import common
from tools.bench.bench_training.curves import apart
from tools.bench.bench_training.decoder import (
    CAPACITY_FACTOR,
    HAS_GPU,
    Experts,
    Family,
    Setup,
    build_engine,
    mean_over_ranks,
    release,
    start,
    step,
    text_batches,
)
from tools.bench.bench_training.runs import Run
from tools.bench.common import Record, log

KERNEL_TIMEOUT_S = 15
"""Bounds the kernel's waits for a peer, so that it speaks before the watchdog does."""

SMALL = {
    "small-top2": Shape(256, 64, 128, 8, 2, gated=True),
    "small-top4": Shape(256, 128, 64, 16, 4, gated=True),
}
"""Layers small enough for processors."""

KINDS: dict[Family, tuple[Experts, ...]] = {
    "native": (Experts("DeepSpeed", False), Experts("flashmoe", True)),
    "autoep": (
        Experts("DeepSpeed, loop", False),
        Experts("DeepSpeed, grouped GEMM", False, grouped_mm=True),
        Experts("flashmoe", True),
    ),
}
"""The first of each is what the others' losses are compared with."""


def train(
    setup: Setup,
    experts: Experts,
    text: torch.Tensor,
    device: torch.device,
    options: argparse.Namespace,
) -> tuple[Run, int]:
    """Trains one engine. Collective over all ranks.

    Returns:
        The run, and the most bytes that torch's allocator gave out on any rank, which leaves out
        the symmetric heap; 0 without a GPU.
    """
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    section = {} if options.row_bound is None else {"row_bound": options.row_bound}
    engine = build_engine(
        setup,
        experts,
        device,
        dtype=torch.bfloat16 if HAS_GPU else torch.float32,
        max_tokens=setup.shape.tokens,
        timeout=KERNEL_TIMEOUT_S,
        **section,
    )
    if experts.is_fused:
        outcomes = set(attach(engine).values())
        if not all(outcome.startswith("fused") for outcome in outcomes):
            raise SystemExit(f"{setup.family}: wanted every layer fused, got {outcomes}")
    batches = text_batches(text, setup, device)
    losses, times = [], []
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.warmup + options.steps):
        batch = next(batches)
        synchronize()
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        losses.append(step(engine, batch))
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    peak = torch.tensor([torch.cuda.max_memory_allocated() if HAS_GPU else 0], device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    run = Run(experts.name, mean_over_ranks(losses), slowest(times))
    release(engine)
    faulthandler.cancel_dump_traceback_later()
    return run, int(peak)


def parse(arguments: list[str]) -> argparse.Namespace:
    shapes = {**SHAPES, **SMALL}
    gated = [name for name, shape in shapes.items() if shape.gated]
    usual = ["mixtral-8x7b", "qwen3-30b"] if HAS_GPU else list(SMALL)
    parser = parser_of(__doc__, "python -m tools.bench.bench_training deepspeed")
    add = parser.add_argument
    add("--shapes", nargs="+", choices=gated, default=usual, metavar="SHAPE", help=f"of {gated}")
    add("--families", nargs="+", choices=list(KINDS), default=list(KINDS))
    add("--num-layers", type=count, default=2)
    add("--steps", type=count, default=10, help="timed")
    add("--warmup", type=not_negative, default=4, help="steps before them")
    add("--lr", type=float, default=1e-4)
    add("--row-bound", type=row_bound, help="flashmoe.row_bound: no host wait in the forward")
    add("--bound", type=float, default=2e-2, help="largest relative distance of two losses")
    add("--limit-s", type=float, default=60, help="for building and training one engine")
    common.add_record_flags(parser, a_line="run")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> NoReturn:
    options = parse(arguments)
    common.need_torchrun()
    device = start()
    num_ranks = dist.get_world_size()
    release_of_deepspeed = importlib.metadata.version("deepspeed")
    record = Record(
        options.out,
        **common.machine(options.commit),
        framework=f"DeepSpeed {release_of_deepspeed}",
        command=common.called("tools.bench.bench_training deepspeed", arguments),
        num_ranks=num_ranks,
    )
    text = torch.frombuffer(bytearray(b"\0".join(read_sources(8))), dtype=torch.uint8)
    log(f"{num_ranks} ranks on {device.type}, DeepSpeed {release_of_deepspeed}")
    failures = []
    for family in options.families:
        for name in options.shapes:
            shape = {**SHAPES, **SMALL}[name]
            setup = Setup(
                family,
                shape,
                num_layers=options.num_layers,
                sequence=min(4096, shape.tokens // 2),
                ep_size=num_ranks,
                lr=options.lr,
                zero_options={"overlap_comm": True},
            )
            # torch's grouped GEMM and the activation that DeepSpeed runs after it are for GPUs.
            kinds = [experts for experts in KINDS[family] if HAS_GPU or not experts.grouped_mm]
            runs: list[Run] = []
            for experts in kinds:
                run, peak_bytes = train(setup, experts, text, device, options)
                runs.append(run)
                distances = apart(run.losses, runs[0].losses)
                distance = max(d if math.isfinite(d) else math.inf for d in distances)
                fastest = min(one.median_ms(options.warmup) for one in runs[: len(kinds) - 1])
                median = run.median_ms(options.warmup)
                log(
                    f"{family}, {name}, {run.run}: {median:.1f} ms a step, the fastest of "
                    f"DeepSpeed's own takes {fastest / median:.2f}x; peak "
                    f"{peak_bytes / 2**30:.1f} GiB; losses at most {distance:.2e} apart"
                )
                if not distance <= options.bound:
                    failures.append(f"{family}, {name}, {run.run}: {distance:.2e}")
                record.write(
                    measurement="training steps",
                    family=family,
                    shape=name,
                    **vars(shape),
                    tokens_per_rank=shape.tokens,
                    num_layers=setup.num_layers,
                    zero=setup.zero,
                    capacity_factor=CAPACITY_FACTOR if family == "native" else None,
                    warmup=options.warmup,
                    largest_distance=distance,
                    peak_bytes=peak_bytes,
                    **run.as_dict(),
                )
    for failure in failures:
        log(f"failed: losses further apart than {options.bound}: {failure}")
    log("losses agree" if not failures else "losses do not agree")
    leave(1 if failures else 0)
