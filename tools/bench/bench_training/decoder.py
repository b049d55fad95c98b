"""A small decoder with MoE layers of either of DeepSpeed's families, and an engine that trains it.

What the benchmark of DeepSpeed and its tests on several GPUs share. Importing this imports
DeepSpeed; without a GPU everything runs on processors with gloo and the reference backend.
"""

import datetime
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch

HAS_GPU = torch.cuda.is_available()
# Both are read when DeepSpeed is imported. The second keeps it from asking nvcc for its version,
# for operators that are compiled when first used and that nothing here uses.
os.environ["DS_ACCELERATOR"] = "cuda" if HAS_GPU else "cpu"
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")

import deepspeed
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.deepspeed import initialize

Family = Literal["native", "autoep"]
Batch = tuple[torch.Tensor, torch.Tensor]

VOCABULARY = 256
CAPACITY_FACTOR = 1.25
"""The capacity of native layers that drop."""

SEED = 1234
"""Decides the parameters and the batches."""


@dataclass(frozen=True)
class Setup:
    """Describes what is trained, apart from who computes its experts.

    Attributes:
        family: "native" for ``deepspeed.moe.layer.MoE``, "autoep" for layers that AutoEP makes.
        shape: Every MoE layer's; ``tokens`` are those of one rank and micro-batch.
        num_layers: Decoder blocks.
        sequence: Tokens of a sample; divides ``shape.tokens``.
        ep_size: Ranks of an expert-parallel group.
        zero: ZeRO stage.
        drop_tokens: Native layers drop what exceeds the capacity; AutoEP never drops.
        has_attention: Blocks are attention and a MoE layer; else a MoE layer alone, without a norm,
            so that the first one sees embeddings, which are the same in bfloat16 and float32.
        has_biases: Every projection of a native layer's experts has one.
        lr: Learning rate, constant.
        zero_options: Further keys of DeepSpeed's section ``zero_optimization``.
    """

    family: Family
    shape: Shape
    num_layers: int = 2
    sequence: int = 4096
    ep_size: int = 4
    zero: int = 2
    drop_tokens: bool = True
    has_attention: bool = True
    has_biases: bool = False
    lr: float = 1e-3
    zero_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experts:
    """Says who computes the experts.

    Attributes:
        name: In tables and records.
        is_fused: flashmoe, or DeepSpeed's own layer.
        grouped_mm: DeepSpeed's AutoEP layer uses torch's grouped GEMM in place of a loop.
    """

    name: str
    is_fused: bool
    grouped_mm: bool = False


def start(timeout: float = 120.0) -> torch.device:
    """Joins the ranks that torchrun started; NCCL on GPUs, gloo on processors.

    Args:
        timeout: Bounds every collective.

    Returns:
        This rank's device.
    """
    device = torch.device("cpu")
    if HAS_GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        # DeepSpeed would first compile this operator, which serves inference on processors.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group(
        "nccl" if HAS_GPU else "gloo",
        timeout=datetime.timedelta(seconds=timeout),
        **({"device_id": device} if HAS_GPU else {}),
    )
    deepspeed.utils.logger.setLevel("ERROR")  # AutoEP warns that the model is not of transformers
    return device


