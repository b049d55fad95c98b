"""Reads from a TransformerConfig, or from a script's arguments, what they ask for.

A setting that a release of Megatron-Core does not know counts as not set, and so does a
setting that is given as off.
"""

from collections.abc import Callable
from typing import Any

from flashmoe_megatron.adapters.megatron.dispatcher import is_ours
from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE

ROW_BOUND = "moe_expert_rank_capacity_factor"
"""Megatron's own name of the row bound: it has the same measure, the mean number of rows."""

OVERLAP = "overlap_moe_expert_parallel_comm"
"""Megatron's schedule that runs one micro-batch's forward concurrently with another's backward."""

INTERLEAVE = "moe_mlp_glu_interleave_size"
"""Grouped experts have gate and up rows of fc1 in blocks of so many."""

SHARED_OVERLAP = "moe_shared_expert_overlap"
"""The shared expert is computed on a stream of its own, concurrently with the routed ones."""

MEGAKERNEL = "moe_megakernel_backend"
"""The name of a backend that Megatron calls through its megakernel interface."""

Asks = Callable[[Any], bool]
"""Tells whether a configuration asks for something."""


def is_set(name: str) -> Asks:
    """Asks whether a setting is on: ``None``, ``False``, 0 and an empty string mean off."""
    return lambda config: bool(getattr(config, name, None))


def is_megakernel(config: Any) -> bool:
    """Tells whether Megatron is to call flashmoe through its megakernel interface."""
    return bool(getattr(config, MEGAKERNEL, None) == DISPATCHER_TYPE)


def is_served(args: Any) -> bool:
    """Tells whether the script's model has MoE layers that run on flashmoe."""
    return bool(getattr(args, "num_experts", None)) and is_ours(args)


def has_logger(args: Any) -> bool:
    """Tells whether the user asked for a logger, which all ranks know and one of them has."""
    return bool(getattr(args, "wandb_project", None) or getattr(args, "tensorboard_dir", None))


def is_other_than(name: str, wanted: str) -> Asks:
    """Asks whether a setting is on and is not the wanted choice."""
    return lambda config: (getattr(config, name, None) or wanted) != wanted


def number(config: Any, name: str, default: int) -> int:
    """A whole number, or the default where none is given."""
    value = getattr(config, name, None)
    return default if value is None else int(value)


def clamp_value(config: Any) -> float | None:
    """Returns the bound of the activation's inputs, which may be 0; ``False`` means no bound."""
    value = getattr(config, "activation_func_clamp_value", None)
    return None if value is None or value is False else float(value)


_TERMS = (
    *("activation_func", "gated_linear_unit", "activation_func_clamp_value", "glu_linear_offset"),
    INTERLEAVE,
)


def terms_of(config: Any) -> list[Any]:
    """A configuration's values for the function between projections; experts read them again."""
    return [getattr(config, name, None) for name in _TERMS]


def expert_width(config: Any) -> int:
    """Width of the tokens that experts get: the model's, or that of the latent projections."""
    return number(config, "moe_latent_size", 0) or number(config, "hidden_size", 0)


def expert_ffn_size(config: Any) -> int:
    """FFN width of one expert; Megatron fills it in from others in the same way."""
    default = number(config, "ffn_hidden_size", 4 * number(config, "hidden_size", 0))
    return number(config, "moe_ffn_hidden_size", default)


def expert_tensor_size(config: Any) -> int:
    """Ranks that share an expert's weights; where nothing is said, those of attention."""
    tensor_size = number(config, "tensor_model_parallel_size", 1)
    return max(number(config, "expert_tensor_parallel_size", tensor_size), 1)


def has_all_experts(config: Any) -> bool:
    """Tells whether every rank has all experts, whole."""
    is_alone = number(config, "expert_model_parallel_size", 1) == 1
    return is_alone and expert_tensor_size(config) == 1


def expert_slice_size(config: Any) -> int:
    """FFN width of the slice of an expert that one rank has."""
    return expert_ffn_size(config) // expert_tensor_size(config)


