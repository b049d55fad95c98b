"""Starts the ranks of a job one by one, so that the death of one does not end the others.

torchrun would end the survivors of a killed rank before they could be seen to notice.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        statuses: Exit status of each rank, the negative signal if one ended it.
        records: What each rank wrote, ``None`` if it did not get that far.
        log: The end of what all of them printed.
    """

    statuses: list[int]
    records: list[dict[str, Any] | None]
    log: str

    def passed(self, rank: int) -> dict[str, Any]:
        """Returns the record of a rank, and fails with every rank's error if it has not passed."""
        record = self.records[rank]
        assert record is not None, f"rank {rank} ended with {self.statuses[rank]}:\n{self.log}"
        # The errors of all ranks are shown, because one rank's error is often another's fault.
        assert record["passed"], "\n".join(
            f"rank {at}: {one['error']}"
            for at, one in enumerate(self.records)
            if one and not one["passed"]
        )
        assert self.statuses[rank] == 0
        return record


def run_job(
    module: str, case: str, num_ranks: int, folder: Path, *, timeout_s: float, **variables: str
) -> Outcome:
    """Runs ``python -m MODULE --case CASE --out FOLDER`` on every rank; ends what does not end."""
    # The store is this process's, so that no port is free when it is chosen and taken later.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(num_ranks),
        **variables,
    )
    command = [sys.executable, "-m", module, "--case", case, "--out", str(folder)]
    with (folder / "log").open("w") as log:
        ranks = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(num_ranks)
        ]
        deadline = time.monotonic() + timeout_s
        try:
            for process in ranks:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.write(f"\nended after {timeout_s} s\n")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    paths = [folder / f"{rank}.json" for rank in range(num_ranks)]
    return Outcome(
        [process.returncode for process in ranks],
        [json.loads(path.read_text()) if path.exists() else None for path in paths],
        (folder / "log").read_text()[-4000:],
    )


def write_record(folder: Path, rank: int, record: dict[str, Any]) -> None:
    path = folder / f"{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.replace(path)
