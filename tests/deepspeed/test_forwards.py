"""What experts' forwards would do besides computing is noticed, at attaching and later."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flashmoe_megatron.adapters.deepspeed.forwards import Watched
from flashmoe_megatron.errors import ConfigError
from tests.deepspeed.models import HIDDEN, TwoLinears


class Lora(nn.Module):
    """A linear layer and a correction, under the name that the linear layer had."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def make() -> nn.Module:
    experts = nn.Module()
    experts.deepspeed_experts = nn.ModuleList([TwoLinears() for _ in range(2)])
    return experts


def linear(experts: nn.Module) -> nn.Linear:
    return experts.deepspeed_experts[1].fc1


def own_forward(experts: nn.Module) -> None:
    linear(experts).forward = torch.relu


WATCHED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "forward": (
        lambda experts: linear(experts).register_forward_hook(print),
        r"experts\.deepspeed_experts\.1\.fc1 \(Linear\) has forward hooks, which would not be",
    ),
    "forward pre": (lambda e: linear(e).register_forward_pre_hook(print), "has forward hooks"),
    "backward": (lambda e: linear(e).register_full_backward_hook(print), "has backward hooks"),
    "backward pre": (
        lambda e: linear(e).register_full_backward_pre_hook(print),
        "has backward hooks",
    ),
    "container": (
        lambda experts: experts.register_forward_hook(print),
        r"experts \(Module\) has forward hooks",
    ),
    "own forward": (own_forward, "has a forward of its own"),
}


@pytest.mark.parametrize("name", WATCHED)
def test_hooks_and_replaced_forwards_are_refused(name: str) -> None:
    change, message = WATCHED[name]
    experts = make()
    watched = Watched(experts)
    change(experts)
    with pytest.raises(ConfigError, match=message):
        Watched(experts)
    with pytest.raises(ConfigError, match=message):
        watched.check_unchanged(experts)


@pytest.mark.parametrize(
    "package", ["runtime.zero.parameter_offload", "utils.nvtx", "profiling.flops_profiler"]
)
def test_hooks_of_deepspeed_are_not(package: str) -> None:
    def hook(*_: object) -> None:
        pass

    hook.__module__ = f"deepspeed.{package}"
    experts = make()
    watched = Watched(experts)
    linear(experts).register_forward_hook(hook)
    watched.check_unchanged(experts)
    linear(experts).register_forward_hook(print)
    with pytest.raises(ConfigError, match="has forward hooks"):
        watched.check_unchanged(experts)


def lora(experts: nn.Module) -> None:
    experts.deepspeed_experts[1].fc1 = Lora(linear(experts))


def add_dropout(experts: nn.Module) -> None:
    experts.deepspeed_experts[1].dropout = nn.Dropout()


def act(experts: nn.Module, function: Callable) -> None:
    experts.deepspeed_experts[1].function = function


class Scaled(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def patched(experts: nn.Module) -> None:
    type(experts.deepspeed_experts[0]).forward = lambda self, x: x


HELD: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "function": (lambda e: act(e, torch.relu), r"function of experts\.deepspeed_experts\.1 \(Sca"),
    "number": (lambda e: setattr(e.deepspeed_experts[0], "scale", 2.0), r"scale of experts.*\.0 "),
    "text": (
        lambda e: setattr(e.deepspeed_experts[0].act, "approximate", "tanh"),
        "approximate of",
    ),
    "tensor": (lambda e: e.deepspeed_experts[0].mask.fill_(2), "mask of"),
    "buffer": (lambda e: e.deepspeed_experts[0].register_buffer("late", torch.ones(1)), "late of"),
    "more": (lambda e: setattr(e.deepspeed_experts[1], "more", None), "more of"),
    "less": (lambda e: delattr(e.deepspeed_experts[1], "scale"), "scale of"),
    "function of the class": (patched, "is not what it was when flashmoe was attached"),
}


@pytest.mark.parametrize("name", HELD)
def test_what_modules_hold_is_noticed_later(name: str) -> None:
    change, message = HELD[name]
    kind = type("Scaled", (Scaled,), {"forward": Scaled.forward})
    experts = nn.Module()
    experts.deepspeed_experts = nn.ModuleList([kind(), kind()])
    for expert in experts.deepspeed_experts:
        expert.scale, expert.act, expert.mask = 1.0, nn.GELU(), torch.ones(1)
    watched = Watched(experts)
    for module in experts.modules():
        module.ds_grads_remaining = 3  # as ZeRO-3 does in every step
    experts.eval()
    experts.deepspeed_experts[0].scale = float("1")  # another object with the same value
    watched.check_unchanged(experts)
    change(experts)
    with pytest.raises(ConfigError, match=message):
        watched.check_unchanged(experts)
    asked = []
    watched.check_unchanged(experts, lambda: not asked.append("again"))
    watched.check_unchanged(experts)
    assert asked == ["again"]


CHANGED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "lora": (lora, r"experts\.deepspeed_experts\.1\.fc1 is a Lora, wanted a Linear, as when"),
    "an expert less": (lambda e: e.deepspeed_experts.pop(1), "experts have 5 modules, wanted 8"),
    "a module more": (add_dropout, "experts have 9 modules, wanted 8"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_other_modules_are_noticed_later(name: str) -> None:
    change, message = CHANGED[name]
    experts = make()
    watched = Watched(experts)
    watched.check_unchanged(experts)
    linear(experts).weight = nn.Parameter(torch.ones(1, HIDDEN))  # read anew in each call
    watched.check_unchanged(experts)
    change(experts)
    with pytest.raises(ConfigError, match=message):
        watched.check_unchanged(experts)
