"""Measures several links at once: a published table, threads on a CPU, and the links of GPUs.

::

    python -m tools.bench.multipath table
    python -m tools.bench.multipath threads --ranks 4
    python -m tools.bench.multipath gpus [--ranks 2] [--pace 200] [--only links shares] > LINES
    python -m tools.bench.multipath gpus --same-gpu --links host > LINES
    python -m tools.bench.multipath plot LINES PICTURE

``table`` needs no GPU. ``threads`` moves bytes between processes over two links that are paced
4 to 1. ``gpus`` starts one process a GPU, or two on the first one, and measures every link
and what it costs the host, all together over shares, and gathers against NCCL's own, by its kernels
and by copy engines; ``--pace`` makes peer copies as slow as another machine's NVLink, in GB/s.
Every line that is printed is a JSON object.
"""

import argparse
import functools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from examples.arguments import count
from flashmoe_megatron.bench.correctness import relative_errors
from flashmoe_megatron.bench.layers import kernel_layer
from flashmoe_megatron.bench.problem import make_problem
from flashmoe_megatron.bench.shapes import SHAPES
from flashmoe_megatron.bench.stopwatch import in_turns, turn_ms
from flashmoe_megatron.errors import LinkError
from flashmoe_megatron.multipath.balancer import Balancer, chunks_of, cut
from flashmoe_megatron.multipath.links import Piece
from flashmoe_megatron.multipath.memory import SegmentPlace, SharedMemory
from flashmoe_megatron.multipath.multipath import Multipath
from flashmoe_megatron.multipath.peer_copies import PeerCopies
from flashmoe_megatron.multipath.queues import Queues
from flashmoe_megatron.multipath.ring import HostRelay, far_ahead, has_counted
from flashmoe_megatron.ranks import StoreRanks
from tools.arguments import not_negative, positive
from tools.bench import common
from tools.bench.gate import require_gate
from tools.bench.simulated_links import SimulatedLink, measure

PUBLISHED = (
    ("all_reduce", 2, 139, 175, (12, 9)),
    ("all_reduce", 4, 98, 118, (13, 5)),
    ("all_reduce", 8, 107, 109, (1, 1)),
    ("all_gather", 2, 132, 161, (14, 5)),
    ("all_gather", 4, 49, 62, (12, 10)),
    ("all_gather", 8, 21, 26, (12, 7)),
)
"""FlexLink's table on H800: operation, GPUs, GB/s of NCCL and of FlexLink (input over time), and
what PCIe and RDMA carry, in per cent."""

PCIE_GBPS, RDMA_GBPS, LATENCY_US = 22.0, 13.0, 20.0
"""The constants of all rows besides NCCL's own rate: GB/s into each GPU, latency of a link."""

LINKS = ("peer", "host")
"""In the order of shares: what is measured over them is the host's."""

INPUT_BYTES = 256 * 10**6
SIZES = tuple(2**20 * size for size in (1, 16, 64, 256, 1024))
SHARED_SIZES = tuple(2**20 * size for size in (256, 512, 1024))
GATHERED_MIB = (16, 32, 64, 128, 256, 512, 1024)
REDUCED_MIB = (64, 128, 256, 512)
PACER_LIMIT_S = 60.0  # its process imports torch first


