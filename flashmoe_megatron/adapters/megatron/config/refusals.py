"""Lists what a TransformerConfig may not ask for with the flashmoe dispatcher, and the way out.

One table for Megatron-Core 0.16.1 up to main. Settings that only choose another implementation of
a part that flashmoe replaces (fusions of the permutation or of the activation, options of the flex
dispatcher) are harmless and not listed; what is accepted and changes nothing is in ``notices.py``.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron.config.asked import (
    INTERLEAVE,
    MEGAKERNEL,
    OVERLAP,
    ROW_BOUND,
    SHARED_OVERLAP,
    Asks,
    clamp_value,
    expert_ffn_size,
    expert_slice_size,
    expert_tensor_size,
    graphs_any,
    graphs_experts,
    is_megakernel,
    is_other_than,
    is_set,
    number,
    offloads,
    recomputes,
)
from flashmoe_megatron.adapters.megatron.config.computation import (
    activation_of,
    compute_dtype,
    takes_glu_terms,
)
from flashmoe_megatron.adapters.megatron.dispatcher import (
    FIELD,
    has_our_name,
    showing,
    way_back,
)
from flashmoe_megatron.adapters.megatron.settings import (
    DISPATCHER_TYPE,
    STOCK_DISPATCHER_TYPE,
    Settings,
    current_value,
    flag_of,
)
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.config import (
    DIM_GRANULE,
    GLU_CHUNK,
    MAX_GLU_TERM,
    MAX_HOSTS,
    MAX_RANKS,
    MAX_ROW_BOUND,
    MAX_TOPK,
    is_block_of,
)
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.select import resolve_kind


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
    """The refusals that a TransformerConfig or parsed arguments meet, in the table's order."""
    return (refusal for refusal in refusals if refusal.is_asked(config))


def refuse(config: Any, refusals: Iterable[Refusal]) -> None:
    """Raises a ConfigError with the flag and the way out for the first refusal that is met."""
    for refusal in refusals_of(config, refusals):
        raise ConfigError(refusal.message(config) + way_back(config))


def patch_config(transformer_config: ModuleType) -> None:
    """Refuses, when a configuration is made, what flashmoe cannot honour."""
    patch(transformer_config.TransformerConfig, "__post_init__", _checked_post_init)


def _checked_post_init(original: Function) -> Function:
    def post_init(self: Any) -> None:
        # A layer in another dispatcher's place is checked when it is built: by then it is known
        # whether the configuration has opted out, and Megatron's checks of the other do no harm.
        if self.num_moe_experts and (has_our_name(self) or is_megakernel(self)):
            refuse(self, CONFIG_REFUSALS)
            shown: dict[str, Any] = {ROW_BOUND: None}
            if is_megakernel(self):
                shown[MEGAKERNEL] = None  # its checks are of one backend's limits
            elif getattr(self, OVERLAP, False) or getattr(self, SHARED_OVERLAP, False):
                shown[FIELD] = STOCK_DISPATCHER_TYPE
            with showing(self, shown):
                original(self)
        else:
            original(self)

    return post_init


def check_early_routing(config: Any, settings: Settings) -> None:
    """Refuses early routing where it cannot run once before each layer's attention.

    Raises:
        ConfigError: The host would settle on replicas within a CUDA graph; or, with pre-run gating,
            the router would run again in a recomputation, in another micro-batch's turn or in a
            CUDA graph.
    """
    if settings.placement == "lookahead" and graphs_any(config):
        raise ConfigError(
            f"{flag_of('placement')} lookahead with CUDA graphs: only hosts know which forward "
            "uses what was settled on ahead of attention, and no replay asks them; pass "
            f"{flag_of('placement')} launch"
        )
    if not settings.pre_gate:
        return
    again: tuple[tuple[Asks, str], ...] = (
        (recomputes("moe"), "--recompute-modules moe (recompute whole layers instead)"),
        (is_set(OVERLAP), f"--{OVERLAP.replace('_', '-')}"),
        (graphs_any, "CUDA graphs"),
    )
    for is_asked, flag in again:
        if is_asked(config):
            raise ConfigError(
                f"{flag_of('pre_gate')} with {flag}: the layer's routing is found before its "
                "attention, once for each forward; leave one of the two out"
            )


