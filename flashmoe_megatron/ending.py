"""Gives back what the ranks of a process group share before torch destroys the group.

A rank that freed its memory while a peer's GPU is at work on it, or has it mapped, would pull it
away. So every rank leaves the others' memory first, and frees its own once all have left, which
they tell each other through the job's store: a group that is being destroyed carries nothing any
more, and its ranks may come here at different times.
"""

import functools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from flashmoe_megatron.torch_groups import is_destroyed

logger = logging.getLogger("flashmoe_megatron")

PATIENCE_S = 10.0
"""Seconds that the destruction of a group waits until other ranks destroy it, too. What is not free
by then is freed in a later call, since these ranks may be as late as they like."""
_PAUSE_S = 1e-3


class EndsWithGroup(ABC):
    """Something that a process group's ranks share, and cannot use once the group is destroyed."""

    @abstractmethod
    def leave(self) -> None:
        """Ends this rank's work on other ranks' memory, unmaps it and tells them; never waits.

        No call comes after it but of the other two methods.
        """

    @abstractmethod
    def is_left(self) -> bool:
        """Returns whether every rank has left, or is not to be waited for."""

    @abstractmethod
    def free(self) -> None:
        """Gives back this rank's own memory, which no other rank uses any more."""


_ending: "weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[EndsWithGroup]]" = (
    weakref.WeakKeyDictionary()
)
_left: list[EndsWithGroup] = []
"""Shared things that this rank has left and other ranks have not."""
_owned: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Groups that have ended with another group; only this package knew their members."""


def ends_with(group: dist.ProcessGroup | None, one: EndsWithGroup) -> None:
    """Has something end before a group of torch's own is destroyed. Not collective.

    Where torch's function is called by a name from before this call, it ends in the next call of
    this package.
    """
    if group is None:
        return
    _hook()
    _ending.setdefault(group, weakref.WeakSet()).add(one)


def end_destroyed() -> None:
    """Ends what was shared by groups that have been destroyed, and frees what all have left."""
    gone = [group for group in _ending if is_destroyed(group)]
    if gone:
        _end(gone)
    elif _left:
        _free_left()


def destroy_own(group: dist.ProcessGroup | None) -> None:
    """Destroys a group that this package has made, with everything that has been made for it."""
    if group is not None and not is_destroyed(group):
        dist.destroy_process_group(group)
        _owned.add(group)


def _hook() -> None:
    """Puts a function that ends what is shared in front of torch's, once."""
    original = distributed_c10d.destroy_process_group
    if getattr(original, "_flashmoe_ends", False):
        return

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group in _owned and is_destroyed(group):
            return
        known = distributed_c10d._world.pg_map
        is_all = group is None or group is dist.group.WORLD
        _end([one for one in list(_ending) if is_all or one is group if one in known])
        original(group)

    destroy_process_group._flashmoe_ends = True  # type: ignore[attr-defined]
    for module in (distributed_c10d, dist):
        if vars(module)["destroy_process_group"] is original:
            vars(module)["destroy_process_group"] = destroy_process_group


def _end(groups: Iterable[dist.ProcessGroup]) -> None:
    """Leaves what groups share, and frees it if all other ranks leave it, too, before long."""
    leaving = [one for group in groups for one in _ending.pop(group, ())]
    for one in leaving:
        try:
            one.leave()
        except Exception as error:  # noqa: BLE001 - a GPU that has failed keeps no group alive
            logger.warning("%s was broken as its group ended: %s", type(one).__name__, error)
    _left.extend(leaving)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        _free_left()
        waiting = [one for one in leaving if one in _left]
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(_PAUSE_S)
    if waiting:
        logger.warning(
            "other ranks have not destroyed a process group within %g s: the memory that its "
            "ranks share is freed once they have, in a later call of flashmoe",
            PATIENCE_S,
        )


def _free_left() -> None:
    for one in list(_left):
        if one not in _left or not one.is_left():  # what one frees may have freed the next
            continue
        _left.remove(one)
        try:
            one.free()
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("%s could not be freed: %s", type(one).__name__, error)
