"""Reads a version's notes from the changelog."""

import re
from pathlib import Path

from tools.release.wheel import ROOT, ReleaseError


def notes_of(wanted: str, changelog: Path = ROOT / "CHANGELOG.md") -> str:
    """Returns the text of a version's entry.

    Raises:
        ReleaseError: It has no entry, no date, or no text; or changes wait under Unreleased.
    """
    sections = re.split(r"^## ", changelog.read_text(), flags=re.MULTILINE)[1:]
    entries = {}
    for section in sections:
        title, _, text = section.partition("\n")
        entries[title.strip()] = text.strip()
    if entries.get("[Unreleased]"):
        raise ReleaseError(f"{changelog.name} has changes under Unreleased, wanted none")
    for title, text in entries.items():
        if re.fullmatch(rf"\[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d", title) and text:
            return text
    raise ReleaseError(f"{changelog.name} has no dated entry with text for version {wanted}")
