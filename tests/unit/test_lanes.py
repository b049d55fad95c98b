"""Streams beside the current one, with a GPU's streams in Python."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashmoe_megatron import streams

DEVICE = torch.device("cuda", 0)


class Stream:
    """What was asked of a stream."""

    device_index = 0

    def __init__(self, device: Any = None) -> None:
        self.waited: list[Any] = []

    def wait_event(self, moment: Any) -> None:
        self.waited.append(moment)

    def record_event(self) -> tuple[str, "Stream"]:
        return "moment", self


class Gpu:
    """The stream that is current, and how often torch was asked for it."""

    def __init__(self) -> None:
        self.current = self.first = Stream()
        self.asked = 0

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    def current_stream(self, device: Any = None) -> Stream:
        self.asked += 1
        return self.current


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    one = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", one.set_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", one.current_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: id(one.current), raising=False
    )
    streams._stream_of.cache_clear()
    yield one
    streams._stream_of.cache_clear()


def test_a_lane_is_current_within_and_no_longer(gpu: Gpu) -> None:
    lane = streams.Lane(DEVICE)
    moment: Any = streams.mark(DEVICE)
    assert moment == ("moment", gpu.first)
    with lane.after(moment):
        inner: Any = gpu.current
        assert inner is not gpu.first
        assert inner.waited == [moment]
        assert streams.mark(torch.device("cuda")) == ("moment", inner) == lane.mark()
    assert gpu.current is gpu.first
    with pytest.raises(RuntimeError, match="gone"), lane.after(None):
        raise RuntimeError("gone")
    assert gpu.current is gpu.first
    assert inner.waited == [moment], "no moment, no wait"
    streams.wait(DEVICE, lane.mark())
    assert gpu.first.waited == [("moment", inner)]


def test_torch_is_asked_once_for_each_stream(gpu: Gpu) -> None:
    lane = streams.Lane(DEVICE)
    for _ in range(3):
        with lane.after(streams.mark(DEVICE)):
            streams.mark(DEVICE)
        streams.wait(DEVICE, lane.mark())
    assert gpu.asked == 2


def test_a_stamp_is_of_the_current_stream(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of a GPU count milliseconds, a host's clock nanoseconds."""

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.is_over = False

        def record(self, stream: Any) -> None:
            self.stream = stream

        def query(self) -> bool:
            return self.is_over

        def synchronize(self) -> None:
            self.is_over = True

        def elapsed_time(self, end: Any) -> float:
            return 1.5 if self.stream is gpu.first and end.stream is not gpu.first else -1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    begin = streams.Stamp(DEVICE)
    with streams.Lane(DEVICE).after(None):
        end = streams.Stamp(DEVICE)
    assert not end.has_passed()
    end.wait()
    assert end.has_passed()
    assert end.ns_since(begin) == 1.5e6
    times = iter([5, 12])
    monkeypatch.setattr(streams.time, "monotonic_ns", lambda: next(times))
    begin, end = (streams.Stamp(streams.HOST) for _ in range(2))
    assert end.has_passed()
    assert end.ns_since(begin) == 7


def test_stamps_are_of_the_lane(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "Stamp", lambda device: gpu.current)
    lane = streams.Lane(DEVICE)
    lane.stamps = []
    with lane.after(None):
        inner = gpu.current
    assert lane.stamps == [(inner, inner)]
    assert inner is not gpu.first
