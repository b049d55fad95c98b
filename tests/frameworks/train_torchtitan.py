"""Trains torchtitan's debug models with its own routed experts and with flashmoe's.

Run: ``python -m tests.frameworks.train_torchtitan --out FILE``, or under torchrun on two processes,
which share the experts. Rank 0 writes one JSON object per training. Attention is torchtitan's
``ScaledDotProductAttention``, since its default is compiled for GPUs.
"""

import argparse
import os
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import (
    CompileConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
    apply_overrides,
)
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models import deepseek_v3, gpt_oss, qwen3
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.gpt_oss.sharding import set_gpt_oss_sharding_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from tests.side_by_side import FUSED, OWN, note

OVERRIDE = "flashmoe_megatron.torchtitan.routed_experts"
VOCABULARY, SEQUENCES, LENGTH = 2048, 2, 32
FLAVORS = {
    "qwen3": (qwen3.model_registry, "debugmodel_moe", set_qwen3_sharding_config),
    "deepseek_v3": (deepseek_v3.model_registry, "debugmodel", set_deepseek_v3_sharding_config),
    "gpt_oss": (gpt_oss.model_registry, "debugmodel", set_gpt_oss_sharding_config),
}
"""Models, and what their ``update_from_config`` calls, which imports the Trainer besides."""


def make_spec(kind: str, parallelism: ParallelismConfig, options: dict[str, Any] | None) -> Any:
    """A model of two layers, with flashmoe's routed experts if options for them are given."""
    registry, flavor, shard = FLAVORS[kind]
    spec = registry(flavor, attn_backend="flex", moe_comm_backend="standard")
    spec.model.layers = spec.model.layers[:2]
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    shard(spec.model, enable_sp=False, enable_ep=parallelism.expert_parallel_degree > 1)
    if options is not None:
        apply_overrides(OverrideConfig(imports=[(OVERRIDE, options)]), spec.model)
    return spec


def train(
    kind: str, options: dict[str, Any] | None, steps: int, device: torch.device, length: int
) -> dict[str, Any]:
    """One training's record."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=world,
        expert_parallel_degree=world,
        spmd_backend="partial_dtensor",
    )
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    spec = make_spec(kind, parallelism, options)
    torch.manual_seed(1)
    model = spec.model.build()
    if world > 1:
        parallel_dims.device_type = device.type  # without a GPU it would be "cuda"
        model = spec.parallelize_fn(
            model,
            parallel_dims=ParallelDims.from_config(parallelism, world),
            training=TrainingConfig(),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo has no sums with a factor
                module.set_force_sum_reduction_for_comms(True)
    model.init_states(buffer_device=torch.device("cpu"))
    # torchtitan's GPT-OSS needs tokens in bfloat16, which FSDP sees to.
    model.to(device, torch.bfloat16 if world == 1 and kind == "gpt_oss" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2 + rank)
    words = torch.randint(VOCABULARY, (SEQUENCES, length + 1), generator=generator).to(device)
    positions = torch.arange(length, device=device).expand(SEQUENCES, -1)
    losses, milliseconds = [], []
    for _ in range(steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = model(words[:, :-1], positions=positions)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        milliseconds.append(1e3 * (time.perf_counter() - start))
    everyone: list[Any] = [losses]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, losses)
    return {
        "framework": f"torchtitan {version('torchtitan')}",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": world,
        "tokens": SEQUENCES * length,
        "losses": [loss for losses in everyone for loss in losses],
        "step_ms": round(statistics.median(milliseconds[steps // 2 :]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    for kind in FLAVORS:
        for options in (None, {}):
            record = train(kind, options, args.steps, torch.device(args.device), args.length)
            note(args.out, kind, OWN if options is None else FUSED, **record)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
