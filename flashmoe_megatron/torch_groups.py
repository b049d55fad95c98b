"""Process groups of torch's own: the groups that wrappers stand for, and destroyed groups.

Frameworks for reinforcement learning give Megatron wrappers of process groups, whose inner groups
they destroy before a rollout and make again after it. What ranks share depends on the inner group,
so that everything of this package that is kept for a group is kept for that one.
"""

from typing import Any

import torch.distributed as dist

from flashmoe_megatron.errors import ConfigError


def torch_group(group: Any) -> Any:
    """The group of torch's own that a process group stands for now. Not collective.

    Args:
        group: A process group; or a wrapper of one, which holds it in an attribute or has its
            ``group_name``, and may have another class; or anything else.

    Returns:
        The inner group of a wrapper, which may have been destroyed by now. Whatever is no wrapper,
        or holds no group at the moment, comes back as it is.

    Raises:
        ConfigError: A wrapper holds several groups that are there.
    """
    if group is None or _is_known(group):
        return group
    values = getattr(group, "__dict__", {}).values()
    held = [one for one in values if isinstance(one, dist.ProcessGroup)]
    inner = list(dict.fromkeys(map(torch_group, held)))
    there = list(filter(_is_known, inner))
    if len(there) > 1:
        raise ConfigError(
            f"{type(group).__name__} holds {len(there)} process groups: wanted a wrapper of one"
        )
    if not inner and not isinstance(group, dist.ProcessGroup):
        name = getattr(group, "group_name", None)
        known = dist.distributed_c10d._world.pg_map
        inner = [one for one in known if one.group_name == name]
    return next(iter(there or inner), group)


def living_group(group: Any) -> Any:
    """Returns :func:`torch_group` for the group of something that is used once more.

    Raises:
        ConfigError: The group has been destroyed, and has not been made again.
    """
    found = torch_group(group)
    if found is not None and not _is_known(found):
        raise ConfigError(
            "the process group of these experts has been destroyed: wanted it to be made again in "
            "the wrapper that they were given, or new layers for a new group"
        )
    return found


def is_destroyed(group: object) -> bool:
    """Returns whether something is a group of torch's own that has been destroyed.

    A wrapper is none, which says nothing of its inner group: see :func:`torch_group`. Nor is a
    process group of another class, which torch has never had in its tables.
    """
    return type(group) is dist.ProcessGroup and not _is_known(group)


def _is_known(group: Any) -> bool:
    try:
        return group in dist.distributed_c10d._world.pg_map
    except TypeError:  # what has no hash is no group
        return False
