"""The ways to train a model that a card compares."""

from dataclasses import dataclass, field
from typing import Literal

from tools.bench.cards.models import Model

PIECES = "--cuda-graph-impl transformer_engine --cuda-graph-modules"
WHOLE = "--cuda-graph-impl full_iteration"
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather"
FORCED = "--moe-router-force-load-balancing"


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        dispatcher: Who computes the experts.
        graph: CUDA graphs of attention, router and preprocessing, or one of the iteration.
            Megatron's alltoall waits for the GPU, and has no graph of the iteration.
        is_forced: Whether the router's choice is random, so that experts get the same.
        variant: "" for arms that are compared; "fp8" in blockwise FP8; "noise" for the run that
            rounds in another order, which tells how far rounding alone moves a loss; "cutlass" with
            Transformer Engine's grouped product by CUTLASS.
        variables: Environment variables of its own.
    """

    dispatcher: Literal["flashmoe", "alltoall"]
    graph: Literal["pieces", "whole"]
    is_forced: bool
    variant: Literal["", "fp8", "noise", "cutlass"] = ""
    variables: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Names its record and its log."""
        routing = "forced" if self.is_forced else "natural"
        parts = [self.dispatcher, self.variant, self.graph, routing]
        return "-".join(part for part in parts if part)

    @property
    def noise(self) -> str:
        """The name of the run that tells the noise of this one's routing."""
        return Arm("alltoall", "pieces", self.is_forced, "noise").name

    def flags(self, model: Model) -> list[str]:
        """Returns the script's flags except those of the model."""
        # FP8's attention keeps state that a graph of it would replay.
        modules = "moe_router moe_preprocess"
        if self.variant != "fp8":
            modules = f"attn {modules}"
        graph = f"{PIECES} {modules}" if self.graph == "pieces" else WHOLE
        words = f"--moe-token-dispatcher-type {self.dispatcher} {graph}".split()
        if self.variant != "noise":
            words.append("--moe-permute-fusion")
        if self.variant == "fp8":
            words += FP8.split()
        if self.is_forced:
            words += FORCED.split()
        if self.dispatcher == "flashmoe" and self.graph == "whole":
            words += ["--flashmoe-row-bound", f"{model.row_bound:g}"]
        return words


def arms_of(model: Model) -> list[Arm]:
    """A model's arms, the most important first."""
    cutlass = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
    arms = []
    for is_forced in (False, True):
        arms.append(Arm("flashmoe", "whole", is_forced))
        if model.arms == "six":
            arms.append(Arm("flashmoe", "pieces", is_forced))
        arms.append(Arm("alltoall", "pieces", is_forced))
    if model.arms == "fp8":
        arms += [Arm("alltoall", "pieces", is_forced, "fp8") for is_forced in (False, True)]
    arms.append(Arm("alltoall", "pieces", False, "noise"))
    if model.arms == "six":
        arms.append(Arm("alltoall", "pieces", True, "cutlass", cutlass))
    arms.append(Arm("alltoall", "pieces", True, "noise"))
    return arms
