"""The target of every route of one call, and the order in which parts of them travel.

The host knows how many rows there are between all ranks and experts, after one wait: exchanges need
that. All indices of all parts are made on the device, which knows these numbers
before, in one step. So those of a part more cost the host nothing, and rows leave before their
indices are made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]


class Table(tuple[tuple[int, ...], ...]):
    """Numbers that the host knows, in no plain tuple, where autograd would look for tensors."""

    @classmethod
    def of(cls, values: Sequence[int], width: int) -> "Table":
        """Rows of so many values each."""
        return cls(zip(*[iter(values)] * width, strict=True))


@dataclass(frozen=True)
class Sorted:
    """The routes of one rank's tokens by expert and then token, before the host knows any number.

    Tensors with room for ``tokens * choices`` routes have unspecified values after the last route.

    Attributes:
        token_idx: ``[tokens * choices]`` int64, the token of each route; any token after the
            last route.
        flat_idx: ``[tokens * choices]`` int64, where its probability is among all of the tokens'.
        row_probs: ``[tokens * choices]``, that probability.
        place: ``[tokens, choices]`` int64, each token's routes by ascending expert;
            ``tokens * choices`` where there is none.
        counts: ``[num_experts]`` int64, routes to each expert; throughout
            :data:`~flashmoe_megatron.ranks.REFUSED` if the routing is unusable.
        ends: ``[num_experts]`` int32, where each expert's routes end.
    """

    token_idx: torch.Tensor
    flat_idx: torch.Tensor
    row_probs: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor

    def routes(
        self,
        host_sent: Table,
        host_received: Table,
        received: torch.Tensor,
        first_source: int = 0,
    ) -> "Routes":
        """The routes, once their numbers are known; the arguments are :class:`Routes`'s."""
        num = sum(map(sum, host_sent))
        token_idx, flat_idx = self.token_idx[:num], self.flat_idx[:num]
        numbers = (host_sent, host_received, received, self.ends, first_source)
        return Routes(token_idx, flat_idx, self.place, *numbers)


class Cut(NamedTuple):
    """The routes of :class:`Sorted` in the order of their travel: by part, then expert."""

    token_idx: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True)
class Routes:
    """The routes of this rank's tokens in the order of experts, and what this rank receives.

    Received rows have one order at every degree, that of experts, then ranks, then tokens.

    Attributes:
        token_idx: As in :class:`Sorted`, of the routes alone.
        flat_idx: Likewise.
        place: As in :class:`Sorted`.
        host_sent: ``[num_ranks][num_local_experts]``, this rank's routes to each expert.
        host_received: ``[sources][num_local_experts]``, each source's to this rank's experts: of
            the ranks, and where several share experts, of the ranks of all of these.
        received: The same on the device.
        ends: As in :class:`Sorted`.
        first_source: The first of the sources that send to this rank itself.
        cuts: These routes in the order in which they travel, by the number of parts.
    """

    token_idx: torch.Tensor
    flat_idx: torch.Tensor
    place: torch.Tensor
    host_sent: Table
    host_received: Table
    received: torch.Tensor
    ends: torch.Tensor
    first_source: int = 0
    # Autograd, which builds these objects again from saved tensors, hands these over unchanged.
    cuts: dict[int, Cut] = field(default_factory=dict, repr=False, compare=False)
    _sizes: dict[int, "list[Sizes]"] = field(default_factory=dict, repr=False, compare=False)
    _parts: dict[int, "list[Part]"] = field(default_factory=dict, repr=False, compare=False)

    def sizes(self, degree: int) -> "list[Sizes]":
        """The sizes of so many parts, made once for a forward and its backward."""
        if degree not in self._sizes:
            self._sizes[degree] = make_sizes(self, degree)
        return self._sizes[degree]

    def parts(
        self, degree: int, index_rows: Callable[[torch.Tensor, int, int], "Indices"]
    ) -> "tuple[list[Part], Part]":
        """All rows in so many parts, and in one; made once as well, by the step that is given."""
        if degree not in self._parts:
            self._parts.update(make_parts(self, degree, index_rows))
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
    return list(map(sum, zip(*host_received, strict=True)))


