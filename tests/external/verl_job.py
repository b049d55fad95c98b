r"""Runs a whole job of verl's SFT trainer on Megatron, with our layers and with alltoall.

A small Qwen3-MoE is trained in the environment of :mod:`tests.external.verl` with Megatron-Bridge,
on two ranks that share the experts. Configuration, tokenizer, dataset, engine, optimizer and
checkpoint are verl's; Transformer Engine is a stand-in, and Megatron's layers are its local ones::

    pip install uvicorn fastapi cachetools
    pip install omegaconf requests importlib_metadata einops rich regex six tqdm pyyaml \
        sentencepiece pillow
    pip install --no-deps megatron-bridge==0.6.2 diffusers
    FLASHMOE_REPLACES=alltoall PYTHONPATH=. python -m tests.external.verl_job
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.external import bridge, jobs
from tests.external.beside import LOCAL
from tests.external.small_model import conversations, save_model

RANKS, STEPS, BATCH = 2, 6, 8
TOLERANCES = {"losses": 1e-3, "grad_norms": 1e-2, "norms": 1e-2}
"""Largest relative differences in bfloat16, the wider of the two types that verl trains in."""


def settings(folder: Path, arm: str) -> list[str]:
    """Returns the arguments that a user gives to verl's command; none names a dispatcher."""
    return [
        "engine=megatron",
        "optim=megatron",
        f"model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={BATCH}",
        "data.micro_batch_size_per_gpu=2",
        "data.use_dynamic_bsz=False",
        "data.max_length=64",
        "data.num_workers=0",
        "model.use_remove_padding=False",  # packed sequences need a kernel of attention
        "engine.use_remove_padding=False",
        "engine.expert_model_parallel_size=2",
        "engine.expert_tensor_parallel_size=1",
        "engine.sequence_parallel=False",
        "engine.override_transformer_config.recompute_modules=null",
        "optim.lr=1e-3",
        "trainer.total_epochs=1",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder / arm}",
        "trainer.resume_mode=disable",
    ]


def make_local() -> None:
    """Has Bridge's providers leave out what a GPU or Transformer Engine would do."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    finalize, forward = GPTModelProvider.finalize, GPTModel.forward

    def finalize_locally(self: Any) -> None:
        for name, value in LOCAL.items():
            if hasattr(self, name) and name != "params_dtype":
                setattr(self, name, value)
        self.transformer_layer_spec = lambda config, **_: get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )
        finalize(self)

    def forward_causally(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Local attention masks what follows a token, and padding is behind all of them.
        kwargs["attention_mask"] = None
        return forward(self, *args, **kwargs)

    GPTModelProvider.finalize = finalize_locally
    GPTModel.forward = forward_causally


def train(arm: str, folder: Path) -> None:
    """Runs verl's own trainer, and writes its losses and what it would hand to a rollout."""
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / f"{arm}.jsonl")
    bridge.prepare()
    make_local()
    from hydra import compose, initialize_config_module
    from verl.trainer import sft_trainer

    names = ("verl", "megatron-bridge", "megatron-core")
    found: dict[str, Any] = {"versions": ", ".join(f"{name} {version(name)}" for name in names)}

    class Trainer(sft_trainer.SFTTrainer):
        """Looks into the model, before the process groups are gone."""

        def fit(self) -> None:
            super().fit()
            handed, _ = self.engine.get_per_tensor_param()
            weights = {name: tensor.clone() for name, tensor in handed}
            found.update(jobs.found_in(self.engine.module, weights))

    sft_trainer.SFTTrainer = Trainer
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine", settings(folder, arm))
    sft_trainer.run_sft(config)
    if os.environ["RANK"] == "0":
        lines = (folder / f"{arm}.jsonl").read_text().splitlines()
        steps = [json.loads(line)["data"] for line in lines]
        found["losses"] = [step["train/loss"] for step in steps]
        found["grad_norms"] = [step["train/grad_norm"] for step in steps]
        (folder / f"{arm}.json").write_text(json.dumps(found))


def both(folder: Path) -> list[str]:
    """Runs both arms; returns a line of how they compare."""
    import pandas

    save_model(folder / "model")
    spoken = pandas.DataFrame({"messages": conversations(STEPS * BATCH)})
    spoken.to_parquet(folder / "train.parquet")
    return [jobs.compare(*jobs.run(__spec__.name, folder, RANKS), TOLERANCES)]


if __name__ == "__main__":
    jobs.of_command_line(train, both)
