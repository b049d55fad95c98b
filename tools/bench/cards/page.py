"""Writes a card as markdown."""

import textwrap
from typing import Any

NONE = "-"
WIDTH = 110


def markdown(card: dict[str, Any]) -> list[str]:
    """Returns the lines of a card: what holds for all arms, and a table of them."""
    gpus = " and ".join(f"{len(gpus)} {', '.join(sorted(set(gpus)))}" for gpus in card["gpus"])
    attention = sorted({name for line in card["arms"] for name in line["attention"]})
    said = {
        "Model": f"cut to {card['cuts']}; {card['tokens_per_gpu']:,} tokens a GPU and iteration.",
        "Machine": f"{gpus or NONE}, power limit {_all(card['power_limit'])}, driver "
        f"{_all(card['driver'])}, torch {_all(card['torch'])}; {_all(card['date'])}."
        f"{shared_host(card)}",
        "Software": f"commit {_all(card['commit'])}, Megatron-LM {_all(card['megatron'])}, "
        f"attention by {', '.join(attention) or NONE}.",
        "Without": settings(card),
    }
    lines = [
        f"## {card['model']} on {machine_of(card)}",
        "",
        *(line for what, text in said.items() for line in wrap(f"- **{what}**: {text}", "  ")),
        "",
        "| arm | s an iteration | TFLOP/s a GPU | tokens/s a GPU | busy, ms | peak GiB | MHz | "
        "loss at 1, 10, 20 | in alltoall's band | row bound, need |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(row, card["arms"]),
        "",
    ]
    if card["missing"]:
        said = "; ".join(f"{arm}: {why}" for arm, why in card["missing"].items())
        lines += [*wrap(f"Missing arms: {said}."), ""]
    return lines


def shared_host(card: dict[str, Any]) -> str:
    """Says which arms had a host that trained on its other GPUs, too; empty if none had."""
    said = []
    for at_once in sorted(set(card["shared"].values())):
        arms = [f"`{arm}`" for arm, number in card["shared"].items() if number == at_once]
        whose = "All arms" if len(arms) == len(card["arms"]) else ", ".join(arms)
        said.append(
            f" {whose} ran while the host trained {at_once - 1} other models, each on GPUs and "
            "cores of its own."
        )
    return "".join(said)


def machine_of(card: dict[str, Any]) -> str:
    """Returns a card's GPUs by their short names, as in "1 H200"."""
    names = {gpu.removeprefix("NVIDIA ").split()[0] for gpus in card["gpus"] for gpu in gpus}
    return f"{card['num_gpus']} {' or '.join(sorted(names))}"


def settings(card: dict[str, Any]) -> str:
    """Says which of Megatron's and flashmoe's options the arms go without."""
    said = [*card["off"]]
    apart = [arm for arm in card["unfused_gradients"] if arm.startswith("alltoall")]
    if apart:
        every = [line["arm"] for line in card["arms"] if line["arm"].startswith("alltoall")]
        whose = "`alltoall`" if apart == every else ", ".join(apart)
        said.append(
            f"in {whose} Megatron's fusion of gradient "
            "accumulation, which wants apex: kernels of their own add its gradients in float32, "
            "while flashmoe's launches add those of experts themselves"
        )
    return f"{'; '.join(said) or 'nothing that a card names'}."


def wrap(text: str, indent: str = "") -> list[str]:
    """The lines of a paragraph of a page, all but the first with an indent."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


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
