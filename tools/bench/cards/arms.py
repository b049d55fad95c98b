"""The ways to train a model that a card compares."""

from dataclasses import dataclass, field
from typing import Literal

from tools.bench.cards.models import Model

PIECES = "--cuda-graph-impl transformer_engine --cuda-graph-modules"
WHOLE = "--cuda-graph-impl full_iteration"
BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"
FP8 = f"{BLOCKWISE} --fp8-param-gather"
EXPERTS = {
    "fp8": "--flashmoe-experts fp8",
    "fp8-dgrad": "--flashmoe-experts fp8_dgrad --flashmoe-quantize step",
}
"""Flags of flashmoe's experts by the variant of a run in FP8; without them experts are bfloat16."""
FORCED = "--moe-router-force-load-balancing"
SLOTS = "--flashmoe-spare-slots 2"


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        dispatcher: Who computes the experts.
        graph: CUDA graphs of attention, router and preprocessing, or one of the iteration.
            Megatron's alltoall waits for the GPU, and has no graph of the iteration.
        is_forced: Whether the router's choice is random, so that experts get the same.
        variant: "" for arms that are compared; "fp8" in blockwise FP8, "fp8-dgrad" where flashmoe
            also computes gradients of tokens in it, with weights quantized once a step; "noise" for
            the run that rounds in another order, which tells how far rounding alone moves a loss;
            "cutlass" with Transformer Engine's grouped product by CUTLASS; "slots" with spare
            slots, which hold copies of hot experts.
        variables: Environment variables of its own.
    """

    dispatcher: Literal["flashmoe", "alltoall"]
    graph: Literal["pieces", "whole"]
    is_forced: bool
    variant: Literal["", "fp8", "fp8-dgrad", "noise", "cutlass", "slots"] = ""
    variables: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Names its record and its log."""
        routing = "forced" if self.is_forced else "natural"
        parts = [self.dispatcher, self.variant, self.graph, routing]
        return "-".join(part for part in parts if part)

    @property
    def in_fp8(self) -> bool:
        """Tells whether the run is in blockwise FP8."""
        return self.variant in EXPERTS

    @property
    def has_fp8_experts(self) -> bool:
        """Tells whether flashmoe computes experts in blockwise FP8."""
        return self.dispatcher == "flashmoe" and self.in_fp8

    @property
    def noise(self) -> str:
        """The name of the run that tells the noise of this one's routing."""
        return Arm("alltoall", "pieces", self.is_forced, "noise").name

    def flags(self, model: Model, gpus: int) -> list[str]:
        """Returns the script's flags on so many GPUs, except those of the model."""
        # FP8's attention keeps state that a graph of it would replay.
        modules = "moe_router moe_preprocess"
        if not self.in_fp8:
            modules = f"attn {modules}"
        graph = f"{PIECES} {modules}" if self.graph == "pieces" else WHOLE
        words = f"--moe-token-dispatcher-type {self.dispatcher} {graph}".split()
        if self.variant != "noise":
            words.append("--moe-permute-fusion")
        if self.in_fp8:
            words += FP8.split()
        if self.has_fp8_experts:
            words += EXPERTS[self.variant].split()
        if self.is_forced:
            words += FORCED.split()
        if self.dispatcher == "flashmoe" and self.graph == "whole":
            words += ["--flashmoe-row-bound", f"{row_bound(gpus):g}"]
        if self.variant == "slots":
            words += SLOTS.split()
        return words


def row_bound(gpus: int) -> float:
    """Returns the row bound of the arms with one graph, whose buffers do not grow by themselves.

    One GPU has all experts, and gets exactly the mean. With natural routing one of several gets
    more; a bound that it exceeds is raised in a repeated iteration.
    """
    return 1.0 if gpus == 1 else 1.4


def arms_of(model: Model, gpus: int) -> list[Arm]:
    """A model's arms on so many GPUs, the most important first."""
    cutlass = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
    arms = []
    for is_forced in (False, True):
        arms.append(Arm("flashmoe", "whole", is_forced))
        if model.arms == "six":
            arms.append(Arm("flashmoe", "pieces", is_forced))
        arms.append(Arm("alltoall", "pieces", is_forced))
    if model.arms == "six" and gpus > 1:
        arms += [Arm("flashmoe", "whole", is_forced, "slots") for is_forced in (False, True)]
    if model.arms == "fp8":
        for is_forced in (False, True):
            arms.append(Arm("flashmoe", "whole", is_forced, "fp8-dgrad"))
            arms.append(Arm("flashmoe", "whole", is_forced, "fp8"))
            arms.append(Arm("alltoall", "pieces", is_forced, "fp8"))
            arms.append(Arm("flashmoe", "pieces", is_forced, "fp8-dgrad"))
    arms.append(Arm("alltoall", "pieces", False, "noise"))
    if model.arms == "six":
        arms.append(Arm("alltoall", "pieces", True, "cutlass", cutlass))
    arms.append(Arm("alltoall", "pieces", True, "noise"))
    return arms
