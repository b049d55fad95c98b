"""The ways of one call's tokens to other hosts and back, kept from its forward to its backward.

With exact sizes a token crosses once to each other host that has an expert of its choice. With
fixed sizes every token crosses to every host, so that no size depends on a routing.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from flashmoe_megatron.hosts.rail import Rail
from flashmoe_megatron.hosts.routes import Choices, LocalRoutes

_Result = TypeVar("_Result")
Later = Callable[[], _Result]
"""Waits for an exchange that is under way, and returns its result."""


def _after(wait: Callable[[], object], make: Callable[[], _Result]) -> Later[_Result]:
    """Makes a result once an exchange has ended."""

    def later() -> _Result:
        wait()
        return make()

    return later


def _nothing() -> None:
    """Does not wait: the result is here."""


@dataclass(frozen=True)
class Share:
    """A host's rows for this rank's tokens, ``None`` for all in order.

    ``wait`` has to be called before the rows are read.
    """

    host: int
    tokens: torch.Tensor | None
    rows: torch.Tensor
    wait: Later[None]


@dataclass(frozen=True)
class Leaving:
    """All tokens of a call that leave a rank, in the order of launches and then of hosts.

    Attributes:
        choices: The call's routing.
        numbers: ``[num_leaving]`` int64, a host times the rank's tokens plus a token.
        host: This rank's.
        experts_per_host: Experts of each host.
    """

    choices: Choices
    numbers: torch.Tensor
    host: int
    experts_per_host: int

    @property
    def num_tokens(self) -> int:
        """This rank's."""
        return len(self.choices.experts)

    @functools.cached_property
    def tokens(self) -> torch.Tensor:
        """``[num_leaving]`` int64."""
        return self.numbers % max(self.num_tokens, 1)

    @functools.cached_property
    def routes(self) -> LocalRoutes:
        """Theirs where they go; made while the first rows are under way."""
        experts, weights = self.choices.experts[self.tokens], self.choices.weights[self.tokens]
        hosts = self.numbers // max(self.num_tokens, 1)
        return LocalRoutes.of(experts, weights, hosts[:, None], self.experts_per_host)

    @functools.cached_property
    def own_routes(self) -> LocalRoutes:
        """The routes of all of the rank's tokens on its own host."""
        choices = self.choices
        return LocalRoutes.of(choices.experts, choices.weights, self.host, self.experts_per_host)


