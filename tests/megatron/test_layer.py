"""One MoE layer with flashmoe gives the outputs and gradients of Megatron's alltoall layer."""

import functools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from flashmoe_megatron.adapters.megatron.buckets import hooks as ddp_hooks
from flashmoe_megatron.errors import ConfigError, RoutingError, RowBoundError
from flashmoe_megatron.oracle import assert_close
from tests.distributed import RankPool, refusal
from tests.megatron.grouped import TorchGroupedLinear, grouped_experts
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer, megakernel_of

EP2_DP2 = Layout(expert=2)
EP4 = Layout(expert=4)
TOKENS_PER_SEQUENCE, SEQUENCES = 16, 2

REL_L2 = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}

GPT_OSS = {
    "activation_func": "quick_gelu",
    "activation_func_clamp_value": 0.3,  # values are smaller here than the model's, whose is at 7
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
}

CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "swiglu": (EP2_DP2, {}),
    "one_expert_per_rank": (EP4, {"num_moe_experts": 4}),
    "all_experts": (EP4, {"num_moe_experts": 4, "moe_router_topk": 4}),
    "top1": (EP4, {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "gelu": (EP4, {"activation_func": F.gelu, "gated_linear_unit": False}),
    "relu": (EP4, {"activation_func": F.relu, "gated_linear_unit": False}),
    "geglu": (EP4, {"activation_func": F.gelu}),
    "quick_geglu": (EP4, {"activation_func": "quick_gelu"}),
    "clamped_swiglu": (EP4, {"activation_func_clamp_value": 0.3}),
    "gpt_oss": (EP2_DP2, GPT_OSS),
    "router_in_fp64": (EP4, {"moe_router_dtype": "fp64"}),
    "bf16": (EP4, {"bf16": True, "params_dtype": torch.bfloat16}),
    "fp16": (EP4, {"fp16": True, "params_dtype": torch.float16}),
    "biases": (EP2_DP2, {"add_bias_linear": True}),
    "biases_of_one_expert_per_rank": (EP4, {"num_moe_experts": 4, "add_bias_linear": True}),
    "biases_gelu": (
        EP4,
        {"add_bias_linear": True, "activation_func": F.gelu, "gated_linear_unit": False},
    ),
    "biases_capacity": (EP4, {"add_bias_linear": True, "moe_expert_capacity_factor": 0.5}),
    "biases_fp16": (
        EP4,
        {"add_bias_linear": True, "fp16": True, "params_dtype": torch.float16},
    ),
    "shared_expert": (EP4, {"moe_shared_expert_intermediate_size": 128}),
    "shared_expert_beside": (
        EP4,
        {"moe_shared_expert_intermediate_size": 128, "moe_shared_expert_overlap": True},
    ),
    "shared_expert_beside_with_a_gate": (
        EP4,
        {
            "moe_shared_expert_intermediate_size": 128,
            "moe_shared_expert_overlap": True,
            "moe_shared_expert_gate": True,
        },
    ),
    "capacity": (EP4, {"moe_expert_capacity_factor": 0.5}),
    "capacity_padded": (
        EP4,
        {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_matches_alltoall(name: str, four_ranks: RankPool) -> None:
    layout, settings = CASES[name]
    rel_l2 = REL_L2[settings.get("params_dtype", torch.float32)]
    for stock, fused in four_ranks.run(both_layers, layout, settings, "sequential"):
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=rel_l2)


@pytest.mark.parametrize("kind", ["te_grouped", "legacy_grouped"])
def test_grouped_experts_match_alltoall(kind: str, four_ranks: RankPool) -> None:
    """The weights of TEGroupedMLP and GroupedMLP are found where these modules keep them."""
    if kind == "legacy_grouped" and four_ranks.run(has_no_grouped_mlp)[0]:
        pytest.skip("this Megatron-Core has no GroupedMLP")
    # GroupedMLP wants the flag; the parameters stay in float32.
    for stock, fused in four_ranks.run(both_layers, EP2_DP2, {"bf16": True}, kind):
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


@pytest.mark.parametrize("kind", ["te_grouped", "legacy_grouped"])
def test_recomputed_activations_match_alltoall(kind: str, two_ranks: RankPool) -> None:
    """Megatron computes activations again in the backward, as flashmoe always does."""
    if kind == "legacy_grouped" and two_ranks.run(has_no_grouped_mlp)[0]:
        pytest.skip("this Megatron-Core has no GroupedMLP")
    settings = {
        "bf16": True,  # GroupedMLP wants it; the parameters stay in float32
        "moe_grouped_gemm": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    }
    for stock, fused in two_ranks.run(both_layers, Layout(expert=2), settings, kind):
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


@pytest.mark.parametrize("kind", ["sequential", "te_grouped"])
@pytest.mark.parametrize("settings", [{}, {"add_bias_linear": True}], ids=str)
def test_latent_experts_match_alltoall(
    settings: dict[str, Any], kind: str, two_ranks: RankPool
) -> None:
    """Tokens travel at the width between the latent projections, which stay Megatron's."""
    latent = {**settings, "hidden_size": 144, "moe_latent_size": 64, "num_attention_heads": 3}
    for stock, fused in two_ranks.run(both_layers, Layout(expert=2), latent, kind):
        assert "grad of fc2_latent_proj.weight" in stock
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


@pytest.mark.parametrize("name", ["moe_latent_size", "overlap_moe_expert_parallel_comm"])
def test_what_a_megakernel_cannot_honour(name: str, two_ranks: RankPool) -> None:
    flag = "--" + name.replace("_", "-")
    for said in two_ranks.run(refused_megakernel, name):
        assert re.search(rf"{flag} .*: use --moe-token-dispatcher-type flashmoe", said)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"pre_gate": True}, "--flashmoe-pre-gate"),
        ({"placement": "lookahead", "spare_slots": 1}, "--flashmoe-placement lookahead"),
        ({"slice_gradients": True}, "--flashmoe-slice-gradients"),
        ({"experts": "fp8"}, "--first-last-layers-bf16"),
    ],
)
def test_settings_that_a_megakernel_cannot_honour(
    settings: dict[str, Any], flag: str, two_ranks: RankPool
) -> None:
    for said in two_ranks.run(refused_settings, settings):
        assert said.startswith(f"{flag} cannot be honoured with the megakernel interface")


