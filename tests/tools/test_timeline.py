"""Traces of launches, read from buffers that an independent writer packed by hand."""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tests.tools.synthetic_trace import EVENTS, KIND, ROLES, WARPS, Warp, made_up_launch, pack
from tools.timeline import __main__ as command
from tools.timeline import capture, draw
from tools.timeline.chrome import write_chrome_trace
from tools.timeline.clock import cycles_per_ns, on_common_axis, rank_offsets_ns
from tools.timeline.records import (
    KINDS_HEADER,
    TRACE_HEADER,
    LaunchTrace,
    Layout,
    RankTrace,
    TraceError,
    enumerators,
    kinds_of_sources,
    layout_of_sources,
    read_buffer,
)
from tools.timeline.states import OUTER, SPANS, Kinds, State, actors_of_warps, paint
from tools.timeline.summary import Round, durations, ending, rounds, summary

LAYOUT = Layout(WARPS, EVENTS)
RATE = 1.6  # cycles per ns
START_NS = 1_700_000_000_000_000_000  # a %globaltimer of our days


def one_cta(
    *warps: list[tuple[str, float, float, int]], start_ns: int = START_NS, sm: int = 7
) -> tuple[np.ndarray, np.ndarray]:
    """A launch of one CTA, and the next one 1 ms later.

    Args:
        warps: The events of each warp: kind, begin and end in microseconds, index.
        start_ns: %globaltimer when it begins.
        sm: The multiprocessor.
    """
    launches = []
    for later_ns in (0, 1_000_000):
        recorded = [Warp(start_ns + later_ns, 5_000 + int(later_ns * RATE), sm) for _ in warps]
        for warp, events in zip(recorded, warps, strict=True):
            for kind, begin, end, index in events:
                warp.add(kind, int(begin * 1_000 * RATE), int(end * 1_000 * RATE), index)
        launches.append(pack([[*recorded, *[None] * (WARPS - len(recorded))]]))
    return launches[0], launches[1]


