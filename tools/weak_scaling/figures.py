"""The paper's figures, drawn from a folder's results."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes

from tools.weak_scaling.points import IMPLEMENTATIONS, PASSES, Point
from tools.weak_scaling.results import Measured, Results, median_ms, overlap_efficiency
from tools.weak_scaling.style import (
    ACCENT,
    COLORS,
    FUSED,
    NAMES,
    NEUTRAL,
    legend_below,
    new_figure,
    save,
    tokens_label,
)


def draw_all(results: Results) -> list[Path]:
    """Draws what there are points for.

    Returns:
        The files, PNG and SVG of each figure.
    """
    measured = results.measured()
    drawn = []
    for draw in (_over_tokens, _over_experts, _throughput, _overlap, _memory):
        drawn += draw(results, measured)
    return drawn


def _over_tokens(results: Results, measured: Measured) -> list[Path]:
    """The paper's figure 10."""
    settings = results.settings
    gpus = [
        count
        for count in settings.gpus
        if any(p.num_gpus == count and p.num_experts == settings.base_experts for p in measured)
    ][-3:]
    if not gpus:
        return []
    with new_figure(3.6 * len(gpus) + 0.6, 6.4) as figure:
        axes = figure.subplots(len(PASSES), len(gpus), sharex=True, sharey="row", squeeze=False)
        for row, which in enumerate(PASSES):
            for column, count in enumerate(gpus):
                ax = axes[row][column]
                points = [
                    point
                    for point in measured
                    if point.num_gpus == count and point.num_experts == settings.base_experts
                ]
                _lines(ax, results, points, which, lambda point: point.tokens)
                _power_of_two_axis(ax, [point.tokens for point in points])
                ax.set_yscale("log")
                _plain_log_ticks(ax)
                if row == 0:
                    ax.set_title(_gpus(count, settings.device))
                else:
                    ax.set_xlabel(f"tokens per {_unit(settings.device)}")
            axes[row][0].set_ylabel(f"{which}, ms")
        legend_below(figure, axes[0][0])
        figure.suptitle(f"Latency over tokens, {settings.base_experts} experts{_about(results)}")
        return save(figure, results.folder / "latency_over_tokens")


def _over_experts(results: Results, measured: Measured) -> list[Path]:
    """The paper's figure 14."""
    settings = results.settings
    points = [
        point
        for point in measured
        if point.num_gpus == settings.gpus[-1] and point.tokens == settings.expert_tokens
    ]
    if not points:
        return []
    with new_figure(9, 3.8) as figure:
        for ax, which in zip(figure.subplots(1, len(PASSES)), PASSES, strict=True):
            _lines(ax, results, points, which, lambda point: point.num_experts)
            _power_of_two_axis(ax, [point.num_experts for point in points])
            ax.set_ylim(bottom=0)
            ax.set_xlabel("experts of the layer")
            ax.set_ylabel(f"{which}, ms")
        legend_below(figure, figure.axes[0])
        figure.suptitle(
            f"Latency over experts, {tokens_label(settings.expert_tokens)} tokens per "
            f"{_unit(settings.device)}, {_gpus(settings.gpus[-1], settings.device)}"
            f"{_about(results)}"
        )
        return save(figure, results.folder / "latency_over_experts")


def _throughput(results: Results, measured: Measured) -> list[Path]:
    """The paper's figure 13: tokens of all GPUs over the latency."""
    points = _weak_points(results, measured)
    if not points:
        return []
    with new_figure(9, 3.8) as figure:
        for ax, which in zip(figure.subplots(1, len(PASSES)), PASSES, strict=True):
            for name in IMPLEMENTATIONS:
                rates = [
                    point.tokens * point.num_gpus / median_ms(measured[point], name, which) / 1e3
                    for point in points
                ]
                counts = [point.num_gpus for point in points]
                label = NAMES[results.settings.device][name]
                ax.plot(counts, rates, "o-", color=COLORS[name], label=label)
                first = rates[0] / counts[0]
                ax.plot(
                    counts,
                    [first * count for count in counts],
                    "--",
                    color=COLORS[name],
                    linewidth=1,
                    label=f"linear from {counts[0]}" if name == "fused" else None,
                )
                ax.annotate(
                    f"{rates[-1]:.3g}",
                    (counts[-1], rates[-1]),
                    textcoords="offset points",
                    xytext=(0, -18),
                    ha="center",
                    color=COLORS[name],
                )
            ax.set_xticks(counts)
            ax.set_xlim(left=0)
            ax.set_ylim(bottom=0)
            ax.set_xlabel(_counted(results.settings.device))
            ax.set_ylabel(f"{which},\nmillion tokens per s")
        legend_below(figure, figure.axes[0])
        figure.suptitle(f"Weak-scaling throughput, {_weak_shape(results)}{_about(results)}")
        return save(figure, results.folder / "throughput")