def test_a_replayed_routing_is_executed(two_ranks: RankPool) -> None:
    """What one router has chosen, another replays, in the forward and in a recomputation."""
    for results in two_ranks.run(replayed_routing):
        for own, stock, fused in results:
            assert fused.keys() == stock.keys()
            for tensor in fused:
                assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)
            assert not torch.allclose(own["output"], fused["output"], rtol=1e-2)


def test_rows_that_the_router_pads_change_nothing(two_ranks: RankPool) -> None:
    """Megatron's checks allow them in FP8 alone, so that the flag is set when they are done."""
    for stock, fused in two_ranks.run(padded_layers):
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


def test_megatrons_bound_of_rows_holds(two_ranks: RankPool) -> None:
    """What fits is as with alltoall; more is an error on every rank, and no row is dropped."""
    for difference, said in two_ranks.run(bounded_rows):
        assert difference <= 1e-5
        assert re.search("rank 0 was to receive .* blocks of 128 rows, but its buffers hold", said)


def test_gpt_oss_in_grouped_experts_matches_alltoall(two_ranks: RankPool) -> None:
    settings = {**GPT_OSS, "add_bias_linear": False}
    for stock, fused in two_ranks.run(both_layers, Layout(expert=2), settings, "te_grouped"):
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


@pytest.mark.parametrize("block", [1, 32])
def test_rows_of_fc1_in_blocks_match_alltoall(block: int, two_ranks: RankPool) -> None:
    """Gradients come back in the order of the weights."""
    for stock, fused in two_ranks.run(blocks_and_halves, block):
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


def test_rows_of_fc1_in_blocks_match_megatrons_own(two_ranks: RankPool) -> None:
    if not two_ranks.run(knows_blocks)[0]:
        pytest.skip("this Megatron-Core does not know --moe-mlp-glu-interleave-size")
    settings = {**GPT_OSS, "moe_mlp_glu_interleave_size": 32}
    for stock, fused in two_ranks.run(both_layers, Layout(expert=2), settings, "te_grouped"):
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


def test_biases_of_grouped_experts_match_alltoall(four_ranks: RankPool) -> None:
    """TEGroupedMLP adds fc1's bias in its linear layer and fc2's, times the probabilities, itself.

    GroupedMLP refuses biases.
    """
    for stock, fused in four_ranks.run(
        both_layers, EP2_DP2, {"add_bias_linear": True}, "te_grouped"
    ):
        assert "grad of experts.linear_fc2.bias3" in stock
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


