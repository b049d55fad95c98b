"""The router in the layer's launch: its choice, its probabilities and its gradients."""

import dataclasses
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import MoEConfig, RouterConfig, moe_router_forward
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import NaNResult
from flashmoe_megatron.config import KEEPS
from flashmoe_megatron.errors import ConfigError, FlashMoEError, ShapeError
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.router import open_router
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights, SplitWeights
from tests.distributed import RankPool
from tests.unit import cases

ROUTERS = {
    "softmax": RouterConfig(),
    "pre_softmax": RouterConfig(pre_softmax=True, scaling_factor=2.5),
    "sigmoid": RouterConfig(score="sigmoid", scaling_factor=0.5),
}
TOKENS = 30


def leaves(config: MoEConfig, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor, ExpertWeights]:
    """Tokens, a router's weight and the experts of a rank, all in need of a gradient."""
    inputs = cases.make_inputs(
        config, cases.uniform, [TOKENS] * config.num_ranks, dtype=torch.float64
    )
    weight = torch.randn(
        config.num_experts, config.hidden, generator=cases.generator(9), dtype=torch.float64
    )
    own = slice(rank * config.num_local_experts, (rank + 1) * config.num_local_experts)
    experts = [tuple(t.requires_grad_() for t in kind[own]) for kind in (inputs.fc1, inputs.fc2)]
    return inputs.x[rank].requires_grad_(), (weight / 8).requires_grad_(), ExpertWeights(*experts)


