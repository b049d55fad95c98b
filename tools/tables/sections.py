"""Makes tables of pages from the tables of a record's page, a section of a machine and month."""

import re
import statistics

from tools import markdown
from tools.tables.records import path_of

Rows = list[list[str]]


def tables_of(page: str, heading: str) -> list[Rows]:
    """The tables below a heading of a record, as cells; their titles are the first row.

    Args:
        page: The record.
        heading: The whole heading.

    Raises:
        ValueError: The record has no such heading.
    """
    sections = re.split(r"^#+ (.+)$", path_of(page).read_text(), flags=re.M)
    if heading not in sections[1::2]:
        raise ValueError(f"{page} has no heading {heading!r}")
    section = sections[2 * sections[1::2].index(heading) + 2]
    found: list[Rows] = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.M):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        found.append([rows[0], *rows[2:]])
    return found


def gathers(page: str, heading: str, commit: str) -> list[str]:
    """Rates of gathers by all links, and how many times NCCL's faster way they are.

    Args:
        page: The record.
        heading: The heading of its section with a table of runs, by GPUs and commit.
        commit: The runs at this commit are taken, and a cell has their medians.
    """
    (titles, *rows), *_ = [
        table for table in tables_of(page, heading) if table[0][0] == "GPUs, commit"
    ]
    runs: dict[str, Rows] = {}
    of = ""
    for label, *cells in rows:
        of = label if label[0].isdigit() else of  # "the same machine" goes on with what is above
        if of.endswith(commit):
            runs.setdefault(of[0], []).append(cells)

    def medians(cells: tuple[str, ...]) -> str:
        pairs = [cell.split(", ") for cell in cells]
        rate, times = (statistics.median(map(float, each)) for each in zip(*pairs, strict=True))
        return f"{rate:.0f} ({times:.2f})"

    lines = [
        [gpus, len(cells), *map(medians, zip(*cells, strict=True))] for gpus, cells in runs.items()
    ]
    first, *others = titles[1:]
    return markdown.table(("GPUs", "runs", f"{first} of each rank", *others), lines)


def degrees(page: str, heading: str) -> list[str]:
    """The degree that is computed for forwards, over one part by the faster exchange.

    Args:
        page: The record.
        heading: The heading of its section. The first table there has layers, the second one has
            Qwen3's layer with more tokens; both have times by exchange and degree, chosen ones in
            bold.
    """
    layers, tokens, *_ = tables_of(page, heading)
    labels = [(label, cells) for label, *cells in layers[1:]]
    for label, *cells in tokens[1:]:
        if label.endswith(", forward"):
            labels.append((f"Qwen3-30B-A3B, {label.removesuffix(', forward')}; four H200s", cells))
    rows = [[label, *_chosen(direct, copies)] for label, (direct, copies, *_) in labels]
    titles = ("hidden x intermediate size, experts; 8,192 tokens of a rank", "chosen")
    return markdown.table((*titles, "times as fast as one part"), rows)


def _chosen(direct: str, copies: str) -> list[str]:
    """The faster exchange with its chosen degree, and its gain, from the times of both."""
    found = []
    for name, cell in (("direct", direct), ("copies", copies)):
        bold = re.search(r"\*\*(?:(\d+): )?([\d.]+)\*\*", cell)
        assert bold is not None, cell
        times = re.findall(r"[\d.]+", cell.replace(bold[0], bold[2]))
        found.append((float(bold[2]), name, bold[1] or times.index(bold[2]) + 1, float(times[0])))
    time, name, degree, _ = min(found)
    return [f"`{name}`, {degree}", f"{min(one for *_, one in found) / time:.2f}"]
