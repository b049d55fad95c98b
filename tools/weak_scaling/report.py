"""The report of a folder: tables as Markdown and CSV, and the figures among them."""

import csv
import logging
from collections.abc import Sequence
from pathlib import Path

from tools.weak_scaling.points import IMPLEMENTATIONS, KERNELS, PASSES
from tools.weak_scaling.results import (
    Measured,
    Results,
    kernel_ms,
    kernel_overlap_efficiency,
    median_ms,
    overlap_efficiency,
)

logger = logging.getLogger("flashmoe.weak_scaling")

Table = tuple[list[str], list[list[str]]]
KERNEL_NOTE = (
    " Kernel times are what launches record that follow one another without a pause: without the "
    "hosts, and without how late they let the ranks begin."
)


def write_report(results: Results) -> list[Path]:
    """Writes ``report.md``, ``latency.csv``, ``memory.csv`` and every figure there are points for.

    Without matplotlib there are no figures, which is said once.

    Returns:
        The files.
    """
    try:
        from tools.weak_scaling.figures import draw_all

        drawn = draw_all(results)
    except ImportError as error:
        drawn = []
        logger.warning(
            "no figures are drawn: %s; `python -m tools.weak_scaling report %s` draws them",
            error,
            results.folder,
        )
    measured = results.measured()
    tables = {"latency": latency_table(measured), "memory": memory_table(measured)}
    written = []
    for name, (titles, rows) in tables.items():
        path = results.folder / f"{name}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(titles)
            writer.writerows(rows)
        written.append(path)
    report = results.folder / "report.md"
    report.write_text(_markdown(results, tables, drawn))
    return [report, *written, *drawn]


def latency_table(measured: Measured) -> Table:
    """Times, throughput and overlap efficiency of every point."""
    titles = ["GPUs", "tokens per GPU", "experts"]
    for which in PASSES:
        titles += [
            f"{which} fused, ms",
            f"{which} unfused, ms",
            f"{which} unfused / fused",
            f"{which} fused, Mtokens/s",
            f"{which} fused Oe = T(2)/T(N)",
            f"{which} unfused Oe = T(2)/T(N)",
        ]
    for direction in KERNELS:
        titles += [f"{direction} kernel, ms", f"{direction} kernel Oe = T(2)/T(N)"]
    rows = []
    for point, result in measured.items():
        row = [str(point.num_gpus), str(point.tokens), str(point.num_experts)]
        for which in PASSES:
            fused, unfused = (median_ms(result, name, which) for name in IMPLEMENTATIONS)
            row += [
                f"{fused:.4g}",
                f"{unfused:.4g}",
                f"{unfused / fused:.2f}",
                f"{point.tokens * point.num_gpus / fused / 1e3:.3g}",
            ]
            for name in IMPLEMENTATIONS:
                efficiency = overlap_efficiency(measured, point, name, which)
                row.append("" if efficiency is None else f"{efficiency:.3f}")
        for direction in KERNELS:
            kernel = kernel_ms(result, direction)
            efficiency = kernel_overlap_efficiency(measured, point, direction)
            row.append("" if kernel is None else f"{kernel:.4g}")
            row.append("" if efficiency is None else f"{efficiency:.3f}")
        rows.append(row)
    return titles, rows


def memory_table(measured: Measured) -> Table:
    """The paper's table 3, per GPU; what was not measured is empty."""
    titles = [
        "GPUs",
        "tokens per GPU",
        "experts",
        "Size(T), MiB",
        "symmetric heap, MiB",
        "heap / Size(T)",
        "rows expected, MiB",
        "rows worst case, MiB",
    ]
    titles += [f"{name} {which} peak, MiB" for which in PASSES for name in IMPLEMENTATIONS]
    rows = []
    for point, result in measured.items():
        memory = result["memory"]
        heap = memory.get("symmetric")
        rows.append(
            [
                str(point.num_gpus),
                str(point.tokens),
                str(point.num_experts),
                _mib(memory["tokens"]),
                _mib(heap),
                "" if heap is None else f"{heap / memory['tokens']:.2f}",
                _mib(memory["rows_expected"]),
                _mib(memory["rows_worst_case"]),
                *(_mib(memory[name].get(which)) for which in PASSES for name in IMPLEMENTATIONS),
            ]
        )
    return titles, rows


def _markdown(results: Results, tables: dict[str, Table], drawn: Sequence[Path]) -> str:
    settings, machine, failed = results.settings, results.machine(), results.failed()
    missing = len(results.missing(retry_failed=False))
    gpus = machine.get("gpus") or []
    has_kernels = any("kernels" in result for result in results.measured().values())
    where = (
        f"{len(gpus)} x {gpus[0]}, driver {machine['driver']}"
        if gpus and settings.device == "cuda"
        else "processors, reference backend"
    )
    lines = [
        "# Weak scaling",
        "",
        f"{where}; torch {machine.get('torch', 'unknown')}, commit "
        f"{machine.get('commit', 'unknown')}, {machine.get('date', 'no date')}. One MoE layer, "
        f"H={settings.hidden}, F={settings.intermediate}, top-{settings.topk}, GELU, bfloat16, "
        "uniform random routing, one expert-parallel group of all GPUs, nothing dropped. Medians "
        f"of {settings.iterations} calls, each from an idle device, of the slowest rank; gradients "
        "of weights are added to float32 buffers. Every result of every point is within "
        f"{settings.gate} of float32 (relative L2).",
        "",
        f"{len(results.measured())} points measured, {len(failed)} failed, {missing} missing.",
        "",
        *_figures(drawn),
        "## Latency and throughput",
        "",
        *_table(*tables["latency"]),
        "",
        "Oe is the overlap efficiency, the time on 2 GPUs over the time on N at equal tokens per "
        "GPU: 1 if more GPUs cost nothing." + (KERNEL_NOTE if has_kernels else ""),
        "",
        "## Memory of one GPU",
        "",
        *_table(*tables["memory"]),
        "",
        "Size(T) is one GPU's tokens. The symmetric heap is shared by all layers of a model. "
        '"Rows" are the buffers of received tokens, activations and results, as planned before a '
        "run: expected under uniform routing, and at worst. Peaks are what torch's allocator held "
        "above inputs, weights and gradients during one call; the heap is not in them. The "
        "kernel's forward that keeps nothing takes the worst case, up to 8 GiB, rather than wait "
        "for the number of rows.",
        "",
    ]
    if failed:
        titles = ["GPUs", "tokens per GPU", "experts", "reason"]
        rows = [
            [
                str(point.num_gpus),
                str(point.tokens),
                str(point.num_experts),
                " ".join(reason.split()).replace("|", "\\|"),
            ]
            for point, reason in failed.items()
        ]
        lines += ["## Points that failed", "", *_table(titles, rows), ""]
    return "\n".join(lines)


def _figures(drawn: Sequence[Path]) -> list[str]:
    lines = []
    for path in drawn:
        if path.suffix == ".png":
            lines += [f"![{path.stem.replace('_', ' ')}]({path.name})", ""]
    return lines


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    shown = [index for index in range(len(titles)) if any(row[index] for row in rows)] or [0]
    return [
        "| " + " | ".join(cells[index] for index in shown) + " |"
        for cells in (titles, ["---"] * len(titles), *rows)
    ]


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f}"
