"""Settings that flashmoe cannot honour are refused when the configuration is made."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend

from flashmoe_megatron.adapters import megatron as adapter
from flashmoe_megatron.adapters.megatron import settings as current
from flashmoe_megatron.adapters.megatron import shape
from flashmoe_megatron.adapters.megatron.config.computation import (
    activation_of,
    activation_of_experts,
)
from flashmoe_megatron.adapters.megatron.config.refusals import (
    CONFIG_REFUSALS,
    SCRIPT_REFUSALS,
    refuse,
)
from flashmoe_megatron.adapters.megatron.settings import Settings
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError
from tests.megatron.harness import Layout, transformer_config

ENGINE, SCOPE = "transformer_engine", "cuda_graph_scope"
"""Megatron's graphs of parts of a layer, and the field that names the parts in every release."""

# Fields of TransformerConfig in every supported version, and a word of the way out.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"fp4": "e2m1"}, "--fp4-format", "bf16 .* or with --fp8-format"),
    ({"use_kitchen": True}, "--use-kitchen", "leave it out"),
    ({"enable_autocast": True}, "enable_autocast", "dtype"),
    (
        {"expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 2},
        "expert tensor parallelism",
        "--expert-tensor-parallel-size 1",
    ),
    (
        {"expert_tensor_parallel_size": None, "tensor_model_parallel_size": 2},
        "expert tensor parallelism",
        "--expert-tensor-parallel-size 1",
    ),
    (
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1},
        "--moe-apply-probs-on-input",
        "leave it out, probabilities .* or use the alltoall dispatcher",
    ),
    (
        {"fine_grained_activation_offloading": True, "offload_modules": ["fused_group_mlp"]},
        "--offload-modules fused_group_mlp",
        "use expert_fc1 and moe_act",
    ),
    ({"cpu_offloading": True}, "--cpu-offloading", "recompute"),
    (
        {"batch_invariant_mode": True, "moe_expert_capacity_factor": 1.0},
        "--batch-invariant-mode",
        "leave out spare slots, capacity factors .* alltoall",
    ),
    (
        {"cuda_graph_impl": "local"},
        "CUDA graph",
        "impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess .* row bound",
    ),
    ({"cuda_graph_impl": "transformer_engine"}, "CUDA graph", "attn"),
    ({"enable_cuda_graph": True}, "CUDA graph", "attn"),
    ({"activation_func": torch.tanh}, "activation", "--swiglu.* or use the alltoall dispatcher"),
    *(
        (
            {"activation_func_clamp_value": value, **others},
            "--activation-func-clamp-value",
            "a positive number beside --swiglu or --quick-geglu, or leave it out",
        )
        for value, others in (
            (0.0, {}),  # a clamp at 0 is a clamp
            (-7.0, {}),
            (math.inf, {}),
            (7.0, {"activation_func": F.gelu}),
            (7.0, {"gated_linear_unit": False}),
        )
    ),
    ({"activation_func_fp8_input_store": True}, "fp8-input-store", "leave it out"),
    *(
        (
            {"glu_linear_offset": 1.0, **others},
            "--glu-linear-offset",
            "leave it at 0, pass --swiglu",
        )
        for others in ({"activation_func": F.gelu}, {"gated_linear_unit": False})
    ),
    *(
        ({"use_te_activation_func": True, **terms}, "--use-te-activation-func", "leave it out")
        for terms in ({"activation_func_clamp_value": 7.0}, {"glu_linear_offset": 1.0})
    ),
    ({"transformer_impl": "inference_optimized"}, "inference_optimized", "local"),
    (
        {"hybrid_context_parallel": True, "expert_model_parallel_size": 2},
        "--expert-model-parallel-size beside --hybrid-context-parallel",
        "1 or a divisor of --tensor-model-parallel-size",
    ),
    ({"expert_model_parallel_size": 512, "num_moe_experts": 512}, "--expert-model-parallel", "256"),
    ({"moe_router_topk": 17, "num_moe_experts": 32}, "--moe-router-topk", "16"),
    ({"hidden_size": 80}, "--hidden-size", "64"),
    ({"moe_latent_size": 32}, "--moe-latent-size", "multiple of 64"),
    ({"moe_ffn_hidden_size": 96}, "FFN width", "--moe-ffn-hidden-size"),
    ({"moe_ffn_hidden_size": None, "ffn_hidden_size": 96}, "FFN width", "64"),
]

