"""Finds the cards whose records the project keeps, and compares flashmoe with alltoall on them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tools.bench.cards.arms import EXPERTS, Arm, arms_of
from tools.bench.cards.card import card_of
from tools.bench.cards.models import MODELS, Model
from tools.bench.cards.page import machine_of
from tools.bench.cards.records import Records, is_done
from tools.bench.common import ROOT, read_record

RESULTS = ROOT / "tools" / "bench" / "results"
KEPT = re.compile(r".+-cards-.+-(?P<gpus>\d+)x\.jsonl")
ONE_RUN = timedelta(minutes=30)
"""Arms whose ends are no further apart are taken to have one host."""


@dataclass(frozen=True)
class KeptCard:
    """A card whose records the project keeps.

    Attributes:
        path: The records of all cards of such GPUs, a line for each arm of each model.
        model: What was trained.
        num_gpus: On so many GPUs.
        card: What the records say.
    """

    path: Path
    model: Model
    num_gpus: int
    card: dict[str, Any]

    @property
    def machine(self) -> str:
        """Returns the GPUs by their short names, as in "1 H200"."""
        return machine_of(self.card)


def kept_cards(results: Path = RESULTS) -> list[KeptCard]:
    """Reads all kept cards, in the order of the models and then of their files' names."""
    found = []
    for path in sorted(results.glob("*-cards-*.jsonl")):
        gpus = gpus_of(path)
        by_model = read_kept(path)
        for model in MODELS:
            if model.name in by_model:
                card = card_of(model, by_model[model.name], gpus)
                found.append(KeptCard(path, model, gpus, card))
    order = list(MODELS)
    return sorted(found, key=lambda each: (order.index(each.model), each.num_gpus))


def gpus_of(path: Path) -> int:
    """Returns the number of GPUs that the name of a file of kept records says.

    Raises:
        ValueError: The name is not of that form.
    """
    kept = KEPT.fullmatch(path.name)
    if kept is None:
        raise ValueError(f"got {path}, wanted DATE-cards-GPU-Nx.jsonl with N GPUs a training")
    return int(kept["gpus"])


def read_kept(path: Path) -> dict[str, Records]:
    """Reads a file of kept records: by the names of the models, and then of the arms.

    Raises:
        ValueError: A line is of no known model.
    """
    names = [model.name for model in MODELS]
    found: dict[str, Records] = {}
    for number, record in enumerate(read_record(path), 1):
        if record.get("model") not in names:
            got = record.get("model")
            raise ValueError(f"{path}, line {number}: got model {got}, wanted {', '.join(names)}")
        found.setdefault(record["model"], {})[record["arm"]] = record
    return found


def keep(path: Path, by_model: dict[str, Records]) -> dict[str, list[str]]:
    """Adds the results of cards to a file of kept records, which loses what it had for these arms.

    Args:
        path: The file, which need not exist.
        by_model: What has been run, by the names of the models, and then of the arms. Arms without
            a result are left out.

    Returns:
        The names of the arms that were added, by the names of the models.

    Raises:
        ValueError: The file's name is not that of kept records, a line is of no known model, or
            the GPUs of a result are not those of the file.
    """
    gpus_of(path)
    kept = read_kept(path) if path.is_file() else {}
    have = {tuple(record["gpus"]) for by_arm in kept.values() for record in by_arm.values()}
    added = {}
    for model, records in by_model.items():
        done = {arm: record for arm, record in records.items() if is_done(record)}
        for arm, record in done.items():
            if have and tuple(record["gpus"]) not in have:
                raise ValueError(f"{arm} of {model}: got {record['gpus']}, wanted {have} as {path}")
        of_model = kept.setdefault(model, {})
        of_model |= {arm: {"model": model, "arm": arm, **one} for arm, one in done.items()}
        added[model] = list(done)
    lines = [json.dumps(line) + "\n" for by_arm in kept.values() for line in by_arm.values()]
    path.write_text("".join(lines))
    return added


