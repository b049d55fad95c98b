"""The ``"flashmoe"`` section of a DeepSpeed configuration, validated strictly.

DeepSpeed ignores keys that it does not know, so a misspelt one would switch nothing on and say
nothing. Needs neither torch nor DeepSpeed.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
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

SECTION = "flashmoe"
COMM_BACKEND = "flashmoe"
"""As ``expert_parallel.comm_backend``, another way to switch flashmoe on."""

_CHOICES = {
    "fallback": ("error", "warn"),
    "backend": ("auto", "kernel", "reference"),
    "symmetric_memory": ("cuda", "nvshmem"),
    "keep": KEEPS,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The section's keys and their defaults.

    Attributes:
        enabled: Replace DeepSpeed's MoE layers.
        fallback: What a layer that cannot be served does: "error" refuses to start, "warn" leaves
            it to DeepSpeed and says so.
        backend: "kernel", "reference", or "auto": the kernel on Hopper GPUs, the reference on
            processors.
        symmetric_memory: What the kernel shares memory between GPUs with, "cuda" or "nvshmem".
        timeout: Longest wait of the kernel for a peer, in seconds.
        reserved_sms: Multiprocessors that the kernel leaves free, for NCCL's kernels.
        row_bound: What the kernel's buffers of received rows hold, as a multiple of the mean number
            of rows per rank; a rank that receives more is an error, never a drop. ``None`` makes
            them exact, for which the host waits in every forward of training.
        keep: What a forward keeps for its backward: "all" that this needs; the first projection's
            outputs ("preactivations"), and rows of tokens are fetched again; or the layer's
            "inputs", from which the backward computes the rest again.
        max_tokens_per_rank: Most tokens of one rank and call. ``None`` has the ranks agree at each
            call, and the memory grow with the largest.
        metrics_interval: Optimizer steps between events for DeepSpeed's monitor; 0 sends none.
        metrics: What it is told: "default", "all", "none", or names with commas between them.
        calibration: File with the layers' time on 2 GPUs, for the overlap efficiency.
    """

    enabled: bool = False
    fallback: str = "error"
    backend: str = "auto"
    symmetric_memory: str = "cuda"
    timeout: float = DEFAULT_TIMEOUT_S
    reserved_sms: int = DEFAULT_RESERVED_SMS
    row_bound: float | None = None
    keep: Keep = "all"
    max_tokens_per_rank: int | None = None
    metrics_interval: int = 10
    metrics: str = "default"
    calibration: str | None = None

    def __post_init__(self) -> None:
        """Refuses values without a meaning."""
        _check_bool("enabled", self.enabled)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{_key(name)} is {value!r}, wanted one of {', '.join(choices)}")
        if not is_number(self.timeout, least=MIN_TIMEOUT_S, most=MAX_TIMEOUT_S):
            raise ConfigError(
                f"{_key('timeout')} is {self.timeout!r}, wanted seconds above 0, "
                f"{MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g}"
            )
        _check_count("reserved_sms", self.reserved_sms, least=0)
        if self.row_bound is not None and not is_number(
            self.row_bound, least=1, most=MAX_ROW_BOUND
        ):
            raise ConfigError(
                f"{_key('row_bound')} is {self.row_bound!r}, wanted a number of at least 1, at "
                f"most {MAX_ROW_BOUND:g}"
            )
        _check_count("metrics_interval", self.metrics_interval, least=0)
        if self.max_tokens_per_rank is not None:
            _check_count("max_tokens_per_rank", self.max_tokens_per_rank, least=1, most=MAX_TOKENS)
        try:
            choose_metrics(self.metrics)
        except ConfigError as error:
            raise ConfigError(f"{_key('metrics')} is {self.metrics!r}: {error}") from None
        if self.calibration is not None and not (
            isinstance(self.calibration, str) and self.calibration
        ):
            raise ConfigError(
                f"{_key('calibration')} is {self.calibration!r}, wanted the path of a file"
            )

    def kernel_options(self) -> dict[str, Any]:
        """What of this is passed to the kernel's backend."""
        return {
            "symmetric_backend": self.symmetric_memory,
            "timeout_s": float(self.timeout),
            "reserved_sms": self.reserved_sms,
            "row_bound": self.row_bound,
            "counters": self.metrics != "none",
        }


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Reads the section of a DeepSpeed configuration.

    Args:
        config: The whole configuration, as loaded from JSON.

    Returns:
        The settings; not enabled if there is no section.

    Raises:
        ConfigError: A key is unknown, with the nearest valid one; a value has no meaning; or
            there is a section that does not say whether to enable it.
    """
    for key in config:
        letters = str(key).lower().replace("_", "").replace("-", "")
        if letters == SECTION and key != SECTION:
            raise ConfigError(
                f"the DeepSpeed configuration has a section {key!r}, which nobody reads; wanted "
                f"{SECTION!r}"
            )
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'{SECTION} is {section!r}, wanted an object such as {{"enabled": true}} in the '
            "DeepSpeed configuration"
        )
    valid = [field.name for field in fields(Settings)]
    for key in section:
        if key not in valid:
            (nearest,) = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.0)
            raise ConfigError(
                f"{_key(key)} in the DeepSpeed configuration is unknown, the nearest valid key is "
                f"{_key(nearest)}; wanted some of {', '.join(valid)}"
            )
    if SECTION in config and "enabled" not in section:
        raise ConfigError(f"{_key('enabled')} is missing, wanted true or false")
    return Settings(**section)


def resolve_alias(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Understands ``"expert_parallel": {"comm_backend": "flashmoe"}``.

    Args:
        config: The whole configuration.

    Returns:
        A configuration that DeepSpeed accepts, with the section enabled; ``None`` if the alias is
        not used.

    Raises:
        ConfigError: The section itself says not to enable it.
    """
    expert_parallel = config.get("expert_parallel")
    if not isinstance(expert_parallel, Mapping):
        return None
    if expert_parallel.get("comm_backend") != COMM_BACKEND:
        return None
    section = config.get(SECTION, {})
    if isinstance(section, Mapping) and section.get("enabled") is False:
        raise ConfigError(
            f'expert_parallel.comm_backend is "{COMM_BACKEND}" but {_key("enabled")} is false; '
            "wanted one of the two"
        )
    return {
        **config,
        "expert_parallel": {**expert_parallel, "comm_backend": "comm"},
        SECTION: {**section, "enabled": True} if isinstance(section, Mapping) else section,
    }


def _key(name: object) -> str:
    # A misspelt one comes from a file and may hold anything; a message is one line.
    printable = (c if c.isprintable() else ascii(c)[1:-1] for c in str(name))
    return f"{SECTION}.{''.join(printable)}"


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{_key(name)} is {value!r}, wanted true or false")


def _check_count(name: str, value: object, *, least: int, most: int = 2**31 - 1) -> None:
    if not is_count(value, least=least, most=most):
        raise ConfigError(
            f"{_key(name)} is {value!r}, wanted a whole number, at least {least}, at most {most}"
        )
