"""Times exchanges, products and copies of several sizes, and lays a line through each.

A time is the slowest rank's, the median of several turns, of calls that follow one another. The
host issues them while the GPU sleeps, as it is ahead of the GPU in a layer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashmoe_megatron.hosts.grid import HostGrid, host_groups
from flashmoe_megatron.schedule.fit import Fit, machine_of
from flashmoe_megatron.schedule.line import fit_line
from flashmoe_megatron.scheduled.plan import Routes, Table, make_parts
from flashmoe_megatron.scheduled.products import product

CALLS = 5
CYCLES_PER_SECOND = 2e9
"""A GPU's clock, about."""
SPAN = 32
COPY_SPAN = 8
MOST_PARTS = 9
Sample = tuple[float, float]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        hidden: Width of rows.
        intermediate: Columns of a product.
        num_experts: Experts of a rank, whose products are one.
        rows: Most rows of a product or a copy.
        num_bytes: Most bytes of an exchange.
        points: Sizes of each, at even ratios.
        turns: How often each is timed.
    """

    hidden: int
    intermediate: int
    num_experts: int
    rows: int
    num_bytes: int
    points: int = 8
    turns: int = 7


def measure(
    group: dist.ProcessGroup | None,
    grid: HostGrid,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
    *,
    timeout: float = 120.0,
) -> Fit:
    """Fits this machine. Collective over the group.

    Args:
        group: The expert-parallel group, ``None`` for one rank.
        grid: How its ranks lie on hosts.
        device: This rank's.
        dtype: The rows'.
        sizes: What is measured.
        timeout: Seconds that an exchange waits for a rank.
    """
    clock = _Clock(group, device, sizes)
    samples = {
        "product": _products(clock, dtype, sizes),
        "copy": _copies(clock, dtype, sizes),
        "cut": _cuts(clock, grid.num_hosts * grid.ranks_per_host, sizes),
    }
    if group is not None and dist.get_world_size(group) > 1:
        for name, exchange in _EXCHANGES.items():
            samples[name] = _exchanges(clock, exchange, group, sizes)
        if grid.num_hosts > 1 and grid.ranks_per_host > 1:
            groups = host_groups(group, grid, timeout=timeout)
            assert groups.within is not None
            for name, part in (("within", groups.within), ("rail", groups.rail)):
                samples[f"all_to_all_{name}"] = _exchanges(clock, _all_to_all, part, sizes)
    lines = {name: fit_line(*zip(*pairs, strict=True)) for name, pairs in samples.items()}
    dtype_name = str(dtype).removeprefix("torch.")
    return Fit(machine_of(grid, device), dtype_name, lines, samples)


class _Clock:
    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, sizes: Sizes) -> None:
        self.device = device
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._turns = sizes.turns

    def seconds(self, call: Callable[[], object], *, of_host: bool = False) -> float:
        """One call's, on a GPU without the host's, or of a host that waits for each turn.

        Collective over the group.
        """
        call()
        begin = time.perf_counter()
        call()
        issue_s = 2 * (CALLS + 1) * (time.perf_counter() - begin)
        is_of_host = of_host or self.device.type != "cuda"
        turns = [
            self._host_turn(call) if is_of_host else self._gpu_turn(call, issue_s)
            for _ in range(self._turns)
        ]
        taken = torch.tensor(turns, device=self.device)
        if self._group is not None:
            dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=self._group)
        return float(taken.median())

    def _host_turn(self, call: Callable[[], object]) -> float:
        self._meet()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        self._synchronize()
        return (time.perf_counter() - begin) / CALLS

    def _gpu_turn(self, call: Callable[[], object], issue_s: float) -> float:
        self._meet()
        torch.cuda._sleep(int(issue_s * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        call()  # in which ranks that begin late are waited for
        events[0].record()
        for _ in range(CALLS):
            call()
        events[1].record()
        self._synchronize()
        return float(events[0].elapsed_time(events[1])) / CALLS / 1e3

    def _meet(self) -> None:
        """Has all ranks begin a turn together, with nothing left of the last one."""
        if self._group is not None:
            dist.barrier(self._group)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def even_ratios(most: int, points: int, span: int = SPAN) -> list[int]:
    """Sizes from a part of the most, which is so many times as much, to the most."""
    ratio = span ** (1 / (points - 1))
    return sorted({max(round(most / ratio**i), 1) for i in range(points)})


def _products(clock: _Clock, dtype: torch.dtype, sizes: Sizes) -> list[Sample]:
    """Times of grouped products by their floating-point operations."""
    hidden, width, experts = sizes.hidden, sizes.intermediate, sizes.num_experts
    weights = torch.randn(experts, hidden, width, device=clock.device).to(dtype)
    samples = []
    for per_expert in even_ratios(sizes.rows // experts, sizes.points):
        counts = [per_expert] * experts
        ends = torch.tensor(counts, device=clock.device).cumsum(0).int()
        rows = torch.randn(sum(counts), hidden, device=clock.device).to(dtype)
        taken = clock.seconds(lambda: product(rows, weights, ends, counts))  # noqa: B023
        samples.append((2.0 * len(rows) * hidden * width, taken))
    return samples


def _copies(clock: _Clock, dtype: torch.dtype, sizes: Sizes) -> list[Sample]:
    """Times of rows that are picked, by bytes that are written; of more than a cache takes."""
    samples = []
    for count in even_ratios(sizes.rows, sizes.points, COPY_SPAN):
        rows = torch.randn(count, sizes.hidden, device=clock.device).to(dtype)
        index = torch.randperm(count, device=clock.device)
        taken = clock.seconds(lambda: rows.index_select(0, index))  # noqa: B023
        samples.append((float(rows.nbytes), taken))
    return samples


def _cuts(clock: _Clock, num_ranks: int, sizes: Sizes) -> list[Sample]:
    """Times of finding out which rows parts have, by the number of parts."""
    local, device = sizes.num_experts, clock.device
    count = max(sizes.rows // (local * num_ranks), MOST_PARTS)
    host = Table.of([count] * local * num_ranks, local)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    ends = torch.empty(local, dtype=torch.int32, device=device)
    routes = Routes(empty, empty, empty, host, host, ends)
    return [
        (float(n), clock.seconds(lambda: make_parts(routes, n), of_host=True))  # noqa: B023
        for n in range(2, MOST_PARTS + 1)
    ]


def _all_to_all(buffer: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    received = torch.empty_like(buffer)
    return lambda: dist.all_to_all_single(received, buffer, group=group)


def _all_gather(buffer: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    own = buffer[: len(buffer) // dist.get_world_size(group)].clone()
    return lambda: dist.all_gather_into_tensor(buffer, own, group=group)


def _reduce_scatter(buffer: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    own = torch.empty_like(buffer[: len(buffer) // dist.get_world_size(group)])
    return lambda: dist.reduce_scatter_tensor(own, buffer, group=group)


def _all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.all_reduce(buffer, group=group)


_Exchange = Callable[[torch.Tensor, dist.ProcessGroup], Callable[[], object]]
_EXCHANGES: dict[str, _Exchange] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}


def _exchanges(
    clock: _Clock, exchange: _Exchange, group: dist.ProcessGroup, sizes: Sizes
) -> list[Sample]:
    """Times of a collective by the bytes of a rank's larger buffer, which is of float32."""
    ranks = dist.get_world_size(group)
    samples = []
    for elements in even_ratios(max(sizes.num_bytes // 4 // ranks, 1), sizes.points):
        buffer = torch.zeros(elements * ranks, device=clock.device)
        samples.append((float(buffer.nbytes), clock.seconds(exchange(buffer, group))))
    return samples
