"""Reads a layer's shape and its bounds from Megatron's configuration and arguments."""

import dataclasses
from typing import Any

import torch

from flashmoe_megatron.adapters.megatron.config.asked import (
    INTERLEAVE,
    ROW_BOUND,
    clamp_value,
    expert_slice_size,
    expert_width,
    graphs_iteration,
    has_all_experts,
    number,
    recomputes_layers,
)
from flashmoe_megatron.adapters.megatron.config.computation import activation_of_experts
from flashmoe_megatron.adapters.megatron.settings import Settings, flag_of, megatron_args
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import RowBound

ROUTED = "flashmoe_routed_experts"
"""Attribute of a MoE layer that runs on flashmoe: its routed experts."""


def number_in_model(layer: Any) -> int:
    """A layer's number from 0, as Megatron's own metrics have it; 0 if none is set.

    Layers of multi-token prediction follow the decoder's. From Megatron-Core 0.17 on they are
    marked and begin at 1 again.
    """
    number = int(layer.layer_number or 1) - 1
    if getattr(layer, "is_mtp_layer", False):
        number += int(layer.config.num_layers)
    return number


def keeps_layers_in_bf16(config: Any) -> bool:
    """Tells whether ``--first-last-layers-bf16`` is on, which the oldest configuration lacks."""
    return bool(getattr(config, "first_last_layers_bf16", False))


def is_kept_in_bf16(layer: Any) -> bool:
    """Tells whether ``--first-last-layers-bf16`` has a layer compute in bfloat16.

    The rule is Megatron's, which counts layers of multi-token prediction as it numbers them.
    """
    config, number = layer.config, int(layer.layer_number or 1) - 1
    if not keeps_layers_in_bf16(config):
        return False
    end = int(config.num_layers) - int(config.num_layers_at_end_in_bf16)
    return not int(config.num_layers_at_start_in_bf16) <= number < end


def moe_config(
    config: Any, experts: torch.nn.Module, *, num_ranks: int, max_tokens: int
) -> MoEConfig:
    """Reads a layer's shape from a TransformerConfig that was not refused.

    The layer's ``experts`` may hold an activation of their own.

    Raises:
        ConfigError: A size cannot be honoured, or the activation is unknown.
    """
    return MoEConfig(
        hidden=expert_width(config),
        intermediate=expert_slice_size(config),
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        activation=activation_of_experts(config, experts),
        gated=bool(config.gated_linear_unit),
        clamp_value=clamp_value(config),
        linear_offset=float(getattr(config, "glu_linear_offset", None) or 0),
        # Megatron's sequential experts have no blocks.
        glu_interleave=0 if hasattr(experts, "local_experts") else number(config, INTERLEAVE, 0),
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        skip_zero_probs=_pads_to_capacity(config),
    )


def _pads_to_capacity(config: Any) -> bool:
    """Tells whether routes of probability 0 may fill experts up, be it in decoding alone."""
    in_decoding = "moe_pad_experts_for_cuda_graph_inference"
    # The configuration has this from Megatron-Core 0.17 on, before it is the script's.
    decoding = (getattr(owner, in_decoding, False) for owner in (config, megatron_args()))
    return bool(config.moe_pad_expert_input_to_capacity or any(decoding))


