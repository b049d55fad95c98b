"""Weak scaling of whole training iterations, with Megatron or with DeepSpeed.

    python -m tools.weak_scaling training megatron --out runs/weak_scaling_megatron

Trains one model on 1, 2, 4, ... GPUs, all of them one expert-parallel group, at equal tokens per
GPU: with flashmoe, and with the framework's own MoE layers. The folder then holds a table, a figure
and a run of wandb with both and with curves over GPUs; it is sent only if wandb's own variables say
so. Without a GPU the same is done small, on 1 and 2 processes.

Arguments that are not listed here go to ``tools.bench.bench_training`` and describe the model; what
is given later replaces what was given before.
"""

import argparse
import itertools
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes

from flashmoe_megatron.bench.style import COLORS, NEUTRAL, legend_below, new_figure, save
from tools.arguments import parser_of
from tools.markdown import table
from tools.weak_scaling.machine import Machine, machine_of
from tools.weak_scaling.progress import Progress
from tools.weak_scaling.ranks import StuckError, UsageError, counts_of, run_job
from tools.weak_scaling.wandb_log import Sweep, log_sweep

LARGE = {
    "megatron": "--train-iters 30 --num-layers 2 --hidden-size 2048 --moe-ffn-hidden-size 2048 "
    "--num-attention-heads 16 --num-experts 64 --seq-length 2048 --micro-batch-size 4 "
    "--data-megabytes 32",
    "deepspeed": "--families native --shapes qwen3-30b --steps 20 --warmup 10",
}
SMALL = {
    "megatron": "--train-iters 9 --num-layers 1 --hidden-size 64 --moe-ffn-hidden-size 64 "
    "--num-attention-heads 2 --num-experts 8 --seq-length 64 --micro-batch-size 2 "
    "--data-megabytes 1",
    "deepspeed": "--families native --shapes small-top2 --steps 6 --warmup 3",
}
Report = dict[str, Any]
Metrics = dict[int, dict[str, float]]
"""Figures of each number of ranks."""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, "python -m tools.weak_scaling training")
    add = parser.add_argument
    add("framework", choices=list(LARGE))
    add("--gpus", type=int, nargs="+", help="default: 1, 2, 4, ...; processes without a GPU")
    add("--out", type=Path, help="folder of the report, which must not exist")
    add("--timeout", type=float, default=600.0, help="seconds for one number of GPUs")
    return parser.parse_known_args(arguments)


def train_on(count: int, options: argparse.Namespace, model: list[str], folder: Path) -> Report:
    """Trains on one number of ranks.

    Returns:
        Milliseconds and losses of every iteration by kind of MoE layer, flashmoe's first, and what
        was trained; or why there is nothing: ``{"reason": ...}``.

    Raises:
        StuckError: It was not done in time.
    """
    record = folder / f"ranks{count}.jsonl"
    arguments = [options.framework, "--out", str(record.resolve())]
    arguments += ["--limit-s", str(options.timeout), *model]
    if options.framework == "megatron":
        arguments += ["--noise-runs", "0", "--output", str((folder / "data").resolve())]
    log = folder / f"ranks{count}.log"
    reason = run_job(count, "tools.bench.bench_training", arguments, log, options.timeout)
    if reason or not record.exists():
        return {"reason": reason or f"no record, see {log}"}
    runs = [json.loads(line) for line in record.read_text().splitlines()]
    runs.sort(key=lambda run: run["run"] != "flashmoe")
    about = {key: value for key, value in runs[0].items() if not isinstance(value, dict)}
    return {
        "milliseconds": {run["run"]: run["iteration_ms"] for run in runs},
        "losses": {run["run"]: run["losses"] for run in runs},
        "about": {**about, **runs[0].get("settings", {})},
    }


def label_of(name: str, machine: Machine) -> str:
    """Returns the name of a kind of MoE layer; ours says where it is no time of the kernel."""
    return f"{name} (reference)" if name == "flashmoe" and machine.is_reference else name


