"""Where every route of one call goes, and which part of them travels when.

The host knows how many rows there are between all ranks and experts, for which it has waited once.
What it makes of these numbers is short, and goes to the device in one copy, where a few operators
make all indices of all parts of a call. So a part more costs the host next to nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]
Runs = tuple[Numbers, Numbers]
"""``[parts, ...]``: where runs of successive numbers start, and how long they are."""

REFUSED = -1
"""Takes the place of every count of a rank whose routing is unusable."""


class Table(tuple[tuple[int, ...], ...]):
    """Numbers that the host knows, in no plain tuple, where autograd would look for tensors."""

    @classmethod
    def of(cls, values: Sequence[int], width: int) -> "Table":
        """Rows of so many values each."""
        return cls(tuple(values[i : i + width]) for i in range(0, len(values), width))


@dataclass(frozen=True)
class Sorted:
    """The routes of one rank's tokens by expert and then token, before the host knows any number.

    What has room for ``tokens * choices`` routes has unspecified values behind the last one.

    Attributes:
        token_idx: ``[tokens * choices]`` int64, the token of each route, behind the last of any.
        flat_idx: ``[tokens * choices]`` int64, where its probability is among all of the tokens'.
        row_probs: ``[tokens * choices]``, that probability.
        place: ``[tokens, choices]`` int64, each token's routes by ascending expert;
            ``tokens * choices`` where there is none.
        counts: ``[num_experts]`` int64, routes to each expert; :data:`REFUSED` throughout if the
            routing is unusable.
        ends: ``[num_experts]`` int32, where each expert's routes end.
    """

    token_idx: torch.Tensor
    flat_idx: torch.Tensor
    row_probs: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor

    def routes(self, host_sent: Table, host_received: Table, first_source: int = 0) -> "Routes":
        """The routes, once their numbers are known; the arguments are :class:`Routes`'s."""
        num_routes = sum(map(sum, host_sent))
        return Routes(
            token_idx=self.token_idx[:num_routes],
            flat_idx=self.flat_idx[:num_routes],
            place=self.place,
            host_sent=host_sent,
            host_received=host_received,
            ends=self.ends,
            first_source=first_source,
        )


@dataclass(frozen=True)
class Cut:
    """The routes of one rank's tokens in the order in which they travel: by part, then expert.

    Attributes:
        token_idx: The token of each route, as long as what it was made from.
        place: ``[tokens, choices]`` int64, each token's routes by ascending expert; not below the
            number of routes where there is none.
    """

    token_idx: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True)
class Routes:
    """The routes of this rank's tokens in the order of experts, and what this rank receives.

    Received rows have one order at every degree, that of experts, then ranks, then tokens.

    Attributes:
        token_idx: ``[num_routes]`` int64, the token of each route, by expert and then token.
        flat_idx: ``[num_routes]`` int64, where its probability is among all of the tokens'.
        place: ``[num_tokens, choices]`` int64, each token's routes by ascending expert;
            ``num_tokens * choices`` where there is none.
        host_sent: ``[num_ranks][num_local_experts]``, this rank's routes to each expert.
        host_received: ``[sources][num_local_experts]``, each source's to this rank's experts: of
            the ranks, and where several share experts, of the ranks of all of these.
        ends: ``[num_experts]`` int32, where each expert's routes end.
        first_source: Which of the sources is the first of those that send to this rank itself.
    """

    token_idx: torch.Tensor
    flat_idx: torch.Tensor
    place: torch.Tensor
    host_sent: Table
    host_received: Table
    ends: torch.Tensor
    first_source: int = 0
    # Autograd, which builds these again from what it has saved, hands this over as it is.
    _parts: dict[int, "list[Part]"] = field(default_factory=dict, repr=False, compare=False)
    _cuts: dict[int, Cut] = field(default_factory=dict, repr=False, compare=False)

    def parts(self, degree: int) -> "list[Part]":
        """All rows in so many parts, made once for a forward and its backward."""
        if degree not in self._parts:
            self._parts[degree] = make_parts(self, degree)
        return self._parts[degree]

    def cut(self, degree: int) -> Cut:
        """The routes in so many parts, made once as well."""
        if degree not in self._cuts:
            self._cuts[degree] = cut_routes(self.token_idx, self.place, self.ends, degree)
        return self._cuts[degree]

    @property
    def from_ranks(self) -> tuple[tuple[int, ...], ...]:
        """``[num_ranks][num_local_experts]``, what every rank sends to this one itself."""
        return self.host_received[self.first_source : self.first_source + len(self.host_sent)]

    @property
    def num_rows(self) -> int:
        """Rows that this rank computes."""
        return sum(map(sum, self.host_received))


def rows_of_experts(host_received: tuple[tuple[int, ...], ...]) -> list[int]:
    """Rows of each local expert, from those of each rank."""
    return [sum(of_expert) for of_expert in zip(*host_received, strict=True)]


