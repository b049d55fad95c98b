"""Options for experts that a framework's own modules hand over, one by one."""

from dataclasses import dataclass, field

from flashmoe_megatron.options import NOT_MEASURED, FrameworkOptions, unset_option
from flashmoe_megatron.replicas.policy import ONLY_IN_MEGATRON

RANKS_AGREE = (
    "the ranks agree at each call, by a small all-reduce for each layer, and the memory grows with "
    "the largest number"
)
"""Says what happens without ``max_tokens``."""

NOBODY_TELLS = (
    "wanted pass, since nothing tells modules of experts when an optimizer changes their weights"
)


@dataclass(frozen=True, kw_only=True)
class ModuleOptions(FrameworkOptions):
    """Options of all experts of a program, whose framework has no loggers for metrics of layers."""

    max_tokens: int | None = unset_option(FrameworkOptions, "max_tokens", RANKS_AGREE)
    metrics: str = field(init=False, default="none")
    calibration: str | None = field(init=False, default=None)
    slice_gradients: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Refuses values without a meaning, and what a module of experts alone cannot have."""
        super().__post_init__()
        if self.placement == "lookahead":
            raise self.refusal("placement", self.placement, ONLY_IN_MEGATRON)
        if self.quantize == "step":
            raise self.refusal("quantize", self.quantize, NOBODY_TELLS)
        if self.row_bound == "auto":
            raise self.refusal("row_bound", self.row_bound, NOT_MEASURED)
