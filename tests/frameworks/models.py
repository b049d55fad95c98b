"""Models of transformers with experts of each kind, and what trains them for a few steps."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

KINDS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
VOCABULARY = 96
SEQUENCE = 24


class Words(Dataset):
    """Sequences drawn by their index, the labels being the tokens."""

    def __init__(self, vocabulary: int = VOCABULARY, sequence: int = SEQUENCE) -> None:
        self.vocabulary, self.sequence = vocabulary, sequence

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocabulary, (self.sequence,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def make_config(kind: str, implementation: str, **sizes: int) -> Any:
    """The configuration of a model of two layers.

    Args:
        kind: One of :data:`KINDS`.
        implementation: The experts', such as "eager".
        **sizes: ``hidden``, ``intermediate`` and ``experts``, in place of tiny ones.
    """
    import transformers

    hidden, intermediate = sizes.get("hidden", 64), sizes.get("intermediate", 64)
    experts, heads = sizes.get("experts", 8), sizes.get("heads", 4)
    common = {
        "vocab_size": sizes.get("vocabulary", VOCABULARY),
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts_per_tok": sizes.get("topk", 2),
        "max_position_embeddings": sizes.get("sequence", SEQUENCE),
        "pad_token_id": None,
        "experts_implementation": implementation,
    }
    latent = {
        "n_routed_experts": experts,
        "moe_intermediate_size": intermediate,
        "intermediate_size": intermediate,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
    }
    if kind == "mixtral":
        return transformers.MixtralConfig(
            **common, intermediate_size=intermediate, num_local_experts=experts
        )
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **common,
            moe_intermediate_size=intermediate,
            num_experts=experts,
            head_dim=hidden // heads,
        )
    if kind == "deepseek_v2":
        return transformers.DeepseekV2Config(**common, **latent)
    if kind == "deepseek_v3":
        return transformers.DeepseekV3Config(**common, **latent)
    return transformers.GptOssConfig(
        **common,
        intermediate_size=intermediate,
        num_local_experts=experts,
        head_dim=hidden // heads,
    )


def make_model(
    kind: str, implementation: str, dtype: torch.dtype = torch.float32, **sizes: int
) -> Any:
    """A model whose values depend on its kind and sizes alone."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = make_config(kind, implementation, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def forget_accelerate() -> None:
    """Drops accelerate's state of the process, which would keep the first training's precision."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def with_trainer(model: Any, steps: int, **arguments: Any) -> tuple[list[float], Any]:
    """Returns the losses that transformers' Trainer logs, and the model that it has wrapped."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=7,
            **arguments,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=Words())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model_wrapped


def with_accelerate(
    model: Any, steps: int, make_optimizer: Any = torch.optim.AdamW, **arguments: Any
) -> tuple[list[float], Any]:
    """Returns the mean losses of a loop written with accelerate, and the model that it wraps."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(**arguments)
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model.parameters(), lr=1e-2), DataLoader(Words(), batch_size=2)
    )
    losses = []
    for _, batch in zip(range(steps), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
    return losses, model


def timed_steps(
    model: Any, batch: torch.Tensor, steps: int, sync: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Losses and milliseconds of steps of SGD on one batch.

    Args:
        model: On the batch's device.
        batch: ``[sequences, length]`` token ids.
        steps: How many.
        sync: Waits for the device.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, milliseconds = [], []
    for _ in range(steps):
        sync()
        start = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync()
        milliseconds.append(1e3 * (time.perf_counter() - start))
        losses.append(float(loss.detach()))
    return losses, milliseconds
