"""Weak scaling of whole training iterations, with Megatron or with DeepSpeed.

    python -m tools.weak_scaling training megatron --out runs/weak_scaling_megatron

Trains one model on 1, 2, 4, ... GPUs, all of them one expert-parallel group, at equal tokens per
GPU: with flashmoe, and with the framework's own MoE layers. Each number of GPUs is a run of wandb
in one group (kept in the folder unless wandb's own variables say otherwise), and the folder then
holds a table and a figure. Without a GPU the same is done small, on 1 and 2 processes.

Arguments that are not listed here go to ``tools.bench.bench_training`` and describe the model; what
is given later replaces what was given before.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flashmoe_megatron.bench.style import COLORS, NEUTRAL, legend_below, new_figure, save
from tools.arguments import parser_of
from tools.markdown import table
from tools.weak_scaling.ranks import StuckError, UsageError, counts_of, run_job
from tools.weak_scaling.wandb_log import RunLog

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


def metrics_of(report: Report) -> dict[str, float]:
    """Milliseconds of an iteration and tokens per second of all ranks, by kind of MoE layer.

    The first third of the iterations is left out: memory is allocated, clocks rise.
    """
    found = {}
    tokens = report["about"]["tokens_per_rank"] * report["about"]["num_ranks"]
    for name, times in report["milliseconds"].items():
        iteration = median(times[len(times) // 3 :])
        found[f"{name}/iteration_ms"] = iteration
        found[f"{name}/tokens_per_s"] = tokens / iteration * 1e3
        found[f"{name}/loss"] = report["losses"][name][-1]
    return found


def table_of(metrics: dict[int, dict[str, float]], names: list[str]) -> list[str]:
    """Markdown; efficiency is throughput per rank relative to the fewest ranks."""
    titles = ["ranks"]
    for name in names:
        titles += [f"{name}, ms per iteration", f"{name}, tokens per s", f"{name}, efficiency"]
    first = min(metrics)
    rows = []
    for count, found in metrics.items():
        cells = [str(count)]
        for name in names:
            rate = found[f"{name}/tokens_per_s"]
            of_first = metrics[first][f"{name}/tokens_per_s"] / first
            milliseconds = found[f"{name}/iteration_ms"]
            cells += [f"{milliseconds:.1f}", f"{rate:.0f}", f"{rate / count / of_first:.2f}"]
        rows.append(cells)
    return table(titles, rows)


def draw(
    metrics: dict[int, dict[str, float]], names: list[str], title: str, path: Path
) -> list[Path]:
    """Throughput and time of an iteration over ranks."""
    counts = sorted(metrics)
    with new_figure(9, 3.8) as figure:
        rate_ax, time_ax = figure.subplots(1, 2)
        for name in names:
            color = COLORS["fused" if name == "flashmoe" else "unfused"]
            rates = [metrics[count][f"{name}/tokens_per_s"] / 1e3 for count in counts]
            rate_ax.plot(counts, rates, "o-", color=color, label=name)
            linear = [rates[0] / counts[0] * count for count in counts]
            label = "linear" if name == names[-1] else None
            rate_ax.plot(counts, linear, "--", color=NEUTRAL, linewidth=1, label=label)
            times = [metrics[count][f"{name}/iteration_ms"] for count in counts]
            time_ax.plot(counts, times, "o-", color=color)
        for ax in (rate_ax, time_ax):
            ax.set_xticks(counts)
            ax.set_xlabel("GPUs" if torch.cuda.is_available() else "processes")
            ax.set_ylim(bottom=0)
        rate_ax.set_ylabel("thousand tokens per s, all ranks")
        time_ax.set_ylabel("training iteration, ms")
        legend_below(figure, rate_ax)
        figure.suptitle(title)
        return save(figure, path)


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
    log = RunLog(folder, f"weak-scaling-{options.framework}-{folder.resolve().name}")
    defaults = LARGE if torch.cuda.is_available() else SMALL
    model = [*defaults[options.framework].split(), *model]
    metrics: dict[int, dict[str, float]] = {}
    failed = {}
    names: list[str] = []
    title = options.framework
    for count in counts:
        print(f"{count} ranks ...", flush=True)
        is_stuck = False
        try:
            report = train_on(count, options, model, folder)
        except StuckError as error:
            is_stuck, report = True, {"reason": str(error)}
        if "reason" in report:
            failed[count] = report["reason"]
            print(f"  failed: {report['reason']}", flush=True)
            log.add(f"ranks{count}", {"ranks": count, **report}, {}, failed=True)
            if is_stuck:
                print("  its ranks may still run: no more are started", flush=True)
                break
            continue
        names = list(report["milliseconds"])
        about = report["about"]
        device = about["gpus"][0] if about["gpus"] else "processors"
        title = f"{about['framework']}, {about['tokens_per_rank']} tokens per rank, {device}"
        found = metrics[count] = metrics_of(report)
        log.add(f"ranks{count}", about, found)
        for name in names:
            milliseconds, rate = found[f"{name}/iteration_ms"], found[f"{name}/tokens_per_s"]
            print(f"  {name}: {milliseconds:.1f} ms per iteration, {rate:.0f} tokens per s")
    lines = [f"# Weak scaling: {title}", ""]
    if metrics:
        lines += [*table_of(metrics, names), ""]
        for path in draw(metrics, names, f"Weak scaling of training, {title}", folder / "scaling"):
            print(f"wrote {path}")
        lines += ["![throughput and time over ranks](scaling.png)", ""]
    lines += [f"Failed on {count}: {reason}" for count, reason in failed.items()]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print(f"wrote {folder / 'report.md'}")
    return int(bool(failed))