def test_biases_that_megatron_refuses_stay_refused(four_ranks: RankPool) -> None:
    settings = {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 64}
    for told in four_ranks.run(refusal, both_layers, EP2_DP2, settings, "sequential"):
        assert "bias is not supported in the shared experts" in told


def test_megakernel_matches_the_layer(four_ranks: RankPool) -> None:
    for difference, names in four_ranks.run(megakernel):
        assert difference == 0.0
        assert names == []


def test_unknown_experts_are_refused_by_name(four_ranks: RankPool) -> None:
    for told in four_ranks.run(refusal, strange_experts):
        assert "experts of class Strange are not known; wanted Seq" in told


def test_more_tokens_than_announced_are_refused(four_ranks: RankPool) -> None:
    for told in four_ranks.run(refusal, too_many_tokens):
        assert re.search(r"48 tokens.*max_tokens=32.*--flashmoe-max-tokens 48", told)


@pytest.mark.parametrize("gated", [True, False])
def test_te_activation_matches_alltoall(gated: bool, four_ranks: RankPool) -> None:
    """Transformer Engine's GELU is the tanh form, though the configuration names the other."""
    settings = {
        "use_te_activation_func": True,
        "activation_func": F.gelu,
        "gated_linear_unit": gated,
    }
    for stock, fused in four_ranks.run(both_layers, EP2_DP2, settings, "te_grouped"):
        assert fused.keys() == stock.keys()
        for tensor in fused:
            assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


@pytest.mark.parametrize("place", ["config", "args", "nowhere"])
def test_padded_decoding_matches(place: str, two_ranks: RankPool) -> None:
    """Megatron's inference turns padding to capacity on in the configuration of a built model."""
    for difference, said in two_ranks.run(padded_decoding, place):
        if place == "nowhere":
            assert "pass --moe-pad-experts-for-cuda-graph-inference" in said
        else:
            assert (difference, said) == (0.0, "accepted")


def test_changed_experts_are_refused_by_name(four_ranks: RankPool) -> None:
    way_out = r"would not be called; .* use the alltoall dispatcher"
    said = four_ranks.run(changed_experts)[0]
    converted, hooked, patched, whole, *backward, before, wrapped, built = said
    assert re.search(
        r"experts\.local_experts\.1\.linear_fc1 .*class tests.megatron.*\.Quantized", converted
    )
    assert re.search(r"experts\.local_experts\.0\.linear_fc2 .* has forward hooks", hooked)
    assert re.search(r"experts\.local_experts\.0 .* has a forward of its own", patched)
    assert re.search(r"experts \(SequentialMLP\) has forward hooks", whole)
    assert "experts (Wrapper) was put there after the layer was built" in wrapped
    assert re.search(r"experts\.linear_fc1 .*class tests.megatron.*\.Quantized", built)
    assert re.search(r"\.1\.linear_fc2 .* has a forward pre-hook of others .* \(print\)", before)
    assert len(backward) == 2
    for message in backward:
        assert re.search(r"experts\.local_experts\.1\.linear_fc2 .* has backward hooks", message)
    for message in said:
        assert re.search(way_out, message)


@pytest.mark.parametrize("kind", ["sequential", "te_grouped"])
def test_another_function_after_the_layer_was_built_is_refused(
    kind: str, two_ranks: RankPool
) -> None:
    """Megatron's experts read their function in each call; ours was chosen with the layer."""
    for held, clamped, function, same in two_ranks.run(changed_functions, kind):
        assert "activation_func is not what it was when the layer was built" in held
        assert "clamp_value was None when the layer was built, and is 0.25 in the" in clamped
        assert re.search(r"activation was .*silu.* when .* and is .*gelu", function, re.I)
        assert same == "accepted"


@pytest.mark.parametrize("max_tokens", [TOKENS_PER_SEQUENCE * SEQUENCES, None])
def test_experts_that_one_rank_changes_are_refused_on_all(
    max_tokens: int | None, two_ranks: RankPool
) -> None:
    for said in two_ranks.run(experts_changed_on_rank_1, max_tokens):
        assert re.match(r"rank 1: experts \(SequentialMLP\) has forward hooks", said)


