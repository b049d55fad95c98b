"""Layers that are measured, by name or by their sizes; no torch is needed."""

from dataclasses import dataclass, replace

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError


@dataclass(frozen=True)
class Form:
    """The experts' work besides their two products.

    Attributes:
        activation: Applied to the first product, or to its gate half.
        clamp_value: Bounds what a gated activation reads, as in
            :class:`~flashmoe_megatron.config.MoEConfig`; ``None`` if nothing does.
        linear_offset: Added to the rows that the gate multiplies.
        has_bias: Both products have a bias.
    """

    activation: Activation
    clamp_value: float | None = None
    linear_offset: float = 0.0
    has_bias: bool = False

    @classmethod
    def plain(cls, gated: bool) -> "Form":
        """Returns SwiGLU if gated, else GELU, without anything else."""
        return cls(Activation.SILU if gated else Activation.GELU)


@dataclass(frozen=True)
class Shape:
    """One layer, as its expert-parallel group sees it.

    Attributes:
        tokens: Tokens of one rank.
        hidden: Model width.
        intermediate: FFN width of one expert.
        num_experts: Experts of the whole group.
        topk: Experts that each token selects.
        gated: Experts have a gate: SwiGLU if they have, else GELU, unless a :class:`Form` says
            another function.
    """

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    gated: bool

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's forward, at a perfect balance."""
        return 2 * self.tokens * self.topk * self.expert_numbers

    @property
    def expert_numbers(self) -> int:
        """The numbers of one expert's weights."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    def config(self, num_ranks: int, form: Form | None = None) -> MoEConfig:
        """The layer on this many ranks, of the plain form unless another is given."""
        form = form or Form.plain(self.gated)
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            topk=self.topk,
            activation=form.activation,
            gated=self.gated,
            num_ranks=num_ranks,
            max_tokens=self.tokens,
            clamp_value=form.clamp_value,
            linear_offset=form.linear_offset,
        )

    def one_of(self, num_ranks: int) -> "Shape":
        """One rank's share of the experts with as many rows, for one GPU.

        Raises:
            ConfigError: The experts cannot be shared out evenly.
        """
        if self.num_experts % num_ranks:
            raise ConfigError(f"{self.num_experts} experts: wanted a multiple of {num_ranks} ranks")
        return replace(self, num_experts=self.num_experts // num_ranks)


def _paper(tokens: int, num_experts: int) -> Shape:
    return Shape(tokens, 2048, 2048, num_experts, 2, gated=False)


SHAPES = {
    "paper-1k": _paper(1024, 64),
    "paper-4k": _paper(4096, 64),
    "paper-8k": _paper(8192, 64),
    "paper-16k-e8": _paper(16384, 8),
    "paper-16k-e64": _paper(16384, 64),
    "paper-16k-e128": _paper(16384, 128),
    "qwen3-30b": Shape(8192, 2048, 768, 128, 8, gated=True),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2, gated=True),
    "deepseek-v3-e64": Shape(4096, 7168, 2048, 64, 8, gated=True),
}
"""The kernel is meant for these layers, and measured by them."""

ODD_SHAPES = {
    "qwen3-30b-t777": Shape(777, 2048, 768, 128, 8, gated=True),
    "qwen1.5-a2.7b": Shape(8192, 2048, 1408, 60, 4, gated=True),
    "deepseek-v2-lite": Shape(8192, 2048, 1408, 64, 6, gated=True),
    "deepseek-v2": Shape(4096, 5120, 1536, 160, 6, gated=True),
}
"""Tokens, a rank's experts or columns of a product are no multiple of a tile here."""

_CCFUSER = {
    "m-gpt": Shape(8192, 768, 3072, 64, 2, gated=False),
    "m-bert": Shape(16384, 768, 3072, 64, 2, gated=False),
    "m-transxl": Shape(8192, 512, 2048, 64, 2, gated=False),
}
CCFUSER_SHAPES = {
    **_CCFUSER,
    **{
        f"{name}-e{count}": replace(shape, num_experts=count)
        for name, shape in _CCFUSER.items()
        for count in (4, 8, 16, 32)
    },
}
"""CCFuser's three models and its sweep over experts; FFNs, of unknown width, are four times H."""

ALL_SHAPES = {**SHAPES, **ODD_SHAPES, **CCFUSER_SHAPES}


def shape_of(name: str, *, gated: bool = False) -> Shape:
    """One of ``ALL_SHAPES``, or the layer that ``8192x2048x2048x64x2`` describes.

    Args:
        name: The name or the description.
        gated: A layer that is described has SwiGLU, else GELU.

    Raises:
        ValueError: The name is neither, or a number of it is not positive.
    """
    if name in ALL_SHAPES:
        return ALL_SHAPES[name]
    sizes = name.split("x")
    if len(sizes) != 5 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"shape {name}: wanted TOKENSxHIDDENxINTERMEDIATExEXPERTSxTOPK or one of "
            f"{', '.join(ALL_SHAPES)}"
        )
    tokens, hidden, intermediate, num_experts, topk = map(int, sizes)
    return Shape(tokens, hidden, intermediate, num_experts, topk, gated)


def shares_of(shapes: dict[str, Shape], one_of: int, num_ranks: int = 1) -> dict[str, Shape]:
    """The layers that are measured on some ranks, by name.

    Args:
        shapes: The whole layers.
        one_of: One GPU has this part of the experts.
        num_ranks: Ranks of a layer's group.

    Raises:
        SystemExit: A layer cannot be so.
    """
    found = {}
    for name, whole in shapes.items():
        try:
            found[name] = whole.one_of(one_of)
            found[name].config(num_ranks)
        except ConfigError as error:
            raise SystemExit(f"error: shape {name}: {error}") from error
    return found
