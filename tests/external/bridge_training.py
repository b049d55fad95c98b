r"""Trains a recipe of Megatron-Bridge, cut in layers, in Bridge's own loop, beside alltoall.

The recipe is Qwen3-30B-A3B's pretraining of 8 H100s, with Bridge's mock data, optimizer and
scheduler. Both jobs begin with the same weights and read the same data. The trained model with our
layers goes to Hugging Face and back. On a machine with GPUs and Transformer Engine the layers keep
their sizes, with four of them in the model::

    FLASHMOE_REPLACES=alltoall,flex PYTHONPATH=. python3.12 -m tests.external.bridge_training

Without GPUs, in the environment of :mod:`tests.external.bridge`, the layers are small and
Megatron's local ones, on two ranks and in float32.
"""

import fcntl
import importlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.external import jobs
from tests.external.beside import LOCAL, layers
from tests.external.bridge import ABSENT, load_again, prepare, stand_in
from tests.external.stand_ins import StandIns

VOCABULARY = 32000
UNUSED = ("datasets", "pandas", "pyarrow")
"""What Bridge imports and this job does not call; a package that is installed is used."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a job, and how near its numbers are to alltoall's."""

    ranks: int
    iterations: int
    layers: int
    sequence: int
    hugging_face: dict[str, Any]
    tolerances: dict[str, float]
    lr: float = 3e-4


