"""Training with flashmoe gives the numbers of training with DeepSpeed's own MoE layers."""

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed import slices
from flashmoe_megatron.adapters.gradients import plan_reduction
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.fit import write_fit
from tests.deepspeed import harness, models
from tests.deepspeed.harness import DEEPSPEED, Case, batch, build, train, train_engine
from tests.deepspeed.models import EXPERTS
from tests.distributed import RankPool
from tests.fits import make_fit
from tests.side_by_side import Outcome, Tolerance

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def native(**model: object) -> dict:
    return {"family": "native", "model": model}


def autoep(**model: object) -> dict:
    return {"family": "autoep", "model": model}


def stage(number: int, **options: object) -> dict:
    return {
        "zero": number,
        "config": {"zero_optimization": {"stage": number, **options}},
    }


TWO_RANKS = {
    "zero0": Case(**native()),
    "zero1": Case(**native(), zero=1),
    "zero2": Case(**native(), zero=2),
    "zero2_overlap": Case(**native(), **stage(2, overlap_comm=True), micro_batches=2),
    "ep1": Case(**native(ep_sizes=(1, 1)), zero=1),
    "groups_differ": Case(**native(ep_sizes=(1, 2, 2)), zero=2),
    "accumulation": Case(**native(), micro_batches=3),
    "checkpointing": Case(**native(checkpointing=True), zero=2),
    "checkpointing_reentrant": Case(**native(checkpointing=True, reentrant=True), zero=2),
    "k1_random_tokens": Case(**native(k=1, use_rts=True, capacity_factor=0.7, min_capacity=1)),
    "k1_noisy": Case(**native(k=1, noisy_gate_policy="RSample")),
    "k1_jitter_no_drop": Case(**native(k=1, noisy_gate_policy="Jitter", drop_tokens=False)),
    "k2": Case(**native(k=2, capacity_factor=0.6, min_capacity=2), zero=1),
    "k2_no_drop": Case(**native(k=2, drop_tokens=False), zero=2),
    "k2_no_sampling": Case(**native(k=2, top2_2nd_expert_sampling=False)),
    "k3": Case(**native(k=3, capacity_factor=0.8), zero=2),
    "k4_no_drop": Case(**native(k=4, drop_tokens=False)),
    "min_capacity": Case(**native(k=2, capacity_factor=0.1, min_capacity=8)),
    "eval_capacity": Case(**native(k=2, capacity_factor=2.0, eval_capacity_factor=0.3)),
    "residual": Case(**native(use_residual=True), zero=2),
    "uneven_tokens": Case(**native(k=2, drop_tokens=False), tokens=(7, 40), zero=2),
    "rank_without_tokens": Case(**native(k=2, drop_tokens=False), tokens=(24, 0), zero=2),
    "used_tokens": Case(**native(k=1), used=(0.5, 0.0), zero=1),
    "max_tokens": Case(**native(), settings={"max_tokens": 24}),
    "replicas": Case(
        **native(k=2, drop_tokens=False),
        **stage(2, overlap_comm=True),
        settings={"spare_slots": 1, "replica_policy": "popular"},
    ),
    "keep_inputs": Case(**native(), settings={"keep": "inputs"}),
    "more_tokens_than_a_tile": Case(**native(k=2, drop_tokens=False), tokens=(150, 300), steps=2),
    "autoep_zero1": Case(**autoep(), zero=1),
    "autoep_zero2": Case(**autoep(), **stage(2, overlap_comm=True), micro_batches=2),
    "autoep_zero3": Case(**autoep(), **stage(3, stage3_param_persistence_threshold=0)),
    "autoep_zero3_checkpointing": Case(
        **autoep(checkpointing=True), **stage(3, stage3_param_persistence_threshold=0)
    ),
    "autoep_checkpointing": Case(**autoep(checkpointing=True), zero=2),
    "autoep_qwen3": Case(**autoep(preset="qwen3_moe", num_experts=8, topk=4), zero=1),
    "autoep_deepseek": Case(**autoep(preset="deepseek_v3", num_experts=8, topk=3), zero=2),
    "autoep_qwen3_5": Case(**autoep(preset="qwen3_5_moe", num_experts=8, topk=4), zero=2),
    "autoep_minimax_m3": Case(**autoep(preset="minimax_m3", num_experts=8, topk=4), zero=1),
    "autoep_ep1": Case(**autoep(), ep_size=1, zero=1),
    "autoep_rank_without_tokens": Case(**autoep(), tokens=(0, 24), zero=2),
}

