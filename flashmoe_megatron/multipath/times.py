"""The times of transfers, on which all ranks agree a window at a time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flashmoe_megatron.multipath.balancer import WINDOW
from flashmoe_megatron.multipath.control import Control, greatest
from flashmoe_megatron.multipath.links import Moved
from flashmoe_megatron.multipath.trials import seconds_of
from flashmoe_megatron.ranks import Answers

_SAMPLES = 8
"""One in so many transfers is timed, since that takes a GPU time."""

_Row = tuple[tuple[float, ...], Sequence[Moved | None]]
"""A transfer's shares, and what each link moved of it."""


class Timed(NamedTuple):
    """A transfer whose times are known, link by link.

    Attributes:
        shares: The shares that it used.
        seconds: As the slowest rank saw them; where one link carried all, as this rank did.
        moved: Bytes that this rank received.
    """

    shares: tuple[float, ...]
    seconds: Sequence[float]
    moved: Sequence[int]


class Times:
    """The times of the transfers of a size class, until all ranks have agreed on them.

    The times of a window are asked for when the next one is full, so that no rank waits for a
    transfer, and used when the one after that is, so that no rank waits for another.

    Args:
        control: The ranks.
    """

    def __init__(self, control: Control) -> None:
        self._control, self._count = control, 0
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
                Timed(by, seconds_of(row), [one.num_bytes() if one else 0 for one in row])
                for by, row in self._full
            ]
            # Times of one link alone move nothing, so that ranks need not agree on them.
            alone = all(sum(one is not None for one in row) == 1 for _, row in self._full)
            values = [value for one in timed for value in one.seconds]
            self._asked = (None if alone else self._control.ask(values)), timed
        self._full, self._window = self._window, []
