"""Tables as pages and terminals show them."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [
        f"| {' | '.join(map(str, cells))} |" for cells in (titles, ["---"] * len(titles), *rows)
    ]
