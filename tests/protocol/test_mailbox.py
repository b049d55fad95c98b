"""The mailbox through which a cluster's warps learn of tiles, in every order: tile/pipeline.cuh.

A model, since what it is made of are the GPU's own barriers. What it takes for granted: a load is
done at any time between its issue and the first use of its value, also behind an arrival at another
CTA's barrier that was issued later.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.protocol.orders import explore

SLOTS = 2


@dataclass(frozen=True)
class Reader:
    """One warp.

    Attributes:
        taken: Tiles that it has taken.
        is_loading: Whether it has begun to take the next one, and has not yet its description.
        has_arrived: Whether it has given that one's slot back.
    """

    taken: int = 0
    is_loading: bool = False
    has_arrived: bool = False

    def gave_back(self) -> int:
        """How many slots, one after another."""
        return self.taken + self.has_arrived


@dataclass(frozen=True)
class State:
    """How many tiles are announced, and where the readers are."""

    announced: int
    readers: tuple[Reader, ...]


@dataclass(frozen=True)
class Mailbox:
    """Tiles for some readers.

    Attributes:
        num_tiles: How many tiles are announced one after another, each in the next slot.
        num_readers: How many readers there are, all of which take every tile.
        depends: Whether an arrival depends on what was loaded.
    """

    num_tiles: int
    num_readers: int
    depends: bool

    def start(self) -> State:
        return State(0, (Reader(),) * self.num_readers)

    def is_over(self, state: State) -> bool:
        return all(reader.taken == self.num_tiles for reader in state.readers)

    def next(self, state: State) -> Iterator[State]:
        given_back = min(reader.gave_back() for reader in state.readers)
        if state.announced < self.num_tiles and state.announced - given_back < SLOTS:
            yield replace(state, announced=state.announced + 1)
        for which, reader in enumerate(state.readers):
            for after in self._steps(reader, state.announced):
                readers = (*state.readers[:which], after, *state.readers[which + 1 :])
                yield replace(state, readers=readers)

    def _steps(self, reader: Reader, announced: int) -> Iterator[Reader]:
        if not reader.is_loading:
            if reader.taken < announced:
                yield replace(reader, is_loading=True)
            return
        if not reader.has_arrived and not self.depends:
            yield replace(reader, has_arrived=True)
        if self.depends or reader.has_arrived:
            # The slot's last announcement is what the load finds.
            found = announced - 1 - (announced - 1 - reader.taken) % SLOTS
            assert found == reader.taken, f"tile {found} for tile {reader.taken}"
            yield Reader(reader.taken + 1)


@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_whoever_is_late_all_take_the_same_tiles(num_readers: int) -> None:
    assert explore(Mailbox(5, num_readers, depends=True)) > 5


def test_the_last_reader_would_take_a_later_tile_if_its_arrival_overtook_its_load() -> None:
    with pytest.raises(AssertionError, match="tile 2 for tile 0"):
        explore(Mailbox(3, 1, depends=False))
