"""The kernel on 2 and 4 GPUs of one host, over both kinds of symmetric memory.

The ranks of a job are processes that run all cases of :mod:`tests.multi_gpu.worker`, so that
starting them is paid for once; each case is reported as a test of its own.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.multi_gpu.worker import CASES

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_S = 100.0

JOBS = [
    pytest.param(num_ranks, symmetric, marks=pytest.mark.multi_gpu(num_ranks))
    for num_ranks in (2, 4)
    for symmetric in ("cuda", "nvshmem")
]


@functools.cache
def run_job(num_ranks: int, symmetric: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Runs all cases on fresh processes.

    Returns:
        Each finished case's record by name, and the end of what the job printed.
    """
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", NCCL_NVLS_ENABLE="0")
    with tempfile.TemporaryDirectory() as folder:
        records_path, log_path = Path(folder, "records.jsonl"), Path(folder, "log")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", "tests.multi_gpu.worker"),
            *("--symmetric", symmetric, "--out", str(records_path)),
        ]
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            ending = ""
            try:
                process.wait(JOB_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun then ends its ranks
                process.wait(15)
                ending = f"\nended after {JOB_TIMEOUT_S} s"
        lines = records_path.read_text().splitlines() if records_path.exists() else []
        records = {record["case"]: record for record in map(json.loads, lines)}
        return records, log_path.read_text()[-4000:] + ending


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("num_ranks", "symmetric"), JOBS)
def test_case(num_ranks: int, symmetric: str, case: str):
    records, log = run_job(num_ranks, symmetric)
    assert case in records, f"the job ended before this case:\n{log}"
    assert records[case]["passed"], records[case]["error"]
