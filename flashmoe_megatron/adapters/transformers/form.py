"""Reads what experts of transformers compute, and where their weights are.

``use_experts_implementation`` tells of a class whether all gate rows come before all up rows,
whether matrices are transposed, and whether there are a gate and biases. What becomes of the first
projection's output is code of the model's, so that is put to the proof: it runs forward and
backward on random rows, and has to give the values and gradients of one formula of ours.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from flashmoe_megatron.adapters.forwards import refuse_touched, with_all_below
from flashmoe_megatron.adapters.held import Holding
from flashmoe_megatron.adapters.probe import (
    PROBE_ROWS,
    PROBE_SCALES,
    as_in_no_other_call,
    in_mode,
    is_close,
)
from flashmoe_megatron.config import BOUNDED_ACTIVATIONS, Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.separate.steps import activate
from flashmoe_megatron.touched import find_touched
from flashmoe_megatron.weights import ExpertWeights

_OFFSETS = (0.0, 1.0)
"""Numbers that models add to the up rows."""

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
IGNORED = frozenset({*_WEIGHTS, *(f"{name}_bias" for name in _WEIGHTS), "forward"})
"""Attributes that are read in each call, and the experts' forward, which makes that call."""

_OF_PARAMETERS = "parametrizations"
"""torch's child of modules whose parameters are computed, as those with adapters are."""

NORM = "post_expert_norm"
"""The child that normalizes what an expert returns for a token. It is called as the module is."""


def has_norm(experts: nn.Module) -> bool:
    """Tells whether a norm follows each expert."""
    return bool(getattr(experts, f"has_{NORM}", False))


def _within(experts: nn.Module) -> list[nn.Module]:
    """The modules below that nothing calls: what they compute is read instead."""
    called = (_OF_PARAMETERS, NORM) if has_norm(experts) else (_OF_PARAMETERS,)
    return [
        module
        for name, child in experts._modules.items()
        if child is not None and name not in called
        for module in with_all_below(child)
    ]


def holding_of(experts: nn.Module) -> Holding:
    """Finds all that decides what experts compute but their parameters, and calls no module.

    Raises:
        ConfigError: A module of theirs has hooks or a ``forward`` of its own.
    """
    below = _within(experts)
    if touched := find_touched(below):
        refuse_touched(
            touched,
            experts,
            ": remove what put it there, or call the model's "
            'set_experts_implementation("grouped_mm"), which calls it',
        )
    others: list[object] = [getattr(type(experts), "_apply_gate", None)]
    for module in below:
        others += (type(module), type(module).forward)
    return Holding([experts, *below], others)