def two_warps(start_ns: int = START_NS, sm: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """A launch of one CTA with a processor and a dispatch warp, and the next one."""
    processor = [("kGemm0", 1, 10, 3), ("kProcessorStage", 2, 3, -1)]
    return one_cta(processor, [("kDispatch", 0, 5, -1)], start_ns=start_ns, sm=sm)


def one_launch(*ranks: RankTrace, roles: dict[int, str] = ROLES) -> LaunchTrace:
    about = {"direction": "forward", "name": "made-up", "shape": {"tokens": 8192}, "gpu": "none"}
    return LaunchTrace(about, roles, list(ranks))


def made_up(num_ranks: int = 2, num_ctas: int = 4) -> LaunchTrace:
    return one_launch(
        *(
            read_buffer(
                *made_up_launch(num_ctas, start_ns=START_NS + 3_000 * rank, rate=RATE, seed=rank),
                LAYOUT,
                num_ctas,
                (-2_000, 2_000),
            )
            for rank in range(num_ranks)
        )
    )


def test_the_layout_is_the_kernels():
    assert layout_of_sources() == LAYOUT
    text = TRACE_HEADER.read_text()
    event = re.search(r"struct TraceEvent \{(.*?)\};", text, re.S)
    warp = re.search(r"struct TraceWarp \{(.*?)\};", text, re.S)
    assert event is not None
    assert warp is not None
    fields = r"\b(?:uint32_t|int32_t|uint64_t|int64_t|TraceEvent) [^;]+;"
    assert re.findall(fields, event[1]) == [
        "uint32_t kind;",
        "int32_t index;",
        "int64_t begin, end;",
    ]
    assert re.findall(fields, re.sub(r"//[^\n]*", "", warp[1])) == [
        "uint64_t nanoseconds;",
        "int64_t cycles;",
        "uint32_t count;",
        "uint32_t sm;",
        "TraceEvent event[kTraceEvents];",
    ]


def test_the_kinds_are_the_kernels():
    kinds = kinds_of_sources()
    names = set(kinds.values())
    assert kinds[0] == "kNone"
    assert OUTER.keys() <= names
    assert kinds[{name: kind for kind, name in kinds.items()}["kGemm0"] + 1] == "kGemm1"
    text = KINDS_HEADER.read_text()
    assert len(kinds) == len(enumerators(text, "Wait")) + len(enumerators(text, "Span"))


def test_spans_come_behind_the_waits(tmp_path: Path):
    header = tmp_path / "kinds.cuh"
    waits, spans = (
        "enum class Wait : int { kA,  // one, two\n kB, };",
        "enum class Span { kC, kD };",
    )
    header.write_text(f"{waits}\n{spans}\nconstexpr int kFirstSpanEvent = 32;")
    assert kinds_of_sources(header) == {0: "kA", 1: "kB", 32: "kC", 33: "kD"}
    header.write_text(f"{waits}\nconstexpr int kFirstSpanEvent = 32;")
    with pytest.raises(TraceError, match="no enumeration Span"):
        kinds_of_sources(header)
    header.write_text(f"{waits}\n{spans}")
    with pytest.raises(TraceError, match="no constant kFirstSpanEvent"):
        kinds_of_sources(header)


def test_the_buffer_is_read_event_by_event():
    trace = read_buffer(*two_warps(), LAYOUT, 1)
    assert trace.num_ctas == 1
    assert list(trace.warp) == [0, 0, 1]
    assert [ROLES[kind] for kind in trace.kind] == ["kGemm0", "kProcessorStage", "kDispatch"]
    assert list(trace.index) == [3, -1, -1]
    assert list(trace.begin) == [1_600, 3_200, 0]
    assert list(trace.duration) == [14_400, 1_600, 8_000]
    assert list(trace.nanoseconds[0]) == [START_NS, START_NS] + [0] * (WARPS - 2)
    assert not trace.dropped.any()


def test_events_that_did_not_fit_are_counted():
    warp = Warp(START_NS, 0, 0)
    for at in range(EVENTS):
        warp.add("kGemm0", 10 * at, 10 * at + 5)
    warp.count = EVENTS + 17
    buffer = pack([[warp] + [None] * (WARPS - 1)])
    trace = read_buffer(buffer, buffer, LAYOUT, 1)
    assert len(trace.kind) == EVENTS
    assert trace.dropped[0, 0] == 17
    assert trace.dropped.sum() == 17


def test_what_cannot_be_read_is_refused():
    buffer, following = two_warps()
    with pytest.raises(TraceError, match="wanted"):
        read_buffer(buffer[:-1], following, LAYOUT, 1)
    with pytest.raises(TraceError, match="built to trace"):
        read_buffer(np.zeros_like(buffer), following, LAYOUT, 1)
    backwards = Warp(START_NS, 0, 0)
    backwards.add("kGemm0", 10, 5)
    broken = pack([[backwards] + [None] * (WARPS - 1)])
    with pytest.raises(TraceError, match="before it begins"):
        read_buffer(broken, following, LAYOUT, 1)
    with pytest.raises(TraceError, match="following"):
        cycles_per_ns(read_buffer(buffer, np.zeros_like(buffer), LAYOUT, 1))


def test_a_file_gives_back_what_was_saved(tmp_path: Path):
    launch = made_up()
    path = tmp_path / "folder" / "forward.npz"
    launch.save(path)
    loaded = LaunchTrace.load(path)
    assert loaded.about == launch.about
    assert loaded.roles == launch.roles
    for ours, theirs in zip(launch.ranks, loaded.ranks, strict=True):
        for name, values in vars(ours).items():
            assert values.dtype == getattr(theirs, name).dtype
            assert np.array_equal(values, getattr(theirs, name))
    np.save(tmp_path / "array.npy", np.zeros(1))
    array = (tmp_path / "array.npy").read_bytes()
    for other in (b"no archive", b"", path.read_bytes()[:1000], array):
        (tmp_path / "other.npz").write_bytes(other)
        with pytest.raises(TraceError, match="not a recorded launch"):
            LaunchTrace.load(tmp_path / "other.npz")


def test_events_are_placed_in_microseconds():
    (events,) = on_common_axis(one_launch(read_buffer(*two_warps(), LAYOUT, 1)))
    assert events.begin == pytest.approx([1.0, 2.0, 0.0], abs=1e-3)
    assert events.end == pytest.approx([10.0, 3.0, 5.0], abs=1e-3)
    assert list(events.sm) == [7]


@pytest.mark.parametrize(
    ("uncertainty_ns", "offset_ns", "apart_us"),
    [
        (10_000, 4_000, 4.0),  # the timers may agree: then the ranks began 4 us apart
        (500, 4_000, 0.0),  # the host's clock proves that the timers differ by 4 us
    ],
)
def test_ranks_are_aligned(uncertainty_ns: int, offset_ns: int, apart_us: float):
    ranks = [
        read_buffer(
            *two_warps(START_NS + rank * offset_ns),
            LAYOUT,
            1,
            (rank * offset_ns - uncertainty_ns, rank * offset_ns + uncertainty_ns),
        )
        for rank in range(2)
    ]
    launch = one_launch(*ranks)
    first, second = on_common_axis(launch)
    assert second.begin - first.begin == pytest.approx([apart_us] * 3, abs=1e-3)
    assert rank_offsets_ns(launch)[1] == (0 if apart_us else offset_ns)


def test_clocks_of_sms_with_zeros_of_their_own_agree():
    launch = made_up(num_ranks=1, num_ctas=6)
    assert cycles_per_ns(launch.ranks[0]) == pytest.approx(RATE, rel=1e-4)
    (events,) = on_common_axis(launch)
    # Every CTA's dispatch begins 20,000 cycles after its first stamp.
    dispatch = events.kind == KIND["kDispatch"]
    first_of_cta = {int(c): float(events.begin[dispatch & (events.cta == c)][0]) for c in range(6)}
    for cta, begin in first_of_cta.items():
        assert begin - events.first[cta] == pytest.approx(20_000 / RATE / 1e3, abs=0.05)
        assert 0 <= events.first[cta] < 3.1


def test_a_wait_hides_the_work_that_it_interrupts():
    (events,) = on_common_axis(one_launch(read_buffer(*two_warps(), LAYOUT, 1)))
    times = np.array([0.5, 1.5, 2.5, 3.5, 9.5, 10.5])
    painted = paint(events, Kinds(ROLES), times)
    assert list(draw.tensor_share(painted)) == [0, 1, 0, 1, 1, 0]
    assert list(painted.share(State.WAIT, "processor")) == [0, 0, 1, 0, 0, 0]
    assert not painted.share(State.WAIT, "loader").any()  # there is none
    moving = draw.communication_shares(painted)
    assert list(moving[State.DISPATCH]) == [1, 1, 1, 1, 0, 0]
    assert not moving[State.DELIVER].any()


def test_a_warp_is_what_it_does_beside_the_first_rows():
    """Every warp of a launch copies some of those, which is a kind of dispatching."""
    first_rows = ("kDispatch", 0, 1, 1)
    of_warps = {
        "loader": [("kLoaderStage", 2, 3, -1)],
        "dispatch": [("kDispatch", 2, 9, -1), ("kDeliver", 9, 10, -1)],
        "finisher": [("kEpilogue0", 4, 5, 3), ("kReduce", 9, 10, -1)],
        "processor": [("kGemm0", 1, 4, 3), ("kProcessorStage", 2, 3, -1)],
    }
    launches = one_cta(*([first_rows, *events] for events in of_warps.values()))
    launch = one_launch(read_buffer(*launches, LAYOUT, 1, (0, 0)))
    found = actors_of_warps(on_common_axis(launch)[0], Kinds(launch.roles))
    assert found == {(0, warp): actor for warp, actor in enumerate(of_warps)}


def test_the_trace_has_a_track_per_sm_and_role(tmp_path: Path):
    path = tmp_path / "forward.trace.json.gz"
    launch = made_up(num_ranks=2, num_ctas=3)
    written = write_chrome_trace(launch, path, shortest_us=0.0)
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == written > 0
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    names = {name for (pid, _), name in tracks.items() if pid == 0}
    roles = ("loader", "dispatch", "finisher 2", "finisher 3", "processor 1", "processor 2")
    assert names == {f"SM {sm:3d} {role}" for sm in range(3) for role in roles}
    by_track = defaultdict(list)
    for event in slices:
        assert (event["pid"], event["tid"]) in tracks
        assert event["dur"] >= 0
        by_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():  # viewers need slices inside each other or apart
        open_ends: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 2e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3
            open_ends.append(end)
    found = {event["name"] for event in slices}
    assert {"Gemm0", "Gemm1", "Dispatch", "Deliver", "Reduce", "wait: LoaderRows"} <= found
    assert not found & {name.removeprefix("k") for name in SPANS}


def test_short_waits_are_left_out_and_work_is_not(tmp_path: Path):
    path = tmp_path / "trace.json.gz"
    launch = made_up(num_ranks=1, num_ctas=1)
    everything = write_chrome_trace(launch, path, shortest_us=0.0)
    assert write_chrome_trace(launch, path, shortest_us=1e6) < everything
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    assert events
    assert not any(event["name"].startswith("wait") for event in events)


def test_the_picture_names_its_axes_and_units(tmp_path: Path, monkeypatch):
    launch = made_up(num_ranks=2, num_ctas=4)
    launch.save(tmp_path / "forward.npz")
    drawn: list[Figure] = []
    save = draw.save

    def keep(figure: Figure, path: Path) -> list[Path]:
        drawn.append(figure)
        return save(figure, path)

    monkeypatch.setattr(draw, "save", keep)
    file, out = tmp_path / "forward.npz", tmp_path / "out"
    assert command.main(["draw", str(file), "--out", str(out)]) == 0
    for name in ("forward.png", "forward.svg", "forward.trace.json.gz"):
        assert (out / name).stat().st_size > 1000
    (figure,) = drawn
    *shares, roles = figure.axes
    assert len(shares) == 2
    for rank, ax in enumerate(shares):
        assert "%" in ax.get_ylabel()
        assert ax.get_title(loc="left").startswith(f"rank {rank}: in products")
    assert roles.get_xlabel().endswith("µs")
    labels = [label.get_text() for label in roles.get_yticklabels()]
    assert labels[:4] == ["SM 0 loader", "SM 0 dispatch", "SM 0 finisher", "SM 0 processor"]
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"GEMM0", "GEMM1", "dispatch", "combine: deliver", "combine: reduce", "wait"} <= legend


