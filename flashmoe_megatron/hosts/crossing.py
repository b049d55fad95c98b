"""The ways of one call's tokens to other hosts and back, kept from its forward to its backward.

With exact sizes a token crosses once to each other host that has an expert of its choice. With
fixed sizes every token crosses to every host, so that no size depends on a routing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flashmoe_megatron.hosts.rail import Rail
from flashmoe_megatron.hosts.routes import Choices, LocalRoutes

Share = tuple[torch.Tensor | None, torch.Tensor]
"""Tokens, ``None`` for all in order, and what a host has made of each."""


@dataclass(frozen=True)
class ExactCrossing:
    """Rows of the own tokens, then those that came from other hosts, in the order of hosts.

    Attributes:
        tokens: ``[num_sent]`` int64, this rank's tokens that leave, by host and then ascending.
        sent: Rows to each host; none to the own one.
        received: Rows from each host.
        own_routes: The own tokens' routes on this host.
        sent_routes: The routes of the tokens that leave.
    """

    tokens: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    own_routes: LocalRoutes
    sent_routes: LocalRoutes

    @classmethod
    def of(
        cls,
        choices: Choices,
        leaves: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        host: int,
        experts_per_host: int,
    ) -> "ExactCrossing":
        """Lists what crosses; waits for no device.

        Args:
            choices: The call's routing.
            leaves: ``[num_tokens, num_hosts]`` bool, which tokens cross to which host.
            sent: Sums of its columns.
            received: Rows that come from each host.
            host: This rank's.
            experts_per_host: Experts of each host.
        """
        num_tokens, num_hosts = leaves.shape
        by_host = leaves.t().flatten()
        total = sum(sent)
        # One place more takes the tokens that stay.
        place = torch.where(by_host, by_host.cumsum(0) - 1, total)
        numbers = torch.arange(num_tokens * num_hosts, device=leaves.device)
        listed = numbers.new_zeros(total + 1).scatter_(0, place, numbers)[:total]
        tokens, targets = listed % max(num_tokens, 1), listed // max(num_tokens, 1)
        experts, weights = choices.experts, choices.weights
        return cls(
            tokens,
            tuple(sent),
            tuple(received),
            LocalRoutes.of(experts, weights, host, experts_per_host),
            LocalRoutes.of(experts[tokens], weights[tokens], targets[:, None], experts_per_host),
        )

    def routes(self, rail: Rail) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights of all rows, ``[num_rows, width]``. Collective over the rail."""
        send = self.sent_routes.packed()
        received = send.new_empty(sum(self.received), *send.shape[1:])
        rail.exchange(send, received, self.sent, self.received, is_rows=False)
        packed = torch.cat([self.own_routes.packed(), received])
        return LocalRoutes.unpacked(packed, self.own_routes.weights.dtype)

    def out(self, rail: Rail, own: torch.Tensor) -> torch.Tensor:
        """All rows of this rank's launch. Collective over the rail.

        Args:
            rail: Carries them.
            own: ``[num_tokens, hidden]``.
        """
        rows = own.new_empty(len(own) + sum(self.received), own.shape[1])
        rows[: len(own)] = own
        rail.exchange(own[self.tokens], rows[len(own) :], self.sent, self.received, is_rows=True)
        return rows

    def back(self, rail: Rail, rows: torch.Tensor) -> Iterator[Share]:
        """What every host has made of this rank's tokens, by host. Collective over the rail."""
        own, returned = self._return(rail, rows, is_rows=True)
        parts = zip(
            *(torch.split(each, list(self.sent)) for each in (self.tokens, returned)), strict=True
        )
        for host, (tokens, share) in enumerate(parts):
            yield (None, own) if host == rail.grid.host else (tokens, share)

    def grads_of_choices(self, rail: Rail, grads: torch.Tensor, topk: int) -> torch.Tensor:
        """The gradients of all choices, ``[num_tokens, topk]``. Collective over the rail.

        Args:
            rail: Carries them.
            grads: ``[num_rows, width]``, of all rows' routes.
            topk: Choices of a token.
        """
        own, returned = self._return(rail, grads, is_rows=False)
        total = self.own_routes.of_choices(own, topk)
        # A choice lies on one host: every other addition is of zero.
        return total.index_add_(0, self.tokens, self.sent_routes.of_choices(returned, topk))

    def _return(
        self, rail: Rail, rows: torch.Tensor, *, is_rows: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        others = sum(self.received)
        own, made = torch.split(rows, [len(rows) - others, others])
        returned = rows.new_empty(sum(self.sent), *rows.shape[1:])
        rail.exchange(made, returned, self.received, self.sent, is_rows=is_rows)
        return own, returned


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

    def routes(self, rail: Rail) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights of all rows, ``[num_rows, width]``. Collective over the rail."""
        packed = self._return(rail, self.sent_routes.packed().flatten(0, 1), is_rows=False)
        return LocalRoutes.unpacked(packed, self.sent_routes.weights.dtype)

    def out(self, rail: Rail, own: torch.Tensor) -> torch.Tensor:
        """All rows of this rank's launch; see :meth:`ExactCrossing.out`."""
        rows = own.new_empty(rail.grid.num_hosts * self.most, own.shape[1])
        rail.spread(F.pad(own, (0, 0, 0, self.most - len(own))), rows)
        return rows

    def back(self, rail: Rail, rows: torch.Tensor) -> Iterator[Share]:
        """What every host has made of this rank's tokens, by host. Collective over the rail."""
        for share in torch.split(self._return(rail, rows, is_rows=True), self.most):
            yield None, share[: self.num_tokens]

    def grads_of_choices(self, rail: Rail, grads: torch.Tensor, topk: int) -> torch.Tensor:
        """The gradients of all choices; see :meth:`ExactCrossing.grads_of_choices`."""
        returned = self._return(rail, grads, is_rows=False)
        returned = returned.view(rail.grid.num_hosts, self.most, grads.shape[1])
        # A choice lies on one host: the others' are zero.
        return self.sent_routes.of_choices(returned, topk).sum(0)[: self.num_tokens]

    def _return(self, rail: Rail, rows: torch.Tensor, *, is_rows: bool) -> torch.Tensor:
        counts = [self.most] * rail.grid.num_hosts
        returned = torch.empty_like(rows)
        rail.exchange(rows.contiguous(), returned, counts, counts, is_rows=is_rows)
        return returned


Crossing = ExactCrossing | FixedCrossing


def sum_of_shares(shares: Iterator[Share], num_tokens: int) -> torch.Tensor:
    """Adds the hosts' shares of every token in the order of hosts, rounded once.

    Args:
        shares: By host; at least one is of all tokens.
        num_tokens: This rank's.
    """
    waiting = list(shares)
    first = waiting[0][1]
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = torch.zeros(num_tokens, first.shape[1], dtype=wide, device=first.device)
    for tokens, share in waiting:
        if tokens is None:
            total += share
        else:
            total.index_add_(0, tokens, share.to(wide))  # tokens of one host are distinct
    return total.to(first.dtype)
