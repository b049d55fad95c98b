"""Reads the shape of a layer from a model's config.json, from Megatron's flags, or from sizes."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flashmoe_megatron.adapters.megatron.shape import tokens_per_rank
from flashmoe_megatron.bench.shapes import Form, Shape, shape_of
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError

TOKENS = 8192
"""Tokens of a rank where a description has none."""
ANY_SHAPE = "a shape, TOKENSxHIDDENxINTERMEDIATExEXPERTSxTOPK with --gated where experts are"

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOPK = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
_HIDDEN = ("moe_latent_size", "hidden_size", "d_model", "n_embd")
"""A latent size comes first: such experts take narrower tokens than the model has."""
_INTERMEDIATE = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_ffn_hidden_size",
    "intermediate_size",
    "ffn_hidden_size",
    "d_ff",
    "encoder_ffn_dim",
)
"""The experts' own size comes first: with it, the others are those of dense layers."""
_ACTIVATION = (
    "mlp_hidden_act",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "dense_act_fn",
)
_WITHIN = ("text_config", "llm_config", "language_config", "thinker_config", "ffn_config")
"""The parts of a configuration that have these keys in models of several parts, and in DBRX."""
_NOT_GATED = ("relu2", "squared_relu")
"""The activations of experts that are published without a gate."""
_MODELS_NOT_GATED = ("switch_transformers", "nllb-moe")
_FUNCTIONS = {
    **dict.fromkeys(("silu", "swish", "swiglu"), Activation.SILU),
    "gelu": Activation.GELU,
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), Activation.GELU_TANH),
    "relu": Activation.RELU,
    **dict.fromkeys(_NOT_GATED, Activation.SQUARED_RELU),
    **dict.fromkeys(("quick_gelu", "quick_geglu"), Activation.QUICK_GELU),
}
"""The activations by their names in models and in Megatron's flags."""
_OF_GPT_OSS = {"gpt_oss": 7.0, "openai_privacy_filter": 7.0}
"""Models with GPT-OSS's experts, which a config.json does not describe, and their usual clamp."""
_SLOPE_OF_GPT_OSS = 1.702
"""The ``swiglu_alpha`` of other models that compute ``quick_gelu(gate) * (up + 1)``."""
_NOT_TIMED = {"swiglu_limits": "clamps that differ between layers"}
"""Keys that give experts something which no layer here does, and its name."""


class Described(NamedTuple):
    """A layer and its origin.

    Attributes:
        shape: The layer of the whole expert-parallel group.
        origin: Names it for a reader.
        form: What its experts compute besides products.
        not_timed: What they do besides that no layer here does, "" if nothing is known.
        num_ranks: The ranks that share the experts in the described training, 1 if it is not known.
    """

    shape: Shape
    origin: str
    form: Form
    not_timed: str = ""
    num_ranks: int = 1


def from_config(path: Path, *, tokens: int = TOKENS, gated: bool | None = None) -> Described:
    """Returns the experts' layer of a model, by its ``config.json`` in transformers' form.

    Args:
        path: The file.
        tokens: Tokens of one rank.
        gated: Whether experts have a gate; ``None`` decides by the model's activation.

    Raises:
        ConfigError: The file cannot be read, has no experts or not all sizes.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"--config {path}: is a {type(found).__name__}, wanted an object, as the config.json "
            "of a model is"
        )
    model = str(found.get("model_type") or "a model")
    levels = [found]
    for level in levels:
        levels += [level[name] for name in _WITHIN if isinstance(level.get(name), dict)]
    inner = next((level for level in reversed(levels) if _first(level, _EXPERTS)), None)
    if inner is None:
        raise ConfigError(
            f"--config {path}: {model} has no experts (none of {', '.join(_EXPERTS)}); wanted the "
            f"config.json of a mixture of experts, or {ANY_SHAPE}"
        )
    known = {**found, **inner}
    activation = str(_first(known, _ACTIVATION) or "")
    if gated is None:
        gated = activation not in _NOT_GATED and model not in _MODELS_NOT_GATED
    sizes = [
        _size(path, model, known, names) for names in (_HIDDEN, _INTERMEDIATE, _EXPERTS, _TOPK)
    ]
    hidden, intermediate, num_experts, topk = sizes
    shape = Shape(tokens, hidden, intermediate, num_experts, topk, gated)
    form, not_timed = _form(known, model, activation, gated)
    return Described(shape, f"{model} of {path.name}", form, not_timed)


def _form(keys: Mapping[str, Any], model: str, activation: str, gated: bool) -> tuple[Form, str]:
    """Returns what a model's experts compute besides products, and what is left out of it."""
    clamp = keys.get("swiglu_limit") or _OF_GPT_OSS.get(model)
    not_timed = [words for key, words in _NOT_TIMED.items() if keys.get(key)]
    if gated and (model in _OF_GPT_OSS or keys.get("swiglu_alpha") == _SLOPE_OF_GPT_OSS):
        form = Form(Activation.QUICK_GELU, clamp, 1.0, has_bias=model in _OF_GPT_OSS)
        return form, ", ".join(not_timed)
    form = Form.plain(gated)
    if activation in _FUNCTIONS:
        form = replace(form, activation=_FUNCTIONS[activation])
    elif activation:
        not_timed.append(f"the function {activation}")
    if gated and clamp:
        form = replace(form, clamp_value=clamp)
    return form, ", ".join(not_timed)


