"""The seam to NeMo Automodel, with stand-ins for the modules that it patches.

Automodel has an environment of its own, where ``tests/external/automodel.py`` trains its models.
The stand-ins hold what the seam relies on: names of classes, arguments and attributes.
"""

import functools
import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron.errors import ConfigError

MODULES = {
    "models.common.utils": """
        from dataclasses import dataclass

        @dataclass(kw_only=True)
        class BackendConfig:
            dispatcher: str = "torch"
            experts: str = "torch_mm"

            def __post_init__(self):
                if self.experts in ("te", "gmm"):
                    self.dispatcher = "torch"
    """,
    "models.common": "from .utils import BackendConfig",
    "moe.experts": """
        import functools
        import torch
        from torch import nn
        from torch.nn import functional as F

        def weighted_bias_swiglu_impl(x, weights):
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up * weights

        def quick_geglu_deepep(x, weights, alpha=1.702, limit=7.0, linear_offset=1.0):
            gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + linear_offset) * weights

        class GroupedExperts(nn.Module):
            def __init__(self, config, backend=None):
                super().__init__()
                self.config = config
                E, H, F2 = config.n_routed_experts, config.dim, config.moe_inter_dim
                self.gate_and_up_projs = nn.Parameter(torch.randn(E, H, 2 * F2) / 8)
                self.down_projs = nn.Parameter(torch.randn(E, F2, H) / 8)
                has_bias = config.expert_bias
                self.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * F2)) if has_bias else None
                self.down_proj_bias = nn.Parameter(torch.randn(E, H)) if has_bias else None
                self.expert_activation_grouped = config.function

            def forward(self, x, token_mask, weights, indices):
                out = torch.zeros_like(x)
                for expert in range(self.config.n_routed_experts):
                    rows, slots = torch.where((indices == expert) & token_mask[:, None])
                    weight = weights[rows, slots, None]
                    first = x[rows] @ self.gate_and_up_projs[expert]
                    if self.gate_up_proj_bias is not None:
                        first = first + self.gate_up_proj_bias[expert]
                    second = self.expert_activation_grouped(first, weight) @ self.down_projs[expert]
                    if self.down_proj_bias is not None:
                        second = second + self.down_proj_bias[expert] * weight
                    out = out.index_add(0, rows, second)
                return out
    """,
    "_peft.lora_experts": """
        from ..moe.experts import GroupedExperts

        class GroupedExpertsLoRA(GroupedExperts):
            def __init__(self, orig_module, lora_dim=8):
                super().__init__(orig_module.config)
    """,
    "moe.quantized_experts": """
        from .experts import GroupedExperts

        class GroupedExpertsMXFP4(GroupedExperts):
            def __init__(self, orig_module):
                super().__init__(orig_module.config)
    """,
}


def write_stand_ins(folder: Path) -> None:
    root = folder / "nemo_automodel" / "components"
    for name in ("models", "moe", "_peft"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").touch()
    for path in (root, root.parent):
        (path / "__init__.py").touch()
    for name, code in MODULES.items():
        path = root.joinpath(*name.split("."))
        if name == "models.common":
            path = path / "__init__"
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".py").write_text(textwrap.dedent(code))
    info = folder / "nemo_automodel-0.7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nemo-automodel\nVersion: 0.7.0\n")


