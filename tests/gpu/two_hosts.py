"""Processes that are hosts to flashmoe and to NCCL, which joins them by sockets.

    python -m tests.gpu.two_hosts [--gpus 2] [--ranks 4 --hosts 2] [--iterations 100] [--seconds 20]

Small layers in every form are compared with the oracle. Then FlashMoE's shape (16 experts of 4,096,
width 1,024, top-2), which its own run over hosts lost messages with beyond 2,048 tokens a GPU: each
number of tokens is compared with one rank that has all experts, and repeated with the same bits.
NCCL's log has to say that the hosts' exchanges went over NET/Socket and nothing else.

At last a host dies in each phase of a call: the other one's log has to say so before torch ends it.

Without ``--gpus`` two processes share one. ``--gpus 0`` runs on processors, with gloo.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import datetime
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.call import Backend
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import RoutingError
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.hosts.grid import HOST_VARIABLE
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.faults.hosts_job import PHASES, arm
from tests.gpu import steps
from tests.gpu.expected import Results, assert_as_good, expected, to_device
from tests.gpu.layers import TOKENS, make_config, zipf
from tests.unit import cases

SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
FORMS = {
    "exact sizes": {"keep": "all"},
    "exact sizes, keep preactivations": {"keep": "preactivations"},
    "fixed sizes": {"keep": "all", "row_bound": 100.0},
    "overlap 1": {"keep": "all", "host_overlap": 1},
    "overlap 2": {"keep": "all", "host_overlap": 2},
}
ROUTINGS = [cases.uniform, zipf, cases.to_one_expert, cases.with_dropped_tokens, cases.to_nobody]
PATIENCE_S = 60
DEATH_TIMEOUT_S = 8.0
DEATHS_AT_ONCE = 3
GONE = re.compile(r"PeerTimeoutError: rank 0, on host 0 of \d+: .* is gone or did not come: .*")
VIA = re.compile(r"\bvia ((?:NET|P2P|SHM|DIRECT)\S*)")


@dataclass(frozen=True)
class World:
    """Where one process is.

    Attributes:
        rank: Its own.
        num_ranks: All processes, the same number on each host.
        hosts: What they are to flashmoe.
        device: Its GPU, or the processor.
    """

    rank: int
    num_ranks: int
    hosts: int
    device: torch.device

    def make(self, config: MoEConfig, **options: object) -> HostsBackend:
        """A layer over the hosts. Collective."""
        kind = "kernel" if self.device.type == "cuda" else "reference"
        backend = select_backend(config, dist.group.WORLD, self.device, kind=kind, **options)
        assert isinstance(backend, HostsBackend)
        return backend

    def alone(self, config: MoEConfig) -> Backend:
        """The same layer with all of its experts on this rank."""
        if self.device.type == "cuda":
            return KernelBackend(config, None, self.device)
        return ReferenceBackend(config, None, device=self.device)

    def inputs(
        self, config: MoEConfig, routing: cases.Routing, tokens: list[int], seed: int = 0
    ) -> cases.Inputs:
        """All ranks' inputs, the same on every rank."""
        made = cases.make_inputs(config, routing, tokens, dtype=torch.bfloat16, seed=seed)
        return to_device(made, self.device)

    def say(self, what: str) -> None:
        """Prints it, on one rank."""
        if self.rank == 0:
            print(what, flush=True)

    def wait(self) -> None:
        """Until all ranks have come here, and their GPUs have done what they were given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def agreed(self, value: float) -> float:
        """The largest of all ranks'."""
        word = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return float(word)

    def repeats(self, call: Callable[[], object], seconds: float, most: int) -> int:
        """How often a call can be made in a time, the same on all ranks; makes it three times."""
        call()
        self.wait()
        begin = time.monotonic()
        for _ in range(2):
            call()
        self.wait()
        each = self.agreed((time.monotonic() - begin) / 2)
        return max(3, min(most, int(seconds / each)))


def grads_of(weights: ExpertWeights) -> list[list[WeightGrad]]:
    return [
        [WeightGrad(torch.empty_like(one, dtype=torch.float32), False) for one in kind]
        for kind in (weights.fc1, weights.fc2)
    ]


