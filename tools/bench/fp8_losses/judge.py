"""Judges the losses of all runs: pure functions of their records."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flashmoe_megatron.doctor.attention import is_fused
from tools import markdown
from tools.bench.bench_training.curves import apart, mean_of_last
from tools.bench.fp8_losses.runs import BF16, BF16_AGAIN, OURS, RUNS, THEIRS, THEIRS_AGAIN

LEAST_BAND = 0.0025
"""The relative difference that is allowed where rounding alone makes less."""
BEGINNING = 1e-3
"""The most that first losses of one precision may be apart, relatively."""
SUMS = 1e-6
"""The most that sums of the same weights may be apart, relatively: they add in another order."""
PARTS = 10
"""Parts of a training whose mean losses are shown."""

Records = Mapping[str, Mapping[str, Any]]
"""What is known of each run, by its name."""


def begins_wrong(records: Records) -> Iterator[str]:
    """Says of each run what keeps it from a comparison.

    The second run of ``alltoall`` in FP8 may be missing, since nothing is judged by it.

    Args:
        records: ``losses``, ``wanted`` (a number of iterations), ``attention`` and ``weights``.
    """
    for run in RUNS:
        record = records.get(run.name)
        if record is None:
            if run is not THEIRS_AGAIN:
                yield f"{run.name} has not run"
            continue
        count = len(record["losses"])
        if count != record["wanted"] or not all(map(math.isfinite, record["losses"])):
            yield f"{run.name} has {count} losses, wanted {record['wanted']} finite ones"
        if not is_fused(record.get("attention", [])):
            yield f"{run.name}: got {record.get('attention')}, wanted fused attention"
        if not are_the_same(record.get("weights"), records.get(BF16.name, {}).get("weights")):
            yield f"{run.name} begins with other weights than {BF16.name}"
        first = BF16 if run in (BF16, BF16_AGAIN) else THEIRS
        others = records.get(first.name, record)["losses"]
        if record["losses"] and others:
            distance = relative(record["losses"][0], others[0])
            if not distance <= BEGINNING:
                yield f"{run.name} begins with a loss {distance:.1e} apart from {first.name}"


def are_the_same(weights: Mapping[str, float] | None, others: Mapping[str, float] | None) -> bool:
    """Whether sums of weights are of the same weights; no sums are of none."""
    if not weights or not others or weights["elements"] != others["elements"]:
        return False
    return all(math.isclose(weights[key], others[key], rel_tol=SUMS) for key in ("sum", "squares"))


def relative(value: float, reference: float) -> float:
    """How far a value is from a reference, relatively."""
    (distance,) = apart([value], [reference])
    return distance


def ends_apart(records: Records) -> tuple[dict[str, float], float]:
    """Compares the means of the last tenth.

    Returns:
        The relative distance of each of our runs from ``alltoall`` in FP8; and what is allowed.
    """
    end = {name: mean_of_last(record["losses"]) for name, record in records.items()}
    band = relative(end[BF16_AGAIN.name], end[BF16.name])
    distances = {run.name: relative(end[run.name], end[THEIRS.name]) for run in OURS}
    return distances, max(band, LEAST_BAND)


def judge(records: Records) -> list[str]:
    """Says what is wrong; nothing if our FP8 ends where that of ``alltoall`` does."""
    wrong = list(begins_wrong(records))
    if wrong:
        return wrong
    distances, allowed = ends_apart(records)
    return [
        f"the last tenth of {name} is {distance:.2%} apart, allowed {allowed:.2%}"
        for name, distance in distances.items()
        if not distance <= allowed
    ]


def means_of(losses: Sequence[float]) -> list[float]:
    """Returns the mean loss of each part of a training, of as many as it has."""
    return [float(np.mean(part)) for part in np.array_split(losses, PARTS) if len(part)]


def table(records: Records) -> list[str]:
    """Returns the lines of tables: means of tenths, and the distances at the end."""
    titles = ("run", "first loss", *(f"{i} of {PARTS}" for i in range(1, PARTS + 1)))
    rows = []
    for run in RUNS:
        losses = records[run.name]["losses"] if run.name in records else []
        means = [f"{mean:.4f}" for mean in means_of(losses)]
        cells = [run.name, f"{losses[0]:.5f}" if losses else "-", *means]
        rows.append(cells + ["-"] * (len(titles) - len(cells)))
    lines = markdown.table(titles, rows)
    ended = {name for name, record in records.items() if len(record["losses"]) == record["wanted"]}
    if ended >= {run.name for run in RUNS} - {THEIRS_AGAIN.name}:
        end = {name: mean_of_last(records[name]["losses"]) for name in ended}
        pairs = [(BF16_AGAIN, BF16), (THEIRS_AGAIN, THEIRS), *((run, THEIRS) for run in OURS)]
        lines += [
            "",
            *markdown.table(
                ("the last tenth of", "apart from", "by"),
                (
                    (run.name, other.name, f"{end[run.name] / end[other.name] - 1:+.3%}")
                    for run, other in pairs
                    if run.name in ended
                ),
            ),
        ]
        lines += ["", f"Allowed: {ends_apart(records)[1]:.3%}."]
    return lines
