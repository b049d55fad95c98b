"""What becomes of a layer's own router takes part in its calls, as torch's modules do."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.call import NaNResult
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.layer import FlashMoELayer
from tests.distributed import RankPool, refusal
from tests.unit import cases

HIDDEN, EXPERTS, TOKENS = 64, 8, 20


def make_layer(group: dist.ProcessGroup | None = None, **options: Any) -> FlashMoELayer:
    """Always with the same parameters."""
    torch.manual_seed(3)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    options = {"device": "cpu", "dtype": torch.float32, "router": True, **options}
    return FlashMoELayer(cases.make_config(num_ranks=num_ranks), group=group, **options)


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=cases.generator(1)).to(dtype)


class Adapter(nn.Module):
    """The form of a low-rank adapter: a base layer and two matrices."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(HIDDEN, 4, bias=False)
        self.lora_B = nn.Linear(4, EXPERTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 2 * self.lora_B(self.lora_A(x))


class Cosines(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 5 * F.normalize(x, dim=1) @ F.normalize(self.weight, dim=1).t()


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def with_bias(router: nn.Linear) -> nn.Module:
    biased = nn.Linear(HIDDEN, EXPERTS)
    biased.weight = router.weight
    return biased


def with_hook(router: nn.Linear) -> nn.Module:
    router.register_forward_hook(lambda module, args, out: out + args[0][:, :EXPERTS])
    return router


def with_pre_hook(router: nn.Linear) -> nn.Module:
    router.register_forward_pre_hook(lambda module, args: (args[0] + args[0].flip(1),))
    return router


def with_backward_hook(router: nn.Linear) -> nn.Module:
    router.register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,))
    return router


def with_its_own_forward(router: nn.Linear) -> nn.Module:
    router.forward = lambda x: F.linear(x, -router.weight)
    return router


CHANGES: dict[str, tuple[Callable[[nn.Linear], nn.Module], str]] = {
    "adapter": (Adapter, r"is of class .*test_own_router\.Adapter, which a launch would leave out"),
    "subclass": (lambda router: Cosines(HIDDEN, EXPERTS, bias=False), "is of class .*Cosines"),
    "sequence": (
        lambda router: nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.Tanh())
        + nn.Sequential(nn.Linear(16, EXPERTS)),
        r"is of class torch\..*Sequential",
    ),
    "bias": (with_bias, "has a bias"),
    "forward hook": (with_hook, "has hooks"),
    "forward pre-hook": (with_pre_hook, "has hooks"),
    "backward hook": (with_backward_hook, "has hooks"),
    "its own forward": (with_its_own_forward, "has hooks or a forward of its own"),
    "pruned": (lambda router: prune.l1_unstructured(router, "weight", 0.5), "has hooks"),
}


def change(layer: FlashMoELayer, name: str) -> None:
    torch.manual_seed(5)
    layer.router = CHANGES[name][0](layer.router).to(layer.fc1.dtype)


def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top = logits.topk(2, dim=1)
    return top.indices, top.values.softmax(1)


def grads_of(layer: FlashMoELayer, out: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]))


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_router_is_called(name: str) -> None:
    layer, x = make_layer(), tokens().requires_grad_()
    before = layer(x)
    change(layer, name)
    want = layer(x, *choose(layer.router(x)))  # torch's own call of the module
    got = layer(x)
    assert torch.equal(got, want)
    assert name == "backward hook" or not torch.allclose(got, before, rtol=1e-2)
    for ours, theirs in zip(grads_of(layer, got, x), grads_of(layer, want, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", CHANGES)
def test_a_launch_takes_a_changed_router_for_no_other(name: str) -> None:
    layer = make_layer(fuse_router=True)
    layer(tokens())
    change(layer, name)
    with pytest.raises(ConfigError, match=f"{CHANGES[name][1]}.*wanted an nn.Linear without bias"):
        layer(tokens())


@pytest.mark.parametrize("fuse_router", [False, True])
def test_a_parametrized_router_is_a_router(fuse_router: bool) -> None:
    layer = make_layer(fuse_router=fuse_router)
    weight = layer.router.weight.detach().clone()
    parametrize.register_parametrization(layer.router, "weight", Doubled())
    want = layer(tokens(), *choose(tokens() @ (2 * weight).t()))
    torch.testing.assert_close(layer(tokens()), want)
    layer(tokens()).square().sum().backward()
    assert layer.router.parametrizations.weight.original.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_looking_at_a_router_changes_no_bits(dtype: torch.dtype) -> None:
    """A plain router's logits are float32 products, whatever the layer's dtype."""
    layer, x = make_layer(dtype=dtype), tokens(dtype)
    logits = F.linear(x.float(), layer.router.weight.float())
    want = layer(x)
    assert torch.equal(want, layer(x, *choose(logits)))
    seen: list[torch.Tensor] = []
    handle = layer.router.register_forward_hook(lambda module, args, out: seen.append(out))
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16)):
        with context:
            ids, weights = layer.route(x)
        assert torch.equal(seen.pop(), logits)
        assert all(map(torch.equal, (ids, weights), choose(logits)))
    assert torch.equal(layer(x), want)
    handle.remove()
    seen.clear()
    assert torch.equal(layer(x), want)
    assert not seen


