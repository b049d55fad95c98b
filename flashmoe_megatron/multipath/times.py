"""The times of transfers, on which all ranks agree some windows at once."""

from collections.abc import Iterator, Sequence

from flashmoe_megatron.multipath.balancer import WINDOW
from flashmoe_megatron.multipath.control import Answers, Control, greatest
from flashmoe_megatron.multipath.links import Moved
from flashmoe_megatron.multipath.trials import seconds_of

_WINDOWS = 4
"""Windows whose times ranks tell each other at once, since that takes the host a millisecond."""


_SAMPLES = 8
"""One in so many transfers is timed where times decide nothing."""


class Times:
    """The times of the transfers of a size class, until all ranks have agreed on them.

    The times of some windows are asked for when the next ones are full, so that nobody waits for a
    transfer, and used when those after them are, so that nobody waits for a rank.
    """

    def __init__(self, control: Control) -> None:
        self._control, self._count = control, 0
        self._window: list[Sequence[Moved | None]] = []
        self._full: list[Sequence[Moved | None]] = []
        self._asked: tuple[Answers[list[float]] | None, list[float], list[list[int]]] | None = None

    def is_sample(self) -> bool:
        """Whether the next one is to be timed of transfers whose times decide nothing."""
        self._count += 1
        return self._count % _SAMPLES == 0

    def add(self, links: Sequence[Moved | None]) -> Iterator[tuple[Sequence[float], Sequence[int]]]:
        """Takes a transfer, link by link; gives times and bytes of earlier ones, now and then."""
        self._window.append(links)
        if len(self._window) < _WINDOWS * WINDOW:
            return
        if self._asked is not None:
            asked, values, moved = self._asked
            if asked is not None:
                values = greatest(asked.wait())
            width = len(links)
            for index, nbytes in enumerate(moved):
                yield values[index * width : (index + 1) * width], nbytes
            self._asked = None
        if self._full:
            values = [one for row in self._full for one in seconds_of(row)]
            moved = [[one.num_bytes() if one else 0 for one in row] for row in self._full]
            # Times of one link alone move nothing, so that nobody has to agree on them.
            alone = all(sum(one is not None for one in row) == 1 for row in self._full)
            self._asked = (None if alone else self._control.ask(values), values, moved)
        self._full, self._window = self._window, []
