"""The shape of one mixture-of-experts layer, validated once, free of any device."""

from dataclasses import dataclass
from enum import Enum

from flashmoe_megatron.errors import ConfigError

TILE_M = 128
"""Rows of a tile: every expert's segment of rows starts at a multiple of it (bM of the paper)."""

DIM_GRANULE = 64
"""Hidden and intermediate size must be divisible by this (one 128-byte swizzle row of BF16)."""

MAX_TOPK = 16
MAX_RANKS = 8


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
        activation: Applied to fc1's output, or to its gate half.
        gated: Whether fc1 is ``[2F, H]`` with the gate rows first and the FFN computes
            ``act(gate) * up`` (SwiGLU with ``Activation.SILU``).
        num_ranks: Ranks of the expert-parallel group; each owns ``num_experts / num_ranks``
            consecutive experts.
        max_tokens: Upper bound of the tokens of one rank and call; sizes the symmetric heap.
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
            if value <= 0 or value % DIM_GRANULE:
                raise ConfigError(f"{name}={value}: must be a positive multiple of {DIM_GRANULE}")
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise ConfigError(
                f"expert-parallel size {self.num_ranks}: must be 1 to {MAX_RANKS}, "
                "the GPUs of one NVLink domain"
            )
        if self.num_experts <= 0 or self.num_experts % self.num_ranks:
            raise ConfigError(
                f"num_experts={self.num_experts}: must be a positive multiple of the "
                f"expert-parallel size {self.num_ranks}"
            )
        if not 1 <= self.topk <= min(MAX_TOPK, self.num_experts):
            raise ConfigError(f"topk={self.topk}: must be 1 to {min(MAX_TOPK, self.num_experts)}")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens}: must be at least 1")

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
    """
    if capacity < 0:
        raise ConfigError(f"capacity={capacity}: must not be negative")
    return -(-capacity // tile) * tile
