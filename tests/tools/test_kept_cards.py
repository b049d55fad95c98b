"""Pages show of the kept cards what their records have, and say of each run that misses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tools.test_cards import OURS, QWEN3, THEIRS, record
from tools.bench.cards import __main__ as cards
from tools.bench.cards import picture
from tools.bench.cards.arms import Arm, arms_of
from tools.bench.cards.card import CHOICES, card_of
from tools.bench.cards.kept import KeptCard, comparisons, keep, kept_cards, shown
from tools.bench.cards.models import MODELS
from tools.bench.cards.page import markdown
from tools.bench.cards.picture import draw, labels
from tools.bench.cards.records import folder_of, write_record
from tools.bench.cards.summary import page, summary

MIXTRAL = next(model for model in MODELS if model.arms == "fp8")
PIECES = Arm("flashmoe", "pieces", is_forced=False)
FORCED = Arm("flashmoe", "whole", is_forced=True)
H200 = "2026-11-28-cards-h200-1x.jsonl"
FP8 = Arm("alltoall", "pieces", is_forced=False, variant="fp8")


def write(path: Path, by_model: dict[str, dict[str, Any]]) -> None:
    """Writes a file of kept records."""
    lines = [
        {"model": model, "arm": arm, **one}
        for model, records in by_model.items()
        for arm, one in records.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


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
    write(tmp_path / H200, {QWEN3.name: qwen3, MIXTRAL.name: mixtral})
    return tmp_path


def test_the_comparison_of_all(results: Path) -> None:
    lines = summary(kept_cards(results), has_all=True)
    assert lines[:2] == [
        "On 1 H200, an iteration takes 1.2 to 3.2 times as long with `alltoall` as with flashmoe, "
        "and the GPU works 1.5",
        "to 2.0 times as long. With `alltoall` alone in blockwise FP8 it takes 0.9 times.",
    ]
    title = f"| {QWEN3.title} | natural, 1 H200"
    assert (
        f"{title} | 0.250 / 0.800 | 76 / 48 | 280 / 88 | 131.1K / 41.0K | 50.0 / 50.0 | 3.2x |"
        in lines
    )
    assert any(line.startswith(f"{title}, pieces | 0.260 / 0.800 |") for line in lines)
    assert any(
        f"| {MIXTRAL.title}, bf16/FP8 | natural, 1 H200 | 0.400 / 0.380 |" in line for line in lines
    )
    nothing = " | ".join(["- / -"] * 4)
    assert f"| {QWEN3.title} | forced, 1 H200 | row bound / not run | {nothing} | - |" in lines
    assert not any("forced, 1 H200, pieces" in line and "|" in line for line in lines)
    assert not any("not run / not run" in line for line in lines)
    (not_yet,) = (line for line in lines if line.startswith("Not run yet: "))
    assert f"{MIXTRAL.title} forced, 1 H200" in not_yet
    absent = [model.title for model in MODELS if model not in (QWEN3, MIXTRAL)]
    assert " ".join(lines).endswith(f"No card yet: {', '.join(absent)}.")


def test_experts_in_fp8_are_compared_with_alltoall_in_fp8(results: Path) -> None:
    """Runs in FP8 have rows of their own, and none beside alltoall in bfloat16."""
    dgrad = Arm("flashmoe", "whole", is_forced=False, variant="fp8-dgrad")
    pieces = Arm("flashmoe", "pieces", is_forced=False, variant="fp8-dgrad")
    ran = {OURS.name: times(400), THEIRS.name: times(480), FP8.name: times(380)}
    ran |= {dgrad.name: times(304, busy_ms=300.0), pieces.name: times(320)}
    write(results / H200, {MIXTRAL.name: ran})
    (card,) = kept_cards(results)
    lines = summary([card], has_all=True)
    assert "With both in blockwise FP8 it takes 1.2 times as long with `alltoall`." in " ".join(
        lines
    )
    title = f"| {MIXTRAL.title}, FP8 | natural, 1 H200"
    ran_in_fp8 = [line for line in lines if line.startswith(title)]
    assert len(ran_in_fp8) == 2
    assert ran_in_fp8[0].startswith(f"{title} | 0.304 / 0.380 |")
    assert ran_in_fp8[1].startswith(f"{title}, pieces | 0.320 / 0.380 |")
    assert f"{MIXTRAL.title}, FP8 forward natural, 1 H200" in " ".join(lines)
    pairs = {(row.arm.variant, row.other.variant) for row in comparisons(card)}
    assert pairs == {("", ""), ("", "fp8"), ("fp8", "fp8"), ("fp8-dgrad", "fp8")}
    assert "flashmoe in blockwise FP8, dgrad too, one graph" in labels(draw([card]))


def test_the_comparison_of_the_readme(results: Path) -> None:
    """Natural routing, in one graph."""
    lines = summary(kept_cards(results))
    rows = [line for line in lines if line.startswith("| ")][2:]
    assert len(rows) == 2
    assert all("| 1 H200 |" in row for row in rows)
    text = " ".join(" ".join(lines).split())
    assert f"Not run yet: {MIXTRAL.title}, FP8 1 H200. No card yet" in text
    assert max(len(line) for line in lines if not line.startswith("|")) <= 110


def test_runs_of_two_machines_have_no_ratio(results: Path) -> None:
    two = {OURS.name: times(250), THEIRS.name: times(800, power_limit="500 W")}
    write(results / H200, {QWEN3.name: two})
    (row, *_) = comparisons(kept_cards(results)[0])
    assert row.ours.line is not None
    assert row.theirs.line is not None
    assert row.ratio is None


@pytest.mark.parametrize(
    ("date", "gain", "apart"),
    [
        ("2026-11-28T16:30:00", "3.2x", False),
        ("2026-11-28T16:31:00", "3.2x", True),
        ("2026-11-28T15:29:00", "3.2x", True),
        ("2026-11-29T00:10:00", "two days", False),
    ],
)
def test_runs_of_two_days_have_no_ratio(results: Path, date: str, gain: str, apart: bool) -> None:
    """A table of all rows names those of one day that are over half an hour apart."""
    write(results / H200, {QWEN3.name: {OURS.name: times(250), THEIRS.name: times(800, date=date)}})
    cards = kept_cards(results)
    lines = summary(cards, has_all=True)
    title = f"{QWEN3.title} | natural, 1 H200"
    (row,) = (line for line in lines if line.startswith(f"| {title} |"))
    assert row.endswith(f" | {gain} |")
    named = f"Both sides ran on one day, but over half an hour apart: {title.replace(' |', '')}."
    assert (named in lines) == apart
    assert not any("hour apart" in line for line in summary(cards))
    assert (lines[0] == "No pair is complete on 1 H200.") == (gain == "two days")


@pytest.mark.parametrize(
    ("date", "titles"), [("2026-11-28", ["2 H200", "2 H200, 2 slots"]), ("2026-11-29", ["2 H200"])]
)
def test_the_readme_has_spare_slots_with_a_gain_alone(
    results: Path, date: str, titles: list[str]
) -> None:
    """The run without slots is of the day of alltoall's; all runs are in the page's table."""
    slots = Arm("flashmoe", "whole", is_forced=False, variant="slots")
    ran = {
        OURS.name: times(250, date=f"{date}T16:00:00"),
        slots.name: times(240, date="2026-11-28T16:00:00"),
        THEIRS.name: times(800, date=f"{date}T16:01:00"),
    }
    write(results / "2026-11-29-cards-h200-2x.jsonl", {QWEN3.name: ran})
    cards = [card for card in kept_cards(results) if card.num_gpus == 2]
    rows = [line.split(" | ")[1] for line in summary(cards) if line.startswith(f"| {QWEN3.title}")]
    assert rows == titles
    assert any("natural, 2 H200, 2 slots |" in line for line in summary(cards, has_all=True))


def test_runs_around_midnight_are_of_one_day(results: Path) -> None:
    ours = times(250, date="2026-11-28T23:50:00")
    theirs = times(800, date="2026-11-29T00:10:00")
    write(results / H200, {QWEN3.name: {OURS.name: ours, THEIRS.name: theirs}})
    (row, *_) = comparisons(kept_cards(results)[0])
    assert row.ratio == pytest.approx(3.2)


def test_the_machine_with_the_most_results_is_shown(results: Path) -> None:
    h100 = results / "2026-11-29-cards-h100-1x.jsonl"
    gpus = {"gpus": ["NVIDIA H100 80GB HBM3"]}
    arms = (OURS.name, PIECES.name, THEIRS.name, FORCED.name, FP8.name)
    write(h100, {QWEN3.name: {arm: times(300, **gpus) for arm in arms[:4]}})
    assert {card.path for card in kept_cards(results)} == {h100, results / H200}
    assert {card.path for card in shown(kept_cards(results))} == {results / H200}
    write(
        h100, {model.name: {arm: times(300, **gpus) for arm in arms} for model in (QWEN3, MIXTRAL)}
    )
    assert {card.machine for card in shown(kept_cards(results))} == {"1 H100"}
    lines = summary(kept_cards(results))
    assert lines[0].startswith("On 1 H100, ")


def test_a_row_names_its_machine(results: Path) -> None:
    two = {arm.name: times(300) for arm in (OURS, THEIRS)}
    write(results / "2026-11-29-cards-h200-2x.jsonl", {QWEN3.name: two})
    lines = summary(kept_cards(results))
    assert lines[0].startswith("On 1 H200 and 2 H200,")
    assert any(line.startswith(f"| {QWEN3.title} | 2 H200 |") for line in lines)


def test_what_is_no_file_of_kept_records_is_refused(results: Path) -> None:
    write(results / H200, {"other": {OURS.name: times(250)}})
    with pytest.raises(ValueError, match=r"line 1: got model other, wanted qwen3"):
        kept_cards(results)
    (results / H200).rename(results / "2026-11-28-cards-h200.jsonl")
    with pytest.raises(ValueError, match=r"wanted DATE-cards-GPU-Nx.jsonl"):
        kept_cards(results)


def test_what_has_been_run_is_kept(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result takes the place of an older one of its arm; what has none stays out."""
    arms = arms_of(QWEN3, 1)
    folder = folder_of(results / "runs", QWEN3, 1)
    write_record(folder, OURS, times(240))
    write_record(folder, arms[-1], times(500))
    write_record(folder, FORCED, times(1, ended="failed"))
    before = len(kept_cards(results)[0].card["arms"])
    kept = str(results / H200)
    assert cards.main(["keep", kept, "--out", str(results / "runs")]) == 0
    assert f"{QWEN3.name}: {arms[-1].name}, {OURS.name}\n" in capsys.readouterr().out
    qwen3, mixtral = kept_cards(results)
    assert len(qwen3.card["arms"]) == before + 1
    by_arm = {line["arm"]: line for line in qwen3.card["arms"]}
    assert by_arm[OURS.name]["seconds"] == 0.24
    assert by_arm[FORCED.name]["ended"] == "bound"
    assert len(mixtral.card["arms"]) == 3
    other = {OURS.name: times(250, gpus=["NVIDIA H100 80GB HBM3"])}
    with pytest.raises(ValueError, match=r"NVIDIA H100.*wanted .*H200"):
        keep(results / H200, {QWEN3.name: other})


