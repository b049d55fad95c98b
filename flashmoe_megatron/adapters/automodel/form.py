"""Reads what routed experts of Automodel compute, and where their weights are.

``GroupedExperts`` holds the function between its projections, which some models replace by one of
their own. So the function itself is read, and not the configuration that it was made from.
"""

import functools
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flashmoe_megatron.adapters.held import Holding
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.weights import ExpertWeights

FUNCTION = "expert_activation_grouped"
"""The attribute of experts that is called between their projections."""

_STACKS = ("gate_and_up_projs", "down_projs")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
IGNORED = frozenset({*_STACKS, *_BIASES, "forward"})
"""Attributes that are read in each call, and the experts' forward, which makes that call."""

_KIMI = "nemo_automodel.components.models.kimi_k3.situ"
"""Not imported here: it belongs to one model, and a model of it has imported it."""

_ALPHA = 1.702
"""The factor within the sigmoid of quick GELU."""


def mesh_of(experts: Any) -> DeviceMesh | None:
    """Returns the expert-parallel mesh, ``None`` if this rank has all experts.

    Raises:
        ConfigError: The experts are sharded over more than that mesh while they compute.
    """
    stack = experts.gate_and_up_projs
    if not isinstance(stack, DTensor):
        return None
    mesh = stack.device_mesh
    if mesh.ndim != 1:
        raise ConfigError(
            f"the experts are sharded over a mesh of {mesh.mesh_dim_names} in their forward: "
            "wanted one of expert parallelism alone, as Automodel's parallelizer makes"
        )
    return mesh if mesh.size() > 1 else None


def holding_of(experts: Any) -> Holding:
    """Finds all that decides what experts compute but their parameters."""
    return Holding([experts], [getattr(experts, FUNCTION)])


def read_shape(experts: Any, topk: int, num_ranks: int) -> MoEConfig:
    """The shape of a layer whose experts these are; its ``max_tokens`` does not count.

    Raises:
        ConfigError: They compute something that no backend does; says what.
    """
    num_local, hidden, _ = local_part(experts.gate_and_up_projs).shape
    return MoEConfig(
        hidden=hidden,
        intermediate=local_part(experts.down_projs).shape[1],
        num_experts=num_local * num_ranks,
        topk=topk,
        num_ranks=num_ranks,
        max_tokens=1,
        **_read_form(getattr(experts, FUNCTION)),
    )


def read_weights(experts: Any, dtype: torch.dtype) -> ExpertWeights:
    """This rank's experts, in the dtype that they are computed in."""

    def part_of(name: str) -> tuple[torch.Tensor, ...]:
        parameter = getattr(experts, name, None)
        if parameter is None:
            return ()
        weight = local_part(parameter).to(dtype)
        return (weight if weight.stride(-1) == 1 else weight.contiguous(),)

    fc1, fc2 = map(part_of, _STACKS)
    fc1_bias, fc2_bias = map(part_of, _BIASES)
    return ExpertWeights(fc1=fc1, fc2=fc2, transposed=True, fc1_bias=fc1_bias, fc2_bias=fc2_bias)


def _read_form(function: Any) -> dict[str, Any]:
    """The fields of MoEConfig that say what becomes of the first projection's output.

    Raises:
        ConfigError: The function is none of Automodel's shared ones, or has other numbers.
    """
    from nemo_automodel.components.moe import experts as stock

    given: Mapping[str, Any] = {}
    inner = function
    if isinstance(function, functools.partial):
        inner, given = function.func, function.keywords
    name = getattr(inner, "__name__", type(inner).__name__)
    forms = _forms(stock, given)
    form = next((form for known, form in forms if known is not None and known is inner), None)
    if form is None:
        wanted = ", ".join(known.__name__ for known, _ in forms if known is not None)
        raise ConfigError(
            f"the experts call {name} between their projections: wanted one of {wanted}; for this "
            "model take dispatcher: torch"
        )
    alpha = given.get("alpha", _ALPHA)
    if alpha != _ALPHA:
        raise ConfigError(
            f"the experts call {name} with alpha={alpha}: wanted {_ALPHA}; for this model take "
            "dispatcher: torch"
        )
    return form


def _forms(stock: ModuleType, given: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Automodel's functions, and what each computes with such arguments."""
    clamp = given.get("limit", 7.0)
    gated = {"gated": True}
    quick = {"activation": Activation.QUICK_GELU, "linear_offset": 1.0, **gated}
    silu = {"activation": Activation.SILU, **gated}
    gelu = {"activation": Activation.GELU_TANH, **gated}
    kimi = sys.modules.get(_KIMI)
    softcaps = {"gate_softcap": given.get("beta"), "up_softcap": given.get("linear_beta")}
    return [
        (getattr(kimi, "_weighted_situ", None), {**silu, **softcaps}),
        *(
            (getattr(stock, name, None), form)
            for name, form in (
                ("weighted_bias_swiglu_impl", silu),
                ("swiglu_clamped_deepep", {**silu, "clamp_value": clamp}),
                # Without a limit this one has no clamp, and the other always has.
                ("swiglu_oai_deepep", {**quick, "clamp_value": clamp if clamp > 0 else None}),
                ("quick_geglu_deepep", {**quick, "clamp_value": clamp, "glu_interleave": 1}),
                ("weighted_bias_geglu_impl", gelu),
                ("relu2_deepep", {"activation": Activation.SQUARED_RELU, "gated": False}),
            )
        ),
    ]