# Fields that only newer versions have.
REFUSED_IF_KNOWN: list[tuple[dict[str, Any], str]] = [
    ({"overlap_dispatch_backward_with_experts_wgrad": True}, "experts-wgrad"),
    ({"expert_tensor_parallel_num_weight_shards": 2}, "num-weight-shards"),
    ({"moe_paged_stash": True}, "--moe-paged-stash"),
    ({"moe_expert_rank_capacity_factor": 0.9}, "rank-capacity-factor .*pass at least 1"),
    ({"moe_expert_rank_capacity_factor": 2e6}, "rank-capacity-factor .*at most"),
    *(
        ({"moe_mlp_glu_interleave_size": size, **others}, "--moe-mlp-glu-interleave-size .*pass 1")
        for size, others in (
            (128, {}),  # there are 64 rows
            (4, {}),
            (48, {"moe_ffn_hidden_size": 192}),
            (-32, {}),
            (32, {"gated_linear_unit": False}),
        )
    ),
    ({"moe_dispatch_fwd_dtype": "mxfp8"}, "bf16"),
    ({"moe_combine_bwd_dtype": "mxfp8"}, "bf16"),
    ({"quant_recipe": object()}, "--te-precision-config-file"),
    *(
        ({"cuda_graph_impl": kind, "is_hybrid_model": is_hybrid, **modules}, "CUDA graph")
        for kind in ("local", "transformer_engine")
        for is_hybrid in (False, True)
        for modules in (
            {"cuda_graph_modules": ["attn", "moe"]},
            {"cuda_graph_modules": "full"},
        )
    ),
    # Megatron captures the whole layer where no part is named.
    *(
        ({"cuda_graph_impl": kind, "is_hybrid_model": is_hybrid, **modules}, "CUDA graph")
        for kind, is_hybrid in (("transformer_engine", False), ("local", True))
        for modules in (
            {"cuda_graph_modules": None, "cuda_graph_scope": None},
            {"cuda_graph_modules": None, "cuda_graph_scope": []},
            {"cuda_graph_modules": [], "cuda_graph_scope": ""},
        )
    ),
    # A graph of a GPT model's layer captures the whole of it.
    *(
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"], **more}, "CUDA graph")
        for more in (
            {},
            {"cuda_graph_modules": ["moe_router", "moe_preprocess"]},
            {"cuda_graph_modules": ["attn", "moe_router"], "is_hybrid_model": True},
            {"cuda_graph_modules": "full_iteration_inference"},
        )
    ),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": "attn"}, "CUDA graph"),
    (
        {
            "cuda_graph_impl": "local",
            "is_hybrid_model": True,
            "cuda_graph_modules": ["attn"],
            "inference_cuda_graph_scope": "block",
        },
        "CUDA graph",
    ),
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"activation_func": F.gelu, "gated_linear_unit": False},
    {"activation_func": F.relu, "gated_linear_unit": False},
    {"moe_permute_fusion": False, "moe_shared_expert_intermediate_size": 64},
    {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"num_moe_experts": 64, "expert_model_parallel_size": 8},
    {"hybrid_context_parallel": True},
    {
        "hybrid_context_parallel": True,
        "expert_model_parallel_size": 2,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
    },
    {"add_bias_linear": True},
    {"fp16": True},
    {"moe_expert_rank_capacity_factor": 1.5},
    {"moe_latent_size": 64, "hidden_size": 80},  # the kernel sees the latent width alone
    {"activation_func_clamp_value": 7.0, "glu_linear_offset": -0.5},
    {"moe_mlp_glu_interleave_size": 1},
    {"moe_mlp_glu_interleave_size": 32},
    {"use_te_activation_func": True, "activation_func": F.gelu},
    {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash},
    {"deterministic_mode": True},
]


@pytest.fixture(autouse=True)
def _installed() -> None:
    adapter.install()


