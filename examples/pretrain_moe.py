"""Pretrains a small GPT with mixture-of-experts layers on the sources of Python's own library.

Built on megatron.core alone: GPTModel, DistributedDataParallel, the distributed optimizer, the
indexed dataset and GPTDataset, and dist_checkpointing; every rank of the run is a rank of the
expert-parallel group. The model is trained with the dispatcher "flashmoe", saved, and loaded into a
model with Megatron's own "alltoall"; then the same run is made with "alltoall" from the start, and
the losses of both are printed side by side.

Run by examples/pretrain_moe.sh, or under torchrun where everything is installed. On Hopper GPUs the
experts run in the fused kernel, in bfloat16; without a GPU on the reference backend, in float32.
"""

import argparse
import itertools
import os
import platform
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from arguments import add_model_and_data, count
from leave import leave
from python_sources import read_sources
from two_runs import compare, judge_reload, log, verdict

# Megatron warns at every import that Apex and Transformer Engine are not installed.
warnings.filterwarnings("ignore", category=UserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    import cpu_bridge

    cpu_bridge.enable()

from flashmoe_megatron.adapters.megatron import configure, install

install()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

LOSS = "lm loss"
Batches = Iterator[dict[str, torch.Tensor]]


class ByteTokenizer:
    """Has a token for each byte and one for the end of a file, as GPTDataset asks for them."""

    eod = 256
    pad = 257
    vocab_size = 258
    special_tokens_dict: ClassVar[dict[str, int]] = {}
    unique_identifiers: ClassVar[dict[str, str]] = OrderedDict(name="bytes")


@dataclass
class Training:
    """One model with all that trains it."""

    gpt: GPTModel
    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_model_and_data(parser)
    add = parser.add_argument
    add("--train-iters", type=count, default=150, help="iterations of each run")
    add("--eval-iters", type=count, default=4, help="batches of a validation")
    add("--moe-router-topk", type=count, default=2)
    add("--num-microbatches", type=count, default=2)
    add("--output", type=Path, default=Path("runs/pretrain_moe"), help="data and checkpoint")
    add("--flashmoe-backend", choices=["auto", "kernel", "reference"], default="auto")
    add(
        "--flashmoe-gate",
        choices=["router", "gshard", "sigmoid", "xmoe"],
        default="router",
        help="another gate than Megatron's router, which no run with alltoall is compared with",
    )
    add("--no-comparison", action="store_true", help="leave the run with alltoall out")
    return parser.parse_args(arguments)


def initialize(args: argparse.Namespace) -> None:
    """Starts torch.distributed and Megatron's groups: every rank data and expert parallel."""
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    configure(
        backend=args.flashmoe_backend,
        gate=args.flashmoe_gate,
        max_tokens=args.seq_length * args.micro_batch_size,
    )


def prepare_text(args: argparse.Namespace) -> str:
    """Writes the sources of Python's library as an indexed dataset of Megatron, once.

    Returns:
        The dataset's path without a suffix.
    """
    directory = args.output / "data" / f"python-{platform.python_version()}-{args.data_megabytes}MB"
    if dist.get_rank() == 0 and not directory.is_dir():
        partial_directory = directory.with_name(f"{directory.name}.{os.getpid()}")
        partial_directory.mkdir(parents=True)
        builder = IndexedDatasetBuilder(str(partial_directory / "text.bin"), dtype=np.uint16)
        for text in read_sources(args.data_megabytes):
            tokens = torch.tensor([*text, ByteTokenizer.eod])
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(str(partial_directory / "text.idx"))
        partial_directory.rename(directory)
    dist.barrier()
    return str(directory / "text")


def build_datasets(args: argparse.Namespace, prefix: str) -> tuple[GPTDataset, GPTDataset]:
    """The samples to train and to validate with; 5 % of the files are kept for the latter."""
    batch = args.micro_batch_size * args.num_microbatches * dist.get_world_size()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([prefix], None),
        split="95,5,0",
        path_to_cache=str(Path(prefix).parent / "cache"),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = [args.train_iters * batch, args.eval_iters * batch, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, samples, lambda: True, config
    ).build()
    return train, valid


def batches(dataset: GPTDataset, args: argparse.Namespace) -> Batches:
    """This rank's micro-batches, in the order of the dataset."""
    size, rank, world = args.micro_batch_size, dist.get_rank(), dist.get_world_size()
    device = "cuda" if HAS_GPU else "cpu"
    for step in itertools.count():
        first = (step * world + rank) * size
        samples = [dataset[index] for index in range(first, first + size)]
        batch = torch.utils.data.default_collate(samples)
        yield {name: value.to(device) for name, value in batch.items()}


def build_training(args: argparse.Namespace, dispatcher: str) -> Training:
    """Builds model, optimizer and schedule, the same for every dispatcher."""
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.moe_ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,  # needs a kernel of Apex
        bf16=HAS_GPU,
        params_dtype=torch.bfloat16 if HAS_GPU else torch.float32,
        pipeline_dtype=torch.bfloat16 if HAS_GPU else torch.float32,
        num_moe_experts=args.num_experts,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_router_topk=args.moe_router_topk,
        moe_router_pre_softmax=args.moe_router_topk == 1,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=dist.get_world_size(),
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=args.num_experts, normalization="RMSNorm"),
        vocab_size=-(-ByteTokenizer.vocab_size // 64) * 64,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    module: torch.nn.Module = gpt
    if HAS_GPU:
        gpt.cuda()
        module = Float16Module(config, gpt)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        module,
    )
    model.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=args.lr,
            min_lr=args.lr / 10,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=HAS_GPU,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=max(args.train_iters // 10, 1),
        lr_decay_steps=args.train_iters,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=args.train_iters,
        wd_incr_style="constant",
    )
    return Training(gpt, model, optimizer, scheduler)


