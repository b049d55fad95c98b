r"""Measures this machine for degrees that are computed.

::

    torchrun --nproc-per-node 8 -m flashmoe_megatron.schedule fit fit.json

Start it as the training will be, on all ranks of one expert-parallel group, also of several
hosts, and with its ``--exchange`` where copy engines are to carry rows. The file then goes to
``--flashmoe-degree-fit``, or to ``"degree_fit"`` in DeepSpeed's section, beside the degree
``auto``. One rank alone measures products and copies. Without a GPU, gloo is measured.

::

    torchrun --nproc-per-node 8 -m flashmoe_megatron.schedule trace trace.json \
        --degree auto --degree-fit fit.json \
        --hidden 2048 --intermediate 768 --num-experts 128 --topk 8 --gated --tokens 8192

runs one layer in one part and at its degree, and writes time stamps of each stream.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError, FlashMoEError
from flashmoe_megatron.hosts.grid import HostGrid, arrange, host_name
from flashmoe_megatron.options import LAYER_SIZES, BackendOptions, add_flags, add_sizes
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.schedule.fit import machine_of, write_fit, write_json
from flashmoe_megatron.schedule.measure import Sizes, measure
from flashmoe_megatron.schedule.trace import as_json
from flashmoe_megatron.schedule.trace import trace as stamps_of
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.degree import choose_degrees
from flashmoe_megatron.separate.exchange import kind_of
from flashmoe_megatron.telemetry.record import DIRECTIONS

ON_GPU = Sizes(hidden=2048, intermediate=2048, num_experts=8, rows=65536, num_bytes=2**28)
ON_PROCESSOR = Sizes(hidden=256, intermediate=256, num_experts=4, rows=2048, num_bytes=2**22)


def join_group() -> tuple[dist.ProcessGroup | None, HostGrid, torch.device]:
    """The group of the ranks that torchrun has started, its grid, and this rank's device."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, HostGrid(1, 1, 0), device
    dist.init_process_group("nccl" if has_gpu else "gloo")
    ranks = Ranks(dist.group.WORLD)
    return ranks.group, arrange(ranks.gather(host_name()), ranks.rank), device


def fit(options: argparse.Namespace) -> None:
    """Measures and writes the file. Collective over the default group."""
    group, grid, device = join_group()
    default = ON_GPU if device.type == "cuda" else ON_PROCESSOR
    sizes = Sizes(
        hidden=options.hidden or default.hidden,
        intermediate=options.intermediate or default.intermediate,
        num_experts=options.experts or default.num_experts,
        rows=options.rows or default.rows,
        num_bytes=int(options.mib * 2**20) if options.mib else default.num_bytes,
    )
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    found = measure(group, grid, device, getattr(torch, dtype), sizes, exchange=options.exchange)
    if grid.rank == 0:
        write_fit(options.file, found)
        sys.stdout.write(f"{found.machine}, {dtype}\n")
        for name, line in found.lines.items():
            per_second = f"{1 / line.beta_s:.3g}" if line.beta_s else "any number"
            sys.stdout.write(
                f"{name}: {1e6 * line.alpha_s:.1f} us and {per_second} a second, "
                f"r squared {line.r_squared:.5f}\n"
            )
        for name, both in found.beside.items():
            sys.stdout.write(
                f"beside each other: a product {both.product:.2f} and {name} {both.exchange:.2f} "
                "times as long as alone\n"
            )


def trace(options: argparse.Namespace) -> None:
    """Stamps one layer and writes the file. Collective over the default group."""
    group, grid, device = join_group()
    if group is None:
        raise ConfigError("1 rank, with which nothing travels: wanted several, by torchrun")
    config = MoEConfig(
        hidden=options.hidden,
        intermediate=options.intermediate,
        num_experts=options.num_experts,
        topk=options.topk,
        activation=Activation.SILU if options.gated else Activation.GELU,
        gated=options.gated,
        num_ranks=dist.get_world_size(),
        max_tokens=options.tokens,
    )
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    chosen = BackendOptions(
        keep="all",
        degree=options.degree,
        degree_fit=options.degree_fit,
        exchange=options.exchange,
    )
    degrees = choose_degrees(config, chosen, group=group, grid=grid, device=device, dtype=dtype)
    layers = []
    for those in ((1, 1), degrees):
        layer = ScheduledBackend(
            config, group, device=device, options=chosen, grid=grid, degrees=those
        )
        found = stamps_of(layer, group, num_tokens=options.tokens, dtype=dtype, device=device)
        layers.append({"degrees": those, **as_json(found)})
        if grid.rank == 0:
            for direction in DIRECTIONS:
                last = max(one.end_us for one in found[direction])
                sys.stdout.write(
                    f"{direction} in {those[direction == 'backward']}: {last:.0f} us\n"
                )
    if grid.rank == 0:
        machine = machine_of(grid, device, kind_of(chosen.exchange, grid, device))
        about = {"machine": str(machine), "config": dataclasses.asdict(config)}
        write_json(options.file, {**about, "layers": layers})


def main(arguments: list[str]) -> int:
    """Runs from the command line; under torchrun, one process for each rank."""
    options = _parser().parse_args(arguments)
    try:
        for name in ("hidden", "intermediate", "experts", "rows", "mib", "tokens"):
            value = getattr(options, name, None)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name} {value}: wanted more than 0")
        {"fit": fit, "trace": trace}[options.command](options)
    except FlashMoEError as error:
        sys.stderr.write(f"flashmoe_megatron.schedule: {error}\n")
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("flashmoe_megatron.schedule", description=summary)
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="measures alpha and beta of all that a layer does")
    fitting.add_argument("file", type=Path, help="what is written")
    add_sizes(
        fitting,
        {
            "hidden": "model width",
            "intermediate": "columns of a product",
            "experts": "experts of a rank",
            "rows": "most rows of a product or a copy",
        },
    )
    fitting.add_argument("--mib", type=float, help="most MiB of an exchange")
    add_flags(fitting, BackendOptions, names=("exchange",))
    tracing = commands.add_parser("trace", help="stamps one layer, in one part and at its degree")
    tracing.add_argument("file", type=Path, help="what is written")
    add_sizes(tracing, LAYER_SIZES, required=True)
    tracing.add_argument("--gated", action="store_true", help="SwiGLU, else GELU")
    add_flags(tracing, BackendOptions, names=("degree", "degree_fit", "exchange"))
    for command in (fitting, tracing):
        command.add_argument(
            "--dtype", choices=("bfloat16", "float16", "float32"), help="the rows'"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
