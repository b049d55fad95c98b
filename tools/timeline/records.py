"""Traced launches as data: from the kernel's buffer to arrays, and to a file and back.

The buffer is what ``csrc/flashmoe/ptx/trace.cuh`` declares: for every warp of every CTA a header
and a fixed number of events, whose first ``count`` are valid. Files keep the valid ones
alone, relative to their warp's first stamp, and the names of the roles that the kernel was built
with.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from tools.bench.common import ROOT

TRACE_HEADER = ROOT / "csrc" / "flashmoe" / "ptx" / "trace.cuh"
KINDS_HEADER = ROOT / "csrc" / "flashmoe" / "comm" / "kinds.cuh"
FORMAT = 1

EVENT = np.dtype([("kind", "<u4"), ("index", "<i4"), ("begin", "<i8"), ("end", "<i8")])


class TraceError(Exception):
    """A trace cannot be read."""


@dataclass(frozen=True)
class Layout:
    """The buffer's size parameters.

    Attributes:
        warps: Warps of a CTA.
        events: Kept of a warp at most.
    """

    warps: int
    events: int

    @property
    def warp_dtype(self) -> np.dtype[Any]:
        """One ``TraceWarp``."""
        return np.dtype(
            [
                ("nanoseconds", "<u8"),
                ("cycles", "<i8"),
                ("count", "<u4"),
                ("sm", "<u4"),
                ("event", EVENT, (self.events,)),
            ]
        )

    def bytes_of(self, num_ctas: int) -> int:
        """Bytes of the buffer of a launch."""
        return num_ctas * self.warps * self.warp_dtype.itemsize


def layout_of_sources(header: Path = TRACE_HEADER) -> Layout:
    """The layout that the kernel's sources declare.

    Raises:
        TraceError: They do not declare it as expected.
    """
    text = header.read_text()
    found = {}
    for name in ("kTraceWarps", "kTraceEvents"):
        match = re.search(rf"constexpr int {name} = (\d+);", text)
        if match is None:
            raise TraceError(f"{header.name} has no constant {name}")
        found[name] = int(match[1])
    return Layout(found["kTraceWarps"], found["kTraceEvents"])


def enumerators(text: str, enumeration: str) -> list[str]:
    """Names of an ``enum class`` of the kernel's sources, which count from 0.

    Raises:
        TraceError: There is no such enumeration.
    """
    match = re.search(rf"enum class {enumeration}\b[^{{]*\{{(.*?)\}};", text, re.S)
    if match is None:
        raise TraceError(f"the kernel's sources have no enumeration {enumeration}")
    return re.findall(r"\w+", re.sub(r"//[^\n]*", "", match[1]))


def kinds_of_sources(header: Path = KINDS_HEADER) -> dict[int, str]:
    """Names of the events' kinds: the kernel's waits, and after them its spans.

    Raises:
        TraceError: The sources do not declare them as expected.
    """
    text = header.read_text()
    first = re.search(r"kFirstSpanEvent = (\d+);", text)
    if first is None:
        raise TraceError(f"{header.name} has no constant kFirstSpanEvent")
    return {
        **dict(enumerate(enumerators(text, "Wait"))),
        **dict(enumerate(enumerators(text, "Span"), int(first[1]))),
    }


@dataclass(frozen=True)
class RankTrace:
    """One rank's part of a launch.

    Attributes:
        nanoseconds: ``[CTAs, warps]`` uint64, %globaltimer at the warp's first stamp; 0 where the
            warp did not record.
        cycles: ``[CTAs, warps]`` int64, the SM's clock at that moment.
        sm: ``[CTAs, warps]`` uint32, the multiprocessor.
        dropped: ``[CTAs, warps]`` uint32, events that the buffer had no room for.
        next_nanoseconds, next_cycles, next_sm: The first three of the launch that followed on the
            same GPU, which together tell the SMs' clock rate.
        warp: ``[events]`` uint32, the flat index (CTA, warp) of each event, ascending.
        kind: ``[events]`` uint8.
        index: ``[events]`` int32, of a row block, say; -1 if it has none.
        begin: ``[events]`` int64, cycles since the warp's first stamp.
        duration: ``[events]`` uint32, cycles.
        host_offset_ns: Interval within which %globaltimer less the host's clock lies.
    """

    nanoseconds: NDArray[np.uint64]
    cycles: NDArray[np.int64]
    sm: NDArray[np.uint32]
    dropped: NDArray[np.uint32]
    next_nanoseconds: NDArray[np.uint64]
    next_cycles: NDArray[np.int64]
    next_sm: NDArray[np.uint32]
    warp: NDArray[np.uint32]
    kind: NDArray[np.uint8]
    index: NDArray[np.int32]
    begin: NDArray[np.int64]
    duration: NDArray[np.uint32]
    host_offset_ns: NDArray[np.int64]

    @property
    def num_ctas(self) -> int:
        """CTAs of the launch."""
        return int(self.nanoseconds.shape[0])


@dataclass(frozen=True)
class LaunchTrace:
    """One launch on all ranks.

    Attributes:
        about: The launch's metadata: shape, direction, machine, ...
        roles: Names of the kinds.
        ranks: By rank.
    """

    about: dict[str, Any]
    roles: dict[int, str]
    ranks: list[RankTrace]

    @property
    def incomplete(self) -> str:
        """Says how many events the buffers had no room for; empty if they had."""
        dropped = sum(int(trace.dropped.sum()) for trace in self.ranks)
        return f"{dropped} events did not fit and are missing" if dropped else ""

    def save(self, path: Path) -> None:
        """Writes a compressed ``.npz``."""
        arrays: dict[str, Any] = {
            f"rank{rank}/{name}": values
            for rank, trace in enumerate(self.ranks)
            for name, values in vars(trace).items()
        }
        about = {"format": FORMAT, "about": self.about, "roles": self.roles}
        arrays["about"] = np.array(json.dumps(about))
        arrays["num_ranks"] = np.array(len(self.ranks))
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)

    @staticmethod
    def load(path: Path) -> "LaunchTrace":
        """Reads what :meth:`save` wrote.

        Raises:
            TraceError: The file is of another kind or version.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != FORMAT:
                    raise TraceError(f"{path}: format {about['format']}, wanted {FORMAT}")
                names = RankTrace.__dataclass_fields__
                ranks = [
                    RankTrace(**{name: file[f"rank{rank}/{name}"] for name in names})
                    for rank in range(int(file["num_ranks"]))
                ]
        except (KeyError, TypeError, ValueError, OSError, EOFError, BadZipFile) as error:
            raise TraceError(f"{path} is not a recorded launch: {error}") from error
        roles = {int(kind): name for kind, name in about["roles"].items()}
        return LaunchTrace(about["about"], roles, ranks)


