"""What the ranks of a transfer tell each other beside it: addresses, times, and what went wrong."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    PeerTimeoutError,
    first_told,
    reason_of,
)
from flashmoe_megatron.per_group import check_member, next_name
from flashmoe_megatron.torch_groups import is_destroyed, torch_group

Value = TypeVar("Value")


class Control:
    """Values of all ranks of a group, by the store through which torch.distributed has met.

    They travel as JSON, so that a store that others can write to runs nothing; a tuple arrives as a
    list.

    A group of gloo's would have to be made by all ranks of the job, not by those of this group.

    Args:
        group: The ranks; ``None`` for all of them.
        timeout: Seconds until a rank that does not answer is an error.

    Attributes:
        rank: This rank in the group.
        num_ranks: Ranks of the group.
        look: Called while this waits; may raise what makes it useless to wait any longer.

    Raises:
        ConfigError: torch.distributed is not initialized, or the group has one rank, or others than
            this one.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized: wanted a process group")
        check_member(group)
        self.group: dist.ProcessGroup = torch_group(group or dist.group.WORLD)
        self.timeout = timeout
        self.rank, self.num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.num_ranks < 2:
            raise ConfigError("the group has one rank: wanted at least 2, between which links are")
        self._prefix = f"flashmoe-multipath/{next_name(self.group)}"
        self._numbers = itertools.count()
        self._store = _get_default_store()
        self.look: Callable[[], None] = lambda: None

    def can_meet(self) -> bool:
        """Whether the group is still there; the ranks of a destroyed one go their own ways."""
        return not is_destroyed(self.group)

    def leave(self) -> None:
        """Tells the others that this rank does nothing to them any more. Never waits."""
        if self._is_of_this_job():
            self._store.set(self._key("left", self.rank), "")

    def is_left(self) -> bool:
        """Whether every rank has left, or the job ends whose ranks could tell each other."""
        if not self._is_of_this_job():
            return True
        keys = [self._key("left", rank) for rank in range(self.num_ranks)]
        try:
            return all(self._store.check([key]) for key in keys)
        except RuntimeError:  # the process that had the store is gone
            return True

    def _is_of_this_job(self) -> bool:
        return dist.is_initialized() and _get_default_store() is self._store

    def ask(self, value: Value) -> "Answers[Value]":
        """Tells the others a value and begins to wait for theirs. Collective."""
        number = next(self._numbers)
        self._store.set(self._key(number, self.rank), json.dumps(value))
        return Answers(self, number)

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in rank order. Collective.

        Raises:
            PeerTimeoutError: A rank does not tell its own within the time limit.
        """
        return self.ask(value).wait()

    def agree(self, make: Callable[[], Value]) -> list[Value]:
        """Every rank's result, or the same error on every rank. Collective.

        Args:
            make: May raise; a rank that fails alone would leave the others waiting.
        """
        value, reason, problem = None, None, None
        try:
            value = make()
        except (FlashMoEError, OSError, RuntimeError) as error:
            reason, problem = reason_of(error), error
        answers = self.gather((value, reason))
        if (told := first_told(why for _, why in answers)) is not None:
            raise told from problem
        return [one for one, _ in answers]  # type: ignore[misc]

    def read(self, number: int) -> list[Any]:
        """Every rank's value of a number; waits for it."""
        deadline, pause = time.monotonic() + self.timeout, 1e-4
        values = []
        for rank in range(self.num_ranks):
            key = self._key(number, rank)
            # Whoever waits within the store keeps every other thread of the process out of it.
            while not self._store.check([key]):
                self.look()
                if time.monotonic() > deadline:
                    raise PeerTimeoutError(
                        f"rank {self.rank} has waited {self.timeout:g} s for rank {rank}, which "
                        "was to take part in setting up links or sharing their times"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 1e-2)
            values.append(json.loads(self._store.get(key)))
        read = f"{self._prefix}/{number}/read"
        if self._store.add(read, 1) == self.num_ranks:  # nobody will ask for them any more
            for key in (read, *(self._key(number, rank) for rank in range(self.num_ranks))):
                self._store.delete_key(key)
        return values

    def _key(self, number: int | str, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


class Answers(Generic[Value]):
    """Every rank's value, once all have told theirs."""

    def __init__(self, control: Control, number: int) -> None:
        self._control, self._number = control, number

    def wait(self) -> list[Value]:
        """The values, in rank order, for which this waits.

        Raises:
            PeerTimeoutError: A rank does not tell its own within the time limit.
        """
        return self._control.read(self._number)


def greatest(rows: Sequence[Sequence[float]]) -> list[float]:
    """The greatest of each column."""
    return [max(column) for column in zip(*rows, strict=True)]
