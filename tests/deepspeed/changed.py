"""Engines with one thing wrong, for tests of what attaching says about them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.harness import Case, build
from tests.deepspeed.models import HIDDEN, TwoLinears

AUTOEP = {"family": "autoep", "zero": 1}


def first_layer(engine: Any) -> Any:
    """The first MoE layer: DeepSpeed's MOELayer or AutoEPMoELayer."""
    names = ("MOELayer", "AutoEPMoELayer")
    return next(m for m in engine.module.modules() if type(m).__name__ in names)


def subclass(engine: Any) -> None:
    layer = first_layer(engine)
    layer.__class__ = type("MyLayer", (type(layer),), {})


def gate_subclass(engine: Any) -> None:
    gate = first_layer(engine).gate
    gate.__class__ = type("MyGate", (type(gate),), {})


def experts_subclass(engine: Any) -> None:
    experts = first_layer(engine).experts
    experts.__class__ = type("MyExperts", (type(experts),), {})


def tutel(engine: Any) -> None:
    first_layer(engine).use_tutel = True


def double(engine: Any) -> None:
    first_layer(engine).experts.double()


def replaced_forward(engine: Any) -> None:
    layer = first_layer(engine)
    layer.forward = layer.forward


def hooked(engine: Any) -> None:
    first_layer(engine).experts.register_forward_hook(lambda *_: None)


def hooked_within(engine: Any) -> None:
    expert = first_layer(engine).experts.deepspeed_experts[1]
    expert.fc1.register_full_backward_hook(lambda *_: None)


def tanh(engine: Any) -> None:
    for expert in first_layer(engine).experts.deepspeed_experts:
        expert.function = torch.tanh


def tanh_on_rank_1(engine: Any) -> None:
    if dist.get_rank() == 1:
        tanh(engine)


def relu_on_rank_1(engine: Any) -> None:
    if dist.get_rank() == 1:
        for expert in first_layer(engine).experts.deepspeed_experts:
            expert.function = torch.relu


def different_experts(engine: Any) -> None:
    first_layer(engine).experts.deepspeed_experts[0].function = torch.relu


def set_attribute(name: str, value: object) -> Callable[[Any], None]:
    return lambda engine: setattr(first_layer(engine), name, value)


def unknown_form(engine: Any) -> None:
    first_layer(engine).experts.activation = "swiglu_plus"


def other_alpha(engine: Any) -> None:
    experts = first_layer(engine).experts
    experts.activation, experts.activation_alpha = "swiglu_oai", 1.5


def clamp_at_zero(engine: Any) -> None:
    experts = first_layer(engine).experts
    experts.activation, experts.activation_limit = "swiglu_clamped", 0.0


def late(engine: Any) -> None:
    from deepspeed.moe.layer import MoE

    engine.module.moe.append(MoE(HIDDEN, TwoLinears(), 4, 2))
    engine.module.dense.append(nn.Linear(HIDDEN, HIDDEN))