def table(step_us: float = 0.0) -> list[dict[str, Any]]:
    """Results of the balancer on simulated links, with the published rows.

    Args:
        step_us: Latency of a relay in each step of a ring; a gather over n GPUs has n - 1 steps and
            a reduction twice as many.
    """
    rows = []
    for operation, ranks, nccl, published, published_shares in PUBLISHED:
        steps = (ranks - 1) * (2 if operation == "all_reduce" else 1)
        inbound = steps if operation == "all_gather" else steps / ranks
        relay_us = LATENCY_US + steps * step_us
        links = [
            SimulatedLink("nvlink", nccl * inbound, LATENCY_US),
            SimulatedLink("pcie", PCIE_GBPS, relay_us),
            SimulatedLink("rdma", RDMA_GBPS, relay_us),
        ]
        # Nothing here costs a host anything.
        balancer = Balancer([link.name for link in links], least_gain=0.0)
        nbytes = round(INPUT_BYTES * inbound)
        shares = balancer.tune(nbytes, functools.partial(measure, links))
        seconds = measure(links, cut(shares, nbytes), balancer.chunks(nbytes))
        gbps = INPUT_BYTES / max(seconds) / 1e9
        rows.append(
            {
                "operation": operation,
                "gpus": ranks,
                "nccl": nccl,
                "published": published,
                "simulated": round(gbps, 1),
                "off": round(gbps / published - 1, 3),
                "published_shares": published_shares,
                "shares": [round(share, 3) for share in shares],
                "trials": balancer.trials(nbytes),
            }
        )
    return rows