def shown(cards: list[KeptCard]) -> list[KeptCard]:
    """Returns, for each number of GPUs, the cards of the file that has the most results.

    So all models of a comparison ran on one kind of GPU. The last of several such files is shown,
    which is the one of the latest date.
    """
    results: dict[int, dict[Path, int]] = {}
    for each in cards:
        by_path = results.setdefault(each.num_gpus, {})
        by_path[each.path] = by_path.get(each.path, 0) + len(each.card["arms"])
    chosen = [
        max(by_path.items(), key=lambda item: (item[1], item[0].name))[0]
        for by_path in results.values()
    ]
    return [each for each in cards if each.path in chosen]


@dataclass(frozen=True)
class Side:
    """One arm of a comparison.

    Attributes:
        line: Its line of the card, where all its iterations have been run.
        why: Says what it misses, where they have not.
    """

    line: dict[str, Any] | None
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """One run of flashmoe and one of alltoall, with the same routing.

    Attributes:
        card: The card of both.
        arm: How flashmoe trained.
        other: How alltoall trained, always with graphs of pieces. In FP8 it is compared with
            flashmoe in FP8, and with flashmoe in bfloat16.
        ours: flashmoe's run.
        theirs: alltoall's run.
    """

    card: KeptCard
    arm: Arm
    other: Arm
    ours: Side
    theirs: Side

    @property
    def is_mixed(self) -> bool:
        """Tells whether alltoall's run alone is in FP8."""
        return self.other.in_fp8 and not self.arm.in_fp8

    @property
    def has_slots(self) -> bool:
        """Tells whether flashmoe's run has spare slots."""
        return self.arm.variant == "slots"

    @property
    def is_of_two_runs(self) -> bool:
        """Tells whether both have run, but so far apart that the host may be another."""
        ours, theirs = self.ours.line, self.theirs.line
        if ours is None or theirs is None:
            return False
        ends = [datetime.fromisoformat(line["date"]) for line in (ours, theirs)]
        return max(ends) - min(ends) > ONE_RUN

    @property
    def is_of_two_days(self) -> bool:
        """Tells whether both have run, on two days: host and kernel were others."""
        days = {side.line["date"][:10] for side in (self.ours, self.theirs) if side.line}
        return self.is_of_two_runs and len(days) > 1

    @property
    def ratio(self) -> float | None:
        """How many times as long alltoall takes; ``None`` for two kinds of machine, or two days."""
        return self.over("seconds")

    def over(self, key: str) -> float | None:
        """How many times as much alltoall has of a number."""
        ours, theirs = self.ours.line, self.theirs.line
        if ours is None or theirs is None or ours["machine"] != theirs["machine"]:
            return None
        if self.is_of_two_days:
            return None
        if ours[key] is None or theirs[key] is None:
            return None
        return float(theirs[key] / ours[key])


def side(card: dict[str, Any], arm: Arm) -> Side:
    """An arm's line of a card, or why there is none with a time."""
    for line in card["arms"]:
        if line["arm"] == arm.name:
            return Side(line) if "seconds" in line else Side(None, "row bound")
    why = card["missing"][arm.name]
    return Side(None, "out of time" if why == "time" else why)


def comparisons(card: KeptCard) -> Iterator[Comparison]:
    """Compares flashmoe's runs with alltoall's.

    A run of graphs of pieces, or with spare slots, is left out where it misses; all else that
    misses gets its row.
    """
    arms = arms_of(card.model, card.num_gpus)
    pairs = {"": ("", "slots"), "fp8": ("", *EXPERTS)}
    for variant, ours_of in pairs.items():
        for arm in arms:
            other = Arm("alltoall", "pieces", arm.is_forced, variant)
            if arm.dispatcher != "flashmoe" or other not in arms or arm.variant not in ours_of:
                continue
            ours, theirs = side(card.card, arm), side(card.card, other)
            if ours.line is not None or (arm.graph == "whole" and arm.variant != "slots"):
                yield Comparison(card, arm, other, ours, theirs)