def test_a_calibration_that_one_rank_cannot_read_is_refused_on_all(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(calibration_missing_on_rank_1)
    assert first == second
    assert re.match("rank 1: .*no_such_file.json", first)


def test_a_configuration_that_was_changed_since_is_refused(two_ranks: RankPool) -> None:
    """Megatron's own argument handling changes configurations after they were checked."""
    for said in two_ranks.run(changed_configuration):
        assert re.search(r"--activation-func-clamp-value .*a positive number", said)


def test_experts_of_which_some_have_biases_are_refused(two_ranks: RankPool) -> None:
    for rank, said in enumerate(two_ranks.run(some_biases)):
        assert said == [
            f"rank {rank}: SequentialMLP: 3 of 4 experts have a bias; wanted all or none",
            f"rank {rank}: TEGroupedMLP: 3 of 4 experts have a bias; wanted all or none",
        ]


def test_parameters_are_awaited_as_often_as_by_a_module(two_ranks: RankPool) -> None:
    """Megatron waits in forward pre-hooks for the parameters, with ``--overlap-param-gather``."""
    assert two_ranks.run(awaited) == [["SequentialMLP", "ColumnParallelLinear"]] * 2


def test_probabilities_in_float64_are_not_rounded_to_the_tokens_dtype(two_ranks: RankPool) -> None:
    for in_float64, in_float32, in_bfloat16 in two_ranks.run(probability_dtypes):
        assert torch.equal(in_float64, in_float32)
        assert not torch.equal(in_float64, in_bfloat16), "the tokens would not show a rounding"


def test_gradients_go_where_they_are_seen(two_ranks: RankPool) -> None:
    two_ranks.run(main_grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_an_overflow_is_for_the_loss_scaler(dtype: torch.dtype, two_ranks: RankPool) -> None:
    """In float16, which has one, the token's output is NaN; in bfloat16 it is an error at once."""
    for said, is_nan, difference in two_ranks.run(overflown, dtype):
        if dtype == torch.float16:
            assert (said, is_nan, difference) == ("accepted", [True, *[False] * 31], 0.0)
        else:
            assert re.search(r"rank \d: the probability of token 0 .* is NaN", said)


def run_layer(layer: Any) -> dict[str, torch.Tensor]:
    """Forward and backward; every tensor that has to agree."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (TOKENS_PER_SEQUENCE, SEQUENCES, layer.config.hidden_size)
    x = torch.randn(shape, generator=generator).to(layer.config.params_dtype).requires_grad_()
    weight = torch.randn(shape, generator=generator).to(x.dtype)
    output, bias = layer(x)
    assert bias is None
    (output * weight).sum().backward()
    tensors = {"output": output, "grad of x": x.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        tensors[f"grad of {name}"] = parameter.grad
    return {name: tensor.detach() for name, tensor in tensors.items()}


def both_layers(
    group: dist.ProcessGroup,
    layout: Layout,
    settings: dict[str, Any],
    kind: str,
    later: dict[str, Any] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of the layer with alltoall and with flashmoe; ``later`` is set unchecked."""
    prepare(layout)
    experts = None if kind == "sequential" else grouped_experts(kind)
    results = []
    for dispatcher in ("alltoall", "flashmoe"):
        config = transformer_config(layout, dispatcher, **settings)
        vars(config).update(later or {})
        results.append(run_layer(make_layer(config, experts)))
    return results[0], results[1]


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2, expert_tensor=2), Layout(expert=2, expert_tensor=2)],
    ids=["2 ranks", "2 x 2 ranks"],
)
def test_experts_in_slices_match_alltoall(
    layout: Layout, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    ranks = four_ranks if layout.expert > 1 else two_ranks
    for results in ranks.run(layers_in_slices, layout):
        stock, *others = results
        for fused in others:
            assert fused.keys() == stock.keys()
            for tensor in fused:
                assert_close(tensor, fused[tensor], stock[tensor], rel_l2=1e-5)


def layers_in_slices(group: dist.ProcessGroup, layout: Layout) -> list[dict[str, torch.Tensor]]:
    """The tensors of alltoall, whose gather gloo refuses for ragged rows, and of flashmoe."""
    settings = {"moe_ffn_hidden_size": 128}
    prepare(layout)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "all_gather", functools.partial(gather_ragged, dist.all_gather))
        results = [run_layer(make_layer(transformer_config(layout, "alltoall", **settings)))]
    for degree in ("1", "2,3"):
        prepare(layout, backend="scheduled", max_tokens=None, degree=degree)
        results.append(run_layer(make_layer(transformer_config(layout, "flashmoe", **settings))))
    prepare(layout, backend="reference")
    with pytest.raises(ConfigError, match="pass --flashmoe-backend scheduled, or --expert-tensor"):
        transformer_config(layout, "flashmoe", **settings)
    return results


