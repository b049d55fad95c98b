"""What a TransformerConfig may not ask for with the flashmoe dispatcher, and the way out.

One table for Megatron-Core 0.16.1 up to main. A setting that a version does not know counts as not
set, and so does one that is given as off. Settings that only choose another implementation of what
flashmoe replaces (fusions of the permutation or of the activation, the flex dispatcher's options)
are harmless and not listed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flashmoe_megatron.adapters.megatron.activations import activation_of
from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE
from flashmoe_megatron.config import DIM_GRANULE, MAX_RANKS, MAX_TOPK
from flashmoe_megatron.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """One setting that cannot be honoured.

    Attributes:
        name: Field of TransformerConfig, or argument of the training script.
        flag: The flag as the user writes it.
        is_asked: Whether a configuration asks for it.
        way_out: An imperative that says what to do instead.
    """

    name: str
    flag: str
    is_asked: Callable[[Any], bool]
    way_out: str

    def message(self, config: Any) -> str:
        """The sentence that the user reads."""
        value = getattr(config, self.name, None)
        shown = "" if value is True or callable(value) else f" ({self.name}={value!r})"
        return (
            f"{self.flag}{shown} cannot be honoured by --moe-token-dispatcher-type "
            f"{DISPATCHER_TYPE}: {self.way_out}"
        )


def refusals_of(config: Any, refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    """The refusals that a configuration meets, in the order of the table.

    Args:
        config: A TransformerConfig, also before its ``__post_init__``, or parsed arguments.
        refusals: The table.
    """
    return (refusal for refusal in refusals if refusal.is_asked(config))


def refuse(config: Any, refusals: Iterable[Refusal]) -> None:
    """Raises for the first refusal that a configuration meets; see :func:`refusals_of`.

    Raises:
        ConfigError: Names the flag and the way out.
    """
    for refusal in refusals_of(config, refusals):
        raise ConfigError(refusal.message(config))


def _is_set(name: str) -> Callable[[Any], bool]:
    """Whether a setting is on: ``None``, ``False``, 0 and an empty string are ways to say off."""
    return lambda config: bool(getattr(config, name, None))


def _is_number(name: str) -> Callable[[Any], bool]:
    """Whether a setting is a number, of which 0 is as good as any; ``False`` says off."""

    def is_number(config: Any) -> bool:
        value = getattr(config, name, None)
        return value is not None and value is not False

    return is_number


def _is_other_than(name: str, wanted: str) -> Callable[[Any], bool]:
    return lambda config: (getattr(config, name, None) or wanted) != wanted


def _number(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return default if value is None else int(value)


def expert_ffn_size(config: Any) -> int:
    """FFN width of one expert; Megatron fills it in from others in the same way."""
    default = _number(config, "ffn_hidden_size", 4 * _number(config, "hidden_size", 0))
    return _number(config, "moe_ffn_hidden_size", default)


def _expert_tensor_size(config: Any) -> int:
    tensor_size = _number(config, "tensor_model_parallel_size", 1)
    return _number(config, "expert_tensor_parallel_size", tensor_size)


def _recomputes(module: str) -> Callable[[Any], bool]:
    def is_asked(config: Any) -> bool:
        selective = getattr(config, "recompute_granularity", None) == "selective"
        return selective and module in (getattr(config, "recompute_modules", None) or ())

    return is_asked


_GRAPHS_WITHOUT_MOE = {"attn", "mamba", "mlp"}


def _graph_kind(config: Any) -> str:
    for name, kind in (
        ("enable_cuda_graph", "local"),
        ("external_cuda_graph", "transformer_engine"),
    ):
        if getattr(config, name, False):
            return kind
    return getattr(config, "cuda_graph_impl", None) or "none"


def _graphs_moe(config: Any) -> bool:
    """Whether CUDA graphs would capture a MoE layer or part of one."""
    kind = _graph_kind(config)
    if kind == "none":
        return False
    # "local" captures a Transformer layer as a whole, whichever part is named; in hybrid models
    # attention and experts are layers of their own. In inference it may capture the whole model.
    if kind != "transformer_engine":
        of_inference = getattr(config, "inference_cuda_graph_scope", None)
        if not getattr(config, "is_hybrid_model", False) or _name_of(of_inference) == "block":
            return True
    modules = getattr(config, "cuda_graph_modules", None) or getattr(
        config, "cuda_graph_scope", None
    )
    if modules is None:
        modules = []
    elif not isinstance(modules, list | tuple | set):
        modules = [modules]
    names = {part for module in modules for part in _name_of(module).replace(",", " ").split()}
    return not names or not names <= _GRAPHS_WITHOUT_MOE


def _name_of(choice: Any) -> str:
    """A choice is a string or, once Megatron has read it, a member of an enumeration."""
    return str(getattr(choice, "name", choice))


_OFFLOADED_IN_EXPERTS = ("expert_fc1", "moe_act", "fused_group_mlp")


def _offloads_experts(config: Any) -> bool:
    modules = set(getattr(config, "offload_modules", None) or ())
    return bool(
        getattr(config, "fine_grained_activation_offloading", False)
        and modules.intersection(_OFFLOADED_IN_EXPERTS)
    )


CONFIG_REFUSALS: tuple[Refusal, ...] = (
    Refusal("fp8", "--fp8-format", _is_set("fp8"), "train the model in bf16 without it"),
    Refusal("fp4", "--fp4-format", _is_set("fp4"), "train the model in bf16 without it"),
    Refusal(
        "quant_recipe",
        "--te-precision-config-file",
        _is_set("quant_recipe"),
        "train the model in bf16 without it",
    ),
    Refusal("use_kitchen", "--use-kitchen", _is_set("use_kitchen"), "leave it out"),
    Refusal(
        "enable_autocast",
        "enable_autocast",
        _is_set("enable_autocast"),
        "hold the parameters in the dtype of the computation instead",
    ),
    Refusal(
        "expert_tensor_parallel_size",
        "expert tensor parallelism",
        lambda config: _expert_tensor_size(config) > 1,
        "pass --expert-tensor-parallel-size 1, attention may keep its tensor parallelism",
    ),
    Refusal(
        "expert_tensor_parallel_num_weight_shards",
        "--expert-tensor-parallel-num-weight-shards",
        lambda config: _number(config, "expert_tensor_parallel_num_weight_shards", 1) > 1,
        "pass 1 or leave it out",
    ),
    Refusal(
        "moe_shared_expert_overlap",
        "--moe-shared-expert-overlap",
        _is_set("moe_shared_expert_overlap"),
        "leave it out, the shared expert then runs before the routed ones",
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm",
        _is_set("overlap_moe_expert_parallel_comm"),
        "leave it out, the kernel overlaps communication with computation itself",
    ),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad",
        _is_set("overlap_dispatch_backward_with_experts_wgrad"),
        "leave it out, the kernel overlaps communication with computation itself",
    ),
    Refusal(
        "delay_wgrad_compute",
        "--delay-wgrad-compute",
        _is_set("delay_wgrad_compute"),
        "leave it out, weight gradients are computed with the others",
    ),
    Refusal(
        "moe_apply_probs_on_input",
        "--moe-apply-probs-on-input",
        _is_set("moe_apply_probs_on_input"),
        "leave it out, probabilities scale the activation before the second projection, or use the "
        "alltoall dispatcher",
    ),
    Refusal(
        "recompute_modules",
        "--recompute-modules moe_act",
        _recomputes("moe_act"),
        "use --recompute-modules moe to recompute the whole MoE layer instead",
    ),
    Refusal(
        "offload_modules",
        "--offload-modules with " + " or ".join(_OFFLOADED_IN_EXPERTS),
        _offloads_experts,
        "leave these modules out",
    ),
    Refusal(
        "cpu_offloading",
        "--cpu-offloading-num-layers",
        _is_set("cpu_offloading"),
        "leave it out, or recompute with --recompute-modules moe",
    ),
    Refusal(
        "moe_latent_size",
        "--moe-latent-size",
        _is_set("moe_latent_size"),
        "leave it out or use the alltoall dispatcher",
    ),
    Refusal(
        "moe_paged_stash",
        "--moe-paged-stash",
        _is_set("moe_paged_stash"),
        "leave it out, it belongs to the flex dispatcher",
    ),
    Refusal(
        "moe_expert_rank_capacity_factor",
        "--moe-expert-rank-capacity-factor",
        _is_set("moe_expert_rank_capacity_factor"),
        "leave it out for no dropping, or pass --moe-expert-capacity-factor",
    ),
    Refusal(
        "batch_invariant_mode",
        "--batch-invariant-mode",
        _is_set("batch_invariant_mode"),
        "leave it out or use the alltoall dispatcher",
    ),
    Refusal(
        "cuda_graph_impl",
        "a CUDA graph over MoE layers",
        _graphs_moe,
        "capture attention only, with --cuda-graph-impl transformer_engine --cuda-graph-scope attn "
        "(--cuda-graph-modules attn from Megatron-Core 0.18), or leave --cuda-graph-impl out",
    ),
    Refusal(
        "activation_func",
        "the activation function",
        lambda config: activation_of(getattr(config, "activation_func", None)) is None,
        "use SwiGLU (--swiglu), GELU, --squared-relu, ReLU or SiLU, or use the alltoall dispatcher",
    ),
    Refusal(
        "activation_func_clamp_value",
        "--activation-func-clamp-value",
        _is_number("activation_func_clamp_value"),
        "leave it out, activations are not clamped here, or use the alltoall dispatcher",
    ),
    Refusal(
        "activation_func_fp8_input_store",
        "--activation-func-fp8-input-store",
        _is_set("activation_func_fp8_input_store"),
        "leave it out",
    ),
    Refusal(
        "glu_linear_offset",
        "--glu-linear-offset",
        _is_set("glu_linear_offset"),
        "leave it at 0 or use the alltoall dispatcher",
    ),
    Refusal(
        "moe_mlp_glu_interleave_size",
        "--moe-mlp-glu-interleave-size",
        _is_set("moe_mlp_glu_interleave_size"),
        "leave it out, fc1 holds all gate rows before all others",
    ),
    Refusal(
        "moe_single_grouped_weight",
        "--moe-single-grouped-weight",
        _is_set("moe_single_grouped_weight"),
        "leave it out, each expert has its own weight parameter",
    ),
    Refusal(
        "moe_single_grouped_bias",
        "--moe-single-grouped-bias",
        _is_set("moe_single_grouped_bias"),
        "leave it out, each expert has its own bias parameter",
    ),
    Refusal(
        "moe_use_grouped_tensor",
        "--moe-use-grouped-tensor",
        _is_set("moe_use_grouped_tensor"),
        "leave it out, each expert has its own weight parameter",
    ),
    *(
        Refusal(
            name,
            "--" + name.replace("_", "-"),
            _is_other_than(name, "bf16"),
            "pass bf16, tokens travel as they are",
        )
        for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
    ),
    *(
        Refusal(
            name,
            "--" + name.replace("_", "-"),
            _is_set(name),
            "leave it out, rows are aligned in the receiver's buffer",
        )
        for name in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    ),
    Refusal(
        "transformer_impl",
        "--transformer-impl inference_optimized",
        lambda config: getattr(config, "transformer_impl", None) == "inference_optimized",
        "pass local or transformer_engine, this is for training",
    ),
    Refusal(
        "expert_model_parallel_size",
        "--expert-model-parallel-size",
        lambda config: _number(config, "expert_model_parallel_size", 1) > MAX_RANKS,
        f"pass at most {MAX_RANKS}, the GPUs of one NVLink domain",
    ),
    Refusal(
        "moe_router_topk",
        "--moe-router-topk",
        lambda config: _number(config, "moe_router_topk", 1) > MAX_TOPK,
        f"pass at most {MAX_TOPK}",
    ),
    Refusal(
        "hidden_size",
        "--hidden-size",
        lambda config: _number(config, "hidden_size", 0) % DIM_GRANULE != 0,
        f"pass a multiple of {DIM_GRANULE}",
    ),
    Refusal(
        "moe_ffn_hidden_size",
        "the experts' FFN width",
        lambda config: expert_ffn_size(config) % DIM_GRANULE != 0,
        f"pass a multiple of {DIM_GRANULE} as --moe-ffn-hidden-size",
    ),
)
"""Checked when a TransformerConfig is made, before Megatron's own checks."""

SCRIPT_REFUSALS: tuple[Refusal, ...] = (
    *(
        Refusal(
            name,
            "--" + name.replace("_", "-"),
            _is_set(name),
            "use --use-distributed-optimizer to shard the optimizer instead",
        )
        for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
    ),
    *(
        Refusal(
            name,
            "--" + name.replace("_", "-"),
            _is_set(name),
            "leave it out or use the alltoall dispatcher, here the experts' linear layers are not "
            "called one by one",
        )
        for name in ("save_dgrads_interval", "save_activations_interval")
    ),
    Refusal(
        "save_tokens_per_expert_interval",
        "--save-tokens-per-expert-interval",
        _is_set("save_tokens_per_expert_interval"),
        "use --flashmoe-metrics all instead, whose expert_rows are each expert's tokens",
    ),
    # It has no flag: Megatron sets it for what --load finds, and for --export-kd-teacher-load.
    Refusal(
        "modelopt_enabled",
        "ModelOpt (modelopt_enabled)",
        _is_set("modelopt_enabled"),
        "use the alltoall dispatcher, or --load a checkpoint without a modelopt_state and leave "
        "--export-kd-teacher-load out",
    ),
)
"""Checked against the training script's arguments when the first MoE layer is built."""
