"""Training with replicas of hot experts gives the numbers of training without."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from flashmoe_megatron.adapters.megatron.buckets import hooks as ddp_hooks
from flashmoe_megatron.telemetry.record import read_launch_number
from tests.distributed import RankPool
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
from tests.megatron.test_training import OVERLAP
from tests.side_by_side import assert_same

REPLICAS = {"spare_slots": 2, "replica_policy": "popular"}
"""With a test's few tokens, all experts' rows fill one block each, and ``balance`` leaves them."""

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = {
    # The routers stay skewed, so that replicas move.
    "full_recompute": Case(
        Layout(expert=2),
        config={**FULL_RECOMPUTE, "moe_aux_loss_coeff": 0.0},
        ddp={"overlap_grad_reduce": True},
        steps=20,
    ),
    "lookahead": Case(Layout(expert=2), ddp=OVERLAP, settings={"placement": "lookahead"}),
    "pre_gate": Case(
        Layout(expert=2),
        config=FULL_RECOMPUTE,
        settings={"placement": "lookahead", "pre_gate": True},
    ),
    "keep_inputs": Case(Layout(expert=2), fuse_main_grad=True, settings={"keep": "inputs"}),
    "pp2_ep2": Case(Layout(expert=2, pipeline=2), ddp={"overlap_grad_reduce": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_with_replicas_matches_training_without(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    without = CASES[name]
    pool: RankPool = request.getfixturevalue(
        "four_ranks" if without.layout.pipeline > 1 else "two_ranks"
    )
    folders = [tmp_path / kind for kind in ("without", "within")]
    metrics = tmp_path / "metrics.jsonl"
    within = dataclasses.replace(
        without, settings={**without.settings, **REPLICAS}, metrics_to=str(metrics)
    )
    alone = {key: value for key, value in without.settings.items() if key != "placement"}
    without = dataclasses.replace(without, settings=alone)
    outcomes = [
        pool.run(train, dataclasses.replace(case, save_to=str(folder)), True)
        for case, folder in zip((without, within), folders, strict=True)
    ]
    for want, got in zip(*outcomes, strict=True):
        assert_same(got, want, MEGATRON.tolerance)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    moved = [line["flashmoe/replicas"] for line in lines]
    assert len(moved) >= without.steps - 1
    assert min(moved) > 0
    assert len(set(moved)) > 1 or without.steps < 20
    for line in lines:
        assert line["flashmoe/locality"] > (0.5 if name == "lookahead" else 0.55)
        assert line["flashmoe/backward/replica_mib"] > line["flashmoe/forward/replica_mib"] > 0
    shapes = [
        {key: getattr(stored, "size", None) for key, stored in metadata.items()}
        for metadata in (
            FileSystemReader(folder).read_metadata().state_dict_metadata for folder in folders
        )
    ]
    assert shapes[0] == shapes[1]
    assert any("experts" in key for key in shapes[0])


def early_routing(group: dist.ProcessGroup) -> tuple[list[bool], list[str]]:
    """Whether pre-run gating routes by each layer's input; and what it refuses."""
    from flashmoe_megatron.errors import FlashMoEError

    layout = Layout(expert=2)
    prepare(layout, pre_gate=True)
    chunk = build_model(transformer_config(layout, "flashmoe"), layout)[0]
    seen: dict[str, list[torch.Tensor]] = {"layer": [], "router": []}
    found = []
    for layer in chunk.decoder.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen["layer"].append(
                module.pre_mlp_layernorm(args[0] if args else kwargs["hidden_states"])
            ),
            with_kwargs=True,
        )
        layer.mlp.router.register_forward_pre_hook(
            lambda module, args: seen["router"].append(args[0])
        )
    tokens = torch.arange(2 * SEQ_LENGTH).view(2, SEQ_LENGTH)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    position = torch.arange(SEQ_LENGTH).expand(2, -1)
    chunk(tokens, position, mask, labels=tokens).mean().backward()
    found = [torch.equal(*pair) for pair in zip(*seen.values(), strict=True)]
    found.append(all(layer.mlp.router.weight.grad.any() for layer in chunk.decoder.layers))
    refused = []

    def attempt(call) -> None:
        try:
            call()
        except FlashMoEError as error:
            refused.append(str(error))

    attempt(lambda: chunk.decoder.layers[0].mlp(torch.zeros(SEQ_LENGTH, 2, 64)))
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    config = transformer_config(layout, "flashmoe", **recompute)
    attempt(lambda: build_model(config, layout))
    dense = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    build_model(transformer_config(layout, "flashmoe", **dense), layout)  # is accepted
    return found, refused


