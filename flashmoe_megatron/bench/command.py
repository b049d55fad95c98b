"""Times a layer of your own, and torch's and Megatron's on the same data, on this machine's GPUs.

    python -m flashmoe_megatron.bench --config config.json
    python -m flashmoe_megatron.bench 8192x2048x768x128x8 --gated --picture bench.png
    torchrun --nproc-per-node 4 -m flashmoe_megatron.bench --megatron $GPT_ARGS

The layer is a model's, by its config.json of transformers or by the flags of Megatron's script, or
has the sizes TOKENSxHIDDENxINTERMEDIATExEXPERTSxTOPK. Tokens are those of one rank. Experts have
the model's function, clamp, offset of the up rows and biases, as GPT-OSS's have all of them; those
of sizes have SwiGLU where they are gated, else GELU. Shared experts and the router are not
measured. All implementations get the same random tokens, weights and routing, in bfloat16.

First every result, forward and backward, is compared with float32's, which are computed expert by
expert. A layer that is further off than 6e-3 gets no times, and if it is ours the exit status is 1.
Times are medians over calls of the slowest rank, each from an idle GPU; TFLOP/s are one GPU's. What
a forward keeps for its backward is counted without its input. A CPU runs the reference on a small
layer of the same form, which tries the command and tells nothing about a GPU. The exit status is 2
where nothing can be measured.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron._version import __version__
from flashmoe_megatron.bench import measure, stopwatch, table
from flashmoe_megatron.bench.described import (
    TOKENS,
    Described,
    from_config,
    from_megatron,
    from_text,
)
from flashmoe_megatron.bench.machine import machine_here
from flashmoe_megatron.bench.shapes import SHAPES, Form, Shape
from flashmoe_megatron.bench.timer import everyone
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError, FlashMoEError
from flashmoe_megatron.measured.reach import check_peers
from flashmoe_megatron.measured.start import join
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.select import Kind, resolve_kind

NAME = "flashmoe_megatron.bench"
DEFAULT = "qwen3-30b"
PICTURES = (".png", ".svg", ".pdf")
LABELS: dict[Kind, str] = {
    "kernel": "the fused kernel",
    "scheduled": "the scheduled backend, since the kernel needs a Hopper GPU",
    "reference": "the REFERENCE on a CPU: it tries the command and tells nothing about a GPU",
}
"""The backend that is measured, for a reader."""
FUNCTIONS = {
    Activation.SILU: ("SiLU", "SwiGLU"),
    Activation.GELU: ("GELU", "GEGLU"),
    Activation.GELU_TANH: ("GELU by tanh", "GEGLU by tanh"),
    Activation.RELU: ("ReLU", "ReGLU"),
    Activation.SQUARED_RELU: ("squared ReLU", "gated squared ReLU"),
    Activation.QUICK_GELU: ("quick GELU", "quick GEGLU"),
}
"""The experts' function for a reader, without a gate and with one."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        f"python -m {NAME}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "layer",
        nargs="?",
        metavar="LAYER",
        help=f"TOKENSxHIDDENxINTERMEDIATExEXPERTSxTOPK, or one of {', '.join(SHAPES)}; "
        f"{DEFAULT} unless another layer is given",
    )
    add("--config", type=Path, metavar="FILE", help="the config.json of a model")
    add(
        "--megatron",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="the flags of a training with Megatron; comes last",
    )
    add("--tokens", type=int, help=f"tokens of a rank; {TOKENS} for a config.json")
    add(
        "--gated",
        action=argparse.BooleanOptionalAction,
        help="experts have a gate; a config.json or Megatron's flags say it themselves",
    )
    add("--one-of", type=int, metavar="N", help="one GPU's share of the experts among N GPUs")
    add(
        "--others",
        nargs="*",
        choices=list(measure.OTHERS),
        default=list(measure.OTHERS),
        help="the other implementations, both unless given",
    )
    add("--row-bound", type=float, help="our layer is one launch, of this many times the mean rows")
    add("--picture", type=Path, metavar="FILE", help=f"draws it, as {', '.join(PICTURES)}")
    add("--json", action="store_true", help="prints one JSON object in place of the table")
    return parser.parse_args(arguments)


