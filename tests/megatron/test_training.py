"""Training with flashmoe gives the numbers of training with Megatron's alltoall dispatcher."""

import dataclasses
import gc
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed import RankPool
from tests.megatron import sequences
from tests.megatron.harness import (
    MEGATRON,
    SEQ_LENGTH,
    Case,
    Layout,
    build_model,
    prepare,
    train,
    transformer_config,
)
from tests.side_by_side import Outcome, Tolerance

EP2_DP2 = Layout(expert=2)
EP4 = Layout(expert=4)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OVERLAPPED = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
"""Megatron wants half precision; the tests compute in float32, which tells more."""

RESUMED = Case(EP2_DP2, steps=4, ddp=OVERLAP)
SAVED_AFTER = 2
"""Steps of it after which a checkpoint is saved."""

CASES = {
    "ep2_dp2": Case(EP2_DP2),
    "ep4": Case(EP4),
    "no_distributed_optimizer": Case(EP2_DP2, ddp={"use_distributed_optimizer": False}),
    "overlap_grad_reduce": Case(EP2_DP2, ddp={"overlap_grad_reduce": True}),
    "both_overlaps": Case(EP2_DP2, ddp=OVERLAP),
    "main_grad": Case(EP2_DP2, fuse_main_grad=True),
    "main_grad_both_overlaps": Case(EP2_DP2, ddp=OVERLAP, fuse_main_grad=True),
    "recompute_moe": Case(
        EP2_DP2,
        config={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ddp=OVERLAP,
    ),
    "recompute_full": Case(
        EP2_DP2,
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "recompute_full_pp2_vpp2": Case(
        Layout(pipeline=2, virtual=2),
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        ddp={"overlap_grad_reduce": True},
        steps=2,
        micro_batches=4,
    ),
    "keep_inputs": Case(EP2_DP2, settings={"keep": "inputs"}, ddp=OVERLAP, fuse_main_grad=True),
    "keep_preactivations": Case(
        EP2_DP2, settings={"keep": "preactivations"}, ddp=OVERLAP, fuse_main_grad=True
    ),
    "keep_inputs_pp2_ep2": Case(
        Layout(expert=2, pipeline=2), settings={"keep": "inputs"}, micro_batches=4
    ),
    "shared_expert": Case(EP2_DP2, config={"moe_shared_expert_intermediate_size": 64}),
    "shared_expert_beside_tp2_ep2": Case(
        Layout(expert=2, tensor=2),
        config={"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
    ),
    "hosts_2x2": Case(EP4, hosts=2, ddp=OVERLAP),
    "hosts_2x2_slots": Case(
        EP4,
        hosts=2,
        ddp=OVERLAP,
        fuse_main_grad=True,
        settings={"combine": "routes", "host_slots": 1, "spare_slots": 1},
    ),
    "hosts_4x1_recompute": Case(
        EP4,
        hosts=4,
        settings={"host_overlap": 2},
        config={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        fuse_main_grad=True,
    ),
    "hosts_2x1_pp2_biases": Case(
        Layout(expert=2, pipeline=2),
        hosts=4,
        config={"add_bias_linear": True},
        settings={"keep": "inputs"},
        micro_batches=4,
    ),
    "capacity": Case(EP2_DP2, config={"moe_expert_capacity_factor": 0.8}),
    "capacity_padded": Case(
        EP2_DP2,
        config={"moe_expert_capacity_factor": 1.2, "moe_pad_expert_input_to_capacity": True},
    ),
    "z_loss": Case(EP2_DP2, config={"moe_z_loss_coeff": 1e-2, "moe_aux_loss_coeff": 0.1}),
    "expert_bias": Case(
        EP2_DP2,
        config={
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.1,
            "moe_router_load_balancing_type": "none",
        },
    ),
    "group_limited": Case(
        EP2_DP2,
        config={
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_pre_softmax": True,
            "moe_router_topk": 3,
        },
    ),
    "biases": Case(EP2_DP2, config={"add_bias_linear": True}, ddp=OVERLAP),
    "biases_main_grad": Case(EP2_DP2, config={"add_bias_linear": True}, fuse_main_grad=True),
    "biases_tp2_ep2": Case(Layout(expert=2, tensor=2), config={"add_bias_linear": True}),
    "gpt_oss": Case(
        EP2_DP2,
        config={
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": 0.3,
            "glu_linear_offset": 1.0,
            "add_bias_linear": True,
        },
        fuse_main_grad=True,
    ),
    "pp2_ep2": Case(Layout(expert=2, pipeline=2), ddp=OVERLAP),
    "pp2_vpp2_ep2": Case(Layout(expert=2, pipeline=2, virtual=2), micro_batches=4),
    "overlapped_pp2_vpp2_ep2": Case(
        Layout(expert=2, pipeline=2, virtual=2),
        config=OVERLAPPED,
        later={"bf16": False},
        steps=2,  # after three, a token of the evaluation has a tie, but for rounding
        micro_batches=4,
    ),
    "lengths_of_any_size": Case(EP2_DP2, lengths="any", ddp=OVERLAP),
    "lengths_of_any_size_pp2_ep2": Case(
        Layout(expert=2, pipeline=2), config={"variable_seq_lengths": True}, lengths="any"
    ),
    "packed_documents": Case(EP2_DP2, lengths="packed"),
    "tp2_ep2": Case(Layout(expert=2, tensor=2)),
    "tp2_ep4_both_overlaps": Case(Layout(expert=4, tensor=2), ddp=OVERLAP),
}


def by_layout(name: str) -> tuple[str, int]:
    """Cases of one layout follow each other: its groups cost more than a training."""
    return str(CASES[name].layout), CASES[name].hosts


@pytest.mark.parametrize("name", sorted(CASES, key=by_layout))
def test_training_matches_alltoall(name: str, four_ranks: RankPool) -> None:
    pairs = MEGATRON.compare(four_ranks, CASES[name])
    assert any(stock.losses for stock, _ in pairs)
    for stock, _ in pairs:
        assert set(stock.layers.values()) == {"MoEAlltoAllTokenDispatcher"}


HALF = Tolerance(losses=5e-3, gradients=1e-2, parameters=math.inf)
"""In float16 the two sides round in other places, and Adam makes steps of what rounding leaves."""


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "replicated"])
def test_float16_matches_alltoall(distributed: bool, four_ranks: RankPool) -> None:
    """Megatron scales the loss and skips the steps of gradients that overflow, with both alike."""
    case = Case(
        EP2_DP2,
        config={"fp16": True, "params_dtype": torch.float16, "add_bias_linear": True},
        ddp={"use_distributed_optimizer": distributed},
        steps=6,
        initial_loss_scale=2.0**20,  # overflows at first
    )
    for _, fused in MEGATRON.compare(four_ranks, case, HALF):
        assert any(fused.skipped), fused.skipped
        assert fused.skipped.count(False) >= 3, fused.skipped


def test_two_ranks_match_alltoall(two_ranks: RankPool) -> None:
    for _, fused in MEGATRON.compare(two_ranks, Case(Layout(expert=2))):
        assert len(fused.losses) == 3


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
def test_norms_that_are_recomputed_match_alltoall(keep: str, two_ranks: RankPool) -> None:
    """Megatron frees a norm's output behind the layer that saves it, and fills it in backward."""
    case = Case(
        Layout(expert=2),
        config={"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
        settings={"keep": keep},
    )
    MEGATRON.compare(two_ranks, case)


@pytest.mark.parametrize(
    ("keep", "config"),
    [
        ("all", {}),
        ("inputs", {}),
        ("preactivations", {}),
        ("preactivations", {"moe_shared_expert_intermediate_size": 64}),
        ("preactivations", {"hidden_size": 128, "moe_latent_size": 64}),
        (
            "preactivations",
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        ),
    ],
    ids=str,
)
def test_overlapped_micro_batches_match_alltoall(
    keep: str, config: dict[str, Any], two_ranks: RankPool
) -> None:
    """Megatron frees storage between a layer's nodes; what a launch keeps has to outlive that."""
    case = Case(
        Layout(expert=2),
        config={**OVERLAPPED, **config},
        later={"bf16": False},
        ddp=OVERLAP,
        micro_batches=4,
        settings={"keep": keep},
    )
    MEGATRON.compare(two_ranks, case)


@pytest.mark.parametrize("overlap", [False, True])
def test_delayed_weight_gradients_match_alltoall(overlap: bool, two_ranks: RankPool) -> None:
    """Megatron's DDP hears of the experts' gradients in ``backward_dw`` alone."""
    case = Case(
        Layout(expert=2),
        config={
            **OVERLAPPED,
            "delay_wgrad_compute": True,
            "moe_shared_expert_intermediate_size": 64,
        },
        later={"bf16": False},
        experts="te_grouped_delayed",
        ddp={"delay_wgrad_compute": True, "overlap_grad_reduce": overlap},
        micro_batches=3,
    )
    MEGATRON.compare(two_ranks, case)


ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "latent_experts": {
        "hidden_size": 128,
        "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "multi_token_prediction": {"mtp_num_layers": 1},
    "force_load_balancing": {"moe_router_force_load_balancing": True},
}


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_models_match_alltoall(name: str, two_ranks: RankPool) -> None:
    MEGATRON.compare(two_ranks, Case(Layout(expert=2), config=ON_TWO_RANKS[name], ddp=OVERLAP))


@pytest.mark.parametrize("experts", [None, "te_grouped"])
def test_muon_matches_alltoall(experts: str | None, two_ranks: RankPool) -> None:
    """Its steps are matrices' directions, which are as far apart as the gradients at most."""
    case = Case(
        Layout(expert=2),
        muon=True,
        experts=experts,
        ddp={"use_distributed_optimizer": False, "overlap_grad_reduce": True},
    )
    MEGATRON.compare(two_ranks, case)


@dataclass(frozen=True)
class Saved:
    """A checkpoint of two iterations on four ranks, and what training it gave each rank."""

    folder: Path
    outcomes: list[Outcome]


@pytest.fixture(scope="module")
def saved(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """A checkpoint of each dispatcher."""
    checkpoints = {}
    for dispatcher in ("alltoall", "flashmoe"):
        folder = tmp_path_factory.mktemp(dispatcher) / "checkpoint"
        is_fused = dispatcher == "flashmoe"
        outcomes = MEGATRON.save(four_ranks, RESUMED, SAVED_AFTER, folder, is_fused=is_fused)
        checkpoints[dispatcher] = Saved(folder, outcomes)
    return checkpoints


@pytest.mark.parametrize(("before", "after"), [("alltoall", "flashmoe"), ("flashmoe", "alltoall")])
def test_dispatcher_can_be_switched_at_a_checkpoint(
    before: str, after: str, four_ranks: RankPool, saved: dict[str, Saved]
) -> None:
    folder, is_fused = saved[before].folder, after == "flashmoe"
    MEGATRON.compare_resumed(four_ranks, RESUMED, SAVED_AFTER, folder, is_fused=is_fused)


@pytest.mark.parametrize(("before", "after"), [("alltoall", "flashmoe"), ("flashmoe", "alltoall")])
def test_experts_go_to_other_ranks_at_a_checkpoint(
    before: str, after: str, four_ranks: RankPool, saved: dict[str, Saved]
) -> None:
    """The model alone: the optimizer's state is saved for one layout."""
    folder, outcomes = str(saved[before].folder), saved[before].outcomes
    loads = Case(EP4, steps=0, load_from=folder, loads_optimizer=False)
    for want, got in zip(outcomes, four_ranks.run(train, loads, after == "flashmoe"), strict=True):
        assert got.eval_losses == pytest.approx(want.eval_losses, rel=MEGATRON.tolerance.losses)


def test_a_tool_that_knows_no_dispatcher_converts_a_checkpoint(
    saved: dict[str, Saved], tmp_path: Path
) -> None:
    """Torch's own converter to one file, of Megatron's distributed format."""
    converted = {}
    for dispatcher, checkpoint in saved.items():
        file = tmp_path / f"{dispatcher}.pt"
        dcp_to_torch_save(checkpoint.folder, file)
        state = torch.load(file, weights_only=False)
        converted[dispatcher] = {
            name: value for name, value in state.items() if isinstance(value, torch.Tensor)
        }
    stock, ours = converted["alltoall"], converted["flashmoe"]
    assert ours.keys() == stock.keys()
    assert any("experts" in name for name in ours)
    for name, value in stock.items():
        assert ours[name].dtype == value.dtype
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-3)


def test_sequences_that_are_shared_out_by_length_match_alltoall(two_ranks: RankPool) -> None:
    """The ranks make different numbers of calls, so that each has all experts."""
    case = Case(Layout(), config=sequences.SETTINGS, lengths="shared", ddp=OVERLAP)
    pairs = MEGATRON.compare(two_ranks, case)
    runs = case.steps + 1
    assert [fused.calls for _, fused in pairs] == [[2 * runs] * 2, [3 * runs] * 2]


LONG = 50


def test_hosts_match_alltoall_and_resume_on_one(four_ranks: RankPool, tmp_path: Path) -> None:
    """Two hosts of two ranks train for long; one host of four goes on from their checkpoint."""
    case = Case(EP4, hosts=2, steps=LONG)
    stock = four_ranks.run(train, case, False)
    found = MEGATRON.save(four_ranks, case, LONG, tmp_path / "checkpoint", is_fused=True)
    for want, got in zip(stock, found, strict=True):
        assert got.over_hosts
        assert all(got.calls)
        assert got.losses == pytest.approx(want.losses, rel=1e-3)
        assert got.losses[:10] == pytest.approx(want.losses[:10], rel=MEGATRON.tolerance.losses)
    later = Case(EP4, steps=2, first_step=LONG, load_from=str(tmp_path / "checkpoint"))
    MEGATRON.compare(four_ranks, later)


@pytest.mark.parametrize("is_fused", [False, True], ids=["alltoall", "flashmoe"])
def test_a_training_leaves_nothing_behind(is_fused: bool, four_ranks: RankPool) -> None:
    """Neither models nor backends keep a group that has been destroyed, whose threads poll."""
    for threads in four_ranks.run(threads_behind_trainings, is_fused):
        assert threads[2:] == threads[:2]


def threads_behind_trainings(group: dist.ProcessGroup, is_fused: bool) -> list[int]:
    """This rank's threads behind each training: on one host and on two in turns."""
    counts = []
    for case in (Case(EP2_DP2, ddp=OVERLAP), Case(EP4, hosts=2)) * 2:
        train(group, dataclasses.replace(case, steps=1), is_fused)
        gc.collect()  # groups of hosts end with their cycle
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_an_upcycled_model_matches_alltoall(two_ranks: RankPool) -> None:
    for before, stock, fused in two_ranks.run(upcycled_losses):
        assert len(fused) == 3
        assert fused == pytest.approx(stock, rel=MEGATRON.tolerance.losses)
        assert stock[0] != pytest.approx(before, rel=1e-3), (
            "the dense model's weights are not there"
        )


def upcycled_losses(group: dist.ProcessGroup) -> tuple[float, list[float], list[float]]:
    """The loss of fresh experts; and losses with those of a dense model, with each dispatcher."""
    layout = Layout(expert=2)
    prepare(layout)
    from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict

    dense = transformer_config(
        layout,
        "alltoall",
        num_moe_experts=None,
        moe_ffn_hidden_size=None,
        expert_model_parallel_size=1,
    )
    tokens = torch.arange(2 * SEQ_LENGTH).view(2, SEQ_LENGTH)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    position = torch.arange(SEQ_LENGTH).expand(2, -1)
    before, losses = 0.0, []
    for dispatcher in ("alltoall", "flashmoe"):
        models = build_model(transformer_config(layout, dispatcher), layout)
        with torch.no_grad():
            before = float(models[0](tokens, position, mask, labels=tokens).mean())
        torch.manual_seed(3)  # the routers are drawn
        state = upcycle_state_dict(models, build_model(dense, layout))
        models[0].load_state_dict(state["model"])
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = models[0](tokens, position, mask, labels=tokens).mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
    return before, *losses
