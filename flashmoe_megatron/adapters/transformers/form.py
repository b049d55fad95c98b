"""Reads what experts of transformers compute, and where their weights are.

``use_experts_implementation`` tells of a class whether gate and up rows are one behind the other,
whether matrices are transposed, and whether there are a gate and biases. What becomes of the first
projection's output is code of the model's, so that is put to the proof: it runs forward and
backward on random rows, and has to give the values and gradients of one formula of ours.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flashmoe_megatron.adapters.probe import PROBE_ROWS, PROBE_SCALES, is_close
from flashmoe_megatron.backend import ExpertWeights
from flashmoe_megatron.config import BOUNDED_ACTIVATIONS, Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.reference.activations import activate

_OFFSETS = (0.0, 1.0)
"""What models add to the up rows."""


def read_shape(experts: nn.Module, topk: int, num_ranks: int) -> MoEConfig:
    """The shape of a layer whose experts these are.

    Args:
        experts: A module of a class that ``use_experts_implementation`` decorates, with its
            parameters in memory.
        topk: Most choices of one token.
        num_ranks: Ranks of the expert-parallel group, each with as many experts as this one.

    Returns:
        The shape; its ``max_tokens`` does not count.

    Raises:
        ConfigError: It computes something that no backend does; says what.
    """
    name = type(experts).__name__
    missing = [
        flag
        for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated")
        if not hasattr(experts, flag)
    ]
    if missing:
        raise ConfigError(
            f"{name} has no {', '.join(missing)}: wanted a class that transformers' "
            "use_experts_implementation decorates"
        )
    if getattr(experts, "has_post_expert_norm", False):
        raise ConfigError(f"{name} normalizes what its experts return, which no backend does")
    fc1 = getattr(experts, _first(experts))
    if fc1.dim() != 3:
        raise ConfigError(
            f"{name}.{_first(experts)} has shape {tuple(fc1.shape)}, wanted a stack [experts, ...]"
        )
    num_local_experts, rows, hidden = fc1.shape
    if experts.is_transposed:
        rows, hidden = hidden, rows
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "intermediate": rows // 2 if experts.has_gate else rows,
        "num_experts": num_local_experts * num_ranks,
        "topk": topk,
        "num_ranks": num_ranks,
        "max_tokens": 1,
    }
    return MoEConfig(**sizes, **_read_activation(experts, sizes))


def read_weights(experts: nn.Module, dtype: torch.dtype) -> ExpertWeights:
    """The parameters of experts, where they are now.

    Args:
        experts: As in :func:`read_shape`.
        dtype: What to compute in; parameters of another are cast, with gradients in their own.
    """

    def read(name: str) -> tuple[torch.Tensor, ...]:
        return (getattr(experts, name).to(dtype),)

    first = _first(experts)
    return ExpertWeights(
        fc1=read(first),
        fc2=read("down_proj"),
        transposed=bool(experts.is_transposed),
        fc1_bias=read(f"{first}_bias") if experts.has_bias else (),
        fc2_bias=read("down_proj_bias") if experts.has_bias else (),
    )


def _first(experts: nn.Module) -> str:
    """The name of the first projection's parameter."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _read_activation(experts: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The fields of MoEConfig that say what becomes of the first projection's output.

    Raises:
        ConfigError: It is none of the known functions.
    """
    name = type(experts).__name__
    function = experts._apply_gate if experts.has_gate else experts.act_fn
    device = getattr(experts, _first(experts)).device
    generator = torch.Generator(device).manual_seed(1)
    width = sizes["intermediate"] * (2 if experts.has_gate else 1)
    forms = [(form, MoEConfig(**sizes, **form)) for form in _candidates(experts)]
    with _as_in_no_other_call(device):
        for scale in PROBE_SCALES:
            rows = torch.randn(
                PROBE_ROWS, width, dtype=torch.float64, device=device, generator=generator
            )
            rows.mul_(scale).requires_grad_()
            try:
                proof = _run(function, rows)
            except (RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{name}'s activation cannot be run forward and backward on {PROBE_ROWS} rows "
                    f"in float64: {error}"
                ) from error
            forms = [
                (form, config)
                for form, config in forms
                if all(map(is_close, proof, _run(lambda x, c=config: activate(x, c), rows)))
            ]
    if not forms:
        tried = ", ".join(activation.value for activation in Activation)
        raise ConfigError(
            f"{name} computes none of the known functions between its projections: one of {tried}, "
            "with or without a gate; SiLU and quick GELU with a gate also clamped, with an offset"
        )
    return forms[0][0]


@contextlib.contextmanager
def _as_in_no_other_call(device: torch.device) -> Iterator[None]:
    """Lets a function run forward and backward, whatever the call is in which that is asked for.

    The call may be a forward of evaluation, or one that is checkpointed: then hooks count what is
    saved, and find another number in the recomputation.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        yield


def _run(function: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A function's values and the gradient of their sum of squares."""
    out = function(rows)
    return out.detach(), torch.autograd.grad(out.square().sum(), rows)[0]


def _candidates(experts: Any) -> Iterator[dict[str, Any]]:
    """Every form that a module of its flags can have, those without a clamp first.

    Any positive number that the module holds may be its clamp.
    """
    gated = bool(experts.has_gate)
    base = {"gated": gated, "glu_interleave": int(gated and not experts.is_concatenated)}
    for activation in Activation:
        yield {**base, "activation": activation}
    if not gated:
        return
    numbers = {
        float(value)
        for value in vars(experts).values()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }
    clamps = (None, *sorted(numbers))
    for activation, clamp, offset in itertools.product(BOUNDED_ACTIVATIONS, clamps, _OFFSETS):
        yield {**base, "activation": activation, "clamp_value": clamp, "linear_offset": offset}