def gather_ragged(
    all_gather: Any, outputs: list[torch.Tensor], rows: torch.Tensor, group: Any = None
) -> None:
    """An all-gather of different sizes by one of equal sizes."""
    most = max(len(each) for each in outputs)
    padded = [each.new_zeros(most, *each.shape[1:]) for each in outputs]
    mine = padded[0].clone()
    mine[: len(rows)] = rows
    all_gather(padded, mine, group=group)
    for each, found in zip(outputs, padded, strict=True):
        each.copy_(found[: len(each)])


def knows_blocks(group: dist.ProcessGroup) -> bool:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return "moe_mlp_glu_interleave_size" in TransformerConfig.__dataclass_fields__


def blocks_and_halves(group: dist.ProcessGroup, block: int) -> tuple[dict[str, torch.Tensor], ...]:
    """Alltoall with all gate rows first, and flashmoe with the same rows in blocks."""
    prepare(Layout(expert=2))
    experts = grouped_experts("te_grouped")
    stock = make_layer(transformer_config(Layout(expert=2), "alltoall", **GPT_OSS), experts)
    fused = make_layer(
        transformer_config(
            Layout(expert=2), "flashmoe", **GPT_OSS, moe_mlp_glu_interleave_size=block
        ),
        experts,
    )
    rows = stock.experts.linear_fc1.weight0.shape[0]
    order = torch.arange(rows).view(2, -1, block).transpose(0, 1).flatten()
    with torch.no_grad():
        for parameter in fused.experts.linear_fc1.parameters():
            parameter.copy_(parameter[order].clone())
    want = run_layer(stock)
    for name in want:
        if "linear_fc1" in name:
            want[name] = want[name][order]
    return want, run_layer(fused)


def replayed_routing(group: dist.ProcessGroup) -> list[tuple[dict[str, torch.Tensor], ...]]:
    """Plain and recomputed: the layer by its own routing, and both replaying another router's."""
    prepare(Layout(expert=2))
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    results = []
    for settings in ({}, recompute):
        settings = {**settings, "moe_enable_routing_replay": True}
        layers = [
            make_layer(transformer_config(Layout(expert=2), dispatcher, **settings))
            for dispatcher in ("alltoall", "flashmoe")
        ]
        *_, recorder = replays = RouterReplay.global_router_replay_instances[-2:]
        own = run_layer(layers[1])
        recorder.set_router_replay_action(RouterReplayAction.RECORD)
        with torch.no_grad():
            layers[1].route(torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64))
        replayed = []
        for layer, replay in zip(layers, replays, strict=True):
            layer.zero_grad()
            replay.set_target_indices(recorder.get_recorded_indices())
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            replayed.append(run_layer(layer))
        results.append((own, *replayed))
        RouterReplay.clear_global_router_replay_instances()
    return results


def padded_layers(group: dist.ProcessGroup) -> Any:
    """Both layers where the stock one pads each expert's rows to a multiple of 16."""
    prepare(Layout(expert=2))
    from megatron.core.transformer.moe import token_dispatcher

    later = {"moe_router_padding_for_quantization": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "get_align_size_for_quantization", lambda config: 16)
        return both_layers(group, Layout(expert=2), {}, "sequential", later)


def has_no_grouped_mlp(group: dist.ProcessGroup) -> bool:
    prepare(EP2_DP2)
    from megatron.core.transformer.moe import experts

    return not hasattr(experts, "GroupedMLP")


def megakernel(group: dist.ProcessGroup) -> tuple[float, list[str]]:
    prepare(EP2_DP2)
    config = transformer_config(EP2_DP2, "flashmoe", moe_shared_expert_intermediate_size=64)
    layer = make_layer(config)
    backend = megakernel_of(layer)
    x = torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64)
    probs, routing_map = layer.route(x)
    got, want = backend(x, probs, routing_map), layer(x)[0]
    return float((got - want).detach().abs().max()), list(backend.state_dict())


