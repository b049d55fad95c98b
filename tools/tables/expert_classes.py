"""Makes the table of transformers' expert classes, from the list that a test compares with them."""

import json
from collections import defaultdict

from tools import markdown
from tools.tables.marks import ROOT

LIST = ROOT / "tests" / "frameworks" / "expert_classes.json"


def expert_classes() -> list[str]:
    """The models of each function between the projections, and those that are refused."""
    listed = json.loads(LIST.read_text())
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, function in listed["computed"].items():
        kinds[function].append(name)
    computed = sorted(kinds, key=lambda what: -len(kinds[what]))
    for name, reason in listed["refused"].items():
        kinds[f"refused: {reason.partition(':')[0]}"].append(name)
    ordered = [*computed, *(what for what in kinds if what not in computed)]
    return markdown.table(
        [
            "between the projections",
            f"classes of {listed['release']}",
            "packages of `transformers.models`",
        ],
        (
            [what, len(kinds[what]), ", ".join(sorted({_package(each) for each in kinds[what]}))]
            for what in ordered
        ),
    )


def _package(name: str) -> str:
    return name.partition(".")[0]