def test_a_picture_shows_each_run(results: Path) -> None:
    texts = labels(draw(kept_cards(results)))
    assert "Pretraining with Megatron-Core, end to end, on 1 H200" in texts
    assert {"natural routing", "forced balance", QWEN3.title, MIXTRAL.title} <= set(texts)
    assert {"280  (250 ms)", "269  (260 ms)", "88  (800 ms)", "184  (380 ms)"} <= set(texts)
    assert "flashmoe: row bound" in texts
    assert "alltoall: not run" in texts


def test_a_picture_leaves_out_what_neither_routing_has_tried(results: Path) -> None:
    """A run in FP8 that has met its bound is named; one that has not been tried has no place."""
    ours = Arm("flashmoe", "whole", is_forced=False, variant="fp8")
    label = picture.OURS[ours.graph, ours.variant].label
    records = {OURS.name: times(250), THEIRS.name: times(270), FP8.name: times(260)}
    write(results / H200, {MIXTRAL.name: records})
    texts = labels(draw(kept_cards(results)))
    assert picture.THEIRS[True].label in texts
    assert label not in texts
    records[ours.name] = times(250, ended="bound", row_blocks=9, losses=[1.0] * 5)
    write(results / H200, {MIXTRAL.name: records})
    texts = labels(draw(kept_cards(results)))
    assert {label, "flashmoe: row bound"} <= set(texts)


def test_the_readmes_picture_is_that_of_the_records(tmp_path: Path) -> None:
    assert cards.main(["picture", "--out", str(tmp_path / "drawn.svg")]) == 0
    drawn = labels((tmp_path / "drawn.svg").read_text())
    again = "run python -m tools.bench.cards picture"
    assert labels(cards.PICTURE.read_text()) == drawn, again


def test_the_page_links_the_records_of_each_card(results: Path) -> None:
    text = "\n".join(page(kept_cards(results), results / "pages"))
    for model in (QWEN3, MIXTRAL):
        assert f"[Records](../{H200})" in text
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