def unfused(
    x: torch.Tensor, weight: torch.Tensor, topk: int, router: RouterConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A router token by token, as its formulas stand in Megatron's documentation."""
    logits = x @ weight.t()
    rows, routing_map = [], torch.zeros(logits.shape, dtype=torch.bool)
    for token, row in enumerate(logits):
        values, chosen = row.topk(topk)
        if router.score == "sigmoid":
            values = 1 / (1 + torch.exp(-values))
            values = values / values.sum() if topk > 1 else values
        elif router.pre_softmax:
            values = torch.exp(values) / torch.exp(row).sum()
        else:
            values = torch.exp(values) / torch.exp(values).sum()
        rows.append(torch.zeros_like(row).scatter(0, chosen, values * router.scaling_factor))
        routing_map[token, chosen] = True
    return torch.stack(rows), logits, routing_map


def auxiliary(probs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Losses on both of what the router returns, as of balance and of z."""
    return probs.square().sum() + 0.1 * logits.logsumexp(1).square().sum()


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_as_a_router_in_front(name: str, topk: int, keep: str) -> None:
    config = cases.make_config(topk=topk)
    backend = ReferenceBackend(config)
    backend.keep = keep
    x, weight, experts = leaves(config)
    found = moe_router_forward(x, weight, experts, backend=backend, router=ROUTERS[name])
    (found.out.square().sum() + auxiliary(found.probs, found.logits)).backward()
    got = [t.grad for t in (x, weight, *experts.fc1, *experts.fc2)]

    x, weight, experts = leaves(config)
    probs, logits, routing_map = unfused(x, weight, topk, ROUTERS[name])
    out = moe_apply(ReferenceBackend(config), x, probs, routing_map, experts)
    (out.square().sum() + auxiliary(probs, logits)).backward()
    assert torch.equal(found.routing_map, routing_map)
    for ours, theirs in zip(
        (found.out, found.probs, found.logits), (out, probs, logits), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    for ours, tensor in zip(got, (x, weight, *experts.fc1, *experts.fc2), strict=True):
        torch.testing.assert_close(ours, tensor.grad)


def gated_rank(group: dist.ProcessGroup) -> list[torch.Tensor]:
    config = cases.make_config(num_ranks=2)
    x, weight, experts = leaves(config, dist.get_rank(group))
    found = moe_router_forward(x, weight, experts, backend=ReferenceBackend(config, group))
    found.out.square().sum().backward()
    return [found.out.detach(), x.grad, weight.grad]


def test_ranks_choose_for_themselves(ranks: RankPool) -> None:
    alone = cases.make_config()
    for rank, (out, grad_x, grad_weight) in enumerate(ranks.run(gated_rank, num_ranks=2)):
        config = cases.make_config(num_ranks=2)
        x, weight, _ = leaves(config, rank)
        experts = ExpertWeights(
            *(
                tuple(t for r in range(2) for t in getattr(leaves(config, r)[2], kind))
                for kind in ("fc1", "fc2")
            )
        )
        found = moe_router_forward(x, weight, experts, backend=ReferenceBackend(alone))
        found.out.square().sum().backward()
        torch.testing.assert_close(out, found.out)
        torch.testing.assert_close(grad_x, x.grad)
        torch.testing.assert_close(grad_weight, weight.grad)


def test_of_equal_logits_the_first_is_chosen() -> None:
    config = cases.make_config(topk=2)
    x, weight, experts = leaves(config)
    weight = torch.zeros_like(weight)
    found = moe_router_forward(x, weight, experts, backend=ReferenceBackend(config))
    assert found.routing_map[:, :2].all()
    assert not found.routing_map[:, 2:].any()


def test_without_tokens_and_without_grad() -> None:
    config = cases.make_config()
    x, weight, experts = leaves(config)
    found = moe_router_forward(x[:0], weight, experts, backend=ReferenceBackend(config))
    found.out.sum().backward()
    assert not weight.grad.any()
    with torch.no_grad():
        again = moe_router_forward(x, weight, experts, backend=ReferenceBackend(config))
    assert not again.out.requires_grad
    assert torch.equal(again.routing_map.sum(1), torch.full((TOKENS,), config.topk))


def make_layer(*, fuse_router: bool, **options: Any) -> FlashMoELayer:
    """Always with the same parameters."""
    torch.manual_seed(1)
    given = {"router": True, "device": "cpu", "dtype": torch.float32, **options}
    return FlashMoELayer(cases.CONFIG, fuse_router=fuse_router, **given)


def test_layer_with_a_fused_router(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain = make_layer(fuse_router=True), make_layer(fuse_router=False)
    monkeypatch.setattr(fused, "route", lambda _: pytest.fail("routed in front of the launch"))
    x = torch.randn(4, 5, cases.CONFIG.hidden)
    for layer in (fused, plain):
        layer(x).square().sum().backward()
    torch.testing.assert_close(fused(x), plain(x))
    for (name, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score": "relu"}, "score='relu': wanted one of softmax, sigmoid"),
        ({"pre_softmax": 1}, "pre_softmax=1: wanted True or False"),
        ({"pre_softmax": True, "score": "sigmoid"}, "wanted 'softmax'"),
        ({"scaling_factor": float("inf")}, "scaling_factor=inf: wanted a finite number"),
        ({"scaling_factor": 10**400}, "scaling_factor=1000.*: wanted a finite number of float32"),
        ({"scaling_factor": "2"}, "scaling_factor='2'"),
    ],
)
def test_routers_without_meaning_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RouterConfig(**options)


def test_a_factor_may_be_an_integer_that_torch_has_no_type_for() -> None:
    router, all_chosen = RouterConfig(scaling_factor=2**70), torch.ones(1, 4, dtype=torch.bool)
    assert (router.probs_of(torch.zeros(1, 4), all_chosen) == 2.0**68).all()


def test_a_weight_of_another_layer_is_refused() -> None:
    config = cases.make_config()
    x, weight, experts = leaves(config)
    backend = ReferenceBackend(config)
    for bad, words in (
        (weight[1:], r"router weight has shape \(7, 64\), wanted \[8, 64\]"),
        (weight.float(), "router weight is torch.float32, wanted torch.float64, as x"),
        (weight.t().contiguous().t(), "router weight has strides"),
    ):
        with pytest.raises(ShapeError, match=words):
            moe_router_forward(x, bad, experts, backend=backend)
    with pytest.raises(ConfigError, match="fuse_router=True without a router"):
        FlashMoELayer(config, fuse_router=True, device="cpu")


def test_a_router_ends_with_its_graph() -> None:
    """The node holds the router's tensors, which must not hold the node."""
    config = cases.make_config()
    x, weight, experts = leaves(config)
    probs, logits, router = open_router(config, x, weight, RouterConfig())
    out = moe_apply(ReferenceBackend(config), x, probs, router.routing_map, experts, router=router)
    held = weakref.ref(router)
    gc.disable()
    try:
        del router, probs, logits
        assert held() is not None
        del out
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["logits", "routing_map"])
def test_a_change_of_what_the_gradient_is_computed_from_is_refused(name: str) -> None:
    config = cases.make_config()
    x, weight, experts = leaves(config)
    found = moe_router_forward(x, weight, experts, backend=ReferenceBackend(config))
    changed = getattr(found, name)
    with torch.no_grad():
        changed.copy_(changed.clone())
    with pytest.raises(FlashMoEError, match="changed in place.*change a clone"):
        (found.out.sum() + found.probs.square().sum()).backward()


def test_a_change_of_a_clone_or_of_probabilities_is_not() -> None:
    config = cases.make_config()
    x, weight, experts = leaves(config)
    found = moe_router_forward(x, weight, experts, backend=ReferenceBackend(config))
    found.routing_map.clone()[0] = False
    want = torch.autograd.grad(found.probs.square().sum(), weight, retain_graph=True)[0]
    found.probs.mul_(2)
    got = torch.autograd.grad(found.probs.square().sum(), weight)[0]
    torch.testing.assert_close(got, 4 * want)


def test_a_second_derivative_is_refused() -> None:
    config = cases.make_config()
    x, weight, experts = leaves(config)
    found = moe_router_forward(x, weight, experts, backend=ReferenceBackend(config))
    with pytest.raises(FlashMoEError, match="router.*differentiated only once"):
        torch.autograd.grad(found.probs.square().sum(), x, create_graph=True)


def test_autocast_leaves_the_router_in_float32() -> None:
    layer = make_layer(fuse_router=False)
    x = torch.randn(50, cases.CONFIG.hidden)
    ids, weights = layer.route(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.route(x)[1], weights)
        assert torch.equal(layer(x), layer(x, ids, weights))


def test_a_call_that_ends_without_a_result_has_chosen_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused when the router's tensors are made, and nobody has filled them in."""
    config = dataclasses.replace(cases.CONFIG, gated=True, glu_interleave=32)
    backend = ReferenceBackend(config)
    monkeypatch.setattr(backend, "refuse", lambda reason: NaNResult(None, reason))
    monkeypatch.setattr(torch, "empty", functools.partial(torch.full, fill_value=1.0))
    width, hidden = config.intermediate, config.hidden
    gate, up, down = (
        [torch.ones(shape)] * config.num_experts
        for shape in ((width, hidden), (width, hidden), (hidden, width))
    )
    found = moe_router_forward(
        torch.ones(3, hidden),
        torch.ones(config.num_experts, hidden),
        SplitWeights(gate, up, down),
        backend=backend,
    )
    assert all(bool(one.isnan().all()) for one in (found.out, found.probs, found.logits))
    assert not found.routing_map.any()


@pytest.mark.parametrize(
    "options", [{}, {"keep": "inputs"}, {"backend": "scheduled"}], ids=lambda given: str(given)
)
def test_autocast_leaves_the_gradients_in_float32(options: dict[str, Any]) -> None:
    """A backward within it would multiply in bfloat16, the router's as well as the experts'."""
    layer = make_layer(fuse_router=True, **options)
    x = torch.randn(50, cases.CONFIG.hidden, requires_grad=True)
    inputs, loss = [x, *layer.parameters()], layer(x).square().sum()
    want = torch.autograd.grad(loss, inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(loss, inputs)
    assert all(map(torch.equal, got, want))


def test_a_compiler_leaves_the_router_alone() -> None:
    """A compiler would read the router's tensors as they are before the layer fills them in."""
    from torch._dynamo import config as compiler

    layer = make_layer(fuse_router=True)
    x = torch.randn(16, cases.CONFIG.hidden, requires_grad=True)
    want = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    with compiler.patch(trace_autograd_ops=True):
        compiled = torch.compile(layer, backend="aot_eager")
        got = torch.autograd.grad(compiled(x).square().sum(), [x, *layer.parameters()])
    assert all(map(torch.equal, got, want))