_FLOAT32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""A variable that gives Transformer Engine scales which are no powers of two."""


def check_fp8_experts(config: Any, settings: Settings) -> None:
    """Refuses routed experts in FP8 where they would not follow a setting of the model.

    Raises:
        ConfigError: The model's recipe or its format is another one, or its experts have what no
            experts in FP8 have.
    """
    if settings.experts == "bf16":
        return
    recipe = getattr(config, "fp8_recipe", None)
    recipe, dtype = getattr(recipe, "value", recipe), compute_dtype(config)
    in_fp8 = is_set("fp8")(config)
    for is_asked, what, way_out in (
        (
            in_fp8 and recipe != "blockwise",
            f"--fp8-recipe {recipe}",
            "pass --fp8-recipe blockwise",
        ),
        (
            settings.experts == "fp8_dgrad" and getattr(config, "fp8", None) == "hybrid",
            "--fp8-format hybrid, whose gradients are E5M2",
            "pass --fp8-format e4m3",
        ),
        (
            in_fp8 and os.environ.get(_FLOAT32_SCALES) == "1",
            f"{_FLOAT32_SCALES}=1",
            "leave it out, their scales are powers of two",
        ),
        (dtype != torch.bfloat16, f"parameters in {dtype}", "pass --bf16"),
        (is_set("add_bias_linear")(config), "biases", "pass --disable-bias-linear"),
        (clamp_value(config) is not None, "a clamp of activations", "leave it out"),
        (is_set("glu_linear_offset")(config), "--glu-linear-offset", "leave it at 0"),
    ):
        if is_asked:
            flag = flag_of("experts")
            raise ConfigError(
                f"{flag} {settings.experts} with {what}: {way_out}, or pass {flag} bf16"
            )


def _is_block(config: Any) -> bool:
    """Tells whether fc1's rows can alternate in blocks of the size that is asked for."""
    size = number(config, INTERLEAVE, 0)
    is_gated = is_set("gated_linear_unit")(config)
    return is_gated and is_block_of(size, expert_slice_size(config))


def _is_scheduled(config: Any) -> bool:
    """Tells whether the scheduled backend computes the layers, by choice or by ``auto``."""
    kind = current_value("backend")
    if kind == "auto":
        kind = resolve_kind(kind, torch.device("cuda"), compute_dtype(config))
    return bool(kind == "scheduled")


def _depends_on_the_batch(config: Any) -> bool:
    """Tells whether batch invariance is asked for where a token's bits depend on other tokens.

    Replicas change who sums a token's results, unless these travel by routes, and capacities which
    of them there are. The scheduled backend has torch's grouped products.
    """
    if not is_set("batch_invariant_mode")(config):
        return False
    has_slots = current_value("spare_slots") and current_value("placement") != "off"
    has_slots = has_slots and current_value("combine") != "routes"
    return bool(has_slots or config.moe_expert_capacity_factor is not None or _is_scheduled(config))