@pytest.mark.parametrize("name", ["adapter", "sequence", "bias"])
def test_changed_routers_compute_in_float32(name: str) -> None:
    layer, x = make_layer(dtype=torch.bfloat16), tokens(torch.bfloat16)
    change(layer, name)
    wide = copy.deepcopy(layer.router).float()
    ids, weights = layer.route(x)
    want = choose(wide(x.float()))
    assert torch.equal(ids, want[0])
    torch.testing.assert_close(weights, want[1])


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook]
)
def test_hooks_on_all_modules_see_the_router(register: Callable[..., Any]) -> None:
    layer, fused = make_layer(), make_layer(fuse_router=True)
    want, seen = layer(tokens()), []
    handle = register(lambda module, *_: seen.append(module))
    try:
        assert torch.equal(layer(tokens()), want)
        with pytest.raises(ConfigError, match="is under hooks on all modules"):
            fused(tokens())
    finally:
        handle.remove()
    assert layer.router in seen
    torch.testing.assert_close(fused(tokens()), want)


class Wrong(nn.Module):
    def __init__(self, give: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: torch.Tensor) -> Any:
        return self.give(x)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda x: x, r"of class Wrong, gives torch.float32 of shape \(20, 64\).*shape \(20, 8\)"),
        (lambda x: x[:, :8].long(), r"gives torch.int64 of shape \(20, 8\)"),
        (lambda x: (x[:, :8], None), "the router's output is a tuple, wanted a torch.Tensor"),
    ],
)
def test_what_gives_no_logits_is_refused(give: Callable[..., Any], message: str) -> None:
    layer = make_layer()
    layer.router = Wrong(give)
    with pytest.raises(ShapeError, match=message):
        layer(tokens())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_call_a_changed_router_again(use_reentrant: bool) -> None:
    layer, calls = make_layer(), []
    change(layer, "adapter")
    layer.router.register_forward_hook(lambda *_: calls.append(None))
    for run in (layer, functools.partial(checkpoint, layer, use_reentrant=use_reentrant)):
        x = tokens().requires_grad_()
        layer.zero_grad()
        run(x).square().sum().backward()
        calls.append([one.grad.clone() for one in layer.parameters()])
    first, once, *again, second = calls
    assert (first, again) == (None, [None, None])
    assert all(map(torch.equal, once, second))


def hook_on_one_rank(group: dist.ProcessGroup, fuse_router: bool) -> str:
    layer, x = make_layer(group, fuse_router=fuse_router), tokens()
    want = layer(x)
    if dist.get_rank(group) == 1:
        change(layer, "forward hook")
    said = refusal(group, lambda _: layer(x))
    if dist.get_rank(group) == 1:
        layer.router._forward_hooks.clear()
    assert torch.equal(layer(x), want)
    return said


def test_a_hook_on_one_rank_alone(ranks: RankPool) -> None:
    assert ranks.run(hook_on_one_rank, False, num_ranks=2) == ["no error"] * 2
    for said in ranks.run(hook_on_one_rank, True, num_ranks=2):
        assert said.startswith("ConfigError: rank 1: fuse_router=True with a router that has hooks")


def test_a_call_without_a_result_spoils_all_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are NaN, those of what a router has become as well."""
    layer = make_layer()
    change(layer, "sequence")
    monkeypatch.setattr(layer.backend, "refuse", lambda reason: NaNResult(None, reason))
    monkeypatch.setattr(
        layer.backend, "backward", lambda grad, void, *_, **__: void.gradients(grad)
    )
    out = layer(tokens().t())
    assert out.isnan().all()
    out.sum().backward()
    assert all(one.grad.isnan().all() for one in layer.router.parameters())


def test_a_reset_draws_a_bias_and_no_other_module() -> None:
    layer = make_layer()
    change(layer, "bias")
    bias = layer.router.bias.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.router.bias, bias)
    assert layer.router.bias.abs().max() <= HIDDEN**-0.5
    change(layer, "adapter")
    with pytest.raises(ConfigError, match="draws an nn.Linear, but the router is of class Adapter"):
        layer.reset_parameters()


@pytest.mark.parametrize("name", ["fc2", "router.weight"])
def test_a_reset_draws_nothing_that_is_computed(name: str) -> None:
    layer = make_layer()
    module = layer.get_submodule(name.rpartition(".")[0])
    parametrize.register_parametrization(module, name.rpartition(".")[2], Doubled())
    with pytest.raises(ConfigError, match=rf"draws {name}, which is computed from other"):
        layer.reset_parameters()
