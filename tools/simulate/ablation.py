"""FSMoE's 1,458 layers by the model of streams, and what each part of its schedule brings.

A layer is attention and experts of a model with many such layers. Its ranks share experts within
hosts, so that rows travel between hosts to their experts, are gathered within them, and come back
the same two ways. A backward has twice the products of a forward, and an all-reduce between hosts
of the attention's gradients. In a model of many layers each of them has to carry as much of that
reduction as it makes.

Four schedules are compared. Each adds to the one before:

- fixed: one degree for both passes, exchanges between and within hosts one after the other, and
  the reduction after the backward, as in Tutel
- improved: the reduction is concurrent with the attention's backward
- one stream: a degree of its own each way, and the reduction also in the gap of the experts'
  backward, as FSMoE without overlap of both kinds of exchanges
- all: exchanges between hosts are concurrent with those within
"""

import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flashmoe_megatron.measured.fit import Line
from flashmoe_megatron.separate.degree import Pass, Stage, time_of
from tools import markdown

SCHEDULES = ("fixed", "improved", "one stream", "all")
PUBLISHED = {"fixed": (1.0, 1.0), "improved": (1.09, 1.08), "one stream": (1.12, 1.16)} | {
    "all": (1.18, 1.22)
}
"""Speeds that FSMoE's authors measured on their machines of 48 and of 32 GPUs."""
PUBLISHED_DIFFERENT = 912
"""Layers whose best degrees differ between forward and backward there."""
DEGREES = (1, 2, 4, 8)
SHARDS = 8
"""Ranks that share an expert and an attention, which are those of a host."""
KEY_VALUE_HEADS = 8
CUTS = 8
"""A reduction is cut into so many pieces, and the gap takes some of them."""


@dataclass(frozen=True)
class Constants:
    """The lines of a machine; sizes are numbers of a rank's larger buffer, and multiply-adds."""

    name: str
    all_to_all: Line
    all_gather: Line
    reduce_scatter: Line
    all_reduce: Line
    product: Line


def _line(alpha_ms: float, beta_ms: float) -> Line:
    return Line(alpha_ms / 1e3, beta_ms / 1e3, 1.0)


def _measured(alpha_us: float, per_second: float, units: int = 2) -> Line:
    """A line of a record for numbers of two bytes, or for the two operations of a multiply-add."""
    return Line(alpha_us / 1e6, units / per_second, 1.0)


FSMOE = Constants(
    "by FSMoE's constants",
    all_to_all=_line(0.23515350484, 1.8543323833e-06),
    all_gather=_line(0.0549, 6.72388e-07),
    reduce_scatter=_line(0.0688, 6.70433e-07),
    all_reduce=_line(0.34099276392, 3.4950701465e-06),
    product=_line(0.591943532, 5.6847387697e-11),
)
"""The constants of the authors' program (github.com/xpan413/FSMoE, tools/optim.py)."""
OURS = Constants(
    "by those of two H100s",
    all_to_all=_measured(121, 3.96e9),
    all_gather=_measured(17.9, 4.68e11),
    reduce_scatter=_measured(14.2, 4.43e11),
    all_reduce=_measured(155, 2.68e9),
    product=_measured(18.6, 7.20e14),
)
"""Sockets between hosts and NVLink within, of the record of 25 November (2026-11-h100-2x.md)."""
MACHINES = (FSMOE, OURS)


@dataclass(frozen=True)
class Layer:
    """One of the layers.

    Attributes:
        factor: Rows that are computed, as a multiple of the tokens.
        ratio: The experts' width over the model's.
        heads: The attention's; those of GPT all have keys and values, those of Mixtral share 8.
        mixtral: Whether experts and attention are Mixtral's, else GPT's.
    """

    batch: int
    length: int
    width: int
    factor: float
    ratio: int
    heads: int
    mixtral: bool

    @property
    def attention_numbers(self) -> float:
        """Numbers of an attention's weights on one rank."""
        shared = KEY_VALUE_HEADS / self.heads if self.mixtral else 1
        return (2 + 2 * shared) * self.width**2 / SHARDS

    def attention_s(self, constants: Constants) -> float:
        """Returns the seconds of the attention's forward."""
        tokens = self.batch * self.length
        scores = 2 * self.batch * self.length**2 * self.width / SHARDS
        return constants.product.time_s(tokens * self.attention_numbers + scores)

    def passes(self, constants: Constants) -> tuple[Pass, Pass]:
        """Returns the experts' forward and backward."""
        numbers = self.factor * self.batch * self.length * self.width
        products = (3 if self.mixtral else 2) * numbers * self.ratio * self.width / SHARDS

        def stage(name: str, stream: str, line: Line, size: float, times: int = 1) -> Stage:
            return Stage(name, stream, times * line.alpha_s, times * size * line.beta_s)  # type: ignore[arg-type]

        def one(times: int) -> Pass:
            dispatch, combine = (
                stage(name, "between", constants.all_to_all, numbers / SHARDS)
                for name in ("dispatch", "combine")
            )
            gather = stage("gather", "within", constants.all_gather, numbers)
            scatter = stage("scatter", "within", constants.reduce_scatter, numbers)
            experts = stage("experts", "compute", constants.product, products, times)
            return Pass((dispatch, gather), experts, (scatter, combine))

        return one(1), one(2)


