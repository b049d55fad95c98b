"""The times of exchanges, products and copies on one machine, kept as a file of JSON.

Nothing is taken from a file of another machine: it is refused, with both machines' names.
"""

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashmoe_megatron.checks import TOKEN_DTYPES
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.measured import files
from flashmoe_megatron.options import ExchangeKind

FILE = files.Kind(
    "fit",
    "flashmoe-schedule-fit",
    version=2,
    wanted="; wanted a file of python -m flashmoe_megatron.schedule fit",
)
ROUNDS = 50
TUKEY = 4.685
"""A time this many deviations away from a line has no weight, as in Tukey's biweight."""
LEAST_DEVIATION = 0.03
"""The least deviation of times from a line, as a part of the median one: a collective's rate
rises with its size, so that its times bend by as much, and none of them is to be taken for late."""
DTYPES = {str(one).removeprefix("torch."): one for one in TOKEN_DTYPES}
ALONE = ("product", "copy")
"""Lines of one rank; sizes are floating-point operations and bytes written."""
TOGETHER = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
"""Lines of a group; sizes are bytes of the larger of a rank's buffers."""
HOST = ("host_forward", "host_backward")
"""Lines of the host that issues a pass of a layer; sizes are parts."""
LEVELS = ("all_to_all_within", "all_to_all_rail")
"""Lines of one host's ranks and of one place's, where there are several of both."""
SHARED = tuple(f"{name}_shared" for name in TOGETHER)
"""The collectives' lines of ranks that share each expert, where there are several."""
GATHER = "all_gather_shared"


@dataclass(frozen=True)
class Line:
    """The seconds of a size: ``alpha_s + size * beta_s``.

    Attributes:
        alpha_s: Seconds of any size.
        beta_s: Seconds for each unit.
        r_squared: Share of the times' variance that the line explains.
    """

    alpha_s: float
    beta_s: float
    r_squared: float

    def time_s(self, size: float) -> float:
        """Returns the seconds of a size."""
        return self.alpha_s + size * self.beta_s


@dataclass(frozen=True)
class Machine:
    """A machine with its ranks. A fit holds for no other.

    Attributes:
        device: The GPU's name as the driver gives it, or how many cores the processor has.
        hosts: Hosts of the expert-parallel group.
        ranks_per_host: Its ranks on each.
        by_copies: Whether copy engines carry rows, as the exchange ``copies`` has it.
        shared: Ranks that share each expert, by expert tensor parallelism.
    """

    device: str
    hosts: int
    ranks_per_host: int
    by_copies: bool = False
    shared: int = 1

    def __str__(self) -> str:
        how = ", rows by copies" if self.by_copies else ""
        sharing = f", {self.shared} to an expert" if self.shared > 1 else ""
        return f"{self.hosts} x {self.ranks_per_host} ranks{sharing} on {self.device}{how}"

    @property
    def wanted(self) -> tuple[str, ...]:
        """The lines that a fit of this machine has."""
        num_ranks = self.hosts * self.ranks_per_host
        together = TOGETHER if num_ranks > 1 else ()
        shared = SHARED if self.shared > 1 else ()
        host = HOST if num_ranks * self.shared > 1 else ()
        return (*ALONE, *together, *host, *self.exchanges[1:], *shared)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The lines of exchanges that may carry a layer's rows."""
        if self.hosts * self.ranks_per_host == 1:
            return ()
        levels = LEVELS if self.hosts > 1 and self.ranks_per_host > 1 else ()
        return ("all_to_all", *levels)

    @property
    def carriers(self) -> tuple[str, ...]:
        """The names of all pairs of work that run concurrently.

        Products run concurrently with every exchange, and gathers with every all-to-all.
        """
        if self.shared == 1:
            return self.exchanges
        return (*self.exchanges, GATHER, *map(beside_gather, self.exchanges))


def beside_gather(line: str) -> str:
    """Names an all-to-all and a gather over ranks that share experts, which run concurrently."""
    return f"{line} and {GATHER}"


