"""Makes a card of a model's records: pure functions from records to the text of a card."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.bench_training.curves import apart, within_noise
from tools.bench.cards.arms import Arm, arms_of, row_bound
from tools.bench.cards.models import COUNTED, ITERATIONS, MICRO_BATCHES, Model
from tools.bench.cards.records import Records, is_done

TILE_M = 128
NOT_RUN = "not run"
"""The outcome of an arm without a record."""
SHOWN = (1, 10, 20)
"""Iterations whose losses a card shows."""
MACHINE = ("gpus", "power_limit", "max_sm_clock", "driver", "torch")
"""Facts that have to be the same for the figures of a card to be compared."""
UNFUSED_GRADIENTS = "--no-gradient-accumulation-fusion"
CHOICES = {
    "--overlap-moe-expert-parallel-comm": "the overlap of exchanges with another micro-batch",
    "--moe-shared-expert-overlap": "the overlap of shared experts",
    "--flashmoe-spare-slots": "replicas",
    "--flashmoe-placement": "lookahead",
    "--flashmoe-pre-gate": "pre-gating",
    "--flashmoe-multipath": "multipath",
}
"""Flags that a user may add, and what they switch on; a card names what no arm has."""


@dataclass(frozen=True)
class Speed:
    """The time of an arm, by its iterations that count.

    Attributes:
        seconds: The median iteration.
        range_s: The shortest and the longest.
        tflops: Model TFLOP/s of a GPU, by Megatron's formula.
        tokens_per_s: Tokens a second and GPU.
    """

    seconds: float
    range_s: tuple[float, float]
    tflops: float
    tokens_per_s: float

    @classmethod
    def of(cls, iteration_ms: Sequence[float], flops: float, tokens: int, gpus: int) -> "Speed":
        """The speed of a run.

        Args:
            iteration_ms: The time of each iteration.
            flops: FLOPs of an iteration on all GPUs.
            tokens: Tokens of an iteration on one GPU.
            gpus: The number of GPUs.
        """
        counted = [ms / 1e3 for ms in iteration_ms[ITERATIONS - COUNTED : ITERATIONS]]
        seconds = statistics.median(counted)
        return cls(
            seconds=seconds,
            range_s=(min(counted), max(counted)),
            tflops=flops / gpus / seconds / 1e12,
            tokens_per_s=tokens / seconds,
        )


@dataclass(frozen=True)
class Band:
    """Counts the iterations whose losses are alltoall's as far as rounding goes.

    Attributes:
        inside: Iterations whose losses are.
        of: Iterations that were compared.
        first_outside: The first whose loss is not.
        largest: The largest relative distance.
        has_noise: Whether a run that rounds in another order widens the band of one bfloat16 unit.
    """

    inside: int
    of: int
    first_outside: int | None
    largest: float
    has_noise: bool

    @classmethod
    def between(
        cls, ours: Sequence[float], theirs: Sequence[float], noise: Sequence[float] | None
    ) -> "Band":
        """The band of alltoall's losses, and where ours are."""
        distances = apart(ours, theirs)
        noises = apart(noise, theirs) if noise is not None else [0.0] * len(theirs)
        inside = within_noise(distances, noises)
        finite = [each for each in distances if math.isfinite(each)]
        return cls(
            inside=sum(inside),
            of=len(inside),
            first_outside=None if all(inside) else inside.index(False) + 1,
            largest=max(finite, default=math.nan),
            has_noise=noise is not None,
        )

    @property
    def said(self) -> str:
        """The band in a table."""
        where = "all" if self.inside == self.of else f"{self.inside} of {self.of}"
        rule = "" if self.has_noise else ", by one bf16 unit alone"
        first = "" if self.first_outside is None else f", first outside at {self.first_outside}"
        return f"{where}{first}{rule}"


def row_need(row_blocks: int, model: Model, gpus: int) -> float:
    """The row bound that so many blocks of a rank want: rows over their mean.

    Every expert of the rank may leave a block partly empty; the empty rows need no bound.
    """
    local = model.number("num-experts") // gpus
    mean = model.tokens // MICRO_BATCHES * model.number("moe-router-topk")
    return (row_blocks - local) * TILE_M / mean


