"""A backend over several hosts, made of a backend within each.

A host computes its own experts for the tokens of all hosts: those of other hosts come over the rail
as further tokens of this rank, and what the host's experts make of them goes back as one row each.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from flashmoe_megatron.attempts import Attempts
from flashmoe_megatron.call import Backend, Given, Grads, Together, TrafficCounters
from flashmoe_megatron.checks import check_grad_out
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    RoutingError,
    ShapeError,
    reason_of,
)
from flashmoe_megatron.hooks import Reach, ends_of
from flashmoe_megatron.hosts.crossing import (
    Crossing,
    ExactCrossing,
    FixedCrossing,
    Later,
    Share,
    parted,
    sum_of_shares,
)
from flashmoe_megatron.hosts.guests import GuestPlan, Guests
from flashmoe_megatron.hosts.rail import Crossed, Rail
from flashmoe_megatron.hosts.routes import Choices, routing_problem
from flashmoe_megatron.low_rank import Factors
from flashmoe_megatron.options import BackendOptions, number, option
from flashmoe_megatron.planner import (
    choose_keep,
    of_routes,
    plan_launches,
    share_of_host,
    tokens_within,
)
from flashmoe_megatron.ranks import UNFOLLOWED, unfollowed_ranks
from flashmoe_megatron.telemetry.record import UNNAMED, LaunchRecord, ReplicaRecord
from flashmoe_megatron.weights import ExpertWeights, WeightGrad

MakeInner = Callable[[MoEConfig, BackendOptions], Backend]
"""Makes the backend within this host. Collective over the host's ranks."""


