"""Sums over launches, in a form that can be added up over ranks.

Everything a metric needs is a sum or a maximum, so that ranks exchange two vectors of equal length
whatever they did, and ratios are formed once, at the end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flashmoe_megatron.config import TILE_M, MoEConfig, align_capacity
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.planner import expert_capacity
from flashmoe_megatron.telemetry.record import (
    DIRECTIONS,
    UNNAMED,
    Direction,
    LaunchRecord,
    Phase,
)

PHASES = tuple(Phase)
LINKS = ("peer", "nccl", "host", "gloo")
"""The links of a multipath, whose figures ranks exchange in this order."""
_PROCESSORS = (Phase.HEAD, Phase.STAGE_WAIT, Phase.GEMM, Phase.EPILOGUE, Phase.TAIL)
_COMMUNICATION = (Phase.DISPATCH, Phase.DELIVER, Phase.REDUCE)


@dataclass(frozen=True)
class LayerPlace:
    """A layer, as one of its ranks sees it.

    Attributes:
        config: Its shape; ``max_tokens`` does not count.
        rank: This rank in the layer's expert-parallel group.
        element_bytes: Bytes of an element of a row.
        capacity_factor: Factor of the capacity that the traffic is compared with.
        num_sms: Multiprocessors of the GPU, 0 if it is none.
        num_hosts: Hosts of the group, as many ranks on each.
    """

    config: MoEConfig
    rank: int
    element_bytes: int = 2
    capacity_factor: float = 1.0
    num_sms: int = 0
    num_hosts: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a result's row, and of a gradient's."""
        return self.config.hidden * self.element_bytes

    def pulled_bytes(self, direction: Direction) -> int:
        """Bytes of a row that comes to an expert."""
        is_backward = direction == "backward"
        return self.config.dispatched_bytes(self.element_bytes, is_backward=is_backward)

    def padded_bytes(self, num_tokens: int, direction: Direction, *, tile: int = 1) -> int:
        """Returns the bytes that this rank would have sent in one launch if it padded to capacity.

        They go to other ranks, in dispatch and combine. The capacity is rounded up to ``tile``.
        """
        config = self.config
        capacity = expert_capacity(
            num_tokens, config.topk, config.num_experts, self.capacity_factor
        )
        remote_experts = config.num_experts - config.num_local_experts
        both_ways = self.pulled_bytes(direction) + self.row_bytes
        return remote_experts * align_capacity(capacity, tile) * both_ways


