"""The degrees of a layer: its forward and backward as stages, whose times come from a fit."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from flashmoe_megatron.config import Keep, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.measured.fit import Fit, machine_of, read_fit
from flashmoe_megatron.measured.line import Line
from flashmoe_megatron.options import MAX_DEGREE, BackendOptions, read_degrees
from flashmoe_megatron.planner import choose_keep
from flashmoe_megatron.ranks import Ranks, by_rank
from flashmoe_megatron.separate.exchange import ONE_STEP, Kind, kind_of
from flashmoe_megatron.separate.model import Pass, Slowdown, Stage, Stream, best_degree


def choose_degrees(
    config: MoEConfig,
    options: BackendOptions,
    *,
    group: dist.ProcessGroup | None,
    grid: HostGrid,
    device: torch.device,
    dtype: torch.dtype | None,
    is_cut: bool = False,
) -> tuple[int, int]:
    """Parts in forward and backward, as the options say. Collective over the group.

    Args:
        config: The layer's shape.
        options: How it runs; the same on every rank.
        group: The expert-parallel group.
        grid: How its ranks lie on hosts.
        device: Where the layer lives.
        dtype: The dtype of its tokens, ``None`` if it is not known.
        is_cut: Whether several ranks share each expert.

    Raises:
        ConfigError: On every rank, if a degree is more than a rank's routes, or none can be chosen
            since there is no fit, or one of another machine or dtype.
    """
    most = config.max_tokens * config.topk
    degrees = read_degrees(options.degree)
    if degrees is not None:
        if max(degrees) > most:
            raise options.refusal(
                "degree",
                options.degree,
                f"wanted at most {most}, the routes of max_tokens={config.max_tokens} tokens with "
                f"topk={config.topk}",
            )
        return degrees
    if is_cut:
        raise options.refusal(
            "degree", options.degree, "wanted numbers where several ranks share each expert"
        )
    everyone = Ranks(group).all(lambda: _computed(config, options, grid, device, dtype))
    if len(set(everyone)) > 1:
        raise ConfigError(
            f"the ranks' fits give different degrees: {by_rank(everyone)}; wanted one fit"
        )
    return everyone[0]


def _computed(
    config: MoEConfig,
    options: BackendOptions,
    grid: HostGrid,
    device: torch.device,
    dtype: torch.dtype | None,
) -> tuple[int, int]:
    if options.degree_fit is None:
        raise options.refusal(
            "degree",
            options.degree,
            "wanted a degree_fit beside it, the file of python -m flashmoe_megatron.schedule fit, "
            "or numbers",
        )
    exchange = kind_of(options.exchange, grid, device)
    path = Path(options.degree_fit)
    if config.num_ranks == 1:
        read_fit(path, None, dtype)  # what several ranks would refuse; it may be of their machine
        return 1, 1  # nothing travels
    fit = read_fit(path, machine_of(grid, device, exchange), dtype)
    keep = choose_keep(options.keep, config)
    degrees = range(1, min(config.max_tokens * config.topk, MAX_DEGREE) + 1)
    forward, backward = passes_of(config, fit, exchange, keep)
    return best_degree(forward, degrees), best_degree(backward, degrees)


def passes_of(config: MoEConfig, fit: Fit, exchange: Kind, keep: Keep) -> tuple[Pass, Pass]:
    """A layer's forward and backward with as many rows as tokens choose, spread evenly.

    Args:
        config: The layer's shape.
        fit: The machine's.
        exchange: How rows travel.
        keep: What forwards keep.
    """
    lines = fit.lines
    product, copy = lines["product"], lines["copy"]
    rows, size = config.max_tokens * config.topk, fit.torch_dtype.itemsize
    hidden, wide, narrow = config.hidden, config.fc1_rows, config.intermediate

    def travel(name: str) -> tuple[Stage, ...]:
        num_bytes = rows * hidden * size
        if exchange in ONE_STEP:
            line = lines["all_to_all"]
            return (Stage(name, "between", line.alpha_s, num_bytes * line.beta_s),)
        within, rail = lines["all_to_all_within"], lines["all_to_all_rail"]
        return (
            Stage(f"{name} within", "within", within.alpha_s, num_bytes * within.beta_s),
            Stage(name, "between", rail.alpha_s, num_bytes * rail.beta_s),
        )

    def compute(name: str, copies: int, elements: float, cut: float = 0.0) -> Stage:
        """Two products, but for rows that are only copied, and copies of elements of every row."""
        alpha_s, whole_s = copies * copy.alpha_s, rows * size * elements * copy.beta_s
        if name == "experts":
            alpha_s += 2 * product.alpha_s
            whole_s += 2 * rows * hidden * (wide + narrow) * product.beta_s
        return Stage(name, "compute", alpha_s, whole_s, rows * size * cut * copy.beta_s)

    send = compute("rows", 1, hidden)
    dispatch, back = travel("dispatch"), travel("combine")
    there = (send, *dispatch)
    between = (wide + narrow) / 2  # read and written once, where a copy's are twice as many
    forward = Pass(there, compute("experts", 3, 2 * hidden + between, wide + hidden), back)
    backward = Pass(
        there,
        compute("experts", 3, 2 * hidden + 2 * between, 2 * wide + hidden + narrow),
        back,
        slices_s=sum(stage.time_s(1) for stage in dispatch) if keep == "preactivations" else 0.0,
        weights_s=compute("experts", 0, 0).time_s(1),
    )
    slowdowns = _slowdowns(fit, exchange)

    def issued(one: Pass, host: Line) -> Pass:
        return dataclasses.replace(
            one, issue_s=host.alpha_s, part_s=host.beta_s, slowdowns=slowdowns
        )

    return issued(forward, lines["host_forward"]), issued(backward, lines["host_backward"])


def _slowdowns(fit: Fit, exchange: Kind) -> tuple[Slowdown, ...]:
    """Returns how products and exchanges slow each other down."""
    carriers: dict[Stream, str] = {"between": "all_to_all_rail", "within": "all_to_all_within"}
    if exchange in ONE_STEP:
        carriers = {"between": "all_to_all"}
    found: list[Slowdown] = []
    for stream, name in carriers.items():
        both = fit.beside[name]
        found.append(Slowdown("compute", stream, both.product))
        found.append(Slowdown(stream, "compute", both.exchange))
    return tuple(found)
