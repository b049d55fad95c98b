"""The autograd node: its gradients, main_grad, dummies, memory and checkpointing."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import FlashMoEError
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases


class WatchedBackend(ReferenceBackend):
    """Counts calls and watches the memory that forward saves."""

    def __init__(self, config: MoEConfig):
        super().__init__(config)
        self.trainings: list[bool] = []
        self.num_backwards = 0
        self.saved_rows: list[Any] = []

    def forward(self, *args, training, **kwargs):
        self.trainings.append(training)
        out, saved = super().forward(*args, training=training, **kwargs)
        if saved is not None:
            self.saved_rows.append(weakref.ref(saved.rows.untyped_storage()))
        return out, saved

    def backward(self, grad_out, *args, **factors):
        assert grad_out.is_contiguous(), "a kernel reads rows of consecutive elements"
        self.num_backwards += 1
        return super().backward(grad_out, *args, **factors)


class Layer:
    """One layer's leaves on one rank."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        routing: cases.Routing = cases.uniform,
        num_tokens: int = 24,
        **changes: Any,
    ):
        self.config = cases.make_config(num_experts=4, **changes)
        self.backend = WatchedBackend(self.config)
        inputs = cases.make_inputs(self.config, routing, [num_tokens], dtype=dtype)
        self.x = inputs.x[0].requires_grad_()
        self.probs = inputs.probs[0].requires_grad_()
        self.routing_map = inputs.routing_map[0]
        self.grad_out = inputs.grad_out[0]
        self.parameters = [torch.nn.Parameter(weight) for weight in (*inputs.fc1, *inputs.fc2)]

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(tuple(self.parameters[:4]), tuple(self.parameters[4:]))

    def __call__(self, x: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        x = self.x if x is None else x
        return moe_apply(self.backend, x, self.probs, self.routing_map, self.weights, **kwargs)

    def grads(self) -> list[torch.Tensor]:
        """Ordinary gradients of everything, leaving no trace."""
        return list(
            torch.autograd.grad(self(), (self.x, self.probs, *self.parameters), self.grad_out)
        )


FORMS: dict[str, dict[str, Any]] = {
    **{
        f"{activation.value}-{'gated' if gated else 'plain'}": {
            "activation": activation,
            "gated": gated,
        }
        for activation in Activation
        for gated in (True, False)
    },
    "gpt-oss": cases.GPT_OSS,
    "clamped swiglu": {"clamp_value": 0.7, "glu_interleave": 32},
    "offset": {"linear_offset": -0.5},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradients_are_the_slopes_of_the_function(form: dict[str, Any]):
    """Central differences in float64, along a random direction of every input."""
    layer = Layer(torch.float64, num_tokens=5, **form)
    g = cases.generator(11)

    @torch.no_grad()
    def project() -> float:
        return float((layer() * layer.grad_out).sum())

    leaves = (layer.x, layer.probs, *layer.parameters)
    for index, (leaf, grad) in enumerate(zip(leaves, layer.grads(), strict=True)):
        direction = torch.randn(leaf.shape, generator=g, dtype=torch.float64)
        if leaf is layer.probs:
            # A probability acts only where its expert was selected.
            direction *= layer.routing_map
        step = 1e-6
        with torch.no_grad():
            leaf.add_(direction, alpha=step)
            above = project()
            leaf.sub_(direction, alpha=2 * step)
            below = project()
            leaf.add_(direction, alpha=step)
        slope = (above - below) / (2 * step)
        assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-7), index


def test_gradcheck():
    """Every element of the tokens' and probabilities' gradients."""
    layer = Layer(torch.float64, num_tokens=3)

    def function(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        probs = torch.where(layer.routing_map, probs, 0)
        return moe_apply(layer.backend, x, probs, layer.routing_map, layer.weights)

    assert torch.autograd.gradcheck(function, (layer.x, layer.probs))


def test_zero_probability_has_a_gradient():
    """dL/dp is computed before p is multiplied in, so p = 0 is no division by zero."""
    layer = Layer(torch.float64)
    reference = layer.grads()[1]
    with torch.no_grad():
        layer.probs[0] = 0
    found = layer.grads()[1]
    assert_close("grad probs", found, reference, rel_l2=1e-12)
    assert reference[0].any()


def test_biases_have_ordinary_gradients_beside_weights_with_main_grad():
    """Megatron's fusion is of weights alone: what else has a gradient for a bias is added, too."""
    layer = Layer()
    widths = [layer.config.fc1_rows] * 4 + [layer.config.hidden] * 4
    biases = [torch.nn.Parameter(torch.zeros(width)) for width in widths]
    for parameter in (*layer.parameters, *biases):
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad = False
    fc1, fc2 = layer.parameters[:4], layer.parameters[4:]
    weights = ExpertWeights(
        tuple(fc1), tuple(fc2), fc1_bias=tuple(biases[:4]), fc2_bias=tuple(biases[4:])
    )
    out = moe_apply(
        layer.backend,
        layer.x,
        layer.probs,
        layer.routing_map,
        weights,
        accumulate_into_main_grad=True,
    )
    (out * layer.grad_out + sum(bias.sum() for bias in biases)).sum().backward()
    assert all(weight.grad_added_to_main_grad for weight in layer.parameters)
    for bias in biases:
        assert not bias.grad_added_to_main_grad
        assert not bias.main_grad.any()
        assert bias.grad is not None
        assert bias.grad.abs().min() > 0


def test_main_grad_takes_the_gradient_and_hooks_see_a_dummy():
    layer = Layer(torch.bfloat16)
    want = layer.grads()[2:]
    fired: list[int] = []
    nodes = []
    start = 3.0
    for index, parameter in enumerate(layer.parameters):
        parameter.main_grad = torch.full(parameter.shape, start)
        parameter.grad_added_to_main_grad = False
        # Megatron's DDP hooks the node that accumulates a parameter's gradient, and keeps it.
        nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *_, index=index: fired.append(index))
    layer(accumulate_into_main_grad=True).backward(layer.grad_out)
    assert sorted(fired) == list(range(8)), "DDP reduces a bucket when all its hooks have fired"
    for parameter, grad in zip(layer.parameters, want, strict=True):
        assert parameter.grad_added_to_main_grad
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype
        # The float32 sum, of which the ordinary gradient is the rounding.
        assert_close("main_grad", parameter.main_grad - start, grad, rel_l2=3e-3)
        assert not torch.equal(parameter.main_grad - start, grad.float())


def test_who_waits_for_a_backward_hears_of_it_before_hooks_fire():
    layer = Layer()
    fc1, fc2 = layer.parameters[:4], layer.parameters[4:]
    heard: list[list[torch.Tensor] | str] = []
    for parameter in (*fc1, *fc2[1:]):
        parameter.main_grad = torch.zeros(parameter.shape)
    for parameter in layer.parameters:
        parameter.register_hook(lambda *_: heard.append("hook"))

    def after_backward(weights: list[torch.Tensor]) -> None:
        assert layer.backend.num_backwards == 1
        heard.append(weights)

    layer(accumulate_into_main_grad=True, after_backward=after_backward).backward(layer.grad_out)
    weights, *hooks = heard
    assert [id(weight) for weight in weights] == [id(weight) for weight in fc2[1:]]
    assert hooks == ["hook"] * 8


def test_main_grad_accumulates_over_micro_batches():
    layer = Layer()
    want = layer.grads()[2:]
    for parameter in layer.parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
    for _ in range(3):
        layer(accumulate_into_main_grad=True).backward(layer.grad_out)
        for parameter in layer.parameters:
            parameter.grad = None
    for parameter, grad in zip(layer.parameters, want, strict=True):
        assert_close("main_grad", parameter.main_grad, 3 * grad, rel_l2=1e-6)


def test_main_grad_of_experts_without_tokens_is_untouched_and_their_hooks_fire():
    layer = Layer(routing=cases.to_one_expert)
    for parameter in layer.parameters:
        parameter.main_grad = torch.ones(parameter.shape)
    layer(accumulate_into_main_grad=True).backward(layer.grad_out)
    for index, parameter in enumerate(layer.parameters):
        assert parameter.grad is not None
        has_tokens = index % 4 == 3
        assert torch.equal(parameter.main_grad, torch.ones(parameter.shape)) != has_tokens


def test_main_grad_is_left_alone_unless_asked_for():
    layer = Layer()
    want = layer.grads()[2:]
    for parameter in layer.parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
    layer().backward(layer.grad_out)
    for parameter, grad in zip(layer.parameters, want, strict=True):
        assert not parameter.main_grad.any()
        assert not hasattr(parameter, "grad_added_to_main_grad")
        assert torch.equal(parameter.grad, grad)


def test_weights_without_main_grad_get_ordinary_gradients():
    layer = Layer()
    want = layer.grads()[2:]
    fused = layer.parameters[1]
    fused.main_grad = torch.zeros(fused.shape)
    layer(accumulate_into_main_grad=True).backward(layer.grad_out)
    for parameter, grad in zip(layer.parameters, want, strict=True):
        assert torch.equal(parameter.main_grad if parameter is fused else parameter.grad, grad)


def test_main_grad_of_a_frozen_weight_is_left_alone():
    """It has one where it was frozen after Megatron's DDP had been built."""
    layer = Layer()
    want = layer.grads()[2:]
    frozen = layer.parameters[1]
    frozen.requires_grad_(False)
    for parameter in layer.parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad = False
    layer(accumulate_into_main_grad=True).backward(layer.grad_out)
    for parameter, grad in zip(layer.parameters, want, strict=True):
        assert parameter.grad_added_to_main_grad == (parameter is not frozen)
        assert torch.equal(
            parameter.main_grad, torch.zeros_like(grad) if parameter is frozen else grad
        )


@pytest.mark.parametrize(
    "asks_for", ["tokens", "tokens' accumulation", "a weight", "one weight's accumulation"]
)
def test_main_grad_is_for_what_a_backward_accumulates(asks_for: str):
    layer = Layer()
    want_x, _, want, *_ = layer.grads()
    asked, *others = layer.parameters
    for parameter in layer.parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad = False
    out = layer(accumulate_into_main_grad=True)
    if asks_for == "one weight's accumulation":
        out.backward(layer.grad_out, inputs=[asked])
        assert torch.equal(asked.main_grad, want)
    elif asks_for == "tokens' accumulation":
        out.backward(layer.grad_out, inputs=[layer.x])
        assert torch.equal(layer.x.grad, want_x)
        others.append(asked)
    else:
        source, wanted = (layer.x, want_x) if asks_for == "tokens" else (asked, want)
        (found,) = torch.autograd.grad(out, source, layer.grad_out)
        assert torch.equal(found, wanted)
        others.append(asked)
    for parameter in others:
        assert not parameter.main_grad.any()
        assert not parameter.grad_added_to_main_grad


def test_dummies_share_memory_and_are_zero_where_zero_is_wanted():
    layer = Layer()
    for parameter in layer.parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
    layer(accumulate_into_main_grad=True).backward(layer.grad_out)
    first, second = layer.parameters[:2]
    assert first.grad.data_ptr() == second.grad.data_ptr()
    first.grad.fill_(7)
    for parameter in layer.parameters:
        parameter.grad = None
    first.zero_out_wgrad = True
    layer(accumulate_into_main_grad=True).backward(layer.grad_out)
    assert not first.grad.any()


def test_frozen_weights_and_tokens_get_no_gradient():
    layer = Layer()
    want = layer.grads()
    frozen = layer.parameters[2]
    frozen.requires_grad_(False)
    layer.x.requires_grad_(False)
    layer().backward(layer.grad_out)
    assert frozen.grad is None
    assert layer.x.grad is None
    assert torch.equal(layer.probs.grad, want[1])
    assert torch.equal(layer.parameters[3].grad, want[5])


def test_views_of_one_transposed_parameter():
    """The legacy GroupedMLP stacks its experts, in and out swapped."""
    layer = Layer()
    config = layer.config
    want = layer.grads()[2:]
    stacked1 = torch.cat([weight.t() for weight in layer.weights.fc1], dim=0)
    weight1 = torch.nn.Parameter(stacked1.detach().reshape(config.hidden, -1))
    weight2 = torch.nn.Parameter(
        torch.cat([weight.t() for weight in layer.weights.fc2], dim=0).detach()
    )
    weights = ExpertWeights(
        fc1=weight1.view(4, config.hidden, config.fc1_rows).unbind(0),
        fc2=weight2.view(4, config.intermediate, config.hidden).unbind(0),
        transposed=True,
    )
    out = moe_apply(layer.backend, layer.x, layer.probs, layer.routing_map, weights)
    assert_close("out", out, layer(), rel_l2=1e-6)
    out.backward(layer.grad_out)
    grad1 = weight1.grad.view(4, config.hidden, config.fc1_rows)
    grad2 = weight2.grad.view(4, config.intermediate, config.hidden)
    for expert in range(4):
        assert_close("fc1", grad1[expert].t(), want[expert], rel_l2=1e-6)
        assert_close("fc2", grad2[expert].t(), want[4 + expert], rel_l2=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("fused", [True, False], ids=["main_grad", "grad"])
def test_activation_checkpointing(use_reentrant: bool, fused: bool):
    layer = Layer()
    want = layer.grads()
    for parameter in layer.parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
    layer.backend.trainings.clear()
    layer.backend.saved_rows.clear()

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x * 1, accumulate_into_main_grad=fused)

    out = checkpoint(run, layer.x, use_reentrant=use_reentrant)
    assert not any(rows() is not None for rows in layer.backend.saved_rows), "nothing may be kept"
    out.backward(layer.grad_out)
    assert layer.backend.trainings == [not use_reentrant, True], "forward runs twice"
    assert torch.equal(layer.x.grad, want[0])
    assert torch.equal(layer.probs.grad, want[1])
    for parameter, grad in zip(layer.parameters, want[2:], strict=True):
        assert torch.equal(parameter.main_grad if fused else parameter.grad, grad)


@pytest.mark.parametrize("num_others", [0, 3, 20])
def test_ordered_grads_come_in_one_order_whatever_else_is_in_the_graph(num_others: int):
    """ZeRO pairs the ranks' gradients by their order, and a rank's loss may have other terms."""
    layer = Layer()
    seen: list[int] = []
    for index, parameter in enumerate(layer.parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: seen.append(index))
    loss = (layer(ordered_grads=True) * layer.grad_out).sum()
    others = [torch.ones(2, requires_grad=True) for _ in range(num_others)]
    loss = loss + sum((other.sum() for other in others), torch.zeros(()))
    loss.backward()
    assert seen == list(range(8))[::-1]


def test_micro_batches_in_flight():
    """A pipeline runs several forwards before the first backward."""
    layer = Layer()
    outs = [layer(layer.x * scale) for scale in (1.0, 2.0, 3.0)]
    found = [torch.autograd.grad(out, layer.probs, layer.grad_out)[0] for out in outs]
    for scale, grad in zip((1.0, 2.0, 3.0), found, strict=True):
        out = layer(layer.x * scale)
        assert torch.equal(grad, torch.autograd.grad(out, layer.probs, layer.grad_out)[0])
    assert not torch.equal(found[0], found[1])


def test_saved_memory_is_freed_by_backward_although_the_output_lives():
    layer = Layer()
    out = layer()
    assert layer.backend.saved_rows[0]() is not None
    out.backward(layer.grad_out)
    assert layer.backend.saved_rows[0]() is None
    assert out.grad_fn is not None


def test_keeping_the_inputs_gives_the_same_bits_and_saves_nothing_else():
    layer, whole = Layer(), Layer()
    layer.backend.keep = "inputs"
    out = layer()
    assert torch.equal(out, whole())
    assert layer.backend.trainings == [False]
    assert not layer.backend.saved_rows
    for got, want in zip(layer.grads(), whole.grads(), strict=True):
        assert torch.equal(got, want)
    assert layer.backend.trainings == [False, False, True]  # grads() calls forward and backward
    assert layer.backend.num_backwards == 1


def test_inputs_changed_before_backward_are_noticed():
    layer = Layer()
    layer.backend.keep = "inputs"
    x = layer.x * 1
    out = layer(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(layer.grad_out)


def test_retain_graph_allows_a_second_backward_and_its_absence_does_not():
    layer = Layer()
    out = layer()
    first = torch.autograd.grad(out, layer.x, layer.grad_out, retain_graph=True)[0]
    second = torch.autograd.grad(out, layer.x, layer.grad_out)[0]
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, layer.x, layer.grad_out)


def test_weights_changed_before_backward_are_noticed():
    layer = Layer()
    out = layer()
    with torch.no_grad():
        layer.parameters[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(layer.grad_out)


def test_double_backward_is_refused():
    layer = Layer()
    with pytest.raises(FlashMoEError, match="create_graph=True"):
        torch.autograd.grad(layer(), layer.x, layer.grad_out, create_graph=True)


def test_without_grad_nothing_is_saved():
    layer = Layer()
    with torch.no_grad():
        out = layer()
    assert not out.requires_grad
    assert layer.backend.trainings == [False]
    for tensor in (layer.x, layer.probs, *layer.parameters):
        tensor.requires_grad_(False)
    assert torch.equal(layer(), out)
    assert layer.backend.trainings == [False, False]


def test_expanded_output_gradient():
    """``out.sum()`` sends back one element expanded to the whole shape."""
    layer = Layer()
    layer().sum().backward()
    ones = torch.ones_like(layer.grad_out)
    assert torch.equal(layer.x.grad, torch.autograd.grad(layer(), layer.x, ones)[0])


def test_no_backward_without_need():
    layer = Layer()
    layer()
    assert layer.backend.num_backwards == 0