FOUR_RANKS = {
    "ep4": Case(**native(ep_sizes=(4, 4)), zero=1),
    "ep2_dp2_zero0": Case(**native(k=2)),
    "ep2_dp2_zero2_overlap": Case(**native(k=2), **stage(2, overlap_comm=True), micro_batches=2),
    "groups_differ": Case(**native(ep_sizes=(2, 4, 1)), zero=2),
    "data_before_expert": Case(
        **native(), zero=2, config={"use_data_before_expert_parallelism": True}
    ),
    "hosts_2x2": Case(**native(ep_sizes=(4, 4), k=2), hosts=2, zero=1),
    # Groups of ranks 0 and 2, and of 1 and 3.
    "hosts_2x1_strided": Case(
        **native(k=2), hosts=2, zero=2, config={"use_data_before_expert_parallelism": True}
    ),
    "hosts_2x2_slots": Case(
        **native(ep_sizes=(4, 4), k=2),
        hosts=2,
        zero=2,
        settings={"spare_slots": 1, "combine": "routes", "host_slots": 1},
    ),
    "uneven_tokens": Case(**native(k=2, drop_tokens=False), tokens=(5, 0, 33, 16), zero=2),
    "autoep_ep2_dp2_zero2": Case(**autoep(), zero=2),
    "autoep_ep4_zero1": Case(**autoep(), ep_size=4, zero=1),
    "autoep_hosts_2x2": Case(**autoep(), ep_size=4, hosts=2, zero=1, settings={"host_overlap": 1}),
    "autoep_ep2_dp2_zero3": Case(**autoep(), **stage(3, stage3_param_persistence_threshold=0)),
}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str, two_ranks: RankPool) -> None:
    DEEPSPEED.compare(two_ranks, TWO_RANKS[name])


@pytest.mark.parametrize("expert", EXPERTS)
def test_experts(expert: str, two_ranks: RankPool) -> None:
    DEEPSPEED.compare(two_ranks, Case(**native(expert=expert, k=2), zero=2, steps=2))


def test_experts_in_fp8(two_ranks: RankPool) -> None:
    """Losses are near those of bfloat16, and not the same; the layers say what they compute."""
    for in_bf16, in_fp8, kinds in two_ranks.run(trainings_in_fp8):
        assert kinds == {"bf16", "fp8"}
        assert in_fp8 != in_bf16
        assert in_fp8 == pytest.approx(in_bf16, rel=0.05)
        assert in_fp8[-1] < in_fp8[0]


def trainings_in_fp8(group: dist.ProcessGroup) -> tuple[list[float], list[float], set[str]]:
    """The losses of both, at sizes that have whole blocks."""
    found, kinds = [], set()
    with mock.patch.object(models, "HIDDEN", 128), mock.patch.object(harness, "HIDDEN", 128):
        for experts in ("bf16", "fp8"):
            case = Case(
                **native(expert="swiglu", k=2), zero=2, config=BF16, settings={"experts": experts}
            )
            engine = build(case, fused=True)
            found.append(train_engine(engine, case).losses)
            kinds |= {
                module.flashmoe.experts.backend.config.experts
                for module in engine.module.modules()
                if hasattr(module, "flashmoe")
            }
    return found[0], found[1], kinds


