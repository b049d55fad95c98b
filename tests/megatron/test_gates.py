"""Gates in the place of Megatron's router, beside Megatron's own where it computes the same."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters import megatron as adapter
from flashmoe_megatron.adapters.megatron.gate_routers import with_gate
from flashmoe_megatron.bench.megatron_layer import moe_submodules
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.gates import Gate, GShardGate, SigmoidGate, XMoEGate
from tests.distributed import RankPool
from tests.megatron.harness import (
    MEGATRON,
    Case,
    Layout,
    forget_metrics,
    prepare,
    train,
    transformer_config,
)
from tests.megatron.layers import make_layer
from tests.side_by_side import Outcome, assert_same

EP2 = Layout(expert=2)
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False}
"""What makes Megatron's own router the sigmoid gate, where a token has one expert."""

TOP1 = {
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,  # which Megatron asks for beside its own router's softmax
    "moe_z_loss_coeff": 1e-2,
    "moe_aux_loss_coeff": 0.1,
}
AS_MEGATRON: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tensor_and_sequence_parallel": (Layout(expert=2, tensor=2), TOP1),
    "capacity_and_two_losses": (
        EP2,
        {
            **TOP1,
            "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.05],
            "moe_expert_capacity_factor": 0.8,
        },
    ),
    "multi_token_prediction": (EP2, {**TOP1, "mtp_num_layers": 1}),
}


def train_with(gate: str, case: Case, pool: RankPool, **config: Any) -> list[Outcome]:
    """Trains on flashmoe with a gate, and with more of Megatron's settings."""
    case = dataclasses.replace(case, settings={"gate": gate}, config={**case.config, **config})
    return pool.run(train, case, True)


@pytest.mark.parametrize("name", AS_MEGATRON)
def test_sigmoids_train_as_megatrons_own(
    name: str, four_ranks: RankPool, two_ranks: RankPool
) -> None:
    """The z loss, all auxiliary losses and their scaling are those of Megatron's router."""
    layout, config = AS_MEGATRON[name]
    pool = four_ranks if layout.tensor > 1 else two_ranks
    case = Case(layout, config=config)
    own = train_with("router", case, pool, **SIGMOID)
    for want, got in zip(own, train_with("sigmoid", case, pool), strict=True):
        assert_same(got, want, MEGATRON.tolerance, MEGATRON.determined)


def test_gshard_that_tries_all_second_choices_trains_as_megatrons_top2(two_ranks: RankPool) -> None:
    case = Case(EP2, config={"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1e-2})
    own = train_with("router", case, two_ranks)
    ours = two_ranks.run(train_without_draws, case, "gshard")
    for want, got in zip(own, ours, strict=True):
        assert_same(got, want, MEGATRON.tolerance, MEGATRON.determined)


def train_without_draws(group: dist.ProcessGroup, case: Case, gate: str) -> Outcome:
    prepare(case.layout)
    from flashmoe_megatron.adapters.megatron.gate_routers import GShardRouter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GShardRouter, "random_second", False)
        return train(group, dataclasses.replace(case, settings={"gate": gate}), True)


MAKERS: dict[str, tuple[type[Gate], dict[str, Any], dict[str, Any]]] = {
    "gshard": (GShardGate, {"capacity_factor": 0.7}, {"moe_expert_capacity_factor": 0.7}),
    "sigmoid": (SigmoidGate, {"topk": 2}, {}),
    "xmoe": (XMoEGate, {"topk": 2}, {}),
}
COEFFICIENT = 0.1


@pytest.mark.parametrize("name", MAKERS)
def test_a_router_chooses_balances_and_logs_as_its_gate(name: str, two_ranks: RankPool) -> None:
    """The gates of plain PyTorch, which tests hold beside loops over the papers' formulas."""
    two_ranks.run(compare_router, name)


def compare_router(group: dist.ProcessGroup, name: str) -> None:
    kind, arguments, config = MAKERS[name]
    prepare(EP2, gate=name)
    router = make_layer(
        transformer_config(EP2, "flashmoe", moe_aux_loss_coeff=COEFFICIENT, **config)
    ).router
    gate = kind(router.config.hidden_size, router.config.num_moe_experts, **arguments)
    # Both have one parameter by that name, but for the temperature's shape.
    of_gate, of_router = dict(gate.named_parameters()), dict(router.named_parameters())
    assert list(of_gate) == list(of_router)
    with torch.no_grad():
        for parameter_name, parameter in of_gate.items():
            parameter.copy_(of_router[parameter_name].view(parameter.shape))
    tokens = torch.randn(16, 2, router.config.hidden_size)
    forget_metrics()
    torch.manual_seed(11)
    probs, routing_map = router(tokens)
    torch.manual_seed(11)
    routing = gate(tokens.flatten(0, 1))
    table = torch.zeros_like(probs)
    for token, (chosen, weights) in enumerate(
        zip(routing.topk_idx.tolist(), routing.topk_weight.tolist(), strict=True)
    ):
        for expert, weight in zip(chosen, weights, strict=True):
            if expert >= 0:
                table[token, expert] = weight
    torch.testing.assert_close(probs.detach(), table)
    assert torch.equal(routing_map, table > 0)
    if name == "gshard":
        assert int(routing.logs["dropped"]) > 0
        assert int(routing_map.sum()) + int(routing.logs["dropped"]) < 2 * len(probs)
    assert logged("load_balancing_loss") == pytest.approx(float(routing.aux_loss), rel=1e-5)
    # Megatron multiplies the gradients of these losses by its own scale, which is 1 at first.
    factor = torch.randn_like(probs)
    (probs * factor).sum().backward()
    spread = (routing.topk_weight * factor.gather(1, routing.topk_idx.clamp(min=0))).sum()
    (spread + COEFFICIENT * routing.aux_loss).backward()
    for parameter_name, parameter in of_gate.items():
        got = of_router[parameter_name].grad.view(parameter.shape)
        torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-5)
    # A token of padding counts for no loss.
    padding = torch.zeros(16, 2, dtype=torch.bool)
    padding[10:] = True
    forget_metrics()
    torch.manual_seed(11)
    router(tokens, padding)
    alone = gate(tokens[:10].flatten(0, 1)).aux_loss
    assert logged("load_balancing_loss") == pytest.approx(float(alone), rel=1e-5)


