"""Weak scaling of whole training iterations, with Megatron or with DeepSpeed.

Trains one model on 1, 2, 4, ... GPUs, all of them one expert-parallel group, at equal tokens per
GPU: with flashmoe, and with the framework's own MoE layers. Each number of GPUs is a run of wandb
in one group (kept in the folder unless wandb's own variables say otherwise), and the folder then
holds a table and a figure. Without a GPU the same is done small, on 1 and 2 processes.

Run by examples/weak_scaling_megatron.sh or examples/weak_scaling_deepspeed.sh; arguments that are
not listed here go to the training program and describe the model, as those of pretrain_moe.sh do.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tools.weak_scaling.style import FUSED, NEUTRAL, UNFUSED, legend_below, new_figure, save
from tools.weak_scaling.wandb_log import RunLog

EXAMPLES = Path(__file__).parent
SMALL = (
    "--train-iters 9 --num-layers 1 --hidden-size 64 --moe-ffn-hidden-size 64 "
    "--num-attention-heads 2 --seq-length 64 --micro-batch-size 2 --num-microbatches 1 "
    "--data-megabytes 1"
)
LARGE = (
    "--train-iters 30 --num-layers 2 --hidden-size 2048 --moe-ffn-hidden-size 2048 "
    "--num-attention-heads 16 --num-experts 64 --seq-length 2048 --micro-batch-size 4 "
    "--num-microbatches 1 --data-megabytes 32"
)
COLORS = {"flashmoe": FUSED}
PATIENCE_S = 45
"""Of SIGTERM: torchrun kills ranks that live 30 s on, and gives up on them after another 30 s."""
Report = dict[str, Any]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("framework", choices=["megatron", "deepspeed"])
    add("--gpus", type=int, nargs="+", help="default: 1, 2, 4, ...; processes without a GPU")
    add("--out", type=Path, help="folder of the report, which must not exist")
    add("--timeout", type=float, default=600.0, help="seconds for one number of GPUs")
    return parser.parse_known_args()


def train_on(count: int, args: argparse.Namespace, model: list[str], folder: Path) -> Report:
    """Trains on one number of ranks.

    Returns:
        What the training program wrote, or why there is nothing: ``{"reason": ...}``, and with
        ``"is_stuck": True`` if ranks may still run.
    """
    report = folder / f"ranks{count}.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc_per_node", str(count), str(EXAMPLES / f"weak_scaling_{args.framework}.py")),
        *("--report", str(report), "--output", str(folder / "work"), *model),
    ]
    cores = os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(cores // (2 * count), 1)), **os.environ}
    with (folder / f"ranks{count}.log").open("w") as log:
        # Of a session of its own: a Ctrl-C for both would be torchrun's second signal, at which it
        # leaves its ranks.
        launcher = subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = launcher.wait(args.timeout)
        except subprocess.TimeoutExpired:
            reason = f"not done within {args.timeout:g} s, see {log.name}"
            return {"reason": reason} if end(launcher) else {"reason": reason, "is_stuck": True}
        except KeyboardInterrupt:
            end(launcher)
            raise
    if status != 0 or not report.exists():
        return {"reason": f"status {status}, see {log.name}"}
    found: Report = json.loads(report.read_text())
    return found


def end(launcher: "subprocess.Popen[bytes]") -> bool:
    """Ends torchrun, politely first: its ranks are of sessions of their own, which it alone ends.

    Returns:
        Whether all have ended.
    """
    launcher.terminate()
    try:
        launcher.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        return False
    return True


def metrics_of(report: Report) -> dict[str, float]:
    """Milliseconds of an iteration and tokens per second of all ranks, by kind of MoE layer.

    The first third of the iterations is left out: memory is allocated, clocks rise.
    """
    found = {}
    for name, times in report["milliseconds"].items():
        iteration = median(times[len(times) // 3 :])
        found[f"{name}/iteration_ms"] = iteration
        tokens = report["tokens_per_rank"] * report["ranks"]
        found[f"{name}/tokens_per_s"] = tokens / iteration * 1e3
        found[f"{name}/loss"] = report["losses"][name][-1]
    return found


def table(metrics: dict[int, dict[str, float]], names: list[str]) -> list[str]:
    """Markdown; efficiency is throughput per rank relative to the fewest ranks."""
    titles = ["ranks"]
    for name in names:
        titles += [f"{name}, ms per iteration", f"{name}, tokens per s", f"{name}, efficiency"]
    lines = ["| " + " | ".join(titles) + " |", "| " + " | ".join("---" for _ in titles) + " |"]
    first = min(metrics)
    for count, found in metrics.items():
        cells = [str(count)]
        for name in names:
            rate = found[f"{name}/tokens_per_s"]
            of_first = metrics[first][f"{name}/tokens_per_s"] / first
            cells += [
                f"{found[f'{name}/iteration_ms']:.1f}",
                f"{rate:.0f}",
                f"{rate / count / of_first:.2f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(
    metrics: dict[int, dict[str, float]], names: list[str], title: str, path: Path
) -> list[Path]:
    """Throughput and time of an iteration over ranks."""
    counts = sorted(metrics)
    with new_figure(9, 3.8) as figure:
        rate_ax, time_ax = figure.subplots(1, 2)
        for name in names:
            color = COLORS.get(name, UNFUSED)
            rates = [metrics[count][f"{name}/tokens_per_s"] / 1e3 for count in counts]
            rate_ax.plot(counts, rates, "o-", color=color, label=name)
            linear = [rates[0] / counts[0] * count for count in counts]
            rate_ax.plot(
                counts,
                linear,
                "--",
                color=NEUTRAL,
                linewidth=1,
                label="linear" if name == names[-1] else None,
            )
            times = [metrics[count][f"{name}/iteration_ms"] for count in counts]
            time_ax.plot(counts, times, "o-", color=color)
        unit = "GPUs" if torch.cuda.is_available() else "processes"
        for ax in (rate_ax, time_ax):
            ax.set_xticks(counts)
            ax.set_xlabel(unit)
            ax.set_ylim(bottom=0)
        rate_ax.set_ylabel("thousand tokens per s, all ranks")
        time_ax.set_ylabel("training iteration, ms")
        legend_below(figure, rate_ax)
        figure.suptitle(title)
        return save(figure, path)


def main() -> int:
    args, model = parse_args()
    folder = args.out or Path("runs") / f"weak_scaling_{args.framework}"
    if folder.exists():
        print(f"error: {folder} exists: name another folder by --out", file=sys.stderr)
        return 2
    has_gpu = torch.cuda.is_available()
    most = torch.cuda.device_count() if has_gpu else 2
    counts = sorted(set(args.gpus or [2**power for power in range(most.bit_length())]))
    if has_gpu and counts[-1] > most:
        print(f"error: --gpus {counts[-1]}: this machine has {most}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True)
    log = RunLog(folder, f"weak-scaling-{args.framework}-{folder.resolve().name}")
    # What is given later replaces what was given before.
    arguments = [*(LARGE if has_gpu else SMALL).split(), *model]
    metrics: dict[int, dict[str, float]] = {}
    failed = {}
    names: list[str] = []
    title = args.framework
    for count in counts:
        print(f"{count} ranks ...", flush=True)
        report = train_on(count, args, arguments, folder)
        if "reason" in report:
            failed[count] = report["reason"]
            print(f"  failed: {report['reason']}", flush=True)
            log.add(f"ranks{count}", {"ranks": count, **report}, {"failed": 1}, failed=True)
            if "is_stuck" in report:
                print("  its ranks could not be ended: no more are started", flush=True)
                break
            continue
        names = list(report["milliseconds"])
        tokens = report["tokens_per_rank"]
        title = f"{report['framework']}, {tokens} tokens per rank, {report['device']}"
        metrics[count] = metrics_of(report)
        log.add(f"ranks{count}", report["about"], {**metrics[count], "failed": 0})
        for name in names:
            found = metrics[count]
            print(
                f"  {name}: {found[f'{name}/iteration_ms']:.1f} ms per iteration, "
                f"{found[f'{name}/tokens_per_s']:.0f} tokens per s",
                flush=True,
            )
    lines = [f"# Weak scaling: {title}", ""]
    if metrics:
        lines += [*table(metrics, names), ""]
        for path in draw(metrics, names, f"Weak scaling of training, {title}", folder / "scaling"):
            print(f"wrote {path}")
        lines += ["![throughput and time over ranks](scaling.png)", ""]
    lines += [f"Failed on {count}: {reason}" for count, reason in failed.items()]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print(f"wrote {folder / 'report.md'}")
    return int(bool(failed))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    sys.exit(main())