def refused_megakernel(group: dist.ProcessGroup, name: str) -> str:
    """What is said against a setting behind the megakernel interface."""
    prepare(Layout(expert=2))
    layer = make_layer(transformer_config(Layout(expert=2), "flashmoe"))
    setattr(layer.config, name, 64)
    return refusal_of(megakernel_of, layer)


def refused_settings(group: dist.ProcessGroup, settings: dict[str, Any]) -> str:
    prepare(Layout(expert=2))
    layer = make_layer(transformer_config(Layout(expert=2), "flashmoe"))
    prepare(Layout(expert=2), **settings)
    layer.config.first_last_layers_bf16 = True
    return refusal_of(megakernel_of, layer)


def main_grads(group: dist.ProcessGroup) -> None:
    """Without Megatron's DDP gradients go to ``main_grad`` with Megatron's fusion alone."""
    prepare(Layout(expert=2))
    layer = make_layer(transformer_config(Layout(expert=2), "flashmoe"))
    want = run_layer(layer)
    first, *_ = experts = list(layer.experts.parameters())
    for parameter in experts:  # as Megatron's DDP does
        parameter.main_grad = torch.zeros_like(parameter)

    def added(*, fusion: bool = False) -> list[bool]:
        layer.config.gradient_accumulation_fusion = fusion
        for parameter in layer.parameters():
            parameter.grad = None
        for parameter in experts:
            parameter.grad_added_to_main_grad = False
            parameter.main_grad.zero_()
        got = run_layer(layer)
        for name, parameter in layer.experts.named_parameters():
            grad = f"grad of experts.{name}"
            if parameter.grad_added_to_main_grad:
                got[grad] = parameter.main_grad
            assert_close(grad, got[grad], want[grad], rel_l2=1e-5)
        return [parameter.grad_added_to_main_grad for parameter in experts]

    assert not any(added())
    assert all(added(fusion=True))
    for register in (first.register_hook, first.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert not any(added())
        assert all(added(fusion=True))
        handle.remove()


def overflown(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[str, list[bool], float]:
    """A layer's answer to an infinity in one token: words, tokens that are NaN, others' error."""
    prepare(Layout(expert=2))
    name = "fp16" if dtype == torch.float16 else "bf16"
    config = transformer_config(Layout(expert=2), "flashmoe", **{name: True, "params_dtype": dtype})
    layer = make_layer(config).to(dtype)
    x = torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64, dtype=dtype)
    want, _ = layer(x)
    x[0, 0, 0] = math.inf
    try:
        got, _ = layer(x.requires_grad_())
    except RoutingError as error:
        return str(error), [], 0.0
    got.float().sum().backward()
    assert not layer.router.weight.grad.isfinite().all(), "the loss scaler would see nothing"
    tokens = got.isnan().any(-1).flatten().tolist()
    return "accepted", tokens, float((got - want)[1:].detach().abs().max())


def padded_decoding(group: dist.ProcessGroup, place: str) -> tuple[float, str]:
    """How far decoding is from the same without padding, and what is said against it.

    The configuration has the flag from Megatron-Core 0.17 on, before it is the script's.
    """
    prepare(Layout(expert=2))
    from megatron.core.inference import utils

    from flashmoe_megatron.adapters.megatron import shape

    flag = {"moe_pad_experts_for_cuda_graph_inference": True}
    config = transformer_config(Layout(expert=2), "flashmoe")
    vars(config).update(flag if place == "config" else {})
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(utils, "moe_layer_cache", None)  # it may be an earlier model's
        args = SimpleNamespace(**flag) if place == "args" else None
        patch.setattr(shape, "megatron_args", lambda: args)
        layer = make_layer(config).eval()
        x = torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64)
        want, _ = layer(x)
        utils.set_decode_expert_padding(
            layer, True, capacity_factor=config.num_moe_experts / config.moe_router_topk
        )
        if place == "nowhere":
            return 0.0, refusal_of(layer, x)
        got, _ = layer(x)
    return float((got - want).abs().max()), "accepted"


