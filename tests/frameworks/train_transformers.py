"""Trains every kind of model with transformers' own experts and with flashmoe's.

Run: ``python -m tests.frameworks.train_transformers --out FILE``, or with ``--parallel`` under
torchrun on two processes, which share the experts. Rank 0 writes one JSON object per training.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import flashmoe_megatron.transformers
from tests.frameworks import models
from tests.side_by_side import FUSED, OWN, note

Noted = tuple[str, str, list[float]]
"""A training's name, whose experts it had, and its losses."""
STEPS = 3
BOUND = 2 * models.SEQUENCE
"""The tokens of the Trainer's batches."""


def alone() -> Iterator[Noted]:
    """Each kind by Trainer and by accelerate, in float32 and under autocast."""
    flashmoe_megatron.transformers.configure(max_tokens=BOUND)
    loops = {
        "trainer": lambda model: models.with_trainer(model, STEPS, use_cpu=True),
        "autocast": lambda model: models.with_trainer(model, STEPS, use_cpu=True, bf16=True),
        "accelerate": lambda model: models.with_accelerate(model, STEPS, cpu=True),
    }
    for kind in models.KINDS:
        for loop, train in loops.items():
            for experts, implementation in ((OWN, "eager"), (FUSED, "flashmoe")):
                models.forget_accelerate()
                losses, _ = train(models.make_model(kind, implementation))
                yield f"{kind} {loop}", experts, losses


def trained(model: Any, loss_of: Callable[[int], torch.Tensor]) -> list[float]:
    """Trains by plain steps; returns the losses of all ranks, one rank's after the other's.

    Args:
        model: Trained on this rank.
        loss_of: The loss of a step, by its number.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, losses)
    return list(chain(*everyone))


def parallel() -> Iterator[Noted]:
    """Each kind with its experts on two ranks, which have other batches or share one."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    words = models.Words()
    for kind in models.KINDS:
        path = str(Path(folder[0], kind))
        if rank == 0:
            models.make_model(kind, "eager").save_pretrained(path)
        dist.barrier()
        for layout in ({"fsdp_size": 2}, {"tp_size": 2}):
            for experts, implementation in ((OWN, "all_to_all"), (FUSED, "flashmoe")):
                config = DistributedConfig(**layout, ep_size=2, ep_implementation=implementation)
                model = AutoModelForCausalLM.from_pretrained(
                    path, distributed_config=config, dtype=torch.float32
                )

                def of_words(step: int, model: Any = model, layout: Any = layout) -> torch.Tensor:
                    index = 2 * step + rank * ("fsdp_size" in layout)
                    batch = words[index]["input_ids"][None]
                    return model(input_ids=batch, labels=batch).loss

                yield f"{kind} {'+'.join(layout)}", experts, trained(model, of_words)


def normed() -> Iterator[Noted]:
    """Experts with a norm after each, whose weight's gradient comes from both ranks' tokens."""
    from transformers import MuseSparkTextConfig
    from transformers.distributed import DistributedConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 64)
    sizes |= dict.fromkeys(("moe_hidden_size", "moe_intermediate_size"), 64)
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = MuseSparkTextConfig(vocab_size=models.VOCABULARY, **sizes, **ids)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        model = MuseSparkTextModel(config)
        for name, parameter in model.named_parameters():
            if "post_expert_norm" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder[0])
    dist.barrier()
    for experts, implementation in ((OWN, "all_to_all"), (FUSED, "flashmoe")):
        layout = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
        model = MuseSparkTextModel.from_pretrained(
            folder[0], distributed_config=layout, dtype=torch.float32
        )

        def of_rows(step: int, model: Any = model) -> torch.Tensor:
            drawn = torch.Generator().manual_seed(2 * step + dist.get_rank())
            rows = torch.randn(1, models.SEQUENCE, sizes["hidden_size"], generator=drawn)
            out = model(inputs_embeds=rows).last_hidden_state
            return (out * torch.linspace(-1, 1, out.shape[-1])).square().mean()

        yield "muse_spark fsdp_size", experts, trained(model, of_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parallel", action="store_true")
    args = parser.parse_args()
    for noted in chain(parallel(), normed()) if args.parallel else alone():
        note(args.out, *noted, release=transformers.__version__)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
