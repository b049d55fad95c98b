"""The layer's time on 2 GPUs, against which overlap efficiency is measured.

Overlap efficiency Oe = T(2) / T(N) needs a time that no run on N GPUs can measure, so it is
measured once by ``flashmoe_megatron.calibrate`` and kept in a file of JSON. Nothing is ever
estimated in its place: what is not in the file is an error at start-up, or an absent metric.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from flashmoe_megatron.config import Keep, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured import files
from flashmoe_megatron.telemetry.record import Direction

FILE = files.Kind("calibration file", "flashmoe-calibration", version=3)
"""Version 1 did not say how the layer ran, version 2 not what a gate has besides its activation."""
MOST = 1e15
"""No time in a file is larger."""
TOKEN_TOLERANCE = 0.01
"""How far the mean number of tokens of a launch may be from the calibrated one, relative."""

Grads = Literal["main_grad", "own"]
"""The weights' gradients are added to float32 buffers, or written in the weights' dtype."""
GRADS: tuple[Grads, ...] = get_args(Grads)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One measurement on 2 GPUs of a layer, whose shape has the names of its configuration.

    Attributes:
        num_tokens: Tokens of each of the 2 ranks in one launch.
        gpu: Name of the GPU, as the driver gives it.
        dtype: The tokens' dtype, "bfloat16", "float16", "float32" or "float64".
        direction: "forward" or "backward".
        bounded: Whether there was a ``row_bound``: then a forward that trains is one launch with
            its plan in it, else the plan is a launch of its own, which is not in ``time_ms``.
        keep: What forwards kept for their backwards.
        grads: Where the weights' gradients went.
        time_ms: Mean time of one launch or call, as the metric ``layer_ms`` has it.
    """

    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    activation: str
    gated: bool
    clamp_value: float | None
    linear_offset: float
    glu_interleave: int
    num_tokens: int
    gpu: str
    dtype: Literal["bfloat16", "float16", "float32", "float64"]
    direction: Direction
    bounded: bool
    keep: Keep
    grads: Grads
    time_ms: float

    @classmethod
    def of(
        cls,
        config: MoEConfig,
        *,
        bounded: bool = False,
        keep: Keep = "all",
        grads: Grads = "own",
        **measured: Any,
    ) -> "Entry":
        """Returns the entry of a layer on 2 ranks; ``measured`` has the other attributes.

        Raises:
            ConfigError: The layer is not on 2 ranks, or the time is none.
        """
        if config.num_ranks != 2:
            raise ConfigError(f"calibrated on {config.num_ranks} ranks, wanted 2: Oe = T(2) / T(N)")
        ran_as = {"bounded": bounded, "keep": keep, "grads": grads}
        values = {**_shape_of(config), **ran_as, **measured}
        return _parse_entry(values, where="this measurement")

    def describe(self) -> str:
        """Describes the entry in one phrase, for messages."""
        gate = "gated " if self.gated else ""
        bound = "with" if self.bounded else "without"
        terms = "".join(
            f" {name}={getattr(self, name):g}" for name in _GLU_TERMS if getattr(self, name)
        )
        return (
            f"H={self.hidden} F={self.intermediate} E={self.num_experts} top-{self.topk} "
            f"{gate}{self.activation}{terms}, {self.num_tokens} tokens, {self.dtype}, "
            f"{self.direction} {bound} row bound, keep {self.keep}, grads {self.grads}, "
            f"on {self.gpu}"
        )


_GLU_TERMS = ("clamp_value", "linear_offset", "glu_interleave")
_SHAPE = ("hidden", "intermediate", "num_experts", "topk", "activation", "gated", *_GLU_TERMS)
_MEASURED = ("bounded", "keep", "grads", "time_ms")
"""How a layer ran, and the time that it took."""


def _shape_of(config: MoEConfig) -> dict[str, Any]:
    shape = {name: getattr(config, name) for name in _SHAPE}
    return {**shape, "activation": config.activation.value}


class Calibration:
    """A file's times for one kind of GPU and one dtype.

    Args:
        entries: What the file holds.
        gpu: This machine's GPU.
        dtype: The dtype of the run's tokens.
    """

    def __init__(self, entries: Iterable[Entry], *, gpu: str, dtype: str) -> None:
        self._entries = [one for one in entries if (one.gpu, one.dtype) == (gpu, dtype)]

    def time_ms(
        self, config: MoEConfig, direction: Direction, *, num_tokens: float
    ) -> float | None:
        """Returns T(2) of a layer, ``None`` if the file has none.

        ``num_tokens`` is the mean of one rank and launch, within 1 % of the measured ones.
        """
        wanted = {**_shape_of(config), "direction": direction}
        for entry in self._entries:
            near = abs(num_tokens - entry.num_tokens) <= TOKEN_TOLERANCE * entry.num_tokens
            if near and not _unlike(entry, wanted):
                return entry.time_ms
        return None


