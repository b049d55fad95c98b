"""Keeps what has been run, an arm in a file, and says what is to be run next."""

import json
from pathlib import Path
from typing import Any

from tools.bench.cards.arms import Arm, arms_of
from tools.bench.cards.models import Model

DONE = ("complete", "bound")
"""Ends of a run that are results."""
Records = dict[str, dict[str, Any]]


def folder_of(out: Path, model: Model, gpus: int) -> Path:
    """The folder of a card's records and logs."""
    return out / f"{model.name}-{gpus}x"


def read_records(folder: Path) -> Records:
    """A card's records by the names of their arms; unfinished files of a lost machine are none."""
    found: Records = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(record, dict) and "ended" in record:
            found[path.stem] = record
    return found


def write_record(folder: Path, arm: Arm, record: dict[str, Any]) -> None:
    """Writes what came of an arm, over what came of it before."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{arm.name}.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.rename(folder / f"{arm.name}.json")


def todo(records: Records, arms: list[Arm]) -> list[Arm]:
    """Returns the arms without a result, the arms with the fewest tries first."""
    open_arms = [arm for arm in arms if not is_done(records.get(arm.name))]
    return sorted(open_arms, key=lambda arm: tries(records.get(arm.name)))


def is_done(record: dict[str, Any] | None) -> bool:
    """Returns whether an arm has a result."""
    return record is not None and record["ended"] in DONE


def tries(record: dict[str, Any] | None) -> int:
    """How often an arm has been run."""
    return 0 if record is None else int(record.get("tries", 1))


def all_todo(
    out: Path, models: list[Model], gpus: int, names: list[str] | None = None
) -> list[tuple[Model, Arm]]:
    """Returns the arms to run: card for card, and after all of them the arms that have failed.

    Args:
        out: The folder of all cards.
        models: The models of these cards, in their order.
        gpus: GPUs of a training.
        names: Arms, either of all cards or as MODEL/ARM of one; no others are run. They run in
            this order, one arm of all cards ahead of the next arm.
    """
    fresh, again = [], []
    for model in models:
        records = read_records(folder_of(out, model, gpus))
        for arm in todo(records, arms_of(model, gpus)):
            (again if arm.name in records else fresh).append((model, arm))
    if not names:
        return fresh + again
    place = {name: i for i, name in enumerate(names)}

    def place_of(each: tuple[Model, Arm]) -> int:
        model, arm = each
        return place.get(f"{model.name}/{arm.name}", place.get(arm.name, len(names)))

    chosen = [[each for each in part if place_of(each) < len(names)] for part in (fresh, again)]
    return [each for part in chosen for each in sorted(part, key=place_of)]
