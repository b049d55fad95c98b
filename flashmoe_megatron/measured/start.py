"""The ranks that torchrun has started for a measurement, and the arguments that they share."""

import argparse
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid, arrange, host_name
from flashmoe_megatron.ranks import Ranks


class Started(NamedTuple):
    """All ranks, as one of them sees them.

    Attributes:
        group: Their group, ``None`` for one rank alone.
        grid: Their hosts.
        device: The device of this rank.
    """

    group: dist.ProcessGroup | None
    grid: HostGrid
    device: torch.device


def join() -> Started:
    """Joins the ranks that torchrun has started. Collective over them."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Started(None, HostGrid(1, 1, 0), device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    ranks = Ranks(dist.group.WORLD)
    return Started(ranks.group, arrange(ranks.gather(host_name()), ranks.rank), device)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the dtype that :func:`dtype_of` takes."""
    choices = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=choices, help="the rows'")


def check_sizes(options: argparse.Namespace, *names: str) -> None:
    """Checks that sizes are positive where they are given.

    Raises:
        ConfigError: One is not.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} {value}: wanted more than 0")


def layer_of(options: argparse.Namespace, num_ranks: int, **form: Any) -> MoEConfig:
    """Returns the shape of a layer whose sizes the command line has.

    Args:
        options: The command line.
        num_ranks: The ranks of the layer.
        **form: What its experts compute.
    """
    return MoEConfig(
        hidden=options.hidden,
        intermediate=options.intermediate,
        num_experts=options.num_experts,
        topk=options.topk,
        gated=options.gated,
        num_ranks=num_ranks,
        max_tokens=options.tokens,
        **form,
    )


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """Returns a dtype by its name; by default bfloat16 on a GPU and float32 on a CPU."""
    found = getattr(torch, name or ("bfloat16" if device.type == "cuda" else "float32"))
    assert isinstance(found, torch.dtype)
    return found
