"""Plans the pieces of gradients whose reduction fits the gaps of a backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from flashmoe_megatron.call import Backend
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.measured.fit import Fit, machine_of, read_fit
from flashmoe_megatron.options import FrameworkOptions
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.select import find_grid
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.degree import passes_of, time_of
from flashmoe_megatron.separate.exchange import Kind, kind_of
from flashmoe_megatron.separate.slices import Window, beside_window, cut_gradients, layer_window

FLOPS_OF_BACKWARD = 4
"""Floating-point operations of a backward for each token and parameter of a linear layer."""


@dataclass(frozen=True)
class LayerGradients:
    """A MoE layer, and the gradients that become ready around its backward.

    Attributes:
        tokens: Most tokens of one rank and call, ``None`` if the user has set no bound.
        own_bytes: The size of its experts' gradients that are reduced.
        other_bytes: The size of the others' that are, between it and the next MoE layer on each
            side.
        other_parameters: How many parameters lie there.
    """

    number: int
    backend: Backend
    dtype: torch.dtype
    tokens: int | None
    own_bytes: int
    other_bytes: int
    other_parameters: int


@dataclass(frozen=True)
class ReductionPlan:
    """Says how much is reduced when.

    Attributes:
        in_gap: Bytes in each layer's own backward, by its number.
        ``beside``: Bytes between that and the next.
        piece_bytes: The size of pieces that fit; 0 if none does.
    """

    in_gap: dict[int, float]
    beside: dict[int, float]
    piece_bytes: int


def plan_reduction(
    layers: Sequence[LayerGradients],
    settings: FrameworkOptions,
    group: dist.ProcessGroup | None,
    device: torch.device,
    operation: str,
) -> ReductionPlan | None:
    """Plans the reduction of a model's gradients. Collective over all ranks of the job.

    The layers are this rank's, in the order of the model, and without any there is no plan. The
    operation, which reduces, is the name of a line of the fit.

    Raises:
        ConfigError: On every rank, if any has no fit, one of another machine, or a layer whose
            experts are all on one rank, whose backward has no gap; or if ranks have different fits.
    """
    grid = find_grid(group) if layers and group is not None else None
    world = Ranks(dist.group.WORLD)
    plans = world.all(
        lambda: _planned(layers, settings, grid, device, operation) if layers else None
    )
    _check_alike(plans)
    return plans[world.rank]


def _check_alike(plans: Sequence[ReductionPlan | None]) -> None:
    """Refuses plans of the same layers that differ: their ranks reduce the same buckets."""
    first: dict[tuple[int, ...], int] = {}
    for rank, plan in enumerate(plans):
        if plan is not None:
            other = first.setdefault(tuple(plan.in_gap), rank)
            if plan != plans[other]:
                raise ConfigError(
                    f"the ranks' fits give different reductions of gradients: {plans[other]} on "
                    f"rank {other}, {plan} on rank {rank}; wanted one fit"
                )


def _planned(
    layers: Sequence[LayerGradients],
    settings: FrameworkOptions,
    grid: HostGrid | None,
    device: torch.device,
    operation: str,
) -> ReductionPlan:
    if grid is None or grid.num_hosts * grid.ranks_per_host == 1:
        raise settings.refusal(
            "slice_gradients", True, "wanted false where each rank has all experts, without a gap"
        )
    if settings.degree_fit is None:
        raise settings.refusal(
            "slice_gradients",
            True,
            "wanted a degree_fit beside it, the file of python -m flashmoe_megatron.schedule fit",
        )
    if any(layer.tokens is None for layer in layers):
        raise settings.refusal(
            "slice_gradients", True, "wanted max_tokens beside it, on which the gaps depend"
        )
    exchange = kind_of(settings.exchange, grid, device)
    inner = layers[0].backend.within
    shared = inner.num_sharing if isinstance(inner, ScheduledBackend) else 1
    machine = machine_of(grid, device, exchange, shared)
    fit = read_fit(Path(settings.degree_fit), machine, layers[0].dtype)
    windows: list[Window] = []
    before = layers[-1].other_bytes  # what is ready since the last window
    for layer in reversed(layers):
        windows.append(_own_window(layer, before, fit, exchange))
        flops = FLOPS_OF_BACKWARD * (layer.tokens or 0) * layer.other_parameters
        seconds = flops * fit.lines["product"].beta_s
        windows.append(beside_window(layer.own_bytes, seconds))
        before = layer.other_bytes
    windows.append(beside_window(before, 0.0))
    line = fit.lines[operation]
    slices = cut_gradients(windows, line)
    numbers = [layer.number for layer in reversed(layers)]
    fitting = [size for size in slices if size > 0]
    # Below that size most of a reduction's time is what it takes whatever its size.
    least = line.alpha_s / line.beta_s if line.beta_s else 0.0
    return ReductionPlan(
        in_gap=dict(zip(numbers, slices[::2], strict=False)),
        beside=dict(zip(numbers, slices[1::2], strict=False)),
        piece_bytes=int(max(min(fitting), least)) if fitting else 0,
    )


def _own_window(layer: LayerGradients, ready: int, fit: Fit, exchange: Kind) -> Window:
    """A layer's backward; a kernel's launch leaves the way to reductions for all of its time."""
    backend = layer.backend.within
    _, backward = passes_of(layer.backend.config, fit, exchange, layer.backend.keep)
    if isinstance(backend, ScheduledBackend):
        return layer_window(ready, backward, backend.degrees[1])
    return beside_window(ready, time_of(backward, 1))
