"""Faults of ranks on GPUs of one host: every rank that lives gets its error or its result, in time.

Each case is a job of its own. Its ranks are started without torchrun, which would end the survivors
of a killed rank before they could be seen to notice.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multi_gpu.faults_worker import CASES

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def run_job(case: str, num_ranks: int, folder: Path) -> tuple[list[int], list[Any], str]:
    """Runs a case.

    Returns:
        Each rank's exit status, its record or ``None``, and the end of what all of them printed.
    """
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        NCCL_NVLS_ENABLE="0",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE=str(num_ranks),
    )
    command = [sys.executable, "-m", "tests.multi_gpu.faults_worker"]
    arguments = ["--case", case, "--out", str(folder)]
    with (folder / "log").open("w") as log:
        ranks = [
            subprocess.Popen(
                [*command, *arguments],
                cwd=ROOT,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(num_ranks)
        ]
        deadline = time.monotonic() + JOB_TIMEOUT_S
        try:
            for process in ranks:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.write(f"\nended after {JOB_TIMEOUT_S} s\n")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    paths = [folder / f"{rank}.json" for rank in range(num_ranks)]
    records = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    return [process.returncode for process in ranks], records, (folder / "log").read_text()[-4000:]


@pytest.mark.timeout(JOB_TIMEOUT_S + 30)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "num_ranks", [pytest.param(count, marks=pytest.mark.multi_gpu(count)) for count in (2, 4)]
)
def test_faults(case: str, num_ranks: int, tmp_path: Path):
    statuses, records, log = run_job(case, num_ranks, tmp_path)
    living = num_ranks
    if case.startswith("killed"):
        living -= 1
        assert statuses[-1] == -signal.SIGKILL, log
    for rank in range(living):
        record = records[rank]
        assert record is not None, f"rank {rank} ended with {statuses[rank]}:\n{log}"
        assert record["passed"], f"rank {rank}: {record['error']}"
        assert statuses[rank] == 0
    if case.startswith(("killed", "never", "withheld")):
        errors = [record["error"] for record in records[:living]]
        assert any("waited too long" in error for error in errors), errors
    elif case == "no_memory_on_one_rank":
        assert all("free" in record["error"] for record in records)
