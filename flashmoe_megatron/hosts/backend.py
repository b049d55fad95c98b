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

from flashmoe_megatron.backend import (
    Backend,
    ExpertWeights,
    OfGroup,
    Together,
    TrafficCounters,
    WeightGrad,
)
from flashmoe_megatron.checks import check_grad_out, check_readable, check_tokens, check_weights
from flashmoe_megatron.config import Keep, MoEConfig
from flashmoe_megatron.errors import ConfigError, FlashMoEError, RoutingError, reason_of, told_error
from flashmoe_megatron.hosts.crossing import (
    Crossing,
    ExactCrossing,
    FixedCrossing,
    sum_of_shares,
)
from flashmoe_megatron.hosts.rail import Crossed, Rail
from flashmoe_megatron.hosts.routes import Choices, routing_problem
from flashmoe_megatron.options import BackendOptions, number, option
from flashmoe_megatron.planner import choose_keep, plan_launches, share_of_host, tokens_within
from flashmoe_megatron.router import Router
from flashmoe_megatron.telemetry.record import LaunchRecord

MakeInner = Callable[[MoEConfig, BackendOptions], Backend]
"""Makes the backend within this host. Collective over the host's ranks."""


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
    """What a forward keeps for its backward.

    Attributes:
        crossing: The ways of its tokens.
        choices: Their routing.
        backend: The backend that has run within the host.
        launches: What each of its launches has saved.
        num_rows: Rows of each.
    """

    crossing: Crossing
    choices: Choices
    backend: Backend
    launches: tuple[Any, ...]
    num_rows: tuple[int, ...]

    @property
    def rows(self) -> list[torch.Tensor | None]:
        """Rows of tokens of each launch, if the backend within the host keeps them."""
        return [getattr(saved, "rows", None) for saved in self.launches]

    @property
    def preact(self) -> list[torch.Tensor | None]:
        """The first projection's outputs, likewise."""
        return [getattr(saved, "preact", None) for saved in self.launches]


