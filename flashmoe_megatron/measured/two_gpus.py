"""Times one layer's launches on 2 GPUs, for the overlap efficiency of runs on more of them."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.measured import start
from flashmoe_megatron.measured.calibration import (
    GRADS,
    Entry,
    Grads,
    gpu_name,
    read_entries,
    write_entries,
)
from flashmoe_megatron.options import (
    LAYER_SIZES,
    BackendOptions,
    FrameworkOptions,
    add_flags,
    add_sizes,
)
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.telemetry.record import DIRECTIONS
from flashmoe_megatron.telemetry.reporter import Reduction, agree_layout
from flashmoe_megatron.telemetry.totals import LayerPlace, Totals
from flashmoe_megatron.weights import ExpertWeights

NUM_RANKS = 2
WARM_UP = 5
MOST_ITERATIONS = 80
"""The kernel keeps 256 records, and with ``keep`` "inputs" an iteration leaves three."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the file, what the layer is, and how the run executes it."""
    parser.epilog = (
        "What --keep auto takes depends on the number of ranks: give the mode that the run's log "
        "names."
    )
    parser.add_argument("file", type=Path, help="what is written, or added to")
    add_sizes(parser, LAYER_SIZES, required=True)
    parser.add_argument(
        "--grads",
        choices=GRADS,
        required=True,
        help="where the run's weight gradients go: in Megatron to main_grad; in DeepSpeed "
        "parameters get their own",
    )
    add_flags(parser, FrameworkOptions, names=("backend", "keep", "row_bound"))
    parser.add_argument("--gated", action="store_true", help="gated experts, such as SwiGLU")
    parser.add_argument("--clamp-value", type=float, help="clamps what a gate reads, as GPT-OSS's")
    parser.add_argument("--linear-offset", type=float, default=0.0, help="1 in GPT-OSS's gate")
    parser.add_argument("--glu-interleave", type=int, default=0, help="rows of fc1's blocks")
    parser.add_argument("--activation", choices=[one.value for one in Activation], default="silu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--iterations", type=int, default=20)


def run(options: argparse.Namespace) -> None:
    """Measures a layer and adds it to the file. Collective over the 2 ranks of torchrun.

    Raises:
        ConfigError: The layer cannot be measured, or the file not be written.
    """
    if not 1 <= options.iterations <= MOST_ITERATIONS:
        raise ConfigError(f"--iterations {options.iterations}: wanted 1 to {MOST_ITERATIONS}")
    if options.row_bound == "auto":
        raise ConfigError("--row-bound auto: wanted the bound that the run will have, or none")
    if os.environ.get("WORLD_SIZE") != str(NUM_RANKS):
        raise ConfigError(
            f"{os.environ.get('WORLD_SIZE', 'no')} ranks, wanted {NUM_RANKS}: Oe = T(2) / T(N); "
            "run torchrun --nproc-per-node 2 -m flashmoe_megatron.calibrate ..."
        )
    # A file that cannot be written in the end is refused before it takes time to measure.
    if options.file.exists():
        read_entries(options.file)
    elif not options.file.parent.is_dir():
        folder = options.file.parent
        raise ConfigError(f"{options.file}: there is no folder {folder}, make it first")
    config = start.layer_of(
        options,
        NUM_RANKS,
        activation=Activation(options.activation),
        clamp_value=options.clamp_value,
        linear_offset=options.linear_offset,
        glu_interleave=options.glu_interleave,
    )
    chosen = BackendOptions(keep=options.keep, row_bound=options.row_bound)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    layer = FlashMoELayer(
        config,
        group=dist.group.WORLD,
        dtype=getattr(torch, options.dtype),
        backend=options.backend,
        keep=chosen.keep,
        row_bound=chosen.row_bound,
    )
    entries = measure(
        layer,
        num_tokens=options.tokens,
        iterations=options.iterations,
        bounded=chosen.row_bound is not None,
        grads=options.grads,
    )
    if dist.get_rank() == 0:
        write_entries(options.file, entries)
        for entry in entries:
            sys.stdout.write(f"{entry.time_ms:.4f} ms: {entry.describe()}\n")
    Ranks(dist.group.WORLD).meet()


def measure(
    layer: FlashMoELayer,
    *,
    num_tokens: int,
    iterations: int,
    bounded: bool = False,
    grads: Grads = "own",
) -> list[Entry]:
    """Times a layer's launches, forward and backward. Collective over the world of 2 ranks.

    Each rank has ``num_tokens``. The mean is over ``iterations`` forwards with their backwards.
    With ``grads`` "main_grad" the layer's parameters get one.

    Returns:
        One entry for each direction, the same on both ranks.

    Raises:
        ConfigError: The layer is not on 2 ranks.
    """
    config, weight = layer.config, local_part(layer.fc1)
    group, device = dist.group.WORLD, weight.device
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (num_tokens, config.num_experts)
    chosen = torch.rand(shape, generator=generator).topk(config.topk, dim=1).indices
    routing_map = torch.zeros(shape, dtype=torch.bool).scatter_(1, chosen, True).to(device)
    probs = routing_map.float() / config.topk
    x = torch.randn(num_tokens, config.hidden, generator=generator).to(weight).requires_grad_()
    fc1, fc2 = (local_part(one).detach().requires_grad_() for one in (layer.fc1, layer.fc2))
    weights, parameters = ExpertWeights((fc1,), (fc2,)), (fc1, fc2)
    if grads == "main_grad":
        for parameter in parameters:
            main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def run(count: int) -> None:
        for _ in range(count):
            for tensor in (x, *parameters):
                tensor.grad = None
            out = moe_apply(  # not the layer, which has no main_grad
                layer.backend,
                x,
                probs,
                routing_map,
                weights,
                accumulate_into_main_grad=grads == "main_grad",
            )
            torch.autograd.backward(out, torch.ones_like(out))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        Ranks(dist.group.WORLD).meet()

    run(WARM_UP)
    layer.backend.take_records()
    run(iterations)
    places = {0: LayerPlace(config, dist.get_rank())}
    totals = Totals(agree_layout(places, group), places)
    for record in layer.backend.take_records():
        totals.add(record)
    launches = Reduction(totals, group, device).result().launches
    return [
        Entry.of(
            config,
            num_tokens=num_tokens,
            gpu=gpu_name(device),
            dtype=str(weight.dtype).removeprefix("torch."),
            direction=direction,
            bounded=bounded,
            keep=layer.backend.keep,
            grads=grads,
            time_ms=launches[0, direction].duration_ns / launches[0, direction].launches / 1e6,
        )
        for direction in DIRECTIONS
    ]