def _short(value: object) -> str:
    """The same in every process: without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))[:60]


@pytest.mark.parametrize(("setting", "flag", "way_out"), REFUSED, ids=_short)
def test_configuration_is_refused(setting: dict[str, Any], flag: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        transformer_config(Layout(), "flashmoe", **setting)
    message = str(refusal.value)
    assert flag in message
    assert re.search(way_out, message)
    assert "\n" not in message


@pytest.mark.parametrize(("setting", "words"), REFUSED_IF_KNOWN, ids=_short)
def test_newer_settings_are_refused(setting: dict[str, Any], words: str) -> None:
    config = transformer_config(Layout(), "flashmoe")
    for name, value in setting.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=words):
        refuse(config, CONFIG_REFUSALS)


@pytest.mark.parametrize("setting", ACCEPTED, ids=_short)
def test_configuration_is_accepted(setting: dict[str, Any]) -> None:
    config = transformer_config(Layout(), "flashmoe", **setting)
    assert config.moe_token_dispatcher_type == "flashmoe"


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({"spare_slots": 1}, True),
        ({"spare_slots": 1, "placement": "off"}, False),
        ({"spare_slots": 1, "combine": "routes"}, False),
        ({"backend": "scheduled"}, True),
        ({"backend": "reference"}, False),
    ],
    ids=str,
)
def test_batch_invariance_beside_options(
    options: dict[str, Any], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "_chosen", Settings(**options))
    setting = {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash}
    if not is_refused:
        transformer_config(Layout(), "flashmoe", **setting)
        return
    with pytest.raises(ConfigError, match=r"--batch-invariant-mode .*: leave out spare slots"):
        transformer_config(Layout(), "flashmoe", **setting)


@pytest.mark.parametrize(
    "setting",
    [
        {"cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_impl": "none", "external_cuda_graph": True},
        {"cuda_graph_impl": "local", "is_hybrid_model": True},
        {"cuda_graph_impl": "none", "enable_cuda_graph": True, "is_hybrid_model": True},
    ],
    ids=str,
)
def test_graphs_without_moe_layers_are_accepted(setting: dict[str, Any]) -> None:
    from megatron.core.transformer.enums import CudaGraphScope

    config = transformer_config(Layout(), "flashmoe")
    for scope in (["attn"], "attn,mamba", [CudaGraphScope.attn]):
        modules = {"cuda_graph_scope": scope, "cuda_graph_modules": scope}
        for name, value in {**setting, **modules}.items():
            setattr(config, name, value)
        refuse(config, CONFIG_REFUSALS)


@pytest.mark.parametrize(
    "kind", [{"cuda_graph_impl": ENGINE}, {"external_cuda_graph": True}], ids=str
)
@pytest.mark.parametrize("name", ["cuda_graph_scope", "cuda_graph_modules"])
def test_graphs_beside_the_experts_are_accepted(name: str, kind: dict[str, Any]) -> None:
    from megatron.core.transformer.enums import CudaGraphScope

    parts = ["attn", "moe_router", "moe_preprocess"]
    config = transformer_config(Layout(), "flashmoe", **{SCOPE: parts}, cuda_graph_impl=ENGINE)
    assert config.cuda_graph_impl == ENGINE
    bare = transformer_config(Layout(), "flashmoe")
    for spelled in (parts, parts[:2], ",".join(parts), [CudaGraphScope[part] for part in parts]):
        settings = {"cuda_graph_scope": None, **kind, name: spelled}
        refuse(SimpleNamespace(**{**vars(bare), **settings}), CONFIG_REFUSALS)


@pytest.mark.parametrize(
    "setting",
    [
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_modules": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [SimpleNamespace(name="full_iteration")]},
        {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"},
    ],
    ids=str,
)
def test_a_graph_of_the_iteration_needs_a_bound_of_tokens(setting: dict[str, Any]) -> None:
    """Whatever the release calls it; nothing that the host waits for can be captured."""
    bare = transformer_config(Layout(), "flashmoe")
    config = SimpleNamespace(**{**vars(bare), "cuda_graph_scope": None, **setting})
    refuse(config, CONFIG_REFUSALS)
    shape.check_graph(config, 64)
    shape.check_graph(bare, None)  # without a graph there is nothing to bound
    words = "pass --flashmoe-max-tokens .max_tokens of configure., or leave --cuda-graph-impl out"
    with pytest.raises(ConfigError, match=words):
        shape.check_graph(config, None)
    config.expert_model_parallel_size = 2
    assert shape.with_config(config, Settings()).row_bound == "auto"


def test_a_graph_of_the_iteration_has_a_bound_of_rows() -> None:
    """It is measured, but where a rank with all experts leaves nothing to measure."""
    bare = transformer_config(Layout(), "flashmoe")
    for size, bound in ((1, 1.0), (2, "auto")):
        graphed = SimpleNamespace(**{**vars(bare), "cuda_graph_impl": "full_iteration"})
        bare.expert_model_parallel_size = graphed.expert_model_parallel_size = size
        assert shape.with_config(graphed, Settings()).row_bound == bound
        assert shape.with_config(graphed, Settings(row_bound="auto")).row_bound == bound
        assert shape.with_config(graphed, Settings(row_bound=2.0)).row_bound == 2.0
        assert shape.with_config(bare, Settings()).row_bound is None


def test_other_dispatchers_and_dense_models_keep_what_is_refused() -> None:
    offset = {"glu_linear_offset": 0.5}
    assert transformer_config(Layout(), "alltoall", **offset).glu_linear_offset == 0.5
    dense = transformer_config(
        Layout(), "flashmoe", num_moe_experts=None, moe_ffn_hidden_size=None, hidden_size=80
    )
    assert dense.hidden_size == 80


@pytest.mark.parametrize("refusal", CONFIG_REFUSALS, ids=lambda refusal: refusal.name)
def test_every_row_of_the_table_is_tested(refusal: Any) -> None:
    tested = {name for setting, *_ in REFUSED for name in setting}
    tested |= {name for setting, _ in REFUSED_IF_KNOWN for name in setting}
    assert refusal.name in tested


REFUSED_IN_SCRIPTS = {
    "use_megatron_fsdp": r"--use-megatron-fsdp.*--use-distributed-optimizer",
    "use_custom_fsdp": r"--use-custom-fsdp.*--use-distributed-optimizer",
    "use_torch_fsdp2": r"--use-torch-fsdp2.*--use-distributed-optimizer",
    "save_dgrads_interval": r"--save-dgrads-interval \(.*=5\).* or use the alltoall dispatcher",
    "save_activations_interval": r"--save-activations-interval .* or use the alltoall dispatcher",
    "save_tokens_per_expert_interval": (
        r"--save-tokens-per-expert-interval .*: use --flashmoe-metrics all .*expert_rows"
    ),
    "modelopt_enabled": r"ModelOpt.*alltoall dispatcher.*--load .* without a modelopt_state",
}


@pytest.mark.parametrize("name", [refusal.name for refusal in SCRIPT_REFUSALS])
def test_arguments_of_the_script_are_refused(name: str) -> None:
    unset, given = (None, 5) if name.endswith("_interval") else (False, True)
    refuse(SimpleNamespace(**{name: unset}), SCRIPT_REFUSALS)
    with pytest.raises(ConfigError, match=REFUSED_IN_SCRIPTS[name]):
        refuse(SimpleNamespace(**{name: given}), SCRIPT_REFUSALS)


@pytest.mark.parametrize("off", [None, False], ids=str)
@pytest.mark.parametrize("name", [refusal.name for refusal in CONFIG_REFUSALS + SCRIPT_REFUSALS])
def test_what_is_given_as_off_is_not_refused(name: str, off: object) -> None:
    if name == "activation_func":
        pytest.skip("there is no FFN without an activation")
    config = transformer_config(Layout(), "flashmoe")
    setattr(config, name, off)
    refuse(config, CONFIG_REFUSALS + SCRIPT_REFUSALS)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("fp4", ""),
        ("moe_latent_size", 0),
        ("moe_expert_rank_capacity_factor", 0.0),
        ("moe_mlp_glu_interleave_size", 0),
        ("glu_linear_offset", 0.0),
        ("cpu_offloading", 0),
        ("moe_dispatch_fwd_dtype", "bf16"),
        ("moe_combine_bwd_dtype", ""),
        ("cuda_graph_impl", "none"),
        ("save_dgrads_interval", 0),
    ],
)
def test_zeros_and_empty_words_are_off(name: str, off: object) -> None:
    config = transformer_config(Layout(), "flashmoe")
    setattr(config, name, off)
    refuse(config, CONFIG_REFUSALS + SCRIPT_REFUSALS)


def test_quick_geglu_is_ours() -> None:
    """Megatron-Core has the function twice, and its own checks know one of them."""
    from megatron.core import activations
    from megatron.core.fusions import fused_bias_geglu

    terms = {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
    for function in (activations.quick_gelu, fused_bias_geglu.quick_gelu):
        config = transformer_config(Layout(), "flashmoe", activation_func=function, **terms)
        found = shape.moe_config(config, torch.nn.Module(), num_ranks=1, max_tokens=64)
        assert found.activation is Activation.QUICK_GELU
        assert (found.clamp_value, found.linear_offset) == (7.0, 1.0)


def test_grouped_experts_alone_have_rows_in_blocks() -> None:
    config = transformer_config(Layout(), "flashmoe", moe_mlp_glu_interleave_size=32)
    sequential = torch.nn.Module()
    sequential.local_experts = torch.nn.ModuleList()
    for experts, block in ((torch.nn.Module(), 32), (sequential, 0)):
        found = shape.moe_config(config, experts, num_ranks=1, max_tokens=64)
        assert found.glu_interleave == block


class HeldActivation(torch.nn.Module):
    """Experts of which each holds an activation: Transformer Engine's, another, or a function."""

    def __init__(self, *activations: Any) -> None:
        super().__init__()
        self.local_experts = torch.nn.ModuleList()
        for activation in activations:
            expert = torch.nn.Module()
            expert.activation_func = activation
            self.local_experts.append(expert)


