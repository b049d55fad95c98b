"""The report of a layer's sweep: a table and a figure."""

from dataclasses import replace
from pathlib import Path

from flashmoe_megatron.bench.style import COLORS, legend_below, new_figure, save, tokens_label
from tools.markdown import table
from tools.weak_scaling.points import (
    IMPLEMENTATIONS,
    PASSES,
    Measured,
    Point,
    Settings,
    points_of,
    read_results,
    read_settings,
)


def metrics_of(measured: Measured, point: Point) -> dict[str, float]:
    """A point's figures, as the report's columns and as wandb's metrics.

    Efficiencies are T(2) / T(N) at equal tokens per rank, where there are more than 2 ranks.
    """
    records = measured[point]
    times = {
        f"{what}/{name}": records[name, what]["median_ms"]
        for what in PASSES
        for name in IMPLEMENTATIONS
    }
    for direction in ("forward", "backward"):
        record = records.get(("fused", f"{direction} kernel"))
        if record is not None:
            times[f"kernel/{direction}"] = record["median_ms"]
    found = {f"{name}_ms": time for name, time in times.items()}
    for what in PASSES:
        fused, unfused = times[f"{what}/fused"], times[f"{what}/unfused"]
        found[f"{what}/speedup"] = unfused / fused
        found[f"{what}/fused_mtokens_per_s"] = point.tokens * point.ranks / fused / 1e3
    pair = replace(point, ranks=2)
    if point.ranks > 2 and pair in measured:
        of_two = metrics_of(measured, pair)
        for name, time in times.items():
            if f"{name}_ms" in of_two:
                found[f"{name}_efficiency"] = of_two[f"{name}_ms"] / time
    found["floor_ms"] = records["fused", "forward"]["floor_ms"]
    found["imbalance"] = records["fused", "forward"]["imbalance"]
    found["error"] = max(records["fused", "gate"]["relative_l2"].values())
    return found


def write_report(folder: Path, failed: dict[Point, str]) -> None:
    """Writes ``report.md``, and the figure if there are points.

    Raises:
        UsageError: The folder is none of a run.
    """
    settings, measured = read_settings(folder), read_results(folder)
    metrics = {point: metrics_of(measured, point) for point in measured}
    missing = len([point for point in points_of(settings) if point not in measured])
    lines = ["# Weak scaling of one layer", ""]
    if measured:
        machine = measured[max(measured)]["fused", "forward"]
        device = f"{machine['gpus'][0]}, driver {machine['driver']}" if machine["gpus"] else "CPU"
        lines += [
            f"{device}; torch {machine['torch']}, commit {machine['commit']}, {machine['date']}. "
            f"One MoE layer, H={settings['hidden']}, F={settings['intermediate']}, "
            f"top-{settings['topk']}, GELU, bfloat16, uniform random routing, one expert-parallel "
            f"group of all ranks, nothing dropped. Medians of {machine['iterations']} calls, each "
            "from an idle device, of the slowest rank; gradients of weights are added to float32 "
            "buffers.",
            "",
            f"![latency over ranks, tokens and experts]({_draw(folder, settings, measured).name})",
            "",
        ]
    lines += [f"{len(measured)} points measured, {missing} missing.", ""]
    if measured:
        keys = list(dict.fromkeys(key for found in metrics.values() for key in found))
        rows = [
            [str(point.ranks), str(point.tokens), str(point.num_experts)]
            + [f"{found[key]:.4g}" if key in found else "" for key in keys]
            for point, found in metrics.items()
        ]
        lines += [
            *table(["ranks", "tokens per rank", "experts", *keys], rows),
            "",
            "A speedup is the unfused time over the fused, and an efficiency the time on 2 ranks "
            "over this one: 1 if more ranks cost nothing. Kernel times are what launches record "
            "that follow one another without a pause, without the hosts. `error` is the largest "
            "relative L2 distance of a result of the fused layer from float32.",
            "",
        ]
    lines += [f"Failed: {point}: {reason}" for point, reason in failed.items()]
    path = folder / "report.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    print(f"wrote {path}", flush=True)


def _draw(folder: Path, settings: Settings, measured: Measured) -> Path:
    """Draws latencies over ranks, over tokens and over experts.

    Returns:
        The PNG.
    """
    base = [point for point in measured if point.num_experts == settings["base_experts"]]
    on_most = [point for point in measured if point.ranks == settings["gpus"][-1]]
    each = f"{tokens_label(settings['base_tokens'])} tokens each"
    columns = {
        "ranks": (f"ranks, {each}", [p for p in base if p.tokens == settings["base_tokens"]]),
        "tokens": (
            f"tokens per rank, {settings['gpus'][-1]} ranks",
            [point for point in on_most if point in base],
        ),
        "num_experts": (
            f"experts, {tokens_label(settings['expert_tokens'])} tokens per rank",
            [point for point in on_most if point.tokens == settings["expert_tokens"]],
        ),
    }
    with new_figure(12, 6.4) as figure:
        axes = figure.subplots(len(PASSES), len(columns))
        for column, (name, (title, points)) in enumerate(columns.items()):
            at = [getattr(point, name) for point in points]
            for ax, what in zip(axes[:, column], PASSES, strict=True):
                for which in IMPLEMENTATIONS:
                    times = [measured[point][which, what]["median_ms"] for point in points]
                    ax.plot(at, times, "o-", color=COLORS[which], label=which)
                ax.set_xscale("log", base=2)
                ax.set_xticks(at, [tokens_label(value) for value in at])
                ax.minorticks_off()
                ax.set_ylim(bottom=0)
            axes[-1, column].set_xlabel(title)
        for ax, what in zip(axes[:, 0], PASSES, strict=True):
            ax.set_ylabel(f"{what}, ms")
        legend_below(figure, axes[0, 0])
        return save(figure, folder / "scaling")[0]