def bounded_rows(group: dist.ProcessGroup) -> tuple[float, str]:
    """The error of a layer whose rank 0 gets all rows, twice the mean; and what a bound of 1 says.

    Buffers hold blocks of 128 rows, so that a bound shows only with many tokens.
    """
    prepare(Layout(expert=2), max_tokens=1024)
    x = torch.rand(512, 2, 64)
    outputs, said = {}, ""
    for dispatcher, bound in (("alltoall", None), ("flashmoe", 2.0), ("flashmoe", 1.0)):
        settings = {"moe_expert_rank_capacity_factor": bound} if bound else {}
        layer = make_layer(transformer_config(Layout(expert=2), dispatcher, **settings))
        with torch.no_grad():
            layer.router.weight.fill_(0.0)[:2] = 1.0
        try:
            outputs[dispatcher], _ = layer(x)
        except RowBoundError as error:
            said = str(error)
    return float((outputs["flashmoe"] - outputs["alltoall"]).detach().abs().max()), said


class Strange(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def strange_experts(group: dist.ProcessGroup) -> None:
    prepare(EP2_DP2)
    from megatron.core.transformer.spec_utils import ModuleSpec

    make_layer(transformer_config(EP2_DP2, "flashmoe"), ModuleSpec(module=Strange))


class Quantized:
    """A class that a conversion mixes into a linear layer's: weights stay, their use changes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("stands for another computation")


class Wrapper(torch.nn.Module):
    """What an adapter of low rank puts in the experts' place."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base


def quantize(linear: Any) -> None:
    linear.__class__ = type("Quantized", (Quantized, type(linear)), {"__module__": __name__})


def changed_experts(group: dist.ProcessGroup) -> list[str]:
    """The refusal of each change; before it the layer runs, with a pre-hook of Megatron's DDP."""
    prepare(EP2_DP2)
    x = torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64)
    said = []
    for change in (
        lambda experts: quantize(experts.local_experts[1].linear_fc1),
        lambda experts: experts.local_experts[0].linear_fc2.register_forward_hook(print),
        lambda experts: setattr(experts.local_experts[0], "forward", print),
        lambda experts: experts.register_forward_hook(print),
        lambda experts: experts.local_experts[1].linear_fc2.register_full_backward_hook(print),
        lambda experts: experts.local_experts[1].linear_fc2.register_full_backward_pre_hook(print),
        lambda experts: experts.local_experts[1].linear_fc2.register_forward_pre_hook(print),
    ):
        layer = make_layer(transformer_config(EP2_DP2, "flashmoe"))
        layer.experts.register_forward_pre_hook(waiting(lambda *_: None))
        layer(x)
        change(layer.experts)
        said.append(refusal_of(layer, x))
    layer = make_layer(transformer_config(EP2_DP2, "flashmoe"))
    layer.experts = Wrapper(layer.experts)
    said.append(refusal_of(layer, x))
    spec = grouped_experts("te_grouped")
    spec.submodules.linear_fc1 = type(
        "Quantized", (Quantized, TorchGroupedLinear), {"__module__": __name__}
    )
    said.append(refusal_of(make_layer, transformer_config(EP2_DP2, "flashmoe"), spec))
    return said


def changed_functions(group: dist.ProcessGroup, kind: str) -> list[str]:
    """What a layer says to each change of what its experts compute, after a call."""
    prepare(Layout(expert=2))
    x, said = torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64), []
    spec = None if kind == "sequential" else grouped_experts(kind)
    for change in (
        lambda layer: setattr(
            getattr(layer.experts, "local_experts", [layer.experts])[-1], "activation_func", F.relu
        ),
        lambda layer: setattr(layer.config, "activation_func_clamp_value", 0.25),
        lambda layer: setattr(layer.config, "activation_func", F.gelu),
        lambda layer: setattr(layer.config, "activation_func_clamp_value", False),
    ):
        layer = make_layer(transformer_config(Layout(expert=2), "flashmoe"), spec)
        layer(x)
        change(layer)
        said.append(refusal_of(layer, x))
    return said


def experts_changed_on_rank_1(group: dist.ProcessGroup, max_tokens: int | None) -> str:
    """What each rank says; without a bound of tokens, the ranks agree on one before."""
    prepare(Layout(expert=2), max_tokens=max_tokens)
    layer = make_layer(transformer_config(Layout(expert=2), "flashmoe"))
    if dist.get_rank(group) == 1:
        layer.experts.register_forward_hook(print)
    return refusal_of(layer, torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64))


