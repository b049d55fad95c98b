"""Runs a whole job of ms-swift's ``megatron sft``, with our layers and with alltoall.

A small Qwen3-MoE is trained in the environment of :mod:`tests.external.swift`, on two ranks that
share the experts. Arguments, tokenizer, dataset, template, trainer, optimizer and checkpoint are
ms-swift's; Transformer Engine is a stand-in, and Megatron's layers are its local ones::

    PYTORCH_JIT=0 FLASHMOE_REPLACES=alltoall PYTHONPATH=. python -m tests.external.swift_job
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.external import jobs, swift
from tests.external.small_model import conversations, save_model

RANKS, STEPS, BATCH = 2, 6, 8
TOLERANCES = {"losses": 1e-6, "grad_norms": 1e-6, "norms": 1e-6}
"""Largest relative differences in float32."""


def settings(folder: Path, arm: str) -> list[str]:
    """Returns the arguments of ms-swift's command for a user; the dispatcher is its default."""
    given = {
        "model": folder / "model",
        "model_type": "qwen3_moe",
        "template": "qwen3",
        "use_hf": "true",
        "check_model": "false",
        "dataset": folder / "train.jsonl",
        "torch_dtype": "float32",
        "bf16": "false",
        "fp16": "false",
        "ddp_backend": "gloo",
        "attention_backend": "local",
        "expert_model_parallel_size": RANKS,
        "micro_batch_size": 2,
        "global_batch_size": BATCH,
        "train_iters": STEPS,
        "lr": 1e-3,
        "lr_warmup_iters": 0,
        "max_length": 64,
        "padding_free": "false",
        "recompute_granularity": "none",
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "logging_steps": 1,
        "save_steps": STEPS,
        "output_dir": folder / arm,
        "add_version": "false",
    }
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def train(arm: str, folder: Path) -> None:
    """Runs ms-swift's own job, and writes its losses and what it would hand to a rollout."""
    swift.prepare()
    make_local()
    from swift.megatron.pipelines.train import sft

    names = ("ms-swift", "mcore-bridge", "megatron-core")
    found: dict[str, Any] = {"versions": ", ".join(f"{name} {version(name)}" for name in names)}

    class Trainer(sft.MegatronTrainer):
        """Looks into the model, before the process groups are gone."""

        def train(self, *args: Any, **kwargs: Any) -> None:
            super().train(*args, **kwargs)
            (model,) = self.unwrapped_models
            found.update(jobs.found_in([model], swift.handed_over(model)))

    sft.MegatronTrainer = Trainer
    sft.megatron_sft_main(settings(folder, arm))
    if os.environ["RANK"] == "0":
        lines = (folder / arm / "logging.jsonl").read_text().splitlines()
        steps = [step for step in map(json.loads, lines) if "loss" in step]
        found["losses"] = [step["loss"] for step in steps]
        found["grad_norms"] = [step["grad_norm"] for step in steps]
        (folder / f"{arm}.json").write_text(json.dumps(found))


def make_local() -> None:
    """Has ms-swift leave out what a GPU or Transformer Engine would do."""
    from swift.megatron.model import utils
    from swift.megatron.trainers import base

    configure, build = utils.get_mcore_model_config, base.get_mcore_model

    def configure_locally(*args: Any) -> Any:
        config = configure(*args)
        swift.make_local(config)
        return config

    def build_locally(*args: Any) -> Any:
        models = build(*args)
        for model in models:
            swift.name_for_the_bridge(model)
        return models

    utils.get_mcore_model_config, base.get_mcore_model = configure_locally, build_locally
    swift.use_local_layers()


def both(folder: Path) -> list[str]:
    """Runs both arms; returns a line of how they compare."""
    save_model(folder / "model")
    lines = [json.dumps({"messages": each}) for each in conversations(STEPS * BATCH)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return [jobs.compare(*jobs.run(__spec__.name, folder, RANKS), TOLERANCES)]


if __name__ == "__main__":
    jobs.of_command_line(train, both)