@pytest.mark.parametrize("form", ["swiglu_clamped", "swiglu_oai"])
def test_clamped_experts_of_autoep(form: str, two_ranks: RankPool) -> None:
    """The clamp is where it acts on a part of the values."""
    if not two_ranks.run(knows_forms)[0]:
        pytest.skip("this DeepSpeed's AutoEP knows SwiGLU alone")
    DEEPSPEED.compare(
        two_ranks, Case(**autoep(limit=0.5), expert_parallel={"expert_activation": form}, zero=2)
    )


def knows_forms(group: dist.ProcessGroup) -> bool:
    from deepspeed.moe import ep_experts

    return hasattr(ep_experts, "EXPERT_ACTIVATIONS")


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(name: str, four_ranks: RankPool) -> None:
    DEEPSPEED.compare(four_ranks, FOUR_RANKS[name])


# In half precision the two sides round in other places, and ours sums in float32: they are close,
# not equal. AutoEP's experts are a larger part of their model than the native ones.
HALF = {
    ("native", "bf16"): Tolerance(losses=1e-3, gradients=2e-2, parameters=1e-2),
    ("autoep", "bf16"): Tolerance(losses=8e-3, gradients=5e-2, parameters=1.5e-2),
    ("native", "fp16"): Tolerance(losses=3e-4, gradients=3e-3, parameters=2e-3),
    ("autoep", "fp16"): Tolerance(losses=2e-3, gradients=6e-3, parameters=1e-2),
}

