"""Pages and sources point at things that exist: files, headings, and records."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
RECORD = re.compile(r"(?<!:)tools/bench/results/[\w./-]*\w")  # not in "git show COMMIT:..."
MOST_RECORDS = 40
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def tracked(*patterns: str) -> list[Path]:
    """Tracked files that exist; without git, those that a checkout has."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this checkout has no git: which files are tracked is not known")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def headings(text: str) -> set[str]:
    """Anchors of a page, made from its headings as GitHub does."""
    anchors: set[str] = set()
    seen: Counter[str] = Counter()
    for title in re.findall(r"^#+ +(.+?) *$", FENCED.sub("", text), re.MULTILINE):
        shown = LINK.sub("", title).replace("[", "")
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def broken_links(page: Path) -> list[str]:
    """Relative links of a page to a file or a heading that is not there."""
    broken = []
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        wanted = anchor if file.suffix == ".md" else ""
        if not file.exists() or (wanted and wanted not in headings(file.read_text())):
            broken.append(f"{page.relative_to(ROOT)}: {target}")
    return broken


def test_links_lead_somewhere() -> None:
    assert [link for page in tracked("*.md") for link in broken_links(page)] == []


def test_a_link_to_nothing_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.tools.test_links.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One: `two`\n# Three\n# Three\n[a](#one-two) [b](#three-1) [c](page.md)\n")
    assert broken_links(page) == []
    page.write_text("# One\n[a](#two) [b](none.md) [c](page.md#one) [d](https://example.org/x)\n")
    assert broken_links(page) == ["page.md: #two", "page.md: none.md"]


def test_records_that_sources_name_exist() -> None:
    named = {
        (path.relative_to(ROOT), record)
        for path in tracked("*.py", "*.sh", "*.cuh", "*.cu", "*.h", "*.json", "*.toml", "*.md")
        for record in RECORD.findall(path.read_text())
    }
    assert [(path, record) for path, record in named if not (ROOT / record).exists()] == []


def test_records_are_those_that_pages_show() -> None:
    folder = ROOT / "tools/bench/results"
    records = set(tracked("tools/bench/results"))
    shown = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in tracked("*.md")
        for target in LINK.findall(page.read_text())
    }
    assert len(records) <= MOST_RECORDS
    assert sorted(path.relative_to(folder) for path in records - shown) == []