def operation(name: str, module: str = "transformer_engine.pytorch.ops.basic.activation") -> Any:
    return type(name, (torch.nn.Module,), {"__module__": module})()


@pytest.mark.parametrize(
    ("function", "held", "computed"),
    [
        (F.gelu, operation("GELU"), Activation.GELU_TANH),
        (F.gelu, operation("GEGLU"), Activation.GELU_TANH),
        (F.gelu, F.gelu, Activation.GELU),
        (F.silu, operation("SwiGLU"), Activation.SILU),
        # Megatron's TEActivationOp makes ReLU of SiLU without a gate.
        (F.silu, operation("ReLU"), Activation.RELU),
    ],
)
def test_the_activation_is_the_one_that_experts_hold(
    function: Any, held: Any, computed: Activation
) -> None:
    config = SimpleNamespace(activation_func=function, use_te_activation_func=True)
    assert activation_of_experts(config, HeldActivation(held, held)) is computed
    config.use_te_activation_func = False
    assert activation_of_experts(config, HeldActivation(held, held)) is activation_of(function)


@pytest.mark.parametrize(
    "held",
    [
        [operation("QGELU")],
        [operation("GELU", module="strange")],
        [operation("GELU"), operation("ReLU")],
    ],
)
def test_unknown_te_activations_are_refused(held: list[Any]) -> None:
    config = SimpleNamespace(activation_func=F.gelu, use_te_activation_func=True)
    with pytest.raises(ConfigError, match=r"--use-te-activation-func: .*GELU.*; leave the flag"):
        activation_of_experts(config, HeldActivation(*held))


