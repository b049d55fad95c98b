"""Serves both sweeps: numbers of ranks, and a job on one of them."""

import os
import re
from pathlib import Path

import torch

from tools.gpu_check import run_bounded, torchrun

TAIL = 1_000_000
"""Characters of a job's output that are kept."""


class UsageError(Exception):
    """Something was asked for that cannot be done here."""


class StuckError(Exception):
    """A job did not end in time; its ranks may still run, so no more should be started."""


def counts_of(asked: list[int] | None) -> list[int]:
    """The numbers of ranks: as asked, else 1, 2, 4, ... GPUs, or 2 processes without a GPU.

    Raises:
        UsageError: There are fewer GPUs than asked for, or a number is not positive.
    """
    has_gpu = torch.cuda.is_available()
    most = torch.cuda.device_count() if has_gpu else 2
    counts = sorted(set(asked or [2**power for power in range(most.bit_length())]))
    if counts[0] < 1:
        raise UsageError(f"--gpus {counts[0]}: wanted at least 1")
    if has_gpu and counts[-1] > most:
        raise UsageError(f"--gpus {counts[-1]}: this machine has {most}")
    return counts


def run_job(count: int, module: str, arguments: list[str], log: Path, limit_s: float) -> str:
    """Runs a module on some ranks under torchrun, and adds what it prints to a file.

    Returns:
        Why it failed; empty if it did not.

    Raises:
        StuckError: It was not done in time.
    """
    command = [*torchrun(count), "-m", module, *arguments]
    threads = str(max((os.cpu_count() or 1) // (2 * count), 1))
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    status, output = run_bounded(command, limit_s, tail=TAIL, variables=variables)
    with log.open("a") as file:
        file.write(output)
    if status is None:
        raise StuckError(f"not done within {limit_s:g} s, see {log}")
    if status == 0:
        return ""
    error = re.search(r"\w*[Ee]rror: .+", output)  # the first is the cause, others lose their peer
    return f"status {status}{f', {error[0]}' if error else ''}; see {log}"
