"""All messages between the ranks of a process group, except the rows that exchanges carry.

Ranks agree on settings and share objects, and an error of one ends a call on all of them. Every
wait is bounded, and an error names the rank that had it.
"""

import functools
import itertools
import json
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from flashmoe_megatron.ending import end_destroyed
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    PeerTimeoutError,
    reason_of,
    told_error,
)
from flashmoe_megatron.torch_groups import is_destroyed, torch_group

Made = TypeVar("Made")
Value = TypeVar("Value")

STORE_PATIENCE = timedelta(seconds=5)
"""For the store of torchrun, which ends with the job."""
REFUSED = -1
"""A rank that refuses a call sends this in the place of every count."""
UNFOLLOWED = 1 << 40
"""A rank adds this to every count that it sends in a forward without a backward."""

_made: dict[tuple[Any, ...], Any] = {}
_named: "weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]]" = weakref.WeakKeyDictionary()
"""How many names have been given, by all ranks' group and the ranks that a name is for."""


def is_first(purpose: str) -> bool:
    """Returns whether this process is the first of its job to ask; not collective.

    So is a process that has no store in common with others, as without torchrun.

    Args:
        purpose: What it wants to do; the others are not to do it again.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store: Any = TCPStore(host, port, is_master=False, timeout=STORE_PATIENCE)
        elif dist.is_initialized():
            store = _get_default_store()
        else:
            return True
        return bool(store.add(f"flashmoe-first/{purpose}/{attempt}", 1) == 1)
    except RuntimeError:  # the store has ended, and with it the job
        return True


class OfGroup:
    """Belongs to a process group and cannot be copied: a copy of a layer shares it."""

    def __deepcopy__(self, memo: dict[int, object]) -> "OfGroup":
        return self

    def __reduce__(self) -> NoReturn:
        raise FlashMoEError(
            f"{type(self).__name__} belongs to the process group of this process and cannot be "
            "pickled: save and send the state_dict of the layer instead"
        )


class Ranks(OfGroup):
    """The ranks of a process group; every method is collective over them unless it says otherwise.

    A subclass may override :meth:`gather`, on which the methods above it rest.

    Args:
        group: The ranks, ``None`` for one; a wrapper of a process group stands for that group.
        exchange: Names this rank and its exchanges in the error for a peer that is gone.
        peers: Names those peers there.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, exchange: str = "", peers: str = "them"
    ) -> None:
        self.group: dist.ProcessGroup | None = torch_group(group)
        self._exchange, self._peers = exchange, peers

    @functools.cached_property
    def rank(self) -> int:
        """This rank in the group. Not collective."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @functools.cached_property
    def num_ranks(self) -> int:
        """Ranks of the group. Not collective."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, value: Value) -> list[Value]:
        """Returns every rank's value, in order; it is pickled."""
        everyone = [value] * self.num_ranks
        if self.num_ranks > 1:
            dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def all(
        self, make: Callable[[], Made], *, alike: Callable[[Made], Mapping[str, Any]] | None = None
    ) -> list[Made]:
        """Returns what every rank makes, in order; :meth:`gather` has to be able to send it.

        Args:
            make: Makes this rank's. Not collective.
            alike: Gives names and values of it that are to be the same on every rank.

        Raises:
            FlashMoEError: On every rank, the first rank's that could not make it. One rank's own
                error is raised as it is.
            ConfigError: On every rank, if a value differs: the first, and each rank's.
        """
        if self.num_ranks == 1:
            return [make()]
        made, reason, problem = None, None, None
        try:
            made = make()
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            reason, problem = reason_of(error), error
        sent: list[tuple[Any, str | None]] = self.gather((made, reason))
        if (first := first_error(why for _, why in sent)) is not None:
            raise first from problem
        everyone = [one for one, _ in sent]
        if alike is not None:
            check_alike(list(map(alike, everyone)))
        return everyone

    def each(self, make: Callable[[], Made]) -> Made:
        """Returns what this rank makes and no other gets, once every rank has made its own.

        ``make`` is not collective; for errors see :meth:`all`.
        """
        made: list[Made] = []
        self.all(lambda: made.append(make()))
        return made[0]

    def check_same(self, settings: dict[str, Any]) -> None:
        """Refuses settings, names and values, that are not the same on every rank.

        Raises:
            ConfigError: On every rank, naming the first setting that differs and each rank's value.
        """
        self.all(lambda: settings, alike=dict)

    def first_error(self, reason: str | None) -> FlashMoEError | None:
        """Returns one error on every rank, that of the first whose reason is not ``None``."""
        return first_error(self.gather(reason))

    def least(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the least of all ranks' values, element by element, in the same tensor."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def most(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the greatest of all ranks' values, element by element, in the same tensor."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.num_ranks > 1:
            dist.all_reduce(values, op=operation, group=self.group)
        return values

    def meet(self) -> None:
        """Waits until every rank has come here."""
        if self.num_ranks > 1:
            dist.barrier(self.group)

    def once(self, kind: type[Made], *key: Hashable, make: Callable[[], Made]) -> Made:
        """Makes one object of a class for this group and a key. As collective as ``make``.

        The key tells objects of that class apart, and may have further groups of torch's own.

        An object keeps its groups, which is why weak references to groups would never end. Instead,
        what was made for groups that have been destroyed is given up in the next call, whatever its
        kind: it lives on with the layers that have it, without what ends with a group.
        """
        end_destroyed()
        for known in [known for known in _made if any(map(is_destroyed, known))]:
            del _made[known]
        whole = (kind, self.group, *key)
        if whole not in _made:
            _made[whole] = make()
        made: Made = _made[whole]
        return made

    def next_name(self) -> str:
        """Returns a unique name, equal on all ranks of the group.

        The group's own name will not do: torch counts the groups that a process is in for those of
        a mesh, and ranks may be in different numbers of others; and where it splits a group it
        looks at ranks within that one, which those of other groups have, too.

        Numbers begin again where torch.distributed is initialized again, since processes may then
        be among the ranks that were not before.
        """
        world = dist.group.WORLD
        assert world is not None
        numbers = _named.setdefault(world, Counter())
        ranks = "-".join(map(str, dist.get_process_group_ranks(self.group)))
        number = numbers[ranks]
        numbers[ranks] += 1
        return f"{ranks}/{number}"

    @property
    def bounded(self) -> AbstractContextManager[None]:
        """Encloses the exchanges of a call, whose bound is the timeout of the process group.

        Raises:
            PeerTimeoutError: A rank is gone or did not come in time. The process group cannot be
                used again.
        """
        return _Bounded(self)

    def gone(self, reason: object) -> PeerTimeoutError:
        """Returns the error for a peer that is gone. Not collective."""
        exchange = self._exchange or (
            f"rank {self.rank}: an exchange with the other {self.num_ranks - 1} ranks"
        )
        return PeerTimeoutError(
            f"{exchange} failed, since one of {self._peers} is gone or did not come: {reason}"
        )


class _Bounded(AbstractContextManager[None]):
    """Turns torch.distributed's error for a peer that is gone into the package's own."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        """Does nothing: a call without an error costs nothing more."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, FlashMoEError):
            raise self._ranks.gone(error) from error


def first_error(reasons: Iterable[str | None]) -> FlashMoEError | None:
    """Returns the error of the first of all ranks that had one, ``None`` if none had."""
    told = (told_error(rank, one) for rank, one in enumerate(reasons) if one is not None)
    return next(told, None)


def by_rank(values: Iterable[object]) -> str:
    """Lists all ranks' values for a message."""
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def check_alike(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Refuses names and values of all ranks, in order, that differ. Not collective.

    Raises:
        ConfigError: Names the first that differs and each rank's value.
    """
    for name in everyone[0]:
        values = [other.get(name) for other in everyone]
        if any(value != values[0] for value in values):
            raise ConfigError(f"the ranks disagree on {name}: {by_rank(values)}; wanted one value")


def check_member(group: object, name: str = "group") -> None:
    """Refuses a process group, or a mesh, that this rank is not in. Not collective.

    Args:
        group: What a caller gives for a group; ``None`` passes.
        name: The argument's.

    Raises:
        ConfigError: On this rank; the ranks in the group do not wait for it.
    """
    if isinstance(group, DeviceMesh):
        is_member = group.get_coordinate() is not None
    else:
        is_member = group is None or isinstance(torch_group(group), dist.ProcessGroup)
    if not is_member:
        raise ConfigError(
            f"{name}={group!r} is no group of this rank: wanted a process group or a mesh that "
            "this rank is in, or no call by ranks outside"
        )


def unfollowed_ranks(told: Sequence[int]) -> tuple[int, ...]:
    """Returns the ranks without a backward of a forward, by one count that each has sent."""
    # A rank that refuses the call sends a negative number, with or without the addend.
    return tuple(rank for rank, count in enumerate(told) if count > UNFOLLOWED // 2)


class StoreRanks(Ranks):
    """Ranks that speak through the store of torch.distributed's rendezvous.

    No device takes part, and a rank may ask and go on. Values travel as JSON, so that a store that
    others can write to runs nothing; a tuple arrives as a list. A group of gloo's would have to be
    made by all ranks of the job, not by those of this group.

    Args:
        timeout: Seconds until a rank that does not answer is an error.
        purpose: Begins the names of the stored values.

    Attributes:
        look: Is called while this waits; may raise what makes it useless to wait any longer.
    """

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup, timeout: float, *, purpose: str) -> None:
        super().__init__(group)
        self.timeout = timeout
        self.look: Callable[[], None] = lambda: None
        self._prefix = f"flashmoe-{purpose}/{self.next_name()}"
        self._numbers = itertools.count()
        self._store: Any = _get_default_store()

    def ask(self, value: Value) -> "Answers[Value]":
        """Sends the others a value and begins to wait for theirs."""
        number = next(self._numbers)
        self._store.set(self._key(number, self.rank), json.dumps(value))
        return Answers(self, number)

    def gather(self, value: Value) -> list[Value]:
        """See the base class.

        Raises:
            PeerTimeoutError: A rank does not send its own within the time limit.
        """
        return self.ask(value).wait()

    def can_meet(self) -> bool:
        """Returns whether the group still exists; ranks of a destroyed group go their own ways."""
        return not is_destroyed(self.group)

    def leave(self) -> None:
        """Tells the others that this rank does nothing to them any more. Never waits."""
        if self._is_of_this_job():
            self._store.set(self._key("left", self.rank), "")

    def is_left(self) -> bool:
        """Returns whether every rank has left, or their job has ended."""
        if not self._is_of_this_job():
            return True
        try:
            return all(self.has("left", rank) for rank in range(self.num_ranks))
        except RuntimeError:  # the process that had the store is gone
            return True

    def has(self, number: int | str, rank: int) -> bool:
        """Returns whether a rank has sent its value of a number. Not collective."""
        return bool(self._store.check([self._key(number, rank)]))

    def read(self, number: int) -> list[Any]:
        """Returns every rank's value of a number, which all have sent."""
        keys = [self._key(number, rank) for rank in range(self.num_ranks)]
        values = [json.loads(self._store.get(key)) for key in keys]
        read = f"{self._prefix}/{number}/read"
        if self._store.add(read, 1) == self.num_ranks:  # no rank will ask for them any more
            for key in (read, *keys):
                self._store.delete_key(key)
        return values

    def _is_of_this_job(self) -> bool:
        return dist.is_initialized() and _get_default_store() is self._store

    def _key(self, number: int | str, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


class Answers(Generic[Value]):
    """Every rank's value, once all have sent theirs."""

    def __init__(self, ranks: StoreRanks, number: int) -> None:
        self._ranks, self._number = ranks, number

    def wait(self) -> list[Value]:
        """Waits for the values, and returns them in rank order.

        Raises:
            PeerTimeoutError: A rank does not send its own within the time limit.
        """
        ranks = self._ranks
        if silent := self.silent(ranks.timeout):
            raise PeerTimeoutError(
                f"rank {ranks.rank} has waited {ranks.timeout:g} s for rank {silent[0]}, which "
                "was to take part in setting up links or sharing their times"
            )
        return ranks.read(self._number)

    def silent(self, timeout: float) -> list[int]:
        """Waits some seconds for the values, and returns the ranks that have sent none by then."""
        ranks, pause = self._ranks, 1e-4
        deadline = time.monotonic() + timeout
        silent = list(range(ranks.num_ranks))
        while silent:
            # A thread that waits within the store keeps every other thread of the process out.
            if ranks.has(self._number, silent[0]):
                del silent[0]
                continue
            ranks.look()
            if time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 1e-2)
        return [rank for rank in silent if not ranks.has(self._number, rank)]
