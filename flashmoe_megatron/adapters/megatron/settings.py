"""What a user chooses for the flashmoe dispatcher, from the command line or from code.

Needs nothing of Megatron; reads its parsed arguments where a training script has some.
"""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from flashmoe_megatron.config import (
    DEFAULT_RESERVED_SMS,
    DEFAULT_TIMEOUT_S,
    KEEPS,
    MAX_ROW_BOUND,
    MAX_TIMEOUT_S,
    MAX_TOKENS,
    MIN_TIMEOUT_S,
    Keep,
    is_count,
    is_number,
)
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.telemetry.registry import choose_metrics

DISPATCHER_TYPE = "flashmoe"
"""The choice for ``--moe-token-dispatcher-type``."""

BACKENDS = ("auto", "kernel", "reference")
SYMMETRIC_MEMORIES = ("cuda", "nvshmem")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the flashmoe dispatcher; each is a ``--flashmoe-*`` flag too.

    Attributes:
        backend: "kernel", "reference", or "auto": the kernel on a Hopper GPU, else the reference.
        symmetric_memory: What the kernel shares memory between GPUs with, "cuda" or "nvshmem".
        timeout_s: Longest wait of the kernel for a peer, in seconds. ``None`` takes that of the
            script's process groups, ``--distributed-timeout-minutes``; without a script 120.
        reserved_sms: Multiprocessors that the kernel leaves free, for NCCL's kernels.
        row_bound: What the kernel's buffers of received rows hold, as a multiple of the mean number
            of rows per rank; a rank that receives more is an error, never a drop. ``None`` makes
            them exact, for which the host waits in every forward of training.
        keep: What a forward keeps for its backward: "all" that this needs; the first projection's
            outputs, "preactivations", for which tokens are fetched again; or the layer's "inputs",
            from which the backward computes the rest again.
        max_tokens: Most tokens of one rank and call. ``None`` takes it from the arguments of
            Megatron's training script: sequence length, micro batch size and parallel sizes, and
            those of the inference engine that it makes.
        metrics: What is told to wandb and TensorBoard: "default", "all", "none", or names with
            commas between them.
        calibration: File with the layer's time on 2 GPUs, for the overlap efficiency.
    """

    backend: str = "auto"
    symmetric_memory: str = "cuda"
    timeout_s: float | None = None
    reserved_sms: int = DEFAULT_RESERVED_SMS
    row_bound: float | None = None
    keep: Keep = "all"
    max_tokens: int | None = None
    metrics: str = "default"
    calibration: str | None = None

    def __post_init__(self) -> None:
        """Refuses values without a meaning."""
        for name, value, choices in (
            ("backend", self.backend, BACKENDS),
            ("symmetric_memory", self.symmetric_memory, SYMMETRIC_MEMORIES),
            ("keep", self.keep, KEEPS),
        ):
            if value not in choices:
                raise ConfigError(f"{flag_of(name)} {value!r}: wanted one of {', '.join(choices)}")
        if self.timeout_s is not None and not is_number(
            self.timeout_s, least=MIN_TIMEOUT_S, most=MAX_TIMEOUT_S
        ):
            raise ConfigError(
                f"{flag_of('timeout_s')} {self.timeout_s!r}: must be positive, wanted "
                f"{MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} seconds"
            )
        if not is_count(self.reserved_sms, least=0):
            raise ConfigError(
                f"{flag_of('reserved_sms')} {self.reserved_sms!r}: must not be negative, and a "
                "whole number"
            )
        if self.row_bound is not None and not is_number(
            self.row_bound, least=1, most=MAX_ROW_BOUND
        ):
            raise ConfigError(
                f"{flag_of('row_bound')} {self.row_bound!r}: must be at least 1, at most "
                f"{MAX_ROW_BOUND:g}"
            )
        if self.max_tokens is not None and not is_count(self.max_tokens, least=1, most=MAX_TOKENS):
            raise ConfigError(
                f"{flag_of('max_tokens')} {self.max_tokens!r}: must be at least 1, at most "
                f"{MAX_TOKENS}"
            )
        try:
            choose_metrics(self.metrics)
        except ConfigError as error:
            raise ConfigError(f"{flag_of('metrics')} {self.metrics!r}: {error}") from None
        if self.calibration is not None and not (
            isinstance(self.calibration, str) and self.calibration
        ):
            raise ConfigError(
                f"{flag_of('calibration')} {self.calibration!r}: wanted the path of a file"
            )

    def kernel_options(self) -> dict[str, Any]:
        """What of this is passed to the kernel's backend."""
        return {
            "symmetric_backend": self.symmetric_memory,
            "timeout_s": _script_timeout_s() if self.timeout_s is None else self.timeout_s,
            "reserved_sms": self.reserved_sms,
            "row_bound": self.row_bound,
            "counters": self.metrics != "none",
        }


def _script_timeout_s() -> float:
    """How long Megatron's own exchanges wait for a rank, as for one that writes a profile."""
    minutes = getattr(megatron_args(), "distributed_timeout_minutes", None)
    if not minutes or minutes < 0:
        return DEFAULT_TIMEOUT_S
    return min(60 * float(minutes), MAX_TIMEOUT_S)


def flag_of(name: str) -> str:
    """The command-line flag of a field of :class:`Settings`."""
    return "--flashmoe-" + name.removesuffix("_s").replace("_", "-")


_chosen: Settings | None = None


def configure(**options: Any) -> Settings:
    """Chooses settings from code, for models that are built without Megatron's arguments.

    Takes effect for layers built later; goes before the command line.

    Args:
        **options: Fields of :class:`Settings`; what is left out has its default.

    Returns:
        The settings.

    Raises:
        ConfigError: A value has no meaning.
    """
    global _chosen
    unknown = options.keys() - {field.name for field in dataclasses.fields(Settings)}
    if unknown:
        raise ConfigError(
            f"unknown settings {', '.join(sorted(unknown))}: wanted some of "
            f"{', '.join(field.name for field in dataclasses.fields(Settings))}"
        )
    _chosen = Settings(**options)
    return _chosen


def current_settings() -> Settings:
    """What was chosen in code, else on the command line, else the defaults."""
    if _chosen is not None:
        return _chosen
    args = megatron_args()
    given = {
        field.name: getattr(args, f"flashmoe_{field.name}")
        for field in dataclasses.fields(Settings)
        if hasattr(args, f"flashmoe_{field.name}")
    }
    return Settings(**given)


def megatron_args() -> Any:
    """The parsed arguments of Megatron's training script, ``None`` if there are none."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)
