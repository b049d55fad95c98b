"""From sums over launches to the metrics of the registry."""

import itertools
from collections.abc import Iterable, Iterator

from flashmoe_megatron.measured.calibration import Calibration
from flashmoe_megatron.telemetry.record import DIRECTIONS
from flashmoe_megatron.telemetry.registry import find_metric, key_of
from flashmoe_megatron.telemetry.totals import PHASES, LaunchTotals, Totals

MIB = 2**20

Named = tuple[str, dict[str, object], float]
"""Name of a metric, what its key takes, and the value."""


def compute_metrics(
    totals: Totals, chosen: Iterable[str], calibration: Calibration | None = None
) -> dict[str, float]:
    """Computes every chosen metric whose ingredients were measured.

    The totals are one rank's, or reduced over ranks. ``calibration`` has times on 2 GPUs, for the
    overlap efficiency.

    Returns:
        Values by key; what was not measured has none.

    Raises:
        ConfigError: A name is unknown.
    """
    wanted = {find_metric(name).name for name in chosen}
    found = itertools.chain(
        _of_directions(totals),
        _of_overlap(totals, calibration),
        _of_all(totals),
        _of_links(totals),
        _of_multipath(totals),
        _of_experts(totals, one_by_one="expert_rows" in wanted),
        _of_placement(totals),
    )
    return {key_of(name, **values): value for name, values, value in found if name in wanted}


def _of_directions(totals: Totals) -> Iterator[Named]:
    for direction in DIRECTIONS:
        given: dict[str, object] = {"direction": direction}
        by_layer = {
            layer: totals.launches[layer, direction]
            for layer in totals.layout.layers
            if totals.launches[layer, direction].launches
        }
        if not by_layer:
            continue
        for layer, one in by_layer.items():
            mean_ms = one.duration_ns / one.launches / 1e6
            yield "each_layer_ms", {**given, "layer": layer}, mean_ms
        whole = LaunchTotals.sum(by_layer.values())
        for name, value in _of_launches(whole):
            yield name, given, value
        longest = max(totals.longest_ns[layer, direction] for layer in by_layer)
        yield "layer_ms_max", given, longest / 1e6
        for phase, spent, of in zip(PHASES, whole.phase_ns, whole.phase_of_ns, strict=True):
            if of:
                yield "phase_share", {**given, "phase": phase.value}, spent / of


def _of_launches(whole: LaunchTotals) -> Iterator[tuple[str, float]]:
    count = whole.launches
    yield "layer_ms", whole.duration_ns / count / 1e6
    if whole.counted_launches:
        yield "mib_sent", whole.sent_bytes / whole.counted_launches / MIB
        yield "padded_mib", whole.padded_bytes / whole.counted_launches / MIB
        yield "aligned_mib", whole.aligned_bytes / whole.counted_launches / MIB
    if whole.padded_bytes:
        yield "payload_share", whole.sent_bytes / whole.padded_bytes
        yield "aligned_payload_share", whole.sent_bytes / whole.aligned_bytes
    if whole.overlap_ns:
        yield "exposed_wait_ms", whole.exposed_ns / whole.overlap_launches / 1e6
        yield "communication_ms", whole.overlap_ns / whole.overlap_launches / 1e6
        yield "hidden_communication", max(0.0, 1 - whole.exposed_ns / whole.overlap_ns)
    if whole.sm_ns:
        yield "sm_utilization", whole.resident_ns / whole.sm_ns
        yield "tensor_core_fed", whole.fed_ns / whole.sm_ns
    if whole.duration_ns:
        yield "tflops", whole.flops / whole.duration_ns / 1e3


def _of_overlap(totals: Totals, calibration: Calibration | None) -> Iterator[Named]:
    if calibration is None:
        return
    for direction in DIRECTIONS:
        on_two = here = 0.0
        for layer, place in totals.layout.layers.items():
            one = totals.launches[layer, direction]
            if not one.launches:
                continue
            tokens = one.num_tokens / one.launches
            t2_ms = calibration.time_ms(place.config, direction, num_tokens=tokens)
            if t2_ms is not None:
                on_two += t2_ms * 1e6 * one.launches
                here += one.duration_ns
        if here:
            yield "overlap_efficiency", {"direction": direction}, on_two / here


def _of_all(totals: Totals) -> Iterator[Named]:
    whole = LaunchTotals.sum(totals.launches.values())
    if whole.rows_routed:
        yield "deduplication", {}, whole.rows_fetched / whole.rows_routed
    if whole.tile_rows:
        yield "row_fill", {}, whole.num_rows / whole.tile_rows
    if totals.heap_bytes:
        yield "heap_mib", {}, totals.heap_bytes / MIB
    if totals.watched:
        yield "repeats", {}, totals.repeats
    if totals.crossing_calls:
        yield "crossed_rows", {}, totals.crossed_rows / totals.crossing_calls
        yield "crossed_mib", {}, totals.crossed_bytes / totals.crossing_calls / MIB
        yield "crossing_ms", {}, totals.crossing_ns / totals.crossing_calls / 1e6
    if totals.routes_chosen:
        yield "dropped_routes", {}, 1 - totals.routes_kept / totals.routes_chosen
    tokens = [count for count in totals.tokens.values() if count]
    if totals.seconds and tokens:
        yield "tokens_per_second", {}, sum(tokens) / len(tokens) / totals.seconds