CONFIG_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "fp4",
        "--fp4-format",
        is_set("fp4"),
        "train the model in bf16 without it, or with --fp8-format",
    ),
    Refusal(
        "quant_recipe",
        "--te-precision-config-file",
        is_set("quant_recipe"),
        "train the model in bf16 without it",
    ),
    Refusal("use_kitchen", "--use-kitchen", is_set("use_kitchen"), "leave it out"),
    Refusal(
        "enable_autocast",
        "enable_autocast",
        is_set("enable_autocast"),
        "hold the parameters in the dtype of the computation instead",
    ),
    Refusal(
        "expert_tensor_parallel_size",
        "expert tensor parallelism",
        lambda config: expert_tensor_size(config) > 1 and not _is_scheduled(config),
        f"pass {flag_of('backend')} scheduled, or --expert-tensor-parallel-size 1, attention may "
        "keep its tensor parallelism",
    ),
    Refusal(
        "expert_tensor_parallel_num_weight_shards",
        "--expert-tensor-parallel-num-weight-shards",
        lambda config: number(config, "expert_tensor_parallel_num_weight_shards", 1) > 1,
        "pass 1 or leave it out",
    ),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad",
        is_set("overlap_dispatch_backward_with_experts_wgrad"),
        "leave it out, the kernel overlaps communication with computation itself",
    ),
    Refusal(
        "moe_apply_probs_on_input",
        "--moe-apply-probs-on-input",
        is_set("moe_apply_probs_on_input"),
        "leave it out, probabilities scale the activation before the second projection, or use the "
        "alltoall dispatcher",
    ),
    Refusal(
        "offload_modules",
        "--offload-modules fused_group_mlp",
        offloads("fused_group_mlp"),
        "use expert_fc1 and moe_act, which are what experts keep",
    ),
    Refusal(
        "cpu_offloading",
        "--cpu-offloading-num-layers",
        is_set("cpu_offloading"),
        "leave it out, or recompute with --recompute-modules moe",
    ),
    Refusal(
        "moe_paged_stash",
        "--moe-paged-stash",
        is_set("moe_paged_stash"),
        "leave it out, it belongs to the flex dispatcher",
    ),
    Refusal(
        ROW_BOUND,
        "--moe-expert-rank-capacity-factor",
        lambda config: is_set(ROW_BOUND)(config)
        and not 1 <= getattr(config, ROW_BOUND) <= MAX_ROW_BOUND,
        f"pass at least 1, the mean number of rows, and at most {MAX_ROW_BOUND:g}, or leave it out "
        "for exact buffers",
    ),
    Refusal(
        "batch_invariant_mode",
        "--batch-invariant-mode",
        _depends_on_the_batch,
        "leave out spare slots, capacity factors and the scheduled backend, which make a token's "
        "bits depend on other tokens (spare slots do not with --flashmoe-combine routes), or use "
        "the alltoall dispatcher",
    ),
    Refusal(
        "cuda_graph_impl",
        "a CUDA graph over experts",
        graphs_experts,
        "capture what is beside them, with --cuda-graph-impl transformer_engine --cuda-graph-scope "
        "attn moe_router moe_preprocess (--cuda-graph-modules from Megatron-Core 0.18), or the "
        "whole iteration, with --cuda-graph-impl full_iteration (local --cuda-graph-scope "
        "full_iteration before 0.18) and a row bound",
    ),
    Refusal(
        "activation_func",
        "the activation function",
        lambda config: activation_of(getattr(config, "activation_func", None)) is None,
        "use SwiGLU (--swiglu), --quick-geglu, GELU, --squared-relu, ReLU or SiLU, or use the "
        "alltoall dispatcher",
    ),
    Refusal(
        "activation_func_clamp_value",
        "--activation-func-clamp-value",
        lambda config: clamp_value(config) is not None
        and not (takes_glu_terms(config) and 0 < (clamp_value(config) or 0) <= MAX_GLU_TERM),
        "pass a positive number beside --swiglu or --quick-geglu, or leave it out",
    ),
    Refusal(
        "activation_func_fp8_input_store",
        "--activation-func-fp8-input-store",
        is_set("activation_func_fp8_input_store"),
        "leave it out",
    ),
    Refusal(
        "glu_linear_offset",
        "--glu-linear-offset",
        lambda config: is_set("glu_linear_offset")(config) and not takes_glu_terms(config),
        "leave it at 0, pass --swiglu or --quick-geglu, or use the alltoall dispatcher",
    ),
    Refusal(
        "use_te_activation_func",
        "--use-te-activation-func beside a clamp or an offset",
        lambda config: is_set("use_te_activation_func")(config)
        and (clamp_value(config) is not None or is_set("glu_linear_offset")(config)),
        "leave it out, Transformer Engine's operations have neither",
    ),
    Refusal(
        INTERLEAVE,
        "--moe-mlp-glu-interleave-size",
        lambda config: is_set(INTERLEAVE)(config) and not _is_block(config),
        f"pass 1, or a power of two from {GLU_CHUNK} on that divides the FFN width of gated "
        "experts, or leave it out for an fc1 with all gate rows first",
    ),
    *(
        Refusal(
            name,
            "--" + name.replace("_", "-"),
            is_other_than(name, "bf16"),
            "pass bf16, tokens travel as they are",
        )
        for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
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
        lambda config: number(config, "expert_model_parallel_size", 1) > MAX_RANKS * MAX_HOSTS,
        f"pass at most {MAX_RANKS * MAX_HOSTS}, {MAX_RANKS} GPUs on each of {MAX_HOSTS} hosts",
    ),
    Refusal(
        "expert_model_parallel_size",
        "--expert-model-parallel-size beside --hybrid-context-parallel",
        lambda config: is_set("hybrid_context_parallel")(config)
        and number(config, "tensor_model_parallel_size", 1)
        % number(config, "expert_model_parallel_size", 1)
        != 0,
        "pass 1 or a divisor of --tensor-model-parallel-size, whose ranks have the same sequences: "
        "others have more or fewer, and would wait for each other's experts, with every dispatcher",
    ),
    Refusal(
        "moe_router_topk",
        "--moe-router-topk",
        lambda config: number(config, "moe_router_topk", 1) > MAX_TOPK,
        f"pass at most {MAX_TOPK}",
    ),
    Refusal(
        "hidden_size",
        "--hidden-size",
        lambda config: not is_set("moe_latent_size")(config)
        and number(config, "hidden_size", 0) % DIM_GRANULE != 0,
        f"pass a multiple of {DIM_GRANULE}",
    ),
    Refusal(
        "moe_latent_size",
        "--moe-latent-size",
        lambda config: number(config, "moe_latent_size", 0) % DIM_GRANULE != 0,
        f"pass a multiple of {DIM_GRANULE}",
    ),
    Refusal(
        "moe_ffn_hidden_size",
        "the experts' FFN width",
        lambda config: expert_ffn_size(config) % (DIM_GRANULE * expert_tensor_size(config)) != 0,
        f"pass a multiple of {DIM_GRANULE} for each rank that shares an expert as "
        "--moe-ffn-hidden-size",
    ),
)
"""Checked when a TransformerConfig is made, before Megatron's own checks."""

SCRIPT_REFUSALS: tuple[Refusal, ...] = (
    *(
        Refusal(
            name,
            "--" + name.replace("_", "-"),
            is_set(name),
            "use --use-distributed-optimizer to shard the optimizer instead",
        )
        for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
    ),
    *(
        Refusal(
            name,
            "--" + name.replace("_", "-"),
            is_set(name),
            "leave it out or use the alltoall dispatcher, here the experts' linear layers are not "
            "called one by one",
        )
        for name in ("save_dgrads_interval", "save_activations_interval")
    ),
    Refusal(
        "save_tokens_per_expert_interval",
        "--save-tokens-per-expert-interval",
        is_set("save_tokens_per_expert_interval"),
        "use --flashmoe-metrics all instead, whose expert_rows are each expert's tokens",
    ),
    # It has no flag: Megatron sets it if --load finds a modelopt_state, or if it is given
    # --export-kd-teacher-load.
    Refusal(
        "modelopt_enabled",
        "ModelOpt (modelopt_enabled)",
        is_set("modelopt_enabled"),
        "use the alltoall dispatcher, or --load a checkpoint without a modelopt_state and leave "
        "--export-kd-teacher-load out",
    ),
)
"""Checked against the training script's arguments when the first MoE layer is built."""
