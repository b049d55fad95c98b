"""The simulation of one rank: tickets, clusters and links."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.config import TILE_M
from tools.simulate.figures import Figures, Fitted
from tools.simulate.routing import ELEMENT_BYTES, Load, busiest_rank

BLOCK_M, BLOCK_N, BLOCK_K = TILE_M, 256, 64
CLUSTER = 2
STAGE_FLOPS = 2 * BLOCK_M * BLOCK_N * BLOCK_K
MAIN_GRAD_BYTES = 8  # a float32 is read and written
SLOWED_BY_HALF_MS = 1.0
"""Products lose half of their loss to the power limit in so much time."""


@dataclass(frozen=True)
class Unit:
    """A cluster takes this at once: two row blocks of an expert, or its odd last one.

    Attributes:
        expert: The expert that the tile belongs to.
        blocks: 2 or 1.
        rows: Rows without pads.
    """

    expert: int
    blocks: int
    rows: int


@dataclass(frozen=True)
class Products:
    """The two products of a direction, as tiles.

    Attributes:
        num_n: Tiles along N of both.
        num_k: Blocks along K of both.
    """

    num_n: tuple[int, int]
    num_k: tuple[int, int]


@dataclass(frozen=True)
class Times:
    """The times of a simulated launch, in microseconds.

    Attributes:
        total: From its begin on all ranks to its end.
        products: The mean time of one cluster's tiles without any wait.
        links: How long the busier kind of link was in use.
    """

    total: float
    products: float
    links: float


def products_of(shape: Shape, *, backward: bool) -> Products:
    """A direction's products."""
    fc1_rows = shape.intermediate * (2 if shape.gated else 1)
    if backward:
        return Products(
            (_tiles(shape.intermediate, BLOCK_N), _tiles(shape.hidden, BLOCK_N)),
            (_tiles(shape.hidden, BLOCK_K), _tiles(fc1_rows, BLOCK_K)),
        )
    return Products(
        (_tiles(fc1_rows, BLOCK_N), _tiles(shape.hidden, BLOCK_N)),
        (_tiles(shape.hidden, BLOCK_K), _tiles(shape.intermediate, BLOCK_K)),
    )


def units_of(load: Load) -> list[Unit]:
    """The row units of a rank, in the order of its buffer."""
    units = []
    for expert, rows in enumerate(load.expert_rows.tolist()):
        for first in range(0, rows, CLUSTER * BLOCK_M):
            here = min(rows - first, CLUSTER * BLOCK_M)
            units.append(Unit(expert, _tiles(here, BLOCK_M), here))
    return units


FINISHERS_STAGES = 48
"""Stages that finishers need between a group's two products, as csrc/host/launch.cu has it."""


def group_and_lag(products: Products, num_clusters: int) -> tuple[int, int]:
    """Units of a step of the order, and how many steps later than GEMM0 comes GEMM1."""
    group = max(8, _tiles(num_clusters, products.num_n[0]))
    stages_between = group * products.num_n[1] * products.num_k[1] // num_clusters
    return group, 2 if stages_between < FINISHERS_STAGES else 1


def tickets(
    units: list[Unit], num_n: tuple[int, int], group: int, lag: int
) -> Iterator[tuple[int, int, int, bool]]:
    """The kernel's order: GEMM0 of a group of units, then GEMM1 of an older one.

    A single block's pair is two tiles along N, so that every other of its tickets is empty.

    Args:
        units: A rank's units.
        num_n: Tiles along N of both products.
        group: Units that the order advances by.
        lag: How many steps later GEMM1 comes.

    Yields:
        The product, the unit, the tiles along N that the ticket stands for, and whether the group
        has not yet used these weights.
    """
    num_groups = _tiles(len(units), group)
    for step in range(num_groups + lag):
        for gemm, number in ((0, step), (1, step - lag)):
            first = number * group
            members = range(first, min(first + group, len(units))) if number >= 0 else ()
            for n in range(num_n[gemm]):
                previous = -1
                for unit in members:
                    is_new = units[unit].expert != previous
                    previous = units[unit].expert
                    if units[unit].blocks == CLUSTER:
                        yield gemm, unit, 1, is_new
                    elif n % CLUSTER == 0:
                        yield gemm, unit, min(CLUSTER, num_n[gemm] - n), is_new


