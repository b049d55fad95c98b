"""DeepSpeed in bfloat16 and float16 on 2 and 4 GPUs of one host, its own MoE layers beside ours.

The ranks of a job are processes that run all cases of :mod:`tests.multi_gpu.deepspeed_worker`, so
that starting them is paid for once; each case is reported as a test of its own.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_S = 170.0

# The worker has the list; importing it here would need DeepSpeed to collect any test.
CASES = [
    (2, "native_zero1"),
    (2, "autoep_zero2"),
    (4, "native_zero1"),
    (4, "native_zero2"),
    (4, "native_zero2_biases"),
    (4, "native_zero2_float16"),
    (4, "autoep_zero1"),
    (4, "autoep_zero2"),
    (4, "autoep_zero3"),
    (4, "zero2_overlap"),
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


@functools.cache
def run_job(num_ranks: int) -> tuple[dict[str, dict[str, Any]], str]:
    """Runs all cases of that many ranks on fresh processes.

    Returns:
        Each finished case's record by name, and the end of what the job printed.
    """
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", NCCL_NVLS_ENABLE="0")
    with tempfile.TemporaryDirectory() as folder:
        records_path, log_path = Path(folder, "records.jsonl"), Path(folder, "log")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", "tests.multi_gpu.deepspeed_worker"),
            *("--out", str(records_path)),
            *("--cases", *(case for ranks, case in CASES if ranks == num_ranks)),
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
                process.wait(40)
                ending = f"\nended after {JOB_TIMEOUT_S} s"
        lines = records_path.read_text().splitlines() if records_path.exists() else []
        records = {record["case"]: record for record in map(json.loads, lines)}
        return records, log_path.read_text()[-6000:] + ending


@pytest.mark.timeout(JOB_TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [pytest.param(ranks, case, marks=pytest.mark.multi_gpu(ranks)) for ranks, case in CASES],
)
def test_case(num_ranks: int, case: str):
    records, log = run_job(num_ranks)
    assert case in records, f"the job ended before this case:\n{log}"
    assert records[case]["passed"], records[case]["error"]
