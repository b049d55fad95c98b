"""The times of transfers: of trials, of windows on which all ranks agree, and of a comparison."""

import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from flashmoe_megatron.multipath.balancer import WINDOW
from flashmoe_megatron.multipath.links import Moved, seconds_between
from flashmoe_megatron.multipath.queues import Queues
from flashmoe_megatron.ranks import Answers, StoreRanks

_SAMPLES = 8
"""One in so many transfers is timed, since that takes a GPU time."""
_ROUNDS = 5
"""Links and torch.distributed are tried so often; medians count."""
_MARGIN = 0.05
"""Links have to take so much less time: a host that is late is in a trial by chance, and links
cost it more than torch.distributed does."""

_Result = TypeVar("_Result")
_Row = tuple[tuple[float, ...], Sequence[Moved | None]]
"""A transfer's shares, and what each link moved of it."""


def greatest(rows: Sequence[Sequence[float]]) -> list[float]:
    """The greatest of each column."""
    return [max(column) for column in zip(*rows, strict=True)]


def row_of(move: Callable[[], _Result], queues: Queues) -> tuple[list[_Result], float]:
    """Makes several transfers after a first, uncounted transfer.

    Returns:
        The result of each, and seconds from the end of the first one to that of the last one over
        their number.
    """
    move()
    begin = queues.mark()
    runs = [move() for _ in range(queues.repeats)]
    return runs, seconds_between(begin, queues.mark()) / queues.repeats


def one_of_a_row(
    move: Callable[[bool], Sequence[Moved | None]],
    queues: Queues,
    gather: Callable[[list[float]], list[list[float]]],
) -> list[float]:
    """Each link's seconds for a transfer, as a share of several consecutive ones.

    The slowest link's are what a caller gets, so they include the overlap of a transfer with the
    one before it, and the time of the host and of the ranks' meetings. The others' are in
    proportion.

    Args:
        move: Issues a transfer, timed or not; gives what each link moves, ``None`` for one without
            bytes.
        queues: Say how many transfers count.
        gather: Tells all ranks a row of numbers and gives theirs.
    """
    # The first transfer does not count, and only the last one is timed.
    are_timed = iter([False] * queues.repeats + [True])
    runs, took = row_of(lambda: move(next(are_timed)), queues)
    *each, took = greatest(gather([*seconds_of(runs[-1]), took]))
    slowest = max(each) or 1.0
    return [took * one / slowest for one in each]


def seconds_of(links: Sequence[Moved | None]) -> list[float]:
    """Each link's seconds, 0 for one without bytes."""
    return [one.seconds() if one else 0.0 for one in links]


class Timed(NamedTuple):
    """A transfer whose times are known, link by link, with the bytes that this rank received.

    The seconds are the slowest rank's, or this rank's own where one link carried all.
    """

    shares: tuple[float, ...]
    seconds: Sequence[float]
    moved: Sequence[int]


class Times:
    """The times of the transfers of a size class, until all ranks have agreed on them.

    The times of a window are asked for when the next one is full, so that no rank waits for a
    transfer, and used when the one after that is, so that no rank waits for another.
    """

    def __init__(self, ranks: StoreRanks) -> None:
        self._ranks, self._count = ranks, 0
        self._window: list[_Row] = []
        self._full: list[_Row] = []
        self._asked: tuple[Answers[list[float]] | None, list[Timed]] | None = None

    def is_next_timed(self) -> bool:
        """Returns whether the next transfer is timed; on every rank or on none."""
        self._count += 1
        return self._count % _SAMPLES == 0

    def add(self, shares: tuple[float, ...], links: Sequence[Moved | None]) -> Iterator[Timed]:
        """Takes a timed transfer, link by link; gives earlier ones with times, now and then."""
        self._window.append((shares, links))
        if len(self._window) < WINDOW:
            return
        if self._asked is not None:
            answers, timed = self._asked
            if answers is not None:
                values, width = greatest(answers.wait()), len(links)
                rows = [values[begin : begin + width] for begin in range(0, len(values), width)]
                timed = [one._replace(seconds=row) for one, row in zip(timed, rows, strict=True)]
            yield from timed
            self._asked = None
        if self._full:
            timed = [
                Timed(by, seconds_of(row), [one.nbytes if one else 0 for one in row])
                for by, row in self._full
            ]
            # Times of one link alone move nothing, so that ranks need not agree on them.
            alone = all(sum(one is not None for one in row) == 1 for _, row in self._full)
            values = [value for one in timed for value in one.seconds]
            self._asked = (None if alone else self._ranks.ask(values)), timed
        self._full, self._window = self._window, []


class Comparison:
    """Tries gathers by links and by torch.distributed alternately, once for each size class."""

    def __init__(self, ranks: StoreRanks, queues: Queues) -> None:
        self._ranks, self._queues = ranks, queues
        self._is_won: dict[Hashable, bool] = {}

    def is_won(
        self, key: Hashable, links: Callable[[], object], plain: Callable[[], object]
    ) -> bool:
        """Returns whether links are faster. The first time, it is collective and waits for the GPU.

        Args:
            key: The size class, and which shares it has.
            links: Gathers by links.
            plain: Does the same by torch.distributed, in the current stream.
        """
        if key not in self._is_won:
            links()  # which tunes
            rounds = [
                (row_of(links, self._queues)[1], row_of(plain, self._queues)[1])
                for _ in range(_ROUNDS)
            ]
            own = [statistics.median(column) for column in zip(*rounds, strict=True)]
            by_links, by_plain = greatest(self._ranks.gather(own))
            self._is_won[key] = by_links <= (1 - _MARGIN) * by_plain
        return self._is_won[key]
