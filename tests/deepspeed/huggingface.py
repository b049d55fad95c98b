"""Trains models of transformers with its Trainer or with accelerate; started by torchrun.

Run: ``torchrun --nproc-per-node 2 -m tests.deepspeed.huggingface --out FILE``. Every job is trained
with DeepSpeed's own AutoEP layers, then with flashmoe, which the programs are given by nothing but
``install()`` and the configuration. Rank 0 writes one JSON object per training into the file.
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch

from examples.leave import leave
from flashmoe_megatron.deepspeed import attach, install, uninstall
from tests.frameworks import models
from tests.side_by_side import FUSED, OWN, note

STEPS = 4
SIZES = {"mixtral": {"intermediate": 128, "experts": 4}, "qwen3_moe": {}}


def make_model(kind: str) -> torch.nn.Module:
    model = models.make_model(kind, "eager", **SIZES[kind])
    # The auxiliary loss is then part of the model's.
    model.config.output_router_logits = True
    return model


def ds_config(kind: str, zero: int, *, fused: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": 2,
            "preset_model": kind,
            "use_grouped_mm": False,
        },
    }
    if fused and kind == "mixtral":
        config["flashmoe"] = {"enabled": True}
    elif fused:
        config["expert_parallel"]["comm_backend"] = "flashmoe"
    return config


def with_trainer(kind: str, config: dict[str, Any]) -> tuple[list[float], Any]:
    """The losses that transformers' Trainer logs, and the engine that it made."""
    return models.with_trainer(
        make_model(kind),
        STEPS,
        deepspeed=config,
        accelerator_config={"use_configured_state": True},
    )


def with_accelerate(kind: str, config: dict[str, Any]) -> tuple[list[float], Any]:
    """The losses of a loop written with accelerate, and the engine that it made."""
    from accelerate import DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    # DeepSpeed makes the optimizer that its configuration names.
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return models.with_accelerate(make_model(kind), STEPS, DummyOptim, deepspeed_plugin=plugin)


JOBS = {
    "trainer": (with_trainer, "mixtral", 2),
    "accelerate": (with_accelerate, "qwen3_moe", 1),
}


def run_job(name: str, *, fused: bool) -> dict[str, Any]:
    from accelerate.state import PartialState

    function, kind, zero = JOBS[name]
    models.forget_accelerate()
    # Left to itself accelerate knows no backend for processors under DeepSpeed, and takes every
    # process for the only one.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    losses, engine = function(kind, ds_config(kind, zero, fused=fused))
    layers = [module for module in engine.module.modules() if hasattr(module, "flashmoe")]
    return {
        "losses": losses,
        "report": attach(engine) if fused else {},
        "calls": [layer.flashmoe.experts.num_calls for layer in layers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    # An operator for inference that DeepSpeed would compile at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name in JOBS:
        note(out, name, OWN, **run_job(name, fused=False))
        install()
        note(out, name, FUSED, **run_job(name, fused=True))
        uninstall()
    leave(0)


if __name__ == "__main__":
    main()
