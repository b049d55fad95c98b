r"""Trains a step of LoRA by Megatron-Bridge's own classes, with our layers and with alltoall.

In the environment of :mod:`tests.external.bridge`, on two ranks that share the experts::

    PYTHONPATH=. torchrun --nproc_per_node 2 -m tests.external.bridge_lora

A small GPT-OSS gets adapters of attention and experts by ``LoRA``: of sequential experts one each;
of grouped ones one that all share, one each, and shared outer ones. The second factors are drawn,
as Bridge begins with zeros. Losses, outputs of the layers and the gradients of every factor have to
be those of alltoall, which calls Bridge's wrappers.

With a GPU and Transformer Engine one process compares a layer of Transformer Engine's linears in
bfloat16 with the kernel. All that it needs of Bridge is ``megatron.bridge.peft``::

    PYTHONPATH=. torchrun --nproc_per_node 1 -m tests.external.bridge_lora
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron import install
from flashmoe_megatron.kernel.backend import KernelBackend
from tests.external import beside, bridge
from tests.external.beside import LOCAL, layers

FORMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "one for all": (True, {"share_expert_adapters": True}),
    "one each": (True, {"share_expert_adapters": False}),
    "one each, normalized": (True, {"share_expert_adapters": False, "normalize_moe_lora": True}),
    "shared outer": (True, {"experts_shared_outer_loras": True}),
    "sequential experts, one each": (False, {}),
}
"""The kinds of adapters: true for grouped experts, and the arguments of ``LoRA``."""
HAS_GPU = torch.cuda.is_available()
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "groups": 2, "channels": 16, "experts": 8}
SHAPE |= {"topk": 2, "vocabulary": 128, "sequence": 32}
RANK, TOLERANCE = 4, beside.TOLERANCE
if HAS_GPU:
    # One layer, since a second router would choose by outputs that are rounded in another order.
    SHAPE = {"layers": 1, "hidden": 512, "heads": 8, "groups": 2, "channels": 64, "experts": 16}
    SHAPE |= {"topk": 4, "vocabulary": 1024, "sequence": 512}
    RANK, TOLERANCE = 16, 2e-2


def group_experts(model: Any) -> None:
    """Puts grouped experts, in plain torch, in the place of sequential ones."""
    from megatron.bridge.peft import utils
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    for layer in layers(model):
        experts = layer.experts
        for name, cls in (("linear_fc1", utils.TECL[0]), ("linear_fc2", utils.TERL[0])):
            each = [getattr(expert, name) for expert in experts.local_experts]
            outputs, inputs = each[0].weight.shape
            grouped = cls(
                len(each),
                inputs,
                outputs,
                init_method=torch.nn.init.zeros_,
                bias=True,
                skip_bias_add=name == "linear_fc2",
            )
            grouped.in_features, grouped.out_features = inputs, outputs
            grouped.config = layer.config
            for i, linear in enumerate(each):
                getattr(grouped, f"weight{i}").data.copy_(linear.weight)
                getattr(grouped, f"bias{i}").data.copy_(linear.bias)
            setattr(experts, name, grouped)
        del experts.local_experts
        experts.__class__ = TEGroupedMLP
        experts.tp_group = layer.experts.tp_group
        experts.activation_func = layer.config.activation_func
        experts.activation_recompute = experts.offload_expert_fc1 = False
        experts.offload_moe_act = experts.offload_fused_group_mlp = False
        experts._with_fused_impl, experts._fused_ops = False, None


def stand_in_for_grouped_linears() -> None:
    """Has Bridge know the plain grouped linears as Transformer Engine's, by their two kinds."""
    from megatron.bridge.peft import utils

    from tests.megatron.grouped import TorchGroupedLinear

    made = [
        type(name, (TorchGroupedLinear,), {"__module__": TorchGroupedLinear.__module__})
        for name in ("ColumnGroupedLinear", "RowGroupedLinear")
    ]
    utils.TECL, utils.TERL = (made[0],), (made[1],)
    utils.TELinear = utils.TELayerNormColumnParallelLinear = type("Absent", (), {})


def build(dispatcher: str, *, is_grouped: bool, peft: Any) -> Any:
    """Makes a model with adapters whose second factors are drawn, on every rank alike."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tools.bench.bench_lora import Shape, config_of

    shape = Shape(**SHAPE)
    config = config_of(
        shape,
        dispatcher,
        **(GPU_OPTIONS | {"moe_grouped_gemm": is_grouped} if HAS_GPU else LOCAL_OPTIONS),
        expert_model_parallel_size=dist.get_world_size(),
    )
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    if HAS_GPU:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.experts, moe_grouped_gemm=is_grouped
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=shape.experts, moe_grouped_gemm=False, normalization=config.normalization
        )
    model = GPTModel(config, spec, shape.vocabulary, shape.sequence, position_embedding_type="rope")
    for layer in layers(model):
        for name, parameter in layer.experts.named_parameters():
            if "bias" in name:  # Megatron begins with 0, which would hide them
                parameter.data.normal_(std=0.5)
    if is_grouped and not HAS_GPU:
        group_experts(model)
    model = peft(model, training=True)
    if HAS_GPU:
        model = model.cuda().bfloat16()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "adapter.linear_out" in name:
            drawn = torch.Generator().manual_seed(number)
            parameter.data.copy_(torch.randn(parameter.shape, generator=drawn) * 0.1)
    return model


LOCAL_OPTIONS = {
    name: value for name, value in LOCAL.items() if name not in ("multi_latent_attention",)
} | {
    "bf16": False,
    "moe_permute_fusion": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
}
GPU_OPTIONS = {
    name: LOCAL_OPTIONS[name]
    for name in ("bias_activation_fusion", "softmax_type", "window_size", "window_attn_skip_freq")
}
"""Settings that differ from those of ``bench_lora``'s training: all products are plain ones."""