def nothing(engine: Any) -> None:
    pass


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any], None], str]] = {
    "subclass": ({}, subclass, "moe.0: MyLayer is a subclass of MOELayer that is not known"),
    "gate": ({}, gate_subclass, "moe.0: its gate is a MyGate, wanted a TopKGate"),
    "experts": ({}, experts_subclass, "moe.0: its experts are MyExperts, wanted Experts"),
    "tutel": ({}, tutel, "moe.0: it uses Tutel; leave use_tutel out"),
    "forward": ({}, replaced_forward, "moe.0: its forward method was replaced"),
    "hook": (
        {},
        hooked,
        r"moe.0: experts \(Experts\) has forward hooks, which would not be called",
    ),
    "hook within": (
        {},
        hooked_within,
        r"moe.0: experts.deepspeed_experts.1.fc1 \(Linear\) has backward hooks",
    ),
    "fp64": (
        {},
        double,
        "moe.0: its experts are torch.float64, wanted bfloat16, float16 or float32",
    ),
    "activation": ({}, tanh, "moe.0: expert TwoLinears computes none of the known functions"),
    "one rank": ({}, tanh_on_rank_1, r"moe.0: expert TwoLinears computes none of.*\(on rank 1\)"),
    "other on one rank": (
        {},
        relu_on_rank_1,
        "moe.0: the ranks disagree on activation: gelu on rank 0, relu on rank 1; wanted one",
    ),
    "different experts": ({}, different_experts, "moe.0: its experts differ from each other"),
    "late layer": ({}, late, "moe.2: .*added after deepspeed.initialize"),
    "identity": (
        {"model": {"expert": "no activation"}},
        nothing,
        "moe.0: expert Sequential computes none",
    ),
    "width": ({"model": {"expert": "narrow"}}, nothing, "moe.0: intermediate=96: .* of 64"),
    "topk": (
        {"model": {"num_experts": 20, "k": 17, "drop_tokens": False}},
        nothing,
        "moe.0: topk=17: must be an int, 1 to 16",
    ),
    "autocast": (
        {"config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
        nothing,
        "moe.0: torch_autocast is enabled; enable bf16 or fp16 instead",
    ),
    "kernel": (
        {"settings": {"backend": "kernel"}},
        nothing,
        "moe.0: the kernel needs a Hopper GPU",
    ),
    "autoep subclass": (AUTOEP, subclass, "model.layers.0.mlp: MyLayer is a subclass of AutoEPMoE"),
    "autoep experts": (AUTOEP, experts_subclass, "its experts are MyExperts, wanted GroupedExpe"),
    "autoep hook": (AUTOEP, hooked, r"0.mlp: experts \(GroupedExperts\) has forward hooks"),
    "autoep pre": (
        AUTOEP,
        set_attribute("score_apply", "pre"),
        "before the experts .*wanted 'post'",
    ),
    "autoep deepep": (
        AUTOEP,
        set_attribute("comm_backend", "deepep"),
        "comm_backend is 'deepep', wanted 'comm' or 'flashmoe'",
    ),
    "autoep activation": (
        AUTOEP,
        unknown_form,
        "its experts compute 'swiglu_plus', wanted one of swiglu, .*, swiglu_oai",
    ),
    "autoep alpha": (AUTOEP, other_alpha, "its experts' activation_alpha is 1.5, wanted 1.702"),
    "autoep clamp": (AUTOEP, clamp_at_zero, "clamp_value=0.0: wanted None or a positive number"),
    "autoep as it is": (AUTOEP, nothing, ""),
    "autoep late": (AUTOEP, set_attribute("ep_group", None), "added after deepspeed.initialize"),
}


def outcomes(
    group: dist.ProcessGroup, name: str
) -> tuple[str, dict[str, str], list[str], dict[str, str]]:
    """Attaches with both kinds of fallback.

    Returns:
        The message of the error, the report of the warning, the classes of the layers after both,
        and the report of a second call.
    """
    from flashmoe_megatron.deepspeed import attach
    from flashmoe_megatron.errors import ConfigError

    changes, change, _ = CHANGES[name]
    case = Case(**changes)
    engine = build(case, fused=False)
    change(engine)
    message = ""
    engine.config["flashmoe"] = {"enabled": True, **case.settings}
    try:
        attach(engine)
    except ConfigError as error:
        message = str(error)
    engine.config["flashmoe"]["fallback"] = "warn"
    report = attach(engine)
    classes = [
        type(module).__name__
        for module in engine.module.modules()
        if any(
            "MoELayer" in base.__name__ or "MOELayer" in base.__name__
            for base in type(module).__mro__
        )
    ]
    return message, report, classes, attach(engine)


def tensor_parallel(group: dist.ProcessGroup) -> str:
    """The message about a layer inside of a tensor-parallel group."""
    from deepspeed.utils import groups

    from flashmoe_megatron.deepspeed import attach

    class TensorParallel:
        def get_tensor_model_parallel_world_size(self) -> int:
            return 2

    engine = build(Case(), fused=False)
    groups.mpu = TensorParallel()
    try:
        attach(engine)
    except ValueError as error:
        return str(error)
    finally:
        groups.mpu = None
    return ""