def tokens_per_rank(
    config: Any, *, seq_length: int, micro_batch_size: int, context_parallel_size: int
) -> int:
    """Counts the tokens that one rank's MoE layer sees in one call.

    With sequence parallelism tensor-parallel ranks share a sequence, and context-parallel ranks do.
    """
    shards = context_parallel_size
    if config.sequence_parallel:
        shards *= config.tensor_model_parallel_size
    return -(-seq_length // shards) * micro_batch_size


def with_config(config: Any, settings: Settings) -> Settings:
    """Completes the user's settings with values that follow from Megatron's configuration.

    The budget of rows per rank of Megatron's own dispatchers is our row bound, and a layer that is
    computed again as a whole right before its backward saves nothing by keeping less.

    Raises:
        ConfigError: The two contradict each other.
    """
    if settings.keep == "auto" and recomputes_layers(config):
        settings = dataclasses.replace(settings, keep="all")
    return dataclasses.replace(settings, row_bound=row_bound_of(config, settings.row_bound))


def row_bound_of(config: Any, given: RowBound | None) -> RowBound | None:
    """Returns the row bound of a model by the option and by Megatron's configuration.

    A CUDA graph of the whole iteration needs a bound, which is measured unless a number is given.
    Where a rank has all experts there is nothing to measure: it receives the rows of its own tokens
    alone, which are the mean.

    Raises:
        ConfigError: The two contradict each other.
    """
    factor = getattr(config, ROW_BOUND, None)
    if factor and given not in (None, factor):
        raise ConfigError(
            f"--{ROW_BOUND.replace('_', '-')} {factor} and {flag_of('row_bound')} {given} bound "
            "the same rows: pass one of them"
        )
    if factor:
        return float(factor)
    if given is None and graphs_iteration(config):
        given = "auto"
    return 1.0 if given == "auto" and has_all_experts(config) else given


def check_graph(config: Any, max_tokens: int | None) -> None:
    """Refuses a CUDA graph of the whole iteration where the host has to wait in every call.

    Raises:
        ConfigError: There is no bound of tokens.
    """
    if graphs_iteration(config) and max_tokens is None:
        raise ConfigError(
            "a CUDA graph of the whole iteration captures nothing that the host waits for, as it "
            "does in every call without a bound of tokens: pass "
            f"{flag_of('max_tokens')} (max_tokens of configure), or leave --cuda-graph-impl out"
        )


def resolve_max_tokens(config: Any, settings: Settings) -> int | None:
    """Returns the most tokens of one rank and call by the settings, else by the script, if known.

    A script may train and generate, as reinforcement learning does: then the larger bound holds.
    """
    if settings.max_tokens is not None:
        return settings.max_tokens
    args = megatron_args()
    seq_length = getattr(args, "seq_length", None)
    micro_batch_size = getattr(args, "micro_batch_size", None)
    if seq_length is None or micro_batch_size is None:
        return None
    # --decoder-seq-length is the decoder's own, for example with images: the longer one counts.
    seq_length = max(seq_length, getattr(args, "decoder_seq_length", None) or 0)
    micro_batch_size = max(micro_batch_size, getattr(args, "eval_micro_batch_size", None) or 0)
    in_training = tokens_per_rank(
        config,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        context_parallel_size=config.context_parallel_size,
    )
    # Where batches are shared out by length, fewer ranks may share one sequence than another.
    longest = getattr(config, "max_seqlen_per_dp_cp_rank", None) or 0
    if getattr(config, "hybrid_context_parallel", False):
        of_one = tokens_per_rank(
            config, seq_length=longest, micro_batch_size=1, context_parallel_size=1
        )
        in_training = max(in_training, of_one)
    return max(in_training, _tokens_in_inference(config, args))


DYNAMIC_TOKENS, TOKEN_ROUNDER = 16384, 64
"""The default bound of tokens in Megatron's dynamic batching, and what it rounds bounds up to."""


def _tokens_in_inference(config: Any, args: Any) -> int:
    """Tokens that one rank's layer sees in one call of the engine that arguments ask for, else 0.

    That an engine has such arguments, with defaults, does not mean that a script makes it.
    """
    tokens = 0
    dynamic = getattr(args, "inference_dynamic_batching_max_tokens", None)
    makes_dynamic = ("perform_rl_step", "inference_dynamic_batching")
    if dynamic or any(getattr(args, name, False) for name in makes_dynamic):
        tensor = config.tensor_model_parallel_size
        granule = -(-TOKEN_ROUNDER // tensor) * tensor
        rounded = -(-(dynamic or DYNAMIC_TOKENS) // granule) * granule
        tokens = tokens_per_rank(
            config, seq_length=rounded, micro_batch_size=1, context_parallel_size=1
        )
    if getattr(args, "use_legacy_static_engine", False):
        # Megatron-Core 0.16 has the second name. Ranks do not share prompts in that engine.
        names = ("inference_max_requests", "inference_max_batch_size")
        requests = max(getattr(args, name, None) or 1 for name in names)
        tokens = max(tokens, requests * (getattr(args, "inference_max_seq_length", None) or 0))
    return tokens