def simulate_launch(
    shape: Shape, load: Load, figures: Figures, fitted: Fitted, *, backward: bool
) -> Times:
    """Simulates the layer kernel of one direction on the busiest rank.

    Args:
        shape: The layer.
        load: What the rank receives.
        figures: What GPUs and links do.
        fitted: Efficiencies.
        backward: The direction, with the weights' gradients.

    Returns:
        Times without what is spent once per launch.
    """
    products = products_of(shape, backward=backward)
    units = units_of(load)
    figures = slowed(shape, load, figures, fitted, backward=backward)
    row_bytes = shape.hidden * ELEMENT_BYTES
    num_clusters = figures.num_ctas // CLUSTER
    stage_us = _stage_us(figures, fitted.product_efficiency)
    epilogue_us = (
        fitted.tile_us + _derivative_parts(shape) * fitted.derivative_us * backward,
        fitted.tile_us,
    )
    weight_us = BLOCK_N * BLOCK_K * ELEMENT_BYTES * num_clusters / figures.hbm_gbps / 1e3

    # Rows are published, then arrive in the order of the units.
    published = 2 * shape.tokens * row_bytes / figures.hbm_gbps / 1e3
    inbound = _Links(load, figures, fitted, row_bytes, published)
    total_rows = sum(unit.rows for unit in units)
    arrived = [inbound.receive(unit.rows / total_rows) for unit in units]

    free = [published] * num_clusters
    heapq.heapify(free)
    gemm0_done = [0.0] * len(units)
    done = [0.0] * len(units)
    busy = 0.0
    group, lag = group_and_lag(products, num_clusters)
    for gemm, unit, columns, is_new in tickets(units, products.num_n, group, lag):
        stages = products.num_k[gemm]
        # Both tiles of a pair run side by side; weights come from memory once per group.
        duration = max(stages * stage_us, stages * weight_us * columns * is_new)
        duration += epilogue_us[gemm]
        ready = arrived[unit] if gemm == 0 else gemm0_done[unit]
        end = max(heapq.heappop(free), ready) + duration
        heapq.heappush(free, end)
        busy += duration
        if gemm == 0:
            gemm0_done[unit] = max(gemm0_done[unit], end)
        else:
            done[unit] = max(done[unit], end)

    if backward:  # weights' gradients are computed while the last results travel
        differentiated = max(gemm0_done, default=published)
        for duration in weight_grads(shape, load, figures, fitted):
            end = max(heapq.heappop(free), differentiated) + duration
            heapq.heappush(free, end)
            busy += duration

    # Results of the other ranks arrive here as those of this rank leave: at the same pace.
    last = max(free)
    for at in sorted(range(len(units)), key=done.__getitem__):
        last = max(last, inbound.receive(units[at].rows / total_rows, not_before=done[at]))
    return Times(total=last, products=busy / num_clusters, links=inbound.busiest)


