"""Exchanges the numbers of rows before rows travel; a rank with bad input reports it here."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron import streams
from flashmoe_megatron.attempts import Attempts
from flashmoe_megatron.checks import choices_problem, map_problem
from flashmoe_megatron.config import MoEConfig, check_config, count_row_blocks
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    RoutingError,
    RowBoundError,
    reason_of,
    told_error,
)
from flashmoe_megatron.ranks import REFUSED, UNFOLLOWED, Ranks, check_member, unfollowed_ranks
from flashmoe_megatron.separate.exchange import Counts, Exchange, counts_between
from flashmoe_megatron.separate.plan import (
    Routes,
    Sizes,
    Sorted,
    Table,
    cut_table,
    rows_of_experts,
)
from flashmoe_megatron.separate.ways import TensorGroup


class Heard(NamedTuple):
    """Numbers that the other ranks have sent.

    Attributes:
        received: ``[sources, num_local_experts]``, the rows that each sends to this rank's experts;
            :data:`UNFOLLOWED` more of each source that has no backward of this call.
        wait: Waits until the host knows the numbers that this rank has sent and received.
    """

    received: torch.Tensor
    wait: Callable[[], list[int]]


class Agreement:
    """The numbers of one backend's calls.

    :meth:`tell`, :meth:`plan` after it, and :meth:`refuse` instead of both are collective.

    Attributes:
        is_alone: Whether there is no other rank.
        most_blocks: Blocks of rows that a rank may receive, ``None`` for any number.
        unfollowed: The ranks that have no backward of the last call that was planned.
    """

    def __init__(
        self,
        config: MoEConfig,
        ranks: Ranks,
        tensor: TensorGroup | None,
        exchange: Exchange,
        *,
        most_blocks: int | None,
        tells_all: bool = False,
    ) -> None:
        """Binds it to the ranks of the expert-parallel group and of the group that shares experts.

        With ``tells_all`` every rank knows all counts, be it that rows need them or not.
        """
        self._config, self._ranks, self._tensor = config, ranks, tensor
        self._exchange, self.most_blocks = exchange, most_blocks
        self._tells_all = tells_all or exchange.needs_all_counts
        self._here: torch.Tensor | None = None
        self.is_alone = ranks.group is None and tensor is None
        self.unfollowed: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """This rank in the expert-parallel group."""
        return self._ranks.rank

    def tell(self, counts: torch.Tensor, *, followed: bool = True) -> Heard:
        """Tells all ranks the numbers of routes, and whether this one has a backward of the call.

        A call that is refused may be announced as followed: it has no backward anywhere.
        """
        if self.is_alone:
            return Heard(counts.view(1, -1), self.host_counts(counts))
        # Evaluation pays for the sum, and training for nothing.
        received, everyone = self._tell(counts if followed else counts + UNFOLLOWED)
        if self._tensor is not None:
            received = self._tensor.every(received)
        heard = (counts, received, *([] if everyone is None else [everyone]))
        wait = self.host_counts(torch.cat([one.reshape(-1) for one in heard]))
        return Heard(received.contiguous().view(-1, self._config.num_local_experts), wait)

    def told_by_all(self, heard: Heard) -> Table:
        """Waits for the numbers of all ranks, ``[rank][expert]``, where every rank receives all."""
        num_experts = self._config.num_experts
        told = heard.wait()
        return Table.of(
            told if self.is_alone else told[-num_experts * self._config.num_ranks :], num_experts
        )

    def gather(self, counts: torch.Tensor) -> Table:
        """Gathers ``[num_experts]`` counts of every rank. Collective."""
        return Table(map(tuple, self._gather(counts).tolist()))

    def plan(
        self,
        heard: Heard,
        found: Sorted,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        attempts: Attempts,
    ) -> tuple[Routes, Table | None]:
        """Agrees on the numbers of routes; the host waits for them once.

        The numbers come from :meth:`tell`, which has sent those of the routes in ``found``.
        ``probs`` and ``routing_map`` are those of a backend's forward, and ``attempts`` the
        backend's own.

        Returns:
            The routes, and all ranks' counts if every rank needs them.

        Raises:
            FlashMoEError: What a rank refuses, or rows beyond the bound, on every rank.
        """
        if self.is_alone and self.most_blocks is None and not self._tells_all:
            return self.plan_alone(heard.wait(), found, probs, routing_map), None
        config = self._config
        first_source = 0 if self._tensor is None else self._tensor.rank * config.num_ranks
        host, num_sent, num_received = heard.wait(), len(found.counts), heard.received.numel()
        own, others = host[:num_sent], host if self.is_alone else host[num_sent:]
        all_counts = None
        if self._exchange.needs_all_counts:
            all_counts = without_marks(Table.of(others[num_received:], config.num_experts))
        told = Table.of(others[:num_received], heard.received.shape[1])
        host_received = without_marks(told)
        self._raise_unusable(own, host_received, first_source, probs, routing_map)
        self._check_bound(host_received, all_counts, found.counts, attempts)
        received = heard.received
        if host_received is not told:
            received = received % UNFOLLOWED
        # Ranks that share experts are in other groups, with the same numbers.
        sources = unfollowed_ranks([counts[0] for counts in told])
        self.unfollowed = tuple(sorted({source % config.num_ranks for source in sources}))
        sent = Table.of(own, num_sent // config.num_ranks)
        routes = found.routes(sent, host_received, received, first_source)
        return routes, all_counts

    def refuse(self, reason: str, device: torch.device) -> None:
        """Ends the other ranks' :meth:`plan`.

        Raises:
            FlashMoEError: What has ended the exchange meanwhile.
        """
        if self.is_alone:
            return
        told = torch.full((self._config.num_experts,), REFUSED, device=device)
        self.tell(told).wait()  # until all ranks are in this call
        self._hear_refusal(reason, is_here=True)

    def host_counts(self, counts: torch.Tensor) -> Callable[[], list[int]]:
        """Begins to bring counts to the host; what is returned waits for them alone."""
        if counts.device.type != "cuda":
            return counts.tolist
        if self._here is None:
            with torch.inference_mode(False):  # later calls may be training's
                self._here = torch.empty_like(counts, device="cpu", pin_memory=True)
        here = self._here.copy_(counts, non_blocking=True)
        arrived = streams.mark(counts.device)
        assert arrived is not None

        def wait() -> list[int]:
            self._exchange.wait_on_host(arrived)
            return list(here.tolist())

        return wait

    def plan_alone(
        self,
        own: Sequence[int],
        found: Sorted,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
    ) -> Routes:
        """The routes of the only rank, once :meth:`host_counts` has its counts.

        Raises:
            RoutingError: They are unusable.
        """
        host = Table.of(own, len(own))
        self._raise_unusable(own, host, 0, probs, routing_map)
        return found.routes(host, host, found.counts.view(1, -1))

    def counts_of(
        self, routes: Routes, all_counts: Table | None, parts: Sequence[Sizes]
    ) -> Sequence[Counts]:
        """``[source][target]`` rows of each part; without all ranks' counts, where this rank is."""
        if all_counts is not None:
            return cut_table(all_counts, self._config.num_local_experts, len(parts))
        rank = self._ranks.rank
        mine = slice(routes.first_source, routes.first_source + self._config.num_ranks)
        return [counts_between(rank, part.send_counts, part.recv_counts[mine]) for part in parts]

    def _raise_unusable(
        self,
        own: Sequence[int],
        host_received: Table,
        first_source: int,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
    ) -> None:
        """Raises what is wrong with a rank's routing, on all of them."""
        config = self._config
        if own[0] == REFUSED:
            problem: str | None
            if routing_map.dtype == torch.bool:
                selected = routing_map & (probs != 0) if config.skip_zero_probs else routing_map
                problem = map_problem(config, probs, selected)
            else:
                problem = choices_problem(config, routing_map, probs)
            reason = reason_of(RoutingError(str(problem)))
            if not self.is_alone:
                self._hear_refusal(reason, is_here=True)
            raise told_error(self._ranks.rank, reason)
        if min(map(min, host_received)) == REFUSED:
            of_group = host_received[first_source : first_source + config.num_ranks]
            raise self._hear_refusal(None, is_here=min(map(min, of_group)) == REFUSED)

    def _check_bound(
        self,
        host_received: Table,
        all_counts: Table | None,
        counts: torch.Tensor,
        attempts: Attempts,
    ) -> None:
        """Refuses, on every rank, rows beyond the bound."""
        if self.most_blocks is None:
            return
        of_ranks = self._blocks_of_ranks(host_received, all_counts, counts)
        attempts.note(max(of_ranks))
        most = attempts.bound(self.most_blocks)
        if most is not None:
            refuse_beyond(of_ranks, most)

    def _blocks_of_ranks(
        self, host_received: Table, all_counts: Table | None, counts: torch.Tensor
    ) -> list[int]:
        """Returns the blocks of rows that each rank receives."""
        if all_counts is None or self._tensor is not None:  # rows come from other groups, too
            blocks = count_row_blocks(rows_of_experts(host_received))
            told = self._swap(counts.new_full((self._config.num_ranks,), blocks))
            return list(told.tolist())
        rows, local = rows_of_experts(all_counts), self._config.num_local_experts
        firsts = range(0, self._config.num_experts, local)
        return [count_row_blocks(rows[first : first + local]) for first in firsts]

    def _tell(self, told: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tells the other ranks this one's counts.

        Returns:
            ``[num_ranks, num_local_experts]``, what each rank tells this one; and all that they
            tell, ``[num_ranks, num_experts]``, where every rank needs it.
        """
        local = self._config.num_local_experts
        if not self._tells_all:
            return self._swap(told).view(-1, local), None
        table = self._gather(told)
        return table[:, self._ranks.rank * local : (self._ranks.rank + 1) * local], table

    def _swap(self, send: torch.Tensor) -> torch.Tensor:
        """Sends each rank its share of some counts, all shares alike; returns the received."""
        if self._ranks.group is None:
            return send
        recv = torch.empty_like(send)
        with self._ranks.bounded:
            dist.all_to_all_single(recv, send, group=self._ranks.group)
        return recv

    def _gather(self, send: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' ``[num_experts]`` counts, ``[num_ranks, num_experts]``."""
        if self._ranks.group is None:
            return send[None]
        everyone = send.new_empty(self._config.num_ranks * len(send))
        # torch has renamed the function and warns of its old name.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        with self._ranks.bounded:
            gather(everyone, send, group=self._ranks.group)
        return everyone.view(self._config.num_ranks, -1)

    def _hear_refusal(self, own: str | None, *, is_here: bool) -> FlashMoEError:
        """Returns the error of the first rank that refuses this call.

        Args:
            own: Why this one does, ``None`` if it does not.
            is_here: Whether any of the expert-parallel group does, and not only of another one
                whose ranks share experts with this one's.
        """
        found: tuple[int, str] | None = None
        if is_here:
            with self._ranks.bounded:
                reasons = self._exchange.ranks.gather(own)
            found = next((rank, why) for rank, why in enumerate(reasons) if why is not None)
        if self._tensor is not None:
            with self._tensor.ranks.bounded:
                everyone = self._tensor.ranks.gather(found)
            found = next(filter(None, everyone))
        assert found is not None
        return told_error(*found)


def ranks_of(config: MoEConfig, group: dist.ProcessGroup | None) -> Ranks:
    """Returns the ranks of a layer's group, ``None`` for one rank.

    Raises:
        ConfigError: The group's size is not ``config.num_ranks``; or one of both is no layer's
            shape, or no group of this rank.
    """
    check_config(config)
    check_member(group)
    ranks = Ranks(group)
    if ranks.num_ranks != config.num_ranks:
        raise ConfigError(
            f"num_ranks={config.num_ranks}, but the process group has {ranks.num_ranks} ranks"
        )
    return ranks


def refuse_beyond(blocks: Sequence[int], most: int) -> None:
    """Refuses what the fullest rank is to receive, by the blocks of rows of each, beyond a bound.

    Raises:
        RowBoundError: It names that rank.
    """
    fullest = max(range(len(blocks)), key=blocks.__getitem__)
    if blocks[fullest] > most:
        raise RowBoundError.of(fullest, blocks[fullest], most)


def without_marks(told: Table) -> Table:
    """Returns the counts ``[sources][experts]`` of rows without :data:`UNFOLLOWED`.

    The argument is returned itself where no rank has sent its counts with that addend.
    """
    marked = unfollowed_ranks([counts[0] for counts in told])
    if not marked:
        return told
    return Table(
        tuple(count - UNFOLLOWED for count in counts) if source in marked else counts
        for source, counts in enumerate(told)
    )