def _of_multipath(totals: Totals) -> Iterator[Named]:
    whole = sum(totals.link_bytes.values())
    for link, nbytes in totals.link_bytes.items():
        if nbytes:
            yield "link_mib", {"link": link}, nbytes / MIB
            yield "link_share", {"link": link}, nbytes / whole
        if seconds := totals.link_seconds[link]:
            yield "link_gbps", {"link": link}, totals.link_timed_bytes[link] / seconds / 1e9


def _of_links(totals: Totals) -> Iterator[Named]:
    """Yields each end's bytes per launch of its own: one end may have reported more launches."""
    counted = totals.counted_launches
    for source, target in itertools.permutations(range(totals.layout.num_ranks), 2):
        if counted[source] and counted[target]:
            pulled = totals.bytes_pulled[source][target] / counted[target]
            pushed = totals.bytes_pushed[source][target] / counted[source]
            yield "mib_between", {"source": source, "target": target}, (pulled + pushed) / MIB


def _of_experts(totals: Totals, *, one_by_one: bool) -> Iterator[Named]:
    """Yields rows per launch of their rank: another may have reported more launches.

    A layer has none by expert if some rows do not say whose they are.
    """
    everyone: list[float] = []
    expert_imbalance = rank_imbalance = home_imbalance = host_imbalance = 0.0
    for layer, place in totals.layout.layers.items():
        launches = totals.rank_launches[layer]
        local = place.config.num_local_experts
        rows = {
            expert: count / launches[expert // local]
            for expert, count in enumerate(totals.expert_rows[layer])
            if launches[expert // local]
        }
        if any(totals.unnamed_rows[layer]):
            rows.clear()
        for expert, count in rows.items() if one_by_one else ():
            yield "expert_rows", {"layer": layer, "expert": expert}, count
        counts = list(rows.values())
        everyone += counts
        if all(launches):
            by_rank = [
                rows / count for rows, count in zip(totals.rank_rows[layer], launches, strict=True)
            ]
            at_home = [sum(counts[first : first + local]) for first in range(0, len(counts), local)]
            expert_imbalance = max(expert_imbalance, _imbalance(counts))
            rank_imbalance = max(rank_imbalance, _imbalance(by_rank))
            if place.num_hosts > 1:
                step = len(by_rank) // place.num_hosts
                by_host = [sum(by_rank[i : i + step]) for i in range(0, len(by_rank), step)]
                for host, count in enumerate(by_host):
                    yield "host_rows", {"layer": layer, "host": host}, count
                host_imbalance = max(host_imbalance, _imbalance(by_host))
            if any(totals.replica_launches[layer, direction] for direction in DIRECTIONS):
                home_imbalance = max(home_imbalance, _imbalance(at_home))
    if everyone:
        yield "expert_rows_min", {}, min(everyone)
        yield "expert_rows_mean", {}, sum(everyone) / len(everyone)
        yield "expert_rows_max", {}, max(everyone)
    if expert_imbalance:
        yield "expert_imbalance", {}, expert_imbalance
    if rank_imbalance:
        yield "rank_imbalance", {}, rank_imbalance
    if host_imbalance:
        yield "host_imbalance", {}, host_imbalance
    if home_imbalance:
        yield "rank_imbalance_before", {}, home_imbalance


def _of_placement(totals: Totals) -> Iterator[Named]:
    """Says where the routes of forwards go, and what replicas have brought there."""
    stays = goes = 0.0
    for layer in totals.layout.layers:
        of_ranks = zip(totals.local_routes[layer], totals.routes[layer], strict=True)
        for rank, (local, routes) in enumerate(of_ranks):
            stays += local
            goes += routes
            if routes:
                yield "rank_locality", {"layer": layer, "rank": rank}, local / routes
    if goes:
        yield "locality", {}, stays / goes
    for direction in DIRECTIONS:
        slots = [(layer, direction) for layer in totals.layout.layers]
        launches = sum(totals.replica_launches[slot] for slot in slots)
        if launches:
            if direction == "forward":
                yield "replicas", {}, sum(totals.replicas[slot] for slot in slots) / launches
            brought = sum(totals.replica_bytes[slot] for slot in slots)
            yield "replica_mib", {"direction": direction}, brought / launches / MIB


def _imbalance(counts: list[float]) -> float:
    """Greatest over mean, 0 if there is nothing."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 0.0
