"""What a user chooses for the flashmoe dispatcher, from the command line or from code.

Needs nothing of Megatron; reads its parsed arguments where a training script has some.
"""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from flashmoe_megatron.adapters.settings import LayerSettings
from flashmoe_megatron.config import DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S
from flashmoe_megatron.errors import ConfigError

DISPATCHER_TYPE = "flashmoe"
"""The choice for ``--moe-token-dispatcher-type``."""


@dataclass(frozen=True, kw_only=True)
class Settings(LayerSettings):
    """Options of the flashmoe dispatcher; each is a ``--flashmoe-*`` flag too.

    Attributes:
        timeout_s: Longest wait of the kernel for a peer, in seconds. ``None`` takes that of the
            script's process groups, ``--distributed-timeout-minutes``; without a script 120.
        max_tokens: Most tokens of one rank and call. ``None`` takes it from the arguments of
            Megatron's training script: sequence length, micro batch size and parallel sizes, and
            those of the inference engine that it makes.
    """

    timeout_s: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuses values without a meaning."""
        super().__post_init__()
        for name in ("timeout_s", "max_tokens"):
            if getattr(self, name) is not None:
                self._check(name)

    def _kernel_timeout_s(self) -> float:
        return _script_timeout_s() if self.timeout_s is None else self.timeout_s

    def _refusal(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"{flag_of(name)} {getattr(self, name)!r}: {why}")


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
