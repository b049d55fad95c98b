"""Models with MoE layers of both of DeepSpeed's families, small, and their expert modules."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN = 64
WIDTH = 128
"""Width of one expert's FFN."""


class TwoLinears(nn.Module):
    """fc2(act(fc1(x))), the activation being a function."""

    def __init__(self, function: Callable = F.gelu, *, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.fc2 = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.function(self.fc1(x)))


class Gated(nn.Module):
    """SwiGLU and its relatives, with a linear layer for each projection."""

    def __init__(self, function: Callable = F.silu, *, bias: bool = False) -> None:
        super().__init__()
        # Registered in another order than the one of use.
        self.up_proj = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.gate_proj = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.function(self.gate_proj(x)) * self.up_proj(x))


class GatedInOne(nn.Module):
    """The same with gate and up projection in one linear layer, either of them first."""

    def __init__(self, *, up_first: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, 2 * WIDTH, bias=bias)
        self.fc2 = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.up_first = up_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        if self.up_first:
            gate, up = up, gate
        return self.fc2(F.silu(gate) * up)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def sequential(*middle: nn.Module, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(HIDDEN, WIDTH, bias=bias), *middle, nn.Linear(WIDTH, HIDDEN, bias=bias)
    )


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "gelu": TwoLinears,
    "gelu_tanh_no_bias": lambda: TwoLinears(gelu_tanh, bias=False),
    "relu": lambda: sequential(nn.ReLU()),
    "silu_no_bias": lambda: sequential(nn.SiLU(), nn.Dropout(0.0), bias=False),
    "squared_relu": lambda: TwoLinears(squared_relu, bias=False),
    "swiglu": Gated,
    "swiglu_bias": lambda: Gated(bias=True),
    "geglu": lambda: Gated(F.gelu),
    "quick_geglu": lambda: Gated(quick_gelu),
    "swiglu_in_one": GatedInOne,
    "swiglu_up_first": lambda: GatedInOne(up_first=True, bias=True),
}
"""Experts that are recognised, by the names that cases use."""

OTHER_EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "no activation": sequential,
    "narrow": lambda: nn.Sequential(nn.Linear(HIDDEN, 96), nn.GELU(), nn.Linear(96, HIDDEN)),
}
"""Experts that are not recognised, or have a size that is not served."""


