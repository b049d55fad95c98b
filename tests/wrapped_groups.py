"""Wrappers of process groups whose inner groups end and are made again, as for sleeping models.

Frameworks for reinforcement learning hand Megatron such wrappers: before a rollout they destroy the
inner groups by torch's own function, which frees what communication holds on GPUs, and after it
they make new ones of the same ranks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

_FORWARDED = (
    "rank",
    "size",
    "name",
    "allreduce",
    "allgather",
    "_allgather_base",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "_reduce_scatter_base",
    "send",
    "recv",
)
_TAKING_GROUPS = (
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_global_rank",
    "get_process_group_ranks",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all_single",
    "barrier",
    "broadcast",
)


class _Wrapper:
    """What all forms have: the ranks of every group of their kind, of which this one has one."""

    ATTRIBUTE: ClassVar[str]

    def reload(self) -> None:
        """Makes the inner group again. Collective over all ranks."""
        made = [dist.new_group(list(ranks)) for ranks in self.divided]
        at = next(at for at, ranks in enumerate(self.divided) if dist.get_rank() in ranks)
        setattr(self, self.ATTRIBUTE, made[at])

    def destroy(self) -> None:
        """Destroys the inner group. Not collective."""
        dist.destroy_process_group(self.inner)
        setattr(self, self.ATTRIBUTE, None)

    @property
    def inner(self) -> Any:
        """The group of torch's own, ``None`` while the wrapper sleeps."""
        return vars(self)[self.ATTRIBUTE]


class Subclass(dist.ProcessGroup, _Wrapper):
    """A process group that forwards what torch's functions call."""

    ATTRIBUTE = "group"

    def __init__(self, divided: Sequence[Sequence[int]]) -> None:
        rank = dist.get_rank()
        members = next(ranks for ranks in divided if rank in ranks)
        super().__init__(members.index(rank), len(members))
        self.divided = divided
        self.reload()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def _forward(name: str) -> Callable[..., Any]:
    def call(self: Subclass, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.group, name)(*args, **kwargs)

    return call


for _name in _FORWARDED:
    setattr(Subclass, _name, _forward(_name))


class Delegate(_Wrapper):
    """No process group by its class; all that it is asked goes to the inner one."""

    ATTRIBUTE = "_inner"

    def __init__(self, divided: Sequence[Sequence[int]]) -> None:
        self.divided = divided
        self.reload()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_inner"], name)


class Nested(Subclass):
    """A wrapper of a wrapper."""

    def reload(self) -> None:
        self.group = Subclass(self.divided)

    def destroy(self) -> None:
        self.group.destroy()
        self.group = None


FORMS = {"subclass": Subclass, "delegate": Delegate, "nested": Nested}


@contextlib.contextmanager
def unwrapping() -> Iterator[None]:
    """Has torch's functions take the inner groups of wrappers, as such frameworks patch them."""

    def bare(value: Any) -> Any:
        return value.inner if isinstance(value, _Wrapper) else value

    def patched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            named = {name: bare(value) for name, value in kwargs.items()}
            return function(*map(bare, args), **named)

        return call

    before = {name: getattr(dist, name) for name in _TAKING_GROUPS}
    for name, function in before.items():
        setattr(dist, name, patched(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
