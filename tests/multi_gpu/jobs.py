"""Programs on several GPUs, started by torchrun, bounded, and read back case by case."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOG_CHARACTERS = 6000


def run_job(
    module: str, num_ranks: int, *arguments: str, timeout_s: float, grace_s: float
) -> tuple[dict[str, dict[str, Any]], str]:
    """Runs a module's cases on fresh processes.

    Args:
        module: Takes ``--out FILE``, to which it appends a JSON object with a "case" for each.
        num_ranks: How many processes, each on a GPU of its own.
        *arguments: Further arguments of the module.
        timeout_s: Seconds that the whole job may take.
        grace_s: Seconds after that in which torchrun has to end its ranks.

    Returns:
        Each finished case's record by name, and the end of what the job printed.
    """
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", NCCL_NVLS_ENABLE="0")
    with tempfile.TemporaryDirectory() as folder:
        records_path, log_path = Path(folder, "records.jsonl"), Path(folder, "log")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", module),
            *("--out", str(records_path), *arguments),
        ]
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            ending = ""
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun then ends its ranks
                process.wait(grace_s)
                ending = f"\nended after {timeout_s} s"
        lines = records_path.read_text().splitlines() if records_path.exists() else []
        records = {record["case"]: record for record in map(json.loads, lines)}
        return records, log_path.read_text()[-LOG_CHARACTERS:] + ending


def tell(out: Path | None, /, **record: object) -> None:
    """Appends a line of JSON to a file of results, if there is one."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
