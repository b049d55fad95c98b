"""The ranks that torchrun has started for a measurement, its arguments, and a layer to measure."""

import argparse
import datetime
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid, arrange, host_name
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad


class Started(NamedTuple):
    """All ranks' group, ``None`` for one rank alone, their hosts, and this rank's device."""

    group: dist.ProcessGroup | None
    grid: HostGrid
    device: torch.device


def join(timeout: datetime.timedelta | None = None) -> Started:
    """Joins the ranks that torchrun has started. Collective over them.

    Args:
        timeout: The group's; torch's own if there is none.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Started(None, HostGrid(1, 1, 0), device)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo", timeout=timeout, device_id=device if has_gpu else None
    )
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
    """Returns a layer of the command line's sizes, whose experts compute what ``form`` says."""
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


class RandomLayer:
    """A layer with random inputs; each rank draws its own."""

    def __init__(
        self, backend: ScheduledBackend, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Draws this rank's tokens, their routes and the weights of experts that no rank shares."""
        config = backend.config
        generator = torch.Generator(device).manual_seed(backend.rank)
        noise = torch.rand(num_tokens, config.num_experts, device=device, generator=generator)
        self._map = torch.zeros_like(noise, dtype=torch.bool)
        self._map.scatter_(1, noise.topk(config.topk, dim=1).indices, True)

        def random(*shape: int) -> torch.Tensor:
            values = torch.empty(shape, device=device, dtype=dtype)
            return values.normal_(std=shape[-1] ** -0.5, generator=generator)

        local = config.num_local_experts
        self._weights = ExpertWeights(
            (random(local, config.fc1_rows, config.hidden),),
            (random(local, config.hidden, config.intermediate),),
        )
        self._x, self._grad = random(num_tokens, config.hidden), random(num_tokens, config.hidden)
        self._probs = self._map.float() / config.topk
        self._backend = backend

    def forward(self) -> Any:
        """Runs a forward. Collective over the backend's group.

        Returns:
            What :meth:`backward` takes.
        """
        _, saved = self._backend.forward(
            self._x, self._probs, self._map, self._weights, training=True
        )
        return saved

    def backward(self, saved: Any) -> None:
        """Runs the backward of a forward. Collective over the backend's group."""
        grads = [
            [WeightGrad(torch.empty_like(one), False) for one in kind]
            for kind in (self._weights.fc1, self._weights.fc2)
        ]
        self._backend.backward(self._grad, saved, self._weights, *grads)
