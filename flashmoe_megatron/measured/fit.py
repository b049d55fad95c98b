"""The times of exchanges, products and copies on one machine, kept as a file of JSON beside a run.

Nothing is taken from a file of another machine: it is refused, with both machines' names.
"""

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashmoe_megatron.checks import TOKEN_DTYPES
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.measured import files
from flashmoe_megatron.measured.line import Line
from flashmoe_megatron.options import ExchangeKind

FILE = files.Kind(
    "fit",
    "flashmoe-schedule-fit",
    version=2,
    wanted="; wanted a file of python -m flashmoe_megatron.schedule fit",
)
DTYPES = {str(one).removeprefix("torch."): one for one in TOKEN_DTYPES}
ALONE = ("product", "copy")
"""What one rank does: sizes are floating-point operations and bytes written."""
TOGETHER = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
"""What a group does; sizes are bytes of the larger of a rank's buffers."""
HOST = ("host_forward", "host_backward")
"""What the host takes to issue a pass of a layer; sizes are parts."""
LEVELS = ("all_to_all_within", "all_to_all_rail")
"""What the ranks of a host do, and those of one place, where there are several of both."""


@dataclass(frozen=True)
class Machine:
    """Where a fit holds.

    Attributes:
        device: The GPU's name as the driver gives it, or how many cores the processor has.
        hosts: Hosts of the expert-parallel group.
        ranks_per_host: Its ranks on each.
        by_copies: Whether copy engines carry rows, as the exchange ``copies`` has it.
    """

    device: str
    hosts: int
    ranks_per_host: int
    by_copies: bool = False

    def __str__(self) -> str:
        how = ", rows by copies" if self.by_copies else ""
        return f"{self.hosts} x {self.ranks_per_host} ranks on {self.device}{how}"

    @property
    def wanted(self) -> tuple[str, ...]:
        """The lines that a fit of it has."""
        together = (*TOGETHER, *HOST) if self.hosts * self.ranks_per_host > 1 else ()
        return (*ALONE, *together, *self.exchanges[1:])

    @property
    def exchanges(self) -> tuple[str, ...]:
        """What may carry a layer's rows, by their lines."""
        if self.hosts * self.ranks_per_host == 1:
            return ()
        levels = LEVELS if self.hosts > 1 and self.ranks_per_host > 1 else ()
        return ("all_to_all", *levels)


def machine_of(grid: HostGrid, device: torch.device, exchange: ExchangeKind = "direct") -> Machine:
    """The machine of a rank's group, and what carries its rows."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"a processor of {os.cpu_count()} cores"
    return Machine(name, grid.num_hosts, grid.ranks_per_host, exchange == "copies")


@dataclass(frozen=True)
class Beside:
    """How many times as long as alone two things take while both run, each on its stream.

    Attributes:
        product: What a product takes.
        exchange: What an exchange takes.
    """

    product: float
    exchange: float


@dataclass(frozen=True)
class Fit:
    """The lines of a machine.

    Attributes:
        machine: Which.
        dtype: The rows' that were multiplied, "bfloat16" for one.
        lines: By name.
        samples: The sizes and times in seconds that each line was laid through.
        beside: What products and exchanges take beside each other, by the exchange's line.
    """

    machine: Machine
    dtype: str
    lines: dict[str, Line]
    samples: dict[str, list[tuple[float, float]]]
    beside: dict[str, Beside]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The rows'."""
        return DTYPES[self.dtype]


def write_fit(path: Path, fit: Fit) -> None:
    """Writes a file.

    Raises:
        ConfigError: It cannot be written.
    """
    files.write(path, {**FILE.head, **dataclasses.asdict(fit)})


def read_fit(path: Path, machine: Machine | None, dtype: torch.dtype | None = None) -> Fit:
    """Reads a file for a machine.

    Args:
        path: Where the file is.
        machine: This one, ``None`` for whichever the file is of.
        dtype: The tokens', ``None`` if it is not known.

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
            "machine, from python -m flashmoe_megatron.schedule fit with its --exchange, or "
            "degrees as numbers"
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
    for name in fit.machine.exchanges:
        both = fit.beside.get(name)
        if both is None or not _are_at_least(1, both.product, both.exchange):
            raise ConfigError(
                f"fit {path}: beside each other, a product and {name} take {both}, wanted two "
                "factors of at least 1"
            )
    return fit


def _are_at_least(least: float, *values: Any) -> bool:
    return all(type(one) in (int, float) and least <= one < math.inf for one in values)
