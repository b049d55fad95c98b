"""Trains models of transformers with its own experts and with flashmoe's: losses and times.

Run: ``python -m tests.frameworks.on_gpu --out FILE``, on one Hopper GPU. One JSON object per model
and implementation goes to the file and to the screen; flashmoe's says how far its losses are from
those of the eager experts. Ends with 1 if that is more than bfloat16 explains.
"""

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import flashmoe_megatron.transformers
from tests.frameworks import models

IMPLEMENTATIONS = ("eager", "grouped_mm", "flashmoe")
SIZES = {
    "hidden": 2048,
    "intermediate": 768,
    "experts": 64,
    "topk": 8,
    "heads": 16,
    "vocabulary": 8192,
    "sequence": 2048,
}
SEQUENCES = 4
TOLERANCE = 2e-2
"""Relative difference of losses: bfloat16 rounds differently, and routes change with it."""


def train(kind: str, implementation: str, steps: int, device: torch.device) -> dict[str, Any]:
    """One training's record."""
    sizes = SIZES if device.type == "cuda" else {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:  # draws a billion weights there
        model = models.make_model(kind, implementation, dtype, **sizes).to(device)
    words = models.Words(
        sizes.get("vocabulary", models.VOCABULARY), sizes.get("sequence", models.SEQUENCE)
    )
    batch = torch.stack([words[i]["input_ids"] for i in range(SEQUENCES)]).to(device)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, milliseconds = models.timed_steps(
        model, batch, steps, torch.cuda.synchronize if is_gpu else lambda: None
    )
    return {
        "framework": f"transformers {transformers.__version__}",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "model": kind,
        "experts": implementation,
        "sizes": sizes,
        "tokens": batch.numel(),
        "losses": losses,
        "first_step_ms": round(milliseconds[0], 2),
        "step_ms": round(statistics.median(milliseconds[steps // 2 :]), 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if is_gpu else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--models", nargs="+", default=models.KINDS, choices=models.KINDS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        flashmoe_megatron.transformers.configure(backend="kernel")
    worst = 0.0
    for kind in args.models:
        eager: list[float] = []
        for implementation in IMPLEMENTATIONS:
            record = train(kind, implementation, args.steps, device)
            eager = eager or record["losses"]
            pairs = zip(record["losses"], eager, strict=True)
            record["difference"] = max(abs(got - want) / want for got, want in pairs)
            if implementation == "flashmoe":
                worst = max(worst, record["difference"])
            line = json.dumps(record)
            print(line, flush=True)
            with args.out.open("a") as file:
                file.write(line + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return int(not worst < TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
