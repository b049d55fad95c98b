"""The ``"flashmoe"`` section of a DeepSpeed configuration, validated strictly.

DeepSpeed ignores keys that it does not know, so a misspelt one would switch nothing on and say
nothing. Needs neither torch nor DeepSpeed.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flashmoe_megatron.adapters.settings import LayerSettings
from flashmoe_megatron.config import DEFAULT_TIMEOUT_S, is_count
from flashmoe_megatron.errors import ConfigError

SECTION = "flashmoe"
COMM_BACKEND = "flashmoe"
"""As ``expert_parallel.comm_backend``, another way to switch flashmoe on."""

_FALLBACKS = ("error", "warn")


@dataclass(frozen=True, kw_only=True)
class Settings(LayerSettings):
    """The section's keys and their defaults.

    Attributes:
        enabled: Replace DeepSpeed's MoE layers.
        fallback: What a layer that cannot be served does: "error" refuses to start, "warn" leaves
            it to DeepSpeed and says so.
        timeout: Longest wait of the kernel for a peer, in seconds.
        max_tokens_per_rank: Most tokens of one rank and call. ``None`` has the ranks agree at each
            call, and the memory grow with the largest.
        metrics_interval: Optimizer steps between events for DeepSpeed's monitor; 0 sends none.
    """

    enabled: bool = False
    fallback: str = "error"
    timeout: float = DEFAULT_TIMEOUT_S
    max_tokens_per_rank: int | None = None
    metrics_interval: int = 10

    def __post_init__(self) -> None:
        """Refuses values without a meaning."""
        if not isinstance(self.enabled, bool):
            raise self._refusal("enabled", "wanted true or false")
        if self.fallback not in _FALLBACKS:
            raise self._refusal("fallback", f"wanted one of {', '.join(_FALLBACKS)}")
        super().__post_init__()
        self._check("timeout", "timeout_s")
        if self.max_tokens_per_rank is not None:
            self._check("max_tokens_per_rank", "max_tokens")
        if not is_count(self.metrics_interval, least=0, most=2**31 - 1):
            raise self._refusal("metrics_interval", "wanted a whole number of at least 0")

    def _kernel_timeout_s(self) -> float:
        return float(self.timeout)

    def _refusal(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"{_key(name)} is {getattr(self, name)!r}, {why}")


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