def _parted(count: int, parts: int) -> list[int]:
    """A number of rows in so many parts, as equal as can be; some may be 0."""
    size = -(-count // parts)
    return [max(0, min(size, count - part * size)) for part in range(parts)]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def within_host(backend: Backend) -> Backend:
    """The backend that computes a layer's experts: over hosts, the one within this one."""
    return backend.within if isinstance(backend, HostsBackend) else backend


class HostsBackend(OfGroup):
    """Routed experts over hosts; implements :class:`~flashmoe_megatron.backend.Backend`.

    Without a row bound, sizes follow the counts that every forward exchanges first: the host waits
    for them once, and every rank hears of a refusal. With one, all tokens go to all hosts, every
    size is fixed and a GPU's host waits for nothing.

    Shares of a token are summed in float32 (float64 if ``x`` is), in the order of hosts.

    Args:
        config: The layer's shape.
        rail: Carries what passes between hosts.
        make_within: Makes the backend within the host.
        options: How the layer runs.

    Attributes:
        config: The layer's shape.
        keep: What a forward keeps for its backward.
        rank: This rank in the group.
        num_calls: Forwards in which this rank has taken part.
    """

    def __init__(
        self,
        config: MoEConfig,
        rail: Rail,
        make_within: MakeInner,
        *,
        device: torch.device | None = None,
        options: BackendOptions | None = None,
    ) -> None:
        """Makes the backend within the host, which is collective over the host's ranks.

        Args:
            config: The layer's shape, for all hosts together.
            rail: Carries what passes between hosts.
            make_within: Makes a backend within the host.
            device: Where tokens will be, by default the CPU.
            options: How the layer runs.

        Raises:
            ConfigError: The grid has not ``config.num_ranks`` ranks, or the backend within the
                host cannot honour its part.
        """
        grid = rail.grid
        num_ranks = grid.num_hosts * grid.ranks_per_host
        if num_ranks != config.num_ranks:
            raise ConfigError(
                f"num_ranks={config.num_ranks}, but the process group has {num_ranks} ranks"
            )
        options = options or BackendOptions()
        self.config = config
        self.rank = grid.rank
        self.num_calls = 0
        self._rail = rail
        self._make_within = make_within
        self._device = device or torch.device("cpu")
        self._experts_per_host = config.num_experts // grid.num_hosts
        self._is_fixed = options.row_bound is not None
        # A processor's tensors can be looked at for nothing.
        self._host_reads = not self._is_fixed or self._device.type == "cpu"
        every = grid.num_hosts * config.max_tokens
        first = every if self._is_fixed else tokens_within(config, grid.num_hosts)
        share = share_of_host(config, grid.num_hosts, config.max_tokens)
        self.keep: Keep = choose_keep(options.keep, share)
        bound = options.row_bound
        if bound is not None:
            bound *= config.topk / (grid.num_hosts * share.topk)
        self._options = OptionsWithin(**{**vars(options), "keep": self.keep, "row_bound": bound})
        self._within: list[Backend] = []
        self._taken = Crossed()
        self._last: Backend | None = None
        self._untold: Exception | None = None
        self._dtype = torch.bfloat16
        self._checked: tuple[int, ...] = ()
        self._backend_for(first)

    def _backend_for(self, num_tokens: int) -> tuple[Backend, int]:
        """The backend for so many tokens of the fullest rank, and its launches; alike on all ranks.

        The bound of a launch's tokens follows what launches have needed, in steps and never down.
        """
        config, num_hosts = self.config, self._rail.grid.num_hosts
        launches, most = plan_launches(config, num_hosts, num_tokens)
        if not self._within or most > self.within.config.max_tokens:
            if self._within:
                step = self.within.config.max_tokens * 5 // 4
                most = max(most, plan_launches(config, num_hosts, step)[1])
            share = share_of_host(config, num_hosts, most)
            self._within.append(self._make_within(share, self._options))
        return self.within, launches

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
        """What this rank has sent within its host and to others, and padded, so far."""
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
        """What has crossed since the last call; waits for nothing."""
        self._rail.watch.collect()
        crossed = self._rail.crossed.since(self._taken)
        self._taken = dataclasses.replace(self._rail.crossed)
        return crossed

    def take_records(self) -> list[LaunchRecord]:
        """The records of launches within the host, with its ranks at their places in the group.

        Their tokens are those of all hosts that have come to this rank.
        """
        grid = self._rail.grid
        before = (0,) * grid.ranks_within.start
        behind = (0,) * (self.config.num_ranks - grid.ranks_within.stop)

        def placed(rows: tuple[int, ...]) -> tuple[int, ...]:
            return (*before, *rows, *behind) if rows else rows

        return [
            dataclasses.replace(
                record,
                rows_pulled=placed(record.rows_pulled),
                results_pushed=placed(record.results_pushed),
            )
            for one in self._distinct()
            for record in one.take_records()
        ]

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        weights: ExpertWeights,
        *,
        training: bool,
        layer: int = 0,
        router: Router | None = None,
    ) -> tuple[torch.Tensor, SavedOverHosts | None]:
        """Applies the routed experts; collective over the group, see the protocol.

        Raises:
            ShapeError: A tensor is not what the layer was built for.
            RoutingError: A routing cannot be used.
            RowBoundError: A rank was to receive more rows than ``row_bound`` allows.
            PeerTimeoutError: A rank is gone or did not come in time, here and in backward.
        """
        with Together(self):
            check_readable("x", x)
            self._check_weights(weights, x.device)
            dtype = weights.fc1[0].dtype
            check_tokens(self.config, x, probs, routing_map, dtype=dtype, device=x.device)
            if router is not None:
                router.run(x, self.config.topk)
            self._device, self._dtype = x.device, dtype
            self._raise_untold()
            choices = Choices.of(self.config, probs, routing_map)
        self.num_calls += 1
        self._rail.crossed.calls += 1
        crossing, most = self._cross(choices, probs, routing_map)
        backend, launches = self._backend_for(most)
        rows = crossing.out(self._rail, x)
        experts, route_weights = crossing.routes(self._rail)
        num_rows = _parted(len(rows), launches)
        made, kept = [], []
        try:
            for tokens, weight, idx in zip(
                *(torch.split(each, num_rows) for each in (rows, route_weights, experts)),
                strict=True,
            ):
                out, saved = backend.forward(
                    tokens, weight, idx, weights, training=training, layer=layer
                )
                made.append(out)
                kept.append(saved)
        except Exception as error:
            failure = self._on_this_host(error)
            self._give_void(failure, lambda void: list(crossing.back(self._rail, void)), rows)
            raise failure from error
        total = sum_of_shares(crossing.back(self._rail, _joined(made)), len(x))
        if not training:
            return total, None
        return total, SavedOverHosts(crossing, choices, backend, tuple(kept), tuple(num_rows))

    @torch.no_grad()
    def backward(
        self,
        grad_out: torch.Tensor,
        saved: Any,
        weights: ExpertWeights,
        grad_fc1: Sequence[WeightGrad],
        grad_fc2: Sequence[WeightGrad],
        grad_fc1_bias: Sequence[WeightGrad] = (),
        grad_fc2_bias: Sequence[WeightGrad] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all gradients of one forward; collective over the group, see the protocol."""
        assert isinstance(saved, SavedOverHosts)
        crossing, choices, backend = saved.crossing, saved.choices, saved.backend
        check_grad_out(self.config, grad_out, len(choices.experts))
        self._last = backend
        self._rail.crossed.calls += 1
        rows = crossing.out(self._rail, grad_out)
        grads = [list(kind) for kind in (grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias)]
        of_rows, of_routes = [], []
        try:
            for part, kept in zip(
                torch.split(rows, list(saved.num_rows)), saved.launches, strict=True
            ):
                grad_rows, grad_routes = backend.backward(part, kept, weights, *grads)
                of_rows.append(grad_rows)
                of_routes.append(grad_routes)
                grads = [[WeightGrad(one.buffer, True) for one in kind] for kind in grads]
        except Exception as error:

            def give(void: torch.Tensor) -> None:
                list(crossing.back(self._rail, void))
                width = min(self.config.topk, self._experts_per_host)
                routes = void[:, :width].to(choices.weights.dtype).contiguous()
                crossing.grads_of_choices(self._rail, routes, self.config.topk)

            failure = self._on_this_host(error)
            self._give_void(failure, give, rows)
            raise failure from error
        grad_x = sum_of_shares(crossing.back(self._rail, _joined(of_rows)), len(grad_out))
        of_choices = crossing.grads_of_choices(self._rail, _joined(of_routes), self.config.topk)
        return grad_x, choices.gradient(of_choices)

    def refuse(self, reason: str) -> None:
        """Takes part in the other ranks' forward; see the protocol.

        With a row bound on GPUs no host waits for another: the outputs of tokens that this host's
        experts serve are NaN, and the ranks of this host raise the reason at their next call.
        """
        self.num_calls += 1
        if self._host_reads:
            self._gather(self._words(is_refused=True))
            self._hear(reason)
            return
        none = torch.empty(0, self.config.topk, device=self._device)
        crossing = self._fixed(Choices(none.int(), none, none.bool().any(1), 0, True, none.dtype))
        no_tokens = none.new_empty(0, self.config.hidden, dtype=self._dtype)
        rows = crossing.out(self._rail, no_tokens)
        crossing.routes(self._rail)
        try:
            self.within.refuse(reason)
        finally:
            list(crossing.back(self._rail, torch.full_like(rows, torch.nan)))

    def raise_pending_fault(self) -> None:
        """Raises what a launch within this host has found wrong; see the protocol."""
        for one in self._distinct():
            one.raise_pending_fault()

    def early_fc2_grads(self) -> AbstractContextManager[object] | None:
        """Lets others begin with those that the backend within the host has; see the protocol."""
        return None if self._last is None else self._last.early_fc2_grads()

    def _cross(
        self, choices: Choices, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[Crossing, int]:
        """How the tokens cross, and the most tokens of any rank's launch. Collective.

        Raises:
            FlashMoEError: A rank refuses the call: the same on every rank.
        """
        grid = self._rail.grid
        hosts = torch.arange(grid.num_hosts, device=choices.experts.device)
        targets = choices.experts.div(self._experts_per_host, rounding_mode="floor")
        leaves = (targets[:, :, None] == hosts).any(1)
        leaves[:, grid.host] = False
        everyone: list[list[int]] = []
        if self._host_reads:
            words = self._words(is_refused=choices.is_bad.any())
            words[1] = len(leaves)
            words[2:] = leaves.sum(0)
            everyone = self._gather(words)
            if any(words[0] for words in everyone):
                problem = routing_problem(self.config, probs, routing_map)
                raise self._hear(None if problem is None else reason_of(RoutingError(problem)))
        if self._is_fixed:
            return self._fixed(choices), grid.num_hosts * self.config.max_tokens
        counts = [words[1:] for words in everyone]
        arriving = [
            sum(counts[other][1 + rank // grid.ranks_per_host] for other in self._rail_of(rank))
            for rank in range(self.config.num_ranks)
        ]
        most = max(own[0] + more for own, more in zip(counts, arriving, strict=True))
        received = [counts[other][1 + grid.host] for other in grid.ranks_of_rail]
        crossing = ExactCrossing.of(
            choices,
            leaves,
            counts[grid.rank][1:],
            received,
            host=grid.host,
            experts_per_host=self._experts_per_host,
        )
        return crossing, most

    def _rail_of(self, rank: int) -> range:
        step = self._rail.grid.ranks_per_host
        return range(rank % step, self.config.num_ranks, step)

    def _fixed(self, choices: Choices) -> FixedCrossing:
        grid = self._rail.grid
        return FixedCrossing.of(
            choices,
            self.config.max_tokens,
            host=grid.host,
            num_hosts=grid.num_hosts,
            experts_per_host=self._experts_per_host,
        )

    def _words(self, *, is_refused: torch.Tensor | bool) -> torch.Tensor:
        """What a rank tells all: whether it refuses the call, its tokens, how many go where."""
        count = 2 + self._rail.grid.num_hosts
        words = torch.zeros(count, dtype=torch.int64, device=self._device)
        words[0] = is_refused
        return words

    def _gather(self, words: torch.Tensor) -> list[list[int]]:
        """Every rank's words; the host waits for them. Collective over the group."""
        told: list[list[int]] = self._rail.gather(words).tolist()
        return told

    def _hear(self, own: str | None) -> FlashMoEError:
        """What the first rank that refuses this call has refused. Collective over the group."""
        reasons = enumerate(self._rail.tell(own))
        rank, reason = next(pair for pair in reasons if pair[1] is not None)
        return told_error(rank, str(reason))

    def _give_void(
        self, error: Exception, give: Callable[[torch.Tensor], object], rows: torch.Tensor
    ) -> None:
        """Ends a call that failed within this host, of which the other hosts wait for shares.

        They get NaN, and every rank hears of the failure in the next call.

        Args:
            error: What has failed.
            give: Gives rows back.
            rows: As many.
        """
        self._untold = error
        with contextlib.suppress(FlashMoEError):  # the other hosts have gone, too
            give(torch.full_like(rows, torch.nan))

    def _raise_untold(self) -> None:
        """Raises what the other hosts have not been told of, which tells them."""
        error, self._untold = self._untold, None
        if error is not None:
            raise error

    def _on_this_host(self, error: Exception) -> Exception:
        """The error with the host whose ranks its message counts."""
        if not isinstance(error, FlashMoEError):
            return error
        ranks, host = self._rail.grid.ranks_within, self._rail.grid.host
        name = f"host {host} (ranks {ranks.start} to {ranks.stop - 1} of the expert-parallel group)"
        return type(error)(f"within {name}: {error}")

    def _check_weights(self, weights: ExpertWeights, device: torch.device) -> None:
        """Checks them here, so that all hosts hear of it; the same tensors are checked once."""
        kinds = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
        identity = tuple(id(tensor) for kind in kinds for tensor in kind)
        if identity != self._checked:
            check_weights(self.config, weights, device)
            self._checked = identity
