"""Where a rank dies, stays away or goes wrong, the others get an error in time and never hang."""

import signal
from pathlib import Path

import pytest

from tests.distributed import PATIENCE_S
from tests.ending.stand_in import FORKED_FROM
from tests.faults.jobs import run_job
from tests.faults.worker import CASES

NUM_RANKS = 3


@pytest.mark.parametrize("case", CASES)
def test_faults(case: str, tmp_path: Path, with_torch: Path):
    how = {"timeout_s": PATIENCE_S, FORKED_FROM: str(with_torch)}
    job = run_job("tests.faults.worker", case, NUM_RANKS, tmp_path, **how)
    living = range(NUM_RANKS)
    if case.startswith("killed"):
        living = range(NUM_RANKS - 1)
        assert job.statuses[-1] == -signal.SIGKILL, job.log
    records = [job.passed(rank) for rank in living]
    if case == "broken_router":
        for record in records:
            assert record["error"].startswith("rank 2: topk_idx[7, 1] is 10000, wanted an expert")
        return
    if case == "dataset_that_ends":
        records.pop()
    for rank, record in enumerate(records):
        assert record["error"].startswith(f"rank {rank}: an exchange with the other 2 ranks failed")