def test_the_row_bound_is_given_once() -> None:
    config = transformer_config(Layout(), "flashmoe", moe_expert_rank_capacity_factor=1.5)
    assert config.moe_expert_rank_capacity_factor == 1.5
    for given in (None, 1.5):
        assert shape.with_config(config, Settings(row_bound=given)).row_bound == 1.5
    with pytest.raises(ConfigError, match=r"factor 1.5 and --flashmoe-row-bound 2.0 .*one of them"):
        shape.with_config(config, Settings(row_bound=2.0))
    config.moe_expert_rank_capacity_factor = None
    assert shape.with_config(config, Settings(row_bound=2.0)).row_bound == 2.0


def test_a_layer_that_is_recomputed_keeps_all_unless_something_else_is_asked_for() -> None:
    config = transformer_config(Layout(), "flashmoe")
    assert shape.with_config(config, Settings()).keep == "auto"
    config.recompute_granularity, config.recompute_modules = "selective", ["moe"]
    assert shape.with_config(config, Settings()).keep == "all"
    assert shape.with_config(config, Settings(keep="inputs")).keep == "inputs"


def test_the_longer_sequence_bounds_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformer_config(Layout(), "flashmoe")
    args = SimpleNamespace(seq_length=16, micro_batch_size=2)
    monkeypatch.setattr(shape, "megatron_args", lambda: args)
    bounds = []
    for args.decoder_seq_length in (None, 8, 40):
        bounds.append(shape.resolve_max_tokens(config, Settings()))
    assert bounds == [32, 32, 80]


