"""Recognises what the experts of DeepSpeed's native MoE layer compute.

An expert is any module, so its function is found by its structure (two or three ``nn.Linear``) and
then put to the proof: the module runs forward and backward with random parameters on random rows
and has to give the values and gradients of one formula of ours, and no other. Nothing is concluded
from a name.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flashmoe_megatron.adapters.probe import (
    PROBE_ROWS,
    PROBE_SCALES,
    as_in_no_other_call,
    in_mode,
    is_close,
)
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.oracle import moe_reference
from flashmoe_megatron.weights import ExpertWeights, SplitWeights


@dataclass(frozen=True)
class ExpertForm:
    """Says what an expert computes, and by name which of its linear layers are which.

    ``fc1`` is the first one, or gate and up; with ``up_first`` the one layer has the up rows first.
    """

    hidden: int
    intermediate: int
    activation: Activation
    gated: bool
    fc1: tuple[str, ...]
    fc2: str
    up_first: bool = False

    @property
    def is_split(self) -> bool:
        """Tells that gate and up projections are not one parameter with the gate first."""
        return len(self.fc1) > 1 or self.up_first


def recognise(expert: nn.Module, hidden: int) -> ExpertForm:
    """Finds the one form that computes what an expert computes.

    The expert takes and returns ``[..., hidden]``; it is run, and its parameters stay as they are.

    Raises:
        ConfigError: There is none; says what the module has instead.
    """
    name = type(expert).__name__
    linears = {path: m for path, m in expert.named_modules() if type(m) is nn.Linear}
    known = {f"{path}.{kind}".lstrip(".") for path in linears for kind in ("weight", "bias")}
    for parameter, _ in expert.named_parameters():
        if parameter not in known:
            raise ConfigError(
                f"expert {name} has a parameter {parameter} outside of nn.Linear layers"
            )
    for buffer, _ in expert.named_buffers():
        raise ConfigError(f"expert {name} has a buffer {buffer}, which would not be read")
    if len(linears) not in (2, 3):
        raise ConfigError(f"expert {name} has {len(linears)} nn.Linear layers, wanted 2 or 3")
    device = next(iter(linears.values())).weight.device
    found = list(_candidates(linears, hidden))
    # Random numbers are drawn here; the training that follows must draw the same as without.
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with as_in_no_other_call(device), forked:
        copy = _Copy(linears, hidden)
        for scale, training in itertools.product(PROBE_SCALES, (True, False)):
            proof = _run(expert, copy, scale, training=training)
            found = [form for form in found if proof.accepts(form)]
    if len(found) != 1:
        tried = ", ".join(activation.value for activation in Activation)
        raise ConfigError(
            f"expert {name} computes none of the known functions: {len(linears)} linear layers, "
            f"with or without a gate, around one of {tried}, without dropout or clamps"
        )
    return found[0]


def read_weights(experts: Sequence[nn.Module], form: ExpertForm) -> ExpertWeights | SplitWeights:
    """The parameters of recognised local experts, or views of them, where they are now."""
    fc1 = [[_linear(expert, name) for name in form.fc1] for expert in experts]
    fc2 = [_linear(expert, form.fc2) for expert in experts]
    fc1_bias = tuple(bias for linears in fc1 for bias in _first_biases(linears, form))
    fc2_bias = tuple(linear.bias for linear in fc2 if linear.bias is not None)
    down = tuple(linear.weight for linear in fc2)
    if len(form.fc1) == 1 and not form.up_first:
        first = tuple(linear.weight for (linear,) in fc1)
        return ExpertWeights(fc1=first, fc2=down, fc1_bias=fc1_bias, fc2_bias=fc2_bias)
    halves = [_gate_and_up([linear.weight for linear in linears], form) for linears in fc1]
    return SplitWeights(
        gate=tuple(gate for gate, _ in halves),
        up=tuple(up for _, up in halves),
        down=down,
        fc1_bias=fc1_bias,
        fc2_bias=fc2_bias,
    )


def has_biases(expert: nn.Module, form: ExpertForm) -> tuple[bool, bool]:
    """Tells whether a recognised expert's first projection has a bias, and its second one."""
    fc1, fc2 = _linear(expert, form.fc1[0]), _linear(expert, form.fc2)
    return fc1.bias is not None, fc2.bias is not None


def _linear(expert: nn.Module, name: str) -> nn.Linear:
    linear = expert.get_submodule(name)
    assert isinstance(linear, nn.Linear)  # it was recognised as one, and is unchanged
    return linear


def _gate_and_up(tensors: Sequence[torch.Tensor], form: ExpertForm) -> tuple[torch.Tensor, ...]:
    if len(tensors) == 2:
        return tuple(tensors)
    first, second = tensors[0].chunk(2)
    return (second, first) if form.up_first else (first, second)


