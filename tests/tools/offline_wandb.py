"""Reads what wandb wrote offline: a log of LevelDB's format, whose records are its messages."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

BLOCK = 32768
FILE_HEADER = 7
RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind of fragment
WHOLE, LAST = 1, 4


@dataclass
class OfflineRun:
    """One run's file, and the step metrics that it defines, by the names that they are for."""

    project: str = ""
    group: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    steps: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()

    def file(self, name: str) -> Path:
        """The file of a table or an image that was logged last."""
        return self.folder / "files" / self.history[-1][f"{name}/path"]


def offline_runs(folder: Path) -> list[OfflineRun]:
    """All runs under a folder, from this process or from processes that have ended."""
    wandb.teardown()  # behind `finish` its service still writes: all is there when it has ended
    return [_read(path) for path in sorted(folder.rglob("offline-run-*/*.wandb"))]


def _read(path: Path) -> OfflineRun:
    run = OfflineRun(folder=path.parent)
    for record in _records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.project, run.group = record.run.project, record.run.run_group
            run.name = record.run.display_name
            run.config.update({u.key: json.loads(u.value_json) for u in record.run.config.update})
        elif kind == "history":
            run.history.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
        elif kind == "metric":
            run.steps[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _records(data: bytes) -> Iterator[Any]:
    assert data[:4] == b":W&B"
    at, message = FILE_HEADER, b""
    while at + RECORD_HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < RECORD_HEADER.size:  # the rest of a block is filled up
            at += left
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, at)
        at += RECORD_HEADER.size
        message += data[at : at + length]
        at += length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record