def described(options: argparse.Namespace) -> Described:
    """Returns the layer that the command line describes.

    Raises:
        ConfigError: There is no such layer, or there are several.
    """
    given = [
        name
        for name, value in (
            ("a shape", options.layer),
            ("--config", options.config),
            ("--megatron", options.megatron),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"got {' and '.join(given)}, wanted one layer")
    if options.tokens is not None and options.tokens < 1:
        raise ConfigError(f"--tokens {options.tokens}: wanted at least 1")
    if options.config is not None:
        tokens = options.tokens or TOKENS
        return from_config(options.config, tokens=tokens, gated=options.gated)
    if options.megatron is not None:
        if options.gated is not None:
            raise ConfigError("--gated with --megatron, whose --swiglu says it: wanted one of them")
        return from_megatron(options.megatron, tokens=options.tokens)
    if options.tokens is not None:
        raise ConfigError("--tokens with a shape, which has them: wanted one of them")
    return from_text(options.layer or DEFAULT, gated=bool(options.gated))


def shape_here(found: Described, one_of: int | None, num_ranks: int) -> Shape:
    """Returns the layer that the ranks measure.

    Raises:
        ConfigError: It is not served, or the ranks cannot share its experts.
    """
    share = 1 if num_ranks > 1 else found.num_ranks
    if one_of is not None:
        if num_ranks > 1:
            raise ConfigError(f"--one-of {one_of} is for one GPU, torchrun has started {num_ranks}")
        if one_of < 1:
            raise ConfigError(f"--one-of {one_of}: wanted at least 1")
        share = one_of
    shape = found.shape.one_of(share)
    shape.config(num_ranks, found.form)  # refuses what is not served
    return shape


def check_picture(path: Path) -> None:
    """Refuses a picture that could not be drawn, before anything is measured.

    Raises:
        ConfigError: matplotlib is missing, or there is no such kind or folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            '--picture needs matplotlib: pip install "flashmoe-megatron[experiments]", or leave it '
            "out"
        )
    if path.suffix not in PICTURES:
        raise ConfigError(f"--picture {path}: wanted a name that ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: {path.parent} is no folder")


def sizes(shape: Shape) -> str:
    """Returns a layer's sizes in words."""
    return (
        f"{shape.tokens} tokens a rank, hidden {shape.hidden}, intermediate {shape.intermediate}, "
        f"{shape.num_experts} experts, top-{shape.topk}"
    )


def experts(form: Form, *, gated: bool) -> str:
    """Returns in words what experts compute besides products."""
    words = [FUNCTIONS[form.activation][gated]]
    if form.clamp_value is not None:
        words.append(f"clamped at {form.clamp_value:g}")
    if form.linear_offset:
        words.append(f"{form.linear_offset:g} added to up rows")
    return ", ".join([*words, "biases"] if form.has_bias else words)


def run(options: argparse.Namespace) -> int:
    """Measures and prints; see the module. Collective over the ranks that torchrun has started."""
    begin = time.monotonic()
    found = described(options)
    BackendOptions(row_bound=options.row_bound)
    if options.picture is not None:
        check_picture(options.picture)
    torch.set_float32_matmul_precision("highest")  # containers may let float32 be less
    group, _, device = join()
    num_ranks = 1 if group is None else dist.get_world_size()
    shape = shape_here(found, options.one_of, num_ranks)
    kind = resolve_kind("auto", device, torch.bfloat16)
    asked = shape
    if stopwatch.HAS_GPU:
        free = torch.cuda.mem_get_info()[0]
        everyone().each(lambda: measure.check_fits(asked, num_ranks, free))
        everyone().each(lambda: check_peers(kind, num_ranks))
    else:
        shape = measure.small(shape, num_ranks)
    says = not options.json and (group is None or dist.get_rank() == 0)
    about = [*_about(found, asked, shape, kind, num_ranks)]
    if says:
        sys.stdout.write("\n".join(about) + "\n\n")
        sys.stdout.flush()
    rows = []
    measured = measure.rows_of(
        shape, found.form, num_ranks, kind, options.row_bound, options.others
    )
    for row in measured:
        rows.append(row)
        if says and sys.stderr.isatty():
            sys.stderr.write(f"measured: {row.name}\n")
    seconds = time.monotonic() - begin
    if group is None or dist.get_rank() == 0:
        if options.json:
            content = _record(found, shape, kind, num_ranks, rows, seconds)
            sys.stdout.write(json.dumps(content) + "\n")
        else:
            said = [*table.lines(rows, shape), f"{seconds:.0f} s"]
            sys.stdout.write("\n".join(said) + "\n")
        if options.picture is not None:
            from flashmoe_megatron.bench.picture import draw

            draw(rows, "\n".join(about), options.picture)
    return int(any(row.is_wrong for row in rows if row.name.startswith("flashmoe")))


def _machine(num_ranks: int) -> str:
    here = machine_here()
    name = here["gpus"][0] if here["gpus"] else "CPU"
    driver = f", driver {here['driver']}" if here["gpus"] else ""
    return f"{num_ranks} x {name}{driver}, torch {here['torch']}, flashmoe_megatron {__version__}"


def _about(
    found: Described, asked: Shape, shape: Shape, kind: Kind, num_ranks: int
) -> tuple[str, ...]:
    """Returns the lines above the table and the picture."""
    share = found.shape.num_experts // asked.num_experts
    of = f", one of {share} ranks' experts" if share > 1 else ""
    lines = [
        f"{found.origin}{of}: {sizes(asked)}",
        f"experts: {experts(found.form, gated=shape.gated)}",
    ]
    if found.not_timed:
        lines[-1] += f"; not timed: {found.not_timed}"
    if shape != asked:
        lines.append(f"made small for a CPU: {sizes(shape)}")
    return (*lines, LABELS[kind], _machine(num_ranks))


def _record(
    found: Described,
    shape: Shape,
    kind: Kind,
    num_ranks: int,
    rows: list[measure.Row],
    seconds: float,
) -> dict[str, Any]:
    return {
        "version": __version__,
        "machine": machine_here(),
        "num_ranks": num_ranks,
        "backend": kind,
        "is_reference": kind == "reference",
        "origin": found.origin,
        "layer": vars(shape),
        "experts": vars(found.form),
        "not_timed": found.not_timed,
        "rows": table.record(rows, shape),
        "seconds": round(seconds, 1),
    }


def main(arguments: list[str]) -> int:
    """Runs from the command line; under torchrun, one process for each rank.

    Returns:
        0, 1 if our layer is wrong, or 2 if nothing can be measured.
    """
    options = parse(arguments)
    rank = int(os.environ.get("RANK", "0"))
    try:
        status = run(options)
    except FlashMoEError as error:
        if rank == 0:  # all ranks have it
            _say(error)
        status = 2
    except torch.OutOfMemoryError as error:
        _say(f"rank {rank}: {error}")
        return 2  # without the others, which may wait for this rank
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _say(error: object) -> None:
    sys.stderr.write(f"{NAME}: {str(error).strip().splitlines()[0]}\n")
