"""The report of a layer's sweep: a table, what its columns hold, and a figure."""

from pathlib import Path

from tools.markdown import table
from tools.weak_scaling.figure import draw
from tools.weak_scaling.machine import machine_of
from tools.weak_scaling.metrics import EXPLAINED, metrics_of
from tools.weak_scaling.points import (
    Point,
    points_of,
    read_results,
    read_settings,
)
from tools.weak_scaling.wandb_log import Sweep


def write_report(folder: Path, failed: dict[Point, str]) -> Sweep:
    """Writes ``report.md``, and the figure if there are points.

    Args:
        folder: The sweep's.
        failed: Why points failed.

    Returns:
        The same for wandb.

    Raises:
        UsageError: The folder is none of a run.
    """
    settings, measured = read_settings(folder), read_results(folder)
    metrics = {point: metrics_of(measured, point) for point in measured}
    missing = len([point for point in points_of(settings) if point not in measured])
    keys = list(dict.fromkeys(key for found in metrics.values() for key in found))
    first = measured[max(measured)]["fused", "forward"] if measured else {}
    machine = machine_of(first)
    title = (
        f"Weak scaling of one MoE layer: H={settings['hidden']}, F={settings['intermediate']}, "
        f"{settings['base_experts']} experts, top-{settings['topk']}, bfloat16\n{machine.title}\n"
        "medians; bars are the shortest and the longest call"
    )
    lines, figure = ["# Weak scaling of one layer", ""], None
    if measured:
        figure = draw(folder / "scaling", settings, measured, metrics, machine, title)
        lines += [
            f"{machine.title}, {first['date']}. "
            f"One MoE layer, H={settings['hidden']}, F={settings['intermediate']}, "
            f"top-{settings['topk']}, GELU, bfloat16, uniform random routing, one expert-parallel "
            f"group of all ranks, nothing dropped. Medians of {first['iterations']} calls, each "
            "from an idle device, of the slowest rank; gradients of weights are added to float32 "
            "buffers.",
            "",
            f"![times, efficiency and throughput]({figure.name})",
            "",
        ]
    lines += [f"{len(measured)} points measured, {missing} missing.", ""]
    if measured:
        titles = ["ranks", "tokens per rank", "experts", *keys]
        rows = [
            [str(point.ranks), str(point.tokens), str(point.num_experts)]
            + [f"{found[key]:.4g}" if key in found else "" for key in keys]
            for point, found in metrics.items()
        ]
        lines += [*table(titles, rows), ""]
        lines += [
            f"- `{name}` {what}."
            for name, what in EXPLAINED.items()
            if any(name in key for key in keys)
        ]
        if not any(key.startswith("planned/") for key in keys):
            lines.append("- Memory is not here, since the library that plans it is not built.")
        lines.append("")
    lines += [f"Failed: {point}: {reason}" for point, reason in failed.items()]
    path = folder / "report.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    print(f"wrote {path}", flush=True)
    axis = machine.ranks.lower()
    return Sweep(
        name=f"weak-scaling-{folder.resolve().name}",
        config={**settings, **(machine.config if measured else {})},
        axis=axis,
        curves=[
            {axis: point.ranks, **found}
            for point, found in metrics.items()
            if (point.tokens, point.num_experts)
            == (settings["base_tokens"], settings["base_experts"])
        ],
        columns=["ranks", "tokens per rank", "experts", *keys, "failed"],
        rows=[
            [point.ranks, point.tokens, point.num_experts]
            + [metrics.get(point, {}).get(key) for key in keys]
            + [failed.get(point)]
            for point in sorted({*metrics, *failed})
        ],
        figure=figure,
        title=title,
        failed=bool(failed),
    )
