"""Runs points in worker jobs under torchrun, one job per number of GPUs while nothing fails.

To start processes and join a group takes longer than most points, so that one job measures all
points of its number of GPUs. A point that raises, hangs or takes its process down ends the job; it
is told as failed, and a new job goes on after it.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.common import ROOT
from tools.weak_scaling.points import Point, Settings

WORKER = "tools.weak_scaling.worker"
POLL_S = 0.1
GRACE_S = 5.0
"""How long a job may take to end once it is told to."""


@dataclass(frozen=True)
class Limits:
    """Bounds of every wait, in seconds.

    Attributes:
        start_s: From starting a job until its first point begins.
        point_s: One point.
    """

    start_s: float = 180.0
    point_s: float = 120.0


@dataclass(frozen=True)
class Begun:
    """A point that is being measured."""

    point: Point


@dataclass(frozen=True)
class Outcome:
    """How a point ended.

    Attributes:
        point: Which.
        machine: What it ran on; empty if the job never started.
        result: What :meth:`Bench.measure` returned, ``None`` if it failed.
        reason: Why it failed.
    """

    point: Point
    machine: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    reason: str = ""


def run_points(
    points: list[Point], settings: Settings, logs: Path, limits: Limits, commit: str | None = None
) -> Generator[Begun | Outcome, None, None]:
    """Measures points and tells how each one ends, as it ends.

    Args:
        points: Measured in this order within a number of GPUs.
        settings: The sweep's settings.
        logs: Folder for the jobs' own folders.
        limits: Bounds of every wait.
        commit: What is measured, where the checkout has no git.

    Yields:
        :class:`Begun` and then one :class:`Outcome` for every point; an outcome alone for points
        whose job never started.
    """
    for num_gpus in sorted({point.num_gpus for point in points}):
        left = [point for point in points if point.num_gpus == num_gpus]
        while left:
            job = _Job(num_gpus, left, settings, logs, commit)
            try:
                for happening in job.follow(limits):
                    if isinstance(happening, Outcome):
                        left.remove(happening.point)
                    yield happening
            finally:
                job.end()


class _Job:
    """One start of torchrun."""

    def __init__(
        self,
        num_gpus: int,
        points: list[Point],
        settings: Settings,
        logs: Path,
        commit: str | None,
    ) -> None:
        number = sum(1 for _ in logs.glob(f"gpus{num_gpus}-*")) if logs.exists() else 0
        self._folder = logs / f"gpus{num_gpus}-{number}"
        self._folder.mkdir(parents=True)
        self._points = {point.key: point for point in points}
        self._read: dict[Path, int] = {}
        self._pids: list[int] = []
        self._machine: dict[str, Any] = {}
        job = {
            "settings": settings.as_dict(),
            "points": [asdict(point) for point in points],
            "commit": commit,
            "reader": os.getpid(),
        }
        (self._folder / "job.json").write_text(json.dumps(job, indent=1))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        path = (str(ROOT), os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        with (self._folder / "log.txt").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(num_gpus)),
                    *("-m", WORKER, "--job", str(self._folder.resolve())),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def follow(self, limits: Limits) -> Iterator[Begun | Outcome]:
        """Yields what happens until the job has ended; a point that did not end has failed then."""
        current: Point | None = None
        failure: str | None = None
        deadline = time.monotonic() + limits.start_s
        while True:
            has_ended = self._process.poll() is not None  # before reading, so that nothing is lost
            for event in self._new_events():
                if event["event"] == "ready":
                    self._pids.append(event["pid"])
                    self._machine = event["machine"] or self._machine
                elif event["event"] == "begin" and event["rank"] == 0:
                    current = self._points[event["point"]]
                    deadline = time.monotonic() + limits.point_s
                    yield Begun(current)
                elif event["event"] == "done":
                    point, current = self._points.pop(event["point"]), None
                    deadline = time.monotonic() + limits.point_s
                    yield Outcome(point, self._machine, event["result"])
                elif event["event"] == "failed":
                    # The first rank to fail is the cause; the others lose their peer.
                    failure = failure or f"rank {event['rank']}: {event['reason']}"
            if has_ended:
                break
            if time.monotonic() > deadline:
                limit = limits.point_s if self._machine else limits.start_s
                failure = failure or f"no result within {limit:g} s"
                break
            time.sleep(POLL_S)
        self.end()
        if not self._points:
            return
        reason = failure or f"{self._how_it_ended()}; see {self._folder.name}/log.txt"
        if current is None and not self._machine:
            for point in self._points.values():
                yield Outcome(point, reason=f"the job did not start: {reason}")
            return
        yield Outcome(current or next(iter(self._points.values())), self._machine, reason=reason)

    def end(self) -> None:
        """Ends the job if it runs, gently at first; torchrun ends its ranks unless they hang."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for pid in self._pids:
                # A rank may have ended meanwhile, and its number have become another process's.
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    if WORKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)

    def _new_events(self) -> list[dict[str, Any]]:
        """Reads what the ranks have told since the last call, in the order of time."""
        found = []
        for path in sorted(self._folder.glob("events-rank*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]  # the last line may still be written
            self._read[path] = self._read.get(path, 0) + len(whole)
            found += [json.loads(line) for line in whole.splitlines()]
        return sorted(found, key=lambda event: float(event["time"]))

    def _how_it_ended(self) -> str:
        log = (self._folder / "log.txt").read_text(errors="replace")
        return signal_told_of(log) or (
            f"the job ended with status {self._process.returncode} and said nothing"
        )


def signal_told_of(log: str) -> str | None:
    """Finds in the log of torchrun which signal ended a job.

    It lists the ranks that it ended itself, with SIGTERM and after a while with SIGKILL, like the
    one that failed, and its "root cause" is the first of the same second. So these two signals are
    the cause only where there is no other.
    """
    found = re.findall(r"(Signal \d+ \((SIG\w+)\) received by PID \d+)", log)
    sent_by_torchrun = {"SIGKILL": 1, "SIGTERM": 2}  # the likelier, the later
    told: tuple[str, str] | None = min(
        found, key=lambda one: sent_by_torchrun.get(one[1], 0), default=None
    )
    return told[0] if told else None
