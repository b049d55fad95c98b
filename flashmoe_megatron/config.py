"""The shape of one mixture-of-experts layer, validated once, free of any device."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from flashmoe_megatron.errors import ConfigError

TILE_M = 128
"""Rows of a tile: every expert's segment of rows starts at a multiple of it (bM of the paper)."""

ALIGNMENT_BYTES = 16
"""Rows start at a multiple of it, as TMA descriptors and loads of 16 bytes want."""

DIM_GRANULE = 64
"""Hidden and intermediate size must be divisible by this (one 128-byte swizzle row of BF16)."""

MAX_TOPK = 16
MAX_RANKS = 8
MAX_WIDTH = 2**20
MAX_EXPERTS = 2**16
MAX_TOKENS = 2**24
MIN_TIMEOUT, MAX_TIMEOUT = 1e-6, 1e9
"""Bounds of a timeout in seconds: its nanoseconds are a whole number that fits 63 bits."""
DEFAULT_TIMEOUT = 120.0
DEFAULT_RESERVED_SMS = 4
"""SMs that the persistent kernel leaves to other kernels, NCCL's above all."""
MAX_ROW_BOUND = 1e6


def is_count(value: object, *, least: int, most: float = math.inf) -> bool:
    """Whether a value is an int in a range; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def got(name: str, value: object) -> str:
    """A name and its value as messages begin; a number that is no int is told with its type.

    An integer of another library may look like the int that is wanted: the type says why it is not.
    """
    kind = type(value)
    is_foreign = hasattr(kind, "__index__") and kind not in (int, bool)
    return f"{name}={value!r}" + (f" of type {kind.__module__}.{kind.__name__}" * is_foreign)


def is_number(value: object, *, least: float, most: float) -> bool:
    """Whether a value is a number in a range; NaN is in none, a bool is none."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and least <= value <= most  # type: ignore[operator]


Keep = Literal["all", "preactivations", "inputs"]
"""What a forward keeps for its backward; the option ``keep`` says what each word means."""
KEEPS: tuple[Keep, ...] = ("all", "preactivations", "inputs")
KeepOption = Literal["auto", "all", "preactivations", "inputs"]
"""The same, or that sizes decide: :func:`~flashmoe_megatron.planner.choose_keep`."""


class Activation(str, Enum):
    """What is applied to the first projection (to its gate half, if the FFN is gated)."""

    SILU = "silu"
    GELU = "gelu"  # the exact form, with erf
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    SQUARED_RELU = "squared_relu"


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer as its expert-parallel group sees it.

    Attributes:
        hidden: Model width H.
        intermediate: FFN width F of one expert (half of fc1's rows if ``gated``).
        num_experts: Experts of the whole group.
        topk: Most experts that one token may select.
        activation: Applied to fc1's output, or to its gate half; may be given by its value.
        gated: Whether fc1 is ``[2F, H]`` with the gate rows first and the FFN computes
            ``act(gate) * up`` (SwiGLU with ``Activation.SILU``).
        num_ranks: Ranks of the expert-parallel group; each owns ``num_experts / num_ranks``
            consecutive experts.
        max_tokens: Upper bound of the tokens of one rank and call; sizes the symmetric heap. The
            kernel takes 1,024 for each CTA, one on each SM that is not reserved.
        skip_zero_probs: Leave out routes whose probability is exactly 0. Megatron's padding to
            capacity fills experts with such routes; they change neither results nor gradients.
    """

    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    activation: Activation
    gated: bool
    num_ranks: int
    max_tokens: int
    skip_zero_probs: bool = False

    def __post_init__(self) -> None:
        """Refuses what no backend of this package can honour."""
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if not is_count(value, least=1, most=MAX_WIDTH) or value % DIM_GRANULE:
                raise ConfigError(
                    f"{got(name, value)}: must be an int, a positive multiple of {DIM_GRANULE}, at "
                    f"most {MAX_WIDTH}"
                )
        if not is_count(self.num_ranks, least=1, most=MAX_RANKS):
            raise ConfigError(
                f"{got('num_ranks', self.num_ranks)}: the expert-parallel size must be an int, 1 "
                f"to {MAX_RANKS}, the GPUs of one NVLink domain"
            )
        if (
            not is_count(self.num_experts, least=1, most=MAX_EXPERTS)
            or self.num_experts % self.num_ranks
        ):
            raise ConfigError(
                f"{got('num_experts', self.num_experts)}: must be an int, a positive multiple of "
                f"the expert-parallel size {self.num_ranks}, at most {MAX_EXPERTS}"
            )
        most_choices = min(MAX_TOPK, self.num_experts)
        if not is_count(self.topk, least=1, most=most_choices):
            raise ConfigError(f"{got('topk', self.topk)}: must be an int, 1 to {most_choices}")
        if not is_count(self.max_tokens, least=1, most=MAX_TOKENS):
            raise ConfigError(
                f"{got('max_tokens', self.max_tokens)}: must be an int, 1 to {MAX_TOKENS}"
            )
        try:
            object.__setattr__(self, "activation", Activation(self.activation))
        except ValueError as error:
            names = ", ".join(activation.value for activation in Activation)
            raise ConfigError(f"activation={self.activation!r}: wanted one of {names}") from error
        for name in ("gated", "skip_zero_probs"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: wanted True or False")

    @property
    def num_local_experts(self) -> int:
        """Experts owned by one rank."""
        return self.num_experts // self.num_ranks

    @property
    def fc1_rows(self) -> int:
        """Rows of fc1's weight: ``2F`` if gated, else ``F``."""
        return 2 * self.intermediate if self.gated else self.intermediate


def align_capacity(capacity: int, tile: int = TILE_M) -> int:
    """Rounds an expert's capacity up to whole tiles (section 3.2.1 of the paper).

    The router keeps dropping at the unaligned capacity; only buffers grow.

    Raises:
        ConfigError: ``capacity`` is negative, or ``tile`` is not positive.
    """
    if not is_count(capacity, least=0):
        raise ConfigError(f"{got('capacity', capacity)}: must be an int, and not negative")
    if not is_count(tile, least=1):
        raise ConfigError(f"{got('tile', tile)}: must be an int, at least 1")
    return -(-capacity // tile) * tile
