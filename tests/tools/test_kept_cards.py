"""Pages show of the kept cards what their records have, and say of each run that misses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tools.test_cards import OURS, QWEN3, THEIRS, record
from tools.bench.cards import __main__ as cards
from tools.bench.cards.arms import Arm
from tools.bench.cards.card import CHOICES, card_of
from tools.bench.cards.kept import KeptCard, comparisons, kept_cards, shown
from tools.bench.cards.models import MODELS
from tools.bench.cards.page import markdown
from tools.bench.cards.picture import draw, labels
from tools.bench.cards.summary import page, summary

MIXTRAL = next(model for model in MODELS if model.arms == "fp8")
PIECES = Arm("flashmoe", "pieces", is_forced=False)
FORCED = Arm("flashmoe", "whole", is_forced=True)
FP8 = Arm("alltoall", "pieces", is_forced=False, variant="fp8")


def keep(results: Path, name: str, records: dict[str, Any]) -> None:
    """Keeps a card's records as the project does."""
    path = results / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"arm": arm, **one}) + "\n" for arm, one in records.items()))


def times(ms: float, **rest: Any) -> dict[str, Any]:
    """A run's record whose iterations that count take so long."""
    return record(**{"iteration_ms": [900.0] * 20 + [ms] * 10, "gpus": ["NVIDIA H200"], **rest})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The records of two cards, on each of which runs miss."""
    qwen3 = {
        OURS.name: times(250),
        PIECES.name: times(260),
        THEIRS.name: times(800, busy_ms=380.0),
        FORCED.name: times(250, ended="bound", row_blocks=9, losses=[1.0] * 5),
    }
    mixtral = {OURS.name: times(400), THEIRS.name: times(480, busy_ms=285.0), FP8.name: times(380)}
    keep(tmp_path, f"2026-11-28-cards-h200/{QWEN3.name}-1x.jsonl", qwen3)
    keep(tmp_path, f"2026-11-28-cards-h200/{MIXTRAL.name}-1x.jsonl", mixtral)
    return tmp_path


def test_the_comparison_of_the_readme(results: Path) -> None:
    lines = summary(kept_cards(results))
    assert lines[:2] == [
        "On 1 H200, an iteration takes 1.2 to 3.2 times as long with `alltoall` as with flashmoe, "
        "and the GPU works 1.5",
        "to 2.0 times as long. With `alltoall` in blockwise FP8 it takes 0.9 times.",
    ]
    title = f"| {QWEN3.title} | natural"
    assert (
        f"{title} | 0.250 / 0.800 | 76 / 48 | 280 / 88 | 131.1K / 41.0K | 50.0 / 50.0 | 3.2x |"
        in lines
    )
    assert any(line.startswith(f"{title}, pieces | 0.260 / 0.800 |") for line in lines)
    assert any(f"| {MIXTRAL.title}, FP8 | natural | 0.400 / 0.380 |" in line for line in lines)
    nothing = " | ".join(["- / -"] * 4)
    assert f"| {QWEN3.title} | forced | row bound / not run | {nothing} | - |" in lines
    assert not any("forced, pieces" in line and "|" in line for line in lines)
    assert not any("not run / not run" in line for line in lines)
    (not_yet,) = (line for line in lines if line.startswith("Not run yet: "))
    assert f"{MIXTRAL.title} forced" in not_yet
    absent = [model.title for model in MODELS if model not in (QWEN3, MIXTRAL)]
    assert " ".join(lines).endswith(f"No card yet: {', '.join(absent)}.")
    assert max(map(len, lines)) <= 110


def test_runs_of_two_machines_have_no_ratio(results: Path) -> None:
    kept = f"2026-11-28-cards-h200/{QWEN3.name}-1x.jsonl"
    keep(results, kept, {OURS.name: times(250), THEIRS.name: times(800, power_limit="500 W")})
    (row, *_) = comparisons(kept_cards(results)[0])
    assert row.ours.line is not None
    assert row.theirs.line is not None
    assert row.ratio is None


def test_the_card_with_the_most_results_is_shown_and_its_machine_is_named(results: Path) -> None:
    few = {OURS.name: times(300)}
    name = f"{QWEN3.name}-1x.jsonl"
    keep(results, f"2026-11-29-cards-h100/{name}", few)
    paths = [card.path for card in shown(kept_cards(results))]
    assert results / "2026-11-28-cards-h200" / name in paths
    assert len(kept_cards(results)) == 3
    h100 = {"gpus": ["NVIDIA H100 80GB HBM3"]}
    many = {arm: times(300, **h100) for arm in (OURS.name, PIECES.name, THEIRS.name, FORCED.name)}
    keep(results, f"2026-11-29-cards-h100/{name}", many)
    (qwen3, mixtral) = shown(kept_cards(results))
    assert (qwen3.machine, mixtral.machine) == ("1 H100", "1 H200")
    lines = summary([qwen3, mixtral])
    assert lines[0].startswith("On 1 H100 and 1 H200,")
    assert any(line.startswith(f"| {QWEN3.title}, 1 H100 | natural |") for line in lines)


def test_records_of_an_unknown_model_are_refused(results: Path) -> None:
    keep(results, "2026-11-28-cards-h200/other-1x.jsonl", {})
    with pytest.raises(ValueError, match=r"other-1x.jsonl, wanted MODEL-Nx.jsonl"):
        kept_cards(results)


def test_a_picture_shows_each_run(results: Path) -> None:
    texts = labels(draw(kept_cards(results)))
    assert "Pretraining with Megatron-Core, end to end, on 1 H200" in texts
    assert {"natural routing", "forced balance", QWEN3.title, MIXTRAL.title} <= set(texts)
    assert {"280  (250 ms)", "269  (260 ms)", "88  (800 ms)", "184  (380 ms)"} <= set(texts)
    assert "flashmoe: row bound" in texts
    assert "alltoall: not run" in texts


def test_the_readmes_picture_is_that_of_the_records(tmp_path: Path) -> None:
    assert cards.main(["picture", "--out", str(tmp_path / "drawn.svg")]) == 0
    drawn = labels((tmp_path / "drawn.svg").read_text())
    again = "run python -m tools.bench.cards picture"
    assert labels(cards.PICTURE.read_text()) == drawn, again


def test_the_page_links_the_records_of_each_card(results: Path) -> None:
    text = "\n".join(page(kept_cards(results), results / "pages"))
    for model in (QWEN3, MIXTRAL):
        link = f"../2026-11-28-cards-h200/{model.name}-1x.jsonl"
        assert f"[Records]({link})" in text
        assert f"### {model.title}" in text
        assert f"--models {model.name} --gpus 1" in " ".join(text.split())


@pytest.mark.parametrize(
    ("alltoall", "said"),
    [
        ("--no-gradient-accumulation-fusion", "in `alltoall` Megatron's fusion"),
        ("", ""),
    ],
)
def test_a_card_says_what_its_runs_go_without(alltoall: str, said: str) -> None:
    records = {
        OURS.name: times(250, command="x --flashmoe-spare-slots 2"),
        THEIRS.name: times(800, command=f"x {alltoall}"),
    }
    text = " ".join(markdown(card_of(QWEN3, records, 1)))
    text = " ".join(text.split())
    assert ("fusion of gradient accumulation" in text) == bool(said)
    assert said in text
    (off,) = re.findall(r"\*\*Without\*\*: (.*?)[.:] ", text)
    without = [each for each in CHOICES.values() if each != "replicas"]
    assert off.split("; ")[: len(without)] == without
    assert len(off.split("; ")) == len(without) + bool(said)


def test_a_card_names_the_runs_whose_gradients_are_not_fused() -> None:
    noise = Arm("alltoall", "pieces", is_forced=False, variant="noise")
    records = {
        THEIRS.name: times(800, command="x --no-gradient-accumulation-fusion"),
        noise.name: times(800, command="x"),
    }
    text = " ".join(markdown(card_of(QWEN3, records, 1)))
    assert f"in {THEIRS.name} Megatron's fusion" in " ".join(text.split())


def test_kept_cards_have_their_folders_in_order() -> None:
    """The kept records of this checkout can all be read, and each model's card says its cuts."""
    found = kept_cards()
    assert found
    assert all(isinstance(each, KeptCard) and each.card["arms"] for each in found)