def logged(name: str) -> float:
    """What Megatron's tracker of losses has of the first layer."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return float(get_moe_layer_wise_logging_tracker()[name]["values"][0])
    return float(get_moe_metrics_tracker().metrics[name].values[0])


PARAMETERS = {"gshard": {"weight"}, "xmoe": {"projection", "embeddings", "temperature"}}


@pytest.mark.parametrize("gate", PARAMETERS)
def test_a_gate_trains_alike_with_and_without_tensor_parallelism(
    gate: str, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    """From one checkpoint; ranks that share a sequence have a part of the gradient each.

    GShard tries all second choices here, since ranks draw numbers of their own.
    """
    folder = str(tmp_path / "checkpoint")
    config = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 1e-2}
    saves = Case(EP2, config=config, steps=1, save_to=folder)
    two_ranks.run(train_without_draws, saves, gate)
    loads = Case(EP2, config=config, load_from=folder, loads_optimizer=False)
    alone = two_ranks.run(train_without_draws, loads, gate)
    over_four = dataclasses.replace(loads, layout=Layout(expert=2, tensor=2))
    shared = four_ranks.run(train_without_draws, over_four, gate)
    for rank, got in enumerate(shared):
        want = alone[rank // 2]  # which has the same sequences
        assert got.losses == pytest.approx(want.losses, rel=1e-5)
        assert got.grad_norms == pytest.approx(want.grad_norms, rel=1e-4)
    names = [name for name in alone[0].parameters if ".router." in name]
    assert {name.split(".router.")[1] for name in names} == PARAMETERS[gate]
    for name in names:
        parameters = (shared[0].parameters[name], alone[0].parameters[name])
        torch.testing.assert_close(*parameters, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("gate", "config", "words"),
    [
        ("gshard", {"moe_router_topk": 4}, "gshard with --moe-router-topk 4: wanted 2, or pass"),
        ("gshard", {"moe_token_drop_policy": "position"}, "an order of its own"),
        (
            "sigmoid",
            {"moe_router_pre_softmax": True},
            "with --moe-router-pre-softmax: leave it out",
        ),
        ("sigmoid", SIGMOID, "--moe-router-score-function sigmoid: leave it out"),
        (
            "xmoe",
            {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
            "--moe-router-load-balancing-type sinkhorn: wanted some of aux_loss, ",
        ),
        ("xmoe", {"moe_router_topk_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor"),
        (
            "xmoe",
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
            "--moe-router-num-groups: leave it out",
        ),
    ],
)
def test_what_a_gate_would_not_follow_is_refused(
    gate: Any, config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = adapter.Settings(gate=gate)
    name = "flashmoe_megatron.adapters.megatron.gate_routers.current_settings"
    monkeypatch.setattr(name, lambda: settings)
    with pytest.raises(ConfigError, match=words):
        with_gate(transformer_config(EP2, "flashmoe", **config), moe_submodules(8, use_te=False))


def test_a_router_of_the_users_own_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "flashmoe_megatron.adapters.megatron.gate_routers.current_settings"
    monkeypatch.setattr(name, lambda: adapter.Settings(gate="xmoe"))
    submodules = dataclasses.replace(moe_submodules(8, use_te=False), router=torch.nn.Linear)
    with pytest.raises(ConfigError, match="xmoe with a model whose router is .*Linear"):
        with_gate(transformer_config(EP2, "flashmoe"), submodules)


@pytest.mark.parametrize("gate", ["expert-choice", "soft"])
def test_a_gate_that_sees_later_tokens_is_refused(gate: Any) -> None:
    with pytest.raises(ConfigError, match=f"--flashmoe-gate '{gate}': .* depend on later tokens"):
        adapter.Settings(gate=gate)


RECOMPUTED: dict[str, dict[str, Any]] = {
    "whole_layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "moe_layers": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@pytest.mark.parametrize("gate", ["gshard", "xmoe"])
@pytest.mark.parametrize("what", RECOMPUTED)
def test_a_gate_that_is_computed_again_chooses_the_same(
    what: str, gate: str, two_ranks: RankPool
) -> None:
    """The second choices that GShard draws, too; and each loss counts once."""
    case = Case(EP2, config={"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 1e-2})
    kept = train_with(gate, case, two_ranks)
    again = train_with(gate, case, two_ranks, **RECOMPUTED[what])
    for want, got in zip(kept, again, strict=True):
        assert_same(got, want, MEGATRON.tolerance, MEGATRON.determined)
        assert sum(got.calls) > sum(want.calls)


@pytest.mark.parametrize("gate", ["gshard", "sigmoid", "xmoe"])
def test_a_gate_in_graphs_beside_the_launch_chooses_the_same(
    gate: str, two_ranks: RankPool
) -> None:
    case = Case(EP2, config={"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 1e-2})
    eager = train_with(gate, case, two_ranks)
    graphed = dataclasses.replace(case, graphs=1)
    parts = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": ["moe_router", "moe_preprocess"],
    }
    for want, got in zip(eager, train_with(gate, graphed, two_ranks, **parts), strict=True):
        assert_same(got, want, MEGATRON.tolerance, MEGATRON.determined)