BFLOAT16 = {
    "zero0": Case(**native(), config=BF16),
    "zero2": Case(**native(k=2), config=BF16, zero=2),
    "float32_accumulation": Case(
        **native(),
        zero=1,
        config={**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        micro_batches=2,
    ),
    "autoep_zero2": Case(**autoep(), config=BF16, zero=2),
}


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16(name: str, two_ranks: RankPool) -> None:
    case = BFLOAT16[name]
    DEEPSPEED.compare(two_ranks, case, HALF[case.family, "bf16"])


FLOAT16 = {
    "zero0": Case(**native(), config=FP16),
    "zero1": Case(**native(expert="swiglu"), config=FP16, zero=1, micro_batches=2),
    "zero2": Case(**native(k=2), config=FP16, zero=2),
    "autoep_zero2": Case(**autoep(), config=FP16, zero=2),
}


@pytest.mark.parametrize("name", FLOAT16)
def test_float16(name: str, two_ranks: RankPool) -> None:
    """DeepSpeed scales the loss; the layers see nothing of it but larger gradients."""
    case = FLOAT16[name]
    for _, fused in DEEPSPEED.compare(two_ranks, case, HALF[case.family, "fp16"]):
        assert fused.losses[-1] != fused.losses[0], "no step was made: the scale is too large"


OVERFLOWN = 1
"""The step whose tokens are not finite."""


def overflow(group: dist.ProcessGroup, case: Case, fused: bool) -> tuple[list[float], int]:
    """Losses of steps of which one overflows, and how many steps the loss scaler skipped."""
    engine = build(case, fused=fused)
    losses = []
    for step in range(case.steps):
        x, y = batch(case, step, torch.float16)
        if step == OVERFLOWN:
            x[3, 5] = math.inf
        torch.manual_seed(77 + step)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses, engine.skipped_steps


@pytest.mark.parametrize("name", ["zero2", "autoep_zero2"])
def test_the_loss_scaler_skips_a_step_that_overflows(name: str, two_ranks: RankPool) -> None:
    case = dataclasses.replace(FLOAT16[name], steps=4)
    tolerance = HALF[case.family, "fp16"].losses
    stock = two_ranks.run(overflow, case, False)
    for (losses, skipped), (wanted, wanted_skipped) in zip(
        two_ranks.run(overflow, case, True), stock, strict=True
    ):
        assert skipped == wanted_skipped == 1
        assert losses == pytest.approx(wanted, rel=tolerance, nan_ok=True)
        assert [math.isnan(loss) for loss in losses] == [s == OVERFLOWN for s in range(4)]


CHECKPOINTS = {
    "native_zero0": Case(**native(), steps=4),
    "native_zero2": Case(**native(k=2, expert="swiglu"), zero=2, steps=4),
    "autoep_zero2": Case(**autoep(), zero=2, steps=4),
}


@pytest.mark.parametrize("fused_first", [True, False], ids=["fused_to_stock", "stock_to_fused"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_are_interchangeable(
    name: str, fused_first: bool, two_ranks: RankPool, tmp_path: Path
) -> None:
    case = CHECKPOINTS[name]
    DEEPSPEED.save(two_ranks, case, 2, tmp_path, is_fused=fused_first)
    DEEPSPEED.compare_resumed(two_ranks, case, 2, tmp_path, is_fused=not fused_first)


@pytest.fixture
def fit(tmp_path: Path) -> str:
    """A machine on which some KB fit the gaps of this model's backward."""
    path = tmp_path / "fit.json"
    write_fit(path, make_fit(product=(1e-6, 1e-10), copy=(1e-6, 1e-10)))
    return str(path)


def train_with_buckets(group: dist.ProcessGroup, case: Case) -> tuple[Outcome, int, int]:
    """A training, and the sizes of its buckets and of the pieces that were planned."""
    planned = list[Any]()

    def plan(*args: Any) -> Any:
        planned.append(plan_reduction(*args))
        return planned[-1]

    with mock.patch.object(slices, "plan_reduction", plan):
        engine = build(case, fused=True)
    sizes = engine.optimizer.reduce_bucket_size, planned[0].piece_bytes
    return train_engine(engine, case), *sizes


def refused_slices(group: dist.ProcessGroup, cases: list[Case]) -> list[str]:
    said = []
    for case in cases:
        with pytest.raises(ConfigError) as caught:
            build(case, fused=True)
        said.append(str(caught.value))
    return said


def test_buckets_have_the_size_of_what_fits_gaps(fit: str, two_ranks: RankPool) -> None:
    asked = {"slice_gradients": True, "degree_fit": fit, "max_tokens": 24}
    overlapped = stage(2, overlap_comm=True)
    case = Case(**native(), **overlapped, settings={**asked, "backend": "scheduled"})
    plain = two_ranks.run(train, Case(**native(), **overlapped), True)
    outcomes = two_ranks.run(train_with_buckets, case)
    for (found, size, piece_bytes), want in zip(outcomes, plain, strict=True):
        assert size == piece_bytes // 4 > 0, "DeepSpeed counts elements, of float32 here"
        for loss, other in zip(found.losses, want.losses, strict=True):
            assert abs(loss - other) < DEEPSPEED.tolerance.losses * abs(other)
    given = stage(2, overlap_comm=True, reduce_bucket_size=777)
    case = Case(**native(), **given, settings=asked)
    assert [size for _, size, *_ in two_ranks.run(train_with_buckets, case)] == [777, 777]
    bad = [
        Case(**native(), settings=asked),
        Case(**native(), zero=2, settings={**asked, "max_tokens": None}),
        Case(**native(), zero=2, settings={**asked, "degree_fit": None}),
        Case(**native(), zero=2, settings={**asked, "degree_fit": "/nowhere"}),
        Case(**native(ep_sizes=(1, 1)), zero=2, settings=asked),
    ]
    for said in two_ranks.run(refused_slices, bad):
        assert "flashmoe.slice_gradients is True, wanted false with ZeRO stage 0" in said[0]
        assert "wanted max_tokens beside it" in said[1]
        assert "wanted a degree_fit beside it" in said[2]
        assert "fit /nowhere: cannot be read" in said[3]
        assert "wanted false where each rank has all experts" in said[4]
