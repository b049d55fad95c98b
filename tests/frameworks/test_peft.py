"""PEFT's adapters on a layer's router, experts and gate: trained, saved, merged."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.gates import GatedExperts, SoftMoEGate
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.oracle import assert_close

peft = pytest.importorskip("peft")

HIDDEN, EXPERTS = 64, 8
CONFIG = MoEConfig(
    hidden=HIDDEN,
    intermediate=HIDDEN,
    num_experts=EXPERTS,
    topk=2,
    activation="silu",
    gated=True,
    num_ranks=1,
    max_tokens=64,
)


class Net(nn.Module):
    """Always with the same parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = FlashMoELayer(CONFIG, router=True, device="cpu", dtype=torch.float32, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.first(x))


def adapted(model: nn.Module, **where: Any) -> Any:
    torch.manual_seed(1)  # an adapter draws values other than zeros
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **where))


def tokens() -> torch.Tensor:
    return torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(2))


ROUTER = {
    "modules": {"target_modules": "all-linear"},
    "parameter": {"target_parameters": ["moe.router.weight"]},
}


@pytest.mark.parametrize("where", ROUTER)
def test_a_router_with_an_adapter_trains_as_the_merged_one_runs(where: str, tmp_path: Path):
    plain, model = Net()(tokens()), adapted(Net(), **ROUTER[where])
    out = model(tokens())
    assert not torch.allclose(out, plain, rtol=1e-2)
    # PEFT's own call of the router, and the experts that it chooses.
    net = model.base_model.model
    x = net.first(tokens())
    top = net.moe.router(x).topk(2, dim=1)
    want = net.moe(x, top.indices, top.values.softmax(1))
    assert torch.equal(out, want)
    adapters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert any("router.lora_B" in name for name in adapters)
    for loss in (want, out):
        model.zero_grad()
        loss.square().sum().backward()
        found = {name: one.grad.clone() for name, one in adapters.items()}
        assert all(grad.any() for grad in found.values())
        if loss is want:
            wanted = found
    for name, grad in found.items():
        assert_close(name, grad, wanted[name], rel_l2=1e-5)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(Net(), tmp_path)
    assert torch.equal(loaded(tokens()), out)
    assert_close("merged", loaded.merge_and_unload()(tokens()), out, rel_l2=1e-5)
    with model.disable_adapter():
        assert torch.equal(model(tokens()), plain)


def test_a_narrow_router_with_an_adapter_computes_in_float32():
    model = adapted(Net().bfloat16(), target_modules=["router"])
    moe, x = model.base_model.model.moe, tokens().bfloat16()
    assert moe.router.base_layer.weight.dtype == torch.bfloat16
    want = copy.deepcopy(moe.router).float()(x.float()).topk(2, dim=1)
    ids, weights = moe.route(x)
    assert torch.equal(ids, want.indices)
    torch.testing.assert_close(weights, want.values.softmax(1))


@pytest.mark.parametrize("where", ROUTER)
def test_a_launch_refuses_a_router_with_an_adapter(where: str):
    net = Net(fuse_router=True)
    model = adapted(net, **ROUTER[where])
    words = r"fuse_router=True with a router that is of class peft\.tuners\.lora\.layer\."
    with pytest.raises(ConfigError, match=words):
        model(tokens())
    want = adapted(Net(), **ROUTER[where])(tokens())
    assert_close("merged", model.merge_and_unload()(tokens()), want, rel_l2=1e-5)


@pytest.mark.parametrize("names", [["fc1"], ["fc2"], ["fc1", "fc2"]], ids=str)
def test_adapters_of_experts(names: list[str]):
    net = Net()
    model = adapted(net, target_parameters=[f"moe.{name}" for name in names])
    wrapper, weights, changed = net.moe, {}, []
    while isinstance(wrapper, peft.tuners.lora.layer.ParamWrapper):
        delta = wrapper.get_delta_weight("default")
        weights[f"moe.{wrapper.parameter_name}"] = wrapper.get_param() + delta
        changed += [wrapper.lora_A.default.weight, wrapper.lora_B.default.weight]
        wrapper = wrapper.base_layer
    assert len(weights) == len(names)
    want = torch.func.functional_call(Net(), weights, (tokens(),))
    got = model(tokens())
    assert_close("out", got.detach(), want.detach(), rel_l2=1e-5)
    grad = functools.partial(torch.autograd.grad, inputs=changed)
    for ours, theirs in zip(grad(got.square().sum()), grad(want.square().sum()), strict=True):
        assert_close("gradient", ours, theirs, rel_l2=1e-5)
    assert_close("merged", model.merge_and_unload()(tokens()), got, rel_l2=1e-5)


@pytest.mark.parametrize("name", ["gate.weight", "layer.fc2"])
def test_adapters_of_gated_experts(name: str):
    torch.manual_seed(0)
    gate = SoftMoEGate(HIDDEN, EXPERTS, allow_future=True)
    layer = FlashMoELayer(CONFIG, device="cpu", dtype=torch.float32)
    plain = GatedExperts(gate, layer)
    model = adapted(copy.deepcopy(plain), target_parameters=[name])
    x = tokens().view(2, 8, HIDDEN)
    out, routing = model(x)
    assert not torch.allclose(out, plain(x)[0], rtol=1e-2)
    (out.square().sum() + routing.aux_loss).backward()
    assert all(one.grad.any() for one in model.parameters() if one.requires_grad)
    merged, _ = model.merge_and_unload()(x)
    assert_close("merged", merged, out.detach(), rel_l2=1e-5)
