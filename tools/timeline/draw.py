"""The picture of a launch: all ranks above each other, and a few SMs role by role."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.patches import Patch
from numpy.typing import NDArray

from flashmoe_megatron.bench.style import new_figure, save
from tools.timeline.clock import on_common_axis
from tools.timeline.records import LaunchTrace
from tools.timeline.states import ACTORS, NOTHING, PRODUCTS, Kinds, Painted, State, paint

SAMPLES = 1000  # over the picture's ten inches
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
        path: Where the figure goes, without an ending.

    Returns:
        The PNG and the SVG.
    """
    kinds = Kinds(launch.roles)
    ranks = on_common_axis(launch)
    last = max(float(events.end.max()) for events in ranks)
    times = (np.arange(SAMPLES) + 0.5) * last / SAMPLES
    painted = [paint(events, kinds, times) for events in ranks]
    lines = _role_lines(painted[0])
    heights = [1.6] * len(ranks) + [0.26 * len(lines)]
    with new_figure(10, sum(heights) + 1.8) as figure:
        axes = figure.subplots(
            len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights}, squeeze=False
        )[:, 0]
        for rank, (ax, one) in enumerate(zip(axes, painted, strict=False)):
            _draw_shares(ax, rank, one, times)
        _draw_roles(axes[-1], painted[0], lines, ranks[0].sm, last)
        axes[-1].set_xlabel("time since the launch's first stamp on any rank, µs")
        axes[-1].set_xlim(0, last)
        handles = [
            Patch(facecolor=COLORS[state], label=state.value)
            for state in (*COMPUTE, *COMMUNICATION, State.WAIT)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=(len(handles) + 1) // 2)
        figure.suptitle(_title(launch, last))
        return save(figure, path)


def tensor_share(painted: Painted) -> NDArray[np.float64]:
    """Share of processor warps that are in a product at each moment, waits within it left out."""
    shares = [painted.share(state, "processor") for state in PRODUCTS]
    total: NDArray[np.float64] = np.sum(shares, axis=0)
    return total


def communication_shares(painted: Painted) -> dict[State, NDArray[np.float64]]:
    """Shares of CTAs that move rows, by how they do.

    A CTA moves rows while at least one of its warps does; a CTA that does so in several ways counts
    for each with an equal part, so that all shares together are that of CTAs that move any.
    """
    number, of_cta = np.unique([cta for cta, _, _ in painted.warps], return_inverse=True)
    busy = np.zeros((len(COMMUNICATION), len(number), painted.states.shape[1]), dtype=bool)
    for at, state in enumerate(COMMUNICATION):
        np.logical_or.at(busy[at], of_cta, painted.states == list(State).index(state))
    ways = np.maximum(busy.sum(axis=0), 1)
    return {state: (busy[at] / ways).mean(axis=0) for at, state in enumerate(COMMUNICATION)}


def _draw_shares(ax: Axes, rank: int, painted: Painted, times: NDArray[np.float64]) -> None:
    shown = (*COMPUTE, State.WAIT)
    above = [100 * painted.share(state, "processor") for state in shown]
    ax.stackplot(times, above, colors=[COLORS[state] for state in shown], linewidth=0)
    shares = communication_shares(painted)
    below = [-100 * share for share in shares.values()]
    ax.stackplot(times, below, colors=[COLORS[state] for state in shares], linewidth=0)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_ylim(-105, 105)
    ax.set_yticks([-100, -50, 0, 50, 100], ["100", "", "0", "", "100"])
    ax.grid(visible=False)
    ax.set_ylabel("links | compute\n% of SMs", fontsize=10)
    fed = float(tensor_share(painted).mean())
    ax.set_title(f"rank {rank}: in products {fed:.0%} of the time", loc="left", fontsize=10.5)


def _role_lines(painted: Painted) -> list[int]:
    """The rows of the lower picture: the first warp of each role of a few CTAs."""
    ctas = sorted({cta for cta, _, _ in painted.warps})
    shown = {ctas[round(at)] for at in np.linspace(0, len(ctas) - 1, SHOWN_SMS)}
    first: dict[tuple[int, int], int] = {}
    for row, (cta, _, actor) in enumerate(painted.warps):
        if cta in shown:
            first.setdefault((cta, ACTORS.index(actor)), row)
    return [first[line] for line in sorted(first)]


def _draw_roles(
    ax: Axes, painted: Painted, lines: list[int], sm: NDArray[np.int64], last: float
) -> None:
    """A few SMs of one rank, every role a line."""
    colors = to_rgba_array([*(COLORS[state] for state in State), "white"])
    assert NOTHING == -1  # white is the last color
    ax.imshow(
        colors[painted.states[lines]],
        aspect="auto",
        interpolation="nearest",
        extent=(0, last, len(lines) - 0.5, -0.5),
    )
    named = [painted.warps[row] for row in lines]
    ax.set_yticks(range(len(lines)), [f"SM {sm[cta]} {actor}" for cta, _, actor in named])
    ax.tick_params(axis="y", labelsize=9.5)
    ax.set_ylabel("rank 0, some SMs")
    ax.grid(visible=False)
    for line in range(1, len(lines)):
        is_next = named[line][0] != named[line - 1][0]
        ax.axhline(line - 0.5, color="black" if is_next else "white", linewidth=1 if is_next else 2)


def _title(launch: LaunchTrace, last: float) -> str:
    about = launch.about
    shape = about.get("shape", {})
    parts = ", ".join(f"{name}={shape[name]}" for name in shape)
    parts += f"\n{launch.incomplete}" if launch.incomplete else ""
    return (
        f"{about.get('direction', 'launch')}, {about.get('name', '')} on {len(launch.ranks)} x "
        f"{about.get('gpu', 'GPU')}: {last:.0f} µs\n{parts}"
    )