class PacedRelay(HostRelay):
    """The relay between threads, whose rank sends no more than so many bytes per second.

    Args:
        ranks: The ranks.
        queues: Threads.
        rate: Bytes per second.
        name: The link's.
    """

    def __init__(self, ranks: StoreRanks, queues: Queues, rate: float, name: str) -> None:
        self.name, self._rate = name, rate
        self._lock, self._free_at = threading.Lock(), 0.0
        super().__init__(ranks, queues)

    def admit(self, stream: Any, nbytes: int) -> None:
        """Has a queue wait until so many more bytes may have left."""
        self.queues.run(stream, functools.partial(self._take, nbytes))

    def _take(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            left = self._free_at - time.monotonic()
        time.sleep(max(0.0, left))


def threads(rank: int, ranks: int, args: argparse.Namespace) -> None:
    """Wall clock of the operations over two paced links of a CPU, and over the fast one alone."""
    rate = args.mbps * 1e6
    links = {
        name: functools.partial(PacedRelay, rate=rate / slower, name=name)
        for name, slower in (("fast", 1), ("slow", 4))
    }
    took: dict[tuple[str, int], float] = {}
    part = torch.ones(args.mib * 2**18 // ranks, dtype=torch.int32)
    whole = torch.ones(part.numel() * ranks, dtype=torch.int32)
    calls: dict[str, Callable[[Multipath], Any]] = {
        "all_gather": lambda multipath: multipath.all_gather(whole, part),
        "reduce_scatter": lambda multipath: multipath.reduce_scatter(part, whole),
        "all_reduce": lambda multipath: multipath.all_reduce(whole),
    }
    for names in (["fast"], ["fast", "slow"]):
        with Multipath(
            device=torch.device("cpu"), links=[links[name] for name in names], min_bytes=1
        ) as multipath:
            for name, call in calls.items():
                call(multipath)  # tries shares
                took[name, len(names)] = _wall(functools.partial(call, multipath), 5)
    for name in calls:
        alone, both = took[name, 1], took[name, 2]
        _say(rank, bench="threads", ranks=ranks, operation=name, alone_s=alone, ratio=both / alone)


class PacedCopies(PeerCopies):
    """Peer copies that another process of this host lets go on at a rate, by the clock."""

    def __init__(self, ranks: StoreRanks, queues: Queues, gbps: float) -> None:
        super().__init__(ranks, queues)
        self._orders = SharedMemory.create(4096 + 8 * 1024)
        self._words = queues.register(self._orders.address, self._orders.nbytes)
        self._count = 0
        self._asked: dict[Any, int] = {}
        context = multiprocessing.get_context("spawn")
        place = self._orders.place
        self._process = context.Process(target=_keep_pace, args=(place, gbps), daemon=True)
        self._process.start()
        _wait_for_pacer(self._process, self._orders)

    def admit(self, stream: Any, nbytes: int) -> None:
        """Asks for the chunk, in the stream, and waits for leave."""
        self._orders.word(4096 + self._count % 1024 * 4).value = nbytes
        self._count += 1
        # Streams may ask out of turn, so that each of them has a word.
        word = self._asked.setdefault(stream, 64 * (2 + len(self._asked)))
        self.queues.write_value(stream, self._words + word, self._count)
        self.queues.wait_value(stream, self._words, self._count)

    def has_arrived(self, count: int) -> bool:
        """Returns whether this rank's streams also have leave; else they wait on."""
        return super().has_arrived(count) and has_counted(self._orders.word(0), self._count)

    def release(self) -> None:
        """Lets go of the streams that wait for the process, too, which may have ended."""
        super().release()
        self._orders.word(0).value = far_ahead(self._count)

    def close(self) -> None:
        """Ends the process, too."""
        super().close()
        self._process.terminate()
        self.queues.unregister(self._orders.address)


def _wait_for_pacer(
    process: BaseProcess, memory: SharedMemory, limit_s: float = PACER_LIMIT_S
) -> None:
    end = time.monotonic() + limit_s
    while memory.word(64).value != 1:
        if process.exitcode is not None:
            raise LinkError(f"the pacer ended with status {process.exitcode} before it was ready")
        if time.monotonic() > end:
            process.terminate()
            raise LinkError(f"the pacer is not ready after {limit_s:g} s")
        process.join(0.01)


def _keep_pace(place: SegmentPlace, gbps: float) -> None:
    """Gives leave for chunk after chunk, each when the one before would have ended."""
    memory = SharedMemory.open(place)
    given, ready = memory.word(0), memory.word(64)
    asked = [memory.word(at) for at in range(128, 640, 64)]
    ready.value, count, free_at, clock = 1, 0, 0.0, time.perf_counter
    while True:
        if max(word.value for word in asked) <= count:
            continue
        now = clock()
        # A copy takes a part of its own time; the next may begin that much earlier.
        free_at = max(free_at, now - 50e-6)
        while clock() < free_at:
            pass
        free_at += memory.word(4096 + count % 1024 * 4).value / (gbps * 1e9)
        count += 1
        given.value = count


def gpus(rank: int, ranks: int, args: argparse.Namespace) -> None:
    """Every link, all together, and the host's part."""
    device = torch.device("cuda", 0 if args.same_gpu else rank)
    torch.cuda.set_device(device)

    def paced(ranks: StoreRanks, queues: Queues) -> PeerCopies:
        return PacedCopies(ranks, queues, args.pace)

    links = [paced if name == "peer" and args.pace else name for name in args.links]
    open_links = functools.partial(Multipath, links=links, min_bytes=1, timeout=60, device=device)
    about = {"bench": "gpus", "gpu": torch.cuda.get_device_name(), "ranks": ranks}
    about |= {"same_gpu": args.same_gpu, "pace": args.pace}
    if "right" in args.only:
        with open_links() as spoilt:  # its shares stay random
            _say(rank, **about, right=_right(spoilt, args.random_sizes))
    with open_links() as both:
        if "links" in args.only:
            _links(rank, about, both)
        if "shares" in args.only and len(links) > 1:
            for size in SHARED_SIZES:
                _sweep(rank, about, both, size)
    if "gathers" in args.only:
        _gathers(rank, about, device)
    if "reductions" in args.only:
        _reductions(rank, about, device)
    if "launch" in args.only:
        _beside_launch(rank, about, device)


def _links(rank: int, about: dict[str, Any], both: Multipath) -> None:
    """Rates of every link alone, and of all together by the shares that the balancer chooses."""
    transfers = both.transfers
    names = [link.name for link in transfers.links]
    for size in SIZES:
        inbound, mib = size * (both.num_ranks - 1), size // 2**20
        transfers.tune(transfers.load("a trial", _one_way(both, size)))
        for index, link in enumerate(names):
            alone = [float(i == index) for i in range(len(names))]
            chunk = transfers.balancer.models(inbound)[index].chunk / 2**20
            for way in ("one way", "two ways, each"):
                gbps, core = _rate(both, size, alone, way != "one way")
                row = {"link": link, "way": way, "mib": mib, "chunk_mib": chunk}
                _say(rank, **about, **row, gbps=gbps, core=core)
        if len(names) > 1:
            shares = transfers.balancer.shares(inbound)
            gbps, core = _rate(both, size, shares)
            row = {"link": "together", "way": "one way", "mib": mib, "shares": shares}
            _say(rank, **about, **row, gbps=gbps, core=core)


def _gathers(rank: int, about: dict[str, Any], device: torch.device) -> None:
    """Gathers of 16 MiB to 1 GiB a rank and NCCL's two ways, alternately; each is checked first.

    A rank's input is its part of the output, as Megatron has it. Copy engines of NCCL's need memory
    that ranks share; peer copies are measured with and without.
    Below the size at which several links pay, all but the copy engines run NCCL's.
    """
    policy = dist.ProcessGroupNCCL.Options()
    policy.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    plain = dist.new_group(backend="nccl")
    engines = dist.new_group(backend="nccl", pg_options=policy)
    symm_mem.set_backend("NCCL")
    dist.barrier(group=engines)  # a communicator has to be there before memory is registered
    num_ranks = dist.get_world_size()

    def allocate(name: str, length: int) -> torch.Tensor:
        if name == "multipath":
            return shared[:length]
        if name != "nccl copy engines":
            return torch.empty(length, dtype=torch.uint8, device=device)
        tensor: torch.Tensor = symm_mem.empty(length, dtype=torch.uint8, device=device)
        symm_mem.rendezvous(tensor, engines)
        return tensor

    failed: dict[str, str] = {}
    # NCCL's batches of copies are refused by the default stream.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with (
        Multipath(plain, device=device, timeout=60) as multipath,
        torch.cuda.stream(side),
    ):
        shared = multipath.empty(num_ranks * GATHERED_MIB[-1] * 2**20)
        collectives: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
            "multipath": multipath.all_gather,
            "multipath, any memory": multipath.all_gather,
            "nccl": functools.partial(dist.all_gather_into_tensor, group=plain),
            "nccl copy engines": functools.partial(dist.all_gather_into_tensor, group=engines),
        }
        for mib in GATHERED_MIB:
            size = mib * 2**20
            ways: dict[str, Callable[[], Any]] = {}
            for name, collective in collectives.items():
                if name in failed:
                    continue
                output = allocate(name, num_ranks * size)
                given = output[rank * size : (rank + 1) * size].fill_(rank + 1)
                way = functools.partial(collective, output, given)
                try:
                    way()
                except dist.DistBackendError as error:
                    failed[name] = str(error).splitlines()[-1]
                    continue
                parts = enumerate(output.chunk(num_ranks))
                if not all(bool((part == other + 1).all()) for other, part in parts):
                    raise SystemExit(f"{name}, {mib} MiB: rank {rank} has wrong bytes")
                ways[name] = way
            inbound = size * (num_ranks - 1)
            gbps = _gbps(ways, inbound)
            shares = {}
            balancer = multipath.transfers.balancer_for(is_direct=True, to_all=True)
            if balancer.is_tuned(inbound):
                shares = dict(zip(balancer.names, balancer.shares(inbound), strict=True))
            _say(rank, **about, gather_mib=mib, gbps=gbps, shares=shares, failed=failed)
            del ways, way, given, output