class SwiGLU(nn.Module):
    """One expert of a native layer, gated."""

    def __init__(self, hidden: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the expert to ``[..., hidden]``."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class StackedExperts(nn.Module):
    """Experts as transformers stores them; AutoEP takes its parameters from here."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, hidden, width = shape.num_experts, shape.hidden, shape.intermediate
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        with torch.no_grad():
            for weight in (self.gate_up_proj, self.down_proj):
                weight.uniform_(-(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)


class StackedBlock(nn.Module):
    """The block that AutoEP replaces: a router and its experts, by the names of its presets."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.num_experts, bias=False)
        self.experts = StackedExperts(shape)


def native_layer(setup: Setup) -> MoE:
    """DeepSpeed's own MoE layer, without anything drawn at random in its forward."""
    shape = setup.shape
    return MoE(
        shape.hidden,
        SwiGLU(shape.hidden, shape.intermediate, bias=setup.has_biases),
        num_experts=shape.num_experts,
        ep_size=setup.ep_size,
        k=shape.topk,
        capacity_factor=CAPACITY_FACTOR,
        eval_capacity_factor=CAPACITY_FACTOR,
        drop_tokens=setup.drop_tokens,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )


class Attention(nn.Module):
    """A norm and then causal attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_heads = max(hidden // 128, 1)
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mixes the tokens of ``[samples, sequence, hidden]``."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a MoE layer, which is named ``mlp`` as AutoEP's presets want."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        hidden = setup.shape.hidden
        self.attention = Attention(hidden) if setup.has_attention else None
        self.norm = nn.RMSNorm(hidden) if setup.has_attention else nn.Identity()
        self.is_native = setup.family == "native"
        self.mlp = native_layer(setup) if self.is_native else StackedBlock(setup.shape)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Returns ``x`` after the block, and the auxiliary loss of its router."""
        if self.attention is not None:
            x = x + self.attention(x)
        out = self.mlp(self.norm(x))
        aux_loss: torch.Tensor | float = 0.0
        if self.is_native:
            out, aux_loss, _ = out
        return x + out.view(x.shape), aux_loss


class Decoder(nn.Module):
    """Predicts the next byte; its loss has the routers' auxiliary losses in it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        shape = setup.shape
        self.config = SimpleNamespace(  # AutoEP reads it
            num_local_experts=shape.num_experts,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.topk,
            hidden_size=shape.hidden,
            norm_topk_prob=True,
        )
        self.model = nn.Module()
        self.model.tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.model.positions = (
            nn.Embedding(setup.sequence, shape.hidden) if setup.has_attention else None
        )
        self.model.layers = nn.ModuleList([Block(setup) for _ in range(setup.num_layers)])
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss of ``[samples, sequence]`` tokens."""
        x = self.model.tokens(tokens)
        if self.model.positions is not None:
            x = x + self.model.positions.weight[: tokens.shape[1]]
        aux_loss: torch.Tensor | float = 0.0
        for block in self.model.layers:
            x, aux = block(x)
            aux_loss = aux_loss + aux
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-2 * aux_loss


def build_engine(
    setup: Setup,
    experts: Experts,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **flashmoe: Any,
) -> Any:
    """An engine with the same parameters for every kind of experts and on every number of ranks.

    Collective over all ranks.

    Args:
        setup: What is trained.
        experts: Who computes the experts.
        device: This rank's.
        dtype: bfloat16, float16, or float32 for a reference.
        **flashmoe: Further keys of the section, where ``experts`` are fused.
    """
    gc.collect()  # some frame still had the last engine when it was released
    if HAS_GPU:
        torch.cuda.empty_cache()
    torch.manual_seed(SEED)
    with device:  # large models are drawn where it is fast
        model = Decoder(setup)
    _tell_experts_apart(model)
    # Every kind of experts begins with values that bfloat16 holds, also in float32.
    model.to(torch.bfloat16).to(dtype)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.shape.tokens // setup.sequence,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            # DeepSpeed's own Adam would be compiled first.
            "params": {"lr": setup.lr, "betas": [0.9, 0.95], "torch_adam": True},
        },
        "zero_optimization": {"stage": setup.zero, **setup.zero_options},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16, "initial_scale_power": 10},
    }
    if setup.family == "autoep":
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": setup.ep_size,
            "preset_model": "mixtral",
            "use_grouped_mm": experts.grouped_mm,
        }
    if experts.is_fused:
        config["flashmoe"] = {"enabled": True, **flashmoe}
    engine, *_ = initialize(model=model, config=config)
    return engine


@torch.no_grad()
def _tell_experts_apart(model: nn.Module) -> None:
    """Draws native experts by their number: DeepSpeed starts all as copies of one."""
    for index, moe in enumerate(module for module in model.modules() if isinstance(module, MoE)):
        first = dist.get_rank() % moe.ep_size * moe.num_local_experts
        for local, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            for weight in expert.parameters():
                generator = torch.Generator(weight.device)
                generator.manual_seed(SEED + 1000 * index + first + local)
                bound = weight.shape[-1] ** -0.5
                weight.uniform_(-bound, bound, generator=generator)


def release(engine: Any) -> None:
    """Takes an engine apart. What it holds in cycles goes when the next one is built."""
    engine.destroy()
    engine.optimizer = None
    engine.module = None


def text_batches(text: torch.Tensor, setup: Setup, device: torch.device) -> Iterator[Batch]:
    """This rank's micro-batches of a text, drawn at random, the same in every run.

    Args:
        text: ``[num_tokens]`` of any integer dtype, the same on every rank.
        setup: Has the sizes.
        device: Where the batches go.
    """
    generator = torch.Generator().manual_seed(SEED)
    offsets = torch.arange(setup.sequence + 1)
    samples = setup.shape.tokens // setup.sequence
    first = samples * dist.get_rank()
    while True:
        starts = torch.randint(
            len(text) - setup.sequence, (samples * dist.get_world_size(), 1), generator=generator
        )
        mine = text[starts[first : first + samples] + offsets].long().to(device)
        yield mine[:, :-1], mine[:, 1:]


def step(engine: Any, batch: Batch) -> torch.Tensor:
    """One optimizer step; this rank's loss, on its device."""
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def mean_over_ranks(values: list[torch.Tensor]) -> list[float]:
    """Losses of all ranks in one. Collective."""
    stacked = torch.stack(values).double()
    dist.all_reduce(stacked)
    return (stacked / dist.get_world_size()).tolist()
