"""How a layer runs: what each option may be, and those of the kernel.

Needs neither torch nor a GPU, so that a configuration can be read without either.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from flashmoe_megatron.config import (
    DEFAULT_RESERVED_SMS,
    DEFAULT_TIMEOUT_S,
    KEEPS,
    MAX_ROW_BOUND,
    MAX_TIMEOUT_S,
    MAX_TOKENS,
    MIN_TIMEOUT_S,
    is_count,
    is_number,
)
from flashmoe_megatron.errors import ConfigError

BackendKind = Literal["auto", "kernel", "reference"]
SymmetricBackend = Literal["cuda", "nvshmem"]
BACKENDS: tuple[str, ...] = get_args(BackendKind)
SYMMETRIC_BACKENDS: tuple[str, ...] = get_args(SymmetricBackend)


class _Rule(NamedTuple):
    """What a value has to be, and how that is said to who gives another."""

    accepts: Callable[[Any], bool]
    wanted: str


def _one_of(choices: Collection[str]) -> _Rule:
    return _Rule(
        lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}"
    )


def _count(least: int, most: int) -> _Rule:
    return _Rule(
        lambda value: is_count(value, least=least, most=most),
        f"a whole number, at least {least}, at most {most}",
    )


_RULES = {
    "backend": _one_of(BACKENDS),
    "symmetric_backend": _one_of(SYMMETRIC_BACKENDS),
    "timeout_s": _Rule(
        lambda value: is_number(value, least=MIN_TIMEOUT_S, most=MAX_TIMEOUT_S),
        f"seconds above 0, {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g}",
    ),
    "reserved_sms": _count(0, 2**31 - 1),
    "row_bound": _Rule(
        lambda value: value is None or is_number(value, least=1, most=MAX_ROW_BOUND),
        f"a number of at least 1, at most {MAX_ROW_BOUND:g}, or None",
    ),
    "keep": _one_of(KEEPS),
    "max_tokens": _count(1, MAX_TOKENS),
    "counters": _Rule(lambda value: isinstance(value, bool), "True or False"),
}


def wanted_instead(option: str, value: object) -> str | None:
    """What an option has to be where it cannot be ``value``.

    Args:
        option: A field of :class:`KernelOptions`, or "backend", "keep" or "max_tokens".
        value: Any.

    Returns:
        The end of a sentence that begins with "wanted", ``None`` if the value will do.
    """
    rule = _RULES[option]
    return None if rule.accepts(value) else rule.wanted


@dataclass(frozen=True)
class KernelOptions:
    """How the kernel runs; the same on every rank.

    Attributes:
        symmetric_backend: "cuda" or "nvshmem".
        timeout_s: Bound of every wait for a peer, seconds.
        reserved_sms: SMs left to other kernels.
        row_bound: What every buffer of received rows holds, as a multiple of the mean number of
            rows per rank; a rank that is to receive more is an error, nothing is ever dropped. The
            layer is then one launch that the host never waits for, and CUDA graphs can capture it;
            who replays one orders it with all other calls of the group's layers. ``None``: buffers
            are exact, for which the host waits until the rows are counted.
        counters: Whether launches count where their time goes and what they move, and leave a
            record each. Off, they save the little that this costs.
    """

    symmetric_backend: SymmetricBackend = "cuda"
    timeout_s: float = DEFAULT_TIMEOUT_S
    reserved_sms: int = DEFAULT_RESERVED_SMS
    row_bound: float | None = None
    counters: bool = True

    def __post_init__(self) -> None:
        """Refuses what cannot work."""
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = wanted_instead(field.name, value)
            if wanted is not None:
                raise ConfigError(f"{field.name}={value!r}: wanted {wanted}")
