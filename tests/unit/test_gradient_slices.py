"""Which gap takes how many bytes of gradients, and when pieces of them start."""

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from scipy.optimize import differential_evolution

from flashmoe_megatron import streams
from flashmoe_megatron.measured.fit import Line
from flashmoe_megatron.separate.degree import Pass, Stage, time_of
from flashmoe_megatron.separate.slices import (
    GradientSlices,
    Window,
    beside_window,
    cut_gradients,
    fill_gaps,
    layer_window,
)

LINE = Line(alpha_s=20e-6, beta_s=1e-9, r_squared=1.0)


def added_time(windows: Sequence[Window], slices: Sequence[float], line: Line) -> float:
    """Seconds that the reduction makes a backward longer, with so many bytes in each window."""
    rest = sum(window.ready for window in windows) - sum(slices)
    pairs = zip(windows, slices, strict=True)
    inside = sum(window.cost_s(line.time_s(size) if size > 0.5 else 0.0) for window, size in pairs)
    return inside + (line.time_s(rest) if rest > 0.5 else 0.0)  # half a byte is none


def bent(ready: float, gap_s: float, slopes: tuple[float, float], width_s: float) -> Window:
    """Costs nothing up to its gap, then one slope over a width, then another."""

    def cost_s(seconds: float) -> float:
        over = max(seconds - gap_s, 0.0)
        return slopes[0] * min(over, width_s) + slopes[1] * max(over - width_s, 0.0)

    return Window(ready, cost_s)


def drawn(draw: random.Random) -> list[Window]:
    """Windows of a few layers, of which some have no gap and some no gradients."""
    windows = []
    for _ in range(draw.randint(1, 5)):
        ready = draw.choice((0.0, 0.0, 1.0)) * draw.uniform(0.1, 3) * 1e6
        gap = draw.choice((0.0, 1.0)) * draw.uniform(0.1, 2) * 1e-3
        slopes = draw.uniform(0, 1.2), draw.uniform(1.2, 2)
        windows.append(bent(ready, gap, slopes, draw.uniform(0.1, 1) * 1e-3))
    return windows


def check_ready(windows: list[Window], slices: list[float]) -> None:
    """No window reduces what is not ready before it."""
    left = 0.0
    for window, size in zip(windows, slices, strict=True):
        left += window.ready
        assert 0 <= size <= left + 1
        left -= size


def evolved(windows: list[Window], seed: int) -> float:
    """The least time that differential evolution finds."""

    def slices_of(shares: np.ndarray) -> list[float]:
        slices, left = [], 0.0
        for window, share in zip(windows, shares, strict=True):
            left += window.ready
            slices.append(float(share) * left)
            left -= slices[-1]
        return slices

    found = differential_evolution(
        lambda shares: added_time(windows, slices_of(shares), LINE),
        [(0, 1)] * len(windows),
        popsize=8,
        maxiter=25,
        polish=False,
        rng=seed,
    )
    return float(found.fun)


def test_it_is_no_worse_than_differential_evolution() -> None:
    draw = random.Random(5)
    better, ratios = 0, []
    for case in range(200):
        windows = drawn(draw)
        first, slices = fill_gaps(windows, LINE), cut_gradients(windows, LINE)
        check_ready(windows, slices)
        found, of_first = (added_time(windows, one, LINE) for one in (slices, first))
        assert found <= of_first
        better += found < 0.99 * of_first
        ratios.append((found + 1e-7) / (evolved(windows, case) + 1e-7))
    assert better > 20, "the second rule has something to do"
    # What each reduction takes whatever its size makes for several valleys.
    assert sum(ratios) / len(ratios) < 1
    assert sum(ratio < 1.02 for ratio in ratios) >= 0.98 * len(ratios)
    assert max(ratios) < 1.1


def test_the_first_rule_fills_gaps_in_order_for_nothing() -> None:
    windows = [beside_window(3e6, 1e-3), beside_window(0, 5e-4), beside_window(1e6, 9e-3)]
    slices = fill_gaps(windows, LINE)
    wanted = [(1e-3 - LINE.alpha_s) / LINE.beta_s, (5e-4 - LINE.alpha_s) / LINE.beta_s]
    assert slices[:2] == pytest.approx(wanted, abs=2)
    assert sum(slices) == pytest.approx(4e6)
    assert added_time(windows, slices, LINE) == pytest.approx(0, abs=1e-8)


def test_nothing_is_reduced_before_it_is_ready() -> None:
    windows = [beside_window(0, 1.0), beside_window(1e6, 1e-4), beside_window(2e6, 1e-6)]
    slices = cut_gradients(windows, LINE)
    assert slices[0] == 0
    check_ready(windows, slices)


@pytest.mark.parametrize("degree", [1, 3])
def test_the_gap_of_a_layer_is_what_its_schedule_leaves(degree: int) -> None:
    exchange = Stage("exchange", "between", 1e-5, 4e-4)
    backward = Pass(
        (exchange,), Stage("experts", "compute", 1e-5, 2e-3), (exchange,), weights_s=5e-4
    )
    window = layer_window(1e9, backward, degree)
    (size,) = fill_gaps([window], LINE)
    for more, is_free in ((0.0, True), (1e3, False)):
        slices_s = LINE.time_s(size + more)
        longer = time_of(dataclasses.replace(backward, slices_s=slices_s), degree)
        assert (longer <= time_of(backward, degree) * (1 + 1e-9)) is is_free
    assert size > 1e5, "experts take longer than exchanges"


class Way:
    """A lane that notes what it waits for and what starts on it."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    @contextlib.contextmanager
    def after(self, moment: object) -> Iterator[None]:
        self.notes.append(f"way waits for {moment}")
        yield
        self.notes.append("way left")


def test_pieces_start_in_order_where_they_fit_once_they_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    moments = (f"gradient {number}" for number in range(9))
    monkeypatch.setattr(streams, "mark", lambda device: next(moments))
    monkeypatch.setattr(streams, "wait", lambda device, moment: notes.append(f"waits for {moment}"))
    slices, way = GradientSlices(torch.device("cpu")), cast(streams.Lane, Way(notes))
    slices.plan({1: 100.0, 0: 250.0}, {1: 30.0})

    def put(name: str, num_bytes: int) -> None:
        slices.put(num_bytes, lambda: notes.append(f"starts {name}"))

    put("a", 90)
    put("b", 80)
    put("c", 20)
    assert notes == [], "nothing has room before the first gap"
    slices.take(1, way)
    assert notes == ["way waits for gradient 0", "starts a", "way left"]
    notes.clear()
    slices.leave(1)
    assert notes == ["waits for gradient 1", "starts b"], "half of it fits what the gap has left"
    notes.clear()
    put("d", 500)
    slices.take(0, way)
    assert notes == ["way waits for gradient 2", "starts c", "way left"]
    notes.clear()
    slices.drain()
    assert notes == ["waits for gradient 3", "starts d"]
    notes.clear()
    put("e", 1)
    assert notes == [], "what is drained leaves no room"


def test_a_gap_without_pieces_leaves_no_room_to_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "mark", lambda device: None)
    monkeypatch.setattr(streams, "wait", lambda device, moment: None)
    notes: list[str] = []
    slices, way = GradientSlices(torch.device("cpu")), cast(streams.Lane, Way([]))
    slices.plan({1: 100.0, 0: 40.0}, {})
    slices.take(1, way)  # its layer is over before anything is ready
    slices.put(90, lambda: notes.append("starts"))
    slices.take(0, way)
    assert notes == [], "90 bytes fit neither half of the second gap nor what the first had"
    slices.drain()
    assert notes == ["starts"]
