"""One rank of a job that measures points, started by ``jobs.py`` under torchrun.

It tells what happens in a file of its own, one JSON object per line, and ends at the first point
that fails: a rank that raised has left the others in a collective, and only a new process group is
sure to be sound.
"""

import argparse
import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.bench import common
from tools.weak_scaling.measure import Bench
from tools.weak_scaling.points import Point, Settings

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=90)


class Events:
    """Tells the process that started this rank what happens."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"events-rank{rank}.jsonl").open("a")
        self._rank = rank

    def tell(self, event: str, **about: Any) -> None:
        """Writes one event."""
        line = {"event": event, "rank": self._rank, "time": time.time(), **about}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def join(device: str) -> tuple[int, int, torch.device]:
    """Joins the ranks of this job, without a group if it is alone.

    Returns:
        This rank, the number of ranks, and this rank's device.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        found = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(found)
    else:
        found = torch.device("cpu")
        torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            device_id=found if device == "cuda" else None,
            timeout=COLLECTIVE_TIMEOUT,
        )
    return rank, num_ranks, found


def has_ended(process: int) -> bool:
    """Whether the process that started the job is gone, so that nobody reads the results."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="folder with job.json")
    folder = parser.parse_args(arguments).job
    job = json.loads((folder / "job.json").read_text())
    settings = Settings.from_dict(job["settings"])
    events = Events(folder, int(os.environ["RANK"]))
    point = None
    try:
        rank, num_ranks, device = join(settings.device)
        bench = Bench(settings, num_ranks, device)
        machine = common.machine(job["commit"]) if rank == 0 else None
        events.tell("ready", pid=os.getpid(), machine=machine)
        for values in job["points"]:
            if has_ended(job["reader"]):
                return 1
            point = Point(**values)
            events.tell("begin", point=point.key)
            if dist.is_initialized():
                dist.barrier()  # a rank that fails ends the others, who have told all by now
            result = bench.measure(point)
            if rank == 0:
                events.tell("done", point=point.key, result=result)
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this point's outcome
        name = point.key if point else None
        events.tell("failed", point=name, reason=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # no clean-up: it may wait for the other ranks
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
