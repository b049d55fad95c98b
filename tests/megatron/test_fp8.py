"""Routed experts of runs in FP8, with a stand-in for Transformer Engine's state."""

import contextlib
import itertools
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron import fp8, routed
from flashmoe_megatron.adapters.megatron.config.refusals import check_fp8_experts
from flashmoe_megatron.adapters.megatron.settings import Settings
from flashmoe_megatron.adapters.megatron.shape import is_kept_in_bf16
from flashmoe_megatron.adapters.megatron.weights import expert_weights
from flashmoe_megatron.config import Experts
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import RankPool
from tests.megatron.grouped import TorchGroupedLinear
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer
from tests.megatron.test_layer import run_layer
from tests.unit.cases import make_config

EP2 = Layout(expert=2)


class Engine:
    """What is asked of Transformer Engine: whether parameters are made in FP8, and its autocast."""

    def __init__(self) -> None:
        self.makes_fp8 = False
        self.computes_in_fp8 = False
        self.manager = SimpleNamespace(
            with_fp8_parameters=lambda: self.makes_fp8,
            is_fp8_enabled=lambda: self.computes_in_fp8,
        )

    @contextlib.contextmanager
    def init(self, enabled: bool = True) -> Iterator[None]:
        before, self.makes_fp8 = self.makes_fp8, enabled
        yield
        self.makes_fp8 = before

    @contextlib.contextmanager
    def installed(self, module: str, context: str) -> Iterator[None]:
        """Stands in for a release, by the names that it has."""
        root, state = ModuleType("transformer_engine.pytorch"), ModuleType(module)
        setattr(root, context, self.init)
        state.FP8GlobalStateManager = self.manager  # type: ignore[attr-defined]
        names = {"transformer_engine.pytorch": root, f"transformer_engine.pytorch.{module}": state}
        with pytest.MonkeyPatch.context() as patched:
            for name, value in names.items():
                patched.setitem(sys.modules, name, value)
            yield


RELEASES = [("fp8", "fp8_model_init"), ("quantization", "quantized_model_init")]


@pytest.mark.parametrize(("module", "context"), RELEASES)
def test_experts_have_no_fp8_parameters(module: str, context: str, two_ranks: RankPool) -> None:
    """With ``--fp8-param-gather``; all others have them, and all of other dispatchers' layers."""
    for of_stock, of_fused in two_ranks.run(parameters_in_fp8, module, context):
        experts = {name for name in of_stock if name.startswith("experts.")}
        assert experts
        assert of_stock - of_fused == experts
        assert {name.partition(".")[0] for name in of_fused} == {"router", "shared_experts"}


def parameters_in_fp8(
    group: dist.ProcessGroup, module: str, context: str
) -> tuple[set[str], set[str]]:
    prepare(EP2)
    found = []
    for dispatcher in ("alltoall", "flashmoe"):
        engine, made = Engine(), set()
        config = transformer_config(EP2, dispatcher, moe_shared_expert_intermediate_size=64)

        def note(
            owner: object,
            name: str,
            parameter: object,
            engine: Engine = engine,
            made: set[int] = made,
        ) -> None:
            if engine.makes_fp8:
                made.add(id(parameter))

        hook = torch.nn.modules.module.register_module_parameter_registration_hook(note)
        try:
            with engine.installed(module, context), engine.init():
                layer = make_layer(config)
                assert engine.makes_fp8
        finally:
            hook.remove()
        found.append({name for name, each in layer.named_parameters() if id(each) in made})
    return found[0], found[1]


def test_experts_that_are_built_later_are_as_megatron_has_them() -> None:
    """A layer that another dispatcher serves may come after one that has failed."""
    engine, made = Engine(), list[bool]()
    experts = ModuleType("experts")
    experts.SequentialMLP = type(  # type: ignore[attr-defined]
        "SequentialMLP", (), {"__init__": lambda self: made.append(engine.makes_fp8)}
    )
    fp8.patch_experts(experts)
    with engine.installed(*RELEASES[0]), engine.init():
        with contextlib.suppress(ConfigError), fp8.bfloat16_experts():
            experts.SequentialMLP()
            raise ConfigError("the layer is of no use")
        experts.SequentialMLP()
    assert made == [False, True]


IN_FP8 = {
    "hidden_size": 128,
    "moe_ffn_hidden_size": 128,
    "bf16": True,
    "params_dtype": torch.bfloat16,
}


