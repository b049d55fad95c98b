"""Settings of the flashmoe dispatcher, chosen on the command line or in code.

Needs nothing of Megatron; reads its parsed arguments where a training script has some.
"""

import sys
from dataclasses import dataclass
from typing import Any, Literal

from flashmoe_megatron.config import DEFAULT_TIMEOUT, MAX_TIMEOUT, MIN_TIMEOUT, nearest
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import (
    BackendOptions,
    FrameworkOptions,
    GatedOptions,
    make_options,
    number,
    one_of,
    option,
    options_of,
    read_flags,
    switch,
    unset_option,
)

DISPATCHER_TYPE = "flashmoe"
"""The choice for ``--moe-token-dispatcher-type``."""

STOCK_DISPATCHER_TYPE = "alltoall"
"""Megatron's own dispatcher that computes the same."""

FLAG_PREFIX = "flashmoe"
"""Begins every flag, and the name of its value among Megatron's arguments."""


@dataclass(frozen=True, kw_only=True)
class Settings(GatedOptions):
    """Options of the flashmoe dispatcher; each is a ``--flashmoe-*`` flag too."""

    timeout: float | None = unset_option(  # type: ignore[assignment]  # backend_options has none
        BackendOptions,
        "timeout",
        f"that of --distributed-timeout-minutes; without a script {DEFAULT_TIMEOUT:g}",
    )
    max_tokens: int | None = unset_option(
        FrameworkOptions,
        "max_tokens",
        "from the script's sequence length, micro batch size and parallel sizes, and from those of "
        "the inference engine that it makes; without a script, the ranks agree in every call",
    )

    pre_gate: bool = option(
        False,
        switch(),
        "Choose experts from the input of a Transformer layer, before its attention, as CCFuser "
        "does. This is another model, which has to be trained and used with the option. A small "
        "one had the loss of Megatron's router, and no gain of time has been measured. With "
        "placement lookahead, replicas are settled on from the routing itself.",
    )

    multipath: Literal["auto", "off"] = option(
        "off",
        one_of(("auto", "off")),
        "Whether the distributed optimizer moves buckets of at least 64 MiB over all links "
        "between GPUs at once, by copy engines. It gathers parameters so, and reduces the "
        "gradients of two ranks, which are then summed in float32.",
    )

    multipath_watch: float | None = option(
        None,
        number(
            f"seconds above 0, {MIN_TIMEOUT:g} to {MAX_TIMEOUT:g}",
            least=MIN_TIMEOUT,
            most=MAX_TIMEOUT,
            metavar="SECONDS",
        ),
        "After how many seconds a line in the log tells of a transfer of multipath that has not "
        "ended, or that there has been none: how far each rank has come with it, and where the "
        "rank's program stands.",
        unset="no lines",
    )

    def backend_options(self) -> dict[str, Any]:
        """Gives the options of a backend, with the script's timeout where none was chosen."""
        given = super().backend_options()
        if self.timeout is None:
            # As long as Megatron's own exchanges wait, since a rank may be writing a profile.
            minutes = getattr(megatron_args(), "distributed_timeout_minutes", None) or 0
            is_given = minutes > 0
            given["timeout"] = min(60.0 * minutes, MAX_TIMEOUT) if is_given else DEFAULT_TIMEOUT
        return given

    @classmethod
    def refusal(cls, name: str, value: object, wanted: str) -> ConfigError:
        """The error that a value is, which names the flag."""
        return ConfigError(f"{flag_of(name)} {value!r}: {wanted}")


def flag_of(name: str) -> str:
    """The command-line flag of a field of :class:`Settings`."""
    return f"--{FLAG_PREFIX}-{name.replace('_', '-')}"


unread_flags: set[str] = set()
"""Flags of this package on the launcher's command line that no parser has taken yet."""


def check_flags_are_read() -> None:
    """Refuses a flag that would have no effect, before a model is built without it.

    Raises:
        ConfigError: No parser of the script that the launcher runs has taken a flag.
    """
    for flag in sorted(unread_flags):
        raise ConfigError(
            f"no parser of the script takes {flag}{nearest_flag(flag)}: wanted a script that "
            "parses Megatron's arguments; in another one, call configure of "
            "flashmoe_megatron.adapters.megatron"
        )


def nearest_flag(flag: str) -> str:
    """Returns words that name the flag of :class:`Settings` that is meant by a misspelt one."""
    ours = flag_of("")
    names = [flag_of(one.name).removeprefix(ours) for one in options_of(Settings)]
    name = flag.removeprefix(ours)
    return "" if name in names else nearest(name, names, lambda one: f"{ours}{one}")


_chosen: Settings | None = None


def current_value(name: str) -> Any:
    """One of the current settings, without the cost of reading and checking all of them."""
    if _chosen is not None:
        return getattr(_chosen, name)
    default = Settings.__dataclass_fields__[name].default
    return getattr(megatron_args(), f"{FLAG_PREFIX}_{name}", default)


def configure(**options: Any) -> Settings:
    """Chooses settings from code, for models that are built without Megatron's arguments.

    Takes effect for layers built later; goes before the command line. The options are fields of
    :class:`Settings`; what is left out has its default.

    Raises:
        ConfigError: A name is unknown, or a value has no meaning.
    """
    global _chosen
    _chosen = make_options(Settings, options)
    return _chosen


def current_settings() -> Settings:
    """Returns the settings from code, else from the command line, else the defaults.

    Raises:
        ConfigError: See :func:`check_flags_are_read`.
    """
    check_flags_are_read()
    if _chosen is not None:
        return _chosen
    return Settings(**read_flags(megatron_args(), Settings, FLAG_PREFIX))


def megatron_args() -> Any:
    """The parsed arguments of Megatron's training script, ``None`` if there are none."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)
