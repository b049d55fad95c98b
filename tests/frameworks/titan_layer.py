"""Runs one layer of torchtitan's routed experts beside flashmoe's: errors and times.

Run: ``python -m tests.frameworks.titan_layer --out FILE``, on one Hopper GPU. It imports no model
of torchtitan's, and so works with torch 2.11, too. Writes one JSON object; ends with 1 if outputs
or gradients differ by more than bfloat16 explains.
"""

import argparse
import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from flashmoe_megatron.torchtitan import routed_experts

TOLERANCE = 2e-2
"""Relative error in the L2 norm."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    is_gpu = args.device == "cuda"
    hidden, intermediate, experts, topk, tokens = (
        (2048, 768, 128, 8, 8192) if is_gpu else (128, 64, 8, 2, 64)
    )
    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(
            dim=hidden, hidden_dim=intermediate, num_experts=experts
        ),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=experts, top_k=topk),
    )
    backend = "kernel" if is_gpu else "reference"
    layers = {"own": config.build(), "flashmoe": routed_experts(config, backend=backend).build()}
    generator = torch.Generator().manual_seed(1)
    for parameter in layers["own"].parameters():
        with torch.no_grad():
            parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    layers["flashmoe"].load_state_dict(layers["own"].state_dict())
    x = torch.randn(1, tokens, hidden, generator=generator).to(args.device, torch.bfloat16)
    logits = torch.randn(1, tokens, experts, generator=generator).to(args.device)
    scores, ids = logits.softmax(-1).topk(topk, dim=-1)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    grad_out = torch.randn(1, tokens, hidden, generator=generator).to(x)
    results, times = {}, {}
    for name, layer in layers.items():
        layer.to(args.device, torch.bfloat16)
        leaves = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
        milliseconds = []
        for _ in range(args.steps):
            if is_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            out = layer(leaves[0], leaves[1], ids, counts)
            grads = torch.autograd.grad(out, [*leaves, *layer.parameters()], grad_out)
            if is_gpu:
                torch.cuda.synchronize()
            milliseconds.append(1e3 * (time.perf_counter() - start))
        names = ["out", "x", "scores", *(path for path, _ in layer.named_parameters())]
        results[name] = dict(zip(names, (out.detach(), *grads), strict=True))
        times[name] = round(statistics.median(milliseconds[args.steps // 2 :]), 3)
    errors = {
        name: float((got.float() - want.float()).norm() / want.float().norm())
        for name, want in results["own"].items()
        for got in (results["flashmoe"][name],)
    }
    line = json.dumps(
        {
            "framework": f"torchtitan {version('torchtitan')}",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if is_gpu else "cpu",
            "layer": [hidden, intermediate, experts, topk],
            "tokens": tokens,
            "forward_backward_ms": times,
            "errors": errors,
        }
    )
    print(line)
    args.out.write_text(line + "\n")
    return int(not max(errors.values()) < TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
