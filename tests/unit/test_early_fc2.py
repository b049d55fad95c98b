"""The stream behind fc2's gradients, without a GPU: what is awaited, how often, and where not."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.kernel import early_fc2


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of the library, in place of which nothing happens."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(early_fc2.bindings, "call", lambda *given: calls.append(given))
    return calls


def test_each_backward_is_awaited_once(awaited: list[tuple[Any, ...]]) -> None:
    early = early_fc2.EarlyFc2(torch.device("cpu"))
    assert early.next_backward() == 1
    stream = early.stream_behind(lambda: "group")
    assert early.stream_behind(lambda: pytest.fail("asked again")) is stream
    assert early.next_backward() == 2
    assert early.stream_behind(lambda: "group") is stream
    assert awaited == [("await_fc2_grads", "group", number, 7) for number in (1, 2)]


def test_a_backward_that_a_graph_captures_has_no_number(
    awaited: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = early_fc2.EarlyFc2(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert early.next_backward() == 0
    assert early.num_backwards == 0
    assert awaited == []


def test_a_driver_without_such_waits_is_told_of_once(
    awaited: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError("the driver has no cuStreamWaitValue64")

    monkeypatch.setattr(early_fc2.bindings, "call", refuse)
    early = early_fc2.EarlyFc2(torch.device("cpu"))
    with caplog.at_level(logging.WARNING, "flashmoe_megatron"):
        for _ in range(2):
            early.next_backward()
            assert early.stream_behind(lambda: "group") is None
    assert caplog.text.count("are not reduced before a backward ends") == 1