def batch() -> dict[str, Any]:
    """Returns the arguments of a call of a model."""
    length = SHAPE["sequence"]
    drawn = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(SHAPE["vocabulary"], (2, length), generator=drawn)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    found = {
        "input_ids": tokens,
        "position_ids": torch.arange(length).expand(2, -1),
        "attention_mask": None if HAS_GPU else mask,
        "labels": tokens,
    }
    if HAS_GPU:
        found = {name: None if one is None else one.cuda() for name, one in found.items()}
    return found


def outputs_of(model: Any, call: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Returns what the layers of a model give in a call."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, given: found.append(given[0].detach()))
        for layer in layers(model)
    ]
    call()
    for hook in hooks:
        hook.remove()
    return {f"output {number}": one for number, one in enumerate(found)}


def step(model: Any) -> dict[str, torch.Tensor]:
    """Runs a step; returns the loss, the layers' outputs, and every adapter's gradients."""
    losses: list[torch.Tensor] = []
    found = outputs_of(model, lambda: losses.append(model(**batch()).float().mean()))
    (loss,) = losses
    loss.backward()
    found["loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("adapter" in name), name
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the relative distance of two tensors."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(form: str) -> str:
    """Compares a form of adapters with alltoall's; returns a line.

    Raises:
        AssertionError: A layer is not ours, a number is another, or additions change no output.
    """
    from megatron.bridge.peft.lora import LoRA

    is_grouped, arguments = FORMS[form]
    found, models = [], []
    for dispatcher in ("flashmoe", "alltoall"):
        peft = LoRA(dim=RANK, alpha=2 * RANK, **copy.deepcopy(arguments))
        model = build(dispatcher, is_grouped=is_grouped, peft=peft)
        for layer in layers(model):
            assert hasattr(layer, "flashmoe_routed_experts") is (dispatcher == "flashmoe")
        models.append(model)
        found.append(step(model))
        if HAS_GPU and dispatcher == "flashmoe":
            (layer,) = layers(model)
            assert isinstance(layer.flashmoe_routed_experts.backend, KernelBackend)
    parameters = zip(*(each.named_parameters() for each in models), strict=True)
    for (name, ours), (_, theirs) in parameters:
        assert torch.equal(ours, theirs), f"{form}: {name} began elsewhere"
    got, want = found
    assert got.keys() == want.keys()
    peft.disable_adapter_layers(model)
    plain = outputs_of(model, lambda: model(**batch()))
    for name, one in plain.items():
        assert apart(one, want[name]) > 5 * TOLERANCE, f"{form}: additions do not change {name}"
    worst = {"outputs": 0.0, "factors of experts": 0.0, "other factors": 0.0}
    for name, one in want.items():
        assert one.any(), f"{form}: {name} is 0"
        distance = apart(got[name], one)
        assert distance <= TOLERANCE, (form, name, distance)
        kind = "factors of experts" if ".experts." in name else "other factors"
        if name == "loss" or name.startswith("output"):
            kind = "outputs"
        worst[kind] = max(worst[kind], distance)
    of_experts = sum(".experts." in name for name in want)
    kinds = ", ".join(f"{kind} within {distance:.1e}" for kind, distance in worst.items())
    return f"{form}: loss {float(got['loss']):.6f}; {of_experts} factors of experts; {kinds}"


def refusals() -> dict[str, Any]:
    """Ways to adapt that no layer of ours computes, by what the error says."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    return {
        "has a dropout of 0.1": LoRA(dropout=0.1),
        "is of class megatron.bridge.peft.dora_layers.DoRALinear": DoRA(
            target_modules=["linear_fc1", "linear_fc2"]
        ),
        "is of class megatron.bridge.peft.canonical_lora.LoRALinearSplitFC1UpGate": CanonicalLoRA(
            target_modules=["linear_fc1_up", "linear_fc1_gate"]
        ),
    }


def check_refused(words: str, peft: Any) -> str:
    """Has a first call end with words that name what is not computed."""
    from flashmoe_megatron.errors import ConfigError

    model = build("flashmoe", is_grouped=False, peft=peft)
    with pytest.raises(ConfigError, match=f"{words}.*use the alltoall dispatcher") as caught:
        step(model)
    return f"refused: {str(caught.value)[:100]}"


def main(say: Callable[[str], object] = print) -> None:
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    if not HAS_GPU:
        bridge.prepare()
    install()
    if not HAS_GPU:
        stand_in_for_grouped_linears()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(),
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=not HAS_GPU,
    )
    is_first = dist.get_rank() == 0
    for form in FORMS:
        line = check(form)
        if is_first:
            say(line)
    # A refusal comes before any work, so that processors show all there is to it.
    for words, peft in () if HAS_GPU else refusals().items():
        line = check_refused(words, peft)
        if is_first:
            say(line)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
