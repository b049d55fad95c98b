"""The picture of a launch: all ranks above each other, and a few SMs role by role."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from tools.timeline.clock import Events, on_common_axis
from tools.timeline.records import LaunchTrace
from tools.timeline.states import (
    ACTORS,
    NOTHING,
    PRODUCTS,
    Kinds,
    State,
    actors_of_warps,
    paint,
    share,
)
from tools.weak_scaling.style import new_figure, save

SAMPLES = 500
SHOWN_SMS = 3

COLORS = {
    State.GEMM0: "#1b6ca8",
    State.GEMM1: "#5aa9e6",
    State.WEIGHT_GRAD: "#2f4858",
    State.EPILOGUE: "#7fc8a9",
    State.DISPATCH: "#e09f3e",
    State.DELIVER: "#d1495b",
    State.REDUCE: "#8d5a97",
    State.PLAN: "#6b7280",
    State.WAIT: "#e5e7eb",
}
COMPUTE = (*PRODUCTS, State.EPILOGUE)
COMMUNICATION = (State.DISPATCH, State.DELIVER, State.REDUCE)


def draw_launch(launch: LaunchTrace, path: Path) -> list[Path]:
    """Draws a launch.

    Above zero, the share of processor warps in each product over time (and in epilogues, where the
    processors finish their tiles themselves): what is missing to 100 % waits or has ended. Below
    zero, the share of CTAs that move rows. Where both are filled, communication is hidden.

    Args:
        launch: On all its ranks.
        path: Where the figure goes; its ending is replaced.

    Returns:
        The PNG and the SVG.
    """
    kinds = Kinds(launch.roles)
    ranks = on_common_axis(launch)
    last = max(float(events.end.max()) for events in ranks)
    times = (np.arange(SAMPLES) + 0.5) * last / SAMPLES
    height = 1.6 * len(ranks) + 0.26 * _num_role_rows(ranks[0], kinds) + 1.8
    with new_figure(10, height) as figure:
        ratios = [1.6] * len(ranks) + [0.26 * _num_role_rows(ranks[0], kinds)]
        axes = figure.subplots(
            len(ranks) + 1, 1, sharex=True, gridspec_kw={"height_ratios": ratios}, squeeze=False
        )[:, 0]
        for rank, (ax, events) in enumerate(zip(axes, ranks, strict=False)):
            _draw_shares(ax, rank, events, kinds, times)
        _draw_roles(axes[-1], ranks[0], kinds)
        axes[-1].set_xlabel("time since the launch's first stamp on any rank, µs")
        axes[-1].set_xlim(0, last)
        handles = [
            Patch(facecolor=COLORS[state], label=state.value)
            for state in (*COMPUTE, *COMMUNICATION, State.WAIT)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        figure.suptitle(_title(launch, last))
        return save(figure, path)


def tensor_share(events: Events, kinds: Kinds, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of processor warps that are in a product at each moment, waits within it left out."""
    painted = _painted(events, kinds, times, ("processor",))
    return sum(share(painted, state) for state in PRODUCTS)


def communication_shares(
    events: Events, kinds: Kinds, times: NDArray[np.float64]
) -> dict[State, NDArray[np.float64]]:
    """Shares of CTAs that move rows, by how they do.

    A CTA moves rows while at least one of its warps does; one that does so in several ways counts
    for each with an equal part, so that all shares together are that of CTAs that move any.
    """
    warps = _warps_of(events, kinds, ACTORS)
    painted = paint(events, kinds, {pair: row for row, pair in enumerate(warps)}, times)
    busy = np.zeros((len(COMMUNICATION), len(events.sm), len(times)), dtype=bool)
    for row, (cta, _) in enumerate(warps):
        for at, state in enumerate(COMMUNICATION):
            busy[at, cta] |= painted[row] == list(State).index(state)
    ways = np.maximum(busy.sum(axis=0), 1)
    return {state: (busy[at] / ways).mean(axis=0) for at, state in enumerate(COMMUNICATION)}


