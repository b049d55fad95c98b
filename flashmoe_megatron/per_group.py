"""What all layers over the same process groups share, and what their ranks tell each other."""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashmoe_megatron.ending import end_destroyed
from flashmoe_megatron.errors import ConfigError, first_told, reason_of
from flashmoe_megatron.torch_groups import is_destroyed, torch_group

Made = TypeVar("Made")

_made: dict[tuple[Hashable, ...], Any] = {}
_named: "weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]]" = weakref.WeakKeyDictionary()
"""How many names have been given, by all ranks' group and the ranks that a name is for."""


def once_per_group(kind: type[Made], *key: Hashable, make: Callable[[], Made]) -> Made:
    """Makes one object for each key, which names the process groups that the object is for.

    An object keeps its groups, which is why weak references to groups would never end. Instead,
    what was made for groups that have been destroyed is given up in the next call, whatever its
    kind: it lives on with the layers that have it, without what ends with a group.

    Args:
        kind: Its class.
        *key: Process groups of torch's own, and whatever else tells objects of that class apart.
        make: Makes it where there is none yet.

    Returns:
        The object.
    """
    end_destroyed()
    for known in [known for known in _made if any(map(is_destroyed, known))]:
        del _made[known]
    whole = (kind, *key)
    if whole not in _made:
        _made[whole] = make()
    made: Made = _made[whole]
    return made


def next_name(group: dist.ProcessGroup) -> str:
    """A name for what is made next for a group: alike on its ranks, and no other group's.

    Collective over the group. The group's own name will not do: torch counts the groups that a
    process is in for those of a mesh, and ranks may be in different numbers of others; and where it
    splits a group it looks at ranks within that one, which those of other groups have, too.

    Numbers begin anew where torch.distributed is initialized anew, since processes may then be
    among the ranks that were not before.
    """
    world = dist.group.WORLD
    assert world is not None
    numbers = _named.setdefault(world, Counter())
    ranks = "-".join(map(str, dist.get_process_group_ranks(torch_group(group))))
    number = numbers[ranks]
    numbers[ranks] += 1
    return f"{ranks}/{number}"


def from_all(make: Callable[[], Made], group: dist.ProcessGroup | None) -> list[Made]:
    """What every rank makes, in order. Collective over the group.

    Args:
        make: Makes this rank's, which can be pickled. Not collective.
        group: The ranks, ``None`` for one.

    Raises:
        FlashMoEError: On every rank, the first rank's that could not make it. One rank's own error
            is raised as it is.
    """
    group = torch_group(group)
    if group is None or dist.get_world_size(group) == 1:
        return [make()]
    made, reason, problem = None, None, None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        reason, problem = reason_of(error), error
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (made, reason), group=group)
    if (told := first_told(why for _, why in everyone)) is not None:
        raise told from problem
    return [one for one, _ in everyone]


def made_on_all(make: Callable[[], Made], group: dist.ProcessGroup | None) -> Made:
    """What this rank makes, once every rank has made its own; see :func:`from_all`.

    Args:
        make: Makes this rank's, which the others are not told. Not collective.
        group: The ranks, ``None`` for one.
    """
    made: list[Made] = []
    from_all(lambda: made.append(make()), group)
    return made[0]


def check_ranks_agree(group: dist.ProcessGroup | None, settings: dict[str, Any]) -> None:
    """Refuses settings that are not the same on every rank. Collective over the group.

    Args:
        group: The ranks to compare, ``None`` for one rank.
        settings: Names and values, any picklable.

    Raises:
        ConfigError: On every rank, naming the first setting that differs and each rank's value.
    """
    check_alike(from_all(lambda: settings, group))


def check_alike(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Refuses what ranks have told each other, if it is not the same of all. Not collective.

    Args:
        everyone: Names and values of each rank, in order.

    Raises:
        ConfigError: Names the first that differs and each rank's value.
    """
    for name in everyone[0]:
        values = [other.get(name) for other in everyone]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ConfigError(f"the ranks disagree on {name}: {listed}; wanted one value")


def check_member(group: object, name: str = "group") -> None:
    """Refuses a process group, or a mesh, that this rank is not in. Not collective.

    Args:
        group: What a caller gives for a group; ``None`` passes.
        name: The argument's.

    Raises:
        ConfigError: On this rank, for which those in the group do not wait.
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
