"""The ``"flashmoe"`` section of a DeepSpeed configuration, validated strictly.

DeepSpeed ignores keys that it does not know, so a misspelt one would switch nothing on and say
nothing. Needs neither torch nor DeepSpeed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from flashmoe_megatron.adapters.options import RANKS_AGREE
from flashmoe_megatron.config import nearest
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import (
    NOT_MEASURED,
    FrameworkOptions,
    GatedOptions,
    one_of,
    option,
    options_of,
    true_or_false,
    unset_option,
    whole_number,
)

SECTION = "flashmoe"
COMM_BACKEND = "flashmoe"
"""A value of ``expert_parallel.comm_backend`` that switches flashmoe on, too."""


@dataclass(frozen=True, kw_only=True)
class Settings(GatedOptions):
    """The section's keys and their defaults."""

    enabled: bool = option(False, true_or_false(), "Replace DeepSpeed's MoE layers.")
    fallback: str = option(
        "error",
        one_of(("error", "warn")),
        "What happens where a layer cannot be served. error refuses to start, warn leaves the "
        "layer to DeepSpeed and logs a warning.",
    )
    metrics_interval: int = option(
        10,
        whole_number(least=0),
        "How many optimizer steps lie between events for DeepSpeed's monitor, on its axis of "
        "samples. 0 sends none.",
    )
    max_tokens: int | None = unset_option(FrameworkOptions, "max_tokens", RANKS_AGREE)

    def __post_init__(self) -> None:
        """Refuses values without a meaning in DeepSpeed."""
        super().__post_init__()
        if self.row_bound == "auto":
            raise self.refusal("row_bound", self.row_bound, NOT_MEASURED)
        if self.gate != "router" and self.fallback == "warn":
            way_out = f'wanted "router", or {_key("fallback")} "error": DeepSpeed has no such gate'
            raise self.refusal("gate", self.gate, way_out)

    @classmethod
    def refusal(cls, name: str, value: object, wanted: str) -> ConfigError:
        """The error that a value is, which names the key."""
        return ConfigError(f"{_key(name)} is {value!r}, {wanted}")


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Reads the section of a DeepSpeed configuration; without one, flashmoe is not enabled.

    Raises:
        ConfigError: A key is unknown (the message names a similar one); a value has no meaning;
            another section has nearly this one's name; or there is a section that does not say
            whether to enable it.
    """
    for key in config:
        letters = str(key).lower().replace("_", "").replace("-", "")
        is_like = letters.startswith(SECTION) or get_close_matches(letters, [SECTION], cutoff=0.9)
        if is_like and key != SECTION:
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
    valid = [one.name for one in options_of(Settings)]
    for key in section:
        if key not in valid:
            raise ConfigError(
                f"{_key(key)} in the DeepSpeed configuration is unknown"
                f"{nearest(key, valid, _key)}; wanted some of {', '.join(valid)}"
            )
    if SECTION in config and "enabled" not in section:
        raise ConfigError(f"{_key('enabled')} is missing, wanted true or false")
    return Settings(**section)


def resolve_alias(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Understands ``"expert_parallel": {"comm_backend": "flashmoe"}``.

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