def recomputes(module: str) -> Asks:
    """Asks whether a part of the model, by Megatron's name, is recomputed by selection."""

    def is_asked(config: Any) -> bool:
        selective = getattr(config, "recompute_granularity", None) == "selective"
        return selective and module in (getattr(config, "recompute_modules", None) or ())

    return is_asked


def recomputes_layers(config: Any) -> bool:
    """Tells whether every MoE layer is computed again as a whole."""
    is_full = getattr(config, "recompute_granularity", None) == "full"
    is_all = getattr(config, "recompute_method", None) == "uniform"  # "block" takes some layers
    return recomputes("moe")(config) or (is_full and is_all)


_PARTS_OF_OTHER_LAYERS = {"attn", "mamba", "mlp"}
_PARTS_BESIDE_EXPERTS = _PARTS_OF_OTHER_LAYERS | {"moe_router", "moe_preprocess"}
"""Parts of a MoE layer that Transformer Engine's graphs may hold without its experts."""

_WHOLE_ITERATION = "full_iteration"
"""Megatron's name of a graph of all forwards and backwards: a scope of "local" up to 0.17."""


def graphs_iteration(config: Any) -> bool:
    """Tells whether one CUDA graph captures the whole iteration."""
    kind = _graph_kind(config)
    return kind == _WHOLE_ITERATION or (
        kind == "local" and _graphed_parts(config) == {_WHOLE_ITERATION}
    )


def graphs_experts(config: Any) -> bool:
    """Tells whether graphs of single layers would capture a MoE layer's experts."""
    kind = _graph_kind(config)
    if kind == "none" or graphs_iteration(config):
        return False
    allowed = _PARTS_BESIDE_EXPERTS
    # "local" captures a Transformer layer as a whole, whichever part is named; in hybrid models
    # attention and experts are layers of their own. In inference it may capture the whole model.
    if kind != "transformer_engine":
        of_inference = getattr(config, "inference_cuda_graph_scope", None)
        if not getattr(config, "is_hybrid_model", False) or _name_of(of_inference) == "block":
            return True
        allowed = _PARTS_OF_OTHER_LAYERS
    parts = _graphed_parts(config)
    return not parts or not parts <= allowed


def graphs_any(config: Any) -> bool:
    """Tells whether CUDA graphs capture anything."""
    return _graph_kind(config) != "none"


def graphs_part(part: str) -> Asks:
    """Asks whether Transformer Engine's graphs hold a part of a layer, by Megatron's name."""

    def is_asked(config: Any) -> bool:
        return _graph_kind(config) == "transformer_engine" and part in _graphed_parts(config)

    return is_asked


def _graph_kind(config: Any) -> str:
    for name, kind in (
        ("enable_cuda_graph", "local"),
        ("external_cuda_graph", "transformer_engine"),
    ):
        if getattr(config, name, False):
            return kind
    return getattr(config, "cuda_graph_impl", None) or "none"


def _graphed_parts(config: Any) -> set[str]:
    """The parts of layers that graphs are asked to hold, none for whole layers."""
    # The older name goes first: where both are there, Megatron's default is in the newer one.
    names = ("cuda_graph_scope", "cuda_graph_modules")
    modules: Any = next(filter(None, (getattr(config, name, None) for name in names)), [])
    if not isinstance(modules, list | tuple | set):
        modules = [modules]
    return {part for module in modules for part in _name_of(module).replace(",", " ").split()}


def _name_of(choice: Any) -> str:
    """A choice is a string or, once Megatron has read it, a member of an enumeration."""
    return str(getattr(choice, "name", choice))


def offloads(module: str) -> Asks:
    """Asks whether tensors that a part of the model keeps go to the host's memory."""

    def is_asked(config: Any) -> bool:
        is_on = getattr(config, "fine_grained_activation_offloading", False)
        return bool(is_on) and module in (getattr(config, "offload_modules", None) or ())

    return is_asked