def step(
    backend: Backend, inputs: cases.Inputs, weights: ExpertWeights, rank: int | None = None
) -> Results:
    """One forward and backward with this rank's tokens, or another's."""
    rank = backend.rank if rank is None else rank
    grads = grads_of(weights)
    call = (inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank])
    out, saved = backend.forward(*call, weights, training=True)
    grad_x, grad_probs = backend.backward(inputs.grad_out[rank], saved, weights, *grads)
    backend.raise_pending_fault()
    return Results(out, grad_x, grad_probs, *(stacked(kind) for kind in grads))


def stacked(grads: Sequence[WeightGrad]) -> torch.Tensor:
    return torch.stack([one.buffer for one in grads])


def check_small(world: World, args: argparse.Namespace) -> dict[str, Any]:
    """Every form and routing against the oracle, twice each, and a refusal."""
    tokens, rank = TOKENS[world.num_ranks], world.rank
    shapes: list[dict[str, int]] = [{}, {"topk": 16, "num_experts": 64}]
    shapes.append({"topk": 6, "num_experts": 8})
    steps_made = 0
    for changes in shapes:
        config = make_config(world.num_ranks, **changes)
        backends = [world.make(config, **options) for options in FORMS.values()]
        for routing in ROUTINGS:
            inputs = world.inputs(config, routing, tokens)
            weights = steps.weights_of(config, inputs)[rank]
            want = expected(config, inputs).share(config, tokens, rank)
            for backend in backends:
                got = step(backend, inputs, weights)
                assert_as_good(got, want, times=1.2)
                steps.assert_same_bits(step(backend, inputs, weights), got)
                steps_made += 2
        world.say(f"right and repeated: {changes or 'small'}, {', '.join(FORMS)}")
    config = make_config(world.num_ranks)
    backend = world.make(config)
    inputs = world.inputs(config, cases.uniform, tokens)
    weights = steps.weights_of(config, inputs)[rank]
    last = world.num_ranks - 1
    routing_map = inputs.routing_map[rank]
    if rank == last:
        routing_map = torch.ones_like(routing_map)
    call = (inputs.x[rank], inputs.probs[rank], routing_map, weights)
    with pytest.raises(RoutingError, match=f"^rank {last}: token 0 selects 16 experts") as heard:
        backend.forward(*call, training=True)
    print(f"rank {rank} heard: {heard.value}", flush=True)
    step(backend, inputs, weights)
    return {"steps": steps_made}


