"""DeepSpeed in bfloat16 and float16 on 2 and 4 GPUs of one host, its own MoE layers beside ours.

The ranks of a job are processes that run all cases of :mod:`tests.multi_gpu.deepspeed_worker`, so
that starting them is paid for once; each case is reported as a test of its own.
"""

import functools
import importlib.util
from typing import Any

import pytest

from tests.multi_gpu.jobs import run_job

JOB_TIMEOUT_S = 170.0

# The worker has the list; importing it here would need DeepSpeed to collect any test.
NAMES = (
    "native_zero1",
    "native_zero2",
    "native_zero2_biases",
    "native_zero2_float16",
    "autoep_zero1",
    "autoep_zero2",
    "autoep_zero3",
    "zero2_overlap",
)
CASES = [(ranks, name) for ranks in (2, 4) for name in NAMES]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


@functools.cache
def run_cases(num_ranks: int) -> tuple[dict[str, dict[str, Any]], str]:
    """All cases of that many ranks, in one job."""
    cases = [case for ranks, case in CASES if ranks == num_ranks]
    return run_job(
        "tests.multi_gpu.deepspeed_worker",
        num_ranks,
        *("--cases", *cases),
        timeout_s=JOB_TIMEOUT_S,
        grace_s=40,
    )


@pytest.mark.timeout(JOB_TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [pytest.param(ranks, case, marks=pytest.mark.multi_gpu(ranks)) for ranks, case in CASES],
)
def test_case(num_ranks: int, case: str):
    records, log = run_cases(num_ranks)
    assert case in records, f"the job ended before this case:\n{log}"
    assert records[case]["passed"], records[case]["error"]
