"""Times exchanges, products, copies and the host at several sizes, and fits a line to each."""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.config import DIM_GRANULE, Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid, arrange, host_groups, host_name
from flashmoe_megatron.measured import start
from flashmoe_megatron.measured.clock import Clock, Work
from flashmoe_megatron.measured.fit import (
    GATHER,
    Beside,
    Fit,
    beside_gather,
    fit_line,
    machine_of,
    write_fit,
)
from flashmoe_megatron.measured.start import RandomLayer
from flashmoe_megatron.options import BackendOptions, ExchangeKind, add_flags, add_sizes
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.separate.backend import ScheduledBackend, steps_for
from flashmoe_megatron.separate.exchange import Copies, kind_of
from flashmoe_megatron.separate.ways import TensorGroup
from flashmoe_megatron.streams import mark, wait

SPAN = 32
COPY_SPAN = 8
PARTS = (1, 2, 3, 4, 6, 8)
TOKENS = 256
"""Tokens of a layer that keeps the host busy and a GPU idle."""
Sample = tuple[float, float]


@dataclass(frozen=True)
class Sizes:
    """The largest product, copy and exchange to measure.

    Attributes:
        intermediate: Columns of a product.
        num_experts: Experts of a rank, which one grouped product computes.
        num_bytes: Most bytes of an exchange.
        points: How many sizes of each are timed, at even ratios.
        turns: How often each size is timed.

    Raises:
        ConfigError: A line through the times of products would have one size.
    """

    hidden: int
    intermediate: int
    num_experts: int
    rows: int
    num_bytes: int
    points: int = 8
    turns: int = 15

    def __post_init__(self) -> None:
        """Checks that products have two sizes."""
        if self.rows < 2 * self.num_experts:
            raise ConfigError(
                f"rows={self.rows} for {self.num_experts} experts: wanted 2 for each at least"
            )


