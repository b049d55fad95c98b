"""Every order in which a small model can go on."""

from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


class Model(Protocol[State]):
    """Something whose steps may follow one another in many orders."""

    def start(self) -> State:
        """Where it begins."""

    def is_over(self, state: State) -> bool:
        """Whether nothing is left to do."""

    def next(self, state: State) -> Iterable[State]:
        """The states that one step leads to.

        Raises:
            AssertionError: A step does what must not be.
        """


def explore(model: Model[State]) -> int:
    """Visits all states that can come about; gives their number.

    Raises:
        AssertionError: A step does what must not be, or nobody can go on.
    """
    seen, left = {model.start()}, [model.start()]
    while left:
        state = left.pop()
        following = list(model.next(state))
        assert following or model.is_over(state), f"nobody can go on: {state}"
        for one in following:
            if one not in seen:
                seen.add(one)
                left.append(one)
    return len(seen)