def _reductions(rank: int, about: dict[str, Any], device: torch.device) -> None:
    """Sums in float32 of 64 to 512 MiB a rank and NCCL's, alternately; each is checked first."""
    plain = dist.new_group(backend="nccl")
    num_ranks = dist.get_world_size()
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with Multipath(plain, device=device, timeout=60) as multipath, torch.cuda.stream(side):
        multipath.sums_over_links = True  # also those of more ranks than it would sum
        for mib in REDUCED_MIB:
            length = mib * 2**18
            given = torch.full((num_ranks * length,), float(rank + 1), device=device)
            output = torch.zeros(length, device=device)
            ways: dict[str, Callable[[], Any]] = {
                "multipath": functools.partial(multipath.reduce_scatter, output, given),
                "nccl": functools.partial(dist.reduce_scatter_tensor, output, given, group=plain),
            }
            for name, way in ways.items():
                output.zero_()
                way()
                if not bool((output == num_ranks * (num_ranks + 1) / 2).all()):
                    raise SystemExit(f"{name}, {mib} MiB: rank {rank} has a wrong sum")
            gbps = _gbps(ways, mib * 2**20 * (num_ranks - 1))
            _say(rank, **about, reduction_mib=mib, gbps=gbps)
            del ways, way, given, output


def _gbps(ways: dict[str, Callable[[], Any]], inbound: int) -> dict[str, float]:
    """GB/s into a rank of each way, alternately, as the slowest rank has it."""
    times = max(5, min(20, 2**33 // inbound))  # small transfers need more, against chance
    calls = {name: functools.partial(turn_ms, way, times) for name, way in ways.items()}
    taken = {name: statistics.median(each) for name, each in in_turns(calls, 6).items()}
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, taken)
    return {name: round(inbound / max(of[name] for of in values) / 1e6, 1) for name in ways}


def _beside_launch(rank: int, about: dict[str, Any], device: torch.device) -> None:
    """A layer of Qwen3-30B on each GPU, alone and while 256 MiB a rank are gathered concurrently.

    The layer has to pass the correctness gate of ``bench_layer`` first.
    """
    problem = make_problem(SHAPES["qwen3-30b"].one_of(4), device=device)
    layer = kernel_layer(problem, row_bound=1.2)
    require_gate(f"rank {rank}, qwen3-30b", relative_errors(problem, layer.results()))
    plain = dist.new_group(backend="nccl")
    given = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    output = torch.empty(dist.get_world_size() * given.numel(), dtype=torch.uint8, device=device)
    side = torch.cuda.Stream(device)

    def timed(gather: Callable[[], Any], times: int) -> float:
        taken = []
        for _ in range(9):
            torch.cuda.synchronize()
            dist.barrier()
            with torch.cuda.stream(side):
                for _ in range(times):
                    gather()
            taken.append(turn_ms(layer.forward_and_backward, 2))
        return statistics.median(taken)

    ms = {"alone": timed(lambda: None, 0)}
    for link, times in (("host", 4), ("peer", 20)):
        with Multipath(plain, device=device, links=[link], min_bytes=1, timeout=60) as multipath:
            gather = functools.partial(multipath.all_gather, output, given)
            gather()
            ms[f"beside {link}"] = timed(gather, times)
    gather = functools.partial(dist.all_gather_into_tensor, output, given, plain)
    ms["beside nccl"] = timed(gather, 20)
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, ms)
    _say(rank, **about, layer_ms={name: max(one[name] for one in values) for name in ms})


