"""Pretrains a small GPT with mixture-of-experts layers with DeepSpeed, on Python's own library.

The model is plain PyTorch with ``deepspeed.moe.layer.MoE`` for its FFNs; all ranks of the run are
one expert-parallel group, optimizer and gradients are sharded by ZeRO-2. The one difference between
the two runs is ``"flashmoe": {"enabled": true}`` in the configuration: the first has it, is saved,
and is loaded into an engine with DeepSpeed's own layers; the second is made with these from the
start, and the losses of both are printed side by side. With ``--flashmoe-gate`` there is no second
run, since DeepSpeed has no layers with that gate.

Run by examples/pretrain_moe_deepspeed.sh, or under torchrun where everything is installed. On
Hopper GPUs the experts run in the fused kernel, in bfloat16; without a GPU on the reference
backend, in float32.
"""

import argparse
import itertools
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported
warnings.filterwarnings("ignore", category=UserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)

import deepspeed
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn
from tqdm import tqdm

from arguments import add_model_and_data, count
from attention import Attention
from flashmoe_megatron.deepspeed import attach, initialize
from leave import leave
from python_sources import read_sources
from two_runs import compare, judge_reload, log, verdict

END_OF_FILE = 256
VOCABULARY = 257
Batch = tuple[torch.Tensor, torch.Tensor]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_model_and_data(parser)
    add = parser.add_argument
    add("--train-iters", type=count, default=120, help="optimizer steps of each run")
    add("--eval-iters", type=count, default=4, help="batches of a validation")
    add("--topk", type=count, default=2)
    add("--capacity-factor", type=float, default=1.25)
    add("--zero-stage", type=int, choices=[0, 1, 2], default=2)
    add("--num-microbatches", type=count, default=2)
    add("--output", type=Path, default=Path("runs/pretrain_moe_deepspeed"), help="checkpoint")
    add("--flashmoe-backend", choices=["auto", "kernel", "reference"], default="auto")
    add(
        "--flashmoe-gate",
        choices=["router", "gshard", "sigmoid", "xmoe"],
        default="router",
        help="another gate than DeepSpeed's, which no run with its own layers is compared with",
    )
    add("--no-comparison", action="store_true", help="leave the run with DeepSpeed's layers out")
    add("--local_rank", type=int, default=None, help=argparse.SUPPRESS)  # older launchers pass it
    return parser.parse_args()


class SwiGLU(nn.Module):
    """One expert. The adapter recognises it by its computation, not by its class or names."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the expert to ``[..., hidden]``."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Causal attention and a MoE layer."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(args.hidden_size)
        self.attention = Attention(args.hidden_size, args.num_attention_heads)
        self.norm2 = nn.RMSNorm(args.hidden_size)
        self.moe = MoE(
            args.hidden_size,
            SwiGLU(args.hidden_size, args.moe_ffn_hidden_size),
            num_experts=args.num_experts,
            ep_size=dist.get_world_size(),
            k=args.topk,
            capacity_factor=args.capacity_factor,
            eval_capacity_factor=args.capacity_factor,
            drop_tokens=args.flashmoe_gate in ("router", "gshard"),  # the others have no capacity
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``x`` after the block, and the auxiliary loss of its router."""
        x = x + self.attention(self.norm1(x))
        out, aux_loss, _ = self.moe(self.norm2(x))
        return x + out, aux_loss


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.hidden_size)
        self.positions = nn.Embedding(args.seq_length, args.hidden_size)
        self.blocks = nn.ModuleList([Block(args) for _ in range(args.num_layers)])
        self.norm = nn.RMSNorm(args.hidden_size)
        self.head = nn.Linear(args.hidden_size, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Batch:
        """Returns the loss of the language model and the auxiliary losses' sum."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        aux_loss = torch.zeros((), device=x.device)
        for block in self.blocks:
            x, aux = block(x)
            aux_loss = aux_loss + aux
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), aux_loss


def read_text(args: argparse.Namespace) -> Batch:
    """One sequence to train with and one, of every 20th file, to validate with.

    Returns:
        Two ``[num_tokens]`` int16 tensors.
    """
    files = [
        torch.tensor([*text, END_OF_FILE], dtype=torch.int16)
        for text in read_sources(args.data_megabytes)
    ]
    train = [tokens for index, tokens in enumerate(files) if index % 20]
    return torch.cat(train), torch.cat(files[::20])


def batches(text: torch.Tensor, args: argparse.Namespace) -> Iterator[Batch]:
    """This rank's micro-batches, drawn at random, the same in every run."""
    generator = torch.Generator().manual_seed(args.seed)
    offsets = torch.arange(args.seq_length + 1)
    device = "cuda" if HAS_GPU else "cpu"
    samples = args.micro_batch_size * dist.get_world_size()
    first = args.micro_batch_size * dist.get_rank()
    while True:
        starts = torch.randint(len(text) - args.seq_length, (samples, 1), generator=generator)
        mine = text[starts[first : first + args.micro_batch_size] + offsets].long().to(device)
        yield mine[:, :-1], mine[:, 1:]


def build_engine(args: argparse.Namespace, *, fused: bool) -> Any:
    """Builds model and engine, the same for both kinds of layers."""
    torch.manual_seed(args.seed)
    model = GPT(args)
    give_each_expert_its_own(model, args.seed)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.num_microbatches,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": args.lr,
                "betas": [0.9, 0.95],
                "weight_decay": 0.1,
                "torch_adam": True,  # DeepSpeed would first compile its own Adam
            },
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": args.train_iters,
                "warmup_num_steps": max(args.train_iters // 10, 2),
                "warmup_max_lr": args.lr,
            },
        },
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": HAS_GPU},
    }
    if fused:
        config["flashmoe"] = {
            "enabled": True,
            "backend": args.flashmoe_backend,
            "gate": args.flashmoe_gate,
        }
    engine, *_ = initialize(model=model, config=config)
    return engine