def _draw_shares(
    ax: Axes, rank: int, events: Events, kinds: Kinds, times: NDArray[np.float64]
) -> None:
    painted = _painted(events, kinds, times, ("processor",))
    above = [100 * share(painted, state) for state in (*COMPUTE, State.WAIT)]
    colors = [COLORS[state] for state in (*COMPUTE, State.WAIT)]
    ax.stackplot(times, above, colors=colors, linewidth=0)
    below = np.zeros(len(times))
    for state, value in communication_shares(events, kinds, times).items():
        lower = below + 100 * value
        ax.fill_between(times, -below, -lower, color=COLORS[state], linewidth=0)
        below = lower
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_ylim(-105, 105)
    ax.set_yticks([-100, -50, 0, 50, 100], ["100", "", "0", "", "100"])
    ax.grid(visible=False)
    ax.set_ylabel("links | compute\n% of SMs", fontsize=10)
    fed = float(tensor_share(events, kinds, times).mean())
    ax.set_title(f"rank {rank}: in products {fed:.0%} of the time", loc="left", fontsize=10.5)


def _draw_roles(ax: Axes, events: Events, kinds: Kinds) -> None:
    """A few SMs of one rank, every role a line."""
    labels = []
    lines = _role_rows(events, kinds)
    for line, (cta, warp, actor) in enumerate(lines):
        mine = (events.cta == cta) & (events.warp == warp)
        for is_inner in (False, True):
            for state in State:
                if (state is State.WAIT) != is_inner:
                    continue
                chosen = mine & np.isin(events.kind, kinds.of(state))
                if not chosen.any():
                    continue
                begin, end = events.begin[chosen], events.end[chosen]
                ax.broken_barh(
                    list(zip(begin, end - begin, strict=True)),
                    (line - 0.4, 0.8),
                    facecolors=COLORS[state],
                    linewidth=0,
                    rasterized=True,  # there are thousands
                )
        labels.append(f"SM {events.sm[cta]} {actor}")
    ax.set_yticks(range(len(labels)), labels, fontsize=9.5)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_ylabel("rank 0, some SMs")
    ax.grid(visible=False)
    for line in range(1, len(lines)):
        if lines[line][0] != lines[line - 1][0]:
            ax.axhline(line - 0.5, color="black", linewidth=0.6)


def _role_rows(events: Events, kinds: Kinds) -> list[tuple[int, int, str]]:
    """CTA, warp and name of every line of the lower picture: each role of a few CTAs once."""
    actors = actors_of_warps(events, kinds)
    ctas = sorted({cta for cta, _ in actors})
    shown = [ctas[round(at)] for at in np.linspace(0, len(ctas) - 1, min(SHOWN_SMS, len(ctas)))]
    found = []
    for cta in dict.fromkeys(shown):
        first: dict[str, int] = {}
        for (of_cta, warp), actor in sorted(actors.items()):
            if of_cta == cta:
                first.setdefault(actor, warp)
        found += [(cta, first[actor], actor) for actor in ACTORS if actor in first]
    return found


def _num_role_rows(events: Events, kinds: Kinds) -> int:
    return len(_role_rows(events, kinds))


def _warps_of(events: Events, kinds: Kinds, wanted: tuple[str, ...]) -> list[tuple[int, int]]:
    actors = actors_of_warps(events, kinds)
    return sorted(pair for pair, actor in actors.items() if actor in wanted)


def _painted(
    events: Events, kinds: Kinds, times: NDArray[np.float64], wanted: tuple[str, ...]
) -> NDArray[np.int8]:
    warps = _warps_of(events, kinds, wanted)
    if not warps:
        return np.full((1, len(times)), NOTHING, dtype=np.int8)
    return paint(events, kinds, {pair: row for row, pair in enumerate(warps)}, times)


def _title(launch: LaunchTrace, last: float) -> str:
    about = launch.about
    shape = about.get("shape", {})
    parts = ", ".join(f"{name}={shape[name]}" for name in shape)
    return (
        f"{about.get('direction', 'launch')}, {about.get('name', '')} on {len(launch.ranks)} x "
        f"{about.get('gpu', 'GPU')}: {last:.0f} µs\n{parts}"
    )
