"""Trials between GPUs, with a clock in their place."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_megatron.multipath import trials
from flashmoe_megatron.multipath.balancer import MAX_TRIALS, WINDOW, Balancer, chunks_of, cut
from flashmoe_megatron.multipath.trials import Times, one_of_a_row, seconds_of

MIB = 2**20
LATENCY_S = 20e-6


class Event:
    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


class Flight:
    def __init__(self, took: float) -> None:
        self.seconds = lambda: took
        self.nbytes = 1


def test_one_in_eight_is_timed() -> None:
    times = Times(SimpleNamespace())  # type: ignore[arg-type]
    assert [times.is_next_timed() for _ in range(24)] == ([False] * 7 + [True]) * 3


def test_times_are_the_slowest_ranks_and_come_two_windows_later() -> None:
    """The other rank is twice as slow, and is not asked of a window of one link alone."""
    span = WINDOW
    asked: list[list[float]] = []

    def ask(values: list[float]) -> Any:
        asked.append(values)
        return SimpleNamespace(wait=lambda: [values, [2 * one for one in values]])

    def flight(seconds: float, nbytes: int) -> Any:
        return SimpleNamespace(seconds=lambda: seconds, nbytes=nbytes)

    for num_pairs, num_asked in ((4 * span, 3), (1, 1), (0, 0)):
        ranks: Any = SimpleNamespace(ask=ask)
        times, found, want = Times(ranks), [], []
        for index in range(4 * span):
            is_pair = index < num_pairs
            other = flight(index + 0.5, 2 * index) if is_pair else None
            shares = (float(index), 0.0, 0.0)
            found.append(list(times.add(shares, [flight(index, index), other, None])))
            slower = 1 + (index // span < num_asked)
            seconds = [slower * index, slower * (index + 0.5) * is_pair, 0.0]
            want.append((shares, seconds, [index, 2 * index * is_pair, 0]))
        given = {index: rows for index, rows in enumerate(found) if rows}
        assert given == {3 * span - 1: want[:span], 4 * span - 1: want[span : 2 * span]}
        assert [len(values) for values in asked] == [3 * span] * num_asked
        asked.clear()


def test_ranks_have_the_same_shares_when_a_link_comes_back() -> None:
    """Nobody agrees on what one link takes alone, and a rank is late by itself."""
    nbytes = 256 * MIB
    told: list[list[list[float]]] = [[], []]

    class Rank:
        def __init__(self, number: int) -> None:
            self.alone = (1 + 0.02 * number) * 700e-6
            self.balancer = Balancer(["peer", "host"])
            self.balancer.tune(nbytes, self.took)
            asked = itertools.count()

            def ask(values: list[float]) -> Any:
                told[number].append(values)
                index = next(asked)
                return SimpleNamespace(wait=lambda: [one[index] for one in told])

            ranks: Any = SimpleNamespace(ask=ask)
            self.times = Times(ranks)

        @staticmethod
        def took(carried: Sequence[int], chunks: Sequence[int]) -> list[float]:
            return [carried[0] / 380e9, carried[1] / (38e9 if is_good else 1e8)]

        def move(self) -> None:
            shares = self.balancer.shares(nbytes)
            seconds = self.took(cut(shares, nbytes), [])
            if shares[1] == 0:
                seconds = [self.alone, 0.0]
            flights = [
                Flight(one) if share else None for one, share in zip(seconds, shares, strict=True)
            ]
            for timed in self.times.add(shares, flights):
                self.balancer.observe(nbytes, timed.shares, timed.seconds)

    is_good = True
    pair = [Rank(number) for number in range(2)]
    best = pair[0].balancer.shares(nbytes)
    seen = []
    for transfer in range(400 * WINDOW):
        is_good = not 10 * WINDOW <= transfer < 100 * WINDOW
        for rank in pair:
            rank.move()
        first, second = (rank.balancer.shares(nbytes) for rank in pair)
        assert first == second
        seen.append(first)
    assert (1.0, 0.0) in seen
    assert seen[-1] == pytest.approx(best, abs=0.02)


class Pair:
    """Two ranks, of which one sends or both do, by copies to the peer and by the host.

    A transfer begins on each rank when the one before has ended there and the host has issued it.
    What goes by the host is copied twice, and a chunk has to be there before it is copied on.
    """

    def __init__(self, gbps: Sequence[float], both_ways: bool, chunk_s: float) -> None:
        self._gbps, self._both_ways, self._chunk_s = gbps, both_ways, chunk_s
        self._host = self._sent = self._received = 0.0
        self._free = [0.0, 0.0, 0.0]

    def move(
        self, carried: Sequence[int], chunks: Sequence[int], is_timed: bool = True
    ) -> list[Any]:
        pairs = list(zip(carried, chunks, strict=True))
        self._host += sum(math.ceil(nbytes / chunk) for nbytes, chunk in pairs) * self._chunk_s
        leaves, began = max(self._host, self._sent), max(self._host, self._received)
        peer, relay = (1e9 * one for one in self._gbps)
        (direct, _), (relayed, chunk) = pairs
        sent, received = leaves, began
        flights: list[Any] = [None, None]
        if direct:
            end = self._copy(0, leaves + LATENCY_S, direct / peer)
            sent, received = max(sent, end), max(received, end)
            flights[0] = Flight(end - began)
        if relayed:
            there = self._copy(1, leaves + LATENCY_S, relayed / relay)
            first = there - (relayed - min(chunk, relayed)) / relay
            end = self._copy(2, first, relayed / relay)
            sent, received = max(sent, there), max(received, end)
            flights[1] = Flight(end - began)
        self._sent, self._received = received if self._both_ways else sent, received
        return flights

    repeats = 5

    def mark(self) -> Event:
        return Event(max(self._host, self._received))

    def _copy(self, engine: int, ready: float, takes: float) -> float:
        self._free[engine] = max(ready, self._free[engine]) + takes
        return self._free[engine]


def of_one(move: Callable[[], list[Any]], queues: object, gather: Any) -> list[float]:
    """A trial of one transfer."""
    return seconds_of(move())


def seconds(pair: Pair, carried: Sequence[int], chunks: Sequence[int]) -> float:
    begin = pair.mark().at
    for _ in range(100):
        pair.move(carried, chunks)
    return (pair.mark().at - begin) / 100


def tuned(make: Callable[[], Pair], nbytes: int, trial: Callable[..., list[float]]) -> Balancer:
    def measure(carried: Sequence[int], chunks: Sequence[int]) -> list[float]:
        pair = make()
        return trial(functools.partial(pair.move, carried, chunks), pair, lambda row: [row])

    balancer = Balancer(["peer", "host"])
    balancer.tune(nbytes, measure)
    assert balancer.trials(nbytes) <= MAX_TRIALS
    return balancer


def rate(make: Callable[[], Pair], nbytes: int, trial: Callable[..., list[float]]) -> float:
    """What the shares that trials choose give, as a part of what the best shares do."""
    balancer = tuned(make, nbytes, trial)
    models = balancer.models(nbytes)

    def of(shares: Sequence[float]) -> float:
        return seconds(make(), cut(shares, nbytes), chunks_of(models, shares))

    best = min(of([1 - part / 200, part / 200]) for part in range(80))
    return best / of(balancer.shares(nbytes))


@pytest.mark.parametrize("mib", [128, 256, 1024])
@pytest.mark.parametrize("chunk_s", [5e-6, 30e-6])
def test_a_row_of_transfers_finds_the_best_shares(chunk_s: float, mib: int) -> None:
    one_way = functools.partial(Pair, (200, 48), False, chunk_s)
    both_ways = functools.partial(Pair, (387, 48), True, chunk_s)
    for make in (one_way, both_ways):
        assert rate(make, mib * MIB, one_of_a_row) >= 0.99


def test_a_single_transfer_shows_neither_what_the_next_one_hides_nor_the_host() -> None:
    one_way = functools.partial(Pair, (200, 48), False, 5e-6)
    shares = [
        tuned(one_way, 64 * MIB, trial).shares(64 * MIB)[1] for trial in (of_one, one_of_a_row)
    ]
    assert shares[0] < shares[1] - 0.01
    assert rate(functools.partial(Pair, (200, 48), False, 30e-6), 64 * MIB, of_one) < 0.9


def test_what_the_host_cannot_issue_in_time_is_left_to_the_peer() -> None:
    make = functools.partial(Pair, (200, 48), True, 200e-6)
    assert tuned(make, 48 * MIB, one_of_a_row).shares(48 * MIB) == (1.0, 0.0)
    assert tuned(make, 48 * MIB, of_one).shares(48 * MIB)[1] > 0


def test_no_bytes_take_no_time() -> None:
    pair = Pair((200, 48), False, 5e-6)
    move = functools.partial(pair.move, (0, 0), (MIB, MIB))
    assert one_of_a_row(move, pair, lambda row: [row]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("links_take", "others", "is_won"),
    [
        (0.94, [0.01, 1.0], True),
        (0.96, [0.01, 1.0], False),
        (0.5, [0.96, 1.0], False),
        (0.96, [0.01, 2.0], True),
    ],
)
def test_links_have_to_win_by_a_margin_on_the_slowest_rank(
    links_take: float, others: list[float], is_won: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank tells what this one is compared by; luck in two of five rounds is no gain."""
    moved = list[str]()
    lucky = itertools.cycle([0.1, links_take, 0.1, links_take, links_take])

    def row(move: Callable[[], Any], queues: object) -> tuple[list[Any], float]:
        return [], next(lucky) if move() == "links" else 1.0

    monkeypatch.setattr(trials, "row_of", row)
    ranks: Any = SimpleNamespace(gather=lambda own: [own, others])
    compared = trials.Comparison(ranks, None)  # type: ignore[arg-type]
    for what, key in (("first", 7), ("second", 7), ("other", 20)):
        links = functools.partial(lambda one: moved.append(one) or "links", what)
        assert compared.is_won(key, links, lambda: "plain") == is_won
    assert moved == ["first"] * 6 + ["other"] * 6  # once to tune, and once for each class