@torch.no_grad()
def give_each_expert_its_own(model: nn.Module, seed: int) -> None:
    """Draws every expert's parameters by its number: DeepSpeed starts all as copies of one."""
    for index, moe in enumerate(module for module in model.modules() if isinstance(module, MoE)):
        first = dist.get_rank() * moe.num_local_experts
        for local, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            generator = torch.Generator().manual_seed(seed + 1000 * index + first + local)
            for weight in expert.parameters():
                bound = weight.shape[1] ** -0.5
                weight.uniform_(-bound, bound, generator=generator)


def mean_over_ranks(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def train(engine: Any, text: torch.Tensor, args: argparse.Namespace, name: str) -> list[float]:
    """Trains and returns the losses of all iterations."""
    engine.train()
    torch.manual_seed(args.seed)  # the routers draw noise from it
    iterator = batches(text, args)
    losses = []
    progress = tqdm(
        range(1, args.train_iters + 1),
        desc=name,
        disable=None if dist.get_rank() == 0 else True,  # None: no bar without a terminal
    )
    for iteration in progress:
        total = 0.0
        for tokens, labels in itertools.islice(iterator, args.num_microbatches):
            loss, aux_loss = engine(tokens, labels)
            engine.backward(loss + 1e-2 * aux_loss)
            engine.step()
            total += mean_over_ranks(loss)
        losses.append(total / args.num_microbatches)
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if iteration == 1 or iteration % args.log_interval == 0:
            log(f"  {name} iteration {iteration:4d}/{args.train_iters}: loss {losses[-1]:.4f}")
    return losses


@torch.no_grad()
def evaluate(engine: Any, text: torch.Tensor, args: argparse.Namespace) -> float:
    """The mean loss over the first validation batches."""
    engine.eval()
    torch.manual_seed(args.seed)
    losses = [
        mean_over_ranks(engine(tokens, labels)[0])
        for tokens, labels in itertools.islice(batches(text, args), args.eval_iters)
    ]
    return sum(losses) / len(losses)


def main() -> NoReturn:
    args = parse_args()
    deepspeed.utils.logger.setLevel(logging.ERROR)  # its schedule warns before the first step
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # DeepSpeed would first compile this operator, which serves inference on processors.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    train_text, valid_text = read_text(args)
    log(
        f"{dist.get_world_size()} ranks on {'GPUs' if HAS_GPU else 'processors'}, DeepSpeed "
        f"{deepspeed.__version__}, ZeRO-{args.zero_stage}, {args.num_experts} experts, "
        f"top-{args.topk}, {len(train_text)} bytes of text"
    )

    engine = build_engine(args, fused=True)
    for name, outcome in attach(engine).items():
        log(f"  {name}: {outcome}")
    losses = train(engine, train_text, args, "flashmoe")
    valid_loss = evaluate(engine, valid_text, args)
    if dist.get_rank() == 0:
        shutil.rmtree(args.output / "checkpoint", ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(args.output / "checkpoint"))
    log(f"saved {args.output / 'checkpoint'}; validation loss {valid_loss:.5f}")
    engine.destroy()
    has_counterpart = args.flashmoe_gate == "router"
    engine = build_engine(args, fused=not has_counterpart)
    engine.load_checkpoint(str(args.output / "checkpoint"))
    reloaded = evaluate(engine, valid_text, args)
    other = "DeepSpeed's own layers" if has_counterpart else "a new engine"
    log(f"validation loss of the checkpoint loaded into {other}: {reloaded:.5f}")
    engine.destroy()

    failures = judge_reload(valid_loss, reloaded)
    if has_counterpart and not args.no_comparison:
        stock = train(build_engine(args, fused=False), train_text, args, "deepspeed")
        failures += compare(losses, stock, "DeepSpeed", args)
    leave(verdict(losses, failures, args))


if __name__ == "__main__":
    main()
