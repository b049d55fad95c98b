"""Where every route of one call goes, and which part of them travels when.

The host knows how many rows there are between all ranks and experts, for which it has waited once.
What it makes of these numbers is short, and goes to the device in one copy, where a few operators
make all indices of all parts of a call. So a part more costs the host next to nothing. Rows leave
before that, since the order in which they do needs no number that only the host has.
"""

import itertools
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
        cuts: These routes in the order in which they travel, by the number of parts.
    """

    token_idx: torch.Tensor
    flat_idx: torch.Tensor
    place: torch.Tensor
    host_sent: Table
    host_received: Table
    ends: torch.Tensor
    first_source: int = 0
    # Autograd, which builds these again from what it has saved, hands these over as they are.
    cuts: dict[int, Cut] = field(default_factory=dict, repr=False, compare=False)
    _sizes: dict[int, "list[Sizes]"] = field(default_factory=dict, repr=False, compare=False)
    _parts: dict[int, "list[Part]"] = field(default_factory=dict, repr=False, compare=False)

    def sizes(self, degree: int) -> "list[Sizes]":
        """The sizes of so many parts, made once for a forward and its backward."""
        if degree not in self._sizes:
            self._sizes[degree] = make_sizes(self, degree)
        return self._sizes[degree]

    def parts(self, degree: int) -> "tuple[list[Part], Part]":
        """All rows in so many parts, and in one; made once as well."""
        missing = [one for one in {degree: None, 1: None} if one not in self._parts]
        if missing:
            self._parts.update(make_parts(self, missing))
        return self._parts[degree], self._parts[1][0]

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
class Sizes:
    """The numbers of rows of one part of every expert's, all of which the host knows.

    Attributes:
        send_counts: Rows to each rank.
        recv_counts: Rows from each rank.
        counts: Rows of each local expert.
    """

    send_counts: list[int]
    recv_counts: list[int]
    counts: list[int]


@dataclass(frozen=True)
class Part(Sizes):
    """One part of every expert's rows. An index that is ``None`` would change nothing.

    Attributes:
        by_expert: ``[received rows]`` int64, brings rows as they arrive into the order of experts.
        by_rank: ``[received rows]`` int64, brings them back.
        rows: ``[received rows]`` int64, where they are among all received rows.
        ends: ``[num_local_experts]`` int32, where each expert's rows end.
    """

    by_expert: torch.Tensor | None
    by_rank: torch.Tensor | None
    rows: torch.Tensor | None
    ends: torch.Tensor


def part_size(count: int, part: int, degree: int) -> int:
    """How many of ``count`` rows the ``part``-th of ``degree`` parts has."""
    return count * (part + 1) // degree - count * part // degree


def latest_ends(most: int, degree: int) -> list[int]:
    """Where each part of up to so many routes ends at the latest, whatever their experts are.

    Sizes are rounded so that the first parts together have no more than their share.
    """
    return [most * (part + 1) // degree for part in range(degree)]


def make_sizes(routes: Routes, degree: int) -> list[Sizes]:
    """Cuts every expert's rows into ``degree`` parts, pad-free.

    A rank's rows for an expert are cut by themselves, so that both ends know all sizes.
    """
    every = routes.host_received
    if degree == 1:
        sent_rows, rows = ([sum(one) for one in kind] for kind in (routes.host_sent, every))
        return [Sizes(sent_rows, rows, rows_of_experts(every))]
    _, sent = _cut(np.array(routes.host_sent), degree)  # [part, rank, expert]
    _, received = _cut(np.array(every), degree)
    numbers = sent.sum(2).tolist(), received.sum(2).tolist(), received.sum(1).tolist()
    return [Sizes(*of_part) for of_part in zip(*numbers, strict=True)]


def cut_table(table: Table, local: int, degree: int) -> list[list[list[int]]]:
    """``[part][source][target]`` rows of ``[source][expert]`` ones, ``local`` experts a target."""
    _, sizes = _cut(np.array(table), degree)
    cut: list[list[list[int]]] = sizes.reshape(degree, len(table), -1, local).sum(3).tolist()
    return cut


def make_parts(routes: Routes, degrees: Sequence[int]) -> dict[int, list[Part]]:
    """Makes the parts of each of several degrees."""
    received = np.array(routes.host_received)
    is_alone = len(received) == 1
    runs: dict[tuple[int, str], Runs] = {}
    ends: dict[int, Numbers] = {}
    for degree in degrees:
        if is_alone and degree == 1:  # nothing is cut and nothing moves
            continue
        begin, size = _cut(received, degree)
        by_expert = size.swapaxes(1, 2)
        ends[degree] = size.sum(1).cumsum(1)  # [part, expert]
        if degree > 1:
            runs[degree, "rows"] = _starts(received.T) + begin.swapaxes(1, 2), by_expert
        if not is_alone:
            runs[degree, "by_expert"] = _starts(size).swapaxes(1, 2), by_expert
            runs[degree, "by_rank"] = _starts(by_expert).swapaxes(1, 2), size
    indices, there = _on_device(runs, ends, routes.ends.device)
    return {
        degree: [
            Part(*vars(sizes).values(), *of_part)
            for sizes, *of_part in zip(
                routes.sizes(degree),
                *(
                    indices.get((degree, name), [None] * degree)
                    for name in ("by_expert", "by_rank", "rows")
                ),
                there.get(degree, [routes.ends]),
                strict=True,
            )
        ]
        for degree in degrees
    }


def _cut(counts: Numbers, degree: int) -> Runs:
    """Where each part of counts of rows begins, and its size; ``[degree, *counts.shape]``."""
    bounds = counts * np.arange(degree + 1)[:, None, None] // degree
    return bounds[:-1], bounds[1:] - bounds[:-1]


def _starts(sizes: Numbers) -> Numbers:
    """Where each of several runs begins that follow each other in the last two dimensions."""
    flat = sizes.reshape(*sizes.shape[:-2], -1)
    return (flat.cumsum(-1) - flat).reshape(sizes.shape)


def _on_device(
    runs: Mapping[tuple[int, str], Runs], ends: Mapping[int, Numbers], device: torch.device
) -> tuple[dict[tuple[int, str], Sequence[torch.Tensor]], dict[int, Sequence[torch.Tensor]]]:
    """Brings all runs, and where rows end, to the device in one copy.

    Returns:
        For each part the numbers of its runs, one run after the other; and its ends.
    """
    if not ends:
        return {}, {}
    starts, sizes = (np.concatenate(kind, axis=None) for kind in zip(*runs.values(), strict=True))
    lengths = np.concatenate([size.sum((1, 2)) for _, size in runs.values()]).tolist()
    shifts = starts - (sizes.cumsum() - sizes)  # from the place among all numbers to the number
    every_end = np.concatenate(list(ends.values()))
    packed = torch.from_numpy(np.concatenate([shifts, sizes, every_end], axis=None))
    if device.type == "cuda":
        packed = packed.pin_memory()
    packed = packed.to(device, non_blocking=True)
    moves, times, there = torch.split(packed, [len(shifts), len(sizes), every_end.size])
    numbers = moves.repeat_interleave(times, output_size=sum(lengths))
    numbers += torch.arange(len(numbers), device=device)
    each = iter(torch.split(numbers, lengths))
    of_part = iter(there.int().view(every_end.shape).unbind())
    return (
        {key: list(itertools.islice(each, len(sizes))) for key, (_, sizes) in runs.items()},
        {degree: list(itertools.islice(of_part, degree)) for degree in ends},
    )


def picked(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The rows of an index of a :class:`Part`."""
    return rows if index is None else rows.index_select(0, index)
