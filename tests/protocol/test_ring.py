"""The ring of stages between loader and processors, in every order: tile/mainloop.cuh.

A model, since what it is made of are the GPU's own barriers. What it takes for granted: a barrier
is looked at by the parity of a phase alone, products bring the warps of a processor together, and
one of them then releases the stage for all.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.protocol.orders import explore

STAGES = 3


@dataclass(frozen=True)
class State:
    """What of the ring tells one moment from another.

    Attributes:
        filled: Stages that the loader has filled so far, round after round.
        released: Stages that each processor has released.
        gone: Stages that each warp of each processor has gone past.
    """

    filled: int
    released: tuple[int, ...]
    gone: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Ring:
    """One tile.

    Attributes:
        num_k_blocks: How many stages the tile has.
        multiplied: Stages that each processor multiplies, from the first on; it skips the others.
        together: Whether a processor's warps see a skipped stage together.
        warps: How many a processor has; the first releases.
    """

    num_k_blocks: int
    multiplied: tuple[int, ...]
    together: bool
    warps: int = 2

    def start(self) -> State:
        return State(0, (0,) * len(self.multiplied), ((0,) * self.warps,) * len(self.multiplied))

    def is_over(self, state: State) -> bool:
        return all(warp == self.num_k_blocks for warps in state.gone for warp in warps)

    def next(self, state: State) -> Iterator[State]:
        """The states that one step leads to.

        Raises:
            AssertionError: Somebody takes a stage for another.
        """
        if state.filled < self.num_k_blocks and state.filled - min(state.released) < STAGES:
            yield replace(state, filled=state.filled + 1)
        for processor, warps in enumerate(state.gone):
            meet = self.together or warps[0] < self.multiplied[processor]
            for warp, at in enumerate(warps):
                if at == self.num_k_blocks or not self._looks_filled(state, at):
                    continue
                if not meet:
                    yield self._go(state, processor, (warp,))
                elif at == min(warps) == max(warps):
                    # Each of them looks for itself; nothing can change before the last has.
                    yield self._go(state, processor, range(self.warps))

    def _looks_filled(self, state: State, at: int) -> bool:
        """By parity: whether as many fillings of its place are over as its own makes, or two fewer
        or more."""
        place, turn = at % STAGES, at // STAGES
        fillings = (state.filled - place + STAGES - 1) // STAGES
        return fillings % 2 != turn % 2

    def _go(self, state: State, processor: int, warps: Iterable[int]) -> State:
        gone, released = [list(each) for each in state.gone], list(state.released)
        for warp in warps:
            at = gone[processor][warp]
            assert at < state.filled <= at + STAGES, f"stage {at} of {state.filled} is another"
            gone[processor][warp] += 1
            if warp == 0:
                released[processor] += 1
        return State(state.filled, tuple(released), tuple(map(tuple, gone)))


@pytest.mark.parametrize("multiplied", [(12, 12), (12, 1), (1, 1)], ids=str)
def test_whoever_is_late_the_stages_stay_apart(multiplied: tuple[int, ...]) -> None:
    assert explore(Ring(12, multiplied, together=True)) > 12


@pytest.mark.parametrize("num_k_blocks", [1, 2, 3, 4])
def test_as_many_stages_as_the_ring_and_one_cannot_be_mistaken(num_k_blocks: int) -> None:
    explore(Ring(num_k_blocks, (num_k_blocks, 1), together=False))


@pytest.mark.parametrize("num_k_blocks", [5, 12])
def test_it_would_hang_if_warps_released_what_others_have_not_seen(num_k_blocks: int) -> None:
    with pytest.raises(AssertionError, match="nobody can go on"):
        explore(Ring(num_k_blocks, (num_k_blocks, 1), together=False))
