"""Trains LoRA of GPT-OSS-20B's shape on one GPU, with our layers and with Megatron's alltoall.

    torchrun --nproc-per-node 1 -m tools.bench.bench_lora --out runs/lora.jsonl

All 24 layers in bfloat16, about 42 GB, whose weights are drawn. Megatron-Bridge's own ``LoRA``, of
rank 32, adapts attention and experts; its second factors are drawn, too, so that gradients of both
are not zero. Sequences of 2,048 drawn tokens, one in a micro-batch. Both ways train one after the
other in one process, from the same seed. A line says tokens and model TFLOP/s of a GPU, by three
times the products of a forward, in which attention is causal in all layers; Megatron's formula
counts so, also where most weights are frozen.

With ``--turns FOLDER`` each way has a process of its own, where the GPU has memory for both. They
build and warm up beside each other, and then train one after the other. A line says whether its
way was alone on the GPU then, since a process waits for its turn only so long::

    for way in flashmoe alltoall; do
        torchrun --standalone -m tools.bench.bench_lora --dispatchers $way --turns runs/turns &
    done; wait

Wants Megatron-Core, Transformer Engine and ``megatron.bridge.peft``. Without a GPU, under stand-ins
for Transformer Engine, ``--layers`` and the other sizes make it small.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron import install
from flashmoe_megatron.bench.stopwatch import HAS_GPU, device_here, synchronize
from tools.bench import common
from tools.bench.common import Record, log

ADAPTERS = {
    "shared": {"share_expert_adapters": True},
    "each": {"share_expert_adapters": False},
    "outer": {"experts_shared_outer_loras": True},
}
"""Arguments of ``LoRA`` for experts; Bridge's recipe has one adapter that all of a layer share."""
DISPATCHERS = ("flashmoe", "alltoall")
SEED = 1234


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, by default GPT-OSS-20B's."""

    layers: int = 24
    hidden: int = 2880
    heads: int = 64
    groups: int = 8
    channels: int = 64
    experts: int = 32
    topk: int = 4
    vocabulary: int = 201_088
    sequence: int = 2048

    @property
    def flops_of_a_token(self) -> float:
        """FLOPs of a forward and a backward, all of whose products are counted."""
        attention = 2 * self.hidden * self.channels * (2 * self.heads + 2 * self.groups)
        scores = 4 * self.heads * self.channels * self.sequence / 2
        router = 2 * self.hidden * self.experts
        of_experts = self.topk * 2 * 3 * self.hidden**2
        layer = attention + scores + router + of_experts
        return 3 * (self.layers * layer + 2 * self.hidden * self.vocabulary)