def layers() -> Iterator[Layer]:
    """All 1,458; the factors are those of top-2 with capacity factors, and without a capacity."""
    for sizes in itertools.product(
        (1, 2, 4),
        (512, 1024, 2048),
        (1024, 2048, 4096),
        (2.4, 4.8, 2.0),
        (2, 3, 4),
        (8, 16, 32),
        (False, True),
    ):
        yield Layer(*sizes)


@dataclass(frozen=True)
class Outcome:
    """The times of one layer by the model.

    Attributes:
        times_s: Seconds of each schedule, forward and backward, with the attention's.
        degrees: The best degrees of forward and backward with all.
        alike_s: Seconds with all but one degree for both passes.
    """

    times_s: dict[str, float]
    degrees: tuple[int, int]
    alike_s: float


def outcome(layer: Layer, constants: Constants) -> Outcome:
    """Plays a layer's schedules."""
    attention_s = layer.attention_s(constants)
    reduced = layer.attention_numbers
    apart = layer.passes(constants)
    joined = tuple(_on_one_stream(one) for one in apart)
    behind_s = 2 * attention_s
    whole_s = constants.all_reduce.time_s(reduced)

    def backward_s(one: Pass, degree: int) -> float:
        """A backward with the best part of the reduction in its gap, and the rest after it."""
        found = []
        for cut in range(CUTS + 1):
            inside, outside = (reduced * each / CUTS for each in (cut, CUTS - cut))
            inside_s, outside_s = (
                constants.all_reduce.time_s(size) if size else 0.0 for size in (inside, outside)
            )
            gap = replace(one, slices_s=inside_s)
            found.append(time_of(gap, degree) + max(behind_s, outside_s))
        return min(found)

    moe = {degree: [time_of(one, degree) for one in joined] for degree in DEGREES}
    least = min(sum(times) for times in moe.values()) + attention_s
    of_one, of_both = (
        [
            {degree: time_of(forward, degree) for degree in DEGREES},
            {degree: backward_s(backward, degree) for degree in DEGREES},
        ]
        for forward, backward in (joined, apart)
    )
    times_s = {
        "fixed": least + behind_s + whole_s,
        "improved": least + max(behind_s, whole_s),
        "one stream": attention_s + sum(min(times.values()) for times in of_one),
        "all": attention_s + sum(min(times.values()) for times in of_both),
    }
    forward, backward = (min(times, key=times.__getitem__) for times in of_both)
    alike_s = attention_s + min(sum(times[degree] for times in of_both) for degree in DEGREES)
    return Outcome(times_s, (forward, backward), alike_s)


def _on_one_stream(one: Pass) -> Pass:
    """The same pass where a part's exchanges between and within hosts follow each other."""

    def joined(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        alpha_s, whole_s = (
            sum(getattr(stage, name) for stage in stages) for name in ("alpha_s", "whole_s")
        )
        return (Stage("exchange", "between", alpha_s, whole_s),)

    return replace(one, there=joined(one.there), back=joined(one.back))


@dataclass(frozen=True)
class Summary:
    """All layers on one machine.

    Attributes:
        speedups: The mean over layers of each schedule's speed over that of "fixed".
        num_layers: How many layers there are.
        different: Those whose best degrees differ between forward and backward.
        alike: What degrees of their own each way bring over one for both, in the mean.
        alike_most: The same for the layer with most.
    """

    speedups: dict[str, float]
    num_layers: int
    different: int
    alike: float
    alike_most: float


def summarize(chosen: Sequence[Layer], constants: Constants) -> Summary:
    """Plays layers on a machine. Several may be the same to the model, which plays these once."""
    played = functools.cache(outcome)
    found = [
        played(replace(one, heads=one.heads if one.mixtral else KEY_VALUE_HEADS), constants)
        for one in chosen
    ]
    gains = [one.alike_s / one.times_s["all"] for one in found]
    return Summary(
        {
            name: statistics.fmean(one.times_s["fixed"] / one.times_s[name] for one in found)
            for name in SCHEDULES
        },
        len(found),
        sum(one.degrees[0] != one.degrees[1] for one in found),
        statistics.fmean(gains),
        max(gains),
    )


def table(by_machine: dict[str, Summary]) -> list[str]:
    """The speeds and the published ones, and what degrees of their own bring."""
    titles = ["schedule", "FSMoE, 48 GPUs", "FSMoE, 32 GPUs", *by_machine]
    rows = [
        [
            name,
            *(f"{one:.2f}" for one in PUBLISHED[name]),
            *(f"{one.speedups[name]:.2f}" for one in by_machine.values()),
        ]
        for name in SCHEDULES
    ]
    lines = markdown.table(titles, rows)
    for name, one in by_machine.items():
        lines += [
            "",
            f"{name[0].upper()}{name[1:]} {one.different} of {one.num_layers} layers have degrees "
            f"of their own each way (FSMoE: {PUBLISHED_DIFFERENT} of 1458), which bring "
            f"{100 * (one.alike - 1):.1f} % in the mean and {100 * (one.alike_most - 1):.1f} % at "
            "most over one degree for both.",
        ]
    return lines
