"""Where every route of one call goes, and which part of them travels when.

All indices are made on the device from counts of rows, of which the host has a copy, so that the
host waits once for a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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

    def routes(
        self,
        received: torch.Tensor,
        host_sent: Table,
        host_received: Table,
        first_source: int = 0,
    ) -> "Routes":
        """The routes, once their numbers are known; the arguments are :class:`Routes`'s."""
        num_routes = sum(map(sum, host_sent))
        return Routes(
            token_idx=self.token_idx[:num_routes],
            flat_idx=self.flat_idx[:num_routes],
            place=self.place,
            sent=self.counts[None],
            received=received,
            host_sent=host_sent,
            host_received=host_received,
            ends=self.ends,
            first_source=first_source,
        )


@dataclass(frozen=True)
class Routes:
    """The routes of this rank's tokens in the order of experts, and what this rank receives.

    Received rows have one order at every degree, that of experts, then ranks, then tokens.

    Attributes:
        token_idx: ``[num_routes]`` int64, the token of each route, by expert and then token.
        flat_idx: ``[num_routes]`` int64, where its probability is among all of the tokens'.
        place: ``[num_tokens, choices]`` int64, each token's routes by ascending expert;
            ``num_tokens * choices`` where there is none.
        sent: ``[1, num_experts]`` int64, this rank's routes to each expert.
        received: ``[sources, num_local_experts]`` int64, each source's to this rank's experts: of
            the ranks, and where several share experts, of the ranks of all of these.
        host_sent: The values of ``sent``, ``[num_ranks][num_local_experts]``.
        host_received: The values of ``received``.
        ends: ``[num_experts]`` int32, where each expert's routes end.
        first_source: Which of the sources is the first of those that send to this rank itself.
    """

    token_idx: torch.Tensor
    flat_idx: torch.Tensor
    place: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor
    host_sent: Table
    host_received: Table
    ends: torch.Tensor
    first_source: int = 0

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
        send_idx: ``[sent rows]`` int64, the routes that travel, by expert.
        send_counts: Rows to each rank.
        recv_counts: Rows from each rank.
        by_expert: ``[received rows]`` int64, brings rows as they arrive into the order of experts.
        by_rank: ``[received rows]`` int64, brings them back.
        rows: ``[received rows]`` int64, where they are among all received rows.
        ends: ``[num_local_experts]`` int32, where each expert's rows end.
        counts: Rows of each local expert.
    """

    send_idx: torch.Tensor | None
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


def make_part(routes: Routes, part: int, degree: int) -> Part:
    """Cuts the ``part``-th of ``degree`` parts out of every expert's rows, pad-free.

    A rank's rows for an expert are cut by themselves, so that both ends know all sizes.
    """

    def cut(host: tuple[tuple[int, ...], ...]) -> list[list[int]]:
        return [[part_size(count, part, degree) for count in row] for row in host]

    def device_cut(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        begin = counts * part // degree
        return begin, counts * (part + 1) // degree - begin

    if degree == len(routes.host_received) == 1:  # nothing is cut and nothing moves
        every = [routes.num_rows]
        counts = list(routes.host_received[0])
        return Part(None, every, every, None, None, None, routes.ends, counts)
    sent, received = cut(routes.host_sent), cut(routes.host_received)
    counts = [sum(of_expert) for of_expert in zip(*received, strict=True)]
    num_sent, num_received = sum(map(sum, sent)), sum(counts)
    begin, size = device_cut(routes.received)  # [rank, expert]
    send_idx = rows = by_expert = by_rank = None
    if degree > 1:
        send_begin, send_size = device_cut(routes.sent)
        send_idx = _runs(_starts(routes.sent) + send_begin, send_size, num_sent)
        of_expert = routes.received.t()
        rows = _runs(_starts(of_expert) + begin.t(), size.t(), num_received)
    if len(received) > 1:
        by_expert = _runs(_starts(size).t(), size.t(), num_received)
        by_rank = _runs(_starts(size.t()).t(), size, num_received)
    return Part(
        send_idx=send_idx,
        send_counts=[sum(row) for row in sent],
        recv_counts=[sum(row) for row in received],
        by_expert=by_expert,
        by_rank=by_rank,
        rows=rows,
        ends=size.sum(0).cumsum(0).int(),
        counts=counts,
    )


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    """Where each of several runs begins that follow each other, in the shape of their sizes."""
    flat = sizes.reshape(-1)
    return (flat.cumsum(0) - flat).view(sizes.shape)


def _runs(starts: torch.Tensor, sizes: torch.Tensor, total: int) -> torch.Tensor:
    """``[total]`` the numbers of several runs, one run after the other."""
    starts, sizes = starts.reshape(-1), sizes.reshape(-1)
    shift = (starts - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes, output_size=total)
    return shift + torch.arange(total, device=sizes.device)
