"""Trains with DeepSpeed's PipelineEngine, with its own MoE layers or with ours."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.harness import DEEPSPEED, FUSED, prepare
from tests.deepspeed.models import EXPERTS, HIDDEN, tell_experts_apart
from tests.side_by_side import Framework, Outcome, Training

NUM_STAGES = 2
EP_SIZE = 2
MICRO_BATCHES = 3
SAMPLES = 12


class Block(nn.Module):
    """What a pipeline hands from stage to stage is a tensor, so the auxiliary loss stays here."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, EXPERTS["swiglu"](), 4, ep_size, k=2, drop_tokens=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dense(x)
        out, _, _ = self.moe(x)
        return x + out


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batches(replica: int) -> Any:
    """Inputs and targets of one data-parallel replica, micro-batch by micro-batch."""
    generator = torch.Generator().manual_seed(40 + replica)
    while True:
        yield tuple(torch.randn(SAMPLES, HIDDEN, generator=generator) for _ in range(2))


def build(layers: Sequence[Any], *, zero: int = 0, **sections: Any) -> Any:
    """An engine of these layers' specifications, in stages of equal length."""
    prepare()
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from flashmoe_megatron.deepspeed import initialize

    deepspeed.init_distributed()  # a pipeline asks for its ranks before there is an engine
    torch.manual_seed(11)
    model = PipelineModule(
        layers,
        num_stages=NUM_STAGES,
        loss_fn=mean_square,
        partition_method="uniform",
    )
    tell_experts_apart(model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        **sections,
    }
    engine, *_ = initialize(model=model, config=config)
    return engine


def train_engine(engine: Any, steps: int) -> list[float]:
    """The losses."""
    iterator = batches(engine.grid.get_data_parallel_rank())
    torch.manual_seed(77)  # for the noise of the gates
    return [float(engine.train_batch(iterator)) for _ in range(steps)]


@dataclass(frozen=True)
class Case(Training):
    """One training with a stage of ZeRO."""

    zero: int
    _: KW_ONLY
    micro_batches: int = MICRO_BATCHES


def train(group: dist.ProcessGroup, case: Case, is_fused: bool) -> Outcome:
    """Trains two blocks on each stage, with flashmoe or with DeepSpeed's own experts."""
    from deepspeed.pipe import LayerSpec

    from flashmoe_megatron.deepspeed import attach

    sections = {"flashmoe": {"enabled": True}} if is_fused else {}
    specs = [LayerSpec(Block, EP_SIZE) for _ in range(2 * NUM_STAGES)]
    engine = build(specs, zero=case.zero, **sections)
    losses = train_engine(engine, case.steps)
    fused = [
        module.flashmoe.experts for module in engine.module.modules() if hasattr(module, "flashmoe")
    ]
    return Outcome(
        losses=losses,
        layers=attach(engine) if is_fused else {},
        calls=[experts.num_calls for experts in fused],
        keeps={experts.backend.keep for experts in fused},
    )


PIPELINE = Framework(train, serves=FUSED, tolerance=DEEPSPEED.tolerance)


def train_with_metrics(
    group: dist.ProcessGroup, runs: Sequence[tuple[str, dict[str, Any]]]
) -> None:
    """Trains a model for each run, given by its blocks and sections of the configuration.

    A block is "M", a MoE layer, or "D", a dense one.
    """
    prepare()
    from deepspeed.pipe import LayerSpec

    for blocks, sections in runs:
        kinds = {"M": (Block, EP_SIZE), "D": (nn.Linear, HIDDEN, HIDDEN)}
        engine = build([LayerSpec(*kinds[block]) for block in blocks], **sections)
        train_engine(engine, steps=4)
