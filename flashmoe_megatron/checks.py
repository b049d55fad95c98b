"""Refuses tensors that a layer was not built for, before any kernel or collective sees them.

Only what the host knows without waiting for a GPU is read: shapes, dtypes, devices, strides and
addresses. The values of the routing are the backends' business.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashmoe_megatron.config import (
    ALIGNMENT_BYTES,
    FP8_GRANULE,
    MoEConfig,
    check_class,
    check_switch,
    got,
    is_count,
)
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.telemetry.record import MOST_LAYERS, MOST_NUMBERS
from flashmoe_megatron.weights import (
    MATRIX,
    VECTOR,
    ExpertWeights,
    SplitWeights,
    WeightGrad,
    unstacked,
)

TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernel takes for tokens and weights."""


def check_tokens(
    config: MoEConfig,
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks the tokens of one call and their routing; every forward of a backend does, once.

    Args:
        config: The layer's shape.
        x: ``[num_tokens, hidden]``, contiguous, and 16-byte aligned.
        probs: ``[num_tokens, num_experts]`` float32 or ``dtype``, contiguous.
        routing_map: ``[num_tokens, num_experts]`` bool, contiguous; or indices, and ``probs`` are
            their weights: ``[num_tokens, choices]`` int32 or int64 with at most ``topk`` choices.
        dtype: The experts' weights'.
        device: The backend's.

    Raises:
        ShapeError: One of them differs; the message names the tensor, the got and the wanted.
    """
    if type(x) is not torch.Tensor or x.layout != torch.strided:
        check_readable("x", x)
    shape, of_routing = x.shape, routing_map.shape
    is_map, columns = routing_map.dtype == torch.bool, config.num_experts
    if not is_map and len(of_routing) == 2 and of_routing[1] <= config.topk:
        columns = of_routing[1]
    if (  # runs before every launch, while the GPU may be idle
        len(shape) == 2
        and shape[1] == config.hidden
        and shape[0] <= config.max_tokens
        and x.dtype == dtype
        and of_routing == (shape[0], columns)
        and probs.shape == of_routing
        and (probs.dtype == torch.float32 or probs.dtype == dtype)
        and (is_map or routing_map.dtype in INDEX_DTYPES)
        and x.device == probs.device == routing_map.device == device
        and x.is_contiguous()
        and probs.is_contiguous()
        and routing_map.is_contiguous()
        and x.data_ptr() % ALIGNMENT_BYTES == 0
    ):
        return
    # Nothing may be wrong, since an empty tensor can be anywhere.
    check_rows(config, x)
    if x.dtype != dtype:
        raise ShapeError(
            f"x is {x.dtype}, wanted {dtype}, the dtype of the experts' weights{_autocast_hint(x)}"
        )
    num_tokens = x.shape[0]
    if num_tokens > config.max_tokens:
        raise ShapeError(
            f"x has {num_tokens} tokens, the layer was built for at most "
            f"max_tokens={config.max_tokens} per rank"
        )
    _check_placement("x", x, device)
    if routing_map.dtype in INDEX_DTYPES:
        check_choices(config, x, routing_map, probs)
        return
    wanted = (num_tokens, config.num_experts)
    for name, tensor, dtypes in (
        ("probs", probs, (torch.float32, dtype)),
        ("routing_map", routing_map, (torch.bool,)),
    ):
        if tuple(tensor.shape) != wanted:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, wanted {list(wanted)}")
        if tensor.dtype not in dtypes:
            raise ShapeError(f"{name} is {tensor.dtype}, wanted {dtype_names(dtypes)}")
        _check_placement(name, tensor, device)


def check_rows(config: MoEConfig, x: torch.Tensor) -> None:
    """Refuses tokens that are no plain array ``[num_tokens, hidden]``, whatever their dtype.

    Raises:
        ShapeError: They have another shape; or see :func:`check_readable`.
    """
    if type(x) is not torch.Tensor or x.layout != torch.strided or x.is_meta:  # in every call
        check_readable("x", x)
    if x.dim() != 2 or x.shape[1] != config.hidden:
        raise ShapeError(f"x has shape {tuple(x.shape)}, wanted [num_tokens, {config.hidden}]")


def check_choices_dtype(topk_idx: torch.Tensor) -> None:
    """Refuses indices that are not integers of 32 or 64 bits, which would be taken for a map."""
    if topk_idx.dtype not in INDEX_DTYPES:
        raise ShapeError(f"topk_idx is {topk_idx.dtype}, wanted {dtype_names(INDEX_DTYPES)}")


def check_choices(
    config: MoEConfig, x: torch.Tensor, topk_idx: torch.Tensor, topk_weight: torch.Tensor
) -> None:
    """Checks routing by indices, but for its values; the tokens have been checked.

    Args:
        config: The layer's shape.
        x: ``[num_tokens, hidden]``.
        topk_idx: ``[num_tokens, choices]`` int32 or int64, contiguous.
        topk_weight: ``[num_tokens, choices]`` float32 or ``x.dtype``, contiguous.
    """
    shape = topk_idx.shape
    if (  # runs in every call
        shape == topk_weight.shape
        and len(shape) == 2
        and shape[0] == x.shape[0]
        and shape[1] <= config.topk
        and topk_idx.dtype in INDEX_DTYPES
        and topk_weight.dtype in (torch.float32, x.dtype)
        and topk_idx.device == topk_weight.device == x.device
        and type(topk_idx) is torch.Tensor is type(topk_weight)
        and topk_idx.layout == topk_weight.layout == torch.strided
        and topk_idx.is_contiguous()
        and topk_weight.is_contiguous()
    ):
        return
    wanted = f"[{x.shape[0]}, topk] with topk <= {config.topk}"
    for name, tensor, dtypes in (
        ("topk_idx", topk_idx, INDEX_DTYPES),
        ("topk_weight", topk_weight, (torch.float32, x.dtype)),
    ):
        if tensor.dim() != 2 or tensor.shape[0] != x.shape[0] or tensor.shape[1] > config.topk:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, wanted {wanted}")
        if tensor.dtype not in dtypes:
            raise ShapeError(f"{name} is {tensor.dtype}, wanted {dtype_names(dtypes)}")
        _check_placement(name, tensor, x.device)
    if topk_idx.shape != topk_weight.shape:
        raise ShapeError(
            f"topk_weight has shape {tuple(topk_weight.shape)}, wanted {tuple(topk_idx.shape)}, "
            "as topk_idx"
        )


def choices_problem(
    config: MoEConfig,
    topk_idx: torch.Tensor,
    topk_weight: torch.Tensor,
    x: torch.Tensor | None = None,
) -> str | None:
    """Says what makes routing by indices unusable, if anything. The host waits for its values.

    The tokens, if they are at hand, are looked at where a weight of their ``[num_tokens, choices]``
    is NaN, since a router may have made that of the token.
    """
    outside = ((topk_idx < -1) | (topk_idx >= config.num_experts)).nonzero()
    if len(outside):
        token, choice = outside[0].tolist()
        return (
            f"topk_idx[{token}, {choice}] is {int(topk_idx[token, choice])}, wanted an expert id "
            f"of 0 to {config.num_experts - 1}, or -1 to skip"
        )
    ascending = topk_idx.sort(1).values
    again = ((ascending.diff(dim=1) == 0) & (ascending[:, 1:] >= 0)).nonzero()
    if len(again):
        token, place = again[0].tolist()
        expert = int(ascending[token, place])
        times = int((topk_idx[token] == expert).sum())
        return f"topk_idx[{token}] names expert {expert} {times} times, wanted distinct experts"
    nan = (topk_weight.isnan() & (topk_idx >= 0)).nonzero()
    if len(nan):
        token, choice = nan[0].tolist()
        if x is not None and len(wrong := x[token].isfinite().logical_not().nonzero()):
            column = int(wrong[0])
            return (
                f"token {token} of x is {x[token, column].item()} in column {column}, and its "
                "routing weights are NaN: wanted numbers"
            )
        return f"topk_weight[{token}, {choice}] is NaN, wanted a number"
    return None


def map_problem(config: MoEConfig, probs: torch.Tensor, selected: torch.Tensor) -> str | None:
    """Says what makes routing by a map unusable, if anything. The host waits for its values."""
    nan = (probs.isnan() & selected).nonzero()
    if len(nan):
        token, expert = nan[0].tolist()
        return (
            f"the probability of token {token} for expert {expert} is NaN ({len(nan)} NaN in "
            "all), wanted a number"
        )
    experts_per_token = selected.sum(1)
    too_many = (experts_per_token > config.topk).nonzero()
    if len(too_many):
        token = int(too_many[0])
        return (
            f"token {token} selects {int(experts_per_token[token])} experts "
            f"({len(too_many)} such tokens in all), wanted at most topk={config.topk}"
        )
    return None


def _autocast_hint(x: torch.Tensor) -> str:
    """The end of a sentence about the dtype of ``x``, where torch's autocast may have chosen it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return ""
    if x.dtype not in (torch.float32, torch.get_autocast_dtype(kind)):
        return ""
    return (
        "; torch.autocast, which is on, gives the operations before the layer dtypes of its own: "
        "call the layer with x.to() of the weights' dtype"
    )


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Refuses all but plain arrays of values.

    Raises:
        ShapeError: It is no tensor, one of a kind that only torch's operators can read, sparse, or
            on the device "meta".
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        _check_kind(name, tensor)
    if tensor.layout != torch.strided:
        raise ShapeError(f"{name} is {tensor.layout}, wanted torch.strided; call .to_dense()")
    if tensor.is_meta:
        raise ShapeError(f"{name} is on meta and has no values, wanted a processor or a GPU")


def check_tensor(name: str, value: object) -> None:
    """Refuses what is no tensor; a tensor may be of any class."""
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{name} is a {type(value).__name__}, wanted a torch.Tensor")


def _check_kind(name: str, tensor: object) -> None:
    check_tensor(name, tensor)
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:
        return  # an array of values with other methods
    ways = {
        "DTensor": "; call .to_local() for this rank's part, or .full_tensor() for all of it",
        "AsyncCollectiveTensor": "; call .wait()",
        "FakeTensor": ", which has values",
    }
    way = ways.get(kind.__name__, "")
    raise ShapeError(f"{name} is a {kind.__name__}, wanted a plain torch.Tensor{way}")


def check_kinds(weights: object, **tensors: object) -> None:
    """Refuses arguments of other classes than a layer takes; reads nothing else of them.

    A call asks only where it has failed, so that no launch waits for this.

    Args:
        weights: The local experts.
        **tensors: What have to be tensors, by their names.

    Raises:
        ConfigError: The weights are of another class, or what is said of them is.
        ShapeError: Something is no tensor, or no plain one in weights that are to be read as such.
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    check_class(
        "weights", weights, (ExpertWeights, SplitWeights), "an ExpertWeights or a SplitWeights"
    )
    assert isinstance(weights, ExpertWeights | SplitWeights)
    is_plain = type(weights) is ExpertWeights
    check: Callable[[str, Any], None] = check_readable if is_plain else check_tensor
    for field in dataclasses.fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, tuple):
            for index, one in enumerate(value):
                check(f"{field.name}[{index}]", one)
    check_class("promise", weights.promise, (Promise, type(None)), "a Promise, or None")
    if isinstance(weights, ExpertWeights):
        _check_layout(weights)


def check_number(layer: object) -> None:
    """Refuses what no launch can carry as its layer's number.

    Raises:
        ConfigError: It is no int, or no int32.
    """
    if not is_count(layer, least=-MOST_NUMBERS, most=MOST_NUMBERS - 1):
        raise ConfigError(
            f"{got('layer', layer)}: wanted an int, 0 to {MOST_LAYERS - 1}, or what launch_number "
            "makes of one"
        )


def check_token_dtype(dtype: object) -> None:
    """Refuses a dtype of tokens and weights that no backend computes in.

    Raises:
        ConfigError: It is another dtype, or none, as the name of one.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in TOKEN_DTYPES:
        raise ConfigError(f"dtype {dtype!r}: wanted one of {dtype_names(TOKEN_DTYPES)}")


def check_split(config: MoEConfig, weights: ExpertWeights) -> None:
    """Refuses gate and up projections apart where the experts have no such form.

    Raises:
        ConfigError: They have none, or the weights do not say by True or False what form they have.
    """
    _check_layout(weights)
    if weights.split and (weights.transposed or not config.gated or config.glu_interleave):
        raise ConfigError(
            f"gate and up projections apart, with transposed={weights.transposed}, "
            f"gated={config.gated}, glu_interleave={config.glu_interleave}: wanted False, True, 0"
        )


def _check_layout(weights: ExpertWeights) -> None:
    for name, value in (("transposed", weights.transposed), ("split", weights.split)):
        check_switch(name, value, " of weights")


def check_fp8(config: MoEConfig, dtype: torch.dtype, *, transposed: bool, has_biases: bool) -> None:
    """Refuses weights that experts in FP8 cannot have.

    Raises:
        ConfigError: They are not bfloat16, are transposed, or have biases.
    """
    if not config.in_fp8:
        return
    for is_wrong, problem in (
        (dtype != torch.bfloat16, f"weights in {dtype}: wanted bfloat16"),
        (transposed, "transposed weights: wanted [out, in]"),
        (has_biases, "biases: wanted none"),
    ):
        if is_wrong:
            raise ConfigError(f"experts={config.experts!r} with {problem}, or experts='bf16'")


def check_kernel_experts(config: MoEConfig) -> None:
    """Refuses a layer whose experts the kernel does not compute as they are to be computed.

    Raises:
        ConfigError: They have softcaps, or gate and up rows whose blocks FP8 cannot have.
    """
    if config.in_fp8 and config.glu_interleave % FP8_GRANULE:
        raise ConfigError(
            f"experts={config.experts!r} with glu_interleave={config.glu_interleave} on the "
            "backend 'kernel', where a scale is of gate or of up rows: wanted 0 or a multiple of "
            f"{FP8_GRANULE}, the backend 'scheduled' or 'reference', or experts='bf16'"
        )
    if config.is_softcapped:
        raise ConfigError(
            f"gate_softcap={config.gate_softcap!r}, up_softcap={config.up_softcap!r} on the "
            "backend 'kernel', which computes neither: wanted the backend 'scheduled' or "
            "'reference'"
        )


def check_weights(config: MoEConfig, weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    """Checks the local experts' weights against the layer's shape and each other.

    Args:
        config: The layer's shape.
        weights: The local experts, ``config.num_local_experts`` of each kind, all of one dtype, in
            tensors of their own or in stacks; biases may be left out.
        device: Where they have to be.

    Returns:
        The same weights with one tensor for each expert.

    Raises:
        ShapeError: A weight is missing or differs; the message names it.
        ConfigError: See :func:`check_split` and :func:`check_fp8`.
    """
    check_split(config, weights)
    fc1 = (config.intermediate if weights.split else config.fc1_rows, config.hidden)
    fc2 = (config.hidden, config.intermediate)
    dtype = weights.fc1[0].dtype if weights.fc1 else TOKEN_DTYPES[0]
    if dtype not in TOKEN_DTYPES:
        raise ShapeError(
            f"the experts' weights are {dtype}, wanted one of {dtype_names(TOKEN_DTYPES)}"
        )
    has_biases = bool(weights.fc1_bias or weights.fc2_bias)
    check_fp8(config, dtype, transposed=weights.transposed, has_biases=has_biases)
    found: dict[str, Any] = {}
    for name, tensors, wanted in (
        ("fc1", weights.fc1, fc1[::-1] if weights.transposed else fc1),
        ("fc2", weights.fc2, fc2[::-1] if weights.transposed else fc2),
        ("fc1_bias", weights.fc1_bias, (config.fc1_rows,)),
        ("fc2_bias", weights.fc2_bias, fc2[:1]),
    ):
        if not tensors and len(wanted) == 1:
            continue
        num_dims = len(wanted)
        for index, tensor in enumerate(tensors):
            check_readable(f"{name}[{index}]", tensor)
            if tensor.dim() not in (num_dims, num_dims + 1):
                raise ShapeError(
                    f"{name}[{index}] has shape {tuple(tensor.shape)}, wanted {list(wanted)} or "
                    f"a stack [num_experts, {', '.join(map(str, wanted))}]"
                )
        experts = found[name] = unstacked(tensors, num_dims)
        local = config.num_local_experts
        is_split = weights.split and name == "fc1"
        if len(experts) != (2 * local if is_split else local):
            wanted_of = "a gate and an up projection" if is_split else "one"
            raise ShapeError(
                f"{len(experts)} {name} weights, wanted {wanted_of} for each of the {local} local "
                "experts"
            )
        for at, weight in enumerate(experts):
            part = ("gate", "up")[at // local] if is_split else name
            label = f"{part} of local expert {at % local}"
            _check_weight(label, weight, wanted, dtype, "as fc1 of local expert 0", device)
            rows_are_contiguous = (
                weight.dim() == 2 and weight.stride(1) == 1 and weight.stride(0) >= weight.shape[1]
            )
            if not weight.is_contiguous() and not rows_are_contiguous:
                raise ShapeError(
                    f"{label} has strides {weight.stride()}, wanted rows of consecutive elements"
                )
    return ExpertWeights(**found, transposed=weights.transposed, split=weights.split)


def check_router_weight(config: MoEConfig, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Checks that a router's weight is ``[num_experts, hidden]``, contiguous, and as ``x`` is."""
    check_readable("router weight", weight)
    wanted = (config.num_experts, config.hidden)
    _check_weight("router weight", weight, wanted, x.dtype, "as x", x.device)
    if not weight.is_contiguous():
        raise ShapeError(f"router weight has strides {weight.stride()}, wanted contiguous rows")


def check_kernel_tensor(
    name: str, tensor: torch.Tensor, device: torch.device, *dtypes: torch.dtype
) -> None:
    """Checks that the kernel can read or write a tensor of one of these dtypes on a GPU.

    It is contiguous, and at a multiple of 16 bytes if it is of 16-bit numbers.
    """
    if tensor.device != device:
        raise ShapeError(f"{name}: on {tensor.device}, wanted {device}")
    if tensor.dtype not in dtypes:
        raise ShapeError(f"{name}: dtype {tensor.dtype}, wanted {dtype_names(dtypes)}")
    if not tensor.is_contiguous():
        raise ShapeError(f"{name}: strides {tensor.stride()}, wanted contiguous")
    address = tensor.data_ptr()
    if address % ALIGNMENT_BYTES and tensor.numel() and tensor.dtype in KERNEL_DTYPES:
        raise ShapeError(f"{name}: at address {address:#x}, wanted {ALIGNMENT_BYTES}-byte aligned")


def check_grad_out(config: MoEConfig, grad_out: torch.Tensor, num_tokens: int) -> None:
    """Checks that a gradient is one of a forward's output, ``[num_tokens, hidden]``."""
    check_readable("grad_out", grad_out)
    wanted = (num_tokens, config.hidden)
    if grad_out.shape != wanted:
        raise ShapeError(f"grad_out has shape {tuple(grad_out.shape)}, wanted {list(wanted)}")


def check_weight_grads(
    weights: ExpertWeights, kinds: Sequence[Sequence[WeightGrad | None]]
) -> None:
    """Checks that gradients, kind by kind, have the weights' shapes and are on their device."""
    fields = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
    for grads, tensors, num_dims in zip(
        kinds, fields, (MATRIX, MATRIX, VECTOR, VECTOR), strict=True
    ):
        if None in grads:  # for one expert each
            tensors = unstacked(tensors, num_dims)
            if len(grads) != len(tensors):
                raise ShapeError(f"{len(grads)} weight gradients, wanted {len(tensors)}")
            wanted = [grad is not None for grad in grads]
            tensors = tuple(itertools.compress(tensors, wanted))
        buffers: Sequence[torch.Tensor] = [grad.buffer for grad in grads if grad is not None]
        if len(buffers) != len(tensors):  # one of both has stacks
            buffers, tensors = unstacked(buffers, num_dims), unstacked(tensors, num_dims)
        if len(buffers) != len(tensors):
            raise ShapeError(f"{len(buffers)} weight gradients, wanted {len(tensors)}")
        for buffer, tensor in zip(buffers, tensors, strict=True):
            is_alike = buffer.shape == tensor.shape or (1, *buffer.shape) == tensor.shape
            if (
                not is_alike  # one expert's fits a stack of one
                or buffer.device != tensor.device
                or not buffer.is_floating_point()
            ):
                raise ShapeError(
                    f"a weight gradient has shape {tuple(buffer.shape)} and is {buffer.dtype} on "
                    f"{buffer.device}, wanted {tuple(tensor.shape)} of a float dtype on "
                    f"{tensor.device}"
                )


def _check_weight(
    label: str,
    weight: torch.Tensor,
    wanted: tuple[int, ...],
    dtype: torch.dtype,
    as_what: str,
    device: torch.device,
) -> None:
    if tuple(weight.shape) != wanted:
        raise ShapeError(f"{label} has shape {tuple(weight.shape)}, wanted {list(wanted)}")
    if weight.dtype != dtype:
        raise ShapeError(f"{label} is {weight.dtype}, wanted {dtype}, {as_what}")
    if weight.device != device:
        raise ShapeError(f"{label} is on {weight.device}, wanted {device}")


def _check_placement(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ShapeError(f"{name} is on {tensor.device}, wanted {device}")
    check_readable(name, tensor)
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, wanted "
            "contiguous rows; call .contiguous()"
        )
    if tensor.numel() and name == "x" and tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ShapeError(
            f"{name} starts {tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of "
            f"{ALIGNMENT_BYTES}, wanted {ALIGNMENT_BYTES}-byte alignment; call .clone()"
        )


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Names dtypes for a message."""
    return " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
