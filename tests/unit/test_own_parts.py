"""Orders and experts in place of the layer's: GShard's and Tutel's order, and a user's classes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.hooks import Expert, OneExpert, Order
from flashmoe_megatron.separate.orders import GShardOrder, TutelOrder
from flashmoe_megatron.weights import ExpertWeights, SplitWeights
from tests.distributed import RankPool
from tests.unit import cases, test_capacity_hooks, test_hosts
from tests.unit.separate import NAMES, Found, make, run

TOKENS = 21


def make_inputs(config: MoEConfig, dtype: torch.dtype = torch.float32) -> cases.Inputs:
    return cases.make_inputs(config, cases.skewed, [TOKENS] * config.num_ranks, dtype=dtype)


def run_with(name: str, config: MoEConfig, inputs: cases.Inputs, **parts: Any) -> Found:
    backend = make(name, config)
    for part, value in parts.items():
        setattr(backend.hooks, part, value)
    return run(backend, inputs)


@pytest.mark.parametrize("topk", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_both_orders_give_the_same(name: str, dtype: torch.dtype, topk: int) -> None:
    """Bits are equal where two numbers are summed, whose order does not matter."""
    config = cases.make_config(topk=topk)
    inputs = make_inputs(config, dtype)
    want = run_with(name, config, inputs)
    for order in (TutelOrder(), GShardOrder()):
        found = run_with(name, config, inputs, order=order)
        for each, value in want.items():
            if topk == 2 or isinstance(order, TutelOrder):
                assert torch.equal(found[each], value), (each, order)
            torch.testing.assert_close(found[each], value)


class Doubling(TutelOrder):
    """Tokens come twice as large into their rows."""

    def __init__(self) -> None:
        self.calls = {"order": 0, "restore": 0}

    def order(self, tokens: torch.Tensor, token_idx: torch.Tensor, out: torch.Tensor) -> None:
        self.calls["order"] += 1
        super().order(2 * tokens, token_idx, out)

    def restore(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.calls["restore"] += 1
        return super().restore(rows, place)


def test_an_order_of_ones_own_has_every_row_made_and_summed() -> None:
    config, doubled = cases.CONFIG, make_inputs(cases.CONFIG)
    doubled.x[0], doubled.grad_out[0] = 2 * doubled.x[0], 2 * doubled.grad_out[0]
    want, order = run_with("scheduled", config, doubled), Doubling()
    found = run_with("scheduled", config, make_inputs(config), order=order)
    assert all(torch.equal(found[each], value) for each, value in want.items())
    assert order.calls == {"order": 2 + 3, "restore": 2}


class SwiGlu(Expert):
    """What the layer computes by itself."""

    def __call__(self, rows: torch.Tensor, weights: OneExpert) -> torch.Tensor:
        gate, up = F.linear(rows, weights.fc1, weights.fc1_bias).chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, weights.fc2, weights.fc2_bias)


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_expert_of_ones_own_gets_the_layers_gradients(
    name: str, transposed: bool, keep: Any
) -> None:
    inputs = make_inputs(cases.CONFIG)
    want = run(make(name, cases.CONFIG), inputs, transposed=transposed)
    backend = make(name, cases.CONFIG, keep=keep)
    backend.hooks.expert = SwiGlu()
    for is_stacked in (True, False):
        found = run(backend, inputs, transposed=transposed, is_stacked=is_stacked)
        for each, value in want.items():
            torch.testing.assert_close(found[each], value, rtol=1e-4, atol=1e-5, msg=each)
    backend.hooks.expert = None
    assert torch.equal(run(backend, inputs, transposed=transposed)["out"], want["out"])


@pytest.mark.parametrize("is_split", [False, True])
def test_biases_and_projections_apart_get_gradients(is_split: bool) -> None:
    config, inputs = cases.CONFIG, make_inputs(cases.CONFIG)
    g = torch.Generator().manual_seed(3)
    fc1, fc2 = torch.stack(inputs.fc1), torch.stack(inputs.fc2)
    biases = [
        torch.randn(len(fc1), width, generator=g) for width in fc1.shape[1:2] + fc2.shape[1:2]
    ]

    def step(own: Expert | None) -> list[torch.Tensor]:
        backend = make("scheduled", config)
        backend.hooks.expert = own
        leaves = [fc1[:, : fc1.shape[1] // 2], fc1[:, fc1.shape[1] // 2 :], fc2]
        leaves = leaves if is_split else [fc1, fc2]
        leaves = [one.clone().requires_grad_() for one in (*leaves, *biases)]
        stacks = [(one,) for one in leaves]
        weights = (
            SplitWeights(*stacks[:3], fc1_bias=stacks[3], fc2_bias=stacks[4])
            if is_split
            else ExpertWeights(*stacks[:2], fc1_bias=stacks[2], fc2_bias=stacks[3])
        )
        x = inputs.x[0].clone().requires_grad_()
        out = moe_apply(backend, x, inputs.probs[0], inputs.routing_map[0], weights)
        out.backward(inputs.grad_out[0])
        grads = [one.grad for one in leaves]
        assert all(grad is not None for grad in grads)
        return [out.detach(), x.grad, *grads]  # type: ignore[list-item]

    for found, want in zip(step(SwiGlu()), step(None), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


class OneMatrix(Expert):
    """Leaves a weight out, whose gradient is zero."""

    def __call__(self, rows: torch.Tensor, weights: OneExpert) -> torch.Tensor:
        return torch.tanh(rows @ weights.fc2)


def test_an_expert_may_leave_a_weight_out() -> None:
    config, inputs = cases.make_config(topk=1), make_inputs(cases.make_config(topk=1))
    found = run_with("scheduled", config, inputs, expert=OneMatrix())
    expert = inputs.routing_map[0].int().argmax(1)
    x = inputs.x[0].clone().requires_grad_()
    fc2 = torch.stack(inputs.fc2).requires_grad_()
    rows = torch.tanh((x[:, None] @ fc2[expert])[:, 0])
    out = inputs.probs[0].gather(1, expert[:, None]) * rows
    out.backward(inputs.grad_out[0])
    for name, want in (("out", out.detach()), ("grad x", x.grad), ("grad fc2", fc2.grad)):
        torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-5)
    assert not found["grad fc1"].any()


def on_two_ranks(group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs) -> list[str]:
    rank, wrong = dist.get_rank(group), []
    want = run(make("scheduled", config, group), inputs, rank=rank)
    for part, value in (("order", GShardOrder()), ("expert", SwiGlu())):
        backend = make("scheduled", config, group)
        setattr(backend.hooks, part, value)
        found = run(backend, inputs, rank=rank)
        close = {each: torch.allclose(found[each], want[each], 1e-4, 1e-5) for each in want}
        wrong += [f"{part}: {each}" for each, is_close in close.items() if not is_close]
    with pytest.raises(ConfigError, match="an expert of your own: a call over hosts has"):
        test_hosts.make_backend(group, config, 2).hooks.expert = SwiGlu()
    return wrong


def test_parts_of_ones_own_on_several_ranks(ranks: RankPool) -> None:
    config = cases.make_config(num_ranks=2)
    assert ranks.run(on_two_ranks, config, make_inputs(config), num_ranks=2) == [[]] * 2


class Narrow(Expert):
    def __call__(self, rows: torch.Tensor, weights: OneExpert) -> torch.Tensor:
        return rows[:, :-1]


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = test_capacity_hooks.Kernel(monkeypatch)
    parts: list[tuple[str, Order | Expert]] = [("order", GShardOrder()), ("expert", SwiGlu())]
    for part, value in parts:
        with pytest.raises(ConfigError, match=f"an {part} of your own: the launch moves rows and"):
            setattr(kernel.backend.hooks, part, value)
        with pytest.raises(ConfigError, match=f"{part}='x' of hooks: wanted an object of a class"):
            setattr(kernel.backend.hooks, part, "x")
    inputs = make_inputs(cases.CONFIG)
    with pytest.raises(ShapeError, match=r"returned \(.*, 63\) of torch.float32: wanted \(.*, 64"):
        run_with("scheduled", cases.CONFIG, inputs, expert=Narrow())
    backend = make("scheduled", cases.CONFIG)
    backend.hooks.expert = SwiGlu()
    given = inputs.x[0], inputs.probs[0], inputs.routing_map[0]
    up, down = torch.zeros(64, 2, requires_grad=True), torch.zeros(2, 64)
    weights = AdaptedWeights(inputs.fc1, inputs.fc2, fc2_down=(down,), fc2_up=(up,))
    with pytest.raises(ConfigError, match="an expert of your own, SwiGlu: wanted hooks.expert=No"):
        moe_apply(backend, *given, weights)
    fp8 = cases.make_config(hidden=128, intermediate=128, experts="fp8")
    of_fp8 = make_inputs(fp8, torch.bfloat16)
    for part, value, words in (
        ("order", GShardOrder(), "GShardOrder with experts='fp8', whose rows are bytes: wanted"),
        ("expert", SwiGlu(), "SwiGlu, with experts='fp8': wanted experts='bf16'"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_with("scheduled", fp8, of_fp8, **{part: value})