def _first_biases(linears: Sequence[nn.Linear], form: ExpertForm) -> Iterator[torch.Tensor]:
    """fc1's bias with the gate first, if there is one."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases:
        joined = form.up_first or len(biases) == 2
        yield torch.cat(_gate_and_up(biases, form)) if joined else biases[0]


def _candidates(linears: dict[str, nn.Linear], hidden: int) -> Iterator[ExpertForm]:
    """Every form that the layers' shapes admit."""
    for *fc1, fc2 in itertools.permutations(linears):
        intermediate = linears[fc2].in_features
        rows = sum(linears[name].out_features for name in fc1)
        fits = linears[fc2].out_features == hidden and all(
            linears[name].in_features == hidden for name in fc1
        )
        is_plain = len(fc1) == 1 and rows == intermediate
        is_gated = (
            rows == 2 * intermediate
            and len({(linears[name].out_features, linears[name].bias is None) for name in fc1}) == 1
        )
        if not fits or not (is_plain or is_gated):
            continue
        for activation in Activation:
            for up_first in (False, True) if is_gated and len(fc1) == 1 else (False,):
                yield ExpertForm(
                    hidden, intermediate, activation, is_gated, tuple(fc1), fc2, up_first
                )


class _Copy(nn.Module):
    """Random rows and linear layers in float64, of the shapes and under the names of an expert's.

    The layers are drawn so that rows around 1 become values around 1.
    """

    def __init__(self, linears: dict[str, nn.Linear], hidden: int) -> None:
        super().__init__()
        device = next(iter(linears.values())).weight.device
        generator = torch.Generator(device).manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.float64, device=device, generator=generator)

        self.linears: dict[str, nn.Linear] = {}
        self.values: dict[str, torch.Tensor] = {}
        for name, linear in linears.items():
            copy = self.linears[name] = nn.Linear(1, 1, bias=linear.bias is not None)
            copy.weight = nn.Parameter(draw(*linear.weight.shape) / linear.in_features**0.5)
            if linear.bias is not None:
                copy.bias = nn.Parameter(draw(*linear.bias.shape))
            self.values |= {f"{name}.{kind}": value for kind, value in copy.named_parameters()}
        self.x, self.grad_out = draw(PROBE_ROWS, hidden), draw(PROBE_ROWS, hidden)

    def get_submodule(self, target: str) -> nn.Module:
        return self.linears[target]


@dataclass(frozen=True)
class _Proof:
    """One run of the module with the parameters of a copy; gradients are of x and of these."""

    x: torch.Tensor
    copy: _Copy
    out: torch.Tensor
    grads: tuple[torch.Tensor | None, ...]

    def accepts(self, form: ExpertForm) -> bool:
        weights = read_weights([self.copy], form)
        if isinstance(weights, SplitWeights):
            weights = weights.join()
        ones = torch.ones(len(self.x), 1, device=self.x.device)
        out = moe_reference(
            self.x,
            ones,
            ones.bool(),
            weights.fc1,
            weights.fc2,
            activation=form.activation,
            gated=form.gated,
            fc1_bias=weights.fc1_bias,
            fc2_bias=weights.fc2_bias,
        )
        if not is_close(self.out, out):
            return False
        leaves = (self.x, *self.copy.values.values())
        grads = torch.autograd.grad(out, leaves, self.copy.grad_out)
        return all(
            got is not None and is_close(got, want)
            for got, want in zip(self.grads, grads, strict=True)
        )


class _ForwardBackward(nn.Module):
    """Runs an expert forward and backward in one call.

    An expert that recomputes itself needs the replaced parameters in both.
    """

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.expert = expert

    def forward(
        self, x: torch.Tensor, leaves: Sequence[torch.Tensor], grad_out: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        rows = x.view(1, 1, *x.shape)
        out = self.expert(rows)
        if not isinstance(out, torch.Tensor) or out.shape != rows.shape:
            got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise ConfigError(
                f"expert {type(self.expert).__name__} returns {got}, wanted one tensor shaped as "
                "its input"
            )
        out = out.view(x.shape).double()
        return out.detach(), torch.autograd.grad(out, leaves, grad_out, allow_unused=True)


def _run(expert: nn.Module, copy: _Copy, scale: float, *, training: bool) -> _Proof:
    x = (copy.x * scale).requires_grad_()
    values = {f"expert.{name}": value for name, value in copy.values.items()}
    try:
        with in_mode([*expert.modules()], training=training):
            out, grads = torch.func.functional_call(
                _ForwardBackward(expert), values, (x, (x, *values.values()), copy.grad_out)
            )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"expert {type(expert).__name__} cannot be run forward and backward on {PROBE_ROWS} "
            f"rows in float64: {error}"
        ) from error
    return _Proof(x, copy, out, grads)
