"""Faults of ranks on GPUs of one host: every rank that lives gets its error or its result, in time.

Each case is a job of its own.
"""

import signal
from pathlib import Path

import pytest

from tests.faults.jobs import run_job
from tests.multi_gpu.faults_worker import CASES

JOB_TIMEOUT_S = 90.0


@pytest.mark.timeout(JOB_TIMEOUT_S + 30)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "num_ranks", [pytest.param(count, marks=pytest.mark.multi_gpu(count)) for count in (2, 4)]
)
def test_faults(case: str, num_ranks: int, tmp_path: Path):
    job = run_job(
        "tests.multi_gpu.faults_worker",
        case,
        num_ranks,
        tmp_path,
        timeout_s=JOB_TIMEOUT_S,
        NCCL_NVLS_ENABLE="0",
    )
    living = range(num_ranks)
    if case.startswith("killed"):
        living = range(num_ranks - 1)
        assert job.statuses[-1] == -signal.SIGKILL, job.log
    records = [job.passed(rank) for rank in living]
    if case.startswith(("killed", "never", "withheld")):
        errors = [record["error"] for record in records]
        assert any("waited too long" in error for error in errors), errors
    elif case == "no_memory_on_one_rank":
        assert all("free" in record["error"] for record in records)