def _sweep(rank: int, about: dict[str, Any], both: Multipath, size: int) -> None:
    """Rates over the second link's share, one way, and what the balancer chooses."""
    transfers = both.transfers
    inbound = size * (both.num_ranks - 1)
    transfers.tune(transfers.load("a trial", _one_way(both, size)))
    chosen = transfers.balancer.shares(inbound)

    def rate(share: float) -> float:
        return _rate(both, size, [1 - share, share], seconds=0.1)[0]

    rates = {percent: rate(percent / 100) for percent in [*range(0, 41, 2), 100]}
    calls = {"peer": lambda: rate(0.0), "all": lambda: rate(chosen[1])}
    turns = in_turns(calls, 4)
    alone, tuned = (statistics.median(turns[name]) for name in calls)
    _say(
        rank,
        **about,
        mib=size // 2**20,
        by_host_percent=rates,
        best_percent=max(rates, key=lambda percent: rates[percent]),
        chosen_percent=round(100 * chosen[1], 1),
        trials=transfers.balancer.trials(inbound),
        peer_alone=alone,
        gbps=tuned,
        gain=round(tuned / alone - 1, 3),
    )


def _one_way(both: Multipath, size: int) -> list[Piece]:
    """The pieces that every even rank sends to the next one; with two ranks, one direction."""
    empty = torch.empty(0, dtype=torch.uint8, device=both.device)
    sends = both.rank % 2 == 0
    full = torch.zeros(size, dtype=torch.uint8, device=both.device)
    partner = both.rank + 1 if sends else both.rank - 1
    order = [(both.rank + step) % both.num_ranks for step in range(1, both.num_ranks)]
    one, other = (full, empty) if sends else (empty, full)
    return [
        Piece(peer, one, other) if peer == partner else Piece(peer, empty, empty) for peer in order
    ]


