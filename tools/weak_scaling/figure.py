"""The figure of a layer's sweep."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from flashmoe_megatron.bench.style import (
    ACCENT,
    COLORS,
    FUSED,
    NEUTRAL,
    legend_below,
    new_figure,
    save,
    tokens_label,
)
from tools.weak_scaling.machine import Machine
from tools.weak_scaling.points import IMPLEMENTATIONS, PASSES, Measured, Point, Settings

Metrics = dict[Point, dict[str, float]]


def draw(
    path: Path,
    settings: Settings,
    measured: Measured,
    metrics: Metrics,
    machine: Machine,
    title: str,
) -> Path:
    """Draws time, efficiency and throughput over ranks, and all of them over tokens and experts.

    Args:
        path: The figure, without an ending.
        settings: The sweep's.
        measured: The records of each point.
        metrics: The figures of each point.
        machine: Where it was measured.
        title: Stands above the panels.

    Returns:
        The PNG.
    """
    base = [point for point in measured if point.num_experts == settings["base_experts"]]
    weak = [point for point in base if point.tokens == settings["base_tokens"]]
    on_most = [point for point in measured if point.ranks == settings["gpus"][-1]]
    over_tokens = [point for point in on_most if point in base]
    over_experts = [point for point in on_most if point.tokens == settings["expert_tokens"]]
    labels = dict(zip(IMPLEMENTATIONS, (machine.ours, "unfused"), strict=True))

    def times(ax: Axes, what: str, points: Sequence[Point], at: Callable[[Point], int]) -> None:
        for name, label in labels.items():
            records = [measured[point][name, what] for point in points]
            middle = [record["median_ms"] for record in records]
            spread = [
                [record["median_ms"] - record["min_ms"] for record in records],
                [record["max_ms"] - record["median_ms"] for record in records],
            ]
            ax.errorbar(
                [at(point) for point in points],
                middle,
                spread,
                fmt="o-",
                color=COLORS[name],
                capsize=3,
                elinewidth=1,
                label=label,
            )
        _axis(ax, [at(point) for point in points])
        ax.set_ylabel(f"{what}, ms")

    def curves(
        ax: Axes, keys: dict[str, str], points: Sequence[Point], at: Callable[[Point], int]
    ) -> None:
        for key, color in keys.items():
            shown = [point for point in points if key in metrics[point]]
            values = [metrics[point][key] for point in shown]
            ax.plot([at(point) for point in shown], values, "o-", color=color)
        _axis(ax, [at(point) for point in points])

    with new_figure(17, 11) as figure:
        axes = figure.subplots(len(PASSES) + 1, 4)
        for row, what in enumerate(PASSES):
            ours = f"{what}/{machine.ours}"
            colors = {f"{what}/{labels[name]}": COLORS[name] for name in IMPLEMENTATIONS}
            time, efficiency, rate, by_tokens = axes[row]
            times(time, what, weak, _ranks)
            if weak:
                first = min(weak, key=lambda point: (point.ranks != 2, point.ranks))
                value = metrics[first][f"{ours}_ms"]
                label = f"ideal: as on {first.ranks} {machine.ranks}"
                ends = [min(map(_ranks, weak)), max(map(_ranks, weak))]
                _ideal(time, ends, [value, value], label)
                per_rank = metrics[first][f"{ours}_mtokens_per_s"] / first.ranks
                counts = [point.ranks for point in weak]
                _ideal(rate, counts, [per_rank * count for count in counts], label)
            curves(efficiency, {f"{key}_efficiency": colors[key] for key in colors}, weak, _ranks)
            _one(efficiency)
            efficiency.set_ylabel(f"{what},\nOe = T(2) / T(N)")
            curves(rate, {f"{key}_mtokens_per_s": colors[key] for key in colors}, weak, _ranks)
            rate.set_ylabel(f"{what},\nmillion tokens per s")
            times(by_tokens, what, over_tokens, lambda point: point.tokens)
            by_tokens.set_xlabel(f"tokens per rank, {settings['gpus'][-1]} {machine.ranks}")
            for ax in (time, efficiency, rate):
                each = tokens_label(settings["base_tokens"])
                ax.set_xlabel(f"{machine.ranks}, {each} tokens each")
            times(axes[-1][row], what, over_experts, lambda point: point.num_experts)
            axes[-1][row].set_xlabel(
                f"experts, {tokens_label(settings['expert_tokens'])} tokens per rank, "
                f"{settings['gpus'][-1]} {machine.ranks}"
            )
        by_tokens, memory = axes[-1][2:]
        both = {f"{what}/{machine.ours}_efficiency": what for what in PASSES}
        shades = dict(zip(both, (FUSED, ACCENT), strict=True))
        curves(by_tokens, shades, over_tokens, lambda point: point.tokens)
        _one(by_tokens)
        by_tokens.set_ylabel(f"{machine.ours},\nOe = T(2) / T(N)")
        _name_lines(by_tokens, list(both.values()))
        planned = {"symmetric heap": FUSED, "kept": ACCENT, "tokens": NEUTRAL}
        keys = dict(zip(("symmetric", "kept", "tokens"), planned.values(), strict=True))
        curves(
            memory,
            {f"planned/{key}_mib": color for key, color in keys.items()},
            over_tokens,
            lambda point: point.tokens,
        )
        memory.set_ylabel("MiB of a rank,\nby the kernel's plan")
        _name_lines(memory, list(planned))
        for ax in (by_tokens, memory):
            ax.set_xlabel(f"tokens per rank, {settings['gpus'][-1]} {machine.ranks}")
        legend_below(figure, axes[0][0])
        figure.suptitle(title)
        return save(figure, path)[0]


def _ranks(point: Point) -> int:
    return point.ranks


def _ideal(ax: Axes, at: list[int], values: list[float], label: str) -> None:
    ax.plot(at, values, "--", color=NEUTRAL, linewidth=1, label=label)


def _one(ax: Axes) -> None:
    """Draws the ideal of an efficiency, with room above."""
    ax.axhline(1, color=NEUTRAL, linewidth=1, linestyle="--")
    ax.set_ylim(top=max(1.1, ax.get_ylim()[1]))


def _axis(ax: Axes, values: list[int]) -> None:
    ticks = sorted(set(values))
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [tokens_label(value) for value in ticks])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)


def _name_lines(ax: Axes, names: list[str]) -> None:
    """Names the lines of a panel whose colors are its own."""
    lines = [line for line in ax.get_lines() if line.get_marker() == "o"]
    if any(len(line.get_xdata()) for line in lines):
        ax.legend(lines, names)
