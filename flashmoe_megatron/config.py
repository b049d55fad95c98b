"""The shape of one mixture-of-experts layer, validated once, free of any device."""

import difflib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from flashmoe_megatron.errors import ConfigError

TILE_M = 128
"""Rows of a tile: every expert's segment of rows starts at a multiple of it (bM of the paper)."""

ALIGNMENT_BYTES = 16
"""Rows start at a multiple of it, as TMA descriptors and loads of 16 bytes want."""

DIM_GRANULE = 64
"""Hidden and intermediate size must be divisible by this (one 128-byte swizzle row of BF16)."""

FP8_GRANULE = 128
"""Successive values that share a scale in FP8, where both sizes must be divisible by it."""

MAX_TOPK = 16
MAX_RANKS = 8
"""Ranks of an expert-parallel group on one host, whose GPUs share memory over NVLink."""
MAX_HOSTS = 32
MAX_WIDTH = 2**20
MAX_EXPERTS = 2**16
MAX_TOKENS = 2**24
MIN_TIMEOUT, MAX_TIMEOUT = 1e-6, 1e9
"""Bounds of a timeout in seconds: its nanoseconds are a whole number that fits 63 bits."""
DEFAULT_TIMEOUT = 120.0
DEFAULT_RESERVED_SMS = 4
"""SMs that the persistent kernel leaves to other kernels, NCCL's above all."""
MAX_ROW_BOUND = 1e6
MAX_GLU_TERM = 1e30
"""Bounds what clamps and shifts a gated expert, which the kernel takes in float32."""
GLU_CHUNK = 8
"""Fewest rows of a block of fc1's that the kernel reads as such; single rows are the exception."""


def is_count(value: object, *, least: int, most: float = math.inf) -> bool:
    """Returns whether a value is an int in a range; a bool does not count as an int."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def got(name: str, value: object) -> str:
    """A name and its value as messages begin; the type follows a number that is no int.

    An integer of another library may look like the int that is wanted: the type says why it is not.
    """
    kind = type(value)
    is_foreign = hasattr(kind, "__index__") and kind not in (int, bool)
    return f"{name}={value!r}" + (f" of type {kind.__module__}.{kind.__name__}" * is_foreign)


def check_class(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Refuses an argument of another class; ``wanted`` names the right one, with its article.

    Raises:
        ConfigError: The message begins with ``name``.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is of class {type(value).__name__}: wanted {wanted}")


def check_switch(name: str, value: object, of: str = "") -> None:
    """Refuses what is neither True nor False; ``of`` follows the value, as in " of weights".

    Raises:
        ConfigError: The message begins with ``name``.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}{of}: wanted True or False")


def nearest(name: object, names: Iterable[str], spell: Callable[[str], str] = repr) -> str:
    """Words on what an unknown name may have meant, nothing where no name is like it."""
    like = difflib.get_close_matches(str(name), names, n=1)
    return f", the nearest is {spell(like[0])}" if like else ""


def is_word(value: object, words: Collection[str]) -> bool:
    """Returns whether a value is one of some words; an array does not even compare with one."""
    return isinstance(value, str) and value in words


def is_number(value: object, *, least: float, most: float) -> bool:
    """Returns whether a value is a number in a range; NaN and a bool never are."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and least <= value <= most  # type: ignore[operator]


def fp8_row_bytes(width: int) -> int:
    """Bytes of a row in FP8: its values, a float32 as the scale of every block, and pads."""
    num_bytes = width + width // FP8_GRANULE * 4
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_block_of(size: int, intermediate: int) -> bool:
    """Returns whether gate and up rows of an fc1 can alternate in blocks of so many rows."""
    is_size = size == 1 or (size >= GLU_CHUNK and size & (size - 1) == 0)
    return is_size and intermediate % size == 0


Keep = Literal["all", "preactivations", "inputs"]
"""Things a forward keeps for its backward; the option ``keep`` says what each word means."""
KEEPS: tuple[Keep, ...] = ("all", "preactivations", "inputs")
KeepOption = Literal["auto", "all", "preactivations", "inputs"]
"""The same, or that sizes decide: :func:`~flashmoe_megatron.planner.choose_keep`."""


Experts = Literal["bf16", "fp8", "fp8_dgrad"]
"""Precisions of experts: in "bf16" they compute in their weights' dtype, whichever it is."""


