"""Finds the tables of pages by their marks, and makes them again."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("csrc", "examples", "flashmoe_megatron", "tests", "tools")
Maker = Callable[..., list[str]]
"""Makes the lines of a table from what a mark says after the maker's name."""

BEGIN, END = "<!-- table: ", "<!-- table: end -->"
_TABLE = re.compile(
    rf"^(?P<indent> *){BEGIN}(?!end )(?P<words>.*?) -->\n(?P<lines>.*?)^ *{END}$", re.M | re.S
)


def pages() -> Iterator[Path]:
    """All pages that may have tables."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.md"))


def with_tables(page: str, makers: Mapping[str, Maker]) -> str:
    """Returns a page with all of its tables made again.

    Args:
        page: The page's text.
        makers: By the name in a mark.

    Raises:
        ValueError: A mark has no end, or names no maker.
    """
    ends = page.count(END)
    begins = page.count(BEGIN) - ends
    pairs = [one for one in _TABLE.finditer(page) if BEGIN not in one["lines"]]
    if not begins == ends == len(pairs):
        raise ValueError(f"{begins} tables begin and {ends} end: wanted pairs of marks")

    def made(one: re.Match[str]) -> str:
        name, *arguments = shlex.split(one["words"])
        if name not in makers:
            raise ValueError(f"table {name}: wanted one of {', '.join(makers)}")
        indent = one["indent"]
        lines = [f"{BEGIN}{one['words']} -->", *makers[name](*arguments), END]
        return "\n".join(indent + line for line in lines)

    return _TABLE.sub(made, page)
