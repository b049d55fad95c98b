"""Writes a card as markdown."""

from typing import Any

NONE = "-"


def markdown(card: dict[str, Any]) -> str:
    """A card: what holds for all arms, and a table of them."""
    each = f"{card['tokens_per_gpu']:,} tokens a GPU and iteration"
    machine = ", ".join(f"{key} {_all(card[key])}" for key in ("gpus", "power_limit", "driver"))
    lines = [
        f"## {card['model']}",
        "",
        f"Cut to {card['cuts']}. {each}, GPUs: {card['num_gpus']}.",
        f"Commit {_all(card['commit'])}, Megatron-LM {_all(card['megatron'])}, {machine}, "
        f"torch {_all(card['torch'])}, {_all(card['date'])}.",
        "",
        "| arm | s an iteration | TFLOP/s a GPU | tokens/s a GPU | busy, ms | peak GiB | MHz | "
        "loss at 1, 10, 20 | in alltoall's band | row bound, need |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(row, card["arms"]),
        "",
    ]
    if card["missing"]:
        said = "; ".join(f"{arm}: {why}" for arm, why in card["missing"].items())
        lines += [f"Missing arms: {said}.", ""]
    return "\n".join(lines)


def row(line: dict[str, Any]) -> str:
    """An arm's row of the table."""
    losses = ", ".join(f"{loss:.5f}" for loss in line["losses"].values())
    if "seconds" in line:
        low, high = line["seconds_range"]
        speed = [
            f"{line['seconds']:.3f} ({low:.3f} to {high:.3f})",
            f"{line['tflops']:.0f}",
            f"{line['tokens_per_s']:,}",
        ]
    else:
        speed = [f"ended by {line['ended']} behind {line['iterations']} iterations", NONE, NONE]
    mhz = NONE if not line["sm_mhz"] else "{:.0f} to {:.0f}".format(*line["sm_mhz"])
    rows = NONE
    if "row_bound" in line:
        bound = "none" if line["row_bound"] is None else f"{line['row_bound']:g}"
        rows = f"{bound}, {line.get('row_need', NONE)}"
    numbers = [NONE if line[key] is None else f"{line[key]:.1f}" for key in ("busy_ms", "peak_gib")]
    cells = [line["arm"], *speed, *numbers, mhz, losses, line["band"] or NONE, rows]
    return "| " + " | ".join(cells) + " |"


def _all(values: list[Any]) -> str:
    return " and ".join(str(value) for value in values) or NONE
