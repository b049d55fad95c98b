"""Trainings of Megatron's stock script in processes of their own, bounded, and what they say."""

# ruff: noqa: T201 - for programs: it prints

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe_megatron.adapters.metrics import FILE_NAME
from tests.gpu.two_hosts import free_port
from tools.bench.bench_training.logs import Iteration, read_log

SMALL = """
--transformer-impl transformer_engine --bf16 --num-layers 2 --seq-length 1024
--max-position-embeddings 1024 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --swiglu --disable-bias-linear --num-experts 16
--moe-ffn-hidden-size 1024 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 --moe-grouped-gemm --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer
--vocab-size 32000 --split 1,0,0 --no-create-attention-mask-in-dataloader --lr 1e-4 --min-lr 1e-5
--lr-decay-style constant --no-gradient-accumulation-fusion --log-interval 1 --eval-iters 0
--eval-interval 100000 --seed 1234 --micro-batch-size 2 --num-workers 2 --manual-gc
"""
"""A model that is small enough for a thousand iterations."""
LAUNCHER = ("-m", "flashmoe_megatron.run")
END_CHARACTERS, ERROR_CHARACTERS, ERRORS = 3000, 600, 8


@dataclass(frozen=True)
class Outcome:
    """What a training has said.

    Attributes:
        codes: Exit codes of the hosts' torchruns.
        iterations: Losses and times by the iteration's number.
        reports: What flashmoe's layers have reported of an iteration each, if they were asked to.
        logs: All that the hosts have printed.
        seconds: How long all of it took.
    """

    codes: list[int]
    iterations: dict[int, Iteration]
    reports: list[dict[str, float]]
    logs: list[str]
    seconds: float

    @property
    def losses(self) -> list[float]:
        """In the order of iterations; NaN where one is missing or not finite."""
        return [one.loss for _, one in sorted(self.iterations.items())]

    def median_ms(self, warm: int) -> float:
        """An iteration's time behind the first ones; NaN if there are no others."""
        times = [one.ms for number, one in self.iterations.items() if number > warm]
        return statistics.median(times) if times else math.nan

    def is_right(self, count: int) -> bool:
        """Whether it has ended well, behind so many iterations with finite losses."""
        is_whole = not any(self.codes) and len(self.iterations) == count
        return is_whole and all(map(math.isfinite, self.losses))

    def ends(self) -> str:
        """The last that each host has said, behind what first names an error."""
        return "\n----\n".join(map(_end_of, self.logs))

    def what_is_wrong(self, count: int, backend: str | None) -> list[str]:
        """Sentences on a training that did not end well, or not in our code.

        Args:
            count: Iterations.
            backend: The one that layers have to say they run on; ``None`` if none may be ours.
        """
        wrong = [] if self.is_right(count) else [f"wanted {count} finite losses and no error"]
        said = "flashmoe: backend"
        if backend is None and said in self.logs[0]:
            wrong.append("a layer says that it runs on flashmoe")
        if backend is not None and f"{said} {backend}, " not in self.logs[0]:
            wrong.append(f"no layer says that it runs on the backend {backend}")
        return wrong

    def say_wrong(self, name: str, wrong: Sequence[str]) -> bool:
        """Prints what is wrong with a training, and its log's end; whether nothing was."""
        if wrong:
            print(*(f"wrong, {name}: {sentence}" for sentence in wrong), sep="\n")
            print(self.ends(), flush=True)
        return not wrong


def _end_of(log: str) -> str:
    # Megatron prints an exception as one line, at whose end its message is. Each rank prints its
    # own, and which one waits for whom only all of them tell.
    errors = [line[-ERROR_CHARACTERS:] for line in log.splitlines() if "Error" in line][:ERRORS]
    return "\n".join([*errors, "...", log[-END_CHARACTERS:]])


def agree(losses: Sequence[Sequence[float]], rel_tol: float = 2e-3) -> bool:
    """Whether several trainings have as many losses as the first, and about the same ones."""
    return all(
        len(other) == len(losses[0])
        and all(math.isclose(a, b, rel_tol=rel_tol) for a, b in zip(other, losses[0], strict=True))
        for other in losses[1:]
    )


def train(
    megatron: Path,
    arguments: Sequence[str],
    *,
    ranks_per_host: int,
    limit_s: float,
    environments: Sequence[Mapping[str, str]] = ({},),
    launcher: Sequence[str] = LAUNCHER,
    with_reports: bool = False,
) -> Outcome:
    """One training, a torchrun for each host.

    Args:
        megatron: A folder with ``pretrain_gpt.py``, and what it imports beside Megatron-Core.
        arguments: The script's.
        ranks_per_host: Processes of each torchrun.
        limit_s: Seconds until what hangs is ended.
        environments: Variables of each host's processes; there are as many hosts.
        launcher: What torchrun starts with the script.
        with_reports: Have flashmoe's layers report every iteration but the first.
    """
    port, begin = free_port(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashmoe-training-") as folder, ExitStack() as stack:
        reports = Path(folder, "reports")
        if with_reports:
            arguments = [*arguments, "--tensorboard-dir", str(reports)]
        logs = [Path(folder, str(host)) for host in range(len(environments))]
        processes = []
        for host, (environment, log) in enumerate(zip(environments, logs, strict=True)):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--node-rank", str(host)]
            torchrun += ["--nnodes", str(len(environments)), "--nproc-per-node"]
            torchrun += [str(ranks_per_host), "--master-addr", "127.0.0.1"]
            torchrun += ["--master-port", str(port), *launcher, str(megatron / "pretrain_gpt.py")]
            path = os.pathsep.join([str(megatron.resolve()), os.environ.get("PYTHONPATH", "")])
            own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
            processes.append(
                subprocess.Popen(
                    [*torchrun, *arguments],
                    env={**os.environ, **own},
                    stdout=stack.enter_context(log.open("w")),
                    stderr=subprocess.STDOUT,
                )
            )
        for process in processes:
            try:
                process.wait(max(0.1, begin + limit_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun then ends its ranks
        return Outcome(
            codes=[process.wait() for process in processes],
            iterations={n: one for log in logs for n, one in read_log(log).items()},
            reports=_read_reports(reports / FILE_NAME),
            logs=[log.read_text(errors="replace") for log in logs],
            seconds=round(time.monotonic() - begin, 1),
        )


def _read_reports(path: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, path.read_text().splitlines())) if path.is_file() else []