@pytest.fixture(name="stock")
def _stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-ins with our dispatcher, by their modules' last names."""
    write_stand_ins(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ours = ("flashmoe_megatron.automodel", "flashmoe_megatron.adapters.automodel")
    door = importlib.import_module(ours[0])
    components = "nemo_automodel.components"
    yield SimpleNamespace(
        BackendConfig=importlib.import_module(f"{components}.models.common").BackendConfig,
        experts=importlib.import_module(f"{components}.moe.experts"),
        lora=importlib.import_module(f"{components}._peft.lora_experts").GroupedExpertsLoRA,
        mxfp4=importlib.import_module(f"{components}.moe.quantized_experts").GroupedExpertsMXFP4,
        door=door,
    )
    for name in [*sys.modules]:
        if name.startswith(("nemo_automodel", *ours)):
            del sys.modules[name]


def make(stock: Any, backend: Any, function: Any = None, *, has_bias: bool = False) -> Any:
    torch.manual_seed(1)
    config = SimpleNamespace(
        n_routed_experts=4,
        dim=64,
        moe_inter_dim=64,
        expert_bias=has_bias,
        function=function or stock.experts.weighted_bias_swiglu_impl,
    )
    return stock.experts.GroupedExperts(config, backend=backend)


def compute(experts: Any) -> list[torch.Tensor]:
    """The output of ten tokens, of which two count for nothing, and all gradients."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(10, 64, generator=generator, requires_grad=True)
    weights = torch.rand(10, 2, generator=generator, requires_grad=True)
    indices = torch.stack([torch.arange(10) % 4, (torch.arange(10) + 1) % 4], dim=1)
    out = experts(x, torch.arange(10) < 8, weights, indices)
    given = [x, weights, *experts.parameters()]
    return [out, *torch.autograd.grad(out.square().sum(), given)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("function", ["weighted_bias_swiglu_impl", "quick_geglu_deepep"])
def test_experts_compute_what_the_stock_ones_do(stock: Any, function: str, has_bias: bool):
    between = getattr(stock.experts, function)
    if function == "quick_geglu_deepep":
        between = functools.partial(between, alpha=1.702, limit=0.5)
    made = [
        make(stock, stock.BackendConfig(dispatcher=name), between, has_bias=has_bias)
        for name in ("flashmoe", "torch")
    ]
    assert [hasattr(each, "flashmoe_options") for each in made] == [True, False]
    for got, want in zip(*map(compute, made), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_another_function_is_refused_whenever_it_comes(stock: Any):
    experts = make(stock, stock.door.BackendConfig())
    compute(experts)
    experts.expert_activation_grouped = functools.partial(
        stock.experts.quick_geglu_deepep, alpha=1.5
    )
    with pytest.raises(ConfigError, match=r"quick_geglu_deepep with alpha=1.5: wanted 1.702"):
        compute(experts)
    experts.expert_activation_grouped = compute
    with pytest.raises(ConfigError, match="the experts call compute between their projections"):
        compute(experts)


def test_options_reach_the_experts_and_bad_ones_are_refused(stock: Any):
    config = stock.door.BackendConfig(flashmoe={"max_tokens": 4})
    experts = make(stock, config)
    assert experts.flashmoe_options.max_tokens == 4
    with pytest.raises(Exception, match="give backend.flashmoe max_tokens: 10, or leave it out"):
        compute(experts)
    for given, sentence in (
        ({"flashmoe": {"max_token": 4}}, r"option 'max_token' is unknown, the nearest is"),
        ({"flashmoe": 4}, "flashmoe=4: wanted options by name"),
        ({"dispatcher": "torch"}, "dispatcher='torch' in flashmoe_megatron.automodel"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            stock.door.BackendConfig(**given)


@pytest.mark.parametrize("experts", ["te", "gmm", "torch_mm_mxfp8"])
def test_experts_that_would_take_the_layer_away_are_refused(stock: Any, experts: str):
    sentence = f"backend.experts='{experts}' with dispatcher='flashmoe'"
    for kind in (stock.BackendConfig, stock.door.BackendConfig):
        with pytest.raises(ConfigError, match=sentence):
            kind(dispatcher="flashmoe", experts=experts)
    assert stock.BackendConfig(dispatcher="deepep", experts="te").dispatcher == "torch"


def test_classes_with_a_forward_of_their_own_are_refused(stock: Any):
    ours = make(stock, stock.door.BackendConfig())
    for kind, sentence in ((stock.lora, "LoRA on experts"), (stock.mxfp4, "MXFP4 storage")):
        with pytest.raises(ConfigError, match=f"^{sentence}.* take dispatcher: torch"):
            kind(ours)
        kind(make(stock, stock.BackendConfig()))


def test_another_release_is_said_once_and_one_without_the_seam_is_refused(
    stock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.8.1")
    for _ in range(2):
        stock.BackendConfig(dispatcher="flashmoe")
    said = [record.message for record in caplog.records]
    assert said == [
        "NeMo Automodel 0.8.1 is newer than the tested releases 0.7; install one of these"
    ]
    monkeypatch.setattr(stock.experts.GroupedExperts, "forward", lambda self, x: x)
    with pytest.raises(ConfigError, match=r"0\.8\.1 lacks a forward of GroupedExperts"):
        stock.BackendConfig(dispatcher="flashmoe")


def test_the_environment_alone_brings_the_dispatcher(tmp_path: Path):
    write_stand_ins(tmp_path)
    code = (
        "from flashmoe_megatron.autoload import autoload; autoload(); "
        "from nemo_automodel.components.moe.experts import GroupedExperts; "
        "print(hasattr(GroupedExperts.forward, '_flashmoe_original'))"
    )
    for value, patched in (("1", "True"), ("0", "False")):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
            env={"FLASHMOE_AUTOLOAD": value, "PYTHONPATH": ":".join(sys.path), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [patched], done.stderr
