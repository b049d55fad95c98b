"""The points of a layer's sweep, and the folder that keeps what was measured of them."""

import json
from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from tools.weak_scaling.ranks import UsageError

PASSES = ("forward", "forward+backward")
IMPLEMENTATIONS = ("fused", "unfused")

Settings = dict[str, Any]


@dataclass(frozen=True, order=True)
class Point:
    """One layer on one number of ranks.

    Attributes:
        ranks: The expert-parallel group's.
        tokens: One rank's.
        hidden: Model width.
        intermediate: FFN width of one expert.
        num_experts: Experts of the whole group.
        topk: Experts that each token selects.
    """

    ranks: int
    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    topk: int

    @property
    def shape(self) -> str:
        """The layer, as ``bench_layer`` takes it."""
        return "x".join(map(str, astuple(self)[1:]))

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.tokens} tokens, {self.num_experts} experts"


Measured = dict[Point, dict[tuple[str, str], dict[str, Any]]]
"""The records of every point that is complete, by implementation and measurement."""


def points_of(settings: Settings) -> list[Point]:
    """Every point once, by number of ranks and then by size."""
    base = Point(
        settings["gpus"][-1],
        settings["base_tokens"],
        settings["hidden"],
        settings["intermediate"],
        settings["base_experts"],
        settings["topk"],
    )
    over_tokens = {
        replace(base, ranks=ranks, tokens=tokens)
        for ranks in settings["gpus"]
        for tokens in (*settings["tokens"], settings["base_tokens"])
    }
    over_experts = {
        replace(base, tokens=settings["expert_tokens"], num_experts=experts)
        for experts in settings["experts"]
    }
    return sorted(over_tokens | over_experts)


def open_folder(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Makes a run's folder, or makes sure that an earlier run's may be gone on with.

    Raises:
        UsageError: The folder exists and is not to be gone on with, is none of a run, or was
            measured with other settings, which may not share a report with these.
    """
    if resume and folder.exists():
        for name, theirs in read_settings(folder).items():
            if theirs != settings[name]:
                raise UsageError(
                    f"{folder} was measured with {name}={theirs}, but {name}={settings[name]} is "
                    "wanted: name another folder"
                )
        return
    if folder.exists():
        raise UsageError(f"{folder} exists: name another folder, or go on with it by --resume")
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")


def read_settings(folder: Path) -> Settings:
    """The settings of a run's folder.

    Raises:
        UsageError: The folder is none of a run.
    """
    try:
        settings: Settings = json.loads((folder / "settings.json").read_text())
        points_of(settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} holds no run of this tool: {error!r}") from error
    return settings


def read_results(folder: Path) -> Measured:
    """The records of all points that are complete, in order; of a point's, the latest.

    Raises:
        UsageError: A line cannot be read.
    """
    path = folder / "results.jsonl"
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):  # the process died while it wrote
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    found: Measured = defaultdict(dict)
    names = list(Point.__dataclass_fields__)[1:]
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            point = Point(row["num_ranks"], *(row[name] for name in names))
            if row["dtype"] == "bf16":  # the baseline's
                found[point][row["implementation"], row["measurement"]] = row
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}:{number} cannot be read: {error!r}") from error
    wanted = {(name, what) for name in IMPLEMENTATIONS for what in PASSES}
    return {point: found[point] for point in sorted(found) if wanted <= found[point].keys()}