ON_GPU = Sizes(
    ranks=1,
    iterations=12,
    layers=4,
    sequence=4096,
    hugging_face={
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    tolerances={"losses": 1e-2, "grad_norms": 1e-1},
    lr=3e-5,  # with the recipe's own, ten times that, rounding grows to other losses
)
ON_CPU = Sizes(
    ranks=2,
    iterations=20,
    layers=2,
    sequence=64,
    hugging_face={
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    tolerances={"losses": 1e-5, "grad_norms": 1e-5},
)


def in_hugging_face(sizes: Sizes) -> Any:
    """Makes Hugging Face's configuration of the model."""
    import transformers

    return transformers.Qwen3MoeConfig(
        **sizes.hugging_face,
        num_hidden_layers=sizes.layers,
        vocab_size=VOCABULARY,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )


def recipe(sizes: Sizes, small: Any, *, is_local: bool) -> Any:
    """Makes Bridge's recipe, cut to these sizes, of a model that is small in Hugging Face."""
    import transformers

    transformers.AutoConfig.from_pretrained = lambda *_, **__: small  # there is no hub here
    from megatron.bridge.recipes.qwen.h100.qwen3_moe import (
        qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config as make,
    )

    config = make()
    if is_local:
        make_local(config)
    model = {
        "seq_length": sizes.sequence,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "pipeline_dtype": None,
        "expert_model_parallel_size": sizes.ranks,
        "sequence_parallel": False,
        "vocab_size": VOCABULARY,
        "gradient_accumulation_fusion": False,  # it would need Apex
    }
    tokenizer = {
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
        "vocab_size": VOCABULARY,
        "hf_tokenizer_kwargs": {},
    }
    batches = {"train_iters": sizes.iterations, "global_batch_size": 8, "micro_batch_size": 1}
    changes: list[tuple[Any, dict[str, Any]]] = [
        (config.model, model),
        (config.tokenizer, tokenizer),
        (config.dataset, {"num_workers": 1, "seq_length": sizes.sequence}),
        (config.train, batches),
        (config.validation, {"eval_iters": 0}),
        (config.optimizer, {"lr": sizes.lr, "min_lr": sizes.lr / 10}),
        (config.scheduler, {"lr_warmup_iters": 2, "lr_decay_iters": sizes.iterations}),
        (config.checkpoint, {"save": None, "load": None}),
        (config.logger, {"log_interval": 1, "tensorboard_dir": None}),
    ]
    for part, values in changes:
        for name, value in values.items():
            assert hasattr(part, name), f"{type(part).__name__} has no {name}"
            setattr(part, name, value)
    return config


def make_local(config: Any) -> None:
    """Leaves out of a recipe what a GPU or Transformer Engine would do."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    for name, value in LOCAL.items():
        if hasattr(config.model, name):
            setattr(config.model, name, value)
    config.model.transformer_layer_spec = lambda config, **_: get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    config.mixed_precision = None
    config.model.bf16 = False
    config.optimizer.bf16 = False
    config.ddp.grad_reduce_in_fp32 = True


def take_turn(folder: Path) -> Any:
    """Waits until the other arm's job has ended or has not begun to train; holds what is returned.

    Both import at once, which takes longer than the training; the memory of a GPU is for one.
    """
    held = open(folder / "turn", "w")  # noqa: SIM115  # closed when the process ends
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def train(arm: str, folder: Path) -> None:
    """Trains one arm in Bridge's loop, and writes its losses and times."""
    from flashmoe_megatron.autoload import autoload

    is_local = not torch.cuda.is_available()
    sizes = ON_CPU if is_local else ON_GPU
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # so that a run can be had again
    sys.meta_path.append(StandIns(UNUSED))
    if is_local:
        prepare()
    else:
        autoload()  # as torch does where the package is installed
        stand_in(tuple(name for name in ABSENT if name != "transformer_engine"))
    small = in_hugging_face(sizes)
    config = recipe(sizes, small, is_local=is_local)
    named = config.model.moe_token_dispatcher_type
    if arm == "alltoall":
        config.model.moe_token_dispatcher_type = "alltoall"  # flex would need DeepEP
    from megatron.bridge import __version__
    from megatron.bridge.training import initialize
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core import __version__ as core

    initialize.compile_helpers = lambda: None  # the wheel holds them compiled, without a makefile
    loop = importlib.import_module("megatron.bridge.training.train")
    loop.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None  # nothing distills
    found: dict[str, Any] = {
        "versions": {"megatron-bridge": __version__, "megatron-core": core},
        "field": named,
        "losses": [],
        "grad_norms": [],
        "ms": [],
    }

    class Kept(Callback):
        """Keeps the numbers of each step."""

        def on_train_start(self, context: Any) -> None:
            built = [each for model in context.model for each in layers(model)]
            found["layers"] = len(built)
            found["ours"] = sum(hasattr(each, "flashmoe_routed_experts") for each in built)

        def on_train_step_start(self, context: Any) -> None:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_train_step_end(self, context: Any) -> None:
            torch.cuda.synchronize()
            found["ms"].append(1e3 * (time.perf_counter() - self.began))
            found["losses"].append(float(context.loss_dict["lm loss"]))
            found["grad_norms"].append(float(context.grad_norm))

        def on_train_end(self, context: Any) -> None:
            if held is not None:
                held.close()  # the other arm trains meanwhile
            if arm == "flashmoe":
                found["converted"] = convert(small, context.model)

    is_first = int(os.environ["RANK"]) == 0  # the others wait for it where groups are made
    held = take_turn(folder) if is_first else None
    pretrain(config, forward_step, callbacks=[Kept()])
    if is_first:
        (folder / f"{arm}.json").write_text(json.dumps(found))


def convert(small: Any, models: list[Any]) -> int:
    """Takes models to Hugging Face and back by Bridge; returns the number of experts' tensors.

    Raises:
        AssertionError: A weight is another than before, or an expert's is missing.
    """
    from megatron.bridge import AutoBridge

    converter = AutoBridge.from_hf_config(small)
    exported = dict(converter.export_hf_weights(models, cpu=True, show_progress=False))
    of_experts = [name for name in exported if ".experts." in name]
    assert len(of_experts) == small.num_hidden_layers * small.num_experts * 3
    with tempfile.TemporaryDirectory(suffix="Qwen3") as made:
        folders = [made]
        dist.broadcast_object_list(folders)
        load_again(converter, small, models, exported, Path(folders[0]))
        dist.barrier()
    return len(of_experts)


def compare(ours: dict[str, Any], stock: dict[str, Any], sizes: Sizes) -> str:
    """Compares the jobs; returns a line.

    Raises:
        AssertionError: A layer is not ours, or a number is farther from alltoall's than the bound.
    """
    assert (ours["layers"], ours["ours"]) == (sizes.layers, sizes.layers), ours
    assert (stock["layers"], stock["ours"]) == (sizes.layers, 0), stock
    assert len(ours["losses"]) == len(stock["losses"]) == sizes.iterations
    assert stock["losses"][-1] < stock["losses"][0]
    worst = {}
    for what in ("losses", "grad_norms"):
        worst[what] = jobs.largest_distance(ours[what], stock[what])
        assert worst[what] <= sizes.tolerances[what], (what, ours[what], stock[what])
    return (
        f"{sizes.iterations} iterations on {sizes.ranks} ranks, {sizes.layers} layers of ours; the "
        f"field says {ours['field']}; losses {ours['losses'][0]:.6f} to {ours['losses'][-1]:.6f}, "
        f"within {worst['losses']:.1e} of alltoall's; norms of gradients within "
        f"{worst['grad_norms']:.1e}; {ours['converted']} tensors of experts went to Hugging Face "
        "and back"
    )


def both(folder: Path) -> list[str]:
    """Runs both arms; returns lines of how they compare, and of their times."""
    sizes = ON_GPU if torch.cuda.is_available() else ON_CPU
    ours, stock = jobs.run(__spec__.name, folder, sizes.ranks)
    versions = ", ".join(f"{name} {version}" for name, version in ours["versions"].items())
    lines = [f"{versions}: {compare(ours, stock, sizes)}"]
    for name, each in (("alltoall", stock), ("flashmoe", ours)):
        kept = sorted(each["ms"][sizes.iterations // 2 :])
        median = kept[len(kept) // 2]
        lines.append(f"{name}: {median:.1f} ms an iteration, the later half's median")
    return lines


if __name__ == "__main__":
    jobs.of_command_line(train, both)