def metrics_of(report: Report) -> dict[str, float]:
    """Times of an iteration and tokens per second of all ranks, by kind of MoE layer.

    The first third of the iterations is left out: memory is allocated, clocks rise.
    """
    found = {}
    tokens = report["about"]["tokens_per_rank"] * report["about"]["num_ranks"]
    machine = machine_of(report["about"])
    for kind, every in report["milliseconds"].items():
        name, times = label_of(kind, machine), every[len(every) // 3 :]
        iteration = median(times)
        found[f"{name}/iteration_ms"] = iteration
        found[f"{name}/shortest_ms"], found[f"{name}/longest_ms"] = min(times), max(times)
        found[f"{name}/tokens_per_s"] = tokens / iteration * 1e3
        found[f"{name}/loss"] = report["losses"][kind][-1]
    return found


def compared(metrics: Metrics, names: list[str]) -> Metrics:
    """Adds the efficiency T(2) / T(N) and the exposed communication T(N) - T(1).

    Both compare iterations at equal tokens per rank, and need a training on the other number of
    ranks.
    """
    found = {count: dict(of_count) for count, of_count in metrics.items()}
    for count, name in itertools.product([count for count in metrics if count > 1], names):
        key = f"{name}/iteration_ms"
        if 2 in metrics:
            found[count][f"{name}/efficiency"] = metrics[2][key] / metrics[count][key]
        if 1 in metrics:
            found[count][f"{name}/exposed_ms"] = metrics[count][key] - metrics[1][key]
    return found


def table_of(metrics: Metrics, names: list[str]) -> list[str]:
    """Returns the table of the report in Markdown."""
    columns = {
        "iteration_ms": ("ms per iteration", ".1f"),
        "tokens_per_s": ("tokens per s", ".0f"),
        "efficiency": ("T(2) / T(N)", ".3f"),
        "exposed_ms": ("exposed communication, ms", ".1f"),
    }
    titles = ["ranks", *(f"{name}, {title}" for name in names for title, _ in columns.values())]
    rows = [
        [str(count)]
        + [
            format(found[f"{name}/{key}"], form) if f"{name}/{key}" in found else ""
            for name in names
            for key, (_, form) in columns.items()
        ]
        for count, found in metrics.items()
    ]
    return table(titles, rows)


def draw(metrics: Metrics, names: list[str], ranks: str, title: str, path: Path) -> Path:
    """Draws time of an iteration with its spread, efficiency and throughput over ranks.

    Args:
        metrics: From :func:`compared`.
        names: The kinds of MoE layers.
        ranks: The name of the axis.
        title: Stands above the panels.
        path: The figure, without an ending.

    Returns:
        The PNG.
    """
    counts = sorted(metrics)
    with new_figure(14, 4.6) as figure:
        time_ax, efficiency_ax, rate_ax = figure.subplots(1, 3)
        for name in names:
            color = COLORS["fused" if name.startswith("flashmoe") else "unfused"]

            def of(key: str, name: str = name) -> list[float]:
                return [metrics[count][f"{name}/{key}"] for count in counts]

            times, shortest, longest = of("iteration_ms"), of("shortest_ms"), of("longest_ms")
            spread = [
                [time - least for time, least in zip(times, shortest, strict=True)],
                [most - time for time, most in zip(times, longest, strict=True)],
            ]
            time_ax.errorbar(
                counts, times, spread, fmt="o-", color=color, capsize=3, elinewidth=1, label=name
            )
            several = [count for count in counts if f"{name}/efficiency" in metrics[count]]
            values = [metrics[count][f"{name}/efficiency"] for count in several]
            efficiency_ax.plot(several, values, "o-", color=color)
            rates = [rate / 1e3 for rate in of("tokens_per_s")]
            rate_ax.plot(counts, rates, "o-", color=color)
            _ideal(rate_ax, counts, [rates[0] / counts[0] * count for count in counts])
        key = f"{names[0]}/iteration_ms"
        _ideal(time_ax, counts, [metrics[counts[0]][key]] * len(counts), "ideal: no communication")
        _ideal(efficiency_ax, counts, [1.0] * len(counts))
        for ax in (time_ax, efficiency_ax, rate_ax):
            ax.set_xscale("log", base=2)
            ax.set_xticks(counts, list(map(str, counts)))
            ax.minorticks_off()
            ax.set_xlabel(ranks)
            ax.set_ylim(bottom=0)
        time_ax.set_ylabel("training iteration, ms")
        efficiency_ax.set_ylabel("T(2) / T(N)")
        rate_ax.set_ylabel("thousand tokens per s, all ranks")
        legend_below(figure, time_ax)
        figure.suptitle(title)
        return save(figure, path)[0]


def _ideal(ax: Axes, counts: list[int], values: list[float], label: str | None = None) -> None:
    ax.plot(counts, values, "--", color=NEUTRAL, linewidth=1, label=label)


def main(arguments: list[str]) -> int:
    """Trains on every number of ranks, and writes the report.

    Returns:
        0 if no training has failed, else 1.

    Raises:
        UsageError: The folder exists, or there are fewer GPUs than asked for.
    """
    options, model = parse(arguments)
    folder = options.out or Path("runs") / f"weak_scaling_{options.framework}"
    if folder.exists():
        raise UsageError(f"{folder} exists: name another folder by --out")
    counts = counts_of(options.gpus)
    folder.mkdir(parents=True)
    defaults = LARGE if torch.cuda.is_available() else SMALL
    model = [*defaults[options.framework].split(), *model]
    metrics: Metrics = {}
    failed: dict[int, str] = {}
    about: Report = {}
    progress = Progress(0, len(counts), "numbers of ranks")
    for place, count in enumerate(counts):
        print(f"{count} ranks ...", flush=True)
        try:
            report = train_on(count, options, model, folder)
        except StuckError as error:
            failed[count] = str(error)
            print(f"  failed: {error}\n  its ranks may still run: no more are started", flush=True)
            break
        if "reason" in report:
            failed[count] = report["reason"]
            print(f"  failed: {report['reason']}", flush=True)
        else:
            about, metrics[count] = report["about"], metrics_of(report)
            for name in _names(metrics):
                milliseconds, rate = (
                    metrics[count][f"{name}/{key}"] for key in ("iteration_ms", "tokens_per_s")
                )
                print(f"  {name}: {milliseconds:.1f} ms per iteration, {rate:.0f} tokens per s")
        progress.say(place + 1)
    log_sweep(folder, write_report(folder, options.framework, metrics, failed, about))
    return int(bool(failed))


def _names(metrics: Metrics) -> list[str]:
    """Returns the kinds of MoE layers, ours first."""
    kinds = dict.fromkeys(key.partition("/")[0] for found in metrics.values() for key in found)
    return list(kinds)


def write_report(
    folder: Path, framework: str, metrics: Metrics, failed: dict[int, str], about: Report
) -> Sweep:
    """Writes ``report.md``, and the figure if there are trainings.

    Args:
        folder: Takes both.
        framework: Megatron or DeepSpeed.
        metrics: The figures of each number of ranks.
        failed: Why there are none.
        about: What was trained, and where.

    Returns:
        The same for wandb.
    """
    machine, names = machine_of(about), _names(metrics)
    found, figure = compared(metrics, names), None
    said = [f"Weak scaling of training with {framework}"]
    if about:
        said = [
            f"Weak scaling of training with {about['framework']}, {about['tokens_per_rank']} "
            "tokens per rank",
            machine.title,
            "medians; bars are the shortest and the longest iteration",
        ]
    title = "\n".join(said)
    lines = [f"# {said[0]}", "", *(f"{one}." for one in said[1:2]), ""]
    if metrics:
        figure = draw(found, names, machine.ranks, title, folder / "scaling")
        print(f"wrote {figure}")
        lines += [*table_of(found, names), ""]
        lines += [
            "T(2) / T(N) is the time of an iteration on 2 ranks over that on N, at equal tokens "
            "per rank: 1 if more ranks cost nothing. Exposed communication is T(N) - T(1).",
            "",
            "![time, efficiency and throughput over ranks](scaling.png)",
            "",
        ]
    lines += [f"Failed on {count}: {reason}" for count, reason in failed.items()]
    (folder / "report.md").write_text("\n".join(lines).rstrip() + "\n")
    print(f"wrote {folder / 'report.md'}")
    axis = machine.ranks.lower()
    keys = list(dict.fromkeys(key for of_count in found.values() for key in of_count))
    return Sweep(
        name=f"weak-scaling-{framework}-{folder.resolve().name}",
        config={**about, **(machine.config if about else {})},
        axis=axis,
        curves=[{axis: count, **of_count} for count, of_count in found.items()],
        columns=["ranks", *keys, "failed"],
        rows=[
            [count, *(found.get(count, {}).get(key) for key in keys), failed.get(count)]
            for count in sorted({*found, *failed})
        ],
        figure=figure,
        title=title,
        failed=bool(failed),
    )
