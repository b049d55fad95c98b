"""What exchanges, products and copies take on one machine, kept as a file of JSON beside a run.

Nothing is taken from a file of another machine: it is refused, with both machines' names.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashmoe_megatron.checks import TOKEN_DTYPES
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.options import ExchangeKind
from flashmoe_megatron.schedule.line import Line

FORMAT = "flashmoe-schedule-fit"
VERSION = 2

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
    write_json(path, {"format": FORMAT, "version": VERSION, **dataclasses.asdict(fit)})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an object.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error


def read_fit(path: Path, machine: Machine | None, dtype: torch.dtype | None = None) -> Fit:
    """Reads a file for a machine.

    Args:
        path: Where the file is.
        machine: This one, ``None`` for whichever the file is of.
        dtype: The tokens', ``None`` if it is not known.

    Raises:
        ConfigError: It cannot be read, is not what it should be, or is of another machine or dtype.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"fit {path}: cannot be read: {error}; wanted a file of python -m "
            "flashmoe_megatron.schedule fit"
        ) from error
    kind = {"format": FORMAT, "version": VERSION}
    if not isinstance(content, dict) or any(content.get(key) != kind[key] for key in kind):
        raise ConfigError(
            f"fit {path}: wanted an object of format {FORMAT!r} and version {VERSION}; measure "
            "again with python -m flashmoe_megatron.schedule fit"
        )
    try:
        of = Machine(**content["machine"])
        lines = {str(name): Line(**line) for name, line in content["lines"].items()}
        samples = {
            str(name): [(float(size), float(time_s)) for size, time_s in pairs]
            for name, pairs in content["samples"].items()
        }
        beside = {str(name): Beside(**both) for name, both in content["beside"].items()}
        fit = Fit(of, str(content["dtype"]), lines, samples, beside)
        fit.torch_dtype  # noqa: B018 - an unknown name is an error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"fit {path}: it is not complete: {error!r}") from error
    if machine not in (None, of):
        raise ConfigError(
            f"fit {path} is of {of}, but this group is {machine}: wanted a fit of this machine, "
            "from python -m flashmoe_megatron.schedule fit with its --exchange, or degrees as "
            "numbers"
        )
    if dtype not in (None, fit.torch_dtype):
        raise ConfigError(
            f"fit {path} is of {fit.dtype}, but tokens are {dtype}: wanted a fit with --dtype "
            f"{str(dtype).removeprefix('torch.')}"
        )
    for name in of.wanted:
        if name not in lines or not _is_line(lines[name]):
            raise ConfigError(
                f"fit {path}: {name} is {lines.get(name)}, wanted an alpha and a beta in seconds"
            )
    for name in of.exchanges:
        both = beside.get(name)
        if both is None or not all(_is_at_least(1, one) for one in (both.product, both.exchange)):
            raise ConfigError(
                f"fit {path}: beside each other, a product and {name} take {both}, wanted two "
                "factors of at least 1"
            )
    return fit


def _is_line(line: Line) -> bool:
    return _is_at_least(0, line.alpha_s) and _is_at_least(0, line.beta_s)


def _is_at_least(least: float, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= least
