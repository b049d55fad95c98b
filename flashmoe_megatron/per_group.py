"""What all layers over the same process groups share."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist

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


def is_destroyed(part: Hashable) -> bool:
    """Whether something is a process group that has been destroyed."""
    return isinstance(part, dist.ProcessGroup) and part not in dist.distributed_c10d._world.pg_map
