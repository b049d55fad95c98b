"""Finds the cards whose records the project keeps, and compares flashmoe with alltoall on them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tools.bench.cards.arms import Arm, arms_of
from tools.bench.cards.card import card_of
from tools.bench.cards.models import MODELS, Model
from tools.bench.cards.page import machine_of
from tools.bench.cards.records import folder_of, read_records
from tools.bench.common import ROOT

RESULTS = ROOT / "tools" / "bench" / "results"
KEPT = re.compile(r"(?P<model>.+)-(?P<gpus>\d+)x\.jsonl")


@dataclass(frozen=True)
class KeptCard:
    """A card whose records the project keeps.

    Attributes:
        path: The records, a line for each arm.
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
    """Reads all kept cards, in the order of the models and then of their folders' names."""
    by_name = {model.name: model for model in MODELS}
    found = []
    for path in sorted(results.glob("*-cards-*/*.jsonl")):
        kept = KEPT.fullmatch(path.name)
        if kept is None or kept["model"] not in by_name:
            raise ValueError(f"got {path}, wanted MODEL-Nx.jsonl with one of {', '.join(by_name)}")
        model, gpus = by_name[kept["model"]], int(kept["gpus"])
        records = read_records(folder_of(path.parent, model, gpus))
        found.append(KeptCard(path, model, gpus, card_of(model, records, gpus)))
    order = list(by_name)
    return sorted(found, key=lambda each: (order.index(each.model.name), each.num_gpus))


def shown(cards: list[KeptCard]) -> list[KeptCard]:
    """Returns the card of each model and number of GPUs that has the most results.

    The last of several such cards, which is the one of the latest date, is shown.
    """
    chosen: dict[tuple[str, int], KeptCard] = {}
    for each in cards:
        key = (each.model.name, each.num_gpus)
        if key not in chosen or len(each.card["arms"]) >= len(chosen[key].card["arms"]):
            chosen[key] = each
    return list(chosen.values())


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
        is_forced: Whether experts are chosen at random, so that they get the same.
        graph: flashmoe's graphs. alltoall always has graphs of pieces.
        is_fp8: Whether alltoall's run is in blockwise FP8; that of flashmoe is in bfloat16.
        ours: flashmoe's run.
        theirs: alltoall's run.
    """

    card: KeptCard
    is_forced: bool
    graph: Literal["pieces", "whole"]
    is_fp8: bool
    ours: Side
    theirs: Side

    @property
    def ratio(self) -> float | None:
        """How many times as long alltoall takes; ``None`` unless one machine has run both."""
        return self.over("seconds")

    def over(self, key: str) -> float | None:
        """How many times as much alltoall has of a number."""
        ours, theirs = self.ours.line, self.theirs.line
        if ours is None or theirs is None or ours["machine"] != theirs["machine"]:
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

    A run of graphs of pieces is left out where it misses; all else that misses gets its row.
    """
    arms = arms_of(card.model)
    for variant in ("", "fp8"):
        for arm in arms:
            other = Arm("alltoall", "pieces", arm.is_forced, variant)
            if arm.dispatcher != "flashmoe" or other not in arms:
                continue
            ours, theirs = side(card.card, arm), side(card.card, other)
            if ours.line is not None or arm.graph == "whole":
                yield Comparison(card, arm.is_forced, arm.graph, variant == "fp8", ours, theirs)
