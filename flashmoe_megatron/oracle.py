"""The oracle: what the layer means, in the fewest lines, and how far a result may be from it.

Written to be obviously right and slow. It knows all experts, has no ranks, buffers or padding, and
leaves its gradients to autograd; it computes with no code of a backend's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_megatron.checks import check_tensor
from flashmoe_megatron.config import Activation, check_class, check_switch, got, is_count, is_number
from flashmoe_megatron.errors import ConfigError, ShapeError

FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda z: F.gelu(z, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.SQUARED_RELU: lambda z: F.relu(z).square(),
    Activation.QUICK_GELU: lambda z: z * torch.sigmoid(1.702 * z),
}


def moe_reference(
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
    *,
    activation: Activation,
    gated: bool,
    clamp_value: float | None = None,
    linear_offset: float = 0.0,
    glu_interleave: int = 0,
    fc1_bias: Sequence[torch.Tensor] = (),
    fc2_bias: Sequence[torch.Tensor] = (),
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Applies all experts in one process and one precision, differentiable by autograd.

    Args:
        x: ``[num_tokens, hidden]``, the tokens of all ranks or of one.
        probs: ``[num_tokens, num_experts]``, multiplied with the activation before fc2.
        routing_map: ``[num_tokens, num_experts]`` bool.
        fc1: ``[2F, H]`` or ``[F, H]`` of every expert of the group.
        fc2: ``[H, F]`` of every expert of the group.
        activation: Applied to fc1's output, or to its gate half.
        gated: Whether fc1 has a gate.
        clamp_value: Bounds the gate from above, and the value that it multiplies on both sides.
        linear_offset: Added to the value that the gate multiplies.
        glu_interleave: Rows of fc1's blocks of gate and up rows; 0 for one block of each.
        fc1_bias: ``[2F]`` or ``[F]`` of every expert, added before the activation; may be empty.
        fc2_bias: ``[H]`` of every expert, added times the token's probability; may be empty.
        dtype: Everything is computed in it, without intermediate rounding.

    Raises:
        ConfigError: ``activation``, ``gated`` or ``dtype`` is of another class, or a number of a
            gated expert has no meaning.
        ShapeError: Something is no tensor, or no sequence of tensors; or tokens or their routing
            have other shapes than the tokens and the experts make.
    """
    check_class("activation", activation, Activation, "an Activation")
    check_switch("gated", gated)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype {dtype!r}: wanted a float dtype")
    _check_experts(fc1=fc1, fc2=fc2, fc1_bias=fc1_bias, fc2_bias=fc2_bias)
    _check_rows(len(fc1), x=x, probs=probs, routing_map=routing_map)
    _check_glu(fc1, clamp_value=clamp_value, linear_offset=linear_offset, block=glu_interleave)
    function = FUNCTIONS[activation]
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for expert in range(len(fc1)):
        tokens = routing_map[:, expert].nonzero().squeeze(1)
        projected = x[tokens].to(dtype) @ fc1[expert].to(dtype).t()
        if len(fc1_bias):
            projected = projected + fc1_bias[expert].to(dtype)
        if gated:
            block = glu_interleave or projected.shape[1] // 2
            blocks = torch.unflatten(projected, 1, (-1, 2, block))
            gate, up = blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)
            if clamp_value is not None:
                gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
            activated = function(gate) * (up + linear_offset)
        else:
            activated = function(projected)
        prob = probs[tokens, expert].to(dtype).unsqueeze(1)
        out = out.index_add(0, tokens, (activated * prob) @ fc2[expert].to(dtype).t())
        if len(fc2_bias):
            out = out.index_add(0, tokens, prob * fc2_bias[expert].to(dtype))
    return out


