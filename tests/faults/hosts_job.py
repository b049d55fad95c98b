"""What one process does in the tests of hosts that die, and of many ranks.

Processes fork from one that has imported torch and start at once: sixteen of them are affordable.
"""

import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.hosts.grid import HOST_VARIABLE
from flashmoe_megatron.oracle import moe_reference
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.forks import ForkServer
from tests.unit import cases

PATIENCE_S = 120.0
COMPUTE_TIMEOUT_S = 900.0
SERVER = ForkServer(__name__)
TIMEOUT_S = 20.0
OPERATIONS = ("gather", "exchange")
PHASES = {
    "in front of the counts": 0,
    "in front of the rows": 1,
    "in front of the routes": 2,
    "in front of the launch": 3,
    "in front of the shares": 4,
    "in front of the gradients": 5,
    "in front of the gradients' shares": 6,
    "in front of the routes' gradients": 7,
}
"""Where a host may die: numbers of exchanges and launches of a forward and a backward."""


def run_hosts(
    job: Callable[..., Any], num_ranks: int, hosts: int, *args: Any, patience_s: float = PATIENCE_S
) -> list[Any]:
    """Calls ``job(rank, hosts, *args)`` on fresh gloo processes.

    Returns:
        Each rank's result, by rank; ``None`` for one that died.
    """
    with tempfile.TemporaryDirectory(prefix="flashmoe-hosts-") as folder:
        store = str(Path(folder) / "store")
        started = [
            SERVER.fork(_serve, job, rank, num_ranks, hosts, store, args)
            for rank in range(num_ranks)
        ]
        pipes = [pipe for _, pipe in started]
        found: dict[int, Any] = {}
        deadline = time.monotonic() + patience_s
        while len(found) < num_ranks:
            open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
            for pipe in wait(open_pipes, timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                try:
                    found[pipes.index(pipe)] = pipe.recv()
                except EOFError:
                    found[pipes.index(pipe)] = None
            if time.monotonic() > deadline:
                break
        for process, pipe in started:
            process.kill()
            process.join()
            pipe.close()
        silent = sorted(set(range(num_ranks)) - set(found))
        assert not silent, f"ranks {silent} did not answer within {patience_s} s"
        return [found[rank] for rank in range(num_ranks)]


def _serve(
    pipe: Connection,
    job: Callable[..., Any],
    rank: int,
    num_ranks: int,
    hosts: int,
    store: str,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ[HOST_VARIABLE] = f"host{rank * hosts // num_ranks}"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    pipe.send(job(rank, hosts, *args))
    os._exit(0)


_Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, probabilities and routing map of a rank."""


def _inputs(config: MoEConfig, rank: int) -> tuple[_Call, ExpertWeights]:
    """Tokens of a rank and experts of all."""
    one = cases.make_config(**{**vars(config), "num_ranks": 1})
    inputs = cases.make_inputs(one, cases.uniform, [config.max_tokens], dtype=torch.float32)
    g = cases.generator(rank + 1)
    x = torch.randn(config.max_tokens, config.hidden, generator=g)
    call = (x, inputs.probs[0], inputs.routing_map[0])
    return call, ExpertWeights(tuple(inputs.fc1), tuple(inputs.fc2))


def _share(config: MoEConfig, rank: int, weights: ExpertWeights) -> ExpertWeights:
    own = slice(rank * config.num_local_experts, (rank + 1) * config.num_local_experts)
    return ExpertWeights(weights.fc1[own], weights.fc2[own])


def _step(backend: HostsBackend, call: _Call, weights: ExpertWeights) -> tuple[torch.Tensor, ...]:
    out, saved = backend.forward(*call, weights, training=True)
    grads = [
        [WeightGrad(torch.empty_like(one), False) for one in kind]
        for kind in (weights.fc1, weights.fc2)
    ]
    return out, *backend.backward(out, saved, weights, *grads)


def arm(backend: HostsBackend, operation: int, end: Callable[[], object]) -> None:
    """Calls ``end`` in front of the so many-th exchange or launch from now on."""
    left = operation

    def ending(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                end()
            left -= 1
            return method(*args, **options)

        return run

    for owner, names in ((backend._rail, OPERATIONS), (backend.within, ("forward",))):
        for name in names:
            mock.patch.object(owner, name, ending(getattr(owner, name))).start()


def die(rank: int, hosts: int, victim: int, operation: int) -> str:
    """Trains until an error; the victim dies in front of its so many-th exchange, or in a launch.

    Returns:
        The error's kind and message. Who awaits it ends a rank that waits for much longer.
    """
    num_ranks = dist.get_world_size()
    config = cases.make_config(num_ranks=num_ranks, max_tokens=32)
    call, weights = _inputs(config, rank)
    backend = select_backend(config, dist.group.WORLD, "cpu", timeout=TIMEOUT_S)
    assert isinstance(backend, HostsBackend)
    own = _share(config, rank, weights)
    _step(backend, call, own)
    if rank == victim:
        arm(backend, operation, lambda: os._exit(1))
    try:
        for _ in range(3):
            _step(backend, call, own)
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return "no error"


def compute(rank: int, hosts: int, tokens: int, steps: int) -> tuple[float, int, float]:
    """Layers of FlashMoE's width with so many tokens, forward and backward, again and again.

    Returns:
        The largest relative error of an output, the rows that have crossed, and a step's seconds.
    """
    num_ranks = dist.get_world_size()
    config = cases.make_config(
        hidden=1024, intermediate=64, num_experts=16, topk=2, num_ranks=num_ranks, max_tokens=tokens
    )
    call, weights = _inputs(config, rank)
    backend = select_backend(config, dist.group.WORLD, "cpu", timeout=COMPUTE_TIMEOUT_S)
    assert isinstance(backend, HostsBackend)
    own = _share(config, rank, weights)
    begin = time.monotonic()
    first = _step(backend, call, own)
    for _ in range(steps - 1):
        for got, wanted in zip(_step(backend, call, own), first, strict=True):
            assert torch.equal(got, wanted)
    seconds = (time.monotonic() - begin) / steps
    out = first[0]
    del first
    want = moe_reference(*call, weights.fc1, weights.fc2, **cases.form_of(config))
    error = float((out - want).norm() / want.norm())
    return error, backend.traffic.rows_crossed, seconds
