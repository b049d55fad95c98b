"""Trains a small GPT with mixture-of-experts layers in plain PyTorch, on Python's own library.

DistributedDataParallel trains the model on all ranks, and groups of ``--ep-size`` ranks share the
experts of a layer. What expert parallelism adds to a program without it is in three places: the
mesh in :func:`main`, the layer in :class:`Block`, and ``prepare_for_ddp`` in front of
DistributedDataParallel.

``--gate`` puts a gate of the literature in front of the experts, in place of the layer's router,
and adds its auxiliary loss. With two of them, expert choice and soft, the prediction for a token
depends on later tokens: they are there to be seen, not to be used in such a model.

Run by examples/train_pytorch.sh, or under torchrun where everything is installed. On Hopper GPUs
the experts run in the fused kernel, in bfloat16; without a GPU on the reference backend, in
float32.
"""

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from arguments import add_model_and_data, count
from attention import Attention
from flashmoe_megatron import FlashMoELayer, MoEConfig, gates, prepare_for_ddp
from flashmoe_megatron.telemetry.metrics import compute_metrics
from flashmoe_megatron.telemetry.reporter import Reduction, agree_layout
from flashmoe_megatron.telemetry.totals import LayerPlace, Totals
from leave import leave
from python_sources import read_sources
from two_runs import HAS_GPU, log, verdict

VOCABULARY = 256
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


GATES = {
    "router": lambda args: None,
    "gshard": lambda args: gates.GShardGate(args.hidden_size, args.num_experts),
    "sigmoid": lambda args: gates.SigmoidGate(args.hidden_size, args.num_experts, topk=args.topk),
    "xmoe": lambda args: gates.XMoEGate(args.hidden_size, args.num_experts, topk=args.topk),
    "expert-choice": lambda args: gates.ExpertChoiceGate(
        args.hidden_size, args.num_experts, capacity_factor=args.topk, allow_future=True
    ),
    "soft": lambda args: gates.SoftMoEGate(
        args.hidden_size,
        args.num_experts,
        slots=max(args.seq_length * args.topk // args.num_experts, 1),
        allow_future=True,
    ),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_model_and_data(parser)
    add = parser.add_argument
    add("--train-iters", type=count, default=120, help="optimizer steps")
    add("--topk", type=count, default=2, help="experts of a token, of gates that let one choose")
    add("--gate", choices=GATES, default="router", help="what chooses the experts of a token")
    add("--aux-loss", type=float, default=0.01, help="factor of a gate's auxiliary loss")
    add("--ep-size", type=count, default=None, help="ranks that share them; all if not given")
    return parser.parse_args()


class Block(nn.Module):
    """Causal attention and a MoE layer."""

    def __init__(self, args: argparse.Namespace, experts: DeviceMesh) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(args.hidden_size)
        self.attention = Attention(args.hidden_size, args.num_attention_heads)
        self.norm2 = nn.RMSNorm(args.hidden_size)
        gate = GATES[args.gate](args)
        config = MoEConfig(
            hidden=args.hidden_size,
            intermediate=args.moe_ffn_hidden_size,
            num_experts=args.num_experts,
            topk=args.topk if gate is None else gate.num_choices,
            activation="silu",
            gated=True,
            num_ranks=experts.size(),
            max_tokens=args.micro_batch_size * args.seq_length * args.topk,
        )
        layer = FlashMoELayer(
            config, group=experts, device=DEVICE, dtype=DTYPE, router=gate is None
        )
        self.moe = layer if gate is None else gates.GatedExperts(gate, layer)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``x`` after the block, and the gate's auxiliary loss."""
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x)
        if isinstance(self.moe, FlashMoELayer):
            return x + self.moe(tokens), x.new_zeros(())
        out, routing = self.moe(tokens)
        return x + out, routing.aux_loss


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, args: argparse.Namespace, experts: DeviceMesh) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.hidden_size)
        self.positions = nn.Embedding(args.seq_length, args.hidden_size)
        self.blocks = nn.ModuleList([Block(args, experts) for _ in range(args.num_layers)])
        self.norm = nn.RMSNorm(args.hidden_size)
        self.head = nn.Linear(args.hidden_size, VOCABULARY, bias=False)
        self.aux_loss = args.aux_loss

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss of ``[batch, sequence]`` bytes, and what is added to train."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        added = torch.zeros((), device=x.device)
        for block in self.blocks:
            x, aux_loss = block(x)
            added = added + self.aux_loss * aux_loss
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), added


def batches(args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's samples and the bytes that follow each of theirs."""
    sources = bytearray().join(read_sources(args.data_megabytes))
    text = torch.frombuffer(sources, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
    offsets = torch.arange(args.seq_length + 1)
    while True:
        starts = torch.randint(
            len(text) - args.seq_length, (args.micro_batch_size, 1), generator=generator
        )
        samples = text[starts + offsets].long().to(DEVICE)
        yield samples[:, :-1], samples[:, 1:]


class Meter:
    """Figures of all ranks' launches since the last line; collective."""

    def __init__(self, model: GPT, experts: DeviceMesh) -> None:
        self.layers = [getattr(block.moe, "layer", block.moe) for block in model.blocks]
        # A layer of plain PyTorch has no number: they are counted together.
        self.places = {0: LayerPlace(self.layers[0].config, experts.get_local_rank())}
        self.layout = agree_layout(self.places, dist.group.WORLD)
        self.began = time.perf_counter()

    def read(self, num_tokens: int) -> str:
        """Tokens per second, and the share of communication during computation."""
        totals = Totals(self.layout, self.places)
        for layer in self.layers:
            for record in layer.backend.take_records():
                totals.add(record)
        reduced = Reduction(totals, dist.group.WORLD, DEVICE).result()
        metrics = compute_metrics(reduced, ["hidden_communication"])
        now = time.perf_counter()
        rate, self.began = num_tokens / (now - self.began), now
        hidden = metrics.get("flashmoe/forward/hidden_communication")
        said = "" if hidden is None else f", {hidden:.0%} of the forward's communication hidden"
        return f"{rate:,.0f} tokens/s{said}"


def train(args: argparse.Namespace) -> list[float]:
    """Trains a model on all ranks; collective.

    Returns:
        The losses of the iterations, the mean of all ranks' without what gates add.
    """
    world = dist.get_world_size()
    ep_size = args.ep_size or world
    mesh = init_device_mesh(DEVICE.type, (world // ep_size, ep_size), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(args.seed)
    model = GPT(args, mesh["ep"]).to(DEVICE, DTYPE)
    log(f"{world} ranks on {'GPUs' if HAS_GPU else 'processors'}, {ep_size} share the experts")
    trained = DistributedDataParallel(prepare_for_ddp(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    meter, losses = Meter(model, mesh["ep"]), []
    samples = itertools.islice(batches(args), args.train_iters)
    for iteration, (tokens, labels) in enumerate(samples, start=1):
        loss, added = trained(tokens, labels)
        (loss + added).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(float(mean) / world)
        if iteration % args.log_interval == 0:
            said = meter.read(world * tokens.numel() * args.log_interval)
            log(f"  iteration {iteration:4d}/{args.train_iters}: loss {losses[-1]:.4f}, {said}")
    return losses


def main() -> NoReturn:
    args = parse_args()
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    leave(verdict(train(args), [], args))


if __name__ == "__main__":
    main()
