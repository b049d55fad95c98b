"""LoRA of Megatron-Bridge on experts: alltoall calls its wrappers, and our layer reads them."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.errors import ConfigError, FlashMoEError
from flashmoe_megatron.oracle import assert_close
from tests.distributed import RankPool
from tests.megatron.bridge_lora import Adapter, DoRALinear, LoRALinear, adapter_class
from tests.megatron.grouped import grouped_experts
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer

EP2 = Layout(expert=2)
RANK, ALPHA = 4, 6.0
CLASSES = {
    "one for all": "ParallelLinearAdapter",
    "one each": "GroupedExpertLinearAdapter",
    "shared outer": "SharedOuterGroupedExpertAdapter",
    "sequential": "ParallelLinearAdapter",
}


def adapter_of(form: str, name: str, linear: Any, *parts: Any) -> Adapter:
    """Draws an adapter of a linear, with a second factor that is not 0."""
    weight = getattr(linear, "weight0", None)
    outputs, inputs = (linear.weight if weight is None else weight).shape
    is_shared = {"one for all": (True, True), "one each": (False, False)}.get(form, (True, True))
    if form == "shared outer":
        is_shared = (name == "linear_fc1", name == "linear_fc2")
    shapes = ((RANK, inputs), (outputs, RANK))
    down, up = (
        torch.randn(*(() if shared else (linear.num_gemms,)), *shape) * 0.1
        for shared, shape in zip(is_shared, shapes, strict=True)
    )
    return adapter_class(CLASSES[form])(down, up, ALPHA, *parts)


def adapt(layer: Any, form: str) -> list[LoRALinear]:
    """Freezes a layer's experts and wraps all their linears."""
    for parameter in layer.experts.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(11)
    owners = layer.experts.local_experts if form == "sequential" else [layer.experts]
    made = []
    for owner in owners:
        for name in ("linear_fc1", "linear_fc2"):
            linear = getattr(owner, name)
            made.append(LoRALinear(linear, adapter_of(form, name, linear)))
            setattr(owner, name, made[-1])
    return made


def make(dispatcher: str, form: str, **overrides: Any) -> Any:
    is_grouped = form != "sequential"
    config = transformer_config(EP2, dispatcher, moe_grouped_gemm=is_grouped, **overrides)
    return make_layer(config, grouped_experts("te_grouped") if is_grouped else None)


def step(layer: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(16, 2, 64, requires_grad=True)
    output = layer(x)[0]
    output.backward(torch.ones_like(output))
    found = {"output": output.detach(), "x": x.grad}
    for name, parameter in layer.experts.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.requires_grad:
            found[name] = parameter.grad
            parameter.grad = None
    return found


def both(
    _: dist.ProcessGroup, form: str, overrides: dict[str, Any], is_on: bool
) -> list[dict[str, torch.Tensor]]:
    prepare(EP2)
    found = []
    for dispatcher in ("flashmoe", "alltoall"):
        layer = make(dispatcher, form, **overrides)
        without = layer(torch.ones(16, 2, 64))[0]
        wrappers = adapt(layer, form)
        with_them = layer(torch.ones(16, 2, 64))[0]
        assert not torch.allclose(without, with_them), "the adapters changed nothing"
        for wrapper in wrappers:
            wrapper._adapter_enabled = is_on
            if not is_on:
                wrapper.adapter.requires_grad_(False)
        found.append(step(layer))
    return found


@pytest.mark.parametrize(
    ("form", "overrides", "is_on"),
    [
        ("one for all", {}, True),
        ("one each", {"add_bias_linear": True}, True),
        ("one each", {"gated_linear_unit": True}, True),
        ("shared outer", {}, True),
        ("sequential", {}, True),
        ("one each", {}, False),
    ],
)
def test_adapters_are_computed_as_beside_alltoall(
    form: str, overrides: dict[str, Any], is_on: bool, two_ranks: RankPool
) -> None:
    """Outputs and the gradients of tokens and of every factor, on two ranks."""
    for got, want in two_ranks.run(both, form, overrides, is_on):
        assert got.keys() == want.keys()
        assert len(want) > 2 or not is_on
        for name, one in want.items():
            assert one.any(), name
            assert_close(name, got[name], one, rel_l2=1e-5)


def refused(_: dist.ProcessGroup, change: str) -> str:
    """Returns the error of a call after a change to what wraps the experts."""
    prepare(EP2)
    layer = make("flashmoe", "sequential" if change == "some" else "one each")
    wrappers = adapt(layer, "sequential" if change == "some" else "one each")
    parts = {
        "dropout": (torch.nn.Dropout(0.1), torch.nn.Identity()),
        "activation": (torch.nn.Identity(), torch.nn.SiLU()),
    }
    experts = layer.experts
    if change in parts:
        linear = wrappers[0].to_wrap
        wrappers[0].adapter = adapter_of("one each", "linear_fc1", linear, *parts[change])
    elif change == "dora":
        experts.linear_fc2 = DoRALinear(wrappers[1].to_wrap, wrappers[1].adapter)
    elif change == "some":
        wrappers[0]._adapter_enabled = False
    elif change == "dtype":
        wrappers[0].adapter.to(torch.bfloat16)
    try:
        layer(torch.ones(16, 2, 64))
    except (ConfigError, FlashMoEError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dropout", "GroupedExpertLinearAdapter.* has a dropout of 0.1.*use the alltoall"),
        ("activation", "has SiLU as its activation.*use the alltoall dispatcher"),
        ("dora", "is of class megatron.bridge.peft.dora_layers.DoRALinear.*use the alltoall"),
        ("some", "linear_fc1 of 3 of 4 experts: wanted an adapter, and switched on, for all"),
        ("dtype", "fc1_down is torch.bfloat16 on cpu, wanted torch.float32"),
    ],
)
def test_what_is_not_computed_is_refused(change: str, words: str, two_ranks: RankPool) -> None:
    for said in two_ranks.run(refused, change):
        assert re.search(words, said), said