_REACH = Reach(
    refused=dict.fromkeys(
        ends_of("padding", "dispatch", "experts", "combine"),
        "a call over hosts has several launches, whose rows are of all hosts' tokens: wanted a "
        "hook of gate or capacity, or the backend 'scheduled'",
    ),
    fixed="a call over hosts has several launches: wanted the backend 'scheduled'",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionsWithin(BackendOptions):
    """How a backend runs within a host, whose tokens are those of all hosts.

    Most of their routes lead elsewhere, so the mean number of rows, as the shape within the host
    has it, is larger than the layer's: its multiple may be less than 1.
    """

    row_bound: float | None = option(
        None, number("a positive number", least=0, most=float("inf"), metavar="FACTOR"), "Rows."
    )


@dataclasses.dataclass(frozen=True)
class SavedOverHosts:
    """The state that a forward keeps for its backward.

    Attributes:
        legs: The ways of its rows, which are its tokens or their routes.
        choices: The tokens' routing.
        order: Where each token's rows are routes, the order of its choices among them.
        plan: The guests, if there is room for any.
        backend: The backend that has run within the host.
        launches: The saved state of each of its launches.
        num_rows: Rows of each, by leg.
        dtype: The tokens'.
    """

    legs: Sequence[Crossing]
    choices: Choices
    order: torch.Tensor | None
    plan: GuestPlan | None
    backend: Backend
    launches: list[Any]
    num_rows: list[list[int]]
    dtype: torch.dtype

    @property
    def rows(self) -> list[torch.Tensor | None]:
        """Rows of tokens of each launch, if the backend within the host keeps them."""
        return [getattr(saved, "rows", None) for saved in self.launches]

    @property
    def preact(self) -> list[torch.Tensor | None]:
        """The first projection's outputs, likewise."""
        return [getattr(saved, "preact", None) for saved in self.launches]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class HostsBackend(Backend):
    """Routed experts over hosts.

    Without a row bound, sizes follow the counts that every forward exchanges first: the host waits
    for them once, and every rank learns of a refusal. With one, all tokens go to all hosts, every
    size is fixed and a GPU's host waits for nothing.

    Shares of a token are summed in float32 (float64 if ``x`` is), in the order of hosts. With the
    option ``combine`` "routes" every route is a token of its own: a row comes back for each, and
    these are summed likewise, in the order of experts. So no bit depends on the rank that has
    computed an expert, which may be a guest of another host (:class:`Guests`).

    Making it makes the backend within the host, which is collective over the host's ranks.

    Args:
        config: The layer's shape, for all hosts together.
        rail: Carries what passes between hosts.
        make_within: Makes a backend within the host.
        device: Where tokens will be, by default the CPU.
        options: How the layer runs.

    Attributes:
        unfollowed: The ranks that have no backward of the last forward. Where the host does not
            wait for the counts, these are of this host alone.

    Raises:
        ConfigError: The grid has not ``config.num_ranks`` ranks, or the backend within the host
            cannot honour its part.
    """

    reach = _REACH

    def __init__(
        self,
        config: MoEConfig,
        rail: Rail,
        make_within: MakeInner,
        *,
        device: torch.device | None = None,
        options: BackendOptions | None = None,
    ) -> None:
        grid = rail.grid
        num_ranks = grid.num_hosts * grid.ranks_per_host
        if num_ranks != config.num_ranks:
            raise ConfigError(
                f"num_ranks={config.num_ranks}, but the process group has {num_ranks} ranks"
            )
        options = options or BackendOptions()
        self._by_route = options.combine == "routes"
        # Rows that cross and are computed within hosts are tokens of this shape.
        shape = self._shape = of_routes(config, options.host_slots) if self._by_route else config
        share = share_of_host(shape, grid.num_hosts, shape.max_tokens)
        keep = choose_keep(options.keep, share)
        super().__init__(config, keep=keep, rank=grid.rank)
        self.attempts = Attempts()  # steps over several hosts are not repeated
        self.host_slots, self.num_hosts = options.host_slots, grid.num_hosts
        self._rail = rail
        self._make_within = make_within
        self._device = device or torch.device("cpu")
        self._guests: Guests | None = None
        if self.host_slots:
            self._guests = Guests(config, grid, self.host_slots, self._device)
        self._experts_per_host = shape.num_experts // grid.num_hosts
        self._is_fixed = options.row_bound is not None
        # A processor's tensors can be looked at for nothing.
        self._host_reads = not self._is_fixed or self._device.type == "cpu"
        every = grid.num_hosts * shape.max_tokens
        first = every if self._is_fixed else tokens_within(shape, grid.num_hosts)
        bound = options.row_bound
        if isinstance(bound, float | int):  # auto has been refused
            bound *= shape.topk / (grid.num_hosts * share.topk)
        self._options = OptionsWithin(**{**vars(options), "keep": self.keep, "row_bound": bound})
        self._remote_legs = options.host_overlap
        self._within: list[Backend] = []
        self._taken = Crossed()
        self._last: Backend | None = None
        self._dtype = torch.bfloat16
        self._backend_for([first])

    def _backend_for(self, needs: Sequence[int]) -> tuple[Backend, list[int]]:
        """The backend for legs of so many tokens of the fullest rank, and the launches of each.

        Alike on all ranks. The bound of a launch's tokens follows what launches have needed, in
        steps and never down.
        """
        config, num_hosts = self._shape, self._rail.grid.num_hosts
        plans = [plan_launches(config, num_hosts, need) for need in needs]
        most = max(tokens for _, tokens in plans)
        if not self._within or most > self.within.config.max_tokens:
            make = self._make_within
            if self._within:
                make = self._made_on_all_hosts
                step = self.within.config.max_tokens * 5 // 4
                most = max(most, plan_launches(config, num_hosts, step)[1])
            share = share_of_host(config, num_hosts, most)
            within = make(share, self._options)
            within.attempts = self.attempts
            self._within.append(within)
        return self.within, [launches for launches, _ in plans]

    def _made_on_all_hosts(self, share: MoEConfig, options: BackendOptions) -> Backend:
        """A backend within the host, on all hosts or on none. Collective over the group.

        Raises:
            FlashMoEError: A host cannot make its own: the same on every rank.
        """

        def make() -> Backend:
            try:
                return self._make_within(share, options)
            except FlashMoEError as error:
                raise self._on_this_host(error) from error

        return self._rail.ranks.each(make)

    def _distinct(self) -> Iterable[Backend]:
        """Backends within the host that count for themselves: some share one memory."""
        return {id(getattr(one, "memory", one)): one for one in self._within}.values()

    @property
    def within(self) -> Backend:
        """The backend that runs within the host now."""
        return self._within[-1]

    @property
    def heap_bytes(self) -> int:
        """Bytes of symmetric memory on every rank; 0 where the backend within needs none."""
        return int(getattr(self.within, "heap_bytes", 0))

    @property
    def traffic(self) -> TrafficCounters:
        """Counts of rows that this rank has sent, within its host and to others, and padded."""
        parts = [one.traffic for one in self._distinct()]
        crossed = self._rail.crossed
        return TrafficCounters(
            rows_sent=sum(part.rows_sent for part in parts),
            bytes_sent=sum(part.bytes_sent for part in parts),
            pad_rows_sent=sum(part.pad_rows_sent for part in parts),
            pad_rows_local=sum(part.pad_rows_local for part in parts),
            rows_crossed=crossed.rows,
            bytes_crossed=crossed.bytes,
        )

    def take_crossed(self) -> Crossed:
        """Returns what has crossed hosts since the last call; waits for nothing."""
        self._rail.watch.collect()
        crossed = self._rail.crossed.since(self._taken)
        self._taken = dataclasses.replace(self._rail.crossed)
        return crossed

    def take_records(self) -> list[LaunchRecord]:
        """The records of launches within the host, with its ranks at their places in the group.

        Their tokens are those of all hosts that have come to this rank. Replicas have the numbers
        of their experts in the layer. Guests are replicas without a number in them, since no
        record names the call whose plan it had.
        """
        here, num_ranks = self._rail.grid.ranks_within, self.config.num_ranks

        def placed(rows: tuple[int, ...]) -> tuple[int, ...]:
            return (0,) * here.start + rows + (0,) * (num_ranks - here.stop) if rows else rows

        local = self.config.num_local_experts
        first = here.start * local

        def named(record: LaunchRecord) -> ReplicaRecord | None:
            if record.replicas is None and not self.host_slots:
                return None
            replicas = record.replicas or ReplicaRecord((), 0)
            guests = [(UNNAMED, count) for count in record.expert_rows[local:] if count]
            rows = tuple((expert_of(slot), count) for slot, count in replicas.rows)
            return replicas._replace(rows=(*rows, *guests))

        def expert_of(slot: int) -> int:
            place, slot = divmod(slot, local + self.host_slots)
            return first + place * local + slot if slot < local else UNNAMED

        return [
            dataclasses.replace(
                record,
                expert_rows=record.expert_rows[:local],
                rows_pulled=placed(record.rows_pulled),
                results_pushed=placed(record.results_pushed),
                replicas=named(record),
            )
            for one in self._distinct()
            for record in one.take_records()
        ]

    @torch.no_grad()
    def _forward(
        self, given: Given, weights: ExpertWeights
    ) -> tuple[torch.Tensor, SavedOverHosts | None]:
        with Together(self):
            self._check(given, weights)
            given = self._routed(given)
            x = given.x
            self._device, self._dtype = x.device, x.dtype
            choices = Choices.of(self.config, given.probs, given.routing_map)
        self.num_calls += 1
        self._rail.crossed.calls += 1
        rows, order = (choices, None) if not self._by_route else choices.apart()
        legs, needs, plan = self._cross(choices, rows, given)
        backend, launches = self._backend_for(needs)
        weights_there = self._with_guests(plan, weights)
        # Rows take longer than routes, which are made while they are under way.
        spread = self._spread(x)
        begun = [(leg.out(self._rail, spread), leg.routes(self._rail)) for leg in legs]
        weights = weights_there()
        kept: list[Any] = []
        num_rows: list[list[int]] = []

        def launch(number: int, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
            experts, route_weights = begun[number][1]()
            num_rows.append(parted(len(rows), launches[number]))
            made = []
            for tokens, weight, idx in zip(
                *(torch.split(each, num_rows[-1]) for each in (rows, route_weights, experts)),
                strict=True,
            ):
                out, saved = backend.forward(
                    tokens,
                    weight,
                    idx,
                    weights,
                    training=given.training,
                    followed=given.followed,
                    layer=given.layer,
                    trains_fc1=given.trains_fc1 or plan is not None,  # others' guests may be
                    gives_rows=given.gives_rows,
                )
                made.append(out)
                kept.append(saved)
            return _joined(made), None

        total, _ = self._there_and_back(legs, [out for out, _ in begun], launch)
        if not self._host_reads:
            first = self._rail.grid.ranks_within.start
            self.unfollowed = tuple(first + rank for rank in backend.unfollowed)
        total = self._sum_of_routes(total)
        if not given.training:
            return total, None
        saved = SavedOverHosts(legs, choices, order, plan, backend, kept, num_rows, x.dtype)
        return total, saved

    @torch.no_grad()
    def _backward(
        self,
        grad_out: torch.Tensor,
        saved: Any,
        weights: ExpertWeights,
        grads: Grads,
        factors: Factors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all gradients of one forward.

        A rank whose ``grad_out`` cannot be used takes part with NaN, so that no host waits for it;
        it raises the reason at once, the others at the next call.
        """
        assert isinstance(saved, SavedOverHosts)
        choices, backend = saved.choices, saved.backend
        refused: FlashMoEError | None = None
        try:
            self._check_grad_out(grad_out, saved)
        except FlashMoEError as error:
            refused = error
            self.put_off(error)
            shape = len(choices.experts), self.config.hidden
            grad_out = choices.weights.new_full(shape, torch.nan, dtype=saved.dtype)
        self._last = backend
        self._rail.crossed.calls += 1
        guests, plan, is_void = self._guests, saved.plan, False
        weights_there = self._with_guests(plan, weights)
        buffers: torch.Tensor | None = None
        if guests is not None:
            grads, is_void = self._writable(weights, grads)
            grads, buffers = guests.targets(weights, grads)
        kinds = [list(kind) for kind in grads]
        kept = iter(saved.launches)

        def launch(number: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            of_rows, of_routes = [], []
            for part in torch.split(rows, saved.num_rows[number]):
                grad_rows, grad_routes = backend.backward(
                    part, next(kept), weights, *kinds, factors=factors
                )
                of_rows.append(grad_rows)
                of_routes.append(grad_routes)
                for kind in kinds:
                    kind[:] = [one and WeightGrad(one.buffer, True) for one in kind]
            return _joined(of_rows), _joined(of_routes)

        def end(is_failed: bool) -> None:
            if guests is not None and plan is not None and buffers is not None:
                if is_failed:
                    buffers.fill_(torch.nan)
                guests.bring_back(self._rail, plan, buffers, grads)

        dtype = choices.weights.dtype
        spread = self._spread(grad_out)
        arriving = [leg.out(self._rail, spread) for leg in saved.legs]
        weights = weights_there()
        grad_x, of_choices = self._there_and_back(saved.legs, arriving, launch, dtype, end)
        if refused is not None:
            raise refused
        assert of_choices is not None
        if is_void:
            grad_x.fill_(torch.nan)
            of_choices.fill_(torch.nan)
        if saved.order is not None:
            of_choices = of_choices.view(saved.order.shape)
            of_choices = torch.zeros_like(of_choices).scatter_(1, saved.order, of_choices)
        return self._sum_of_routes(grad_x), choices.gradient(of_choices)

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Has each token's row once for each of its routes, where these travel alone."""
        return rows.repeat_interleave(self.config.topk, 0) if self._by_route else rows

    def _sum_of_routes(self, rows: torch.Tensor) -> torch.Tensor:
        """Undoes :meth:`_spread` by sums, each rounded once."""
        if not self._by_route:
            return rows
        of_tokens = rows.view(-1, self.config.topk, rows.shape[1])
        total = torch.zeros_like(of_tokens[:, 0], dtype=_wide(rows.dtype))
        for route in of_tokens.unbind(1):
            total += route
        return total.to(rows.dtype)

    def _with_guests(
        self, plan: GuestPlan | None, weights: ExpertWeights
    ) -> Callable[[], ExpertWeights]:
        if self._guests is None or plan is None:
            return lambda: weights
        return self._guests.fetch(self._rail, plan, weights)

    def _there_and_back(
        self,
        legs: Sequence[Crossing],
        arriving: Sequence[Later[torch.Tensor]],
        launch: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]],
        dtype_of_routes: torch.dtype | None = None,
        end: Callable[[bool], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches as rows arrive, and adds up what comes back. Collective over the group.

        A launch that fails leaves the other hosts waiting for shares: they get NaN, and every rank
        learns of the failure in the next call.

        Args:
            legs: The ways; each one's launches begin when its rows are there.
            arriving: The rows of each, which are under way.
            launch: Makes rows and, in backward, routes' gradients of a leg's number and rows.
            dtype_of_routes: The dtype of these gradients, without which none come back.
            end: Exchanges more afterwards, given whether a launch has failed.

        Returns:
            Sums of the rows, and the gradients of choices.
        """
        rail, topk = self._rail, self._shape.topk
        shares: list[Share] = []
        of_choices: list[Callable[[], torch.Tensor]] = []
        failure: Exception | None = None
        with contextlib.ExitStack() as stack:
            for number, (leg, arrived) in enumerate(zip(legs, arriving, strict=True)):
                rows = arrived()
                made, of_routes = rows, None
                if failure is None:
                    try:
                        made, of_routes = launch(number, rows)
                    except Exception as error:  # noqa: BLE001 - raised below
                        failure = self._on_this_host(error)
                        self.put_off(failure)
                        # The other hosts may have gone, too.
                        stack.enter_context(contextlib.suppress(FlashMoEError))
                if failure is not None:
                    made = torch.full_like(rows, torch.nan)
                    width = min(topk, self._experts_per_host)
                    of_routes = made[:, :width].to(dtype_of_routes or made.dtype).contiguous()
                shares += leg.back(rail, made)
                if dtype_of_routes is not None and of_routes is not None:
                    of_choices.append(leg.grads_of_choices(rail, of_routes, topk))
            total = sum_of_shares(shares, legs[0].num_tokens)
            grads = [later() for later in of_choices]
            if end is not None:
                end(failure is not None)
        if failure is not None:
            raise failure
        # A choice is on one leg: the others' are zero.
        return total, sum(grads[1:], start=grads[0]) if grads else None

    def refuse(self, reason: str) -> None:
        """Takes part in the other ranks' forward; see the base class.

        With a row bound on GPUs no host waits for another: the outputs of tokens that this host's
        experts serve are NaN, and the ranks of this host raise the reason at their next call.
        """
        self.num_calls += 1
        if self._host_reads:
            self._rail.gather(self._words(is_refused=True)).tolist()
            self._rail.ranks.first_error(reason)
            return
        none = torch.empty(0, self._shape.topk, device=self._device)
        legs = [self._fixed(Choices(none.int(), none, none.bool().any(1), 0, True, none.dtype))]
        _, launches = self._backend_for(self._fixed_needs())
        no_tokens = none.new_empty(0, self.config.hidden, dtype=self._dtype)
        begun = [(leg.out(self._rail, no_tokens), leg.routes(self._rail)) for leg in legs]

        def launch(number: int, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
            begun[number][1]()
            for _ in range(launches[number]):
                self.within.refuse(reason)
            return torch.full_like(rows, torch.nan), None

        self._there_and_back(legs, [out for out, _ in begun], launch)

    def raise_pending_fault(self) -> None:
        """Raises the error of a launch within this host; see the base class."""
        for one in self._distinct():
            one.raise_pending_fault()

    def early_fc2_grads(self) -> AbstractContextManager[object] | None:
        """Returns the context of the backend within the host; see the base class."""
        if self._last is None or self._guests is not None:  # guests' gradients come last
            return None
        return self._last.early_fc2_grads()

    def _cross(
        self, choices: Choices, rows: Choices, given: Given
    ) -> tuple[list[ExactCrossing] | list[FixedCrossing], list[int], GuestPlan | None]:
        """How the rows cross, the most rows of any rank on each leg, and guests. Collective.

        Raises:
            FlashMoEError: A rank refuses the call: the same on every rank.
        """
        grid, guests = self._rail.grid, self._guests
        if guests is None:
            leaves = self._leaves(rows)
        everyone: list[list[int]] = []
        if self._host_reads:
            words = self._words(is_refused=choices.is_bad.any())
            count = len(rows.experts)
            words[1].fill_(count if given.followed else count + UNFOLLOWED)
            words[2:] = leaves.sum(0) if guests is None else choices.counts(self.config)
            everyone = self._rail.gather(words).tolist()  # the host waits for them
            if any(words[0] for words in everyone):
                problem = routing_problem(self.config, given.probs, given.routing_map)
                reason = None if problem is None else reason_of(RoutingError(problem))
                error = self._rail.ranks.first_error(reason)
                assert error is not None
                raise error
            self.unfollowed = unfollowed_ranks([words[1] for words in everyone])
        if self._is_fixed:
            return [self._fixed(rows)], self._fixed_needs(), None
        own = [words[1] % UNFOLLOWED for words in everyone]
        leaving, plan = [words[2:] for words in everyone], None
        if guests is not None:
            counts = torch.tensor(leaving)
            plan = guests.plan(counts)
            leaving, rows = plan.leaving(counts, grid), plan.placed(rows, grid.host)
            leaves = self._leaves(rows)
        legs = ExactCrossing.legs(
            rows,
            leaves,
            leaving[grid.rank],
            [leaving[other][grid.host] for other in grid.ranks_of_rail],
            host=grid.host,
            experts_per_host=self._experts_per_host,
            remote_legs=self._remote_legs,
        )
        step, num_ranks = grid.ranks_per_host, self.config.num_ranks
        arriving = [
            [leaving[other][rank // step] for other in range(rank % step, num_ranks, step)]
            for rank in range(num_ranks)
        ]
        if not self._remote_legs:
            needs = [max(one + sum(more) for one, more in zip(own, arriving, strict=True))]
            return legs, needs, plan
        parts = [[parted(count, self._remote_legs) for count in counts] for counts in arriving]
        needs = [
            max(sum(part[leg] for part in counts) for counts in parts)
            for leg in range(self._remote_legs)
        ]
        return legs, [max(own), *needs], plan

    def _leaves(self, rows: Choices) -> torch.Tensor:
        """``[num_rows, num_hosts]`` bool: whether a row crosses to a host."""
        grid = self._rail.grid
        hosts = torch.arange(grid.num_hosts, device=rows.experts.device)
        targets = rows.experts.div(self._experts_per_host, rounding_mode="floor")
        leaves = (targets[:, :, None] == hosts).any(1)
        leaves[:, grid.host] = False
        return leaves

    def _fixed_needs(self) -> list[int]:
        return [self._rail.grid.num_hosts * self._shape.max_tokens]

    def _fixed(self, rows: Choices) -> FixedCrossing:
        grid = self._rail.grid
        return FixedCrossing.of(
            rows,
            self._shape.max_tokens,
            host=grid.host,
            num_hosts=grid.num_hosts,
            experts_per_host=self._experts_per_host,
        )

    def _words(self, *, is_refused: torch.Tensor | bool) -> torch.Tensor:
        """Returns a rank's message to all: a refusal of the call, its rows, how many go where.

        That is the host or, where guests are to be planned, the expert. A rank that has no backward
        of the call adds :data:`UNFOLLOWED` to its rows.
        """
        count = self._rail.grid.num_hosts if self._guests is None else self.config.num_experts
        words = torch.zeros(2 + count, dtype=torch.int64, device=self._device)
        # Assigning a number to one element copies it from the host, which waits for the GPU.
        words[0].fill_(is_refused)
        return words

    def _on_this_host(self, error: Exception) -> Exception:
        """The error with the host whose ranks its message counts."""
        if not isinstance(error, FlashMoEError):
            return error
        ranks, host = self._rail.grid.ranks_within, self._rail.grid.host
        name = f"host {host} (ranks {ranks.start} to {ranks.stop - 1} of the expert-parallel group)"
        return type(error)(f"within {name}: {error}")

    def _check_grad_out(self, grad_out: torch.Tensor, saved: SavedOverHosts) -> None:
        """Checks all that other hosts rely on: what crosses is read there as this dtype's rows."""
        choices = saved.choices
        check_grad_out(self.config, grad_out, len(choices.experts))
        wanted = saved.dtype, choices.experts.device
        if (grad_out.dtype, grad_out.device) != wanted:
            raise ShapeError(
                f"grad_out is {grad_out.dtype} on {grad_out.device}, wanted {wanted[0]} on "
                f"{wanted[1]}, as the forward's output"
            )