@pytest.mark.parametrize(
    ("experts", "notice"), [("fp8", fp8.FP8_EXPERTS), ("fp8_dgrad", fp8.FP8_DGRAD)]
)
def test_experts_in_fp8_are_near_alltoalls(
    experts: Experts, notice: str, two_ranks: RankPool
) -> None:
    """As far from a layer in bfloat16 as E4M3 is, and no nearer; the router is the same."""
    for stock, fused, said in two_ranks.run(layers_in_fp8, experts):
        assert fused.keys() == stock.keys()
        for name, tensor in fused.items():
            far = (tensor - stock[name]).float().norm() / stock[name].float().norm()
            assert far < 0.15, (name, far)
            if "experts" in name or name == "output":
                assert far > 0.02, (name, far)
        assert notice in said
        assert fp8.BFLOAT16_EXPERTS not in said


def layers_in_fp8(
    group: dist.ProcessGroup, experts: Experts
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], set[str]]:
    prepare(EP2, experts=experts)
    stock = run_layer(make_layer(transformer_config(EP2, "alltoall", **IN_FP8)))
    engine = Engine()
    engine.computes_in_fp8 = True
    with pytest.MonkeyPatch.context() as patched, engine.installed(*RELEASES[0]):
        patched.setattr(routed, "_said", set())
        layer = make_layer(transformer_config(EP2, "flashmoe", **IN_FP8))
        fused = run_layer(layer)
        assert layer.flashmoe_routed_experts.backend.config.experts == experts
        return stock, fused, routed._said


def test_first_and_last_layers_stay_in_bfloat16(two_ranks: RankPool) -> None:
    """Whatever their experts' flag says, and with the bits of a run in bfloat16."""
    for in_bf16, in_fp8, mixed, said in two_ranks.run(layers_by_number):
        for number, got in enumerate(mixed, 1):
            want, other = (in_fp8, in_bf16) if number in (2, 3) else (in_bf16, in_fp8)
            assert got.keys() == want.keys()
            for name, tensor in got.items():
                assert torch.equal(tensor, want[name]), (number, name)
            assert not torch.equal(got["output"], other["output"])
        first_and_last = "routed experts of the first 1 and last 2 of 5 layers compute in bfloat16"
        assert fp8.FP8_EXPERTS in said
        assert any(line.startswith(first_and_last) for line in said)


def test_the_layers_that_stay_in_bfloat16_are_megatrons() -> None:
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    for is_on, start, end in itertools.product((False, True), (0, 1, 3), (0, 2)):
        config = transformer_config(
            Layout(),
            "flashmoe",
            num_layers=6,
            first_last_layers_bf16=is_on,
            num_layers_at_start_in_bf16=start,
            num_layers_at_end_in_bf16=end,
        )
        for number in range(1, 9):  # layers of multi-token prediction among them
            layer = SimpleNamespace(config=config, layer_number=number)
            assert is_kept_in_bf16(layer) == is_first_last_bf16_layer(config, number - 1)
    assert not is_kept_in_bf16(
        SimpleNamespace(config=SimpleNamespace(num_layers=2), layer_number=1)
    )


Tensors = dict[str, torch.Tensor]


def layers_by_number(
    group: dist.ProcessGroup,
) -> tuple[Tensors, Tensors, list[Tensors], set[str]]:
    # Megatron's losses of routers have a place for each layer of the first model alone.
    plain = {**IN_FP8, "moe_router_load_balancing_type": "none", "num_layers": 5}
    found = []
    for experts in ("bf16", "fp8"):
        prepare(EP2, experts=experts)
        found.append(run_layer(make_layer(transformer_config(EP2, "flashmoe", **plain))))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(routed, "_said", set())
        prepare(EP2, experts="fp8", quantize="step")
        settings = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}
        mixed = []
        for number in range(1, 6):
            layer = make_layer(transformer_config(EP2, "flashmoe", **plain, **settings))
            layer.set_layer_number(number)
            mixed.append(run_layer(layer))
            experts = layer.flashmoe_routed_experts.backend.config.experts
            assert experts == ("fp8" if number in (2, 3) else "bf16")
        return found[0], found[1], mixed, routed._said