@dataclass
class LaunchTotals:
    """Sums over the launches of one layer and direction.

    Attributes:
        tile_rows: Rows of the tiles that hold the received rows.
        flops: Operations of both projections of the routed rows; in backward, of both gradients.
        counted_launches: Launches whose traffic is known.
        sent_bytes: What crossed a link in them, counted where it arrived (dispatch) or left
            (combine).
        padded_bytes: What padding to capacity would have sent.
        aligned_bytes: The same with capacities of whole tiles.
        rows_fetched: Rows fetched by forwards, own tokens included, where these are counted; in a
            backward's count may be those of a launch that fetched its tokens again.
        rows_routed: Routed rows of those launches.
        overlap_launches: Launches whose communication was measured.
        overlap_ns: Time of the communication roles in them.
        exposed_ns: The processors' wait for it.
        sm_ns: Time of all SMs, where their number is known and the processors were measured.
        resident_ns: That with a CTA on it, in the same launches.
        fed_ns: That in the main loops, in the same launches.
        phase_ns: Each phase's time, in the order of :data:`PHASES`.
        phase_of_ns: Duration of the launches that measured the phase.
    """

    launches: float = 0
    duration_ns: float = 0
    num_tokens: float = 0
    num_rows: float = 0
    tile_rows: float = 0
    flops: float = 0
    counted_launches: float = 0
    sent_bytes: float = 0
    padded_bytes: float = 0
    aligned_bytes: float = 0
    rows_fetched: float = 0
    rows_routed: float = 0
    overlap_launches: float = 0
    overlap_ns: float = 0
    exposed_ns: float = 0
    sm_ns: float = 0
    resident_ns: float = 0
    fed_ns: float = 0
    phase_ns: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    phase_of_ns: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))

    def add(self, record: LaunchRecord, place: LayerPlace) -> None:
        """Adds one launch."""
        config = place.config
        self.launches += 1
        self.duration_ns += record.duration_ns
        self.num_tokens += record.num_tokens
        self.num_rows += record.num_rows
        self.tile_rows += record.num_row_blocks * TILE_M
        flops = 2 * record.num_rows * config.hidden * (config.fc1_rows + config.intermediate)
        self.flops += flops if record.direction == "forward" else 2 * flops
        if record.rows_pulled:
            self._add_traffic(record, place)
        self._add_phases(record, place)

    def _add_traffic(self, record: LaunchRecord, place: LayerPlace) -> None:
        self.counted_launches += 1
        tokens, direction = record.num_tokens, record.direction
        pulled = sum(record.rows_pulled) - record.rows_pulled[place.rank]
        pushed = sum(record.results_pushed) - record.results_pushed[place.rank]
        self.sent_bytes += pulled * place.pulled_bytes(direction) + pushed * place.row_bytes
        self.padded_bytes += place.padded_bytes(tokens, direction)
        self.aligned_bytes += place.padded_bytes(tokens, direction, tile=TILE_M)
        if record.direction == "forward" and record.rows_pulled[place.rank]:
            self.rows_fetched += sum(record.rows_pulled)
            self.rows_routed += record.num_rows

    def _add_phases(self, record: LaunchRecord, place: LayerPlace) -> None:
        phases = record.phase_ns
        for index, phase in enumerate(PHASES):
            if phase in phases:
                self.phase_ns[index] += phases[phase]
                self.phase_of_ns[index] += record.duration_ns
        busy = sum(phases.get(phase, 0.0) for phase in _COMMUNICATION)
        idle = phases.get(Phase.HEAD, 0.0) + phases.get(Phase.STAGE_WAIT, 0.0)
        if busy and Phase.ROWS_WAIT in phases and Phase.TAIL in phases:
            self.overlap_launches += 1
            self.overlap_ns += busy
            self.exposed_ns += min(phases[Phase.ROWS_WAIT], idle) + phases[Phase.TAIL]
        if place.num_sms and Phase.GEMM in phases:
            self.sm_ns += place.num_sms * record.duration_ns
            resident = sum(phases.get(phase, 0.0) for phase in _PROCESSORS)
            self.resident_ns += record.num_ctas * resident
            self.fed_ns += record.num_ctas * phases[Phase.GEMM]

    def values(self) -> list[float]:
        """All sums, in one order."""
        scalars = [getattr(self, name) for name in _SCALARS]
        return [*scalars, *self.phase_ns, *self.phase_of_ns]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "LaunchTotals":
        """Undoes :meth:`values`."""
        count = len(_SCALARS)
        middle = count + len(PHASES)
        totals = cls(phase_ns=list(values[count:middle]), phase_of_ns=list(values[middle:]))
        vars(totals).update(zip(_SCALARS, values[:count], strict=True))
        return totals

    @classmethod
    def sum(cls, parts: Iterable["LaunchTotals"]) -> "LaunchTotals":
        """Adds sums to sums."""
        columns = zip(*(part.values() for part in (cls(), *parts)), strict=True)
        return cls.from_values([sum(column) for column in columns])


_SCALARS = tuple(item.name for item in fields(LaunchTotals) if not item.name.startswith("phase"))
_LAUNCH_WIDTH = len(_SCALARS) + 2 * len(PHASES)

Slot = tuple[int, Direction]


class Layout:
    """The layers that all ranks agree to report, with their sizes.

    Args:
        layers: Every layer of any rank by its number, the same on every rank.

    Attributes:
        layers: As given, by ascending number.
        num_ranks: Ranks of the largest expert-parallel group.
    """

    def __init__(self, layers: dict[int, LayerPlace]) -> None:
        self.layers = dict(sorted(layers.items()))
        configs = [place.config for place in self.layers.values()]
        self.num_ranks = max((config.num_ranks for config in configs), default=0)

    @property
    def slots(self) -> list[Slot]:
        """Every layer and direction, in the order of the vectors."""
        return [(layer, direction) for layer in self.layers for direction in DIRECTIONS]


