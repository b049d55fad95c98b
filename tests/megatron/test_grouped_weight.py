"""One parameter for the weights of all experts, with a stand-in for Transformer Engine's class."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron.weights import expert_weights
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.oracle import assert_close
from tests.distributed import RankPool
from tests.megatron.grouped import TorchGroupedLinear, grouped_experts
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer

EP2 = Layout(expert=2)


class GroupedTensor(torch.Tensor):
    """Wraps the memory of a stack, and computes nothing."""

    __module__ = "transformer_engine.pytorch.tensor.grouped_tensor"

    def __new__(cls, stack: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, stack.shape, dtype=stack.dtype)
        made.rowwise_data = stack.detach().reshape(-1)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default), func
        return cls(args[0].rowwise_data.view(args[0].shape))


def group(linear: TorchGroupedLinear) -> None:
    """Makes one parameter of a kind's many."""
    linear.single_grouped_weight = True
    for kind in ("weight", "bias") if linear.bias0.numel() else ("weight",):
        many = [getattr(linear, f"{kind}{i}") for i in range(linear.num_gemms)]
        linear.register_parameter(kind, torch.nn.Parameter(GroupedTensor(torch.stack(many))))
        for i in range(linear.num_gemms):
            linear.register_parameter(f"{kind}{i}", None)


@pytest.mark.parametrize("has_main_grad", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_are_stacks_of_each_experts(
    has_bias: bool, has_main_grad: bool, two_ranks: RankPool
) -> None:
    for many, one in two_ranks.run(gradients, has_bias, has_main_grad):
        assert many.keys() == one.keys()
        for name, tensor in one.items():
            assert_close(name, tensor, many[name], rel_l2=1e-6)


def gradients(
    _: dist.ProcessGroup, has_bias: bool, has_main_grad: bool
) -> list[dict[str, torch.Tensor]]:
    """The output and all gradients, of a layer with many parameters and of one with stacks."""
    prepare(EP2)
    config = transformer_config(EP2, "flashmoe", add_bias_linear=has_bias, moe_grouped_gemm=True)
    results = []
    for is_single in (False, True):
        layer = make_layer(config, grouped_experts("te_grouped"))
        linears = {"fc1": layer.experts.linear_fc1, "fc2": layer.experts.linear_fc2}
        if is_single:
            for linear in linears.values():
                group(linear)
        layer.config.gradient_accumulation_fusion = has_main_grad
        if has_main_grad:
            for parameter in layer.experts.parameters():
                parameter.main_grad = torch.full(parameter.shape, 0.5)
                parameter.grad_added_to_main_grad = False
        torch.manual_seed(dist.get_rank())
        x = torch.randn(16, 2, 64, requires_grad=True)
        output = layer(x)[0]
        output.backward(torch.ones_like(output))
        found = {"output": output, "x": x.grad, "router": layer.router.weight.grad}
        for name, linear in linears.items():
            for kind in ("weight", "bias") if has_bias else ("weight",):
                names = [kind] if is_single else [f"{kind}{i}" for i in range(4)]
                each = [getattr(linear, name) for name in names]
                assert all(hasattr(one, "main_grad") is has_main_grad for one in each)
                adds = has_main_grad and kind == "weight"  # as Megatron's fusion does
                if has_main_grad:
                    assert all(one.grad_added_to_main_grad == adds for one in each)
                grads = [one.main_grad if adds else one.grad for one in each]
                found[f"{name}.{kind}"] = grads[0] if is_single else torch.stack(grads)
        results.append({name: tensor.detach() for name, tensor in found.items()})
    return results


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no_bias", "bias for each; wanted --moe-single-grouped-bias with"),
        ("no_weight", "and a weight for each; wanted --moe-single-grouped-weight with"),
        ("quantized", "the weight of .* is a GroupedTensor, wanted .* in bfloat16 or float16"),
    ],
)
def test_what_cannot_be_read_is_refused(change: str, words: str) -> None:
    options = {"init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": True}
    experts = torch.nn.Module()
    experts.linear_fc1 = TorchGroupedLinear(2, 64, 128, **options)
    experts.linear_fc2 = TorchGroupedLinear(2, 64, 64, **options)
    for linear in (experts.linear_fc1, experts.linear_fc2):
        each = [linear.bias0, linear.bias1]
        group(linear)
        if change == "no_bias":
            linear.bias, linear.bias0, linear.bias1 = None, *each
        elif change == "no_weight":
            linear.single_grouped_weight = False
            linear.weight0 = linear.weight1 = torch.nn.Parameter(torch.zeros(128, 64))
        else:
            linear.weight.rowwise_data = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=words):
        expert_weights(experts, hidden=64)
