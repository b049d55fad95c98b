"""Trials of stage one."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from flashmoe_megatron.multipath.control import greatest
from flashmoe_megatron.multipath.links import Moved, seconds_between
from flashmoe_megatron.multipath.queues import Queues

_Result = TypeVar("_Result")


def one_of_a_row(
    move: Callable[[bool], Sequence[Moved | None]],
    queues: Queues,
    gather: Callable[[list[float]], list[list[float]]],
) -> list[float]:
    """Each link's seconds for a transfer, as a share of several consecutive ones.

    The slowest link's are what a caller gets: the time from the end of the first transfer to the
    end of the last one over their number. So they include the overlap of a transfer with the one
    before it, and the time of the host and of the ranks' meetings. The others' are in proportion.

    Args:
        move: Issues a transfer, timed or not; gives what each link moves, ``None`` for one without
            bytes.
        queues: Say how often, and have the current one.
        gather: Tells all ranks a row of numbers and gives theirs.
    """
    # The first transfer does not count, and only the last one is timed.
    are_timed = iter([False] * queues.repeats + [True])
    runs, took = row_of(lambda: move(next(are_timed)), queues)
    *each, took = greatest(gather([*seconds_of(runs[-1]), took]))
    slowest = max(each) or 1.0
    return [took * one / slowest for one in each]


def row_of(move: Callable[[], _Result], queues: Queues) -> tuple[list[_Result], float]:
    """Makes several transfers after a first, uncounted transfer.

    Args:
        move: Issues a transfer.
        queues: As in :func:`one_of_a_row`.

    Returns:
        What each gave, and seconds from the end of the first one to that of the last one over their
        number.
    """
    move()
    begin = queues.mark()
    runs = [move() for _ in range(queues.repeats)]
    return runs, seconds_between(begin, queues.mark()) / queues.repeats


def seconds_of(links: Sequence[Moved | None]) -> list[float]:
    """Each link's seconds, 0 for one without bytes."""
    return [one.seconds() if one else 0.0 for one in links]
