"""Hosts on several GPUs: each GPU, or each few of them, stands for a host of its own.

    python -m tests.multi_gpu.hosts --gpus 2 [--ranks 4 --hosts 2] [--parts small paper ...]

| part | what |
| --- | --- |
| small, paper | see :mod:`tests.gpu.two_hosts`: over NCCL's sockets |
| overlap | layers of models with each overlap of exchanges and launches, in turns: times |
| held | the same bits while a kernel holds the reserved multiprocessors at random |
| reduction | launches beside reductions: what a cap of CTAs costs, and what stands still |
| training | Megatron's stock script with the distributed optimizer and both of its overlaps |

All but the first two join the GPUs by NVLink also between hosts, since sockets are too slow for
anything to hide them, and are run with one hardware queue of the GPU and with several
(CUDA_DEVICE_MAX_CONNECTIONS).
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.call import Backend
from flashmoe_megatron.config import DEFAULT_RESERVED_SMS, MoEConfig
from flashmoe_megatron.errors import FlashMoEError, PeerTimeoutError
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.hosts.grid import HOST_VARIABLE, host_groups
from flashmoe_megatron.hosts.rail import Rail
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.select import OVERLAP_CTAS, find_grid, select_backend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu.spinner import SHARED_BYTES, Wait
from tests.gpu.two_hosts import PARTS as OVER_SOCKETS
from tests.gpu.two_hosts import SOCKETS, Part, World, make_parser, parse, start, work
from tests.multi_gpu import stock_training
from tests.multi_gpu.jobs import tell
from tests.multi_gpu.runs import Named
from tests.unit import cases

MODELS = {
    "Qwen3-30B": {"hidden": 2048, "intermediate": 768, "num_experts": 128, "max_tokens": 8192},
    "DeepSeek-V3": {"hidden": 7168, "intermediate": 2048, "num_experts": 32, "max_tokens": 4096},
}
TIMEOUT_S = 8.0
REDUCED_BYTES = 2**28
CAPS = (2, 4, 8, 16, None)
HELD_MS = 3.0


class Layer:
    """A layer's weights and this rank's tokens, made where they are needed."""

    def __init__(self, world: World, config: MoEConfig) -> None:
        g = torch.Generator(world.device).manual_seed(world.rank)

        def rand(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, device=world.device, generator=g, dtype=torch.bfloat16)
            return made if len(shape) == 2 and shape[0] == config.max_tokens else made * 0.02

        count, tokens = config.num_local_experts, config.max_tokens
        fc1 = [rand(config.fc1_rows, config.hidden) for _ in range(count)]
        fc2 = [rand(config.hidden, config.intermediate) for _ in range(count)]
        self.weights = ExpertWeights(tuple(fc1), tuple(fc2))
        self.grads = [
            [WeightGrad(torch.zeros_like(one, dtype=torch.float32), True) for one in kind]
            for kind in (fc1, fc2)
        ]
        self.x, self.grad_out = rand(tokens, config.hidden), rand(tokens, config.hidden)
        scores = torch.rand(tokens, config.num_experts, device=world.device, generator=g)
        probs, self.choices = scores.topk(config.topk)
        self.probs = probs / probs.sum(1, keepdim=True)

    def forward(self, backend: Backend) -> tuple[torch.Tensor, Any]:
        return backend.forward(self.x, self.probs, self.choices, self.weights, training=True)

    def step(self, backend: Backend) -> tuple[torch.Tensor, ...]:
        out, saved = self.forward(backend)
        return out, *backend.backward(self.grad_out, saved, self.weights, *self.grads)


def as_with_overlap(world: World, config: MoEConfig) -> HostsBackend:
    """No overlap, and exchanges of as few CTAs as under launches: on what a card would carry."""
    group, options = dist.group.WORLD, BackendOptions(keep="all", timeout=TIMEOUT_S)
    assert group is not None
    groups = host_groups(group, find_grid(group), timeout=TIMEOUT_S, max_ctas=OVERLAP_CTAS)

    def make(part: MoEConfig, within: BackendOptions) -> Backend:
        return KernelBackend(part, groups.within, world.device, options=within)

    return HostsBackend(config, Rail(groups), make, device=world.device, options=options)


def check_overlap(world: World, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of a layer with each overlap; a turn is one of each."""
    rows = []
    for model, shape in MODELS.items():
        config = cases.make_config(topk=8, num_ranks=world.num_ranks, **shape)
        layer = Layer(world, config)
        options = {"keep": "all", "timeout": TIMEOUT_S}
        backends = {f"{n}": world.make(config, host_overlap=n, **options) for n in (0, 1, 2)}
        backends["0, few CTAs"] = as_with_overlap(world, config)
        want = layer.forward(backends["0"])[0]
        for name, backend in backends.items():
            layer.step(backend)
            assert_close(name, layer.forward(backend)[0], want, rel_l2=6e-3)
            backend.take_crossed()

        def turn(
            backends: dict[str, HostsBackend] = backends, layer: Layer = layer
        ) -> dict[str, list[float]]:
            found = {}
            for name, backend in backends.items():
                world.wait()
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                marks[0].record()
                _, saved = layer.forward(backend)
                marks[1].record()
                backend.backward(layer.grad_out, saved, layer.weights, *layer.grads)
                marks[2].record()
                torch.cuda.synchronize()
                found[name] = [marks[0].elapsed_time(mark) for mark in marks[1:]]
            return found

        turns = [turn() for _ in range(world.repeats(turn, args.seconds / 2, args.iterations))]
        for name, backend in backends.items():
            forward, both = (
                world.agreed(sorted(one[name][i] for one in turns)[len(turns) // 2]) for i in (0, 1)
            )
            crossed = backend.take_crossed()
            rate = crossed.bytes / max(crossed.ns, 1)
            rows.append({"model": model, "overlap": name, "forward_ms": forward, "both_ms": both})
            rows[-1] |= {"turns": len(turns), "gb_per_s": rate}
            world.say(
                f"{model}, overlap {name}: forward {forward:.3f} ms, with backward {both:.3f} ms, "
                f"median of {len(turns)}; {rate:.1f} GB/s of what is waited for"
            )
    return rows


def random_holder(seed: int, device: torch.device) -> Callable[[], None]:
    """Now and then holds the reserved multiprocessors for a while, beside all else."""
    draw, stream, hold = random.Random(seed), torch.cuda.Stream(device), Wait()

    def maybe() -> None:
        if draw.random() < 0.5:
            with torch.cuda.stream(stream):
                hold(draw.uniform(0, HELD_MS) * 1e3, DEFAULT_RESERVED_SMS, SHARED_BYTES)

    return maybe


def check_held(world: World, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Overlapped launches whose reserved multiprocessors something else holds at random."""
    shape = {"hidden": 1024, "intermediate": 512, "num_experts": 16, "topk": 4, "max_tokens": 2048}
    config = cases.make_config(num_ranks=world.num_ranks, **shape)
    layer, rows = Layer(world, config), []
    maybe_hold = random_holder(world.rank, world.device)
    for overlap in (1, 2):
        backend = world.make(config, keep="all", host_overlap=overlap, timeout=TIMEOUT_S)
        first = layer.step(backend)
        differences = torch.zeros((), dtype=torch.int64, device=world.device)
        once = partial(layer.step, backend)
        iterations = world.repeats(once, args.seconds / 4, args.iterations)
        error = ""
        begin = time.monotonic()
        try:
            for _ in range(iterations):
                maybe_hold()
                for got, want in zip(once(), first, strict=True):
                    differences += (got != want).sum()
            torch.cuda.synchronize()
            backend.raise_pending_fault()
        except FlashMoEError as trouble:
            error = f"{type(trouble).__name__}: {trouble}"
        seconds = time.monotonic() - begin
        assert not int(differences), f"{int(differences)} values are not repeated bit by bit"
        rows.append({"overlap": overlap, "iterations": iterations, "s": seconds, "error": error})
        world.say(
            f"held multiprocessors, overlap {overlap}: {iterations} iterations in {seconds:.1f} s, "
            f"{error or 'every bit as without'}"
        )
        if error:
            break  # ranks may be out of step
    return rows


def reducing_group(max_ctas: int | None) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    group = dist.new_group(backend="nccl", pg_options=options)
    assert group is not None
    return group


def check_reduction(world: World, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A launch of all ranks as one host beside an all-reduce, by the reduction's most CTAs.

    Both are issued in one order on all ranks. On the last rank something delays the launch, so that
    the reduction starts first there, and behind the launch elsewhere.
    """
    os.environ[HOST_VARIABLE] = "one host"
    shape = {**MODELS["Qwen3-30B"], "num_experts": 32, "max_tokens": 4096}
    config = cases.make_config(topk=8, num_ranks=world.num_ranks, **shape)
    backend = select_backend(
        config, dist.group.WORLD, world.device, kind="kernel", row_bound=2.0, timeout=TIMEOUT_S
    )
    layer, side, wait = Layer(world, config), torch.cuda.Stream(), Wait()
    summed = torch.ones(REDUCED_BYTES // 4, device=world.device)
    want = layer.forward(backend)[0]
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
    rows: list[dict[str, Any]] = []
    groups = {cap: reducing_group(cap) for cap in CAPS}

    def reduce_alone(group: dist.ProcessGroup) -> float:
        times = []
        for _ in range(8):
            world.wait()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            dist.all_reduce(summed, op=dist.ReduceOp.MAX, group=group)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return world.agreed(sorted(times)[len(times) // 2])

    def beside(group: dist.ProcessGroup) -> str:
        """What a launch says that is late on the last rank."""
        world.wait()
        if world.rank == world.num_ranks - 1:
            wait(5e3)
        try:
            out, _ = layer.forward(backend)
            with torch.cuda.stream(side):
                dist.all_reduce(summed, op=dist.ReduceOp.MAX, group=group)
            torch.cuda.synchronize()
            backend.raise_pending_fault()
        except PeerTimeoutError as error:
            torch.cuda.synchronize()
            return str(error)
        assert torch.equal(out, want), "another result beside a reduction"
        return ""

    for cap, group in groups.items():
        ms = reduce_alone(group)
        rate = 2 * (world.num_ranks - 1) / world.num_ranks * REDUCED_BYTES / ms / 1e6
        rows.append({"max_ctas": cap, "queues": queues, "alone_ms": ms, "gb_per_s": rate})
        world.say(
            f"all-reduce of {REDUCED_BYTES >> 20} MiB, at most {cap or 'any'} CTAs: {ms:.3f} ms, "
            f"{rate:.0f} GB/s on the bus"
        )
    for cap, group in groups.items():
        begin = time.monotonic()
        tries = 20 if cap is not None and cap <= DEFAULT_RESERVED_SMS else 1
        said = next(filter(None, (beside(group) for _ in range(tries))), "")
        stands = world.agreed(bool(said))
        rows.append({"max_ctas": cap, "queues": queues, "stood_still": bool(stands)})
        rows[-1] |= {"error": said, "tries": tries}
        world.say(
            f"behind a late launch, at most {cap or 'any'} CTAs, queues {queues}: "
            f"{'stood still: ' + said if stands else f'{tries} times right'}, "
            f"{time.monotonic() - begin:.1f} s"
        )
        if stands:
            # The group's launches are over; what a fault leaves is not to be judged here.
            break
    os.environ[HOST_VARIABLE] = f"host{world.rank * world.hosts // world.num_ranks}"
    return rows


PARTS: dict[str, Part] = {
    **OVER_SOCKETS,
    "overlap": check_overlap,
    "held": check_held,
    "reduction": check_reduction,
}


@dataclass(frozen=True)
class Training(Named):
    """A training of the stock script.

    Attributes:
        dispatcher: flashmoe or alltoall.
        overlap: Steps in which exchanges between hosts overlap launches.
        queues: CUDA_DEVICE_MAX_CONNECTIONS.
    """

    dispatcher: str
    overlap: int = 0
    queues: int = 1


TRAININGS = [
    Training("flashmoe", overlap=2),
    Training("flashmoe", overlap=2, queues=8),
    Training("flashmoe", queues=8),
    Training("alltoall"),
]


def train(args: argparse.Namespace, run: Training) -> list[float]:
    """One training of the stock script, a torchrun for each host.

    Hosts that share a GPU are joined by sockets.

    Returns:
        Its losses; none if it failed.
    """
    per_host = args.ranks // args.hosts
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    is_ours = run.dispatcher == "flashmoe"
    arguments = [*stock_training.SMALL.split(), "--moe-token-dispatcher-type", run.dispatcher]
    arguments += ["--expert-model-parallel-size", str(args.ranks)]
    arguments += ["--global-batch-size", str(2 * args.ranks)]
    arguments += ["--train-iters", str(args.train_iterations)]
    if is_ours:
        arguments += ["--flashmoe-host-overlap", str(run.overlap), "--flashmoe-timeout", "30"]
    environments = []
    for host in range(args.hosts):
        gpus = [visible[(host * per_host + i) % args.gpus] for i in range(per_host)]
        own = {HOST_VARIABLE: f"host{host}", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if args.gpus < args.ranks:
            own |= {**SOCKETS, "NCCL_HOSTID": f"host{host}"}
        environments.append({**own, "CUDA_DEVICE_MAX_CONNECTIONS": str(run.queues)})
    found = stock_training.train(
        args.megatron,
        arguments,
        ranks_per_host=per_host,
        limit_s=args.limit,
        environments=environments,
    )
    losses, ms = found.losses, found.median_ms(warm=10)
    wrong = found.what_is_wrong(args.train_iterations, "kernel" if is_ours else None)
    said = f"exit codes {found.codes}, {len(losses)} losses"
    if not wrong:
        said = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if not math.isnan(ms):
        said += f", {ms:.1f} ms an iteration"
    print(f"training, {run}: {args.train_iterations} iterations, {said}", flush=True)
    tell(
        args.out,
        part="training",
        run=str(run),
        codes=found.codes,
        losses=losses[-1:],
        iterations=len(losses),
        ms=None if math.isnan(ms) else ms,
    )
    return losses if found.say_wrong(str(run), wrong) else []


def check_training(args: argparse.Namespace) -> bool:
    """Trainings whose first losses have to agree."""
    found = [train(args, run) for run in args.trainings]
    same = [losses[:10] for losses in found if losses]
    agree = stock_training.agree(same)
    print(f"trainings: first losses {'agree' if agree else 'differ'}: {same}", flush=True)
    return agree and all(found)


def main() -> int:
    parser = make_parser(__doc__, [*PARTS, "training"], [*PARTS, "training"])
    add = parser.add_argument
    add("--megatron", type=Path, default=Path(".megatron"), help="has pretrain_gpt.py")
    add("--train-iterations", type=int, default=1000)
    add("--trainings", nargs="+", type=Training.of, default=TRAININGS, help="as flashmoe,overlap=2")
    add("--queues", nargs="+", default=["1", "8"], help="CUDA_DEVICE_MAX_CONNECTIONS")
    args = parse(parser)
    if args.rank is not None:
        work(args, PARTS)
    module, is_right = "tests.multi_gpu.hosts", True

    def run(parts: list[str], environment: dict[str, str]) -> bool:
        chosen = [part for part in parts if part in args.parts]
        return not chosen or start(module, args, environment, [*sys.argv[1:], "--parts", *chosen])

    is_right &= run(list(OVER_SOCKETS), SOCKETS)
    for queues in args.queues:
        timed = ["overlap"] if queues == args.queues[-1] else []
        parts = [*timed, "held", "reduction"]
        is_right &= run(parts, {"CUDA_DEVICE_MAX_CONNECTIONS": queues})
    if "training" in args.parts:
        is_right &= check_training(args)
    print("all right" if is_right else "failed")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