def load_calibration(
    path: str | Path,
    configs: Iterable[MoEConfig],
    *,
    gpu: str,
    dtype: str,
    num_tokens: int | None = None,
    bounded: bool | None = None,
    keep: Keep | None = None,
    grads: Grads | None = None,
) -> Calibration:
    """Reads the file for a run.

    Args:
        path: Where the file is.
        configs: Shapes of the run's layers.
        gpu: Name of this machine's GPU.
        dtype: The dtype of the run's tokens.
        num_tokens: Tokens of one rank and launch, if they are known beforehand.
        bounded: Whether the run has a ``row_bound``; ``None``, as for the next two, if the caller
            cannot tell, and then the file's word is taken.
        keep: What the run's forwards keep for their backwards.
        grads: Where the run's weight gradients go.

    Returns:
        The times that concern the run.

    Raises:
        ConfigError: The file cannot be read, is not what it should be, or has no forward of a
            layer with this shape, GPU and dtype that ran as the run does; says what it has.
    """
    entries = read_entries(path)
    told = {"bounded": bounded, "keep": keep, "grads": grads}
    ran_as = {name: value for name, value in told.items() if value is not None}
    for config in dict.fromkeys(configs):
        wanted = {**_shape_of(config), "gpu": gpu, "dtype": dtype, **ran_as, "direction": "forward"}
        if num_tokens is not None:
            wanted["num_tokens"] = num_tokens
        if all(_unlike(entry, wanted) for entry in entries):
            _refuse(Path(path), entries, wanted)
    alike = [entry for entry in entries if not _unlike(entry, ran_as)]
    return Calibration(alike, gpu=gpu, dtype=dtype)


def gpu_name(device: torch.device) -> str:
    """Returns the name of a device in entries: the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _unlike(entry: Entry, wanted: Mapping[str, Any]) -> list[str]:
    """Lists the fields of an entry that are not as wanted."""
    return [name for name, want in wanted.items() if getattr(entry, name) != want]


def _refuse(path: Path, entries: list[Entry], wanted: Mapping[str, Any]) -> None:
    nearest = min(entries, key=lambda entry: len(_unlike(entry, wanted)))
    different = ", ".join(
        f"{name} {getattr(nearest, name)!r} and not {wanted[name]!r}"
        for name in _unlike(nearest, wanted)
    )
    raise ConfigError(
        f"calibration file {path}: none of its {len(entries)} entries is of this run. The nearest "
        f"({nearest.describe()}) has {different}. Measure this layer on 2 GPUs with "
        "python -m flashmoe_megatron.calibrate, or leave the file out"
    )


def read_entries(path: str | Path) -> list[Entry]:
    """Reads and checks a file; returns its entries, at least one.

    Raises:
        ConfigError: It cannot be read, or is not what it should be; says where.
    """
    path = Path(path)
    content = FILE.read(path, parse_constant=_no_constant)
    if not isinstance(content, dict) or content.keys() != {*FILE.head, "entries"}:
        raise ConfigError(
            f"{FILE.name} {path}: got {files.keys_of(content)}, wanted an object of format, "
            "version and entries"
        )
    if {**content, **FILE.head} != content:
        raise ConfigError(
            f"{FILE.name} {path}: format {content['format']!r} of version {content['version']!r}, "
            f"wanted {FILE.format!r} of version {FILE.version}; measure again with "
            "python -m flashmoe_megatron.calibrate, into a new file"
        )
    if not isinstance(content["entries"], list) or not content["entries"]:
        raise ConfigError(f"{FILE.name} {path}: it has no list of entries, wanted at least 1")
    entries: dict[tuple[Any, ...], Entry] = {}
    for index, values in enumerate(content["entries"]):
        entry = _parse_entry(values, where=f"{FILE.name} {path}, entry {index}")
        if entries.setdefault(_key(entry), entry) is not entry:
            raise ConfigError(f"{FILE.name} {path}: {entry.describe()} is there twice, wanted once")
    return list(entries.values())


def write_entries(path: str | Path, entries: Iterable[Entry]) -> None:
    """Adds entries to a file, or makes it; entries of the same layer and machine are replaced.

    So they are where the layer ran in another way: a file has one time for each layer, and a run
    that cannot tell how it runs takes that.

    Raises:
        ConfigError: A file is there that is not one of these, or it cannot be written.
    """
    path = Path(path)
    merged = {_key(entry): entry for entry in (read_entries(path) if path.exists() else [])}
    merged |= {_key(entry): entry for entry in entries}
    rows = [dataclasses.asdict(entry) for entry in merged.values()]
    try:
        files.replace(path, {**FILE.head, "entries": rows})
    except OSError as error:
        raise ConfigError(f"{FILE.name} {path}: cannot be written: {error}") from error


def _key(entry: Entry) -> tuple[Any, ...]:
    return tuple(
        value for name, value in dataclasses.asdict(entry).items() if name not in _MEASURED
    )


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _parse_entry(values: Any, *, where: str) -> Entry:
    files.check(Entry, values, where)
    if not 0 < values["time_ms"] <= MOST:
        raise ConfigError(
            f"{where}: time_ms is {values['time_ms']!r}, wanted above 0, at most {MOST:.0e}"
        )
    if not values["gpu"]:
        raise ConfigError(f"{where}: gpu is empty, wanted the GPU's name")
    shape = {name: values[name] for name in _SHAPE}
    try:
        MoEConfig(**shape, num_ranks=2, max_tokens=values["num_tokens"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Entry(**values)
