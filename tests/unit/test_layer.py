"""The layer as a module of plain PyTorch."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parametrize, prune

from flashmoe_megatron import layer as layer_module
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError, FlashMoEError, RoutingError, ShapeError
from flashmoe_megatron.layer import FlashMoELayer, moe_forward
from flashmoe_megatron.oracle import assert_close, moe_reference
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool
from tests.unit import cases


def make_layer(**kwargs) -> FlashMoELayer:
    torch.manual_seed(3)
    kwargs.setdefault("dtype", torch.float32)
    return FlashMoELayer(kwargs.pop("config", cases.CONFIG), device="cpu", **kwargs)


def make_choice(num_tokens: int, *, dtype=torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    g = cases.generator(5)
    topk_idx = torch.rand(num_tokens, 8, generator=g).topk(2, dim=1).indices.to(dtype)
    return topk_idx, torch.rand(num_tokens, 2, generator=g)


def oracle(layer: FlashMoELayer, x, topk_idx, topk_weight) -> torch.Tensor:
    """Spreads the choices with a loop over tokens."""
    probs = torch.zeros(len(x), 8)
    routing_map = torch.zeros(len(x), 8, dtype=torch.bool)
    for token, (ids, values) in enumerate(zip(topk_idx.tolist(), topk_weight, strict=True)):
        for expert, value in zip(ids, values, strict=True):
            if expert >= 0:
                probs[token, expert] = value
                routing_map[token, expert] = True
    return moe_reference(
        x, probs, routing_map, layer.fc1, layer.fc2, activation=Activation.SILU, gated=True
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_choices(dtype: torch.dtype):
    layer = make_layer()
    x = torch.randn(20, 64)
    topk_idx, topk_weight = make_choice(20, dtype=dtype)
    out = layer(x, topk_idx, topk_weight)
    assert_close("out", out, oracle(layer, x, topk_idx, topk_weight), rel_l2=1e-5)


@pytest.mark.parametrize("backend", ["reference", "scheduled"])
def test_gate_and_up_may_be_parameters_of_their_own(backend: str):
    split = make_layer(backend=backend, split=True)
    whole = make_layer(backend=backend)
    assert [name for name, _ in split.named_parameters()] == ["fc1_gate", "fc1_up", "fc2"]
    with torch.no_grad():
        whole.fc1.copy_(torch.cat([split.fc1_gate, split.fc1_up], dim=1))
        whole.fc2.copy_(split.fc2)
    x = torch.randn(20, 64)
    results = []
    for layer in (split, whole):
        tokens = x.clone().requires_grad_()
        out = layer(tokens, *make_choice(20))
        out.square().sum().backward()
        fc1 = layer.fc1.grad if layer is whole else None
        if fc1 is None:
            fc1 = torch.cat([layer.fc1_gate.grad, layer.fc1_up.grad], dim=1)
        results.append((out, tokens.grad, fc1, layer.fc2.grad))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert make_layer(backend=backend, split=True).load_state_dict(split.state_dict())


@pytest.mark.parametrize("form", [{"gated": False}, {"glu_interleave": 32}], ids=str)
def test_experts_that_cannot_be_split_are_refused(form: dict[str, Any]):
    with pytest.raises(ConfigError, match="split=True with gated=.*: wanted True and 0"):
        make_layer(config=cases.make_config(**form), split=True)


def test_skipped_choices():
    layer = make_layer()
    x = torch.randn(20, 64)
    topk_idx, topk_weight = make_choice(20)
    topk_idx[::2, 0] = -1
    topk_idx[3] = -1
    topk_weight[::4, 0] = float("nan")  # the weight of a skipped choice is never read
    topk_weight.requires_grad_()
    out = layer(x, topk_idx, topk_weight)
    assert_close("out", out, oracle(layer, x, topk_idx, topk_weight.nan_to_num()), rel_l2=1e-5)
    assert not out[3].any()
    out.sum().backward()
    assert not topk_weight.grad[::2, 0].any()
    assert topk_weight.grad[1].all()


def test_gradients_reach_weights_and_choices():
    layer = make_layer()
    x = torch.randn(20, 64, requires_grad=True)
    topk_idx, topk_weight = make_choice(20)
    topk_weight.requires_grad_()
    leaves = (x, topk_weight, *layer.parameters())
    grad_out = torch.randn(20, 64)
    got = torch.autograd.grad(layer(x, topk_idx, topk_weight), leaves, grad_out)
    out = oracle(layer, x, topk_idx, topk_weight)
    want = torch.autograd.grad(out, leaves, grad_out.double())
    for index, (grad, expected) in enumerate(zip(got, want, strict=True)):
        assert_close(f"gradient {index}", grad, expected, rel_l2=1e-5)


class Scaled(torch.nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return self.scale * weight


ADAPT = {
    "parametrized": lambda layer, name: parametrize.register_parametrization(layer, name, Scaled()),
    "pruned": lambda layer, name: prune.l1_unstructured(layer, name, 0.5),
}


@pytest.mark.parametrize("names", [["fc1"], ["fc2"], ["fc2_bias"], ["fc1", "fc2"]], ids=str)
@pytest.mark.parametrize("how", ADAPT)
def test_experts_may_be_pruned_or_parametrized(how: str, names: list[str]):
    layer, plain = make_layer(bias=True), make_layer(bias=True)
    for name in names:
        ADAPT[how](layer, name)
    x, choice = torch.randn(20, 64), make_choice(20)
    layer(x, *choice)  # pruning computes its experts in a layer's hooks
    weights = {name: getattr(layer, name) for name in ("fc1", "fc2", "fc1_bias", "fc2_bias")}
    leaves = list(layer.parameters())
    out = torch.func.functional_call(plain, weights, (x, *choice))
    want = torch.autograd.grad(out.square().sum(), leaves)
    for _ in range(2):  # the second time after a step of an optimizer, say
        layer.zero_grad()
        out = layer(x, *choice)
        out.square().sum().backward()
        for got, expected in zip((one.grad for one in leaves), want, strict=True):
            torch.testing.assert_close(got, expected)
    assert str(layer.fc2.dtype) in repr(layer)
    assert layer.to(torch.float64)(x.double(), *choice).dtype == torch.float64


def test_router():
    layer = make_layer(router=True)
    x = torch.randn(3, 4, 64)
    out = layer(x)
    assert out.shape == x.shape
    logits = x.view(-1, 64) @ layer.router.weight.t()
    top = logits.topk(2, dim=1)
    want = layer(x, top.indices, torch.softmax(top.values, dim=1))
    assert_close("out", out, want, rel_l2=1e-5)
    out.sum().backward()
    assert layer.router.weight.grad.any()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_token_that_is_no_number_is_named_and_not_what_the_router_made_of_it(value: str):
    layer = make_layer(router=True)
    x = torch.randn(3, 4, 64)
    x[1, 2, 5] = float(value)
    wanted = f"^token 6 of x is {value} in column 5, and its routing weights are NaN: wanted num"
    with pytest.raises(RoutingError, match=wanted):
        layer(x)
    x[1, 2, 5] = 0
    with torch.no_grad():
        layer.router.weight[3, 3] = math.nan
    with pytest.raises(RoutingError, match=r"^topk_weight\[0, 0\] is NaN"):
        layer(x)


def test_no_tokens():
    layer = make_layer(router=True)
    out = layer(torch.zeros(0, 64))
    out.sum().backward()
    assert out.shape == (0, 64)
    assert not layer.fc1.grad.any()


def test_layers_share_a_backend():
    first = make_layer()
    second = make_layer(backend=first.backend)
    assert second.backend is first.backend
    with pytest.raises(ConfigError, match="the backend was made for"):
        make_layer(config=cases.make_config(topk=1), backend=first.backend)


def test_state_dict_round_trip():
    source, target = make_layer(router=True), make_layer(router=True)
    with torch.no_grad():
        source.fc1[3].mul_(2)
    target.load_state_dict(source.state_dict())
    x = torch.randn(5, 64)
    assert torch.equal(source(x), target(x))


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((torch.zeros(64),), ShapeError, r"x has shape \(64,\), wanted \[\.\.\., num_tokens, 64\]"),
        ((torch.zeros(2, 128),), ShapeError, r"x has shape \(2, 128\)"),
        ((torch.zeros(64, 2).t(),), ShapeError, "x .*wanted contiguous rows"),
        ((torch.zeros(2, 64),), ConfigError, "the layer has no router: give topk_idx"),
        ((torch.zeros(2, 64), torch.zeros(2, 2).long()), ConfigError, "give both or none"),
    ],
)
def test_bad_calls(args, error, message):
    with pytest.raises(error, match=message):
        make_layer()(*args)


def test_moe_forward_wants_two_dimensions():
    layer = make_layer()
    idx, weight = make_choice(4)
    with pytest.raises(ShapeError, match=r"x has shape \(2, 2, 64\), wanted \[num_tokens, 64\]"):
        moe_forward(torch.zeros(2, 2, 64), idx, weight, None, backend=layer.backend)


def run_layer(group: dist.ProcessGroup, num_ranks: int) -> torch.Tensor:
    torch.set_num_threads(1)
    layer = make_layer(
        config=cases.make_config(num_ranks=num_ranks),
        group=group if num_ranks > 1 else None,
        router=True,
    )
    x = torch.randn(24, 64, generator=cases.generator(9)).chunk(num_ranks)[dist.get_rank(group)]
    return layer(x.clone()).detach()


def test_one_seed_gives_one_model_whatever_the_number_of_ranks(ranks: RankPool):
    want = torch.cat(ranks.run(run_layer, 1, num_ranks=1))
    for num_ranks in (2, 4):
        got = torch.cat(ranks.run(run_layer, num_ranks, num_ranks=num_ranks))
        assert_close(f"out on {num_ranks} ranks", got, want, rel_l2=1e-6)


def run_layer_made_on(group: dist.ProcessGroup, devices: list[str]) -> torch.Tensor:
    config = cases.make_config(num_ranks=2)
    device = devices[dist.get_rank(group)]
    layer = FlashMoELayer(config, group=group, device=device, backend="reference", router=True)
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    x = torch.randn(7, 64, generator=cases.generator(dist.get_rank(group)))
    return layer(x.bfloat16()).detach()


def test_a_layer_that_is_on_meta_on_one_rank(ranks: RankPool):
    want = ranks.run(run_layer_made_on, ["cpu", "cpu"], num_ranks=2)
    got = ranks.run(run_layer_made_on, ["cpu", "meta"], num_ranks=2)
    assert torch.equal(torch.cat(got), torch.cat(want))


def copy_a_layer(group: dist.ProcessGroup) -> None:
    config = cases.make_config(num_ranks=2)
    layer = make_layer(config=config, group=group, router=True)
    twin = copy.deepcopy(layer)
    assert twin.backend is layer.backend
    assert twin.fc1 is not layer.fc1
    x = torch.randn(7, 64, generator=cases.generator(dist.get_rank(group)))
    assert torch.equal(twin(x), layer(x))
    averaged = torch.optim.swa_utils.AveragedModel(layer)
    assert torch.equal(averaged(x), layer(x))
    with pytest.raises(FlashMoEError, match="cannot be pickled.*state_dict"):
        pickle.dumps(layer)


def test_a_copy_shares_the_group(ranks: RankPool):
    ranks.run(copy_a_layer, num_ranks=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_bonud": 1.2}, "option 'row_bonud' is unknown, the nearest is 'row_bound'"),
        ({"row_bound": 0.5}, "row_bound=0.5: wanted a number of at least 1"),
        ({"row_bound": "auto"}, "row_bound='auto': wanted a number, since only"),
    ],
)
def test_options_are_looked_at_without_a_kernel_too(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_layer(**options)


def test_options_beside_a_backend_are_refused():
    backend = make_layer().backend
    with pytest.raises(ConfigError, match="row_bound, keep beside a backend that is given"):
        make_layer(backend=backend, row_bound=1.2, keep="inputs")


def test_repr_shows_what_the_layer_is():
    layer = FlashMoELayer(cases.CONFIG, device="cpu", dtype=torch.float32, backend="reference")
    for words in (
        "hidden=64, intermediate=64, num_experts=8, topk=2, activation=silu, gated=True",
        "rank 0 of 1",
        "backend=ReferenceBackend, dtype=torch.float32",
    ):
        assert words in repr(layer)


def test_weights_take_their_two_matrices_alone_by_position():
    one = (torch.empty(1),)
    assert ExpertWeights(one, one, transposed=True).transposed
    with pytest.raises(TypeError, match="positional arguments"):
        ExpertWeights(one, one, True)


def test_the_choice_is_that_of_the_dtype_in_which_a_layer_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(kind: str, device: torch.device, dtype: torch.dtype) -> str:
        return "reference" if dtype in (torch.bfloat16, torch.float16) else "scheduled"

    def select(config: Any, group: Any, device: Any, *, kind: str, dtype: torch.dtype) -> Any:
        chosen = resolve(kind, device, dtype)
        return layer_module_select(config, group, device, kind=chosen, dtype=dtype)

    layer_module_select = layer_module.select_backend
    monkeypatch.setattr(layer_module, "resolve_kind", resolve)
    monkeypatch.setattr(layer_module, "select_backend", select)
    layer = FlashMoELayer(cases.CONFIG, router=True, dtype=torch.float32)
    wide = layer.backend
    assert type(wide).__name__ == "ScheduledBackend"
    x = torch.randn(5, cases.CONFIG.hidden)
    layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = layer.backend
        assert layer(x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert layer.backend is narrow, "what serves one dtype serves the other"
    assert (wide.num_calls, narrow.num_calls) == (1, 1)
    assert layer.backend is wide
    layer.bfloat16()
    assert layer.backend is narrow
