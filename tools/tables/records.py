"""Reads the records that tables are made from."""

from pathlib import Path
from typing import Any

from tools.bench.common import read_record
from tools.tables.marks import ROOT

RESULTS = ROOT / "tools" / "bench" / "results"


def path_of(name: str) -> Path:
    """A record's path from its name, its path in ``tools/bench/results``."""
    return RESULTS / name


def rows_of(name: str) -> list[dict[str, Any]]:
    """The lines of a record."""
    return read_record(path_of(name))