def machine_of(
    grid: HostGrid, device: torch.device, exchange: ExchangeKind = "direct", shared: int = 1
) -> Machine:
    """Returns the machine of a rank's group, whose rows an exchange carries.

    ``shared`` ranks, each of a group of its own, have the same experts.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"a processor of {os.cpu_count()} cores"
    return Machine(name, grid.num_hosts, grid.ranks_per_host, exchange == "copies", shared)


@dataclass(frozen=True)
class Beside:
    """Slowdowns of a product and an exchange that run concurrently, over their times alone.

    Where an all-to-all and a gather over ranks that share experts do, the gather has the product's
    place.
    """

    product: float
    exchange: float


@dataclass(frozen=True)
class Fit:
    """The lines of a machine.

    Attributes:
        machine: The machine.
        dtype: The dtype of the rows that were multiplied, such as "bfloat16".
        lines: All lines by name.
        samples: The sizes and the times in seconds that each line was fitted to.
        ``beside``: Slowdowns of products and exchanges, by the exchange's line.
    """

    machine: Machine
    dtype: str
    lines: dict[str, Line]
    samples: dict[str, list[tuple[float, float]]]
    beside: dict[str, Beside]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return DTYPES[self.dtype]


def write_fit(path: Path, fit: Fit) -> None:
    """Writes a file.

    Raises:
        ConfigError: It cannot be written.
    """
    files.write(path, {**FILE.head, **dataclasses.asdict(fit)})


def read_fit(path: Path, machine: Machine | None, dtype: torch.dtype | None = None) -> Fit:
    """Reads a file for this machine, or for the file's own if ``machine`` is ``None``.

    ``dtype`` is that of tokens, ``None`` if it is not known.

    Raises:
        ConfigError: It cannot be read, is not what it should be, or is of another machine or dtype.
    """
    content = FILE.read(path)
    if not isinstance(content, dict) or {**content, **FILE.head} != content:
        raise ConfigError(
            f"fit {path}: wanted an object of format {FILE.format!r} and version {FILE.version}; "
            "measure again with python -m flashmoe_megatron.schedule fit"
        )
    try:
        fields = dataclasses.fields(Fit)
        fit: Fit = files.build(Fit, {one.name: content[one.name] for one in fields})
        fit.torch_dtype  # noqa: B018 - an unknown name is an error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"fit {path}: it is not complete: {error!r}") from error
    if machine not in (None, fit.machine):
        raise ConfigError(
            f"fit {path} is of {fit.machine}, but this group is {machine}: wanted a fit of this "
            "machine, from python -m flashmoe_megatron.schedule fit with its --exchange and, "
            "where ranks share experts, --within, or degrees as numbers"
        )
    if dtype not in (None, fit.torch_dtype):
        raise ConfigError(
            f"fit {path} is of {fit.dtype}, but tokens are {dtype}: wanted a fit with --dtype "
            f"{str(dtype).removeprefix('torch.')}"
        )
    for name in fit.machine.wanted:
        line = fit.lines.get(name)
        if line is None or not _are_at_least(0, line.alpha_s, line.beta_s):
            raise ConfigError(
                f"fit {path}: {name} is {line}, wanted an alpha and a beta in seconds"
            )
    for name in fit.machine.carriers:
        both = fit.beside.get(name)
        if both is None or not _are_at_least(1, both.product, both.exchange):
            raise ConfigError(
                f"fit {path}: beside each other, a product and {name} take {both}, wanted two "
                "factors of at least 1"
            )
    return fit


def _are_at_least(least: float, *values: Any) -> bool:
    return all(type(one) in (int, float) and least <= one < math.inf for one in values)


def fit_line(sizes: Sequence[float], times_s: Sequence[float]) -> Line:
    """Fits a line by least squares of errors over times, weighted less the larger an error is.

    A time is taken to vary as a sum of independent ones does: its variance grows with it. Relative
    errors would give as much to a time of 40 us as to one of 700, which a schedule is made of.
    There are two different sizes or more, and no time is 0. Neither term of the line is negative.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(times_s) or min(times_s) <= 0:
        raise ValueError(f"sizes {sizes} and times {times_s}: wanted two sizes, times above 0")
    weights = [1.0] * len(sizes)
    least = LEAST_DEVIATION * statistics.median(times_s) ** 0.5
    alpha = beta = 0.0
    for _ in range(ROUNDS):
        before = alpha, beta
        alpha, beta = _weighted(sizes, times_s, weights)
        errors = [(alpha + beta * n - t) / t**0.5 for n, t in zip(sizes, times_s, strict=True)]
        deviation = statistics.median(map(abs, errors)) / 0.6745  # if they are normal ones
        spread = max(deviation, least)
        far = [error / (TUKEY * spread) for error in errors]
        weights = [(1 - one * one) ** 2 if abs(one) < 1 else 0.0 for one in far]
        if math.isclose(before[0], alpha, rel_tol=1e-9) and math.isclose(before[1], beta):
            break
    mean = statistics.fmean(times_s)
    left = sum((alpha + beta * n - t) ** 2 for n, t in zip(sizes, times_s, strict=True))
    whole = sum((t - mean) ** 2 for t in times_s)
    return Line(alpha, beta, 1 - left / whole if whole else float(left == 0))


def _weighted(
    sizes: Sequence[float], times_s: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Solves ``alpha + beta * n = t`` by least squares over t; both terms are at least 0."""
    rows = [(w / t, n, t) for n, t, w in zip(sizes, times_s, weights, strict=True)]
    s, st = sum(w for w, _, _ in rows), sum(w * t for w, _, t in rows)
    sn = sum(w * n for w, n, _ in rows)
    snn, snt = sum(w * n * n for w, n, _ in rows), sum(w * n * t for w, n, t in rows)
    determinant = s * snn - sn * sn
    alpha = (st * snn - sn * snt) / determinant if determinant else -1.0
    beta = (s * snt - sn * st) / determinant if determinant else -1.0
    if beta < 0:
        return st / s, 0.0
    if alpha < 0:
        return 0.0, snt / snn
    return alpha, beta