def _first(keys: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Returns the first value that is set, ``None`` if none is."""
    return next((keys[name] for name in names if keys.get(name)), None)


def _size(path: Path, model: str, keys: Mapping[str, Any], names: Sequence[str]) -> int:
    value = _first(keys, names)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]  # one for each layer, and all alike
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        got = "nothing" if value is None else f"{value!r}"
        raise ConfigError(
            f"--config {path}: {model} has {got} for {names[0]} (or {', '.join(names[1:])}), "
            f"wanted one positive int; without it give {ANY_SHAPE}"
        )
    return value


def from_megatron(arguments: Sequence[str], *, tokens: int | None = None) -> Described:
    """Returns the experts' layer of a training, by the flags of Megatron's ``pretrain_gpt.py``.

    Args:
        arguments: The training's command line; flags that say nothing of a layer are passed over.
        tokens: Tokens of one rank, ``None`` for those of a micro-batch.

    Raises:
        ConfigError: A flag that is needed is missing, or is no number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    sizes = (
        *("hidden-size", "moe-ffn-hidden-size", "ffn-hidden-size", "num-experts"),
        *("moe-router-topk", "seq-length", "micro-batch-size", "moe-latent-size"),
        *("tensor-model-parallel-size", "context-parallel-size", "expert-model-parallel-size"),
    )
    for name in sizes:
        parser.add_argument(f"--{name}", type=int)
    for name in ("activation-func-clamp-value", "glu-linear-offset"):
        parser.add_argument(f"--{name}", type=float)
    for name in (
        *("sequence-parallel", "swiglu", "quick-geglu", "squared-relu", "disable-bias-linear"),
    ):
        parser.add_argument(f"--{name}", action="store_true")
    try:
        given, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"--megatron: {error}") from error
    hidden = given.moe_latent_size or given.hidden_size
    intermediate = given.moe_ffn_hidden_size or given.ffn_hidden_size
    wanted = {
        "--hidden-size": hidden,
        "--moe-ffn-hidden-size": intermediate,
        "--num-experts": given.num_experts,
    }
    if tokens is None:
        wanted |= {"--seq-length": given.seq_length, "--micro-batch-size": given.micro_batch_size}
    if missing := [name for name, value in wanted.items() if value is None]:
        raise ConfigError(
            f"--megatron: got no {', '.join(missing)}; wanted the flags of a mixture of experts, "
            f"or {ANY_SHAPE}"
        )
    given.tensor_model_parallel_size = given.tensor_model_parallel_size or 1
    counted = tokens or tokens_per_rank(
        given,
        seq_length=given.seq_length,
        micro_batch_size=given.micro_batch_size,
        context_parallel_size=given.context_parallel_size or 1,
    )
    activation = next(
        (name for name in ("swiglu", "quick_geglu", "squared_relu") if getattr(given, name)), "gelu"
    )
    shape = Shape(
        counted,
        hidden,
        intermediate,
        given.num_experts,
        given.moe_router_topk or 2,  # Megatron's own default
        activation in ("swiglu", "quick_geglu"),
    )
    form = Form(
        _FUNCTIONS[activation],
        given.activation_func_clamp_value,
        given.glu_linear_offset or 0.0,
        has_bias=not given.disable_bias_linear,
    )
    ranks = given.expert_model_parallel_size or 1
    return Described(shape, "Megatron's flags", form, num_ranks=ranks)


def from_text(text: str, *, gated: bool = False) -> Described:
    """Returns a layer by its name or its sizes; see :func:`~.shapes.shape_of`.

    Raises:
        ConfigError: There is no such layer.
    """
    try:
        shape = shape_of(text, gated=gated)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Described(shape, text, Form.plain(shape.gated))
