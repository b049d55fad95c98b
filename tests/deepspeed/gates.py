"""Trains the tests' small model in DeepSpeed with each gate, on two gloo processes.

    torchrun --nproc-per-node 2 -m tests.deepspeed.gates

The model learns what a fixed network of two layers makes of random tokens. There is a line for each
gate: the first loss, the mean of the last ten, and that of tokens that it has not seen; the first
line is of DeepSpeed's own layers. Needs no GPU and no checkout of DeepSpeed.
"""

import sys
from statistics import mean

import torch
import torch.distributed as dist

from tests.deepspeed.harness import Case, build
from tests.deepspeed.models import HIDDEN

STEPS, TOKENS = 150, 128
WAYS: dict[str, tuple[str, bool]] = {
    "DeepSpeed's own layers": ("router", False),
    "router": ("router", True),
    "gshard": ("gshard", True),
    "sigmoid": ("sigmoid", True),
    "xmoe": ("xmoe", True),
}
"""A gate, and whether our experts compute."""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's tokens and what the fixed network makes of them."""
    g = torch.Generator().manual_seed(1)
    into, out = (torch.randn(HIDDEN, HIDDEN, generator=g) / HIDDEN**0.5 for _ in range(2))
    g.manual_seed(1000 * step + dist.get_rank() + 2)
    x = torch.randn(TOKENS, HIDDEN, generator=g)
    return x, torch.relu(x @ into) @ out


def train(gate: str, is_fused: bool) -> tuple[list[float], float]:
    """Returns the losses of all steps, and the loss of new tokens behind them."""
    settings = {"gate": gate} if is_fused else {}
    case = Case(model={"k": 2, "drop_tokens": False}, zero=1, settings=settings)
    engine = build(case, fused=is_fused)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.eval()
    with torch.no_grad():
        return losses, float(engine(*batch(STEPS)))


def main() -> None:
    dist.init_process_group("gloo")
    for way, (gate, is_fused) in WAYS.items():
        losses, evaluated = train(gate, is_fused)
        values = torch.tensor([losses[0], mean(losses[-10:]), evaluated])
        dist.all_reduce(values)
        if dist.get_rank() == 0:
            means = " ".join(f"{float(value):.3f}" for value in values / dist.get_world_size())
            sys.stdout.write(f"{way}: {means}\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