def read_ahead(group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """What is called in a forward, layer by layer, if the backend reads weights ahead of it."""
    from flashmoe_megatron.adapters.megatron.shape import ROUTED

    layout = Layout(expert=2)
    prepare(layout, placement="lookahead", **REPLICAS)
    chunk = build_model(transformer_config(layout, "flashmoe"), layout)[0]
    called: list[tuple[str, int]] = []
    for number, layer in enumerate(chunk.decoder.layers):
        routed, experts = getattr(layer.mlp, ROUTED), layer.mlp.experts
        layer.self_attention.register_forward_pre_hook(
            lambda *_, number=number: called.append(("attention", number))
        )

        def wait(*_: Any, number: int = number) -> None:
            called.append(("experts", number))

        setattr(wait, ddp_hooks._WAITS, True)
        experts.register_forward_pre_hook(wait)
        backend = routed.backend
        if "settle" in vars(backend):  # the layers share it
            continue
        settle = backend.settle

        def read_and_settle(routing_map, read_weights, *, layer, settle=settle) -> None:
            called.append(("settle", read_launch_number(layer).layer))
            read_weights()
            settle(routing_map, read_weights, layer=layer)

        backend.settle = read_and_settle
    tokens = torch.arange(2 * SEQ_LENGTH).view(2, SEQ_LENGTH)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    position = torch.arange(SEQ_LENGTH).expand(2, -1)
    chunk(tokens, position, mask, labels=tokens)
    return called


def test_weights_are_read_ahead_behind_the_experts_hooks(two_ranks: RankPool) -> None:
    """These wait for parameters that other ranks have updated."""
    for called in two_ranks.run(read_ahead):
        steps = ("settle", "experts", "attention", "experts")
        assert called == [(step, number) for number in range(2) for step in steps]


def test_no_graph_holds_a_lookahead() -> None:
    """Whatever part of a layer it captures: the host settles on replicas before attention."""
    from flashmoe_megatron.adapters.megatron.config.refusals import check_early_routing
    from flashmoe_megatron.adapters.megatron.settings import Settings
    from flashmoe_megatron.errors import ConfigError

    graphed = SimpleNamespace(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"])
    ahead = Settings(spare_slots=1, placement="lookahead")
    with pytest.raises(ConfigError, match="--flashmoe-placement lookahead with CUDA graphs: "):
        check_early_routing(graphed, ahead)
    check_early_routing(SimpleNamespace(), ahead)
    check_early_routing(graphed, Settings(spare_slots=1))


class Router(torch.nn.Module):
    """Gives back what it gets, as logits if these are asked for."""

    config = SimpleNamespace(moe_router_topk=1)

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return args

    def gating(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


@pytest.mark.parametrize("is_fused", [False, True])
def test_early_routing_sees_packed_samples_as_the_layer_does(is_fused: bool) -> None:
    """Megatron-Core 0.19 puts them side by side; its fused norm gives the residual, too."""
    from flashmoe_megatron.adapters.megatron.early_routing import _predict, _route

    def unflatten(tokens, mask, packed):
        size = packed.tokens_per_sample
        return tokens.view(2, size, -1).transpose(0, 1), mask.view(2, size), 2

    layer = SimpleNamespace(
        mlp=SimpleNamespace(router=Router()),
        pre_mlp_layernorm=lambda x: (x, None) if is_fused else x,
        _maybe_unflatten_for_moe=unflatten,
    )
    tokens, mask = torch.rand(6, 1, 4), torch.arange(6).view(1, 6) % 4 == 0
    got, got_mask = _route(layer, tokens, mask, SimpleNamespace(tokens_per_sample=3))
    assert torch.equal(got, torch.stack([tokens[:3, 0], tokens[3:, 0]], 1))
    assert torch.equal(got_mask, torch.stack([mask[0, :3], mask[0, 3:]], 1))
    assert torch.equal(_predict(layer, tokens).int().argmax(1), tokens.view(6, 4).argmax(1))


def test_a_lookahead_adds_the_bias_of_experts_to_sigmoids() -> None:
    """Beside logits, a bias of 0.2 would change no choice."""
    from flashmoe_megatron.adapters.megatron.early_routing import _predict

    router = Router()
    router.expert_bias = torch.tensor([0.2, 0.0, 0.0])
    layer = SimpleNamespace(mlp=SimpleNamespace(router=router), pre_mlp_layernorm=lambda x: x)
    logits = torch.tensor([[3.0, 5.0, 1.0], [-3.0, 1.0, -5.0]])  # 0.95 + 0.2, 0.99; 0.25, 0.73
    assert _predict(layer, logits[:, None]).int().argmax(1).tolist() == [0, 1]


def test_a_routing_that_was_found_before_attention_is_for_one_call() -> None:
    """And for the tokens that it was found for: those of another call would be routed wrong."""
    from flashmoe_megatron.adapters.megatron import early_routing
    from flashmoe_megatron.errors import ConfigError

    class Layer:
        def route(self, hidden_states: torch.Tensor) -> str:
            return "by its own router"

    early_routing.patch_route(SimpleNamespace(MoELayer=Layer))
    layer, tokens = Layer(), torch.zeros(3, 2, 8)
    assert layer.route(tokens) == "by its own router"
    setattr(layer, early_routing.ROUTED, SimpleNamespace(pre_gates=True))
    found = torch.ones(6, 4), torch.ones(6, 4, dtype=torch.bool)
    setattr(layer, early_routing._EARLY, found)
    assert layer.route(tokens) is found
    with pytest.raises(ConfigError, match="has 6 tokens and got none of the routings"):
        layer.route(tokens)
    setattr(layer, early_routing._EARLY, found)
    with pytest.raises(ConfigError, match="has 4 tokens and got one of 6 tokens"):
        layer.route(tokens[:2])


def test_pre_run_gating_routes_by_the_layers_input(two_ranks: RankPool) -> None:
    for found, refused in two_ranks.run(early_routing):
        assert found == [True] * 3  # two layers, and gradients in both routers
        assert len(refused) == 2
        assert "got none of the routings that are found before attention" in refused[0]
        assert "--flashmoe-pre-gate with --recompute-modules moe" in refused[1]
