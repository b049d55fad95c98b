"""What experts compute is recognised by structure and proof, and everything else refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.adapters.deepspeed.experts import has_biases, read_weights, recognise
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.oracle import assert_close, moe_reference
from flashmoe_megatron.weights import SplitWeights
from tests.deepspeed.models import EXPERTS, HIDDEN, WIDTH, Gated, TwoLinears, sequential
from tests.operators import Operators

WANTED = {
    "gelu": (Activation.GELU, False, True),
    "gelu_tanh_no_bias": (Activation.GELU_TANH, False, False),
    "relu": (Activation.RELU, False, True),
    "silu_no_bias": (Activation.SILU, False, False),
    "squared_relu": (Activation.SQUARED_RELU, False, False),
    "swiglu": (Activation.SILU, True, False),
    "swiglu_bias": (Activation.SILU, True, True),
    "geglu": (Activation.GELU, True, False),
    "quick_geglu": (Activation.QUICK_GELU, True, False),
    "swiglu_in_one": (Activation.SILU, True, False),
    "swiglu_up_first": (Activation.SILU, True, True),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_recognised(name: str) -> None:
    torch.manual_seed(2)
    expert = EXPERTS[name]()
    before = {key: value.clone() for key, value in expert.state_dict().items()}
    state = torch.get_rng_state()
    form = recognise(expert, HIDDEN)
    activation, gated, biased = WANTED[name]
    assert (form.activation, form.gated) == (activation, gated)
    assert has_biases(expert, form) == (biased, biased)
    assert (form.hidden, form.intermediate) == (HIDDEN, WIDTH)
    assert torch.equal(torch.get_rng_state(), state), "training would draw other numbers"
    for key, value in expert.state_dict().items():
        assert torch.equal(value, before[key])
    assert expert.training

    weights = read_weights([expert], form)
    joined = weights.join() if isinstance(weights, SplitWeights) else weights
    x = torch.randn(9, HIDDEN)
    ones = torch.ones(9, 1)
    out = moe_reference(
        x,
        ones,
        ones.bool(),
        joined.fc1,
        joined.fc2,
        activation=activation,
        gated=gated,
        fc1_bias=joined.fc1_bias,
        fc2_bias=joined.fc2_bias,
    )
    assert_close(name, expert(x), out, rel_l2=1e-5)


def test_square_layers_are_told_apart_by_the_proof() -> None:
    class Backwards(nn.Module):
        """Its layers are registered in the reverse order of use."""

        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(HIDDEN, HIDDEN)
            self.first = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(F.relu(self.first(x)))

    form = recognise(Backwards(), HIDDEN)
    assert (form.fc1, form.fc2) == (("first",), "second")


def test_experts_with_zero_weights_are_recognised() -> None:
    """A last layer that starts at zero says nothing about the function; the proof draws its own."""
    expert = TwoLinears()
    nn.init.zeros_(expert.fc2.weight)
    assert recognise(expert, HIDDEN).activation is Activation.GELU


def test_experts_that_recompute_themselves_are_recognised() -> None:
    class Recomputed(TwoLinears):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    assert recognise(Recomputed(), HIDDEN).activation is Activation.GELU


def test_the_call_in_which_experts_are_recognised_does_not_matter() -> None:
    dtypes: set[torch.dtype] = set()

    def note(value: torch.Tensor) -> torch.Tensor:
        dtypes.add(value.dtype)
        return value

    with (
        Operators() as operators,
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(note, note),
    ):
        assert recognise(TwoLinears(), HIDDEN).activation is Activation.GELU
    assert not dtypes
    assert torch.ops.aten.gelu.default not in operators.seen


class Tuple(TwoLinears):
    def forward(self, x: torch.Tensor):
        return super().forward(x), None


class Scaled(nn.Module):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = TwoLinears()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) * self.scale


class FunctionalDropout(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Residual(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class MixesTokens(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.cumsum(-2))


class HalfBiased(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(HIDDEN, WIDTH, bias=True)


class ClampedGated(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).clamp(max=7), self.up_proj(x).clamp(-7, 7)
        return self.down_proj(F.silu(gate) * up)


class ClampedOutput(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-50, 50)


class Detached(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


class FrozenWithin(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(F.linear(x, self.fc1.weight.detach(), self.fc1.bias)))


class ScaledGradient(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * 0.1 + (out * 0.9).detach()


class StraightThrough(torch.autograd.Function):
    """ReLU with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


class ScaledInEvaluation(TwoLinears):
    """What a dropout without a rescaled training does: only evaluation shows that it is there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if self.training else out * 0.9


class WithoutGradient(TwoLinears):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Buffered(TwoLinears):
    """Computes what it would without its buffer, today."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def lora_like() -> nn.Module:
    class Lora(nn.Linear):
        """A subclass may compute anything."""

    return nn.Sequential(Lora(HIDDEN, WIDTH), nn.GELU(), Lora(WIDTH, HIDDEN))


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no activation": (lambda: sequential(), "none of the known functions: 2 linear layers"),
    "tanh": (lambda: TwoLinears(torch.tanh), "around one of silu, gelu, gelu_tanh, relu"),
    "leaky relu": (lambda: sequential(nn.LeakyReLU()), "none of the known"),
    "dropout": (lambda: sequential(nn.GELU(), nn.Dropout(0.1)), "none of the known.*dropout"),
    "functional dropout": (FunctionalDropout, "FunctionalDropout computes none"),
    "residual": (Residual, "none of the known"),
    "mixes tokens": (MixesTokens, "none of the known"),
    "half biased": (HalfBiased, "none of the known functions: 3 linear layers"),
    "one layer": (
        lambda: nn.Linear(HIDDEN, HIDDEN),
        "Linear has 1 nn.Linear layers, wanted 2 or 3",
    ),
    "a parameter": (Scaled, "Scaled has a parameter scale outside of nn.Linear"),
    "layer norm": (
        lambda: sequential(nn.LayerNorm(WIDTH), nn.GELU()),
        r"has a parameter 1\.weight outside",
    ),
    "a tuple": (Tuple, "Tuple returns tuple, wanted one tensor"),
    "relu6": (lambda: sequential(nn.ReLU6()), "none of the known.*clamps"),
    "hardtanh": (lambda: sequential(nn.Hardtanh(-20, 20), nn.GELU()), "none of the known"),
    "clamped gated": (ClampedGated, "ClampedGated computes none of the known"),
    "clamped output": (ClampedOutput, "ClampedOutput computes none of the known"),
    "detached": (Detached, "Detached computes none of the known"),
    "frozen within": (FrozenWithin, "FrozenWithin computes none of the known"),
    "scaled gradient": (ScaledGradient, "ScaledGradient computes none of the known"),
    "other in evaluation": (ScaledInEvaluation, "ScaledInEvaluation computes none of the known"),
    "own backward": (lambda: TwoLinears(StraightThrough.apply), "none of the known"),
    "no gradient": (WithoutGradient, "cannot be run forward and backward on 8 rows"),
    "a buffer": (Buffered, "Buffered has a buffer scale"),
    "subclass of Linear": (lora_like, r"has a parameter 0\.weight outside of nn.Linear"),
    "other width": (lambda: nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), "cannot be run"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_experts_are_refused(name: str) -> None:
    make, message = UNKNOWN[name]
    expert = make()
    with pytest.raises(ConfigError, match=message):
        recognise(expert, HIDDEN)
    assert expert.training
