"""Two processes on one GPU that are two hosts to flashmoe and to NCCL, which joins them by sockets.

    python -m tests.gpu.two_hosts [--iterations 100] [--tokens 1024 2048 ...]

Small layers in every form are compared with the oracle. Then FlashMoE's shape (16 experts of 4,096,
width 1,024, top-2), which its own run over hosts lost messages with beyond 2,048 tokens a GPU: each
number of tokens is compared with one launch over all tokens, and repeated with the same bits.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.backend import ExpertWeights, WeightGrad
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import RoutingError
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.reference.oracle import assert_close
from flashmoe_megatron.select import select_backend
from tests.gpu import steps
from tests.gpu.expected import Results, assert_as_good, expected
from tests.gpu.layers import make_config, zipf
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


def make(config: MoEConfig, **options: object) -> HostsBackend:
    backend = select_backend(config, dist.group.WORLD, "cuda:0", kind="kernel", **options)
    assert isinstance(backend, HostsBackend)
    return backend


def step(backend: HostsBackend, inputs: cases.Inputs, weights: ExpertWeights) -> Results:
    """One forward and backward of this rank."""
    rank = backend.rank
    fc1, fc2 = (
        [WeightGrad(torch.empty_like(one, dtype=torch.float32), False) for one in kind]
        for kind in (weights.fc1, weights.fc2)
    )
    call = (inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank])
    out, saved = backend.forward(*call, weights, training=True)
    grad_x, grad_probs = backend.backward(inputs.grad_out[rank], saved, weights, fc1, fc2)
    backend.raise_pending_fault()
    grad_fc1, grad_fc2 = (torch.stack([one.buffer for one in kind]) for kind in (fc1, fc2))
    return Results(out, grad_x, grad_probs, grad_fc1, grad_fc2)


def check_small(rank: int) -> None:
    """Every form and routing against the oracle, twice each, and a refusal."""
    tokens = [129, 200]
    for changes in ({}, {"topk": 16, "num_experts": 64}, {"topk": 6, "num_experts": 8}):
        config = make_config(2, **changes)
        for options in FORMS.values():
            backend = make(config, **options)
            for routing in ROUTINGS:
                inputs = steps.make_inputs(config, routing, tokens)
                weights = steps.weights_of(config, inputs)[rank]
                want = expected(config, inputs).share(config, tokens, rank)
                got = step(backend, inputs, weights)
                assert_as_good(got, want, times=1.2)
                steps.assert_same_bits(step(backend, inputs, weights), got)
        if rank == 0:
            print(f"right and repeated: {changes or 'small'}, {', '.join(FORMS)}", flush=True)
    config = make_config(2)
    backend = make(config)
    inputs = steps.make_inputs(config, cases.uniform, tokens)
    weights = steps.weights_of(config, inputs)[rank]
    good = inputs.routing_map[rank]
    bad = torch.ones_like(good) if rank == 1 else good
    with pytest.raises(RoutingError, match="^rank 1: token 0 selects 16 experts") as heard:
        backend.forward(inputs.x[rank], inputs.probs[rank], bad, weights, training=True)
    print(f"rank {rank} heard: {heard.value}", flush=True)
    step(backend, inputs, weights)


def check_paper(rank: int, tokens: int, iterations: int, overlap: int) -> None:
    """FlashMoE's shape with so many tokens a rank."""
    config = cases.make_config(
        hidden=1024,
        intermediate=4096,
        num_experts=16,
        topk=2,
        gated=False,
        activation="gelu",
        num_ranks=2,
        max_tokens=tokens,
    )
    inputs = steps.make_inputs(config, cases.uniform, [tokens, tokens], seed=tokens)
    weights = steps.weights_of(config, inputs)[rank]
    backend = make(config, keep="all", host_overlap=overlap)
    first = step(backend, inputs, weights)

    alone = replace(config, num_ranks=1, max_tokens=2 * tokens)
    one_level = KernelBackend(alone, None, "cuda:0")
    all_weights = ExpertWeights(tuple(inputs.fc1), tuple(inputs.fc2))
    grads = [
        [WeightGrad(torch.empty_like(one, dtype=torch.float32), False) for one in kind]
        for kind in (all_weights.fc1, all_weights.fc2)
    ]
    joined = [torch.cat(each) for each in (inputs.x, inputs.probs, inputs.routing_map)]
    out, saved = one_level.forward(*joined, all_weights, training=True)
    grad_x, grad_probs = one_level.backward(torch.cat(inputs.grad_out), saved, all_weights, *grads)
    own, experts = slice(rank * tokens, (rank + 1) * tokens), slice(rank * 8, rank * 8 + 8)
    grad_fc1, grad_fc2 = (torch.stack([one.buffer for one in kind[experts]]) for kind in grads)
    want = Results(out[own], grad_x[own], grad_probs[own], grad_fc1, grad_fc2)
    for name, tensor in vars(first).items():
        assert_close(name, tensor, getattr(want, name), rel_l2=6e-3)
    del want, one_level, saved, out, grads, grad_x, grad_probs, grad_fc1, grad_fc2

    dist.barrier()
    torch.cuda.synchronize()
    before, begin = backend.traffic, time.monotonic()
    for _ in range(iterations):
        steps.assert_same_bits(step(backend, inputs, weights), first)
    torch.cuda.synchronize()
    seconds = (time.monotonic() - begin) / iterations
    after = backend.traffic
    rows = (after.rows_crossed - before.rows_crossed) / iterations
    if rank == 0:
        mib = (after.bytes_crossed - before.bytes_crossed) / iterations / 2**20
        print(
            f"FlashMoE's shape, {tokens} tokens a rank, overlap {overlap}: {iterations} "
            "iterations, every bit as the first, which is one launch's within 6e-3; "
            f"{rows:.0f} rows and {mib:.1f} MiB crossed a rank and iteration, "
            f"{seconds * 1e3:.1f} ms each (bits compared in it)",
            flush=True,
        )


def work(rank: int, args: argparse.Namespace) -> None:
    """One process."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {version}")
    check_small(rank)
    for tokens in args.tokens:
        check_paper(rank, tokens, args.iterations, args.overlap)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384, 32768]
    )
    parser.add_argument("--overlap", type=int, default=0, choices=(0, 1, 2))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        own = {"NCCL_HOSTID": f"host{rank}", "FLASHMOE_HOST_ID": f"host{rank}"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "tests.gpu.two_hosts", *sys.argv[1:], "--rank", str(rank)]
        processes.append(subprocess.Popen(command, env={**os.environ, **SOCKETS, **own}))
    codes = [process.wait() for process in processes]
    print("two hosts: all right" if not any(codes) else f"two hosts: failed, exit codes {codes}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