def reference_of(arm: Arm) -> str:
    """The arm whose losses an arm's are compared with: flashmoe's in FP8 with alltoall's in FP8."""
    return Arm("alltoall", "pieces", arm.is_forced, "fp8" if arm.has_fp8_experts else "").name


def band_of(arm: Arm, records: Records) -> Band | None:
    """Compares an arm's losses with alltoall's; ``None`` where either has not been run."""
    ours, theirs = records.get(arm.name), records.get(reference_of(arm))
    if not is_done(ours) or not is_done(theirs) or arm.name == reference_of(arm):
        return None
    assert ours is not None
    assert theirs is not None
    noise = records.get(arm.noise)
    count = min(len(ours["losses"]), len(theirs["losses"]))
    noise_losses = None
    # The run that tells the noise is in bfloat16, and so tells none of a pair in FP8.
    has_noise = not arm.has_fp8_experts and arm.name != arm.noise
    if has_noise and noise is not None and noise["ended"] == "complete":
        noise_losses = noise["losses"][:count]
    return Band.between(ours["losses"][:count], theirs["losses"][:count], noise_losses)


def card_of(model: Model, records: Records, gpus: int) -> dict[str, Any]:
    """Makes a card: common facts of all arms, arms with results, and arms that miss."""
    arms = arms_of(model, gpus)
    done = {arm.name: records[arm.name] for arm in arms if is_done(records.get(arm.name))}
    lines = []
    for arm in arms:
        record = done.get(arm.name)
        if record is not None:
            lines.append(line_of(model, arm, record, band_of(arm, records), gpus))
    missing = {
        arm.name: records[arm.name]["ended"] if arm.name in records else NOT_RUN
        for arm in arms
        if arm.name not in done
    }
    return {
        "model": model.title,
        "cuts": model.cuts,
        "num_gpus": gpus,
        "tokens_per_gpu": model.tokens,
        **{key: distinct(done, key) for key in ("commit", "megatron", *MACHINE)},
        "date": sorted({record["date"][:10] for record in done.values()}),
        "unfused_gradients": names_with(UNFUSED_GRADIENTS, lines),
        "shared": {
            name: record["at_once"] for name, record in done.items() if record.get("at_once", 1) > 1
        },
        "off": [said for flag, said in CHOICES.items() if not names_with(flag, lines)],
        "arms": lines,
        "missing": missing,
    }


def names_with(flag: str, lines: list[dict[str, Any]]) -> list[str]:
    """Returns the names of the arms whose commands have a flag."""
    return [line["arm"] for line in lines if flag in line["command"].split()]


def distinct(records: Records, key: str) -> list[Any]:
    """All values that records have for a key; more than one is said on the card."""
    found: list[Any] = []
    for record in records.values():
        if record.get(key) not in found:
            found.append(record.get(key))
    return found


def line_of(
    model: Model, arm: Arm, record: dict[str, Any], band: Band | None, gpus: int
) -> dict[str, Any]:
    """An arm's line of the card."""
    losses = record["losses"]
    line: dict[str, Any] = {
        "arm": arm.name,
        "ended": record["ended"],
        "losses": {i: losses[i - 1] for i in SHOWN if i <= len(losses)},
        "band": None if band is None else band.said,
        "attention": record.get("attention", []),
        "command": record.get("command", ""),
        "machine": {key: record.get(key) for key in MACHINE},
        "date": record["date"],
    }
    for key in ("busy_ms", "peak_gib", "sm_mhz", "watts"):
        line[key] = record.get(key)
    if arm.dispatcher == "flashmoe":
        has_bound = arm.graph == "whole"
        line["row_bound"] = row_bound(gpus) if has_bound else None
        if record.get("row_blocks") and (not has_bound or record["ended"] == "bound"):
            line["row_need"] = round(row_need(record["row_blocks"], model, gpus), 3)
    if record["ended"] == "complete" and "flops" in record:
        speed = Speed.of(record["iteration_ms"], record["flops"], model.tokens, gpus)
        line |= {
            "seconds": round(speed.seconds, 4),
            "seconds_range": [round(each, 4) for each in speed.range_s],
            "tflops": round(speed.tflops, 1),
            "tokens_per_s": round(speed.tokens_per_s),
        }
    else:
        line["iterations"] = len(losses)
    return line
