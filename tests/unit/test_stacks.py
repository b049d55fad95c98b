"""Stacks of experts' weights give the bits that tensors of single experts give."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel import tables as kernel_tables
from flashmoe_megatron.kernel.gradients import UniformGrads
from flashmoe_megatron.kernel.tables import AddressTables
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.unit import cases
from tests.unit.test_weights import BIASES, PROBLEM, SIZES, address_tables, make_biases

KINDS = ("fc1", "fc2", "fc1_bias", "fc2_bias")
CONFIG = cases.make_config(num_experts=4)
Tensors = dict[str, tuple[torch.Tensor, ...]]


def make_tensors(*, transposed: bool = False) -> Tensors:
    """One tensor for each expert and kind."""
    inputs = cases.make_inputs(CONFIG, cases.uniform, [24], dtype=torch.float32)
    found = {"fc1": inputs.fc1, "fc2": inputs.fc2}
    if transposed:
        found = {kind: [one.t().contiguous() for one in of] for kind, of in found.items()}
    biases = make_biases(CONFIG, BIASES["both"], torch.float32)
    return {kind: tuple(of) for kind, of in {**found, **biases}.items()}


def stacked(tensors: Tensors, sizes: list[int]) -> Tensors:
    """The same in stacks of these numbers of experts."""
    return {kind: torch.stack(each).split(sizes) for kind, each in tensors.items()}


def apply(tensors: Tensors, *, transposed: bool, main_grad: bool) -> list[torch.Tensor]:
    """The output and the gradients of tokens, probabilities, and weights of each expert."""
    inputs = cases.make_inputs(CONFIG, cases.uniform, [24], dtype=torch.float32)
    leaves = {
        kind: tuple(one.clone().requires_grad_() for one in each) for kind, each in tensors.items()
    }
    parameters: list[Any] = [one for kind in KINDS for one in leaves[kind]]
    if main_grad:
        for parameter in parameters:
            parameter.main_grad = torch.ones_like(parameter)
            parameter.grad_added_to_main_grad = False
    x, probs = inputs.x[0].clone().requires_grad_(), inputs.probs[0].clone().requires_grad_()
    weights = ExpertWeights(**leaves, transposed=transposed)
    backend = ReferenceBackend(CONFIG)
    out = moe_apply(
        backend, x, probs, inputs.routing_map[0], weights, accumulate_into_main_grad=main_grad
    )
    out.backward(inputs.grad_out[0])
    if main_grad:
        added = {id(one) for kind in ("fc1", "fc2") for one in leaves[kind]}
        assert all(one.grad_added_to_main_grad == (id(one) in added) for one in parameters)
        # A bias has an ordinary gradient, which Megatron's DDP adds.
        for one in parameters:
            if id(one) not in added:
                one.main_grad += one.grad
    grads = [one.main_grad if main_grad else one.grad for one in parameters]
    assert all(
        grad.shape == one.shape and grad.is_contiguous()
        for grad, one in zip(grads, parameters, strict=True)
    )
    is_stack = leaves["fc1_bias"][0].dim() == 2
    each = [one for grad in grads for one in (grad if is_stack else [grad])]
    return [out.detach(), x.grad, probs.grad, *each]


@pytest.mark.parametrize("sizes", [[4], [1, 3]], ids=["one stack", "two stacks"])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_stacks_give_the_same_bits(sizes: list[int], transposed: bool, main_grad: bool):
    tensors = make_tensors(transposed=transposed)
    want = apply(tensors, transposed=transposed, main_grad=main_grad)
    got = apply(stacked(tensors, sizes), transposed=transposed, main_grad=main_grad)
    assert len(got) == len(want) == 3 + 4 * CONFIG.num_experts
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_layer_has_one_parameter_and_one_gradient_of_each_kind():
    layer = FlashMoELayer(CONFIG, device="cpu", dtype=torch.float32, router=True, bias=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes == {
        "fc1": (4, 128, 64),
        "fc2": (4, 64, 64),
        "fc1_bias": (4, 128),
        "fc2_bias": (4, 64),
        "router.weight": (4, 64),
    }
    layer(torch.randn(9, 64)).sum().backward()
    grads = {name: tuple(parameter.grad.shape) for name, parameter in layer.named_parameters()}
    assert grads == shapes


class Calls:
    """Stands for the library: notes the addresses that each call gives it."""

    def __init__(self) -> None:
        self.addresses: list[list[int]] = []

    def __call__(self, _: str, __: object, *arguments: Any) -> None:
        arrays = [list(one) for one in arguments if isinstance(one, ctypes.Array)]
        self.addresses.append([address for array in arrays for address in array])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(AddressTables, "_upload", lambda _, host: host)
    monkeypatch.setattr(bindings, "call", found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def in_bf16(tensors: Tensors) -> Tensors:
    return {kind: tuple(one.bfloat16() for one in each) for kind, each in tensors.items()}


def addresses_of(tensors: Tensors) -> list[int]:
    return [one.data_ptr() for kind in KINDS for stack in tensors[kind] for one in stack]


def test_the_kernel_finds_each_expert_in_a_stack(calls: Calls):
    tensors = stacked(in_bf16(make_tensors()), [1, 3])
    tables = address_tables(CONFIG)
    found = tables.of_weights(ExpertWeights(**tensors), PROBLEM, SIZES)
    want = addresses_of(tensors)
    num_weights = 2 * CONFIG.num_experts
    assert calls.addresses == [want[:num_weights]]
    assert found.biases is not None
    assert found.biases.tolist() == want[num_weights:]
    assert tables.of_weights(ExpertWeights(**tensors), PROBLEM, SIZES) is found


def test_the_kernel_tells_stacks_of_other_steps_apart(calls: Calls):
    """Every second expert of a larger stack begins where the whole one does."""
    tensors = stacked(in_bf16(make_tensors()), [4])
    larger = torch.zeros(8, 64, 64, dtype=torch.bfloat16)
    tables = address_tables(CONFIG)
    for fc2 in (larger[:4], larger[::2]):
        tables.of_weights(ExpertWeights(tensors["fc1"], (fc2,)), PROBLEM, SIZES)
    assert [found[4:] for found in calls.addresses] == [
        [one.data_ptr() for one in larger[:4]],
        [one.data_ptr() for one in larger[::2]],
    ]


def make_grads(tensors: Tensors) -> list[WeightGrad]:
    return [WeightGrad(one, accumulate=False) for kind in KINDS for one in tensors[kind]]


@pytest.mark.parametrize("sizes", [[4], [1, 3]], ids=["one stack", "two stacks"])
def test_the_kernel_writes_each_gradient_into_its_stack(calls: Calls, sizes: list[int]):
    tensors = stacked(make_tensors(), sizes)
    address_tables(CONFIG).of_grads(
        UniformGrads(make_grads(tensors)), torch.bfloat16, PROBLEM, SIZES
    )
    assert calls.addresses == [addresses_of(tensors)]


@pytest.mark.parametrize("accumulate", [True, False])
def test_the_kernel_knows_gradients_that_lie_where_others_did(calls: Calls, accumulate: bool):
    """What is written may be freed: then a tensor of another dtype may begin there next."""
    tensors = stacked(make_tensors(), [4])
    tables = address_tables(CONFIG)
    for _ in range(3):
        grads = [grad._replace(accumulate=accumulate) for grad in make_grads(tensors)]
        tables.of_grads(UniformGrads(grads), torch.bfloat16, PROBLEM, SIZES)
    assert len(calls.addresses) == 1
    halves = [grad._replace(buffer=grad.buffer.view(torch.bfloat16)[..., ::2]) for grad in grads]
    with pytest.raises(ShapeError, match="contiguous"):
        tables.of_grads(UniformGrads(halves), torch.bfloat16, PROBLEM, SIZES)


def test_tables_of_weights_that_move_do_not_pile_up(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    """Graphs may have captured launches on those that are forgotten, so that they are handed on."""
    monkeypatch.setattr(kernel_tables, "MOST_LAYERS", 2)
    kept: list[object] = []
    tables = address_tables(CONFIG)
    captured = SimpleNamespace(keep_left=lambda *given: kept.extend(given))
    tables._memory = SimpleNamespace(captured=captured)  # type: ignore[assignment]
    moved = [stacked(in_bf16(make_tensors()), [4]) for _ in range(5)]
    made = [tables.of_weights(ExpertWeights(**each), PROBLEM, SIZES) for each in moved]
    assert [id(one) for one in kept] == [id(one) for one in made[:4]]
    assert tables.of_weights(ExpertWeights(**moved[4]), PROBLEM, SIZES) is made[4]
    assert len(calls.addresses) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {**t, "fc2": (t["fc2"][0][:3],)},
            "gradients of weights and biases, wanted 8 of weights",
        ),
        (lambda t: {**t, "fc1": (t["fc1"][0].transpose(1, 2),)}, "strides .* wanted contiguous"),
    ],
    ids=["too few", "strided"],
)
def test_the_kernel_refuses_stacks_that_it_cannot_write(
    calls: Calls, change: Callable[[Tensors], Tensors], message: str
):
    tensors = change(stacked(make_tensors(), [4]))
    with pytest.raises(ShapeError, match=message):
        address_tables(CONFIG).of_grads(
            UniformGrads(make_grads(tensors)), torch.bfloat16, PROBLEM, SIZES
        )
    assert not calls.addresses