def check_paper(world: World, args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """FlashMoE's shape with so many tokens a rank."""
    num_ranks, rank = world.num_ranks, world.rank
    config = cases.make_config(
        hidden=1024,
        intermediate=4096,
        num_experts=16,
        topk=2,
        gated=False,
        activation="gelu",
        num_ranks=num_ranks,
        max_tokens=tokens,
    )
    inputs = world.inputs(config, cases.uniform, [tokens] * num_ranks, seed=tokens)
    weights = steps.weights_of(config, inputs)[rank]
    backend = world.make(config, keep="all", host_overlap=args.overlap)
    first = step(backend, inputs, weights)

    one_rank = world.alone(replace(config, num_ranks=1))
    everything = ExpertWeights(tuple(inputs.fc1), tuple(inputs.fc2))
    share = config.num_local_experts
    experts = slice(rank * share, (rank + 1) * share)
    sums: list[torch.Tensor] = []
    for each in range(num_ranks):
        found = step(one_rank, inputs, everything, each)
        of_experts = [found.grad_fc1[experts], found.grad_fc2[experts]]
        sums = [a + b for a, b in zip(sums, of_experts, strict=True)] if sums else of_experts
        if each == rank:
            own = found
    want = Results(own.out, own.grad_x, own.grad_probs, *sums)
    for name, tensor in vars(first).items():
        assert_close(name, tensor, getattr(want, name), rel_l2=6e-3)
    del want, one_rank, found, own, sums, of_experts

    def once() -> Results:
        return step(backend, inputs, weights)

    iterations = world.repeats(once, args.seconds, args.iterations)
    differences = torch.zeros((), dtype=torch.int64, device=world.device)
    before, begin = backend.traffic, time.monotonic()
    for _ in range(iterations):
        for name, tensor in vars(once()).items():
            differences += (tensor != getattr(first, name)).sum()
    world.wait()
    seconds = (time.monotonic() - begin) / iterations
    after = backend.traffic
    assert int(differences) == 0, f"{int(differences)} values are not repeated bit by bit"
    rows = (after.rows_crossed - before.rows_crossed) / iterations
    mib = (after.bytes_crossed - before.bytes_crossed) / iterations / 2**20
    world.say(
        f"FlashMoE's shape, {tokens} tokens a rank, overlap {args.overlap}: {iterations} "
        f"iterations, every bit as the first, which is one rank's within 6e-3; {rows:.0f} rows and "
        f"{mib:.1f} MiB left a rank in an iteration of {seconds * 1e3:.1f} ms"
    )
    return {"tokens": tokens, "iterations": iterations, "mib": mib, "ms": seconds * 1e3}


Part = Callable[[World, argparse.Namespace], Any]


def check_papers(world: World, args: argparse.Namespace) -> list[dict[str, Any]]:
    return [check_paper(world, args, tokens) for tokens in args.tokens]


PARTS: dict[str, Part] = {"small": check_small, "paper": check_papers}


def die(world: World, args: argparse.Namespace) -> None:
    """Trains until the last rank is gone, which dies in a phase or, with none, stays away."""
    config = make_config(world.num_ranks)
    backend = world.make(config, keep="all", timeout=DEATH_TIMEOUT_S)
    inputs = world.inputs(config, cases.uniform, [96] * world.num_ranks)
    weights = steps.weights_of(config, inputs)[world.rank]
    step(backend, inputs, weights)
    world.wait()
    print(f"{time.time():.1f} begins", flush=True)
    if world.rank == world.num_ranks - 1:
        stays = args.phase >= len(PHASES)
        arm(backend, args.phase % len(PHASES), partial(time.sleep, 600) if stays else die_now)
    for _ in range(3):
        step(backend, inputs, weights)
    world.wait()


def die_now() -> None:
    os._exit(1)


def see_death(args: argparse.Namespace, phase: int, name: str, log: Path) -> bool:
    """One in processes of its own; says what the first rank's log has."""
    arguments = ["--gpus", str(args.gpus), "--parts", "die", "--phase", str(phase)]
    with log.open("w") as output:
        processes = launch("tests.gpu.two_hosts", args, SOCKETS, arguments, output)
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(args.limit)
        code = processes[0].poll()
        for process in processes:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace")
    said = GONE.search(text)
    print(f"a host that dies {name}: exit code {code}, {said[0] if said else text[-1500:]}")
    return said is not None and bool(code)


def check_deaths(args: argparse.Namespace) -> bool:
    """A few at once: more processes than some ten find no room on a GPU."""
    names = [*PHASES, "in front of the counts, and stays away"]
    with tempfile.TemporaryDirectory(prefix="flashmoe-hosts-") as folder:
        logs = [Path(folder, str(phase)) for phase in range(len(names))]
        with ThreadPoolExecutor(DEATHS_AT_ONCE) as pool:
            seen = pool.map(partial(see_death, args), range(len(names)), names, logs)
            return all(list(seen))


def work(args: argparse.Namespace, parts: dict[str, Part]) -> None:
    """One process."""
    rank, num_ranks = args.rank, args.ranks
    device = torch.device("cpu")
    if args.gpus:
        device = torch.device("cuda", rank % args.gpus)
        torch.cuda.set_device(device)
    world = World(rank, num_ranks, args.hosts, device)
    timeout = datetime.timedelta(seconds=PATIENCE_S)
    backend = "nccl" if args.gpus else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=timeout)
    if args.gpus:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        world.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {version}")
    for name in args.parts:
        begin = time.monotonic()
        found = parts[name](world, args)
        world.wait()
        record = {"part": name, "found": found, "s": round(time.monotonic() - begin, 1)}
        if rank == 0 and args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
        world.say(f"{name}: {record['s']} s")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # what still waits for a peer, or a peer for it, must not keep the process