def weight_grads(shape: Shape, load: Load, figures: Figures, fitted: Fitted) -> Iterator[float]:
    """Microseconds of each pair of tiles, fc2's first, which have all rows of an expert as K."""
    fc1_rows = shape.intermediate * (2 if shape.gated else 1)
    stage_us = _stage_us(figures, fitted.wgrad_efficiency)
    tile_bytes = CLUSTER * BLOCK_M * BLOCK_N * MAIN_GRAD_BYTES
    store_us = tile_bytes * (figures.num_ctas // CLUSTER) / figures.hbm_gbps / 1e3
    for num_out, num_in in ((shape.hidden, shape.intermediate), (fc1_rows, shape.hidden)):
        pairs = _tiles(num_out, CLUSTER * BLOCK_M) * _tiles(num_in, BLOCK_N)
        for rows in load.expert_rows.tolist():
            stages = _tiles(rows, BLOCK_K)
            # The sum into the gradient is done by the L2 while the next tile is computed.
            yield from [max(stages * stage_us, store_us) + fitted.wgrad_tile_us] * pairs


def simulate(
    shape: Shape,
    num_gpus: int,
    figures: Figures,
    fitted: Fitted,
    *,
    backward: bool = False,
) -> Times:
    """Simulates the launch of one direction, from when it begins on all ranks.

    Args:
        shape: The layer.
        num_gpus: Ranks of its expert-parallel group.
        figures: What GPUs and links do.
        fitted: Efficiencies.
        backward: The direction.

    Raises:
        ValueError: The experts do not divide among the GPUs, or there are several domains and no
            network.
    """
    if num_gpus > figures.domain and figures.nic_gbps <= 0:
        raise ValueError(f"{num_gpus} GPUs in domains of {figures.domain}: the NIC rate is missing")
    load = busiest_rank(shape, num_gpus, figures.domain)
    times = simulate_launch(shape, load, figures, fitted, backward=backward)
    return replace(times, total=times.total + fitted.once_us(backward=backward))


class _Links:
    """One rank's way in: NVLink and, concurrently, its NIC; both in order of arrival."""

    def __init__(
        self, load: Load, figures: Figures, fitted: Fitted, row_bytes: int, begin_us: float
    ) -> None:
        def us(rows: float, gbps: float) -> float:
            return rows * row_bytes / gbps / 1e3 if rows else 0.0

        self._whole = {
            "nvlink": us(load.domain_rows, figures.nvlink_gbps * fitted.link_efficiency),
            "nic": us(load.network_rows, figures.nic_gbps),
        }
        self._latency = {"nvlink": figures.nvlink_latency_us, "nic": figures.nic_latency_us}
        self._free = dict.fromkeys(self._whole, begin_us)
        self._begin = begin_us
        self._used = dict.fromkeys(self._whole, 0.0)

    def receive(self, part: float, not_before: float = 0.0) -> float:
        """Returns when a part of a direction's rows is here that is sent as soon as it may be."""
        last = max(self._begin, not_before)
        for link, whole in self._whole.items():
            if whole == 0.0:
                continue
            self._free[link] = max(self._free[link], not_before) + part * whole
            self._used[link] += part * whole
            last = max(last, self._free[link] + self._latency[link])
        return last

    @property
    def busiest(self) -> float:
        """Microseconds that the busier kind of link was in use."""
        return max(self._used.values())


def with_run(figures: Figures, cublas_tflops: float | None, link_gbps: float | None) -> Figures:
    """The figures with the ceilings that a run measured of its own machine."""
    return replace(
        figures,
        cublas_tflops=cublas_tflops or figures.cublas_tflops,
        nvlink_gbps=link_gbps or figures.nvlink_gbps,
    )


def slowed(
    shape: Shape, load: Load, figures: Figures, fitted: Fitted, *, backward: bool
) -> Figures:
    """The figures with cuBLAS' rate as it is at the end of a launch that long."""
    flops = shape.flops * load.imbalance * (2 if backward else 1)
    milliseconds = flops / figures.cublas_tflops / 1e9
    lost = fitted.slowing(backward=backward) * milliseconds / (milliseconds + SLOWED_BY_HALF_MS)
    return replace(figures, cublas_tflops=figures.cublas_tflops * (1.0 - lost))


def _stage_us(figures: Figures, efficiency: float) -> float:
    """Microseconds of one stage of a tile's products on one SM."""
    return STAGE_FLOPS / (figures.cublas_tflops * efficiency / figures.num_sms) / 1e6


def _derivative_parts(shape: Shape) -> int:
    """Tiles that GEMM0's epilogue reads and writes in the backward besides one product's.

    It reads what the forward kept before the activation, and writes the activation once more (for
    the gradient of fc2) and the gradient before it, the latter two of gated experts twice.
    """
    return 5 if shape.gated else 3


def _tiles(size: int, block: int) -> int:
    return math.ceil(size / block)