def read_shape(experts: nn.Module, topk: int, num_ranks: int) -> MoEConfig:
    """The shape of a layer whose experts these are; its ``max_tokens`` does not count.

    Args:
        experts: A module of a class that ``use_experts_implementation`` decorates, with its
            parameters in memory.
        topk: Most choices of one token.
        num_ranks: Ranks of the expert-parallel group, each with as many experts as this one.

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
    _check_sizes(experts, sizes)
    return MoEConfig(**sizes, **_read_activation(experts, sizes))


def read_weights(experts: nn.Module, dtype: torch.dtype | None = None) -> ExpertWeights:
    """The parameters of experts, where they are now.

    They are computed in ``dtype``, by default that of the second projection; parameters of another
    are cast, with gradients in their own. Those whose rows are not consecutive elements are copied.
    """
    down = experts.down_proj  # computed here, where adapters are applied to parameters
    assert isinstance(down, torch.Tensor)
    wanted = down.dtype if dtype is None else dtype

    def read(name: str) -> tuple[torch.Tensor, ...]:
        weight = (down if name == "down_proj" else getattr(experts, name)).to(wanted)
        return (weight if weight.stride(-1) == 1 else weight.contiguous(),)

    first = _first(experts)
    return ExpertWeights(
        fc1=read(first),
        fc2=read("down_proj"),
        transposed=bool(experts.is_transposed),
        fc1_bias=read(f"{first}_bias") if experts.has_bias else (),
        fc2_bias=read("down_proj_bias") if experts.has_bias else (),
    )


def _check_sizes(experts: nn.Module, sizes: dict[str, Any]) -> None:
    try:
        MoEConfig(**sizes, activation=Activation.SILU, gated=bool(experts.has_gate))
    except ConfigError as error:
        share = sizes["intermediate"]
        for name, value in vars(experts).items():
            is_whole = type(value) is int and value > share and value % share == 0
            if is_whole and name.startswith(("intermediate", "expert_dim")):
                raise ConfigError(
                    f"{error}; it is this rank's share of {name}={value}, which a tp_plan divides: "
                    "take fewer tensor-parallel ranks, or spread whole experts over ranks "
                    "(DistributedConfig(ep_size=...))"
                ) from error
        raise


def _first(experts: nn.Module) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _read_activation(experts: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The fields of MoEConfig that say what becomes of the first projection's output."""
    name = type(experts).__name__
    function = experts._apply_gate if experts.has_gate else experts.act_fn
    device = getattr(experts, _first(experts)).device
    generator = torch.Generator(device).manual_seed(1)
    width = sizes["intermediate"] * (2 if experts.has_gate else 1)
    forms = [(form, MoEConfig(**sizes, **form)) for form in _candidates(experts)]
    modules = with_all_below(experts)
    with as_in_no_other_call(device):
        for scale in PROBE_SCALES:
            rows = torch.randn(
                PROBE_ROWS, width, dtype=torch.float64, device=device, generator=generator
            )
            rows.mul_(scale).requires_grad_()
            try:
                proofs = [_run(function, rows, modules, training=mode) for mode in (True, False)]
            except (RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{name}'s activation cannot be run forward and backward on {PROBE_ROWS} rows "
                    f"in float64: {error}"
                ) from error
            forms = [(form, config) for form, config in forms if _computes(config, rows, proofs)]
    if not forms:
        tried = ", ".join(activation.value for activation in Activation)
        raise ConfigError(
            f"{name} computes none of the known functions between its projections: one of {tried}, "
            "with or without a gate; SiLU and quick GELU with a gate also clamped, with an offset; "
            "SiLU with a gate also softcapped; the same in training and evaluation"
        )
    return forms[0][0]


_Proof = tuple[torch.Tensor, torch.Tensor]
"""A function's values and the gradient of their sum of squares."""


def _run(
    function: Any, rows: torch.Tensor, modules: Sequence[nn.Module], *, training: bool
) -> _Proof:
    with in_mode(modules, training=training):
        out = function(rows)
        return out.detach(), torch.autograd.grad(out.square().sum(), rows)[0]


def _computes(config: MoEConfig, rows: torch.Tensor, proofs: Sequence[_Proof]) -> bool:
    out = activate(rows, config)
    want = out.detach(), torch.autograd.grad(out.square().sum(), rows)[0]
    return all(is_close(*pair) for proof in proofs for pair in zip(proof, want, strict=True))


def _numbers_of(modules: Sequence[nn.Module]) -> set[float]:
    """The positive numbers that are attributes of modules."""
    return {
        float(value)
        for module in modules
        for value in vars(module).values()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }


def _candidates(experts: Any) -> Iterator[dict[str, Any]]:
    """Every form that a module of its flags can have, those without a clamp first.

    Any positive number that the module holds may be its clamp, and any that a module below it holds
    a softcap.
    """
    gated = bool(experts.has_gate)
    base = {"gated": gated, "glu_interleave": int(gated and not experts.is_concatenated)}
    for activation in Activation:
        yield {**base, "activation": activation}
    if not gated:
        return
    clamps = (None, *sorted(_numbers_of([experts])))
    for activation, clamp, offset in itertools.product(BOUNDED_ACTIVATIONS, clamps, _OFFSETS):
        yield {**base, "activation": activation, "clamp_value": clamp, "linear_offset": offset}
    caps = (None, *sorted(_numbers_of(_within(experts))))
    for gate, up in itertools.product(caps, caps):
        if gate or up:
            silu = {**base, "activation": Activation.SILU}
            yield {**silu, "gate_softcap": gate, "up_softcap": up}