def config_of(shape: Shape, dispatcher: str, **more: Any) -> Any:
    """Makes Megatron's configuration of the model."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.channels,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "softmax_type": "learnable",
        "window_size": (127, 0),
        "window_attn_skip_freq": 2,
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.topk,
        "moe_ffn_hidden_size": shape.hidden,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_token_dispatcher_type": dispatcher,
        "cross_entropy_loss_fusion": True,
        "gradient_accumulation_fusion": False,
        "params_dtype": torch.bfloat16,
        "bf16": True,
    }
    return TransformerConfig(**{**options, **more})


def build(shape: Shape, config: Any, adapters: str, rank: int, spec: Any = None) -> Any:
    """Makes the model with its adapters; weights and factors are the same for the same seed."""
    from megatron.bridge.peft.lora import LoRA
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    if spec is None:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.experts, moe_grouped_gemm=True
        )
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        position_embedding_type="rope",
        rotary_base=150_000,
        share_embeddings_and_output_weights=False,
    ).to(device_here())
    lora: Any = LoRA(dim=rank, alpha=rank, **ADAPTERS[adapters])  # type: ignore[arg-type]
    model = lora(model, training=True)
    if config.bf16:
        model = Float16Module(config, model)
    model = model.to(device_here())
    generator = torch.Generator(device_here()).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adapter.linear_out" in name:
                parameter.normal_(std=0.01, generator=generator)
    return model


class Turns:
    """A folder by which the processes of several ways to train take turns on one GPU.

    Attributes:
        is_alone: Whether no other way has been at work since this one's turn began.
    """

    def __init__(self, folder: Path | None, way: str, patience_s: float) -> None:
        """Says which way this process trains; without a folder it waits for none."""
        self._folder, self._way, self._patience_s = folder, way, patience_s
        self.is_alone = True

    def begin(self) -> None:
        """Waits until all ways are warm, and those before this one are done, or loses patience."""
        self._say("warm")
        before = DISPATCHERS[: DISPATCHERS.index(self._way)]
        wanted = [f"{one}.warm" for one in DISPATCHERS] + [f"{one}.done" for one in before]
        end = time.monotonic() + self._patience_s
        while not self._has(wanted) and time.monotonic() < end:
            time.sleep(0.02)
        self.is_alone = self._has(wanted)

    def end(self) -> None:
        """Lets the next way begin."""
        self._say("done")

    def _say(self, what: str) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{self._way}.{what}").touch()

    def _has(self, names: list[str]) -> bool:
        return self._folder is None or all((self._folder / name).exists() for name in names)


def train(
    model: Any,
    shape: Shape,
    *,
    iterations: int,
    micro_batches: int,
    lr: float = 1e-4,
    warm: int = 0,
    when_warm: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Trains the adapters; returns the loss and the seconds of each iteration.

    After ``warm`` iterations ``when_warm`` is called, whose time does not count.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=HAS_GPU)
    generator = torch.Generator(device_here()).manual_seed(SEED)
    positions = torch.arange(shape.sequence, device=device_here())[None]
    mask = None
    if not HAS_GPU:  # Megatron's local attention wants one
        mask = torch.ones(1, 1, shape.sequence, shape.sequence, dtype=torch.bool).triu(1)
    losses, seconds = [], []
    for iteration in range(iterations):
        synchronize()
        if iteration == warm:
            when_warm()
        begin = time.perf_counter()
        total = torch.zeros((), device=device_here())
        for _ in range(micro_batches):
            tokens = torch.randint(
                shape.vocabulary,
                (1, shape.sequence + 1),
                device=device_here(),
                generator=generator,
            )
            loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
            (loss / micro_batches).backward()
            total += loss.detach() / micro_batches
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


def log_time(what: str) -> None:
    """Prints what has been reached, with the seconds since this module was imported."""
    log(f"{time.monotonic() - _START:.1f} s: {what}")


_START = time.monotonic()


def measure(options: argparse.Namespace, shape: Shape, dispatcher: str) -> dict[str, Any]:
    """Builds and trains one way; returns its figures."""
    more = {"moe_router_force_load_balancing": True} if options.forced else {}
    config = config_of(shape, dispatcher, **more)
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    turns = Turns(options.turns, dispatcher, options.patience)

    def when_warm() -> None:
        log_time(f"{dispatcher} is warm")
        turns.begin()

    model = build(shape, config, options.adapters, options.rank)
    log_time(f"{dispatcher} is built")
    losses, seconds = train(
        model,
        shape,
        iterations=options.iterations,
        micro_batches=options.micro_batches,
        warm=options.warm,
        when_warm=when_warm,
    )
    turns.end()
    counted = seconds[options.warm :]
    median = statistics.median(counted)
    tokens = options.micro_batches * shape.sequence
    figures = {
        "dispatcher": dispatcher,
        "alone": turns.is_alone,
        "tokens_per_s": round(tokens / median),
        "tflops": round(tokens * shape.flops_of_a_token / median / 1e12, 1),
        "seconds": [round(each, 4) for each in seconds],
        "losses": losses,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if HAS_GPU else None,
        "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "frozen": sum(each.numel() for each in model.parameters() if not each.requires_grad),
    }
    del model
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
    return figures


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.bench_lora",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dispatchers", nargs="+", default=DISPATCHERS, choices=DISPATCHERS)
    add("--adapters", choices=ADAPTERS, default="shared", help="of experts; attention has its own")
    add("--rank", type=int, default=32)
    add("--iterations", type=int, default=8)
    add("--warm", type=int, default=3, help="the first iterations, which do not count")
    add("--micro-batches", type=int, default=16, help="of one sequence, in an iteration")
    add("--turns", type=Path, metavar="FOLDER", help="empty; by which processes take turns")
    add("--patience", type=float, default=600, metavar="S", help="most seconds until a turn")
    add("--forced", action="store_true", help="Megatron's random routing, the same for all experts")
    for name, default in vars(Shape()).items():
        add(f"--{name}", type=int, default=default)
    common.add_record_flags(parser, a_line="way to train")
    options = parser.parse_args(arguments)
    for name in ("rank", "iterations", "warm", "micro_batches", *vars(Shape())):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: wanted 1 or more")
    if options.warm >= options.iterations:
        parser.error(f"--warm {options.warm}: wanted less than --iterations {options.iterations}")
    if options.turns is not None and len(options.dispatchers) > 1:
        parser.error("--turns: wanted one of --dispatchers in each process")
    if options.turns is not None and [*options.turns.glob(f"{options.dispatchers[0]}.*")]:
        parser.error(f"--turns {options.turns}: wanted a folder without files of an earlier run")
    return options


def main(arguments: list[str], leave: Callable[[int], object] = os._exit) -> None:
    options = parse(arguments)
    common.need_torchrun()
    if not common.has_gpu():
        raise SystemExit(2)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl", device_id=device_here())
    install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    shape = Shape(**{name: getattr(options, name) for name in vars(Shape())})
    record = Record(
        Path(options.out) if options.out else None,
        command=common.called("python -m tools.bench.bench_lora", arguments),
        **common.machine(options.commit),
    )
    for dispatcher in options.dispatchers:
        figures = measure(options, shape, dispatcher)
        record.write(**figures)
        log(
            f"{dispatcher}: {figures['tokens_per_s']} tokens/s, {figures['tflops']} TFLOP/s, "
            f"{figures['peak_gib']} GiB at most, seconds {figures['seconds']}, "
            f"losses {[round(each, 4) for each in figures['losses']]}"
        )
    sys.stdout.flush()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