ON_GPU = Sizes(hidden=2048, intermediate=2048, num_experts=8, rows=65536, num_bytes=2**28)
ON_CPU = Sizes(hidden=256, intermediate=256, num_experts=4, rows=2048, num_bytes=2**22)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the file, the sizes to measure, and how rows travel."""
    parser.add_argument("file", type=Path, help="what is written")
    add_sizes(
        parser,
        {
            "hidden": "model width",
            "intermediate": "columns of a product",
            "experts": "experts of a rank",
            "rows": "most rows of a product or a copy",
        },
    )
    parser.add_argument("--mib", type=float, help="most MiB of an exchange")
    add_flags(parser, BackendOptions, names=("exchange",))
    parser.add_argument(
        "--within",
        type=int,
        help="ranks that share each expert, which are neighbours; by default 1",
    )
    parser.add_argument(
        "--between",
        type=int,
        help="ranks of an expert-parallel group; by default all over --within",
    )
    start.add_dtype(parser)


def run(options: argparse.Namespace) -> None:
    """Measures the machine and writes the file. Collective over the ranks of torchrun."""
    sizes_given = ("hidden", "intermediate", "experts", "rows", "mib", "within", "between")
    start.check_sizes(options, *sizes_given)
    everyone, grid, device = start.join()
    group, tensor_group = _groups(everyone, options.within, options.between)
    if tensor_group is not None:
        ranks = Ranks(group)
        grid = arrange(ranks.gather(host_name()), ranks.rank)
    default = ON_GPU if device.type == "cuda" else ON_CPU
    sizes = Sizes(
        hidden=options.hidden or default.hidden,
        intermediate=options.intermediate or default.intermediate,
        num_experts=options.experts or default.num_experts,
        rows=options.rows or default.rows,
        num_bytes=int(options.mib * 2**20) if options.mib else default.num_bytes,
    )
    dtype = start.dtype_of(options.dtype, device)
    found = measure(
        group,
        grid,
        device,
        dtype,
        sizes,
        exchange=options.exchange,
        tensor_group=tensor_group,
        everyone=everyone,
    )
    if Ranks(everyone).rank != 0:
        return
    write_fit(options.file, found)
    sys.stdout.write(f"{found.machine}, {found.dtype}\n")
    for name, line in found.lines.items():
        per_second = f"{1 / line.beta_s:.3g}" if line.beta_s else "any number"
        sys.stdout.write(
            f"{name}: {1e6 * line.alpha_s:.1f} us and {per_second} a second, "
            f"r squared {line.r_squared:.5f}\n"
        )
    for name, both in found.beside.items():
        exchange, _, gather = name.partition(" and ")
        sys.stdout.write(
            f"beside each other: {gather or 'a product'} {both.product:.2f} and {exchange} "
            f"{both.exchange:.2f} times as long as alone\n"
        )


def _groups(
    everyone: dist.ProcessGroup | None, within: int | None, between: int | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Cuts all ranks into expert-parallel groups, and into neighbours that share each expert.

    Returns:
        This rank's group of each kind, ``None`` for one rank alone.

    Raises:
        ConfigError: The product of both sizes is not the number of ranks.
    """
    num_ranks = Ranks(everyone).num_ranks
    within = within or (num_ranks // between if between else 1)
    between = between or max(num_ranks // within, 1)
    if within * between != num_ranks:
        raise ConfigError(
            f"--within {within} --between {between} on {num_ranks} ranks: wanted two numbers whose "
            "product is the number of ranks"
        )
    if within == 1:
        return everyone, None
    neighbours = [[*range(i, i + within)] for i in range(0, num_ranks, within)]
    tensor_group = _subgroup(neighbours)
    if between == 1:
        return None, tensor_group
    group = _subgroup([[*range(i, num_ranks, within)] for i in range(within)])
    return group, tensor_group


def _subgroup(of_ranks: list[list[int]]) -> dist.ProcessGroup:
    """Makes groups of these ranks; returns this rank's. Collective over all ranks."""
    group, _ = dist.new_subgroups_by_enumeration(of_ranks)  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return group


def measure(
    group: dist.ProcessGroup | None,
    grid: HostGrid,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
    *,
    exchange: ExchangeKind = "auto",
    timeout: float = 120.0,
    tensor_group: dist.ProcessGroup | None = None,
    everyone: dist.ProcessGroup | None = None,
) -> Fit:
    """Fits this machine. Collective over ``everyone``, by default the ranks of the group.

    All exchanges but "copies" are composed of NCCL's times. An exchange waits ``timeout`` seconds
    for a rank. The ranks of ``tensor_group`` share each expert; these and the group's are among
    ``everyone``.

    Raises:
        ConfigError: Rows cannot travel so here.
        FlashMoEError: The GPUs cannot write into each other's memory.
    """
    kind, shared = kind_of(exchange, grid, device), Ranks(tensor_group).num_ranks
    if kind == "copies" and shared > 1:
        raise ConfigError(
            f"exchange='copies' where {shared} ranks share each expert: wanted another exchange"
        )
    clock = Clock(everyone or group, device, sizes.turns)
    samples = {"product": _products(clock, dtype, sizes), "copy": _copies(clock, dtype, sizes)}
    beside: dict[str, Beside] = {}
    largest_of: dict[str, Work] = {}
    if group is not None and Ranks(group).num_ranks > 1:
        all_to_all: _Exchange = _all_to_all
        if kind == "copies":
            all_to_all = _by_copies(Copies(Ranks(group), TrafficCounters(), device, timeout))
        carriers = {"all_to_all": group}
        if grid.num_hosts > 1 and grid.ranks_per_host > 1:
            groups = host_groups(group, grid, timeout=timeout)
            assert groups.within is not None
            carriers |= {"all_to_all_within": groups.within, "all_to_all_rail": groups.rail}
        for name, collective in {"all_to_all": all_to_all, **_COLLECTIVES}.items():
            samples[name] = _exchanges(clock, collective, group, sizes)
        for name, carrier in carriers.items():
            if name not in samples:
                samples[name] = _exchanges(clock, all_to_all, carrier, sizes)
            largest_of[name] = all_to_all(_buffer(clock, carrier, sizes), carrier)
            beside[name] = _beside(
                clock, dtype, sizes, largest_of[name], samples["product"], samples[name]
            )
    if tensor_group is not None and shared > 1:
        collectives = {"all_to_all": _all_to_all, **_COLLECTIVES, **_of_sharing(device)}
        for name, collective in collectives.items():
            samples[f"{name}_shared"] = _exchanges(clock, collective, tensor_group, sizes)
        gather = collectives["all_gather"](_buffer(clock, tensor_group, sizes), tensor_group)
        beside[GATHER] = _beside(clock, dtype, sizes, gather, samples["product"], samples[GATHER])
        for name, largest in largest_of.items():
            beside[beside_gather(name)] = _both(clock, gather, largest, samples, name)
    if Ranks(group).num_ranks * shared > 1:
        samples |= _hosts(clock, group, grid, dtype, sizes, exchange, tensor_group)
    lines = {name: fit_line(*zip(*pairs, strict=True)) for name, pairs in samples.items()}
    dtype_name = str(dtype).removeprefix("torch.")
    return Fit(machine_of(grid, device, kind, shared), dtype_name, lines, samples, beside)


def even_ratios(most: int, points: int, span: int = SPAN) -> list[int]:
    """Returns sizes at even ratios from the most over ``span`` to the most."""
    ratio = span ** (1 / (points - 1))
    return sorted({max(round(most / ratio**i), 1) for i in range(points)})


def _samples(clock: Clock, calls: Mapping[float, Work], *, of_host: bool = False) -> list[Sample]:
    """Pairs the sizes of calls with their times."""
    return list(zip(calls, clock.seconds([*calls.values()], of_host=of_host), strict=True))


def _products(clock: Clock, dtype: torch.dtype, sizes: Sizes) -> list[Sample]:
    """Times grouped products by their floating-point operations."""
    weights = _weights(clock, dtype, sizes)
    each = even_ratios(sizes.rows // sizes.num_experts, sizes.points)
    calls = {2.0 * weights.numel() * rows: _product(weights, rows) for rows in each}
    return _samples(clock, calls)


def _weights(clock: Clock, dtype: torch.dtype, sizes: Sizes) -> torch.Tensor:
    shape = sizes.num_experts, sizes.hidden, sizes.intermediate
    return torch.randn(shape, device=clock.device).to(dtype)


def _product(weights: torch.Tensor, per_expert: int) -> Work:
    counts = [per_expert] * len(weights)
    ends = torch.tensor(counts, device=weights.device).cumsum(0).int()
    rows = torch.randn(sum(counts), weights.shape[1], device=weights.device).to(weights.dtype)
    return lambda: steps_for(rows).product(rows, weights, ends, counts)


def _copies(clock: Clock, dtype: torch.dtype, sizes: Sizes) -> list[Sample]:
    """Times the picking of more rows than a cache holds, by the bytes written."""

    def copy(rows: torch.Tensor) -> Work:
        index = torch.randperm(len(rows), device=clock.device)
        return lambda: rows.index_select(0, index)

    counts = even_ratios(sizes.rows, sizes.points, COPY_SPAN)
    each = [torch.randn(count, sizes.hidden, device=clock.device).to(dtype) for count in counts]
    return _samples(clock, {float(rows.nbytes): copy(rows) for rows in each})


def _beside(
    clock: Clock,
    dtype: torch.dtype,
    sizes: Sizes,
    exchange: Work,
    products: list[Sample],
    exchanges: list[Sample],
) -> Beside:
    """Measures the slowdowns of the largest product and the largest all-to-all."""
    product_s, exchange_s = products[-1][1], exchanges[-1][1]
    calls = _product(_weights(clock, dtype, sizes), max(sizes.rows // sizes.num_experts, 1))
    return Beside(
        product=clock.factor(calls, product_s, exchange, exchange_s, meet=exchange),
        exchange=clock.factor(exchange, exchange_s, calls, product_s, meet=exchange),
    )


def _both(
    clock: Clock, gather: Work, exchange: Work, samples: dict[str, list[Sample]], name: str
) -> Beside:
    """Measures the slowdowns of the largest gather over ranks that share and an all-to-all."""
    gather_s, exchange_s = samples[GATHER][-1][1], samples[name][-1][1]

    def meet() -> None:
        gather()
        exchange()

    return Beside(
        product=clock.factor(gather, gather_s, exchange, exchange_s, meet=meet),
        exchange=clock.factor(exchange, exchange_s, gather, gather_s, meet=meet),
    )


def _hosts(
    clock: Clock,
    group: dist.ProcessGroup | None,
    grid: HostGrid,
    dtype: torch.dtype,
    sizes: Sizes,
    exchange: ExchangeKind,
    tensor_group: dist.ProcessGroup | None = None,
) -> dict[str, list[Sample]]:
    """Times forwards and backwards that occupy the host for longer than the GPU, by parts."""
    ranks = Ranks(group).num_ranks
    config = MoEConfig(
        hidden=DIM_GRANULE,
        intermediate=DIM_GRANULE,
        num_experts=sizes.num_experts * ranks,
        topk=2,
        activation=Activation.SILU,
        gated=True,
        num_ranks=ranks,
        max_tokens=TOKENS,
    )
    options = BackendOptions(keep="all", exchange=exchange)
    backend = ScheduledBackend(
        config,
        group,
        device=clock.device,
        options=options,
        grid=grid,
        tensor_group=tensor_group,
    )
    layer = RandomLayer(backend, TOKENS, dtype, clock.device)

    def forward(parts: int) -> Any:
        backend.degrees = parts, parts
        return layer.forward()

    def backward(parts: int, saved: Any) -> None:
        backend.degrees = parts, parts
        layer.backward(saved)

    forwards = {float(parts): functools.partial(forward, parts) for parts in PARTS}
    backwards = {
        float(parts): functools.partial(backward, parts, forward(parts)) for parts in PARTS
    }
    return {
        "host_forward": _samples(clock, forwards, of_host=True),
        "host_backward": _samples(clock, backwards, of_host=True),
    }


def _all_to_all(buffer: torch.Tensor, group: dist.ProcessGroup) -> Work:
    received = torch.empty_like(buffer)
    return lambda: dist.all_to_all_single(received, buffer, group=group)


def _by_copies(copies: Copies) -> "_Exchange":
    """Returns an all-to-all by copy engines; every call is a forward of its own."""

    def exchange(buffer: torch.Tensor, group: dist.ProcessGroup) -> Work:
        ranks = dist.get_world_size(group)
        counts, rows = [[1] * ranks] * ranks, buffer.view(ranks, -1)

        def call() -> None:
            copies.restart()
            (slot,) = copies.room([counts], rows).slots
            done = copies.run(slot, rows, counts, mark(rows.device))
            wait(rows.device, done)

        return call

    return exchange


def _all_gather(buffer: torch.Tensor, group: dist.ProcessGroup) -> Work:
    own = buffer[: len(buffer) // dist.get_world_size(group)].clone()
    return lambda: dist.all_gather_into_tensor(buffer, own, group=group)


def _reduce_scatter(buffer: torch.Tensor, group: dist.ProcessGroup) -> Work:
    own = torch.empty_like(buffer[: len(buffer) // dist.get_world_size(group)])
    return lambda: dist.reduce_scatter_tensor(own, buffer, group=group)


def _all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup) -> Work:
    return lambda: dist.all_reduce(buffer, group=group)


_Exchange = Callable[[torch.Tensor, dist.ProcessGroup], Work]
_COLLECTIVES: dict[str, _Exchange] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}


def _of_sharing(device: torch.device) -> "dict[str, _Exchange]":
    """Returns the collectives of ranks that share experts, as the backend has them."""

    def gather(buffer: torch.Tensor, group: dist.ProcessGroup) -> Work:
        sharing = TensorGroup(group, TrafficCounters(), device)
        own = buffer[: len(buffer) // sharing.size].clone()
        sizes = [len(own)] * sharing.size
        return lambda: wait(device, sharing.gather(buffer, own, sizes, mark(device)))

    def scatter(buffer: torch.Tensor, group: dist.ProcessGroup) -> Work:
        sharing = TensorGroup(group, TrafficCounters(), device)
        own = torch.empty_like(buffer[: len(buffer) // sharing.size])
        sizes = [len(own)] * sharing.size
        return lambda: wait(device, sharing.reduce(own, buffer, sizes, mark(device)))

    return {"all_gather": gather, "reduce_scatter": scatter}


def _exchanges(
    clock: Clock, exchange: _Exchange, group: dist.ProcessGroup, sizes: Sizes
) -> list[Sample]:
    """Times a collective by the bytes of a rank's larger buffer, which has float32 values."""
    units = even_ratios(_most_units(sizes, group), sizes.points)
    buffers = [_buffer(clock, group, sizes, each) for each in units]
    return _samples(clock, {float(one.nbytes): exchange(one, group) for one in buffers})


def _most_units(sizes: Sizes, group: dist.ProcessGroup) -> int:
    return max(sizes.num_bytes // 4 // DIM_GRANULE // dist.get_world_size(group), 2)


def _buffer(
    clock: Clock, group: dist.ProcessGroup, sizes: Sizes, units: int | None = None
) -> torch.Tensor:
    """Returns pieces for all ranks, each of ``units`` rows of the least width, or the most.

    NCCL takes up to twice as long if a piece does not begin at a multiple of 16 bytes.
    """
    units = units or _most_units(sizes, group)
    return torch.zeros(units * DIM_GRANULE * dist.get_world_size(group), device=clock.device)