def free_port() -> int:
    """A port of this machine that nobody listens on.

    Linux gives higher ports to connections, such as gloo's. It could give one to another process
    before the program listens on it.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports from 15000 to 32000 is free")


def launch(
    module: str,
    args: argparse.Namespace,
    environment: dict[str, str],
    arguments: Sequence[str],
    output: IO[str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Starts a module in all processes; see :func:`start`."""
    port, processes = free_port(), []
    for rank in range(args.ranks):
        host = f"host{rank * args.hosts // args.ranks}"
        own = {HOST_VARIABLE: host, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if "NCCL_P2P_DISABLE" in environment:
            own["NCCL_HOSTID"] = host
        command = [sys.executable, "-m", module, *arguments, "--rank", str(rank)]
        environ = {**os.environ, **environment, **own}
        processes.append(
            subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
            if output
            else subprocess.Popen(command, env=environ)
        )
    return processes


def start(
    module: str, args: argparse.Namespace, environment: dict[str, str], arguments: Sequence[str]
) -> bool:
    """Runs a module in all processes.

    Args:
        module: Calls :func:`work`.
        args: How many processes, on which GPUs, as how many hosts.
        environment: Variables of all processes. With ``NCCL_P2P_DISABLE`` each host has an identity
            of its own to NCCL, and NCCL's log is looked at.
        arguments: The module's.

    Returns:
        Whether all has gone well.
    """
    has_sockets = "NCCL_P2P_DISABLE" in environment and args.gpus > 0
    with tempfile.TemporaryDirectory(prefix="flashmoe-hosts-") as folder:
        if has_sockets:
            environment = {**environment, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
            environment["NCCL_DEBUG_FILE"] = f"{folder}/%p"
        processes = launch(module, args, environment, arguments)
        deadline = time.monotonic() + args.limit
        codes: list[int | str] = []
        for process in processes:
            try:
                codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(f"none after {args.limit:.0f} s")
        for process in processes:
            process.kill()
            process.wait()
        if any(codes):
            print(f"failed, exit codes {codes}", flush=True)
        return not any(codes) and (not has_sockets or went_over_sockets(Path(folder)))


def went_over_sockets(folder: Path) -> bool:
    """Says by what NCCL's channels went, and whether that was sockets alone."""
    text = "".join(file.read_text(errors="replace") for file in sorted(folder.iterdir()))
    ways: dict[str, int] = {}
    for way in VIA.findall(text):
        name = re.sub(r"/\d+.*$", "", way)
        ways[name] = ways.get(name, 0) + 1
    said = ", ".join(f"{count} via {way}" for way, count in sorted(ways.items())) or "none"
    print(f"NCCL's channels: {said}", flush=True)
    return set(ways) == {"NET/Socket"}


def make_parser(
    description: str | None, parts: Sequence[str], default: Sequence[str]
) -> argparse.ArgumentParser:
    """The arguments of programs that are such processes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="which the processes share; 0 for processors")
    add("--ranks", type=int, help="processes; default: one a GPU, and at least two")
    add("--hosts", type=int, help="what they are; default: each one is a host")
    add("--parts", nargs="+", choices=parts, default=list(default))
    add("--phase", type=int, help=argparse.SUPPRESS)
    add("--iterations", type=int, default=100, help="at most, of each size")
    add("--seconds", type=float, default=1e9, help="at most, of each size")
    add("--limit", type=float, default=600.0, help="seconds until what hangs is ended")
    add("--tokens", type=int, nargs="+", default=[2**power for power in range(10, 16)])
    add("--overlap", type=int, default=0, choices=(0, 1, 2), help="in FlashMoE's shape")
    add("--out", type=Path, help="takes a line of JSON for each part")
    add("--rank", type=int, help=argparse.SUPPRESS)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    args.ranks = args.ranks or max(2, args.gpus)
    args.hosts = args.hosts or args.ranks
    return args


def main() -> int:
    args = parse(make_parser(__doc__, [*PARTS, "deaths", "die"], [*PARTS, "deaths"]))
    if args.rank is not None:
        work(args, {**PARTS, "die": die})
    chosen = [part for part in args.parts if part in PARTS]
    is_right = not chosen or start(
        "tests.gpu.two_hosts", args, SOCKETS, [*sys.argv[1:], "--parts", *chosen]
    )
    if "deaths" in args.parts:
        is_right &= check_deaths(args)
    print("all right" if is_right else "failed")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
