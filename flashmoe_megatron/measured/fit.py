"""The times of exchanges, products and copies on one machine, kept as a file of JSON.

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
"""Lines of one rank; sizes are floating-point operations and bytes written."""
TOGETHER = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
"""Lines of a group; sizes are bytes of the larger of a rank's buffers."""
HOST = ("host_forward", "host_backward")
"""Lines of the host that issues a pass of a layer; sizes are parts."""
LEVELS = ("all_to_all_within", "all_to_all_rail")
"""Lines of one host's ranks and of one place's, where there are several of both."""


@dataclass(frozen=True)
class Machine:
    """A machine with its ranks. A fit holds for no other.

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
        """The lines that a fit of this machine has."""
        together = (*TOGETHER, *HOST) if self.hosts * self.ranks_per_host > 1 else ()
        return (*ALONE, *together, *self.exchanges[1:])

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The lines of exchanges that may carry a layer's rows."""
        if self.hosts * self.ranks_per_host == 1:
            return ()
        levels = LEVELS if self.hosts > 1 and self.ranks_per_host > 1 else ()
        return ("all_to_all", *levels)


def machine_of(grid: HostGrid, device: torch.device, exchange: ExchangeKind = "direct") -> Machine:
    """Returns the machine of a rank's group, whose rows an exchange carries."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"a processor of {os.cpu_count()} cores"
    return Machine(name, grid.num_hosts, grid.ranks_per_host, exchange == "copies")


@dataclass(frozen=True)
class Beside:
    """Slowdowns of a product and an exchange that run concurrently, over their times alone."""

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
