"""The kernel on 2 and 4 GPUs of one host, over both kinds of symmetric memory.

The ranks of a job are processes that run all cases of :mod:`tests.multi_gpu.worker`, so that
starting them is paid for once; each case is reported as a test of its own.
"""

import functools
from typing import Any

import pytest

from tests.multi_gpu.jobs import run_job
from tests.multi_gpu.worker import CASES

JOB_TIMEOUT_S = 100.0

JOBS = [
    pytest.param(num_ranks, symmetric, marks=pytest.mark.multi_gpu(num_ranks))
    for num_ranks in (2, 4)
    for symmetric in ("cuda", "nvshmem")
]


@functools.cache
def run_cases(num_ranks: int, symmetric: str) -> tuple[dict[str, dict[str, Any]], str]:
    """All cases, in one job."""
    return run_job(
        "tests.multi_gpu.worker",
        num_ranks,
        *("--symmetric", symmetric),
        timeout_s=JOB_TIMEOUT_S,
        grace_s=15,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("num_ranks", "symmetric"), JOBS)
def test_case(num_ranks: int, symmetric: str, case: str):
    records, log = run_cases(num_ranks, symmetric)
    assert case in records, f"the job ended before this case:\n{log}"
    assert records[case]["passed"], records[case]["error"]
