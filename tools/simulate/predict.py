"""Weak scaling beyond one host: predictions, as a table and as figures with what was measured.

The kernel serves expert-parallel groups of up to 8 GPUs of one NVLink domain. What is predicted for
more is the same algorithm over links that it does not use yet: rows of other domains come over one
NIC per GPU at its full rate, without congestion, so that times are what the network must allow, not
what one will. The maximal incast volume beside them tells how much a NIC has to take at once.
"""

import csv
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.ticker import NullLocator

from tools.bench.shapes import Shape
from tools.simulate.figures import Figures, Fitted
from tools.simulate.fit import Comparison
from tools.simulate.measured import Measurement
from tools.simulate.model import Times, simulate
from tools.simulate.routing import maximal_incast_volume
from tools.weak_scaling.style import ACCENT, FUSED, NEUTRAL, UNFUSED, new_figure, save

FEWEST_EXPERTS = 64
COUNTS = tuple(2**power for power in range(13))
"""1 to 4096 GPUs."""
MEGABYTE = 1e6


@dataclass(frozen=True)
class Prediction:
    """One number of GPUs in domains of one size.

    Attributes:
        num_gpus: Size of the expert-parallel group.
        domain: GPUs that NVLink joins.
        num_experts: 64, or one per GPU if there are more GPUs.
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
        shape: The layer; its number of experts is replaced by the count's.
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


def table(predictions: list[Prediction], shape: Shape) -> tuple[list[str], list[list[str]]]:
    """Titles and rows."""
    titles = [
        "GPUs",
        "NVLink domain",
        "experts",
        "time, ms",
        "products, ms",
        "busier link, ms",
        "Oe = T(2)/T(N)",
        "million tokens per s",
        "MIV, MB",
    ]
    rows = [
        [
            str(p.num_gpus),
            str(p.domain),
            str(p.num_experts),
            f"{p.times.total / 1e3:.3f}",
            f"{p.times.products / 1e3:.3f}",
            f"{p.times.links / 1e3:.3f}",
            "" if p.num_gpus < 2 else f"{p.overlap_efficiency:.3f}",
            f"{shape.tokens * p.num_gpus / p.times.total:.4g}",
            f"{p.incast_bytes / MEGABYTE:.3g}",
        ]
        for p in predictions
    ]
    return titles, rows


def write_table(path: Path, titles: list[str], rows: list[list[str]]) -> None:
    """Writes CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(titles)
        writer.writerows(rows)


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
    which = "backward" if backward else "forward"
    colors = itertools.cycle((FUSED, UNFUSED, ACCENT, NEUTRAL))
    with new_figure(10.5, 4.2) as figure:
        time_ax, overlap_ax, incast_ax = figure.subplots(1, 3)
        for domain, predictions in by_domain.items():
            counts = [p.num_gpus for p in predictions]
            style = {"color": next(colors), "label": f"simulated, domains of {domain}"}
            time_ax.plot(counts, [p.times.total / 1e3 for p in predictions], **style)
            pairs = [p for p in predictions if p.num_gpus >= 2]
            overlap_ax.plot(
                [p.num_gpus for p in pairs], [p.overlap_efficiency for p in pairs], **style
            )
            beyond = [p for p in predictions if p.incast_bytes > 0]
            incast_ax.plot(
                [p.num_gpus for p in beyond], [p.incast_bytes / MEGABYTE for p in beyond], **style
            )
        runs = sorted({point.run for point in measured})
        markers = itertools.cycle("osD^v")
        for number, (run, marker) in enumerate(zip(runs, markers, strict=False), 1):
            points = [point for point in measured if point.run == run]
            time_ax.plot(
                [point.num_gpus for point in points],
                [point.kernel_ms for point in points],
                marker,
                color="black",
                markersize=7,
                markerfacecolor="white",
                markeredgewidth=1.6,
                label="measured" if len(runs) == 1 else f"measured, run {number}",
            )
            pair = [point for point in points if point.num_gpus == 2]
            if pair:
                more = [point for point in points if point.num_gpus >= 2]
                overlap_ax.plot(
                    [point.num_gpus for point in more],
                    [pair[0].kernel_ms / point.kernel_ms for point in more],
                    marker,
                    color="black",
                    markersize=7,
                    markerfacecolor="white",
                    markeredgewidth=1.6,
                )
        for ax in (time_ax, overlap_ax, incast_ax):
            ax.set_xscale("log", base=2)
            ax.set_xticks([1, 8, 64, 512, 4096], ["1", "8", "64", "512", "4096"])
            ax.set_xlim(0.8, 5200)
            ax.minorticks_off()
            ax.set_ylim(bottom=0)
            ax.set_xlabel("GPUs")
        time_ax.set_ylabel(f"{which}, ms")
        overlap_ax.set_ylabel("overlap efficiency T(2)/T(N)")
        incast_ax.set_ylabel("MIV of a NIC, MB")
        handles, labels = time_ax.get_legend_handles_labels()
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
            f"max({FEWEST_EXPERTS}, GPUs) experts\nNIC of {nic_gbps:g} GB/s per GPU between NVLink "
            "domains; more than 8 GPUs are a prediction"
        )
        return save(figure, path)


def draw_comparison(comparisons: list[Comparison], tolerance: float, path: Path) -> list[Path]:
    """Simulated over measured times, with the tolerance as a band.

    Returns:
        The PNG and the SVG.
    """
    with new_figure(9, 4.4) as figure:
        for ax, backward in zip(figure.subplots(1, 2), (False, True), strict=True):
            chosen = [c for c in comparisons if c.point.backward is backward]
            ax.set_xlabel(f"measured {'backward' if backward else 'forward'}, ms")
            ax.set_ylabel("simulated, ms")
            if not chosen:
                continue
            for count, marker in ((1, "o"), (2, "s"), (4, "D"), (8, "^")):
                for is_fitted, color in ((True, NEUTRAL), (False, FUSED)):
                    points = [
                        c
                        for c in chosen
                        if c.point.num_gpus == count and c.point.is_fitted is is_fitted
                    ]
                    if points:
                        kind = "fitted" if is_fitted else "held out"
                        ax.plot(
                            [c.point.kernel_ms for c in points],
                            [c.simulated_ms for c in points],
                            marker,
                            color=color,
                            label=f"{kind}, {count} GPU{'s' if count > 1 else ''}",
                        )
            all_ms = [c.point.kernel_ms for c in chosen] + [c.simulated_ms for c in chosen]
            ends = [min(all_ms) * 0.8, max(all_ms) * 1.25]
            ax.plot(ends, ends, color="black", linewidth=1)
            ax.fill_between(
                ends,
                [end * (1 - tolerance) for end in ends],
                [end * (1 + tolerance) for end in ends],
                color="#e5e7eb",
                label=f"within {tolerance:.0%}",
            )
            ax.set_xscale("log")
            ax.set_yscale("log")
            ticks = [tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20, 50) if ends[0] < tick < ends[1]]
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
                axis.set_minor_locator(NullLocator())
            ax.legend(loc="upper left", fontsize=9)
        figure.suptitle("The model against measured times of the kernel")
        return save(figure, path)


def _shape_on(shape: Shape, num_gpus: int) -> Shape:
    return replace(shape, num_experts=max(FEWEST_EXPERTS, num_gpus))