def _overlap(results: Results, measured: Measured) -> list[Path]:
    """The paper's figure 12: latency and overlap efficiency over GPUs."""
    settings = results.settings
    points = _weak_points(results, measured)
    compared = [
        point
        for point in points
        if overlap_efficiency(measured, point, "fused", "forward") is not None
    ]
    if len(points) < 2 or not compared:
        return []
    largest = settings.gpus[-1]
    with new_figure(10.5, 3.8) as figure:
        latency, over_gpus, over_tokens = figure.subplots(1, 3)
        _lines(latency, results, points, "forward", lambda point: point.num_gpus)
        latency.set_ylim(bottom=0)
        latency.set_ylabel("forward, ms")
        latency.set_title(_weak_shape(results, short=True))
        by_tokens = [
            point
            for point in _tokens_points(results, measured)
            if replace(point, num_gpus=2) in measured
        ]
        for ax, shown, x in (
            (over_gpus, compared, [point.num_gpus for point in compared]),
            (over_tokens, by_tokens, [point.tokens for point in by_tokens]),
        ):
            ax.axhline(1.0, color=NEUTRAL, linewidth=1, linestyle="--")
            for name in IMPLEMENTATIONS:
                values = [overlap_efficiency(measured, p, name, "forward") for p in shown]
                ax.plot(x, values, "o-", color=COLORS[name])
            ax.set_ylim(0, max(1.15, ax.get_ylim()[1]))
        over_gpus.set_ylabel("Oe = T(2) / T(N)")
        over_gpus.set_title(_weak_shape(results, short=True))
        over_tokens.set_ylabel(f"Oe = T(2) / T({largest})")
        over_tokens.set_title(_gpus(largest, settings.device))
        for ax in (latency, over_gpus):
            _power_of_two_axis(ax, [point.num_gpus for point in points])
            ax.set_xlabel(_counted(settings.device))
        _power_of_two_axis(over_tokens, [p.tokens for p in measured if p.num_gpus == largest])
        over_tokens.set_xlabel(f"tokens per {_unit(settings.device)}")
        figure.suptitle(f"Weak scaling and overlap efficiency Oe, forward{_about(results)}")
        legend_below(figure, latency)
        return save(figure, results.folder / "overlap_efficiency")


def _memory(results: Results, measured: Measured) -> list[Path]:
    """The paper's table 3 as a figure: symmetric and local memory beside the tokens' own size."""
    points = [
        point
        for point in _tokens_points(results, measured)
        if "symmetric" in measured[point]["memory"] and measured[point]["memory"]["fused"]
    ]
    if not points:
        return []
    with new_figure(9, 3.8) as figure:
        for ax, which in zip(figure.subplots(1, len(PASSES), sharey=True), PASSES, strict=True):
            parts = (
                ("fused", -0.2, FUSED, "kernel: buffers of the call"),
                ("unfused", 0.2, COLORS["unfused"], "unfused: buffers of the call"),
            )
            for name, offset, color, label in parts:
                local = [measured[p]["memory"][name][which] / 2**20 for p in points]
                positions = [index + offset for index in range(len(points))]
                ax.bar(positions, local, 0.38, color=color, label=label)
                if name == "fused":
                    heap = [measured[p]["memory"]["symmetric"] / 2**20 for p in points]
                    ax.bar(
                        positions,
                        heap,
                        0.38,
                        bottom=local,
                        color=ACCENT,
                        label="kernel: symmetric heap, of all layers",
                    )
            ax.set_xticks(range(len(points)), [tokens_label(p.tokens) for p in points])
            ax.set_xlabel(f"tokens per {_unit(results.settings.device)}")
            ax.set_title(which)
        figure.axes[0].set_ylabel("memory of one GPU, MiB")
        legend_below(figure, figure.axes[0])
        figure.suptitle(
            f"Memory beside weights and their gradients, {results.settings.base_experts} experts, "
            f"{_gpus(results.settings.gpus[-1], results.settings.device)}"
        )
        return save(figure, results.folder / "memory")


def _tokens_points(results: Results, measured: Measured) -> list[Point]:
    """The sweep over tokens on the most GPUs."""
    settings = results.settings
    return [
        point
        for point in measured
        if point.num_gpus == settings.gpus[-1] and point.num_experts == settings.base_experts
    ]


def _weak_points(results: Results, measured: Measured) -> list[Point]:
    settings = results.settings
    return [
        point
        for point in measured
        if point.tokens == settings.base_tokens and point.num_experts == settings.base_experts
    ]


def _lines(
    ax: Axes, results: Results, points: list[Point], which: str, x: Callable[[Point], int]
) -> None:
    measured = results.measured()
    for name in IMPLEMENTATIONS:
        times = [median_ms(measured[point], name, which) for point in points]
        label = NAMES[results.settings.device][name]
        ax.plot([x(p) for p in points], times, "o-", color=COLORS[name], label=label)


def _power_of_two_axis(ax: Axes, values: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ticks = sorted(set(values))
    ax.set_xticks(ticks, [tokens_label(value) for value in ticks])
    ax.minorticks_off()


def _plain_log_ticks(ax: Axes) -> None:
    low, high = ax.get_ylim()
    ticks = [
        digit * 10.0**power
        for power in range(-4, 6)
        for digit in (1, 2, 5)
        if low * 0.999 <= digit * 10.0**power <= high * 1.001
    ]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()


def _unit(device: str) -> str:
    return "GPU" if device == "cuda" else "process"


def _counted(device: str) -> str:
    return "GPUs" if device == "cuda" else "processes"


def _gpus(count: int, device: str) -> str:
    return f"{count} {_unit(device)}{'' if count == 1 else 's' if device == 'cuda' else 'es'}"


def _weak_shape(results: Results, *, short: bool = False) -> str:
    settings = results.settings
    tokens = tokens_label(settings.base_tokens)
    if short:
        return f"{tokens} tokens each, {settings.base_experts} experts"
    return f"{tokens} tokens per {_unit(settings.device)}, {settings.base_experts} experts"


def _about(results: Results) -> str:
    """The second line of a title: on what it was measured."""
    settings, machine = results.settings, results.machine()
    gpus = machine.get("gpus") or []
    name = gpus[0] if gpus and settings.device == "cuda" else "reference backend on processors"
    return f"\nH={settings.hidden}, F={settings.intermediate}, top-{settings.topk}, bf16, {name}"
