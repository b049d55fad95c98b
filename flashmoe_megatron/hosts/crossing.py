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
Share = tuple[int, torch.Tensor | None, torch.Tensor]
"""A host, this rank's tokens (``None`` for all in order), and what the host has made of each."""
Later = Callable[[], _Result]
"""Waits for what an exchange that is under way brings."""


def parted(count: int, parts: int) -> list[int]:
    """A number of rows in so many parts, as equal as can be; some may be 0."""
    size = -(-count // parts)
    return [max(0, min(size, count - part * size)) for part in range(parts)]


@dataclass(frozen=True)
class ExactCrossing:
    """Rows of one or several launches: own tokens, those that come from other hosts, or both.

    Own tokens come first, then the others in the order of hosts.

    Attributes:
        host: This rank's.
        num_tokens: This rank's.
        tokens: ``[num_sent]`` int64, this rank's tokens that leave, by host and then ascending.
        sent: Rows to each host; none to the own one.
        received: Rows from each host.
        has_own: Whether the own tokens are in these launches.
        is_local: Whether no rank's rows cross, whatever the routing: nothing is exchanged.
        choices: The call's routing.
        targets: ``[num_sent]`` int64, the hosts that the tokens leave for.
        experts_per_host: Experts of each host.
    """

    host: int
    num_tokens: int
    tokens: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    has_own: bool
    is_local: bool
    choices: Choices
    targets: torch.Tensor
    experts_per_host: int

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
            leaves: ``[num_tokens, num_hosts]`` bool, which tokens cross to which host.
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

        def leg(
            numbers: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, has_own: bool
        ) -> ExactCrossing:
            return cls(
                host=host,
                num_tokens=num_tokens,
                tokens=numbers % max(num_tokens, 1),
                sent=tuple(sent),
                received=tuple(received),
                has_own=has_own,
                is_local=has_own and remote_legs > 0,
                choices=choices,
                targets=numbers // max(num_tokens, 1),
                experts_per_host=experts_per_host,
            )

        if not remote_legs:
            return [leg(listed, sent, received, has_own=True)]
        none = [0] * num_hosts
        of_hosts = torch.split(listed, list(sent))
        pieces = [torch.split(each, parted(len(each), remote_legs)) for each in of_hosts]
        arriving = [parted(count, remote_legs) for count in received]
        remote = [
            leg(
                torch.cat([piece[part] for piece in pieces]),
                [len(piece[part]) for piece in pieces],
                [counts[part] for counts in arriving],
                has_own=False,
            )
            for part in range(remote_legs)
        ]
        return [leg(listed[:0], none, none, has_own=True), *remote]

    @property
    def num_own(self) -> int:
        """Own tokens among the rows."""
        return self.num_tokens if self.has_own else 0

    @functools.cached_property
    def own_routes(self) -> LocalRoutes:
        """The own tokens' routes on this host."""
        choices = self.choices
        return LocalRoutes.of(choices.experts, choices.weights, self.host, self.experts_per_host)

    @functools.cached_property
    def sent_routes(self) -> LocalRoutes:
        """The routes of the tokens that leave; made while their rows are under way."""
        experts, weights = self.choices.experts[self.tokens], self.choices.weights[self.tokens]
        return LocalRoutes.of(experts, weights, self.targets[:, None], self.experts_per_host)

    def routes(self, rail: Rail) -> Later[tuple[torch.Tensor, torch.Tensor]]:
        """Experts and weights of all rows, ``[num_rows, width]``. Collective over the rail."""
        if self.is_local:
            return lambda: (self.own_routes.experts, self.own_routes.weights)
        send = self.sent_routes.packed()
        packed = send.new_empty(self.num_own + sum(self.received), *send.shape[1:])
        arriving = packed[self.num_own :]
        wait = rail.exchange(send, arriving, self.sent, self.received, is_rows=False)
        if self.has_own:
            packed[: self.num_own] = self.own_routes.packed()
        dtype = self.sent_routes.weights.dtype

        def later() -> tuple[torch.Tensor, torch.Tensor]:
            wait()
            return LocalRoutes.unpacked(packed, dtype)

        return later

    def out(self, rail: Rail, own: torch.Tensor) -> Later[torch.Tensor]:
        """All rows of these launches. Collective over the rail.

        Args:
            rail: Carries them.
            own: ``[num_tokens, hidden]``.
        """
        if self.is_local:
            return lambda: own
        rows = own.new_empty(self.num_own + sum(self.received), own.shape[1])
        arriving = rows[self.num_own :]
        wait = rail.exchange(own[self.tokens], arriving, self.sent, self.received, is_rows=True)
        rows[: self.num_own] = own[: self.num_own]

        def later() -> torch.Tensor:
            wait()
            return rows

        return later

    def back(self, rail: Rail, rows: torch.Tensor) -> Later[list[Share]]:
        """What hosts have made of this rank's tokens. Collective over the rail."""
        if self.is_local:
            return lambda: [(self.host, None, rows)]
        own, returned, wait = self._return(rail, rows, is_rows=True)

        def later() -> list[Share]:
            wait()
            parts = (torch.split(each, list(self.sent)) for each in (self.tokens, returned))
            shares: list[Share] = [
                (host, tokens, share)
                for host, (tokens, share) in enumerate(zip(*parts, strict=True))
                if host != self.host
            ]
            return [*shares, (self.host, None, own)] if self.has_own else shares

        return later

    def grads_of_choices(self, rail: Rail, grads: torch.Tensor, topk: int) -> Later[torch.Tensor]:
        """The gradients of choices, ``[num_tokens, topk]``. Collective over the rail.

        Args:
            rail: Carries them.
            grads: ``[num_rows, width]``, of all rows' routes.
            topk: Choices of a token.
        """
        if self.is_local:
            return lambda: self.own_routes.of_choices(grads, topk)
        own, returned, wait = self._return(rail, grads, is_rows=False)

        def later() -> torch.Tensor:
            wait()
            if self.has_own:
                total = self.own_routes.of_choices(own, topk)
            else:
                total = grads.new_zeros(self.num_tokens, topk)
            # A choice lies on one host: every other addition is of zero.
            return total.index_add_(0, self.tokens, self.sent_routes.of_choices(returned, topk))

        return later

    def _return(
        self, rail: Rail, rows: torch.Tensor, *, is_rows: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Later[None]]:
        own, made = torch.split(rows, [self.num_own, sum(self.received)])
        returned = rows.new_empty(sum(self.sent), *rows.shape[1:])
        wait = rail.exchange(made, returned, self.received, self.sent, is_rows=is_rows)
        return own, returned, wait


@dataclass(frozen=True)
class FixedCrossing:
    """Rows of all hosts' tokens in the order of hosts, ``most`` of each.

    Attributes:
        num_tokens: This rank's own.
        most: Rows of each host, the same on every rank.
        sent_routes: ``[num_hosts, most, width]``, this rank's tokens' routes on each host.
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
        packed = self._return(rail, self.sent_routes.packed().flatten(0, 1), is_rows=False)
        return lambda: LocalRoutes.unpacked(packed(), self.sent_routes.weights.dtype)

    def out(self, rail: Rail, own: torch.Tensor) -> Later[torch.Tensor]:
        """All rows of this rank's launches; see :meth:`ExactCrossing.out`."""
        rows = own.new_empty(rail.grid.num_hosts * self.most, own.shape[1])
        rail.spread(F.pad(own, (0, 0, 0, self.most - len(own))), rows)
        return lambda: rows

    def back(self, rail: Rail, rows: torch.Tensor) -> Later[list[Share]]:
        """What every host has made of this rank's tokens. Collective over the rail."""
        returned = self._return(rail, rows, is_rows=True)
        return lambda: [
            (host, None, share[: self.num_tokens])
            for host, share in enumerate(torch.split(returned(), self.most))
        ]

    def grads_of_choices(self, rail: Rail, grads: torch.Tensor, topk: int) -> Later[torch.Tensor]:
        """The gradients of all choices; see :meth:`ExactCrossing.grads_of_choices`."""
        returned = self._return(rail, grads, is_rows=False)

        def later() -> torch.Tensor:
            by_host = returned().view(rail.grid.num_hosts, self.most, grads.shape[1])
            # A choice lies on one host: the others' are zero.
            return self.sent_routes.of_choices(by_host, topk).sum(0)[: self.num_tokens]

        return later

    def _return(self, rail: Rail, rows: torch.Tensor, *, is_rows: bool) -> Later[torch.Tensor]:
        counts = [self.most] * rail.grid.num_hosts
        returned = torch.empty_like(rows)
        wait = rail.exchange(rows.contiguous(), returned, counts, counts, is_rows=is_rows)

        def later() -> torch.Tensor:
            wait()
            return returned

        return later


Crossing = ExactCrossing | FixedCrossing


def sum_of_shares(shares: Iterable[Share], num_tokens: int) -> torch.Tensor:
    """Adds the hosts' shares of every token in the order of hosts, rounded once.

    Args:
        shares: At least one; those of one host are of distinct tokens.
        num_tokens: This rank's.
    """
    ordered = sorted(shares, key=lambda share: share[0])
    like = ordered[0][2]
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    if ordered[0][1] is None:
        total = ordered.pop(0)[2].to(wide, copy=True)
    else:
        total = torch.zeros(num_tokens, like.shape[1], dtype=wide, device=like.device)
    for _, tokens, share in ordered:
        if tokens is None:
            total += share
        else:
            total.index_add_(0, tokens, share.to(wide))
    return total.to(like.dtype)