def _two_ways(both: Multipath, size: int) -> list[Piece]:
    full = torch.zeros((2, size), dtype=torch.uint8, device=both.device)
    order = [(both.rank + step) % both.num_ranks for step in range(1, both.num_ranks)]
    return [Piece(peer, full[0], full[1]) for peer in order]


def _rate(
    both: Multipath,
    size: int,
    shares: Sequence[float],
    two_way: bool = False,
    seconds: float = 0.2,
) -> tuple[float, float]:
    """GB/s into a rank, and the part of a core that this process has used meanwhile."""
    transfers = both.transfers
    pieces = (_two_ways if two_way else _one_way)(both, size)
    models = transfers.balancer.models(size * (both.num_ranks - 1))
    carried, chunks = cut(shares, size), chunks_of(models, shares)
    repeats = max(8, min(500, int(seconds * 100e9 / size)))
    ends: list[torch.cuda.Event] = []

    def move(times: int) -> None:
        for index in range(times):
            transfers.fly("a measurement", pieces, carried, chunks)
            if index % 4 == 3:  # the driver spins where more is issued than it holds
                ends.append(_marked())
                ends[-2 if len(ends) > 1 else -1].synchronize()
        ends.append(_marked())
        ends[-1].synchronize()

    move(2)
    _meet(both)
    began, cpu = time.perf_counter(), time.process_time()
    move(repeats)
    took, used = time.perf_counter() - began, time.process_time() - cpu
    _meet(both)
    received = size * ((both.num_ranks - 1) if two_way else 1)
    values: list[Any] = [None] * both.num_ranks
    dist.all_gather_object(values, (received * repeats / took / 1e9, used / took))
    return round(min(rate for rate, _ in values), 2), round(max(core for _, core in values), 4)


