"""Tells in numbers where a launch's time goes: rounds of tiles, work, waits, and the end."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.timeline.clock import Events, on_common_axis
from tools.timeline.records import LaunchTrace, TraceError
from tools.timeline.states import PRODUCTS, Kinds, State

APART_US = 1e7  # between the axes of two warps when all are laid end to end; longer than a launch


@dataclass(frozen=True)
class Round:
    """The nth tile of every processor warp. Times are means, in microseconds.

    Attributes:
        number: From 0.
        tiles: Warps that have an nth tile, as a share of all.
        begin: Since the launch's first stamp.
        duration: How long the product takes.
        waited: For operands, within the product.
        gap: From the product's end to the next one's begin; 0 after a warp's last.
        handover: Waited within the gap until a finisher has taken the outputs.
    """

    number: int
    tiles: float
    begin: float
    duration: float
    waited: float
    gap: float
    handover: float


@dataclass(frozen=True)
class Ending:
    """The times at which things end, in microseconds since the launch's first stamp.

    Attributes:
        products: When CTAs end their last product: the first tenth, the median and the last.
        finisher: The last epilogue.
        launch: The last event.
    """

    products: tuple[float, float, float]
    finisher: float
    launch: float


def _products(events: Events, kinds: Kinds) -> NDArray[np.bool_]:
    products = np.isin(events.kind, kinds.of(*PRODUCTS))
    if not products.any():
        raise TraceError("the launch has no products")
    return products


def _end_to_end(events: Events) -> NDArray[np.float64]:
    """Each event's begin on an axis on which the warps of all CTAs follow one another."""
    _, warp = np.unique(np.stack([events.cta, events.warp], 1), axis=0, return_inverse=True)
    placed: NDArray[np.float64] = warp.ravel() * APART_US + events.begin
    return placed


def rounds(events: Events, kinds: Kinds) -> list[Round]:
    """The tiles of one rank, by their number in their warp.

    Raises:
        TraceError: There is no product among the events.
    """
    placed = _end_to_end(events)
    products = np.flatnonzero(_products(events, kinds))
    products = products[np.argsort(placed[products])]
    at, end = placed[products], placed[products] + (events.end - events.begin)[products]
    of_warp = np.floor(at / APART_US)
    first = np.searchsorted(of_warp, of_warp)
    number = np.arange(len(products)) - first
    is_followed = np.append(of_warp[1:] == of_warp[:-1], False)
    gap = np.where(is_followed, np.append(at[1:], 0.0) - end, 0.0)

    def waits(name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns, by product, the wait within it and the gap after it until the next."""
        chosen = np.isin(events.kind, kinds.named(name))
        begin, length = placed[chosen], (events.end - events.begin)[chosen]
        owner = np.searchsorted(at, begin, side="right") - 1
        is_owned = (owner >= 0) & (np.floor(begin / APART_US) == of_warp[owner])
        is_within = is_owned & (begin < end[owner])
        is_behind = is_owned & ~is_within & is_followed[owner]

        def total(which: NDArray[np.bool_]) -> NDArray[np.float64]:
            return np.bincount(owner[which], length[which], len(products))

        return total(is_within), total(is_behind)

    waited, _ = waits("kProcessorStage")
    _, handover = waits("kProcessorHandover")
    found = []
    for nth in range(int(number.max()) + 1):
        has = number == nth
        means = [float(values[has].mean()) for values in (end - at, waited, gap, handover)]
        begin = float(events.begin[products][has].mean())
        found.append(Round(nth, float(has.sum() / (number == 0).sum()), begin, *means))
    return found


def durations(events: Events, kinds: Kinds, *states: State) -> dict[str, NDArray[np.float64]]:
    """Microseconds of all events of one rank in some states, by role, in the roles' order."""
    found = {
        kinds.names[kind]: (events.end - events.begin)[events.kind == kind]
        for kind in kinds.of(*states)
    }
    return {name: lengths for name, lengths in found.items() if len(lengths)}


def ending(events: Events, kinds: Kinds) -> Ending:
    """The end of one rank's launch.

    Raises:
        TraceError: There is no product among the events.
    """
    products = _products(events, kinds)
    epilogues = np.isin(events.kind, kinds.of(State.EPILOGUE))
    last = [events.end[products & (events.cta == cta)].max() for cta in set(events.cta[products])]
    tenth, median, end = np.percentile(last, [10, 50, 100])
    finisher = events.end[epilogues].max() if epilogues.any() else np.nan
    return Ending((float(tenth), float(median), float(end)), float(finisher), events.end.max())


def summary(launch: LaunchTrace) -> list[str]:
    """All ranks' tables, in Markdown.

    Raises:
        TraceError: A rank has no product.
    """
    kinds = Kinds(launch.roles)
    lines = [f"# {launch.about.get('name')}, {launch.about.get('direction')}; microseconds"]
    if launch.incomplete:
        lines += ["", f"{launch.incomplete}."]
    for rank, events in enumerate(on_common_axis(launch)):
        end = ending(events, kinds)
        tenth, median, last = end.products
        lines += [
            "",
            f"## Rank {rank}",
            "",
            f"Last products end at {tenth:.1f} (a tenth of the CTAs), {median:.1f} (half) and "
            f"{last:.1f}, the last epilogue at {end.finisher:.1f}, the launch at {end.launch:.1f}.",
            "",
            "| tile | of the warps | begin | product | waits for operands | gap | hands over |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {one.number} | {one.tiles:.2f} | {one.begin:.1f} | {one.duration:.2f} | "
            f"{one.waited:.2f} | {one.gap:.2f} | {one.handover:.2f} |"
            for one in rounds(events, kinds)
        ]
        num_ctas = len(np.unique(events.cta))
        lines += ["", "| work | a CTA | 10 % | median | 90 % |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for name, lengths in durations(events, kinds, *PRODUCTS, State.EPILOGUE).items():
            shown = " | ".join(f"{length:.2f}" for length in np.percentile(lengths, [10, 50, 90]))
            lines.append(f"| {name.removeprefix('k')} | {len(lengths) / num_ctas:.1f} | {shown} |")
        lines += ["", "| wait | a CTA | its time |", "| --- | --- | --- |"]
        waits = durations(events, kinds, State.WAIT)
        for name in sorted(waits, key=lambda name: -waits[name].sum()):
            count, time = len(waits[name]) / num_ctas, waits[name].sum() / num_ctas
            lines.append(f"| {name.removeprefix('k')} | {count:.1f} | {time:.1f} |")
    return lines