def calibration_missing_on_rank_1(group: dist.ProcessGroup) -> str:
    prepare(Layout(expert=2), calibration="no_such_file.json")
    from flashmoe_megatron.adapters import experts

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 0:
            patch.setattr(experts, "_own_calibration", lambda *_: None)  # it is there
        return refusal_of(make_layer, transformer_config(Layout(expert=2), "flashmoe"))


def changed_configuration(group: dist.ProcessGroup) -> str:
    """What a layer says to a configuration that was accepted and changed afterwards."""
    prepare(Layout(expert=2))
    config = transformer_config(Layout(expert=2), "flashmoe")
    config.activation_func_clamp_value = 0.0
    return refusal_of(make_layer, config)


def some_biases(group: dist.ProcessGroup) -> list[str]:
    """What is said when one of a layer's experts loses the bias of its first projection."""
    prepare(Layout(expert=2))
    x = torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64)
    config = transformer_config(Layout(expert=2), "flashmoe", add_bias_linear=True)
    sequential = make_layer(config)
    sequential.experts.local_experts[1].linear_fc1.bias = None
    grouped = make_layer(config, grouped_experts("te_grouped"))
    grouped.experts.linear_fc1.bias1 = None
    return [refusal_of(sequential, x), refusal_of(grouped, x)]


def waiting(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pre-hook like those of Megatron's DDP."""
    setattr(hook, ddp_hooks._WAITS, True)
    return hook


def awaited(group: dist.ProcessGroup) -> list[str]:
    """The classes of the modules whose parameters are awaited in a forward."""
    prepare(Layout(expert=2))
    layer = make_layer(transformer_config(Layout(expert=2), "flashmoe"))
    called: list[str] = []
    for module in (layer.experts, layer.experts.local_experts[0].linear_fc1):
        module.register_forward_pre_hook(
            waiting(lambda module, *_: called.append(type(module).__name__))
        )
    layer(torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64))
    return called


def probability_dtypes(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """What a bfloat16 layer makes of the same probabilities in three dtypes."""
    prepare(Layout(expert=2))
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "moe_router_dtype": "fp64"}
    layer = make_layer(transformer_config(Layout(expert=2), "flashmoe", **settings))
    x = torch.randn(TOKENS_PER_SEQUENCE, SEQUENCES, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        probs, routing_map = layer.route(x)
        assert probs.dtype == torch.float64
        layer.token_dispatcher.routing_map = routing_map
        return [
            layer.routed_experts_compute(x.flatten(0, 1), probs.to(dtype))[0]
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
        ]


def refusal_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except ConfigError as error:
        return str(error)
    return "accepted"


def too_many_tokens(group: dist.ProcessGroup) -> None:
    prepare(EP2_DP2)
    make_layer(transformer_config(EP2_DP2, "flashmoe"))(torch.randn(24, 2, 64))


@pytest.mark.parametrize("backend", ["reference", "scheduled"])
def test_a_hook_of_capacity_is_megatrons_factor(backend: str, four_ranks: RankPool) -> None:
    """It drops the same tokens, and experts, tokens and router have the same gradients.

    By "position" Megatron leaves it to ``torch.topk`` which of the equal ones these are.
    """
    for stock, hooked, dropless in four_ranks.run(capped_layers, backend):
        assert hooked.keys() == stock.keys()
        for tensor in hooked:
            assert_close(tensor, hooked[tensor], stock[tensor], rel_l2=1e-5)
        assert not torch.allclose(dropless["output"], stock["output"], rtol=1e-2)


def capped_layers(group: dist.ProcessGroup, backend: str) -> list[dict[str, torch.Tensor]]:
    """Alltoall with a factor, and flashmoe without one, with a hook and without."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    prepare(EP4, backend=backend)
    factor = {"moe_expert_capacity_factor": 0.5}
    results = [run_layer(make_layer(transformer_config(EP4, "alltoall", **factor)))]
    config = transformer_config(EP4, "flashmoe")
    layer = make_layer(config)
    hooks = layer.flashmoe_routed_experts.backend.hooks

    def cap(capacity: torch.Tensor, call: Any) -> torch.Tensor:
        routes = TOKENS_PER_SEQUENCE * SEQUENCES * config.moe_router_topk
        return torch.full_like(capacity, get_capacity(routes, config.num_moe_experts, 0.5))

    handle = hooks.add("after", "capacity", cap)
    results.append(run_layer(layer))
    handle.remove()
    return [*results, run_layer(make_layer(config))]
