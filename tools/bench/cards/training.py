"""Runs an arm of a card in a process of its own, and says what came of it."""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench.bench_training.logs import read_log
from tools.bench.cards import watched
from tools.bench.cards.arms import Arm
from tools.bench.cards.models import COUNTED, ITERATIONS, Model
from tools.gpu_check import end, spawn, torchrun, wait_bounded

KEPT = 4_000_000
"""Characters of a run's output that its log has."""
BOUND = re.compile(
    r"rank (\d+) was to receive (\d+) blocks of 128 rows, but its buffers hold (\d+)"
)
SAMPLES = ("timestamp", "clocks.sm", "power.draw")


def command_of(model: Model, arm: Arm, script: Path, seen: Path, gpus: int) -> list[str]:
    """Returns the command of an arm, with a file for :mod:`.watched` to write."""
    watch = ["-m", watched.__name__, str(seen), str(script)]
    return [*torchrun(gpus), *watch, *model.arguments(gpus), *arm.flags(model, gpus)]


class Started:
    """An arm's process, which waits for its turn before it builds its model.

    Imports and Megatron's start take longer than all iterations together, and next to nothing of a
    GPU: arms that share a machine start at the same time, and train one after another.

    Args:
        model: The model that is trained.
        arm: The way to train it.
        script: ``pretrain_gpt.py``.
        folder: Takes the log, and for a while the file that :mod:`.watched` writes.
        gpus: GPUs of this host.
    """

    def __init__(self, model: Model, arm: Arm, script: Path, folder: Path, gpus: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model, self.arm, self._folder = model, arm, folder
        self._seen, self._turn = self._file("seen"), self._file("turn")
        for left_over in (self._seen, self._turn):
            left_over.unlink(missing_ok=True)
        variables = {
            "NCCL_NVLS_ENABLE": "0",
            "OMP_NUM_THREADS": "4",
            # Else every rank of every waiting arm starts a process for each of the host's cores.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            watched.TURN: str(self._turn),
            **arm.variables,
        }
        command = command_of(model, arm, script.resolve(), self._seen, gpus)
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by leave
        self._process = spawn(command, self._output, variables=variables)

    def _file(self, kind: str) -> Path:
        return self._folder.resolve() / f"{self.arm.name}.{kind}"

    def train(self, limit_s: float) -> dict[str, Any]:
        """Gives it its turn, and returns its log's and its watch's facts, and how it ended.

        Args:
            limit_s: Seconds from now until the process is ended.
        """
        begin = time.monotonic()
        self._turn.touch()
        with _samples(self._file("clocks")) as samples:
            status = wait_bounded(self._process, limit_s)
        self._output.seek(0)
        output = self._output.read()[-KEPT:]
        log = self._file("log")
        log.write_text(output)
        result = {
            "seconds": round(time.monotonic() - begin, 1),
            **outcome_of(output, status, read_log(log)),
            **clocks_of(samples.read_text() if samples.exists() else "", output),
        }
        if self._seen.is_file():
            result |= json.loads(self._seen.read_text())
        samples.unlink(missing_ok=True)
        return result

    def leave(self) -> None:
        """Ends the process if it is there, and removes its files except the log."""
        if self._process.poll() is None:
            end(self._process)
        self._output.close()
        for each in (self._seen, self._turn):
            each.unlink(missing_ok=True)


def outcome_of(output: str, status: int | None, iterations: dict[int, Any]) -> dict[str, Any]:
    """How a run ended, with losses and times of its iterations.

    ``ended`` is "complete" after all iterations that count, whatever came then; "bound" where a
    rank was to get more rows than its buffers hold, "unfused" where attention is, "time" where the
    limit ended it, and else "failed".
    """
    within = [iterations[i] for i in sorted(iterations) if i <= ITERATIONS]
    result: dict[str, Any] = {
        "status": status,
        "losses": [each.loss for each in within],
        "iteration_ms": [each.ms for each in within],
    }
    bound = BOUND.search(output)
    if len(within) == ITERATIONS:
        result["ended"] = "complete"
    elif bound is not None:
        result |= {"ended": "bound", "row_blocks": int(bound[2]), "room": int(bound[3])}
    elif f"exitcode: {watched.UNFUSED_STATUS}" in " ".join(output.split()) or (
        "wanted fused attention" in output
    ):
        result["ended"] = "unfused"
    else:
        result["ended"] = "time" if status is None else "failed"
    return result


ITERATION_AT = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] +iteration +(\d+)/")


def clocks_of(samples: str, output: str) -> dict[str, list[float]]:
    """Clock and power of a GPU while the iterations that count ran, least and most.

    Args:
        samples: Lines of ``nvidia-smi``: time, MHz, watts.
        output: The run's, whose iterations say when they ended.
    """
    ends = {int(number): at.replace("-", "/") for at, number in ITERATION_AT.findall(output)}
    begin, end = ends.get(ITERATIONS - COUNTED), ends.get(ITERATIONS)
    if begin is None or end is None:
        return {}
    found = []
    for line in samples.splitlines():
        at, *numbers = (part.strip() for part in line.split(","))
        if begin <= at <= end and len(numbers) == len(SAMPLES) - 1:
            found.append([float(number) for number in numbers])
    if not found:
        return {}
    mhz, watts = zip(*found, strict=True)
    return {"sm_mhz": [min(mhz), max(mhz)], "watts": [min(watts), max(watts)]}


@contextmanager
def _samples(path: Path) -> Iterator[Path]:
    """Has the first used GPU's clock and power written five times a second, where that can be."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = [f"--query-gpu={','.join(SAMPLES)}", "--format=csv,noheader,nounits"]
    with path.open("w") as file:
        try:
            process = subprocess.Popen(
                ["nvidia-smi", f"--id={first}", *query, "-lms", "200"],
                stdout=file,
                stderr=subprocess.DEVNULL,
                env=dict(os.environ, LD_PRELOAD=""),
            )
        except OSError:
            process = None
        try:
            yield path
        finally:
            if process is not None:
                process.terminate()
                process.wait(10)
