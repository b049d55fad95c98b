"""Puts off errors of launches to the end of a step that its caller can repeat.

Some ranks learn of an overflow at once and others late, and ranks of other groups not at all. So in
a step that may be repeated no call raises it: outputs are NaN, backwards take part in nothing, and
all ranks of the job decide after the step what becomes of it.
"""

import contextlib
import math
from collections.abc import Iterator

from flashmoe_megatron.errors import FlashMoEError, RoutingError, RowBoundError

ROOM = 1.1
"""Buffers hold so many times what the fullest rank and layer needed with exact buffers."""


class Attempts:
    """The steps of one caller, which the backends of its layers share.

    Attributes:
        is_exact: Buffers are as large as rows need, so that none overflows.
        blocks: Blocks of rows that buffers hold at least, whatever their own bound is.
        errors: The errors that were put off, the oldest first.
        most: The most blocks that a rank received in exact buffers, since it was set to 0.
    """

    def __init__(self) -> None:
        self.is_exact = False
        self.blocks = 0
        self.most = 0
        self.errors: list[FlashMoEError] = []
        self._is_open = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Puts errors off within; those of an earlier step are forgotten."""
        self.errors = []
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Makes buffers exact in its body, and measures again how many blocks they need."""
        self.is_exact, self.most = True, 0
        try:
            yield
        finally:
            self.is_exact = False

    def put_off(self, error: Exception) -> bool:
        """Keeps an error of a call for the end of the step; ``False`` if the call has to raise it.

        NaN in a layer's output makes the routing of the next layers unusable, on other ranks, too.
        """
        if not self._is_open or not isinstance(error, RowBoundError | RoutingError):
            return False
        self.errors.append(error)
        return True

    def grow(self, most: int) -> None:
        """Gives buffers room for the most blocks that any rank has needed, and for more."""
        self.blocks = max(self.blocks, math.ceil(ROOM * max(most, 1)))

    def final_error(self, why: str) -> RowBoundError:
        """Returns the error of an overflow after which the step is not repeated."""
        own = next((one for one in self.errors if isinstance(one, RowBoundError)), None)
        said = str(own or "a rank was to receive more rows than its buffers hold: raise row_bound")
        return RowBoundError(f"{said} ({why})")

    def raise_first(self) -> None:
        """Raises the oldest error that was put off, if there is one."""
        for error in self.errors:
            raise error

    @property
    def has_overflown(self) -> bool:
        """Tells whether some rows had no room."""
        return any(isinstance(error, RowBoundError) for error in self.errors)

    @property
    def is_unknown(self) -> bool:
        """Tells that a bound that is to be measured has not been, and is not being measured."""
        return not (self.blocks or self.is_exact)

    def bound(self, blocks: int | None) -> int | None:
        """Returns the blocks that buffers hold now, by their own bound; ``None`` if as needed.

        Their own bound is 0 where it is to be measured.
        """
        return None if blocks is None or self.is_exact else max(blocks, self.blocks) or None

    def note(self, blocks: int) -> None:
        """Notes the blocks that a rank has received in exact buffers."""
        if self.is_exact:
            self.most = max(self.most, blocks)


ATTEMPTS = Attempts()
"""The steps of this process, which all of its layers share."""
