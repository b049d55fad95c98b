"""Makes tables and a figure of a record of ``bench_peers``: all shapes, lost ones too.

    python -m tools.bench.peers_report runs/peers.jsonl --out runs/peers [--kept]

Times are medians over turns. Where two layers are compared, what is above 1 is lost. Our time is
that from Python, or from a graph in a record without it. A record that has rows of several settings
is refused, since no table or figure tells them apart. With ``--kept`` the page also has what our
forwards keep today, by the plan, which the library makes.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from flashmoe_megatron.bench import style
from flashmoe_megatron.bench.correctness import worst_of
from flashmoe_megatron.bench.shapes import Shape
from tools import markdown
from tools.arguments import parser_of
from tools.bench import kept_table
from tools.bench.bench_peers import PASSES, SETTINGS
from tools.bench.common import read_record
from tools.bench.peers import PEERS

OURS = "flashmoe"
FINENESS = {"F >= 1024": (1024, 2**31), "512 <= F < 1024": (512, 1023), "F < 512": (1, 511)}
LINES = ("o-", "o:", "s-", "^-", "D-", "v-")
COLORS = (style.FUSED, "#7fb2d6", style.UNFUSED, style.ACCENT, style.NEUTRAL, "#4d7c0f")
Row = dict[str, Any]


def load(path: Path) -> list[Row]:
    """The shapes, wide experts first.

    Raises:
        SystemExit: The file is no record of ``bench_peers``, or its rows differ in their settings.
    """
    rows = read_record(path)
    if not rows or any(row.get("measurement") != "peers" for row in rows):
        raise SystemExit(f"{path} has rows of {_kinds(rows)}: wanted those of bench_peers alone")
    for name in SETTINGS:
        found = list(dict.fromkeys(json.dumps(row.get(name)) for row in rows))
        if len(found) > 1:
            raise SystemExit(
                f"{path} has rows with {name} {' and '.join(found)}: wanted one setting, so give "
                "the rows of each a file of their own"
            )
    return sorted(rows, key=lambda row: -row["sizes"]["intermediate"])


def _kinds(rows: list[Row]) -> str:
    return ", ".join(dict.fromkeys(str(row.get("measurement")) for row in rows)) or "nothing"


def values(row: Row, what: str) -> dict[str, float]:
    """Milliseconds of a pass, or megabytes that are kept, by layer; without failed ones."""
    found = {name: layer.get(what) for name, layer in row["layers"].items()}
    if what in PASSES:
        return {name: statistics.median(times) for name, times in found.items() if times}
    return {name: size / 1e6 for name, size in found.items() if size is not None}


def compared(rows: list[Row]) -> str:
    """The name under which a record has our times: from Python, or from a graph alone."""
    has_python = any(OURS in values(row, passes) for row in rows for passes in PASSES)
    return OURS if has_python else f"{OURS} from a graph"


def described(row: Row) -> str:
    """A shape's name, if it has one, and its sizes."""
    keys = ("tokens", "hidden", "intermediate", "num_experts", "topk")
    numbers = ", ".join(str(row["sizes"][key]) for key in keys)
    return numbers if row["shape"][0].isdigit() else f"{row['shape']} ({numbers})"


def section(title: str, heads: list[str], lines: list[list[str]]) -> str:
    """A table below a heading."""
    return "\n".join([f"### {title}\n", *markdown.table(heads, lines)]) + "\n"


def in_short(rows: list[Row], name: str) -> list[list[str]]:
    """Lines of a table: our time over a layer's at experts of some width."""
    ours, lines = compared(rows), []
    for title, (least, most) in FINENESS.items():
        within = [row for row in rows if least <= row["sizes"]["intermediate"] <= most]
        for passes in PASSES:
            every = [values(row, passes) for row in within]
            over = [of[ours] / of[name] for of in every if {ours, name} <= set(of)]
            if over:
                cells = [f"{of(over):.2f}" for of in (min, statistics.median, max)]
                lines.append([name, title, passes, *cells])
    return lines