def forward_step(iterator: Batches, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One micro-batch, as Megatron's schedules call it."""
    batch = next(iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(mean_loss, batch["loss_mask"])


def mean_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one micro-batch, and the mean over all ranks to be logged."""
    loss = (losses.float() * loss_mask).sum() / loss_mask.sum()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    return loss, {LOSS: mean / dist.get_world_size()}


def run_batches(
    model: torch.nn.Module, iterator: Batches, args: argparse.Namespace, *, forward_only: bool
) -> float:
    """Runs the micro-batches of one iteration and returns their mean loss over all ranks."""
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=[model],
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    return float(sum(report[LOSS] for report in reports)) / len(reports)


def train(training: Training, dataset: GPTDataset, args: argparse.Namespace, name: str) -> Any:
    """Trains and returns the losses of all iterations."""
    training.model.train()
    iterator = batches(dataset, args)
    losses = []
    progress = tqdm(
        range(1, args.train_iters + 1),
        desc=name,
        disable=None if dist.get_rank() == 0 else True,  # None: no bar without a terminal
    )
    for iteration in progress:
        training.model.zero_grad_buffer()
        training.optimizer.zero_grad()
        losses.append(run_batches(training.model, iterator, args, forward_only=False))
        is_updated, grad_norm, _ = training.optimizer.step()
        if not is_updated:
            raise RuntimeError(f"iteration {iteration}: the optimizer found a gradient not finite")
        training.scheduler.step(1)
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if iteration == 1 or iteration % args.log_interval == 0:
            log(
                f"  {name} iteration {iteration:4d}/{args.train_iters}: "
                f"{LOSS} {losses[-1]:.4f}, gradient norm {float(grad_norm):.3f}"
            )
    return losses


@torch.no_grad()
def evaluate(training: Training, dataset: GPTDataset, args: argparse.Namespace) -> float:
    """The mean loss over the first validation batches."""
    training.model.eval()
    iterator = batches(dataset, args)
    losses = [
        run_batches(training.model, iterator, args, forward_only=True)
        for _ in range(args.eval_iters)
    ]
    return sum(losses) / len(losses)


def save_checkpoint(training: Training, directory: Path) -> None:
    """Saves model, optimizer and schedule as Megatron's distributed checkpoint."""
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    dist.barrier()
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",  # loads on any number of ranks
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    weights = training.gpt.sharded_state_dict(metadata=dict(metadata))
    state = {
        "model": weights,
        "optimizer": training.optimizer.sharded_state_dict(weights, metadata=metadata),
        "scheduler": training.scheduler.state_dict(),
    }
    dist_checkpointing.save(state, str(directory))


def load_weights(training: Training, directory: Path) -> None:
    """Loads the model that was saved, whichever dispatcher either has."""
    state = dist_checkpointing.load({"model": training.gpt.sharded_state_dict()}, str(directory))
    training.gpt.load_state_dict(state["model"])


def main() -> None:
    args = parse_args()
    initialize(args)
    train_set, valid_set = build_datasets(args, prepare_text(args))
    log(
        f"{dist.get_world_size()} ranks on {'GPUs' if HAS_GPU else 'processors'}, "
        f"{args.num_experts} experts, top-{args.moe_router_topk}, "
        f"{len(train_set)} samples of {args.seq_length} bytes"
    )

    training = build_training(args, "flashmoe")
    losses = train(training, train_set, args, "flashmoe")
    valid_loss = evaluate(training, valid_set, args)
    checkpoint = args.output / "checkpoint"
    save_checkpoint(training, checkpoint)
    log(f"saved {checkpoint}; validation loss {valid_loss:.5f}")
    has_counterpart = args.flashmoe_gate == "router"
    other = "alltoall" if has_counterpart else "flashmoe"
    training = build_training(args, other)
    load_weights(training, checkpoint)
    reloaded = evaluate(training, valid_set, args)
    log(f"validation loss of the checkpoint loaded into a model with {other}: {reloaded:.5f}")

    failures = judge_reload(valid_loss, reloaded)
    if has_counterpart and not args.no_comparison:
        stock = train(build_training(args, "alltoall"), train_set, args, "alltoall")
        failures += compare(losses, stock, "alltoall", args)
    leave(verdict(losses, failures, args, LOSS))


if __name__ == "__main__":
    main()
