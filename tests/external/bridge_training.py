r"""Trains a recipe of Megatron-Bridge, cut in layers, in Bridge's own loop, beside alltoall.

The recipe is Qwen3-30B-A3B's pretraining of 8 H100s, with Bridge's mock data, optimizer and
scheduler. Both jobs begin with the same weights and read the same data. On a machine with GPUs and
Transformer Engine the layers keep their sizes, with four of them in the model::

    FLASHMOE_REPLACES=alltoall,flex PYTHONPATH=. python3.12 -m tests.external.bridge_training

Without GPUs, in the environment of :mod:`tests.external.bridge`, the layers are small and
Megatron's local ones, on two ranks and in float32.
"""

import argparse
import fcntl
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.external.beside import LOCAL, layers
from tests.external.bridge import ABSENT, prepare, stand_in
from tests.external.stand_ins import StandIns

ITERATIONS = 20
VOCABULARY = 32000
UNUSED = ("datasets", "pandas", "pyarrow")
"""What Bridge imports and this job does not call; a package that is installed is used."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a job, and how near its numbers are to alltoall's."""

    ranks: int
    layers: int
    sequence: int
    hugging_face: dict[str, Any]
    tolerances: dict[str, float]


ON_GPU = Sizes(
    ranks=1,
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
)
ON_CPU = Sizes(
    ranks=2,
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


def recipe(sizes: Sizes, *, is_local: bool) -> Any:
    """Makes Bridge's recipe, cut to these sizes."""
    import transformers

    small = transformers.Qwen3MoeConfig(
        **sizes.hugging_face,
        num_hidden_layers=sizes.layers,
        vocab_size=VOCABULARY,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )
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
    batches = {"train_iters": ITERATIONS, "global_batch_size": 8, "micro_batch_size": 1}
    changes: list[tuple[Any, dict[str, Any]]] = [
        (config.model, model),
        (config.tokenizer, tokenizer),
        (config.dataset, {"num_workers": 1, "seq_length": sizes.sequence}),
        (config.train, batches),
        (config.validation, {"eval_iters": 0}),
        (config.scheduler, {"lr_warmup_iters": 2, "lr_decay_iters": ITERATIONS}),
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
    sys.meta_path.append(StandIns(UNUSED))
    if is_local:
        prepare()
    else:
        autoload()  # as torch does where the package is installed
        stand_in(tuple(name for name in ABSENT if name != "transformer_engine"))
    config = recipe(ON_CPU if is_local else ON_GPU, is_local=is_local)
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

    is_first = int(os.environ["RANK"]) == 0  # the others wait for it where groups are made
    held = take_turn(folder) if is_first else None
    pretrain(config, forward_step, callbacks=[Kept()])
    if is_first:
        (folder / f"{arm}.json").write_text(json.dumps(found))
        assert not held.closed


def start(arm: str, folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Starts one arm by torchrun, whose output goes to a file."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if arm == "alltoall":
        environment.pop("FLASHMOE_REPLACES", None)
    with open(folder / f"{arm}.log", "wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc_per_node", str(ranks), "-m", __spec__.name),
                *("--arm", arm, "--folder", str(folder)),
            ],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def numbers_of(arm: str, job: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """Waits for an arm; returns what it wrote.

    Raises:
        AssertionError: The job failed; its last lines are on stderr.
    """
    if job.wait():
        said = (folder / f"{arm}.log").read_text().splitlines()
        sys.stderr.write("\n".join(said[-80:]) + "\n")
    assert job.returncode == 0, f"{arm}: exit status {job.returncode}"
    return json.loads((folder / f"{arm}.json").read_text())


def compare(ours: dict[str, Any], stock: dict[str, Any], sizes: Sizes) -> str:
    """Compares the jobs; returns a line.

    Raises:
        AssertionError: A layer is not ours, or a number is farther from alltoall's than the bound.
    """
    assert (ours["layers"], ours["ours"]) == (sizes.layers, sizes.layers), ours
    assert (stock["layers"], stock["ours"]) == (sizes.layers, 0), stock
    assert len(ours["losses"]) == len(stock["losses"]) == ITERATIONS
    assert stock["losses"][-1] < stock["losses"][0]
    worst = {}
    for what in ("losses", "grad_norms"):
        pairs = list(zip(ours[what], stock[what], strict=True))
        worst[what] = max(abs(got - want) / want for got, want in pairs)
        assert worst[what] <= sizes.tolerances[what], pairs
    return (
        f"{ITERATIONS} iterations on {sizes.ranks} ranks, {sizes.layers} layers of ours; the field "
        f"says {ours['field']}; losses {ours['losses'][0]:.6f} to {ours['losses'][-1]:.6f}, "
        f"within {worst['losses']:.1e} of alltoall's; norms of gradients within "
        f"{worst['grad_norms']:.1e}"
    )


def main(say: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=("flashmoe", "alltoall"))
    parser.add_argument("--folder", type=Path, help="where logs and numbers are kept")
    given = parser.parse_args()
    if given.arm:
        train(given.arm, given.folder)
        return
    sizes = ON_GPU if torch.cuda.is_available() else ON_CPU
    folder = given.folder or Path(tempfile.mkdtemp())
    jobs = {arm: start(arm, folder, sizes.ranks) for arm in ("alltoall", "flashmoe")}
    stock, ours = (numbers_of(arm, job, folder) for arm, job in jobs.items())
    versions = ", ".join(f"{name} {version}" for name, version in ours["versions"].items())
    say(f"{versions}: {compare(ours, stock, sizes)}")
    for name, each in (("alltoall", stock), ("flashmoe", ours)):
        kept = sorted(each["ms"][ITERATIONS // 2 :])
        say(f"{name}: {kept[len(kept) // 2]:.1f} ms an iteration, the later half's median")


if __name__ == "__main__":
    main()