def _marked() -> torch.cuda.Event:
    """An event after all issued work; a host waits for it without spinning."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _meet(both: Multipath) -> None:
    torch.cuda.synchronize()
    dist.barrier()


def _right(both: Multipath, count: int, largest: int = 2**26) -> dict[str, Any]:
    """Gathers random numbers of random lengths by random shares, and looks at every byte.

    Raises:
        SystemExit: A byte is wrong on this rank, or a link has carried nothing.
    """
    transfers = both.transfers
    draw = random.Random(1)  # the same on every rank
    moved, fly = dict.fromkeys((link.name for link in transfers.links), 0), transfers.fly
    shares: list[float] = []

    def counted(*args: Any, **kwargs: Any) -> list[Any]:
        flights = fly(*args, **kwargs)
        for link, flight in zip(transfers.links, flights, strict=True):
            moved[link.name] += flight.nbytes if flight else 0
        return flights

    transfers.fly = counted  # type: ignore[method-assign]
    balancer = transfers.balancer_for(is_direct=False, to_all=True)
    balancer.shares = lambda nbytes: tuple(shares)  # type: ignore[method-assign]
    wrong = 0
    for index in range(count):
        size = int(largest ** draw.random() * (1 + draw.random()))
        weights = [draw.random() for _ in transfers.links]
        shares[:] = [weight / sum(weights) for weight in weights]
        inbound = size * (both.num_ranks - 1)
        if not balancer.is_tuned(inbound):  # by a rate that needs no trial
            balancer.tune(inbound, lambda carried, chunks: [1e-11 * one for one in carried])
        inputs = []
        for rank in range(both.num_ranks):
            torch.manual_seed(index * both.num_ranks + rank)
            inputs.append(torch.randint(256, (size,), dtype=torch.uint8, device=both.device))
        output = torch.zeros(both.num_ranks * size, dtype=torch.uint8, device=both.device)
        both.all_gather(output, inputs[both.rank])
        wrong += not torch.equal(output, torch.cat(inputs))
    if not all(moved.values()):
        raise SystemExit(f"{count} gathers moved {moved} bytes: wanted some by every link")
    if wrong:
        raise SystemExit(f"rank {both.rank}: {wrong} of {count} gathers have wrong bytes")
    return {"sizes": count, "bytes": moved}


def _wall(call: Callable[[], Any], repeats: int) -> float:
    took = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    slowest = torch.tensor([statistics.median(took)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 4)


def plot(lines: str, picture: str) -> None:
    """Draws rates over sizes, for every link and together, from the lines of ``gpus``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates: dict[str, dict[int, float]] = {}
    for one in common.read_record(Path(lines)):
        if one.get("way") == "one way":
            rates.setdefault(one["link"], {})[one["mib"]] = one["gbps"]
    if not rates:
        raise SystemExit(f"{lines} has no rates: wanted the lines of gpus --only links")
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for link, by_size in rates.items():
        axes.plot(list(by_size), list(by_size.values()), marker="o", label=link)
    axes.set(xscale="log", xlabel="MiB to a rank", ylabel="GB/s into a rank, one way")
    axes.legend()
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, bbox_inches="tight")


def _say(rank: int, **values: Any) -> None:
    if rank == 0:
        print(json.dumps(values), flush=True)


def _rank(rank: int, ranks: int, store: str, run: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    run(rank, ranks, args)
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["table", "threads", "gpus", "plot"])
    parser.add_argument("files", nargs="*", help="plot: the lines of gpus, and the picture")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--step-us", type=float, default=0.0, help="table: latency of a ring's step"
    )
    parser.add_argument("--mbps", type=positive, default=20, help="threads: the fast link's MB/s")
    parser.add_argument("--mib", type=count, default=16, help="threads: the size of the whole")
    parser.add_argument("--same-gpu", action="store_true", help="gpus: all processes on the first")
    parser.add_argument("--pace", type=float, default=0.0, help="gpus: GB/s of peer copies")
    parser.add_argument("--links", nargs="+", default=LINKS, choices=LINKS)
    parser.add_argument("--random-sizes", type=not_negative, default=200)
    parser.add_argument(
        "--only",
        nargs="+",
        default=["right", "links", "shares"],
        choices=["right", "links", "shares", "gathers", "reductions", "launch"],
    )
    args = parser.parse_args(arguments)
    args.links = [name for name in LINKS if name in args.links]
    wanted = 2 if args.what == "plot" else 0
    if len(args.files) != wanted:
        parser.error(f"{args.what} takes {wanted} files, got {' '.join(args.files) or 'none'}")
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: wanted at least 2, between which links are")
    return args


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if args.what == "table":
        for row in table(args.step_us):
            print(json.dumps(row))
        return 0
    if args.what == "plot":
        plot(*args.files)
        return 0
    if args.what == "gpus":
        if not common.has_gpu():
            return 2
        here, needed = torch.cuda.device_count(), 1 if args.same_gpu else args.ranks
        if here < needed:
            raise SystemExit(f"{here} GPUs are here: wanted {needed}, or --same-gpu")
    run = {"threads": threads, "gpus": gpus}[args.what]
    store = os.path.join(tempfile.mkdtemp(prefix="flashmoe-multipath-"), "store")
    # Pacers are children of the ranks, which daemons cannot have.
    torch.multiprocessing.spawn(_rank, (args.ranks, store, run, args), args.ranks, daemon=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