class Totals:
    """The sums of one rank, or of all, since the last report.

    Args:
        places: This rank's own layers; without one, those of the layout.

    Attributes:
        layout: As given.
        launches: Sums for every layer and direction.
        longest_ns: The longest launch of each.
        rank_launches: Launches of each rank of each layer's group, by layer.
        expert_rows: Rows of every expert of each layer's group, by layer, wherever it is computed.
        rank_rows: Rows that each rank of each layer's group has computed, by layer.
        unnamed_rows: Rows among them that do not say which expert's they are.
        routes: Routes of each rank's tokens in forwards, where they are counted, by layer.
        local_routes: The routes of these that have stayed on the rank.
        replicas: Replicas that each rank has computed, by layer and direction.
        replica_launches: Launches of each that had spare slots.
        replica_bytes: Bytes that replicas have brought to a rank in them.
        counted_launches: Launches of each rank of an expert-parallel group whose traffic is known.
        bytes_pulled: ``[source][target]``, bytes between such ranks that the target counted.
        bytes_pushed: The same, that the source counted.
        tokens: Tokens that training has put through each layer, without recomputation;
            counted by the host, because a backend keeps its last launches alone.
        routes_chosen: Routes that routers chose, where the framework tells.
        routes_kept: The routes that were not dropped.
        seconds: The host's time that all this took; the longest of any rank.
        crossing_calls: Forwards and backwards of layers over hosts, where the framework tells.
        crossed_rows: Rows that they sent to other hosts.
        crossed_bytes: Bytes that they did.
        crossing_ns: Their time in exchanges between hosts.
        link_bytes: Bytes that ranks received by each link of a multipath, by its name.
        link_timed_bytes: Bytes of transfers whose times have become known since.
        link_seconds: How long each of those links was at work for them.
        heap_bytes: High-water mark of the symmetric heap; the highest of any rank.
        watched: Iterations so far that would have been repeated for rows beyond a bound.
        repeats: The iterations of these that were.
    """

    def __init__(self, layout: Layout, places: dict[int, LayerPlace] | None = None) -> None:
        self.layout = layout
        self._places = layout.layers if places is None else places
        self.launches: dict[Slot, LaunchTotals] = {slot: LaunchTotals() for slot in layout.slots}
        self.longest_ns: dict[Slot, float] = dict.fromkeys(layout.slots, 0.0)
        configs = {layer: place.config for layer, place in layout.layers.items()}

        def by_rank() -> dict[int, list[float]]:
            return {layer: [0.0] * one.num_ranks for layer, one in configs.items()}

        self.expert_rows = {layer: [0.0] * one.num_experts for layer, one in configs.items()}
        self.rank_launches, self.rank_rows, self.unnamed_rows = by_rank(), by_rank(), by_rank()
        self.routes, self.local_routes = by_rank(), by_rank()
        self.replicas, self.replica_launches, self.replica_bytes = (
            dict.fromkeys(layout.slots, 0.0) for _ in range(3)
        )
        self.counted_launches, *matrices = (
            [0.0] * layout.num_ranks for _ in range(1 + 2 * layout.num_ranks)
        )
        self.bytes_pulled = matrices[: layout.num_ranks]
        self.bytes_pushed = matrices[layout.num_ranks :]
        self.tokens = dict.fromkeys(layout.layers, 0.0)
        self.routes_chosen = self.routes_kept = 0.0
        self.crossing_calls = self.crossing_ns = 0.0
        self.crossed_rows = self.crossed_bytes = 0.0
        self.link_bytes, self.link_timed_bytes, self.link_seconds = (
            dict.fromkeys(LINKS, 0.0) for _ in range(3)
        )
        self.seconds = self.heap_bytes = 0.0
        self.watched = self.repeats = 0.0

    def add(self, record: LaunchRecord) -> None:
        """Adds one launch of this rank.

        Raises:
            ConfigError: The record is of no layer of this rank, or of another shape.
        """
        place = self._places.get(record.layer)
        if place is None:
            known = ", ".join(map(str, self._places)) or "none"
            raise ConfigError(f"a record of layer {record.layer}: this rank has layers {known}")
        config = place.config
        peers = (config.num_ranks, 0)
        for name, got, wanted in (
            ("experts", len(record.expert_rows), (config.num_local_experts,)),
            ("peers", len(record.rows_pulled), peers),
            ("peers", len(record.results_pushed), (len(record.rows_pulled),)),
        ):
            if got not in wanted:
                raise ConfigError(
                    f"a record of layer {record.layer} has {got} {name}, wanted {wanted[0]}"
                )
        slot = (record.layer, record.direction)
        self.launches[slot].add(record, place)
        self.longest_ns[slot] = max(self.longest_ns[slot], float(record.duration_ns))
        self.rank_launches[record.layer][place.rank] += 1
        first = place.rank * config.num_local_experts
        for expert, rows in enumerate(record.expert_rows):
            self.expert_rows[record.layer][first + expert] += rows
        self._add_placement(record, place.rank)
        if record.rows_pulled:
            self.counted_launches[place.rank] += 1
        for peer in range(len(record.rows_pulled)):
            if peer != place.rank:
                pulled, pushed = record.rows_pulled[peer], record.results_pushed[peer]
                self.bytes_pulled[peer][place.rank] += pulled * place.pulled_bytes(record.direction)
                self.bytes_pushed[place.rank][peer] += pushed * place.row_bytes

    def _add_placement(self, record: LaunchRecord, rank: int) -> None:
        layer, slot = record.layer, (record.layer, record.direction)
        self.rank_rows[layer][rank] += sum(record.expert_rows)
        if record.routes is not None and record.direction == "forward":
            self.local_routes[layer][rank] += record.routes[0]
            self.routes[layer][rank] += record.routes[1]
        if record.replicas is not None:
            self.replica_launches[slot] += 1
            self.replicas[slot] += len(record.replicas.rows)
            self.replica_bytes[slot] += record.replicas.num_bytes
            self.rank_rows[layer][rank] += sum(rows for _, rows in record.replicas.rows)
            for expert, rows in record.replicas.rows:
                if expert == UNNAMED:
                    self.unnamed_rows[layer][rank] += rows
                else:
                    self.expert_rows[layer][expert] += rows

    @property
    def _rows(self) -> list[list[float]]:
        """The sums of ranks and experts, in the order of the vectors."""
        by_layer = (
            self.rank_launches,
            self.expert_rows,
            self.rank_rows,
            self.unnamed_rows,
            self.routes,
            self.local_routes,
        )
        rows = [row for rows in by_layer for row in rows.values()]
        return [*rows, self.counted_launches, *self.bytes_pulled, *self.bytes_pushed]

    @property
    def _tables(self) -> tuple[dict[Any, float], ...]:
        """The sums of layers and links, likewise."""
        by_slot = (self.replicas, self.replica_launches, self.replica_bytes)
        by_link = (self.link_bytes, self.link_timed_bytes, self.link_seconds)
        return (*by_slot, self.tokens, *by_link)

    def sums(self) -> list[float]:
        """Returns all values that are added up over ranks."""
        return [
            *(value for totals in self.launches.values() for value in totals.values()),
            *(value for row in self._rows for value in row),
            *(value for table in self._tables for value in table.values()),
            *(getattr(self, name) for name in _SUMS),
        ]

    def maxima(self) -> list[float]:
        """Returns the values whose greatest over ranks is taken."""
        alone = (self.seconds, self.heap_bytes, self.watched, self.repeats)
        return [*self.longest_ns.values(), *alone]

    @classmethod
    def from_vectors(
        cls, layout: Layout, sums: Sequence[float], maxima: Sequence[float]
    ) -> "Totals":
        """Undoes :meth:`sums` and :meth:`maxima`."""
        totals = cls(layout)
        given = iter(sums)

        def take(count: int) -> list[float]:
            return [next(given) for _ in range(count)]

        for slot in layout.slots:
            totals.launches[slot] = LaunchTotals.from_values(take(_LAUNCH_WIDTH))
        for row in totals._rows:
            row[:] = take(len(row))
        for table in totals._tables:
            table.update(zip(table, take(len(table)), strict=True))
        vars(totals).update(zip(_SUMS, take(len(_SUMS)), strict=True))
        *longest, totals.seconds, totals.heap_bytes, totals.watched, totals.repeats = maxima
        totals.longest_ns = dict(zip(layout.slots, longest, strict=True))
        return totals


_SUMS = (
    "routes_chosen",
    "routes_kept",
    "crossing_calls",
    "crossed_rows",
    "crossed_bytes",
    "crossing_ns",
)
"""The sums that are single numbers."""
