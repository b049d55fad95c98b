"""Traces for Perfetto and chrome://tracing: a process per rank, a track per SM and role."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from tools.timeline.clock import on_common_axis
from tools.timeline.records import LaunchTrace
from tools.timeline.states import ACTORS, Kinds, State, actors_of_warps

SHORTEST_US = 0.2
"""Shorter waits are left out, since there are very many."""
TRACKS_PER_SM = 16  # more than a CTA has warps
WARPS_OF_WARPGROUP = 4


def write_chrome_trace(launch: LaunchTrace, path: Path, shortest_us: float = SHORTEST_US) -> int:
    """Writes the events of one warp of every role and SM.

    The warps of a warpgroup do the same at the same time, so one stands for each; of warps
    without another part, one combines for all. Slices of one track lie inside each other, never
    across.

    Args:
        launch: On all its ranks.
        path: Ends with ``.json.gz``.
        shortest_us: Waits below it are left out.

    Returns:
        The number of slices.
    """
    kinds = Kinds(launch.roles)
    trace: list[dict[str, Any]] = []
    slices = 0
    for rank, events in enumerate(on_common_axis(launch)):
        trace.append(_name("process_name", rank, 0, f"rank {rank}"))
        tracks = _tracks(actors_of_warps(events, kinds))
        for (cta, _), (actor, number) in sorted(tracks.items()):
            sm = int(events.sm[cta])
            track = sm * TRACKS_PER_SM + number
            trace.append(_name("thread_name", rank, track, f"SM {sm:3d} {actor}"))
            sort = {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": track}
            trace.append({**sort, "args": {"sort_index": track}})
        for at in np.lexsort((-events.end, events.begin)):
            found = tracks.get((int(events.cta[at]), int(events.warp[at])))
            kind = int(events.kind[at])
            state = kinds.state(kind)
            duration = float(events.end[at] - events.begin[at])
            if found is None or state is None or (state is State.WAIT and duration < shortest_us):
                continue
            slices += 1
            trace.append(
                {
                    "name": kinds.title(kind),
                    "cat": state.name.lower(),
                    "ph": "X",
                    "pid": rank,
                    "tid": int(events.sm[events.cta[at]]) * TRACKS_PER_SM + found[1],
                    "ts": round(float(events.begin[at]), 3),
                    "dur": round(duration, 3),
                    "args": {"index": int(events.index[at])},
                }
            )
    document = {"traceEvents": trace, "displayTimeUnit": "ns", "otherData": launch.about}
    with gzip.open(path, "wt") as file:
        json.dump(document, file, separators=(",", ":"))
    return slices


def _tracks(actors: dict[tuple[int, int], str]) -> dict[tuple[int, int], tuple[str, int]]:
    """The warps that get a track, each with its name and its place within its SM."""
    chosen: dict[int, dict[str, tuple[int, int]]] = {}
    for (cta, warp), actor in sorted(actors.items()):
        name = actor
        if actor == "processor":
            name = f"{actor} {warp // WARPS_OF_WARPGROUP}"
        elif actor == "finisher":
            name = f"{actor} {warp}"
        chosen.setdefault(cta, {}).setdefault(name, (ACTORS.index(actor), warp))
    return {
        (cta, warp): (name, place)
        for cta, names in chosen.items()
        for place, (name, (_, warp)) in enumerate(sorted(names.items(), key=lambda item: item[1]))
    }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
