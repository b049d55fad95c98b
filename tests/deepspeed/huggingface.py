"""Trains models of transformers with its Trainer or with accelerate; started by torchrun.

Run: ``torchrun --nproc-per-node 2 -m tests.deepspeed.huggingface --out FILE``. Every job is trained
with DeepSpeed's own AutoEP layers, then with flashmoe, which the programs are given by nothing but
``install()`` and the configuration. Rank 0 writes one JSON object per training into the file.
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from examples.leave import leave
from flashmoe_megatron.deepspeed import attach, install, uninstall
from tests.frameworks.models import SEQUENCE, VOCABULARY, Words

STEPS = 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": SEQUENCE,
    "output_router_logits": True,  # the auxiliary loss is then part of the model's
}


def make_model(kind: str) -> torch.nn.Module:
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(3)
    if kind == "mixtral":
        return MixtralForCausalLM(
            MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=4)
        )
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=8, head_dim=16)
    return Qwen3MoeForCausalLM(config)


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
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=config,
            accelerator_config={"use_configured_state": True},
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=7,
        )
        trainer = Trainer(model=make_model(kind), args=arguments, train_dataset=Words())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model_wrapped


def with_accelerate(kind: str, config: dict[str, Any]) -> tuple[list[float], Any]:
    """The losses of a loop written with accelerate, and the engine that it made."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim
    from torch.utils.data import DataLoader

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = make_model(kind)
    # DeepSpeed makes the optimizer that its configuration names.
    engine, optimizer, loader = accelerator.prepare(
        model, DummyOptim(model.parameters(), lr=1e-2), DataLoader(Words(), batch_size=2)
    )
    losses = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
    return losses, engine


JOBS = {
    "trainer": (with_trainer, "mixtral", 2),
    "accelerate": (with_accelerate, "qwen3_moe", 1),
}


def run_job(name: str, *, fused: bool) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, PartialState

    function, kind, zero = JOBS[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    # Left to itself accelerate knows no backend for processors under DeepSpeed, and takes every
    # process for the only one.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    losses, engine = function(kind, ds_config(kind, zero, fused=fused))
    layers = [module for module in engine.module.modules() if hasattr(module, "flashmoe")]
    return {
        "job": name,
        "fused": fused,
        "losses": losses,
        "report": attach(engine) if fused else {},
        "fused_calls": [layer.flashmoe.experts.num_calls for layer in layers],
    }


def runs() -> Iterator[dict[str, Any]]:
    for name in JOBS:
        yield run_job(name, fused=False)
        install()
        yield run_job(name, fused=True)
        uninstall()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    # An operator for inference that DeepSpeed would compile at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for record in runs():
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    leave(0)


if __name__ == "__main__":
    main()
