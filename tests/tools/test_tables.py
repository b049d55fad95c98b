"""The tables of pages are what their makers make of the records and the code."""

import re
from pathlib import Path

import pytest

from tools.bench import peers_report
from tools.tables.__main__ import main
from tools.tables.makers import MAKERS
from tools.tables.marks import BEGIN, END, ROOT, Maker, pages, with_tables
from tools.tables.options import OPTIONS
from tools.tables.records import path_of

WITH_TABLES = [page for page in pages() if BEGIN in page.read_text()]
OF_LIBRARY = f"{BEGIN}hosts_take -->"
TABLE = f"text\n{BEGIN}count 2 -->\n| old |\n{END}\nmore\n"
COUNT: dict[str, Maker] = {"count": lambda most: [f"| {one} |" for one in range(int(most))]}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.library] if OF_LIBRARY in page.read_text() else [])
        for page in WITH_TABLES
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_has_what_the_makers_make(page: Path) -> None:
    text = page.read_text()
    assert with_tables(text, MAKERS) == text, "run python -m tools.tables"


@pytest.mark.parametrize(
    "name",
    [
        "2026-11-25-league-h100-1x/others",
        "2026-11-26-league-h100-1x/sonicmoe",
    ],
)
def test_pages_of_other_libraries_are_those_of_their_records(name: str) -> None:
    page = peers_report.page(peers_report.load(path_of(f"{name}.jsonl")))
    assert path_of(f"{name}.md").read_text() == page


def test_every_maker_and_every_adapters_options_have_a_table() -> None:
    marks = re.findall(f"{BEGIN}(?!end )(.*?) -->", "".join(map(Path.read_text, WITH_TABLES)))
    assert {mark.split()[0] for mark in marks} == set(MAKERS)
    assert {mark for mark in marks if mark.startswith("options")} == {
        f"options {whose}" for whose in OPTIONS
    }


def test_a_table_is_made_again_where_it_stands() -> None:
    made = with_tables(TABLE, COUNT)
    assert made == TABLE.replace("| old |\n", "| 0 |\n| 1 |\n")
    assert with_tables(made, COUNT) == made
    inner = "\n".join(f"  {line}" for line in TABLE.splitlines())
    assert with_tables(inner, COUNT) == inner.replace("  | old |\n", "  | 0 |\n  | 1 |\n")
    both = with_tables(TABLE + TABLE.replace("count 2", "count 1"), COUNT)
    assert both == made + made.replace("count 2", "count 1").replace("| 1 |\n", "")


@pytest.mark.parametrize(
    ("page", "error"),
    [
        (TABLE.replace("count", "sum"), "table sum: wanted one of count"),
        (TABLE.replace(END, ""), "1 tables begin and 0 end"),
        (TABLE.replace(f"{BEGIN}count", "<!-- count"), "0 tables begin and 1 end"),
        (TABLE.replace(END, "") + TABLE, "2 tables begin and 1 end"),
        (TABLE.replace("| old |\n", TABLE), "2 tables begin and 2 end"),
    ],
)
def test_marks_that_are_wrong_are_refused(page: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        with_tables(page, COUNT)


def test_the_command_writes_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    monkeypatch.setattr("tools.tables.marks.ROOT", tmp_path)
    monkeypatch.setattr("tools.tables.__main__.ROOT", tmp_path)
    monkeypatch.setattr("tools.tables.__main__.MAKERS", COUNT)
    page.write_text(TABLE)
    assert main([]) == 0
    assert (page.read_text(), capsys.readouterr().out) == (with_tables(TABLE, COUNT), "README.md\n")
    assert (main([]), capsys.readouterr().out) == (0, "")
    page.write_text(TABLE.replace("count", "sum"))
    assert main([]) == 2
    assert capsys.readouterr().err == "error: README.md: table sum: wanted one of count\n"
