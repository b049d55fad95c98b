"""The folder of a run: its settings, and one line per point that ended."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tools.weak_scaling.jobs import Outcome
from tools.weak_scaling.points import Point, Settings

Measured = dict[Point, dict[str, Any]]
"""Results of :meth:`Bench.measure` by point."""


def median_ms(result: dict[str, Any], implementation: str, which: str) -> float:
    """The median time of one pass."""
    return float(result["times"][implementation][which]["median_ms"])


def overlap_efficiency(
    measured: Measured, point: Point, implementation: str, which: str
) -> float | None:
    """The paper's Oe = T(2) / T(N): 1 if more GPUs cost nothing; ``None`` without 2 GPUs."""
    return _two_over_all(measured, point, lambda result: median_ms(result, implementation, which))


def kernel_ms(result: dict[str, Any], direction: str) -> float | None:
    """The median of the times that launches of a direction record; ``None`` if none did."""
    timing = result.get("kernels", {}).get(direction)
    return None if timing is None else float(timing["median_ms"])


def kernel_overlap_efficiency(measured: Measured, point: Point, direction: str) -> float | None:
    """Oe of the kernel alone, without what its launch costs the hosts."""
    return _two_over_all(measured, point, lambda result: kernel_ms(result, direction))


def _two_over_all(
    measured: Measured, point: Point, time_of: Callable[[dict[str, Any]], float | None]
) -> float | None:
    pair = measured.get(replace(point, num_gpus=2))
    if pair is None or point.num_gpus < 2:
        return None
    two, ours = time_of(pair), time_of(measured[point])
    return None if two is None or ours is None else two / ours


class FolderError(Exception):
    """The folder cannot be used as asked."""


class Results:
    """The results of a folder; every line is written at once, so a run that dies keeps its points.

    Args:
        folder: Made by :meth:`create`.

    Attributes:
        folder: As given.
        settings: What all its points share.
        rows: The latest line of each point, by key.

    Raises:
        FolderError: The folder is not one of a run, or a line of it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = folder / "settings.json"
        if not settings.is_file():
            raise FolderError(f"{folder} holds no run: there is no {settings.name} in it")
        try:
            self.settings = Settings.from_dict(json.loads(settings.read_text()))
        except (TypeError, ValueError) as error:
            raise FolderError(f"{settings} cannot be read: {error}") from error
        self._lines = folder / "results.jsonl"
        self.rows: dict[str, dict[str, Any]] = {}
        if self._lines.exists():
            self._read()

    @staticmethod
    def create(folder: Path, settings: Settings) -> "Results":
        """Makes the folder of a new run.

        Raises:
            FolderError: It exists, and is not empty.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FolderError(
                f"{folder} exists: name another folder, or go on with its run by --resume"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(settings.as_dict(), indent=1) + "\n")
        return Results(folder)

    @staticmethod
    def resume(folder: Path, settings: Settings, commit: str) -> "Results":
        """Opens the folder of a run that ended early, or makes a new one.

        Raises:
            FolderError: Its settings or its commit, as a machine's record has it, are others, which
                may not share a report with these.
        """
        if not folder.exists():
            return Results.create(folder, settings)
        results = Results(folder)
        theirs, ours = results.settings.as_dict(), settings.as_dict()
        for name, value in ours.items():
            if theirs[name] != value:
                raise FolderError(
                    f"{folder} was measured with {name}={theirs[name]}, but {name}={value} is "
                    "wanted: name another folder"
                )
        for row in results.rows.values():
            # A job that never started has no machine, and has measured nothing.
            if row["machine"] and (found := row["machine"].get("commit", "unknown")) != commit:
                raise FolderError(
                    f"{folder} has points of commit {found}, but this is {commit}: name another "
                    "folder"
                )
        return results

    def add(self, outcome: Outcome) -> dict[str, Any]:
        """Writes a point's line.

        Returns:
            The line.
        """
        row: dict[str, Any] = {
            "key": outcome.point.key,
            "status": "ok" if outcome.result is not None else "failed",
            "point": asdict(outcome.point),
        }
        if outcome.result is None:
            row["reason"] = outcome.reason
        else:
            row["result"] = outcome.result
        row["machine"] = outcome.machine
        with self._lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows[row["key"]] = row
        return row

    def missing(self, *, retry_failed: bool) -> list[Point]:
        """Points without a line, and with ``retry_failed`` those that failed."""
        return [
            point
            for point in self.settings.points()
            if point.key not in self.rows
            or (retry_failed and self.rows[point.key]["status"] == "failed")
        ]

    def measured(self) -> Measured:
        """The results of all points that did not fail, in order."""
        found = {
            Point(**row["point"]): row["result"]
            for row in self.rows.values()
            if row["status"] == "ok"
        }
        return dict(sorted(found.items()))

    def failed(self) -> dict[Point, str]:
        """The reasons of all points that failed, in order."""
        found = {
            Point(**row["point"]): row["reason"]
            for row in self.rows.values()
            if row["status"] == "failed"
        }
        return dict(sorted(found.items()))

    def machine(self) -> dict[str, Any]:
        """The machine of the last point that ran at all."""
        machines = [row["machine"] for row in self.rows.values() if row["machine"]]
        return machines[-1] if machines else {}

    def _read(self) -> None:
        text = self._lines.read_text()
        if not text.endswith("\n"):  # the process died while it wrote
            text = text[: text.rfind("\n") + 1]
            self._lines.write_text(text)
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line)
                self.rows[row["key"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise FolderError(f"{self._lines}:{number} cannot be read: {error!r}") from error
