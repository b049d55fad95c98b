"""The places of an expert-parallel group's ranks: blocks of hosts, and groups along both axes.

Rank ``host * ranks_per_host + place`` is at a place of a host; the ranks of one place on all hosts
are a rail.
"""

import contextlib
import datetime
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flashmoe_megatron.config import MAX_HOSTS, MAX_RANKS
from flashmoe_megatron.ending import EndsWithGroup, destroy_own, ends_with
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.ranks import OfGroup, Ranks

HOST_VARIABLE = "FLASHMOE_HOST_ID"
"""Environment variable that names this process's host, in place of the machine's own name: GPUs
that share no memory by NVLink are hosts of their own, whatever machine they are in."""
GRACE_S = 2.0
"""By so much NCCL's watchdog, which ends the process, is later than a timeout that the log says."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostGrid:
    """A group's ranks as hosts times places.

    Attributes:
        num_hosts: Hosts of the group.
        ranks_per_host: Ranks on each.
        rank: This rank in the group.
    """

    num_hosts: int
    ranks_per_host: int
    rank: int

    def __str__(self) -> str:
        return f"{self.num_hosts} x {self.ranks_per_host}"

    @property
    def host(self) -> int:
        """This rank's host."""
        return self.rank // self.ranks_per_host

    @property
    def place(self) -> int:
        """This rank's place on its host, and the number of its rail."""
        return self.rank % self.ranks_per_host

    @property
    def ranks_within(self) -> range:
        """The group's ranks on this host."""
        first = self.host * self.ranks_per_host
        return range(first, first + self.ranks_per_host)

    @property
    def ranks_of_rail(self) -> range:
        """The group's ranks at this place, by host."""
        return range(self.place, self.num_hosts * self.ranks_per_host, self.ranks_per_host)


def host_name() -> str:
    """Returns an identity of this process's host: its name and when it was started."""
    given = os.environ.get(HOST_VARIABLE)
    if given:
        return given
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    return f"{socket.gethostname()} {boot}".strip()


def arrange(names: Sequence[str], rank: int) -> HostGrid:
    """The grid of ranks on named hosts.

    Args:
        names: Each rank's host, by rank of the group.
        rank: This rank.

    Raises:
        ConfigError: The ranks do not lie in blocks of hosts, or are too many.
    """
    blocks = [(name, len(list(block))) for name, block in itertools.groupby(names)]
    hosts = {name for name, _ in blocks}
    sizes = {size for _, size in blocks}
    problem = None
    if len(hosts) < len(blocks):
        problem = "the ranks of a host are not neighbours"
    elif len(sizes) > 1:
        problem = "the hosts have different numbers of its ranks"
    elif max(sizes) > MAX_RANKS:
        problem = f"a host has {max(sizes)} of its ranks"
    elif len(hosts) > MAX_HOSTS:
        problem = f"there are {len(hosts)} hosts"
    if problem is not None:
        first, listed = 0, []
        for name, size in blocks[: MAX_HOSTS + 1]:
            listed.append(f"{first} to {first + size - 1} on {name}")
            first += size
        raise ConfigError(
            f"an expert-parallel group cannot be spread over hosts so: {problem} (its ranks "
            f"{', '.join(listed)}); wanted one block of ranks on every host, all of one size, at "
            f"most {MAX_RANKS} ranks a host and {MAX_HOSTS} hosts: choose an expert-parallel size "
            "(Megatron's --expert-model-parallel-size) that divides the GPUs of a host or is a "
            "multiple of them"
        )
    return HostGrid(len(hosts), len(names) // len(hosts), rank)


class HostGroups(OfGroup, EndsWithGroup):
    """A grid and the process groups along its axes, made once for an expert-parallel group.

    They are destroyed with that group.

    Making it is collective over the group.

    Args:
        group: The expert-parallel group, ``whole`` as an attribute.
        grid: Its grid.
        timeout: Seconds that an exchange waits for a rank.
        max_ctas: Most CTAs of one of NCCL's exchanges between hosts; ``None`` for NCCL's own
            choice.

    Attributes:
        within: The ranks of this host, ``None`` if it has one.
        rail: The ranks of this place, by host.

    Raises:
        ConfigError: The group's ranks are not ascending.
    """

    def __init__(
        self, group: dist.ProcessGroup, grid: HostGrid, *, timeout: float, max_ctas: int | None
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        if ranks != sorted(ranks):
            raise ConfigError(f"the expert-parallel group has ranks {ranks}, wanted ascending ones")
        self.whole, self.grid, self.timeout = group, grid, timeout
        self.within: dist.ProcessGroup | None = None
        backend = dist.get_backend_config(group)
        grace = GRACE_S if "nccl" in backend else 0
        limit = datetime.timedelta(seconds=max(timeout, 1e-3) + grace)
        unique = Ranks(group).next_name()

        def make(name: str, members: range, options: Any = None) -> dist.ProcessGroup:
            with _members_alone(f"flashmoe-hosts/{unique} {name}"):
                # Not torch.distributed's, whose place a function may have taken that wraps groups.
                made: dist.ProcessGroup | None = distributed_c10d.new_group(
                    [ranks[rank] for rank in members],
                    timeout=limit,
                    backend=backend,
                    pg_options=options,
                    use_local_synchronization=True,
                )
            assert made is not None
            return made

        if grid.ranks_per_host > 1:
            self.within = make(f"host {grid.host}", grid.ranks_within)
        options: Any = None
        if max_ctas is not None and "nccl" in backend:  # which then takes few multiprocessors
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = max_ctas
            options._timeout = limit
        self.rail = make(f"rail {grid.place}", grid.ranks_of_rail, options)
        ends_with(group, self)

    def leave(self) -> None:
        """See the base class: there is nothing to leave."""

    def is_left(self) -> bool:
        """See the base class: what groups have ends with them."""
        return True

    def free(self) -> None:
        """See the base class."""
        destroy_own(self.within)
        destroy_own(self.rail)


def host_groups(
    group: dist.ProcessGroup, grid: HostGrid, *, timeout: float, max_ctas: int | None = None
) -> HostGroups:
    """The same groups for all layers of an expert-parallel group; see :class:`HostGroups`."""
    return Ranks(group).once(
        HostGroups,
        grid,
        timeout,
        max_ctas,
        make=lambda: HostGroups(group, grid, timeout=timeout, max_ctas=max_ctas),
    )


@contextlib.contextmanager
def _members_alone(name: str) -> Iterator[None]:
    """Makes a group by its members alone; each may have made other groups before.

    Else torch names such a group after the number of groups that a process is in, which differs
    among the members. And where the default group was bound to a device, it splits that group's
    communicator, and NCCL then waits for all ranks, also those without an MoE layer.

    Args:
        name: The same on all members, and no other group's.
    """
    world = dist.group.WORLD
    assert world is not None
    torch_names: Any = distributed_c10d._process_group_name
    bound: torch.device | None = world.bound_device_id
    distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    if bound is not None:
        world.bound_device_id = None
    try:
        yield
    finally:
        distributed_c10d._process_group_name = torch_names
        if bound is not None:
            world.bound_device_id = bound