class Activation(str, Enum):
    """The function applied to the first projection (to its gate half, if the FFN is gated)."""

    SILU = "silu"
    GELU = "gelu"  # the exact form, with erf
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    SQUARED_RELU = "squared_relu"
    QUICK_GELU = "quick_gelu"  # x * sigmoid(1.702 x)


BOUNDED_ACTIVATIONS = (Activation.SILU, Activation.QUICK_GELU)
"""Those whose gated experts may have a clamp and an offset."""


_SOFTCAPS = ("gate_softcap", "up_softcap")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer as its expert-parallel group sees it.

    Attributes:
        hidden: Model width H.
        intermediate: FFN width F of one expert (half of fc1's rows if ``gated``).
        num_experts: Experts of the whole group.
        topk: Most experts that one token may select.
        activation: Applied to fc1's output, or to its gate half; may be given by its value.
        gated: Whether fc1 is ``[2F, H]``, of gate and up rows, and the FFN computes
            ``act(gate) * up`` (SwiGLU with ``Activation.SILU``).
        num_ranks: Ranks of the expert-parallel group; each owns ``num_experts / num_ranks``
            consecutive experts.
        max_tokens: Upper bound of the tokens of one rank and call; sizes the symmetric heap. The
            kernel takes 1,024 for each CTA, one on each SM that is not reserved.
        skip_zero_probs: Leave out routes whose probability is exactly 0. Megatron's padding to
            capacity fills experts with such routes; they change neither results nor gradients.
        clamp_value: Clamps what a gated SiLU or quick GELU reads: ``gate`` from above, ``up`` from
            both sides, before the activation and the offset; positive. ``None``: nothing is
            clamped.
        linear_offset: Added to ``up`` of such an expert: GPT-OSS computes
            ``act(gate) * (up + 1)``.
        gate_softcap: Bounds the gate that a gated SiLU multiplies with its sigmoid, smoothly:
            ``c * tanh(gate / c) * sigmoid(gate)``; positive. ``None``: nothing is bounded.
        up_softcap: Bounds ``up`` of such an expert in the same way, on its own. Neither goes with a
            clamp or an offset, nor with the kernel.
        glu_interleave: Rows of the blocks in which gate and up rows of fc1 alternate, gate first:
            1 (GPT-OSS), or a power of two from 8 on; divides F. With 0 all gate rows come first.
            Biases and all gradients have the order of the rows.
        experts: With "fp8" forwards are computed in blockwise FP8, and backwards in bfloat16 from
            the same operands; with "fp8_dgrad" so are gradients of tokens, and those of weights
            alone in bfloat16; with "bf16" all are computed in the weights' dtype.
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
    clamp_value: float | None = None
    linear_offset: float = 0.0
    glu_interleave: int = 0
    gate_softcap: float | None = None
    up_softcap: float | None = None
    experts: Experts = "bf16"

    def __post_init__(self) -> None:
        """Refuses what no backend of this package can honour."""
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if not is_count(value, least=1, most=MAX_WIDTH) or value % DIM_GRANULE:
                raise ConfigError(
                    f"{got(name, value)}: must be an int, a positive multiple of {DIM_GRANULE}, at "
                    f"most {MAX_WIDTH}"
                )
        if not is_count(self.num_ranks, least=1, most=MAX_RANKS * MAX_HOSTS):
            raise ConfigError(
                f"{got('num_ranks', self.num_ranks)}: the expert-parallel size must be an int, 1 "
                f"to {MAX_RANKS * MAX_HOSTS}, at most {MAX_RANKS} GPUs on each of {MAX_HOSTS} hosts"
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
            check_switch(name, getattr(self, name))
        self._check_glu()
        self._check_softcaps()
        self._check_experts()

    def _check_experts(self) -> None:
        """Refuses what experts in FP8 cannot have, and other precisions than there are."""
        if not is_word(self.experts, get_args(Experts)):
            names = ", ".join(get_args(Experts))
            raise ConfigError(f"experts={self.experts!r}: wanted one of {names}")
        if not self.in_fp8:
            return
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if value % FP8_GRANULE:
                raise ConfigError(
                    f"experts={self.experts!r} with {name}={value}: wanted a multiple of "
                    f"{FP8_GRANULE}, as many values as share a scale, or experts='bf16'"
                )
        for name in ("clamp_value", "linear_offset", *_SOFTCAPS):
            value = getattr(self, name)
            if value:
                raise ConfigError(
                    f"experts={self.experts!r} with {name}={value!r}: wanted none, or "
                    "experts='bf16'"
                )

    def _check_glu(self) -> None:
        """Refuses what a gated expert cannot have, and an expert without a gate still less."""
        clamp, offset, block = self.clamp_value, self.linear_offset, self.glu_interleave
        if clamp is not None and not is_number(clamp, least=1 / MAX_GLU_TERM, most=MAX_GLU_TERM):
            raise ConfigError(
                f"clamp_value={clamp!r}: wanted None or a positive number, "
                f"{1 / MAX_GLU_TERM:g} to {MAX_GLU_TERM:g}"
            )
        if not is_number(offset, least=-MAX_GLU_TERM, most=MAX_GLU_TERM):
            raise ConfigError(
                f"linear_offset={offset!r}: wanted a number, at most {MAX_GLU_TERM:g} from 0"
            )
        names = ", ".join(activation.value for activation in BOUNDED_ACTIVATIONS)
        for name, value in (("clamp_value", clamp), ("linear_offset", offset)):
            if value and not (self.gated and self.activation in BOUNDED_ACTIVATIONS):
                raise ConfigError(
                    f"{name}={value!r} with activation={self.activation.value}, "
                    f"gated={self.gated}: wanted gated=True and one of {names}, or no {name}"
                )
        if not is_count(block, least=0):
            raise ConfigError(f"{got('glu_interleave', block)}: must be an int, and not negative")
        if block and not self.gated:
            raise ConfigError(
                f"glu_interleave={block} with gated=False: there are no up rows; wanted 0"
            )
        if block and not is_block_of(block, self.intermediate):
            raise ConfigError(
                f"glu_interleave={block}: wanted 0, 1, or a power of two from {GLU_CHUNK} on that "
                f"divides intermediate={self.intermediate}"
            )

    def _check_softcaps(self) -> None:
        """Refuses softcaps without a meaning, and where they are not computed."""
        for name in _SOFTCAPS:
            value = getattr(self, name)
            if value is None:
                continue
            if not is_number(value, least=1 / MAX_GLU_TERM, most=MAX_GLU_TERM):
                raise ConfigError(
                    f"{name}={value!r}: wanted None or a positive number, "
                    f"{1 / MAX_GLU_TERM:g} to {MAX_GLU_TERM:g}"
                )
            is_silu = self.gated and self.activation is Activation.SILU
            if not is_silu or self.clamp_value is not None or self.linear_offset:
                raise ConfigError(
                    f"{name}={value!r} with activation={self.activation.value}, "
                    f"gated={self.gated}, clamp_value={self.clamp_value!r}, "
                    f"linear_offset={self.linear_offset!r}: wanted a gated silu without a clamp "
                    f"and an offset, or no {name}"
                )

    @property
    def is_softcapped(self) -> bool:
        """Tells whether experts have a softcap, which the kernel does not compute."""
        return self.gate_softcap is not None or self.up_softcap is not None

    @property
    def in_fp8(self) -> bool:
        """Tells whether forwards multiply in FP8."""
        return self.experts != "bf16"

    @property
    def has_fp8_dgrad(self) -> bool:
        """Tells whether backwards do so, too, but for gradients of weights."""
        return self.experts == "fp8_dgrad"

    def dispatched_bytes(self, element_bytes: int, *, is_backward: bool = False) -> int:
        """Bytes of a row on its way to an expert: a token's, or a gradient's of an output.

        The token, or the output, has such elements.
        """
        in_fp8 = self.has_fp8_dgrad if is_backward else self.in_fp8
        return fp8_row_bytes(self.hidden) if in_fp8 else self.hidden * element_bytes

    @property
    def num_local_experts(self) -> int:
        """Experts owned by one rank."""
        return self.num_experts // self.num_ranks

    @property
    def fc1_rows(self) -> int:
        """Rows of fc1's weight: ``2F`` if gated, else ``F``."""
        return 2 * self.intermediate if self.gated else self.intermediate


def check_config(config: object) -> None:
    """Refuses what is no layer's shape, such as a dictionary of its fields."""
    check_class("config", config, MoEConfig, "a MoEConfig")


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


def count_row_blocks(rows: Iterable[int]) -> int:
    """Blocks of :data:`TILE_M` rows that hold the rows of several experts, by expert."""
    return sum(map(align_capacity, rows)) // TILE_M