def _check_rows(num_experts: int, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.dim() != 2:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, wanted two dimensions")
    wanted = [len(tensors["x"]), num_experts]
    for name in ("probs", "routing_map"):
        if [*tensors[name].shape] != wanted:
            raise ShapeError(f"{name} has shape {tuple(tensors[name].shape)}, wanted {wanted}")
    routing_map = tensors["routing_map"]
    if routing_map.dtype != torch.bool:
        raise ShapeError(f"routing_map is {routing_map.dtype}, wanted {torch.bool}")


def _check_experts(**kinds: Any) -> None:
    for name, experts in kinds.items():
        is_stack = isinstance(experts, torch.Tensor) and experts.dim() > 0
        if isinstance(experts, str) or not (isinstance(experts, Sequence) or is_stack):
            raise ShapeError(
                f"{name} is a {type(experts).__name__}, wanted a sequence of tensors, one for each "
                "expert"
            )
        for index, one in enumerate(experts):
            check_tensor(f"{name}[{index}]", one)
        wanted = len(kinds["fc1"])
        if len(experts) != wanted and (len(experts) or "bias" not in name):
            raise ShapeError(f"{name} has {len(experts)} experts, wanted {wanted}, as fc1")
        num_dims = 1 if "bias" in name else 2
        for index, one in enumerate(experts):
            if one.dim() != num_dims:
                raise ShapeError(
                    f"{name}[{index}] has shape {tuple(one.shape)}, wanted {num_dims} dimensions"
                )


def _check_glu(
    fc1: Sequence[torch.Tensor], *, clamp_value: object, linear_offset: object, block: int
) -> None:
    if clamp_value is not None and not is_number(clamp_value, least=0, most=math.inf):
        raise ConfigError(f"clamp_value={clamp_value!r}: wanted None or a number, 0 or more")
    if not is_number(linear_offset, least=-math.inf, most=math.inf):
        raise ConfigError(f"linear_offset={linear_offset!r}: wanted a number")
    for index, one in enumerate(fc1):
        if not is_count(block, least=0) or (block and one.shape[0] % (2 * block)):
            raise ConfigError(
                f"{got('glu_interleave', block)} with fc1[{index}] of {one.shape[0]} rows: wanted "
                "an int, 0 or what divides half of them"
            )


class MismatchError(AssertionError):
    """A result is not what the oracle says; the message names the first wrong coordinate."""


@dataclass(frozen=True)
class Difference:
    """How far a result is from the oracle's.

    Attributes:
        rel_l2: ``||got - want|| / ||want||`` over the whole tensor.
        worst_row: The largest such ratio of a row (last dimension), relative to the larger of the
            row's norm and the root mean square of all rows' norms. A row that was not written or
            went to a wrong place shows here even if the whole hides it.
    """

    rel_l2: float
    worst_row: float


ROW_FACTOR = 8.0
"""A row may be this many times as far off as the whole: rows differ in length and rounding luck."""


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a buffer with a value that must not stay or be read: NaN, or the dtype's extreme."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        raise TypeError("a bool has no value to spare for poison")
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def assert_close(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    rel_l2: float,
    worst_row: float = 0.0,
) -> Difference:
    """Compares a result with the oracle's by relative L2 error.

    Args:
        name: What is compared, for the message.
        got: The result, any float dtype and device.
        want: The oracle's, same shape.
        rel_l2: Largest relative L2 error of the whole; a row may have ``ROW_FACTOR`` times it.
            0 asks for equality.
        worst_row: Relative error that a row may have even if that is more: where a function has a
            step, one value that is rounded to its other side shows in a whole row.

    Returns:
        The errors found, for a report.

    Raises:
        MismatchError: The shapes differ, an element is not finite (never written, or computed from
            unwritten values), or an error is too large; names the first wrong coordinate.
        ValueError: The oracle's own values are not finite.
    """
    if got.shape != want.shape:
        raise MismatchError(f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}")
    got = got.detach().double().cpu()
    want = want.detach().double().cpu()
    if not want.isfinite().all():
        raise ValueError(f"{name}: the oracle's values are not finite")
    unusable = ~got.isfinite()
    if unusable.any():
        raise MismatchError(
            f"{name}: {int(unusable.sum())} of {got.numel()} elements are not finite, the first at "
            f"{_first(unusable)}: never written, or computed from what was never written"
        )
    if got.numel() == 0:
        return Difference(0.0, 0.0)
    error = got - want
    rows = error.reshape(-1, error.shape[-1]) if error.dim() else error.reshape(1, 1)
    row_norms = want.reshape(rows.shape).norm(dim=1)
    typical = row_norms.square().mean().sqrt()
    scale = torch.maximum(row_norms, typical)
    row_errors = rows.norm(dim=1)
    # Where the oracle is zero throughout, any error is infinitely large.
    relative = torch.where(row_errors > 0, row_errors / scale, 0.0)
    total = want.norm()
    found = Difference(
        rel_l2=float(error.norm() / total) if total > 0 or error.any() else 0.0,
        worst_row=float(relative.max()),
    )
    of_row = max(ROW_FACTOR * rel_l2, worst_row)
    if found.rel_l2 <= rel_l2 and found.worst_row <= of_row:
        return found
    row_shape = error.shape[:-1] if error.dim() else (1,)
    wrong_rows = (relative > of_row).reshape(row_shape)
    wrong = error.abs() > rel_l2 * torch.maximum(want.abs(), want.square().mean().sqrt())
    if error.dim() and wrong_rows.any():
        wrong &= wrong_rows.unsqueeze(-1)
    # An error spread evenly may exceed the bound as a whole without one element standing out.
    where = _first(wrong if wrong.any() else error.abs() == error.abs().max())
    raise MismatchError(
        f"{name}: relative L2 error {found.rel_l2:.3g}, wanted at most {rel_l2:.3g}; worst row "
        f"{found.worst_row:.3g}, wanted at most {of_row:.3g}; "
        f"{int(wrong_rows.sum())} of {len(rows)} rows are wrong; first wrong element {where}: "
        f"{got[where].item():.6g}, wanted {want[where].item():.6g}"
    )


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