def promises(rows: list[Row], name: str) -> list[str]:
    """A line of a table: errors, repeatability and failures at all shapes."""
    found = [row["layers"][name] for row in rows if name in row["layers"]]
    good = [one for one in found if "failed" not in one]
    errors = [error for one in good for error in one["errors"].values()]
    repeats = sum(one["repeats"] for one in good)
    worst = f"{worst_of(errors):.1e}" if errors else ""
    return [name, worst, f"{repeats} of {len(good)}", str(len(found) - len(good))]


def page(rows: list[Row]) -> str:
    """All tables, in Markdown."""
    seen = {name for row in rows for name in row["layers"]}  # also "flashmoe from a graph"
    names = sorted(seen, key=lambda name: (list(PEERS).index(name.split()[0]), name))
    ours = compared(rows)
    short = [line for name in names if name != ours for line in in_short(rows, name)]
    heads = ["ours over", "experts", "pass", "least", "median", "most"]
    parts = [section("In short", heads, short)]
    for what, unit in ((PASSES[0], "ms"), (PASSES[1], "ms"), ("kept_bytes", "MB")):
        lines = []
        for row in rows:
            of = values(row, what)
            over = {
                name: f" ({of[ours] / of[name]:.2f})" for name in of if ours in of and name != ours
            }
            cells = [f"{of[name]:.4g}{over.get(name, '')}" if name in of else "" for name in names]
            lines.append([described(row), *cells])
        parts.append(section(f"{what}, {unit} (ours over it)", ["T, H, F, E, k", *names], lines))
    heads = ["layer", "largest error", "bits repeat", "shapes that fail"]
    parts.append(section("What holds", heads, [promises(rows, name) for name in names]))
    return "\n".join(parts)


def kept(rows: list[Row]) -> str:
    """A table of what our forwards keep, beside what the record's layers have kept."""
    every = [values(row, "kept_bytes") for row in rows]
    names = [name for name in PEERS if any(name in measured for measured in every)]
    lines = []
    for row, measured in zip(rows, every, strict=True):
        planned = kept_table.megabytes(row)
        sizes = [
            f"{measured[name]:.4g} ({planned['auto'] / measured[name]:.2f})"
            if name in measured
            else ""
            for name in names
        ]
        lines.append([described(row), *(f"{size:.4g}" for size in planned.values()), *sizes])
    heads = ["T, H, F, E, k", *kept_table.HEADS, *(f"{name}, measured" for name in names)]
    return section(
        "Kept by our forwards, MB by the plan (auto over what was measured)", heads, lines
    )


def draw(rows: list[Row], path: Path) -> list[Path]:
    """Draws rates of all layers at all shapes; the files' names are returned."""
    with style.new_figure(11, 8) as figure:
        axes = figure.subplots(2, sharex=True)
        for ax, passes, products in zip(axes, PASSES, (1, 3), strict=True):
            every = [values(row, passes) for row in rows]
            work = [products * Shape(**row["sizes"]).flops / 1e9 for row in rows]
            for peer, color, line in zip(PEERS, COLORS, LINES, strict=True):
                name = compared(rows) if peer == OURS else peer
                at = [number for number, of in enumerate(every) if name in of]
                if at:
                    rates = [work[number] / every[number][name] for number in at]
                    ax.plot(at, rates, line, color=color, linewidth=1, label=name)
            ax.set(ylabel="TFLOP/s", title=passes)
            ax.set_ylim(bottom=0)
        ax.set_xticks(range(len(rows)), [described(row) for row in rows], rotation=90, fontsize=8)
        style.legend_below(figure, axes[0])
        return style.save(figure, path)


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("record", type=Path, help="what bench_peers has written")
    parser.add_argument("--out", type=Path, required=True, help="path without an ending")
    parser.add_argument("--kept", action="store_true", help="add what our forwards keep")
    options = parser.parse_args(arguments)
    rows = load(options.record)
    table = options.out.with_name(f"{options.out.name}.md")
    table.parent.mkdir(parents=True, exist_ok=True)
    parts = [page(rows), kept(rows)] if options.kept else [page(rows)]
    table.write_text("\n".join(parts))
    print(*[table, *draw(rows, options.out)], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
