"""What all layers over the same process groups share, and what their ranks tell each other."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist

from flashmoe_megatron.errors import FlashMoEError, first_told, reason_of

Made = TypeVar("Made")

_made: dict[tuple[Hashable, ...], Any] = {}


def once_per_group(kind: type[Made], *key: Hashable, make: Callable[[], Made]) -> Made:
    """Makes one object for each key, which names the process groups that the object is for.

    An object keeps its groups, which is why weak references to groups would never end. Instead,
    what was made for groups that have been destroyed is given up in the next call, whatever its
    kind: it lives on with the layers that have it.

    Args:
        kind: Its class.
        *key: Process groups, and whatever else tells objects of that class apart.
        make: Makes it where there is none yet.

    Returns:
        The object.
    """
    for known in [known for known in _made if any(map(is_destroyed, known))]:
        del _made[known]
    whole = (kind, *key)
    if whole not in _made:
        _made[whole] = make()
    made: Made = _made[whole]
    return made


def from_all(make: Callable[[], Made], group: dist.ProcessGroup | None = None) -> list[Made]:
    """What every rank makes, in order. Collective over a group, by default all ranks.

    Raises:
        FlashMoEError: On every rank, the first rank's that could not make it.
    """
    made: Any = None
    reason = None
    try:
        made = make()
    except FlashMoEError as error:
        reason = reason_of(error)
    everyone = [(made, reason)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (made, reason), group=group)
    if (told := first_told(why for _, why in everyone)) is not None:
        raise told
    return [one for one, _ in everyone]


def is_destroyed(part: Hashable) -> bool:
    """Whether something is a process group that has been destroyed."""
    return isinstance(part, dist.ProcessGroup) and part not in dist.distributed_c10d._world.pg_map