@pytest.mark.parametrize(
    ("seq_length", "context", "tensor", "tokens"),
    [(32, 2, 1, 3 * 16), (33, 2, 1, 3 * 17), (33, 2, 4, 3 * 5), (1, 8, 1, 3)],
)
def test_the_longest_share_of_a_sequence_bounds_the_tokens(
    seq_length: int, context: int, tensor: int, tokens: int
) -> None:
    """Where a sequence does not divide evenly, some rank has more tokens than the quotient."""
    config = SimpleNamespace(sequence_parallel=tensor > 1, tensor_model_parallel_size=tensor)
    bound = shape.tokens_per_rank(
        config, seq_length=seq_length, micro_batch_size=3, context_parallel_size=context
    )
    assert bound == tokens


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        # Every script has these arguments, be there an engine or none.
        (
            {
                "perform_rl_step": False,
                "inference_dynamic_batching": False,
                "inference_dynamic_batching_max_tokens": None,
                "use_legacy_static_engine": False,
                "inference_max_requests": 8,
                "inference_max_seq_length": 2560,
            },
            32,
        ),
        ({"perform_rl_step": True}, 16384),
        ({"inference_dynamic_batching": True}, 16384),
        ({"perform_rl_step": True, "inference_dynamic_batching_max_tokens": 1000}, 1024),
        ({"inference_dynamic_batching_max_tokens": 1024}, 1024),
        ({"perform_rl_step": True, "inference_dynamic_batching_max_tokens": 20}, 64),
        ({"use_legacy_static_engine": True, "inference_max_requests": 3}, 300),
        ({"use_legacy_static_engine": True, "inference_max_batch_size": 4}, 400),
        ({"perform_rl_step": True, "seq_length": 65536, "micro_batch_size": 1}, 65536),
    ],
    ids=str,
)
def test_engines_of_inference_bound_the_tokens(
    given: dict[str, Any], bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"seq_length": 16, "micro_batch_size": 2, "inference_max_seq_length": 100, **given}
    monkeypatch.setattr(shape, "megatron_args", lambda: SimpleNamespace(**args))
    config = transformer_config(Layout(), "flashmoe")
    assert shape.resolve_max_tokens(config, Settings()) == bound
    assert shape.resolve_max_tokens(config, Settings(max_tokens=7)) == 7


def test_an_engine_shares_its_tokens_between_tensor_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(seq_length=96, micro_batch_size=1, perform_rl_step=True)
    monkeypatch.setattr(shape, "megatron_args", lambda: args)
    config = SimpleNamespace(
        context_parallel_size=2, tensor_model_parallel_size=6, sequence_parallel=True
    )
    # 16,384 rounded up to 66, from 64 the next that six ranks can share.
    assert shape.resolve_max_tokens(config, Settings()) == 16434 // 6
    config.sequence_parallel = False
    assert shape.resolve_max_tokens(config, Settings()) == 16434


def test_a_batch_that_is_shared_out_by_length_bounds_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence may be for fewer ranks than share a context at most."""
    args = SimpleNamespace(seq_length=4096, micro_batch_size=1)
    monkeypatch.setattr(shape, "megatron_args", lambda: args)
    config = SimpleNamespace(
        context_parallel_size=2,
        tensor_model_parallel_size=2,
        sequence_parallel=False,
        hybrid_context_parallel=True,
        max_seqlen_per_dp_cp_rank=8192,
    )
    assert shape.resolve_max_tokens(config, Settings()) == 8192
    config.sequence_parallel = True
    assert shape.resolve_max_tokens(config, Settings()) == 4096
    config.hybrid_context_parallel = False
    assert shape.resolve_max_tokens(config, Settings()) == 1024


def test_the_engine_is_that_of_megatron() -> None:
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    assert DynamicInferenceContext.DEFAULT_MAX_TOKENS == shape.DYNAMIC_TOKENS
    assert DynamicInferenceContext.TOKEN_ROUNDER == shape.TOKEN_ROUNDER
