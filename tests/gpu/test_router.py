"""The router inside the launch: logits by tensor cores, the choice, and the layer behind it."""

import pytest
import torch

from flashmoe_megatron import RouterConfig, moe_apply, moe_router_forward
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import FlashMoEError, RoutingError
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.router import Router, open_router
from tests.gpu import steps
from tests.gpu.virtual import device, poisoned_empties
from tests.unit import cases

pytestmark = pytest.mark.gpu

ROUTERS = {
    "softmax": RouterConfig(),
    "pre_softmax": RouterConfig(pre_softmax=True, scaling_factor=2.5),
    "sigmoid": RouterConfig(score="sigmoid", scaling_factor=0.5),
}
SHAPES = [(8, 2, 64), (60, 6, 192), (64, 2, 2048), (130, 8, 128), (16, 16, 64), (8, 1, 64)]
"""Experts, of a token, hidden: with and without a rest of 8 and of 64 experts."""


def make(
    num_experts: int, topk: int, hidden: int, num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[MoEConfig, cases.Inputs, torch.Tensor]:
    config = MoEConfig(
        hidden=hidden,
        intermediate=64,
        num_experts=num_experts,
        topk=topk,
        activation=Activation.SILU,
        gated=True,
        num_ranks=1,
        max_tokens=1024,
    )
    inputs = steps.make_inputs(config, cases.uniform, [num_tokens], dtype=dtype)
    weight = torch.randn(num_experts, hidden, generator=cases.generator(4)) / hidden**0.5
    return config, inputs, weight.to(device(), dtype)


def check(found: Router, x: torch.Tensor, topk: int) -> None:
    """Compares with float64, and the choice with what torch makes of the launch's own logits."""
    want = x.double() @ found.weight.double().t()
    error = (found.logits - want).norm() / want.norm()
    assert error < 1e-5
    chosen = found.logits.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    routing_map = torch.zeros_like(found.routing_map).scatter(1, chosen, True)
    assert torch.equal(found.routing_map, routing_map)
    probs = found.config.probs_of(found.logits.double(), routing_map)
    torch.testing.assert_close(found.probs.double(), probs, rtol=1e-5, atol=1e-7)
    assert not found.probs[~routing_map].any()


@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 777])
@pytest.mark.parametrize("shape", SHAPES)
def test_router_and_layer(
    shape: tuple[int, int, int], num_tokens: int, name: str, is_bounded: bool
) -> None:
    """The router runs in the plan's launch, or in the layer's where rows have a bound."""
    config, inputs, weight = make(*shape, num_tokens)
    options = BackendOptions(row_bound=8.0 if is_bounded else None)
    backend = KernelBackend(config, None, device(), options=options)
    (weights,) = steps.weights_of(config, inputs)
    x = inputs.x[0]
    with poisoned_empties(), torch.no_grad():
        probs, _, router = open_router(config, x, weight, ROUTERS[name])
        out = moe_apply(backend, x, probs, router.routing_map, weights, router=router)
        check(router, x, config.topk)
        # The same launch without a router, given what the router has found.
        again = moe_apply(backend, x, router.probs.clone(), router.routing_map.clone(), weights)
    assert torch.equal(out, again)


@pytest.mark.parametrize("name", ROUTERS)
def test_float16(name: str) -> None:
    config, inputs, weight = make(64, 4, 256, 300, torch.float16)
    backend = KernelBackend(config, None, device())
    (weights,) = steps.weights_of(config, inputs)
    with torch.no_grad():
        probs, _, router = open_router(config, inputs.x[0], weight, ROUTERS[name])
        moe_apply(backend, inputs.x[0], probs, router.routing_map, weights, router=router)
    check(router, inputs.x[0], config.topk)


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients(name: str) -> None:
    """The fused router's gradients are those of a router in torch on the same logits."""
    config, inputs, weight = make(64, 4, 256, 300)
    backend = KernelBackend(config, None, device())
    (weights,) = steps.weights_of(config, inputs)
    x, weight = inputs.x[0].requires_grad_(), weight.requires_grad_()

    def grads(out: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (out.float() * inputs.grad_out[0]).sum() + probs.square().sum()
        return torch.autograd.grad(loss, (x, weight))

    found = moe_router_forward(x, weight, weights, backend=backend, router=ROUTERS[name])
    got = grads(found.out, found.probs)
    logits = x.float() @ weight.float().t()
    probs = ROUTERS[name].probs_of(logits, found.routing_map)
    out = moe_apply(backend, x, probs, found.routing_map, weights)
    for ours, theirs in zip(got, grads(out, probs), strict=True):
        error = (ours - theirs).float().norm() / theirs.float().norm()
        assert error < 1e-2  # bfloat16's rounding of x's gradient, which is summed of two parts


def test_the_same_bits_again() -> None:
    config, inputs, weight = make(64, 4, 256, 777)
    backend = KernelBackend(config, None, device())
    (weights,) = steps.weights_of(config, inputs)
    with torch.no_grad():
        first, *others = (
            moe_router_forward(inputs.x[0], weight, weights, backend=backend) for _ in range(4)
        )
    for other in others:
        assert all(map(torch.equal, first, other))


def test_equal_logits_and_one_that_is_nan() -> None:
    config, inputs, weight = make(40, 3, 64, 50)
    backend = KernelBackend(config, None, device())
    (weights,) = steps.weights_of(config, inputs)
    x = inputs.x[0]
    with torch.no_grad():
        found = moe_router_forward(x, torch.zeros_like(weight), weights, backend=backend)
        assert found.routing_map[:, :3].all()
        assert int(found.routing_map.sum()) == 150
        x[7, 5] = float("nan")
        refused = moe_router_forward(x, weight, weights, backend=backend)
        torch.cuda.synchronize()
        assert refused.logits[7].isnan().all()
        assert refused.out.isnan().all()
        x[7, 5] = 0
        with pytest.raises(RoutingError, match="token 7 of rank 0"):
            moe_router_forward(x, weight, weights, backend=backend)
        check_again = moe_router_forward(x, weight, weights, backend=backend)
    assert not check_again.out.isnan().any()


def test_a_graph_replays_it() -> None:
    config, inputs, weight = make(64, 2, 256, 200)
    backend = KernelBackend(config, None, device(), options=BackendOptions(row_bound=8.0))
    (weights,) = steps.weights_of(config, inputs)
    x = inputs.x[0].clone()
    with torch.no_grad():
        want = moe_router_forward(x, weight, weights, backend=backend)
        flipped = moe_router_forward(-x, weight, weights, backend=backend)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = moe_router_forward(x, weight, weights, backend=backend)
        for sign, wanted in ((1, want), (-1, flipped)):
            x.copy_(sign * inputs.x[0])
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, found, wanted))


def test_a_weight_that_the_kernel_cannot_read_is_refused() -> None:
    config, inputs, weight = make(8, 2, 64, 10)
    backend = KernelBackend(config, None, device())
    (weights,) = steps.weights_of(config, inputs)
    shifted = torch.empty(weight.numel() + 1, dtype=weight.dtype, device=device())[1:]
    with pytest.raises(FlashMoEError, match="16-byte aligned"):
        moe_router_forward(inputs.x[0], shifted.view(weight.shape), weights, backend=backend)