def parted(count: int, parts: int) -> list[int]:
    """A number of rows in so many parts, as equal as can be; some may be 0."""
    size = -(-count // parts)
    return [max(0, min(size, count - part * size)) for part in range(parts)]


@dataclass(frozen=True)
class ExactCrossing:
    """Rows of launches: own tokens first, then tokens of other hosts in their order, or one kind.

    Attributes:
        leaving: The tokens that leave in all launches of the call.
        first: The first of these launches' among them.
        sent: Rows to each host; none to the own one.
        received: Rows from each host.
        has_own: Whether the own tokens are in these launches.
        is_local: Whether no rank's rows cross, whatever the routing: nothing is exchanged.
    """

    leaving: Leaving
    first: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    has_own: bool
    is_local: bool

    @classmethod
    def legs(
        cls,
        choices: Choices,
        leaves: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        host: int,
        experts_per_host: int,
        remote_legs: int,
    ) -> "list[ExactCrossing]":
        """Lists what crosses; waits for no device.

        Args:
            choices: The call's routing.
            leaves: ``[num_tokens, num_hosts]`` bool, true where a token crosses to a host.
            sent: Sums of its columns.
            received: Rows that come from each host.
            host: This rank's.
            experts_per_host: Experts of each host.
            remote_legs: 0 for all rows at once; else the own tokens come alone, and those of other
                hosts in so many parts.
        """
        num_tokens, num_hosts = leaves.shape
        by_host = leaves.t().flatten()
        total = sum(sent)
        # One place more takes the tokens that stay.
        place = torch.where(by_host, by_host.cumsum(0) - 1, total)
        numbers = torch.arange(num_tokens * num_hosts, device=leaves.device)
        listed = numbers.new_zeros(total + 1).scatter_(0, place, numbers)[:total]

        if not remote_legs:
            leaving = Leaving(choices, listed, host, experts_per_host)
            return [cls(leaving, 0, tuple(sent), tuple(received), True, False)]
        of_hosts = [
            torch.split(each, parted(len(each), remote_legs))
            for each in torch.split(listed, list(sent))
        ]
        pieces = list(zip(*of_hosts, strict=True))
        ordered = torch.cat([piece for part in pieces for piece in part])
        leaving = Leaving(choices, ordered, host, experts_per_host)
        none = (0,) * num_hosts
        found = [cls(leaving, 0, none, none, True, True)]
        arriving = [parted(count, remote_legs) for count in received]
        first = 0
        for part, counts in zip(pieces, zip(*arriving, strict=True), strict=True):
            found.append(cls(leaving, first, tuple(map(len, part)), counts, False, False))
            first += sum(map(len, part))
        return found

    @property
    def num_tokens(self) -> int:
        """This rank's."""
        return self.leaving.num_tokens

    @property
    def span(self) -> slice:
        """These launches' among all tokens that leave."""
        return slice(self.first, self.first + sum(self.sent))

    @functools.cached_property
    def tokens(self) -> torch.Tensor:
        """``[num_sent]`` int64, this rank's tokens that leave, by host and then ascending."""
        return self.leaving.tokens[self.span]

    @property
    def num_own(self) -> int:
        """Own tokens among the rows."""
        return self.num_tokens if self.has_own else 0

    @property
    def sent_routes(self) -> LocalRoutes:
        """The routes of the tokens that leave."""
        return self.leaving.routes.part(self.span)

    def routes(self, rail: Rail) -> Later[tuple[torch.Tensor, torch.Tensor]]:
        """Experts and weights of all rows, ``[num_rows, width]``. Collective over the rail."""
        if self.is_local:
            return lambda: (self.leaving.own_routes.experts, self.leaving.own_routes.weights)
        send = self.sent_routes.packed()
        packed = send.new_empty(self.num_own + sum(self.received), *send.shape[1:])
        arriving = packed[self.num_own :]
        wait = rail.exchange(send, arriving, self.sent, self.received, is_rows=False)
        if self.has_own:
            packed[: self.num_own] = self.leaving.own_routes.packed()
        dtype = self.leaving.choices.weights.dtype
        return _after(wait, lambda: LocalRoutes.unpacked(packed, dtype))

    def out(self, rail: Rail, own: torch.Tensor) -> Later[torch.Tensor]:
        """All rows of these launches. Collective over the rail.

        This rank's own tokens are ``[num_tokens, hidden]``.
        """
        if self.is_local:
            return lambda: own
        rows = own.new_empty(self.num_own + sum(self.received), own.shape[1])
        arriving = rows[self.num_own :]
        wait = rail.exchange(own[self.tokens], arriving, self.sent, self.received, is_rows=True)
        rows[: self.num_own] = own[: self.num_own]
        return _after(wait, lambda: rows)

    def back(self, rail: Rail, rows: torch.Tensor) -> list[Share]:
        """Returns hosts' results for this rank's tokens, under way. Collective over the rail."""
        host = self.leaving.host
        if self.is_local:
            return [Share(host, None, rows, _nothing)]
        own, returned, wait = self._return(rail, rows, is_rows=True)
        once = functools.cache(wait)
        parts = (torch.split(each, list(self.sent)) for each in (self.tokens, returned))
        shares = [
            Share(other, tokens, share, once)
            for other, (tokens, share) in enumerate(zip(*parts, strict=True))
            if other != host
        ]
        return [*shares, Share(host, None, own, _nothing)] if self.has_own else shares

    def grads_of_choices(self, rail: Rail, grads: torch.Tensor, topk: int) -> Later[torch.Tensor]:
        """The gradients of choices, ``[num_tokens, topk]``. Collective over the rail.

        ``grads`` has those of all rows' routes, ``[num_rows, width]``.
        """
        if self.is_local:
            return lambda: self.leaving.own_routes.of_choices(grads, topk)
        own, returned, wait = self._return(rail, grads, is_rows=False)

        def sums() -> torch.Tensor:
            if self.has_own:
                total = self.leaving.own_routes.of_choices(own, topk)
            else:
                total = grads.new_zeros(self.num_tokens, topk)
            # A choice lies on one host: every other addition is of zero.
            return total.index_add_(0, self.tokens, self.sent_routes.of_choices(returned, topk))

        return _after(wait, sums)

    def _return(
        self, rail: Rail, rows: torch.Tensor, *, is_rows: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Later[None]]:
        own, made = torch.split(rows, [self.num_own, sum(self.received)])
        returned = rows.new_empty(sum(self.sent), *rows.shape[1:])
        wait = rail.exchange(made, returned, self.received, self.sent, is_rows=is_rows)
        return own, returned, wait


@dataclass(frozen=True)
class FixedCrossing:
    """Rows of all hosts' tokens in the order of hosts, ``most`` of each, on every rank.

    The ``num_tokens`` are this rank's, whose routes on each host are ``[num_hosts, most, width]``.
    """

    num_tokens: int
    most: int
    sent_routes: LocalRoutes

    @classmethod
    def of(
        cls, choices: Choices, most: int, *, host: int, num_hosts: int, experts_per_host: int
    ) -> "FixedCrossing":
        """Lists what crosses.

        A routing that cannot be used keeps a choice that is none of this host's experts, which the
        launch within the host refuses.
        """
        experts, weights = choices.experts, choices.weights
        spare = most - len(experts)
        hosts = torch.arange(num_hosts, device=experts.device)[:, None, None]
        routes = LocalRoutes.of(
            F.pad(experts, (0, 0, 0, spare), value=-1).expand(num_hosts, -1, -1),
            F.pad(weights, (0, 0, 0, spare)).expand(num_hosts, -1, -1),
            hosts,
            experts_per_host,
        )
        own = routes.experts[host, : len(experts), 0]
        own.copy_(torch.where(choices.is_bad, experts_per_host, own))
        return cls(len(experts), most, routes)

    def routes(self, rail: Rail) -> Later[tuple[torch.Tensor, torch.Tensor]]:
        """Experts and weights of all rows, ``[num_rows, width]``. Collective over the rail."""
        packed, wait = self._return(rail, self.sent_routes.packed().flatten(0, 1), is_rows=False)
        dtype = self.sent_routes.weights.dtype
        return _after(wait, lambda: LocalRoutes.unpacked(packed, dtype))

    def out(self, rail: Rail, own: torch.Tensor) -> Later[torch.Tensor]:
        """All rows of this rank's launches; see :meth:`ExactCrossing.out`."""
        rows = own.new_empty(rail.grid.num_hosts * self.most, own.shape[1])
        rail.spread(F.pad(own, (0, 0, 0, self.most - len(own))), rows)
        return lambda: rows

    def back(self, rail: Rail, rows: torch.Tensor) -> list[Share]:
        """Returns all hosts' results for this rank's tokens, under way. Collective over a rail."""
        returned, wait = self._return(rail, rows, is_rows=True)
        once = functools.cache(wait)
        return [
            Share(host, None, share[: self.num_tokens], once)
            for host, share in enumerate(torch.split(returned, self.most))
        ]

    def grads_of_choices(self, rail: Rail, grads: torch.Tensor, topk: int) -> Later[torch.Tensor]:
        """The gradients of all choices; see :meth:`ExactCrossing.grads_of_choices`."""
        returned, wait = self._return(rail, grads, is_rows=False)

        def sums() -> torch.Tensor:
            by_host = returned.view(rail.grid.num_hosts, self.most, grads.shape[1])
            # A choice lies on one host: the others' are zero.
            return self.sent_routes.of_choices(by_host, topk).sum(0)[: self.num_tokens]

        return _after(wait, sums)

    def _return(
        self, rail: Rail, rows: torch.Tensor, *, is_rows: bool
    ) -> tuple[torch.Tensor, Later[None]]:
        counts = [self.most] * rail.grid.num_hosts
        returned = torch.empty_like(rows)
        wait = rail.exchange(rows.contiguous(), returned, counts, counts, is_rows=is_rows)
        return returned, wait


Crossing = ExactCrossing | FixedCrossing


def sum_of_shares(shares: Iterable[Share], num_tokens: int) -> torch.Tensor:
    """Adds the hosts' shares of every token in the order of hosts, rounded once.

    Each is waited for when its turn comes, so that earlier ones are added while it is under way.
    Shares of one host are of distinct tokens of this rank's ``num_tokens``.
    """
    ordered = sorted(shares, key=lambda share: share.host)
    like = ordered[0].rows
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    if ordered[0].tokens is None:
        first = ordered.pop(0)
        first.wait()
        total = first.rows.to(wide, copy=True)
    else:
        total = torch.zeros(num_tokens, like.shape[1], dtype=wide, device=like.device)
    for share in ordered:
        share.wait()
        if share.tokens is None:
            total += share.rows
        else:
            total.index_add_(0, share.tokens, share.rows.to(wide))
    return total.to(like.dtype)