def two_tiles() -> LaunchTrace:
    """Two processor warps, of which one has two tiles, a loader and a finisher."""
    busy = [
        ("kProcessorStage", 2, 3, -1),
        ("kProcessorStage", 4, 4.5, -1),
        ("kGemm0", 1, 10, -1),
        ("kProcessorHandover", 10.25, 10.75, -1),
        ("kProcessorStage", 11, 13, -1),
        ("kGemm1", 11, 21, -1),
        ("kProcessorHandover", 21.5, 29, -1),  # behind its last tile: between no two
    ]
    early = [("kProcessorHandover", 0.25, 0.5, -1), ("kGemm0", 1, 7, -1)]
    loader, finisher = [("kLoaderStage", 2, 9, -1)], [("kEpilogue1", 21.5, 23, -1)]
    return one_launch(read_buffer(*one_cta(loader, finisher, busy, early), LAYOUT, 1, (0, 0)))


def test_tiles_and_their_waits_are_told_by_number():
    launch = two_tiles()
    events, kinds = on_common_axis(launch)[0], Kinds(launch.roles)
    first, second = rounds(events, kinds)
    near = {"abs": 0.01}
    assert list(vars(first).values()) == pytest.approx([0, 1, 1, 7.5, 0.75, 0.5, 0.25], **near)
    assert list(vars(second).values()) == pytest.approx([1, 0.5, 11, 10, 2, 0, 0], **near)
    assert isinstance(first, Round)
    work = durations(events, kinds, State.GEMM0, State.GEMM1, State.EPILOGUE)
    assert list(work) == ["kGemm0", "kGemm1", "kEpilogue1"]
    assert sorted(work["kGemm0"]) == pytest.approx([6, 9], **near)
    assert work["kEpilogue1"] == pytest.approx([1.5], **near)
    waits = durations(events, kinds, State.WAIT)
    assert waits.keys() == {"kProcessorHandover", "kLoaderStage", "kProcessorStage"}
    assert waits["kLoaderStage"] == pytest.approx([7], **near)
    printed = summary(launch)  # there is one CTA
    tables = [
        printed.index(title) + 2 for title in printed if title.startswith(("| work", "| wait"))
    ]
    assert printed[tables[0]] == "| Gemm0 | 2.0 | 6.30 | 7.50 | 8.70 |"
    assert printed[tables[1] :] == [  # the longest first
        "| ProcessorHandover | 3.0 | 8.2 |",
        "| LoaderStage | 1.0 | 7.0 |",
        "| ProcessorStage | 3.0 | 3.5 |",
    ]
    end = ending(events, kinds)
    assert end.products == pytest.approx((21, 21, 21), **near)  # there is one CTA
    assert (end.finisher, end.launch) == pytest.approx((23, 29), **near)