def read_buffer(
    buffer: NDArray[np.uint8],
    following: NDArray[np.uint8],
    layout: Layout,
    num_ctas: int,
    host_offset_ns: tuple[int, int] = (0, 0),
) -> RankTrace:
    """Takes a rank's launch out of the kernel's buffer.

    Args:
        buffer: uint8, as the launch left it; may be longer.
        following: The same of the launch that followed; only its headers are read.
        layout: How both are laid out.
        num_ctas: CTAs of each launch.
        host_offset_ns: See :class:`RankTrace`.

    Raises:
        TraceError: The buffer is too short, or nothing was recorded.
    """
    wanted = layout.bytes_of(num_ctas)
    shape = (num_ctas, layout.warps)
    for name, given in (("buffer", buffer), ("following", following)):
        if given.size < wanted:
            raise TraceError(f"{name}: {given.size} bytes, wanted {wanted} for {num_ctas} CTAs")
    warps = buffer[:wanted].view(layout.warp_dtype).reshape(shape)
    after = following[:wanted].view(layout.warp_dtype).reshape(shape)
    has_recorded = warps["nanoseconds"] > 0
    if not has_recorded.any():
        raise TraceError("no warp has recorded anything: is the library built to trace?")
    count = np.where(has_recorded, np.minimum(warps["count"], layout.events), 0)
    is_valid = np.arange(layout.events) < count[:, :, None]
    events = warps["event"][is_valid]
    warp = np.repeat(np.arange(num_ctas * layout.warps, dtype=np.uint32), count.ravel())
    duration = events["end"] - events["begin"]
    if events.size and (duration.min() < 0 or duration.max() > np.iinfo(np.uint32).max):
        raise TraceError("an event ends before it begins, or lasts for ever: a broken buffer")
    return RankTrace(
        nanoseconds=warps["nanoseconds"].copy(),
        cycles=warps["cycles"].copy(),
        sm=warps["sm"].copy(),
        dropped=np.where(has_recorded, warps["count"] - count, 0).astype(np.uint32),
        next_nanoseconds=after["nanoseconds"].copy(),
        next_cycles=after["cycles"].copy(),
        next_sm=after["sm"].copy(),
        warp=warp,
        kind=events["kind"].astype(np.uint8),
        index=events["index"].copy(),
        begin=events["begin"] - warps["cycles"].ravel()[warp],
        duration=duration.astype(np.uint32),
        host_offset_ns=np.array(host_offset_ns, dtype=np.int64),
    )