@dataclass(frozen=True)
class Sizes:
    """The numbers of rows in one part of every expert's rows; the host knows them all.

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


@dataclass(frozen=True)
class Padded:
    """A part whose experts' rows are followed by pad rows, up to whole blocks.

    Attributes:
        part: The same with the pads' numbers; its indices are of no use.
        index: ``[rows]`` int64, where the part's own rows are among these.
    """

    part: Part
    index: torch.Tensor

    @classmethod
    def of(cls, part: Part, block: int) -> "Padded":
        """Pads every expert's rows to a multiple of ``block``."""
        counts = np.array(part.counts, dtype=np.int64)
        aligned = -(-counts // block) * block
        ends = aligned.cumsum()
        pads = ends - aligned - (counts.cumsum() - counts)  # ahead of each expert
        index = np.arange(counts.sum()) + np.repeat(pads, counts)
        device = part.ends.device
        return cls(
            replace(
                part,
                counts=aligned.tolist(),
                ends=torch.from_numpy(ends.astype(np.int32)).to(device),
            ),
            torch.from_numpy(index).to(device),
        )

    def fill(self, rows: torch.Tensor, value: float) -> torch.Tensor:
        """Puts a part's rows in their places, and the value between them."""
        filled = rows.new_full((sum(self.part.counts), *rows.shape[1:]), value)
        return filled.index_copy_(0, self.index, rows)

    def without_pads(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the part's own rows."""
        return rows.index_select(0, self.index)


def latest_ends(most: int, degree: int) -> list[int]:
    """Returns the latest end of each part of so many routes, for any experts.

    Sizes are rounded so that the first parts together have no more than their share.
    """
    return [most * (part + 1) // degree for part in range(degree)]


def make_sizes(routes: Routes, degree: int) -> list[Sizes]:
    """Cuts every expert's rows into ``degree`` parts, pad-free.

    A rank's rows for an expert are cut by themselves, so that both ends know all sizes.
    """
    every = routes.host_received
    if degree == 1:
        sent_rows, rows = list(map(sum, routes.host_sent)), list(map(sum, every))
        return [Sizes(sent_rows, rows, rows_of_experts(every))]
    sent = _cut(np.array(routes.host_sent), degree)  # [part, rank, expert]
    received = _cut(np.array(every), degree)
    numbers = sent.sum(2).tolist(), received.sum(2).tolist(), received.sum(1).tolist()
    return [Sizes(*of_part) for of_part in zip(*numbers, strict=True)]


def cut_table(table: Table, local: int, degree: int) -> list[list[list[int]]]:
    """``[part][source][target]`` rows of ``[source][expert]`` ones, ``local`` experts a target."""
    sizes = _cut(np.array(table), degree)
    cut: list[list[list[int]]] = sizes.reshape(degree, len(table), -1, local).sum(3).tolist()
    return cut


@dataclass(frozen=True)
class Indices:
    """The places of the received rows of all parts, part after part; see :class:`Part`.

    Attributes:
        by_expert: ``[received rows]`` int64, within each part.
        by_rank: Likewise.
        rows: Likewise, but among all rows; ``None`` if there is one part.
        ends: ``[parts, experts]`` int32.
        whole: The same of one part, if there are several.
    """

    by_expert: torch.Tensor
    by_rank: torch.Tensor
    rows: torch.Tensor | None
    ends: torch.Tensor
    whole: "Indices | None" = None


def make_parts(
    routes: Routes, degree: int, index_rows: Callable[[torch.Tensor, int, int], Indices]
) -> dict[int, list[Part]]:
    """Makes so many parts, and one, by a step that finds where rows are."""
    if degree == len(routes.host_received) == 1:  # nothing is cut and nothing moves
        (one,) = routes.sizes(1)
        alone = Part(one.send_counts, one.recv_counts, one.counts, None, None, None, routes.ends)
        return {1: [alone]}
    found = index_rows(routes.received, routes.num_rows, degree)
    made = {degree: _parts_of(routes, degree, found)}
    if found.whole is not None:
        made[1] = _parts_of(routes, 1, found.whole)
    return made


def _parts_of(routes: Routes, degree: int, found: Indices) -> list[Part]:
    sizes = routes.sizes(degree)
    lengths = [sum(one.recv_counts) for one in sizes]
    moves = len(routes.host_received) > 1

    def split(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        return [None] * degree if index is None else torch.split(index, lengths)

    by_expert, by_rank = (
        split(index if moves else None) for index in (found.by_expert, found.by_rank)
    )
    indices = zip(by_expert, by_rank, split(found.rows), found.ends.unbind(), strict=True)
    return [
        Part(one.send_counts, one.recv_counts, one.counts, *of_part)
        for one, of_part in zip(sizes, indices, strict=True)
    ]


def _cut(counts: Numbers, degree: int) -> Numbers:
    """Cuts numbers of rows into each part's; ``[degree, *counts.shape]``."""
    bounds = counts * np.arange(degree + 1)[:, None, None] // degree
    return bounds[1:] - bounds[:-1]


def picked(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The rows of an index of a :class:`Part`."""
    return rows if index is None else rows.index_select(0, index)