def squared_error(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of the mean token, in float32: bfloat16 would hide differences below 0.4%."""
    return (x - y).float().square().sum() / max(len(y), 1)


class NativeModel(nn.Module):
    """Residual blocks of a linear layer and a native MoE layer, with a loss.

    Args:
        ep_sizes: Expert-parallel size of each layer.
        expert: Name in :data:`EXPERTS` or :data:`OTHER_EXPERTS`.
        num_experts: Experts of each layer.
        checkpointing: Recompute MoE layers in backward.
        reentrant: In the older way of torch.
        **moe: Further arguments of ``deepspeed.moe.layer.MoE``.
    """

    def __init__(
        self,
        ep_sizes: tuple[int, ...],
        expert: str = "gelu",
        num_experts: int = 4,
        checkpointing: bool = False,
        reentrant: bool = False,
        **moe: object,
    ) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        make = {**EXPERTS, **OTHER_EXPERTS}[expert]
        self.checkpointing = checkpointing
        self.reentrant = reentrant
        self.dense = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in ep_sizes])
        self.moe = nn.ModuleList(
            [MoE(HIDDEN, make(), num_experts, size, **moe) for size in ep_sizes]
        )
        self.head = nn.Linear(HIDDEN, HIDDEN)
        tell_experts_apart(self)

    def forward(self, x: torch.Tensor, y: torch.Tensor, used: torch.Tensor | None = None):
        aux = 0.0
        for dense, moe in zip(self.dense, self.moe, strict=True):
            x = x + dense(x)
            if self.checkpointing:
                out, l_aux, _ = checkpoint(moe, x, used, use_reentrant=self.reentrant)
            else:
                out, l_aux, _ = moe(x, used)
            x = x + out
            aux = aux + l_aux
        loss = squared_error(self.head(x), y)
        # The auxiliary loss of no tokens is not a number.
        return loss + 0.1 * aux if len(y) else loss


def tell_experts_apart(model: nn.Module) -> None:
    """DeepSpeed copies one expert, on every rank; this gives each its own parameters."""
    for name, module in model.named_modules():
        if type(module).__name__ != "Experts":
            continue
        owner = model.get_submodule(name.removesuffix(".deepspeed_moe.experts"))
        first = dist.get_rank() % owner.ep_size * module.num_local_experts
        for local, expert in enumerate(module.deepspeed_experts):
            g = torch.Generator().manual_seed(100 + first + local)
            for parameter in expert.parameters():
                bound = 1 / parameter.shape[-1] ** 0.5
                with torch.no_grad():
                    parameter.uniform_(-bound, bound, generator=g)


class StackedExperts(nn.Module):
    """Experts as transformers stores them; AutoEP takes them from here."""

    def __init__(self, num_experts: int, limit: float | None) -> None:
        super().__init__()
        self.limit = limit
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * WIDTH, HIDDEN) / 8)
        self.down_proj = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH) / 11)


class SharedExpert(nn.Module):
    """A gated FFN beside the routed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Preset(NamedTuple):
    """How the blocks of one of AutoEP's presets differ from each other."""

    shared: str = ""  # its shared expert's name
    gated_shared: bool = False
    biased: bool = False  # experts are chosen with a bias
    groups: int | None = None
    scale: float | None = None
    limit: float | None = None


PRESETS = {
    "mixtral": Preset(),
    "qwen3_moe": Preset(),
    "qwen3_5_moe": Preset(shared="shared_expert", gated_shared=True),
    "deepseek_v3": Preset(shared="shared_experts", biased=True, groups=2, scale=1.5),
    "minimax_m3": Preset(shared="shared_experts", biased=True, scale=2.0, limit=7.0),
}


class AutoEPModel(nn.Module):
    """A model in which AutoEP finds MoE blocks by its presets.

    Args:
        preset: A key of :data:`PRESETS`.
        num_layers: Blocks.
        num_experts: Experts of each block.
        topk: Experts of a token.
        limit: What clamps the experts' activation, which the configuration then names.
        checkpointing: Recompute MoE blocks in backward.
        reentrant: In the older way of torch.
    """

    def __init__(
        self,
        preset: str = "mixtral",
        num_layers: int = 2,
        num_experts: int = 4,
        topk: int = 2,
        limit: float | None = None,
        checkpointing: bool = False,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.reentrant = reentrant
        kind = PRESETS[preset]
        self.config = SimpleNamespace(
            num_local_experts=num_experts,
            num_experts=num_experts,
            n_routed_experts=num_experts,
            num_experts_per_tok=topk,
            hidden_size=HIDDEN,
            norm_topk_prob=True,
            routed_scaling_factor=kind.scale,
            n_group=kind.groups,
            topk_group=kind.groups and 1,
        )
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for _ in range(num_layers):
            layer = nn.Module()
            layer.dense = nn.Linear(HIDDEN, HIDDEN)
            layer.mlp = nn.Module()
            layer.mlp.gate = nn.Linear(HIDDEN, num_experts, bias=False)
            layer.mlp.experts = StackedExperts(num_experts, limit or kind.limit)
            if kind.shared:
                layer.mlp.add_module(kind.shared, SharedExpert())
            if kind.gated_shared:
                layer.mlp.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)
            if kind.biased:
                layer.mlp.gate.register_buffer(
                    "e_score_correction_bias", torch.linspace(-0.1, 0.1, num_experts)
                )
            self.model.layers.append(layer)
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, y: torch.Tensor, used: None = None) -> torch.Tensor:
        x = x.unsqueeze(0)
        for layer in self.model.layers:
            x = x + layer.dense(x)
            out = (
                checkpoint(layer.mlp, x, use_reentrant=self.reentrant)
                if self.checkpointing
                else layer.mlp(x)
            )
            # Qwen3.5's blocks return the router's logits, too.
            x = x + (out[0] if isinstance(out, tuple) else out).view(x.shape)
        return squared_error(self.head(x[0]), y)