@dataclass(frozen=True)
class Part:
    """One part of every expert's rows. An index that is ``None`` would change nothing.

    Attributes:
        send_counts: Rows to each rank.
        recv_counts: Rows from each rank.
        by_expert: ``[received rows]`` int64, brings rows as they arrive into the order of experts.
        by_rank: ``[received rows]`` int64, brings them back.
        rows: ``[received rows]`` int64, where they are among all received rows.
        ends: ``[num_local_experts]`` int32, where each expert's rows end.
        counts: Rows of each local expert.
    """

    send_counts: list[int]
    recv_counts: list[int]
    by_expert: torch.Tensor | None
    by_rank: torch.Tensor | None
    rows: torch.Tensor | None
    ends: torch.Tensor
    counts: list[int]


def part_size(count: int, part: int, degree: int) -> int:
    """How many of ``count`` rows the ``part``-th of ``degree`` parts has."""
    return count * (part + 1) // degree - count * part // degree


def make_parts(routes: Routes, degree: int) -> list[Part]:
    """Cuts every expert's rows into ``degree`` parts, pad-free.

    A rank's rows for an expert are cut by themselves, so that both ends know all sizes.
    """
    if degree == len(routes.host_received) == 1:  # nothing is cut and nothing moves
        every = [routes.num_rows]
        own = list(routes.host_received[0])
        return [Part(every, every, None, None, None, routes.ends, own)]
    received = np.array(routes.host_received)
    _, sent_size = _cut(np.array(routes.host_sent), degree)  # [part, rank, expert]
    begin, size = _cut(received, degree)
    by_expert, of_expert = size.swapaxes(1, 2), received.T
    runs: dict[str, Runs] = {}
    if degree > 1:
        runs["rows"] = _starts(of_expert) + begin.swapaxes(1, 2), by_expert
    if len(received) > 1:
        runs["by_expert"] = _starts(size).swapaxes(1, 2), by_expert
        runs["by_rank"] = _starts(by_expert).swapaxes(1, 2), size
    counts = size.sum(1)  # [part, expert]
    indices, ends = _on_device(runs, counts.cumsum(1), routes.ends.device)
    none = [None] * degree
    return [
        Part(*of_part)
        for of_part in zip(
            sent_size.sum(2).tolist(),
            size.sum(2).tolist(),
            indices.get("by_expert", none),
            indices.get("by_rank", none),
            indices.get("rows", none),
            ends,
            counts.tolist(),
            strict=True,
        )
    ]


def cut_routes(
    token_idx: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, degree: int
) -> Cut:
    """Brings routes into the order of parts; the host needs to know no number.

    Args:
        token_idx: The token of each route, by expert, and any behind the last one.
        place: As :class:`Sorted` has it.
        ends: Likewise.
        degree: The number of parts.
    """
    if degree == 1:
        return Cut(token_idx, place)
    most = place.numel()  # which is the place of no route
    until = ends.long()
    counts = until.diff(prepend=until.new_zeros(1))
    bounds = counts * torch.arange(degree + 1, device=ends.device)[:, None] // degree
    begins = torch.cat([(until - counts + bounds[:-1]).view(-1), until[-1:]])
    sizes = torch.cat([bounds.diff(dim=0).view(-1), most + 1 - until[-1:]])
    numbers = torch.arange(most + 1, device=ends.device)
    shifts = begins - (sizes.cumsum(0) - sizes)
    order = shifts.repeat_interleave(sizes, output_size=most + 1) + numbers
    moved = torch.empty_like(order).scatter_(0, order, numbers)
    return Cut(
        token_idx.index_select(0, order[: len(token_idx)]),
        moved.index_select(0, place.view(-1)).view(place.shape),
    )


def _cut(counts: Numbers, degree: int) -> Runs:
    """Where each part of counts of rows begins, and its size; ``[degree, *counts.shape]``."""
    bounds = counts * np.arange(degree + 1)[:, None, None] // degree
    return bounds[:-1], np.diff(bounds, axis=0)


def _starts(sizes: Numbers) -> Numbers:
    """Where each of several runs begins that follow each other in the last two dimensions."""
    flat = sizes.reshape(*sizes.shape[:-2], -1)
    return (flat.cumsum(-1) - flat).reshape(sizes.shape)


def _on_device(
    runs: dict[str, Runs], ends: Numbers, device: torch.device
) -> tuple[Mapping[str, Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """Brings all runs, and where rows end, to the device in one copy.

    Returns:
        For each part the numbers of its runs, one run after the other; and its ends.
    """
    degree = len(ends)
    starts, sizes = (np.concatenate(kind, axis=None) for kind in zip(*runs.values(), strict=True))
    lengths = np.concatenate([size.sum((1, 2)) for _, size in runs.values()]).tolist()
    shifts = starts - (sizes.cumsum() - sizes)  # from the place among all numbers to the number
    packed = torch.from_numpy(np.concatenate([shifts, sizes, ends], axis=None))
    if device.type == "cuda":
        packed = packed.pin_memory()
    packed = packed.to(device, non_blocking=True)
    moves, times, there = torch.split(packed, [len(shifts), len(sizes), ends.size])
    numbers = moves.repeat_interleave(times, output_size=sum(lengths))
    numbers += torch.arange(len(numbers), device=device)
    each = torch.split(numbers, lengths)
    found = {name: each[i * degree : (i + 1) * degree] for i, name in enumerate(runs)}
    return found, there.int().view(ends.shape).unbind()


def picked(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The rows of an index of a :class:`Part`."""
    return rows if index is None else rows.index_select(0, index)
