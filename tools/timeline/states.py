"""The meaning of events: groups of the kernel's roles, and which warp was in which group when."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tools.timeline.clock import Events


class State(Enum):
    """The states that a reader tells apart; a value is how a figure names it."""

    GEMM0 = "GEMM0"
    GEMM1 = "GEMM1"
    WEIGHT_GRAD = "weight gradients"
    EPILOGUE = "epilogue"
    DISPATCH = "dispatch"
    DELIVER = "combine: deliver"
    REDUCE = "combine: reduce"
    PLAN = "plan"
    WAIT = "wait"


PRODUCTS = (State.GEMM0, State.GEMM1, State.WEIGHT_GRAD)
"""States that keep the tensor cores busy."""

OUTER = {
    "kGemm0": State.GEMM0,
    "kGemm1": State.GEMM1,
    "kWeightGrad": State.WEIGHT_GRAD,
    "kEpilogue0": State.EPILOGUE,
    "kEpilogue1": State.EPILOGUE,
    "kStoreGrad": State.EPILOGUE,
    "kDispatch": State.DISPATCH,
    "kDispatchCopy": State.DISPATCH,  # a row on its way is what dispatching is
    "kDeliver": State.DELIVER,
    "kReduce": State.REDUCE,
    "kPlan": State.PLAN,
}
"""Roles that work; all others are waits, or spans around what is recorded in detail anyway."""
SPANS = ("kProcess", "kFinish")

ACTORS = ("loader", "dispatch", "finisher", "processor", "combine")


@dataclass(frozen=True)
class Kinds:
    """The kinds of a launch's events by meaning."""

    names: Mapping[int, str]

    def state(self, kind: int) -> State | None:
        """The state of a kind, ``None`` if it tells nothing of its own."""
        name = self.names.get(kind, "")
        if name in SPANS:
            return None
        return OUTER.get(name, State.WAIT)

    def of(self, *states: State) -> list[int]:
        """All kinds in one of some states."""
        return [kind for kind in self.names if self.state(kind) in states]

    def named(self, *names: str) -> list[int]:
        """All kinds of some names."""
        return [kind for kind, name in self.names.items() if name in names]

    def title(self, kind: int) -> str:
        """How a trace names an event."""
        name = self.names.get(kind, f"kind {kind}").removeprefix("k")
        return f"wait: {name}" if self.state(kind) is State.WAIT else name


def actors_of_warps(events: Events, kinds: Kinds) -> dict[tuple[int, int], str]:
    """Names each warp's role, as its events show it rather than its number.

    All warps copy a launch's first rows, so having dispatched says least.

    Returns:
        By CTA and warp; warps without events are left out.
    """
    marks = {
        "processor": kinds.of(*PRODUCTS),
        "dispatch": kinds.named("kDispatch"),
        "loader": [k for k, name in kinds.names.items() if name.startswith("kLoader")],
        "finisher": kinds.of(State.EPILOGUE),
    }
    found: dict[tuple[int, int], str] = {
        (int(cta), int(warp)): "combine"
        for cta, warp in np.unique(np.stack([events.cta, events.warp], 1), axis=0)
    }
    for actor in ("dispatch", "finisher", "loader", "processor"):  # the last one wins
        has = np.isin(events.kind, marks[actor])
        pairs = np.unique(np.stack([events.cta[has], events.warp[has]], 1), axis=0)
        found.update({(int(cta), int(warp)): actor for cta, warp in pairs})
    return found


NOTHING = -1


@dataclass(frozen=True)
class Painted:
    """The activity of a rank's warps at some moments.

    Attributes:
        warps: CTA, warp and role of every row, ascending.
        states: ``[warps, times]`` int8, each state's position in :class:`State`, or ``NOTHING``.
    """

    warps: list[tuple[int, int, str]]
    states: NDArray[np.int8]

    def share(self, state: State, actor: str) -> NDArray[np.float64]:
        """The share of a role's warps that is in a state, over time."""
        rows = [row for row, (_, _, name) in enumerate(self.warps) if name == actor]
        found: NDArray[np.float64] = (self.states[rows] == list(State).index(state)).sum(axis=0)
        return found / max(len(rows), 1)


def paint(events: Events, kinds: Kinds, times: NDArray[np.float64]) -> Painted:
    """Paints what every warp of a rank does at some moments.

    A wait lies inside the work that it interrupts, and hides it.

    Args:
        events: One rank's events.
        kinds: The launch's kinds of events.
        times: Ascending, microseconds.
    """
    actors = sorted(actors_of_warps(events, kinds).items())
    rows = {pair: row for row, (pair, _) in enumerate(actors)}
    states = np.full((len(rows), len(times)), NOTHING, dtype=np.int8)
    code = {state: number for number, state in enumerate(State)}
    state_of = {int(k): kinds.state(int(k)) for k in np.unique(events.kind)}
    begin = np.searchsorted(times, events.begin)
    end = np.searchsorted(times, events.end)
    for is_inner in (False, True):
        for at in np.flatnonzero(end > begin):
            state = state_of[int(events.kind[at])]
            if state is None or (state is State.WAIT) != is_inner:
                continue
            row = rows[int(events.cta[at]), int(events.warp[at])]
            states[row, begin[at] : end[at]] = code[state]
    return Painted([(cta, warp, actor) for (cta, warp), actor in actors], states)