class Recipe(Enum):
    """As Megatron has recipes."""

    tensorwise = "tensorwise"
    blockwise = "blockwise"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"fp8": "hybrid", "fp8_recipe": Recipe.tensorwise},
            "--fp8-recipe tensorwise: pass --fp8-recipe blockwise",
        ),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "--fp8-recipe mxfp8: pass"),
        ({"bf16": False, "fp16": True}, "parameters in torch.float16: pass --bf16"),
        ({"bf16": False, "params_dtype": torch.float32}, "parameters in torch.float32: pass"),
        ({"add_bias_linear": True}, "biases: pass --disable-bias-linear"),
        ({"activation_func_clamp_value": 7.0}, "a clamp of activations: leave it out"),
        ({"glu_linear_offset": 1.0}, "--glu-linear-offset: leave it at 0"),
    ],
    ids=str,
)
def test_what_experts_in_fp8_would_not_follow(settings: dict[str, Any], words: str) -> None:
    config = SimpleNamespace(**vars(transformer_config(Layout(), "flashmoe", **IN_FP8)))
    check_fp8_experts(config, Settings(experts="fp8"))
    vars(config).update(settings)
    check_fp8_experts(config, Settings())
    with pytest.raises(ConfigError, match=f"^--flashmoe-experts fp8 with {words}") as refusal:
        check_fp8_experts(config, Settings(experts="fp8"))
    assert str(refusal.value).endswith(", or pass --flashmoe-experts bf16")


@pytest.mark.parametrize("recipe", ["blockwise", Recipe.blockwise])
def test_a_run_in_blockwise_fp8_may_have_such_experts(
    recipe: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformer_config(Layout(), "flashmoe", **IN_FP8)
    for config.fp8 in ("e4m3", "hybrid"):  # a forward is in E4M3 with either
        config.fp8_recipe = recipe
        check_fp8_experts(config, Settings(experts="fp8"))
    with pytest.raises(ConfigError, match=r"fp8_dgrad with --fp8-format hybrid, .*: pass --fp8-fo"):
        check_fp8_experts(config, Settings(experts="fp8_dgrad"))
    config.fp8 = "e4m3"
    check_fp8_experts(config, Settings(experts="fp8_dgrad"))
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    with pytest.raises(ConfigError, match=r"FP32_SCALES=1: leave it out, .* powers of two, or"):
        check_fp8_experts(config, Settings(experts="fp8"))


def test_the_layer_refuses_them(two_ranks: RankPool) -> None:
    for said in two_ranks.run(refused_in_fp8):
        assert "--flashmoe-experts fp8 with biases: pass --disable-bias-linear" in said[0]
        assert "experts='fp8' with hidden=64: wanted a multiple of 128" in said[1]


def refused_in_fp8(group: dist.ProcessGroup) -> list[str]:
    prepare(EP2, experts="fp8")
    said = []
    for more in ({"add_bias_linear": True}, {"hidden_size": 64}):
        config = transformer_config(EP2, "flashmoe", **{**IN_FP8, **more})
        with pytest.raises(ConfigError) as error:
            make_layer(config)
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("is_on", [False, True])
def test_the_call_decides_what_is_said(is_on: bool, two_ranks: RankPool) -> None:
    """Somebody else may enter the autocast, without the flag of Megatron's configuration."""
    for said in two_ranks.run(lines_of_a_call, is_on):
        assert (fp8.BFLOAT16_EXPERTS in said) is is_on


def lines_of_a_call(group: dist.ProcessGroup, is_on: bool) -> set[str]:
    prepare(EP2)
    layer, engine = make_layer(transformer_config(EP2, "flashmoe")), Engine()
    engine.computes_in_fp8 = is_on
    with pytest.MonkeyPatch.context() as patched, engine.installed(*RELEASES[0]):
        patched.setattr(routed, "_said", set())
        layer(torch.randn(16, 2, 64))
        return routed._said


def test_the_flag_is_answered_at_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "_said", set())
    config = transformer_config(Layout(), "flashmoe")
    config.fp8_param = True
    for flag in (None, "hybrid", "hybrid"):
        config.fp8 = flag
        routed._announce(
            ReferenceBackend(make_config()), config, Settings(), is_bounded=flag is None
        )
    said = capsys.readouterr().out
    for line in (fp8.BFLOAT16_EXPERTS, fp8.BFLOAT16_PARAMETERS):
        assert said.count(f"flashmoe: {line}\n") == 1


class Quantized(torch.Tensor):
    """A parameter that somebody has quantized since it was built."""

    __module__ = "transformer_engine.pytorch.tensor.float8_tensor"


def test_quantized_parameters_are_refused_by_name() -> None:
    options = {"init_method": torch.nn.init.normal_, "bias": False}
    experts = torch.nn.Module()
    experts.linear_fc1 = TorchGroupedLinear(2, 64, 128, **options)
    experts.linear_fc2 = TorchGroupedLinear(2, 64, 64, **options)
    expert_weights(experts, hidden=64)
    weight = experts.linear_fc1.weight1.data.as_subclass(Quantized)
    experts.linear_fc1.weight1 = torch.nn.Parameter(weight)
    with pytest.raises(ConfigError, match=r"weight1 is quantized .a Quantized.*bfloat16.*alltoall"):
        expert_weights(experts, hidden=64)