def test_the_tables_have_every_rank_and_all_of_a_round(tmp_path: Path, capsys):
    launch = made_up()
    launch.save(tmp_path / "forward.npz")
    assert command.main(["summarize", str(tmp_path / "forward.npz")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == summary(launch)
    assert [line for line in printed if line.startswith("## ")] == ["## Rank 0", "## Rank 1"]
    kinds = Kinds(launch.roles)
    for events in on_common_axis(launch):
        products = np.isin(events.kind, [KIND["kGemm0"], KIND["kGemm1"]])
        warps = len({*zip(events.cta[products], events.warp[products], strict=True)})
        found = rounds(events, kinds)
        assert sum(one.tiles for one in found) * warps == pytest.approx(products.sum())
        total = sum(one.duration * one.tiles for one in found) * warps
        assert total == pytest.approx((events.end - events.begin)[products].sum())


def test_events_that_did_not_fit_are_told(tmp_path: Path):
    launch = made_up()
    assert not any("did not fit" in line for line in summary(launch))
    launch.ranks[1].dropped[0, :2] = (3, 4)
    launch.save(tmp_path / "forward.npz")
    again = LaunchTrace.load(tmp_path / "forward.npz")
    assert summary(again)[2] == "7 events did not fit and are missing."
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        _, svg = draw.draw_launch(again, tmp_path / "x")
    assert "7 events did not fit and are missing" in svg.read_text()


def test_a_launch_without_products_has_no_tables(tmp_path: Path, capsys):
    launch = one_launch(read_buffer(*one_cta([("kDispatch", 0, 5, -1)]), LAYOUT, 1, (0, 0)))
    launch.save(tmp_path / "gather.npz")
    assert command.main(["summarize", str(tmp_path / "gather.npz")]) == 2
    assert "no products" in capsys.readouterr().err


def test_another_file_is_an_error_that_says_so(tmp_path: Path, capsys):
    (tmp_path / "x.npz").write_bytes(b"")
    assert command.main(["draw", str(tmp_path / "x.npz")]) == 2
    assert "x.npz is not a recorded launch" in capsys.readouterr().err


def test_only_layer_kernels_are_recorded(monkeypatch):
    """Others share the group's struct, and would write into a layer kernel's record."""
    group = SimpleNamespace(trace=None)
    backend = SimpleNamespace(
        device=torch.device("cpu"), num_ctas=2, memory=SimpleNamespace(open=lambda: group)
    )
    recorder = capture.Recorder(backend, Layout(warps=1, events=1))
    seen: list[tuple[str, bool]] = []

    def launch(name: str):
        def launched(*arguments: object) -> None:
            seen.append((name, group.trace is not None))
            if group.trace is not None:
                recorder._buffer[0] += len(seen)  # what a kernel would leave
            if arguments:
                raise RuntimeError("a launch that fails")

        return launched

    for name in ("plan", "forward", "backward"):
        monkeypatch.setattr(capture.ops, name, launch(name))
    forward = capture.ops.forward
    with recorder.recording():
        for name in ("plan", "forward", "backward"):
            getattr(capture.ops, name)()
        with pytest.raises(RuntimeError, match="a launch that fails"):
            capture.ops.forward("broken")
        assert group.trace is None
    assert capture.ops.forward is forward
    assert seen[:3] == [("plan", False), ("forward", True), ("backward", True)]
    assert [name for name, _ in recorder.taken] == ["forward", "backward"]
    assert [int(buffer[0]) for _, buffer in recorder.taken] == [2, 3]  # each begins with zeros


@pytest.mark.parametrize("direction", capture.TRACED)
def test_an_earlier_capture_is_not_written_over(tmp_path: Path, capsys, direction: str):
    earlier = tmp_path / f"{direction}.npz"
    earlier.write_text("earlier")
    assert command.main(["capture", "--out", str(tmp_path)]) == 2
    wanted = f"error: {earlier} is of an earlier capture: wanted another folder by --out\n"
    assert capsys.readouterr().err == wanted


def test_without_a_gpu_nothing_is_recorded(tmp_path: Path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main(["capture", "--out", str(tmp_path)]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
