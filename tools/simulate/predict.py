"""Weak scaling beyond one host: predictions, as a table and as figures with measured times.

A launch serves up to 8 GPUs of one NVLink domain. What is predicted for more is one launch over
links that it does not use: rows of other domains come over one NIC per GPU at its full rate,
without congestion, so that times are what the network must allow, not what one will. The page of
``flashmoe_megatron/hosts`` has the times of a layer over hosts as it is computed. The table also
has the maximal incast volume: how much a NIC has to take at once.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.bench.style import ACCENT, FUSED, NEUTRAL, UNFUSED, new_figure, save
from tools import markdown
from tools.simulate.figures import Figures, Fitted
from tools.simulate.measured import Measurement
from tools.simulate.model import Times, simulate
from tools.simulate.routing import maximal_incast_volume

COUNTS = tuple(2**power for power in range(13))
"""1 to 4096 GPUs."""
MEGABYTE = 1e6


@dataclass(frozen=True)
class Prediction:
    """One number of GPUs in domains of one size.

    Attributes:
        num_gpus: Size of the expert-parallel group.
        domain: GPUs that NVLink joins.
        num_experts: The layer's, or the next multiple of the GPUs.
        times: Simulated.
        overlap_efficiency: T(2) / T(N).
        incast_bytes: Maximal incast volume of one NIC.
    """

    num_gpus: int
    domain: int
    num_experts: int
    times: Times
    overlap_efficiency: float
    incast_bytes: float


def weak_scaling(
    shape: Shape,
    domain: int,
    nic_gbps: float,
    figures: Figures,
    fitted: Fitted,
    *,
    backward: bool = False,
    counts: tuple[int, ...] = COUNTS,
) -> list[Prediction]:
    """Predicts one layer at equal tokens per GPU.

    Args:
        shape: The layer. Its experts are rounded up to a multiple of each count.
        domain: GPUs of an NVLink domain.
        nic_gbps: Rate of one GPU's NIC, GB/s.
        figures: What GPUs and links do.
        fitted: Efficiencies.
        backward: The backward's launch, else the forward's.
        counts: Numbers of GPUs.
    """
    of_network = replace(figures, nic_gbps=nic_gbps, domain=domain)

    def run(count: int) -> Times:
        return simulate(_shape_on(shape, count), count, of_network, fitted, backward=backward)

    pair_us = run(2).total
    found = []
    for count in counts:
        times = run(count)
        experts = _shape_on(shape, count).num_experts
        found.append(
            Prediction(
                num_gpus=count,
                domain=domain,
                num_experts=experts,
                times=times,
                overlap_efficiency=pair_us / times.total,
                incast_bytes=maximal_incast_volume(
                    shape.tokens, experts, experts // count, shape.hidden, max(count - domain, 0)
                ),
            )
        )
    return found


def table(by_domain: dict[int, list[Prediction]], shape: Shape) -> list[str]:
    """Predictions as Markdown, by size of the domain."""
    titles = (
        "GPUs",
        "NVLink domain",
        "experts",
        "time, ms",
        "products, ms",
        "busier link, ms",
        "Oe = T(2)/T(N)",
        "million tokens per s",
        "MIV, MB",
    )
    rows = [
        (
            str(p.num_gpus),
            str(p.domain),
            str(p.num_experts),
            f"{p.times.total / 1e3:.3f}",
            f"{p.times.products / 1e3:.3f}",
            f"{p.times.links / 1e3:.3f}",
            "" if p.num_gpus < 2 else f"{p.overlap_efficiency:.3f}",
            f"{shape.tokens * p.num_gpus / p.times.total:.4g}",
            f"{p.incast_bytes / MEGABYTE:.3g}",
        )
        for predictions in by_domain.values()
        for p in predictions
    ]
    return markdown.table(titles, rows)


def draw_predictions(
    by_domain: dict[int, list[Prediction]],
    measured: list[Measurement],
    shape: Shape,
    nic_gbps: float,
    path: Path,
    *,
    backward: bool,
) -> list[Path]:
    """Time, overlap efficiency and incast volume over GPUs.

    Args:
        by_domain: Results of :func:`weak_scaling`, by size of the domain.
        measured: Points of the same layer, drawn where they are.
        shape: The layer.
        nic_gbps: One GPU's share of the network.
        path: Where the figure goes.
        backward: What is predicted.

    Returns:
        The PNG and the SVG.
    """
    colors, markers = itertools.cycle((FUSED, UNFUSED, ACCENT, NEUTRAL)), itertools.cycle("osD^v")
    with new_figure(10.5, 4.2) as figure:
        axes = figure.subplots(1, 3)
        for domain, predictions in by_domain.items():
            curves = (
                {p.num_gpus: p.times.total / 1e3 for p in predictions},
                {p.num_gpus: p.overlap_efficiency for p in predictions if p.num_gpus >= 2},
                {p.num_gpus: p.incast_bytes / MEGABYTE for p in predictions if p.incast_bytes},
            )
            style: dict[str, Any] = {
                "color": next(colors),
                "label": f"simulated, domains of {domain}",
            }
            for ax, curve in zip(axes, curves, strict=True):
                ax.plot(list(curve), list(curve.values()), **style)
        runs = sorted({point.run for point in measured})
        for number, run in enumerate(runs, 1):
            times = {point.num_gpus: point.kernel_ms for point in measured if point.run == run}
            several = {gpus: ms for gpus, ms in times.items() if gpus >= 2 and 2 in times}
            style = {
                "marker": next(markers),
                "linestyle": "none",
                "color": "black",
                "markersize": 7,
                "markerfacecolor": "white",
                "markeredgewidth": 1.6,
                "label": "measured" if len(runs) == 1 else f"measured, run {number}",
            }
            axes[0].plot(list(times), list(times.values()), **style)
            axes[1].plot(list(several), [times[2] / ms for ms in several.values()], **style)
        titles = (
            f"{'backward' if backward else 'forward'}, ms",
            "overlap efficiency T(2)/T(N)",
            "MIV of a NIC, MB",
        )
        for ax, title in zip(axes, titles, strict=True):
            ax.set_xscale("log", base=2)
            ax.set_xticks([1, 8, 64, 512, 4096], ["1", "8", "64", "512", "4096"])
            ax.set_xlim(0.8, 5200)
            ax.minorticks_off()
            ax.set_ylim(bottom=0)
            ax.set_xlabel("GPUs")
            ax.set_ylabel(title)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(len(labels), 5),
            columnspacing=1.2,
            handletextpad=0.5,
        )
        figure.suptitle(
            f"Weak scaling, {shape.tokens} tokens per GPU, H={shape.hidden}, "
            f"F={shape.intermediate}, top-{shape.topk}, "
            f"{shape.num_experts} experts or a multiple of the GPUs\nNIC of {nic_gbps:g} GB/s per "
            "GPU between NVLink domains; more than 8 GPUs are a prediction"
        )
        return save(figure, path)


def _shape_on(shape: Shape, num_gpus: int) -> Shape:
    return replace(shape, num_experts=-(-shape.num_experts // num_gpus) * num_gpus)
