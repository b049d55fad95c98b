"""Metrics from hand-made records with known answers, and what holds for all records."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.records import launch_record
from flashmoe_megatron.telemetry.metrics import compute_metrics
from flashmoe_megatron.telemetry.record import (
    DIRECTIONS,
    MOST_LAYERS,
    MOST_OWNERS,
    UNNAMED,
    LaunchRecord,
    Phase,
    ReplicaRecord,
    launch_number,
)
from flashmoe_megatron.telemetry.registry import FORMER, METRICS, PREFIX, choose_metrics, key_of
from flashmoe_megatron.telemetry.totals import LaunchTotals, Layout, Totals
from tests.unit import records

ALL = frozenset(METRICS)


def totals_of(*launches: LaunchRecord, rank: int = 0, **place: object) -> Totals:
    places = {3: records.place(rank, **place)}
    totals = Totals(Layout(places), places)
    for launch in launches:
        totals.add(launch)
    return totals


def added_up(*ranks: Totals) -> Totals:
    sums = [sum(values) for values in zip(*(rank.sums() for rank in ranks), strict=True)]
    maxima = [max(values) for values in zip(*(rank.maxima() for rank in ranks), strict=True)]
    return Totals.from_vectors(ranks[0].layout, sums, maxima)


def mirrored(launch: LaunchRecord) -> LaunchRecord:
    """What the second of two ranks tells if both do the same."""
    peers = {name: getattr(launch, name)[::-1] for name in ("rows_pulled", "results_pushed")}
    return replace(launch, **peers)


def metrics_of(*launches: LaunchRecord, **place: object) -> dict[str, float]:
    """The metrics of two ranks that do the same."""
    other = totals_of(*map(mirrored, launches), rank=1, **place)
    return compute_metrics(added_up(totals_of(*launches, **place), other), ALL)


# The metrics of records.RECORD: 1 ms on 128 CTAs of 132 SMs; 256 tokens of top-2 of 8 experts on 2
# ranks; rows of 64 elements of 2 bytes, 190 of them to and 190 from the other rank.
KNOWN = {
    "forward/layer_ms": 1.0,
    "forward/layer_ms_max": 1.0,
    "forward/layer_3/layer_ms": 1.0,
    "forward/communication_ms": 0.4,
    # The loader waited 60 us for rows, less than the 140 us the processors were idle; 80 us tail.
    "forward/exposed_wait_ms": 0.14,
    "forward/hidden_communication": 1 - 0.14 / 0.4,
    "forward/phase/gemm": 0.7,
    "forward/phase/rows_wait": 0.06,
    "forward/sm_utilization": 128 * 1.0 / 132,  # head, waits, main loop, epilogue and tail: 1 ms
    "forward/tensor_core_fed": 128 * 0.7 / 132,
    "forward/tflops": 2 * 500 * 64 * (128 + 64) / 1e-3 / 1e12,
    "forward/mib_sent": 380 * 128 / 2**20,
    # Capacity 256 * 2 / 8 = 64 rows for each of the 4 experts there, out and back.
    "forward/padded_mib": 2 * 4 * 64 * 128 / 2**20,
    "forward/aligned_mib": 2 * 4 * 128 * 128 / 2**20,
    "forward/payload_share": 380 / 512,
    "forward/aligned_payload_share": 380 / 1024,
    "mib/rank_1_to_0": 380 * 128 / 2**20,
    "deduplication": 420 / 500,
    "row_fill": 500 / 768,
    "expert_rows/mean": 125,
    "expert_rows/max": 200,
    "expert_rows/min": 50,
    "layer_3/expert_rows/2": 200,
    "layer_3/expert_rows/6": 200,
    "expert_imbalance": 200 / 125,
    "rank_imbalance": 1.0,
}


@pytest.mark.parametrize("key", KNOWN)
def test_known_answer(key: str) -> None:
    assert metrics_of(records.RECORD)[PREFIX + key] == pytest.approx(KNOWN[key])


def test_two_launches_are_averaged_and_the_longest_kept() -> None:
    slow = records.record(end_ns=3_005_000, layer=3)
    values = metrics_of(records.RECORD, slow)
    assert values["flashmoe/forward/layer_ms"] == pytest.approx(2.0)
    assert values["flashmoe/forward/layer_ms_max"] == pytest.approx(3.0)
    # A ratio of sums, not the mean of ratios.
    assert values["flashmoe/forward/phase/gemm"] == pytest.approx(1.4 / 4)
    assert values["flashmoe/forward/exposed_wait_ms"] == pytest.approx(0.14)


def test_ranks_that_told_of_different_numbers_of_launches_are_compared_by_launch() -> None:
    ranks = totals_of(*[records.RECORD] * 4), totals_of(*[mirrored(records.RECORD)] * 3, rank=1)
    values = compute_metrics(added_up(*ranks), ALL)
    for key, value in KNOWN.items():
        assert values[PREFIX + key] == pytest.approx(value), key
    lighter = records.record(expert_rows=(75, 75, 75, 75), rows_pulled=(90, 230))
    values = compute_metrics(added_up(ranks[0], totals_of(*[lighter] * 3, rank=1)), ALL)
    assert values["flashmoe/rank_imbalance"] == pytest.approx(500 / 400)
    assert values["flashmoe/expert_imbalance"] == pytest.approx(200 / 100)
    # Pulled by the target from the source, and pushed by the source to the target.
    assert values["flashmoe/mib/rank_0_to_1"] == pytest.approx((90 + 190) * 128 / 2**20)
    assert values["flashmoe/mib/rank_1_to_0"] == pytest.approx((190 + 230) * 128 / 2**20)


def test_replicas_even_out_ranks_and_are_counted() -> None:
    """Rank 0 computes a quarter of expert 6's rows, which is rank 1's, and tells of its routes."""
    helping = records.record(
        expert_rows=(20, 40, 80, 20),
        routes=(200, 512),
        replicas=ReplicaRecord(rows=((6, 100),), num_bytes=2**20),
    )
    helped = records.record(
        expert_rows=(60, 60, 100, 60),
        routes=(456, 512),
        replicas=ReplicaRecord(rows=(), num_bytes=3 * 2**20),
    )
    values = compute_metrics(added_up(totals_of(helping), totals_of(helped, rank=1)), ALL)
    assert values["flashmoe/rank_imbalance"] == pytest.approx(280 / 270)
    assert values["flashmoe/rank_imbalance_before"] == pytest.approx(380 / 270)
    assert values["flashmoe/layer_3/expert_rows/6"] == pytest.approx(200)
    assert values["flashmoe/locality"] == pytest.approx(656 / 1024)
    assert values["flashmoe/layer_3/locality/rank_1"] == pytest.approx(456 / 512)
    assert values["flashmoe/replicas"] == 0.5
    assert values["flashmoe/forward/replica_mib"] == 2
    alone = metrics_of(records.RECORD)
    assert not any("replica" in key or "locality" in key or "before" in key for key in alone)


def test_locality_is_that_of_forwards() -> None:
    again = records.record(direction="backward", routes=(0, 512))
    values = metrics_of(records.record(routes=(200, 512)), again)
    assert values["flashmoe/locality"] == pytest.approx(200 / 512)


def test_vectors_are_told_apart() -> None:
    """Every sum is another number, for two layers of which one has fewer ranks."""
    config = records.CONFIG
    alone = type(config)(**{**vars(config), "num_ranks": 1})
    layout = Layout({5: records.place(), 3: records.place(config=alone)})
    assert (list(layout.layers), layout.num_ranks) == ([3, 5], 2)
    nothing = Totals(layout)
    assert not any((*nothing.sums(), *nothing.maxima()))
    sums = [float(number) for number in range(1, 1 + len(nothing.sums()))]
    maxima = [float(-number) for number in range(1, 1 + len(nothing.maxima()))]
    totals = Totals.from_vectors(layout, sums, maxima)
    assert (totals.sums(), totals.maxima()) == (sums, maxima)
    with pytest.raises(ConfigError, match="a record of layer 3: this rank has layers 5"):
        Totals(layout, {5: records.place()}).add(records.RECORD)


def test_a_rank_that_told_of_no_launch_is_compared_with_none() -> None:
    values = compute_metrics(totals_of(records.RECORD), ALL)
    assert values["flashmoe/expert_rows/min"] == 50
    assert "flashmoe/layer_3/expert_rows/3" in values
    assert "flashmoe/layer_3/expert_rows/4" not in values
    assert not any("imbalance" in key or "/mib/" in key for key in values)


def test_directions_are_apart() -> None:
    values = metrics_of(records.RECORD, records.record(direction="backward", end_ns=2_005_000))
    assert values["flashmoe/forward/layer_ms"] == pytest.approx(1.0)
    assert values["flashmoe/backward/layer_ms"] == pytest.approx(2.0)
    # The gradients of rows and of weights, in twice the time.
    assert values["flashmoe/backward/tflops"] == pytest.approx(values["flashmoe/forward/tflops"])


def test_what_was_not_measured_is_absent() -> None:
    bare = metrics_of(records.record(phase_ns={}, rows_pulled=(0, 190)), num_sms=0)
    for name in ("hidden_communication", "sm_utilization", "tensor_core_fed", "phase/gemm"):
        assert f"flashmoe/forward/{name}" not in bare
    for name in ("deduplication", "heap_mib", "tokens_per_second", "dropped_routes"):
        assert f"flashmoe/{name}" not in bare
    assert "flashmoe/forward/overlap_efficiency" not in bare
    assert not any("backward" in key for key in bare)
    assert bare["flashmoe/forward/layer_ms"] == pytest.approx(1.0)


def test_nothing_is_known_of_no_launches() -> None:
    assert compute_metrics(totals_of(), ALL) == {}


def test_exposed_wait_is_at_most_the_communication() -> None:
    phases = {**records.RECORD.phase_ns, Phase.TAIL: 900_000.0}
    values = metrics_of(records.record(phase_ns=phases))
    assert values["flashmoe/forward/hidden_communication"] == 0.0


@pytest.mark.parametrize(
    "missing",
    [{Phase.ROWS_WAIT}, {Phase.TAIL}, {Phase.DISPATCH, Phase.DELIVER, Phase.REDUCE}],
)
def test_no_wait_is_told_where_a_part_of_it_was_not_measured(missing: set[Phase]) -> None:
    phases = {key: ns for key, ns in records.RECORD.phase_ns.items() if key not in missing}
    values = metrics_of(records.record(phase_ns=phases))
    for name in ("exposed_wait_ms", "hidden_communication"):
        assert f"flashmoe/forward/{name}" not in values


def test_late_peers_do_not_expose_communication() -> None:
    """A forward waits for a rank that begins late in HEAD alone: the loader waits for no rows yet.

    A backward has no plan, so that its loader does; nobody can tell that from other waits.
    """
    phases = {**records.RECORD.phase_ns, Phase.HEAD: 5_000_000.0}
    values = metrics_of(records.record(phase_ns=phases, end_ns=5_905_000))
    assert values["flashmoe/forward/exposed_wait_ms"] == pytest.approx(0.14)


def test_a_wait_for_rows_is_exposed_no_longer_than_the_processors_are_idle() -> None:
    """The loader runs ahead: while it waits for rows, processors compute what it has loaded."""
    phases = {**records.RECORD.phase_ns, Phase.ROWS_WAIT: 900_000.0}
    values = metrics_of(records.record(phase_ns=phases))
    # 100 us of the head and 40 us of waits for a stage, then the tail's 80 us.
    assert values["flashmoe/forward/exposed_wait_ms"] == pytest.approx(0.22)


def test_one_rank_sends_nothing() -> None:
    config = records.CONFIG
    alone = totals_of(
        records.record(rows_pulled=(300,), results_pushed=(300,), expert_rows=(50,) * 8),
        config=type(config)(**{**vars(config), "num_ranks": 1}),
    )
    values = compute_metrics(alone, ALL)
    assert values["flashmoe/forward/mib_sent"] == 0
    assert "flashmoe/forward/payload_share" not in values
    assert not any("/mib/" in key for key in values)


def test_capacity_factor_widens_what_padding_sends() -> None:
    values = metrics_of(records.RECORD, capacity_factor=1.25)
    assert values["flashmoe/forward/padded_mib"] == pytest.approx(2 * 4 * 80 * 128 / 2**20)
    assert values["flashmoe/forward/aligned_mib"] == pytest.approx(2 * 4 * 128 * 128 / 2**20)


def test_tokens_per_second_is_a_mean_over_layers() -> None:
    """Layers that no rank has put tokens through are left out."""
    places = {layer: records.place() for layer in (1, 2, 3)}
    totals = Totals(Layout(places), places)
    totals.seconds = 0.5
    totals.tokens = {1: 100, 2: 200, 3: 0}
    assert compute_metrics(totals, ["tokens_per_second"]) == {"flashmoe/tokens_per_second": 300}


def test_launches_whose_traffic_is_unknown_are_left_out_of_it() -> None:
    unknown = records.record(rows_pulled=(), results_pushed=(), phase_ns={}, num_tokens=10_000)
    values = metrics_of(records.RECORD, unknown)
    for key in ("mib_sent", "padded_mib", "payload_share", "exposed_wait_ms", "phase/gemm"):
        assert values[f"flashmoe/forward/{key}"] == pytest.approx(KNOWN[f"forward/{key}"])
    assert values["flashmoe/mib/rank_1_to_0"] == pytest.approx(KNOWN["mib/rank_1_to_0"])
    assert values["flashmoe/deduplication"] == pytest.approx(KNOWN["deduplication"])
    assert values["flashmoe/forward/layer_ms"] == pytest.approx(1.0)


def test_tokens_that_a_backward_fetches_again_are_not_shared_less() -> None:
    again = records.record(direction="backward", rows_pulled=(460, 380))
    values = metrics_of(records.RECORD, again)
    assert values["flashmoe/deduplication"] == pytest.approx(KNOWN["deduplication"])
    assert values["flashmoe/backward/mib_sent"] == pytest.approx(570 * 128 / 2**20)


def test_what_records_do_not_have() -> None:
    totals = totals_of(records.RECORD)
    totals.heap_bytes, totals.routes_chosen, totals.routes_kept = 3 * 2**20, 200, 150
    totals.crossing_calls, totals.crossed_rows, totals.crossing_ns = 4, 40, 8e6
    totals.crossed_bytes = 2**21
    of_hosts = compute_metrics(totals, ["crossed_rows", "crossed_mib", "crossing_ms"])
    assert of_hosts == {
        "flashmoe/crossed_rows": 10.0,
        "flashmoe/crossed_mib": 0.5,
        "flashmoe/crossing_ms": 2.0,
    }
    totals.link_bytes |= {"peer": 3e9, "host": 1e9}
    totals.link_timed_bytes |= {"peer": 6e9, "host": 1e9, "nccl": 2e9}
    totals.link_seconds |= {"peer": 0.02, "host": 0.02, "nccl": 0.01}
    of_links = compute_metrics(totals, ["link_mib", "link_share", "link_gbps"])
    assert of_links == pytest.approx(
        {
            "flashmoe/link/peer/mib": 3e9 / 2**20,
            "flashmoe/link/peer/share": 0.75,
            "flashmoe/link/peer/gbps": 300.0,
            "flashmoe/link/host/mib": 1e9 / 2**20,
            "flashmoe/link/host/share": 0.25,
            "flashmoe/link/host/gbps": 50.0,
            "flashmoe/link/nccl/gbps": 200.0,  # its transfers were in an earlier report
        }
    )
    chosen = ["heap_mib", "dropped_routes", "repeats"]
    values = compute_metrics(totals, chosen)
    assert values == {"flashmoe/heap_mib": 3.0, "flashmoe/dropped_routes": 0.25}
    totals.watched = 5.0
    told = Totals.from_vectors(totals.layout, totals.sums(), totals.maxima())
    assert compute_metrics(told, chosen)["flashmoe/repeats"] == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer": 4}, "a record of layer 4: this rank has layers 3"),
        ({"expert_rows": (1, 2)}, "has 2 experts, wanted 4"),
        ({"rows_pulled": (1, 2, 3)}, "has 3 peers, wanted 2"),
        ({"results_pushed": ()}, "has 0 peers, wanted 2"),
    ],
)
def test_a_record_of_another_layer_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        totals_of(records.record(**changes))


@pytest.mark.parametrize(("layer", "owner"), [(0, 0), (3, 5), (MOST_LAYERS - 1, MOST_OWNERS - 1)])
@pytest.mark.parametrize("is_training", [True, False])
def test_the_kernel_s_record_tells_evaluation_and_owner(
    layer: int, owner: int, is_training: bool
) -> None:
    number = launch_number(layer, is_training=is_training, owner=owner)
    native = bindings.FlashMoERecord(layer=number, num_ctas=1)
    told = launch_record(native, bindings.FlashMoERecord(), 1)
    assert (told.layer, told.is_evaluation, told.owner) == (layer, not is_training, owner)


def test_registry_is_complete() -> None:
    """Every metric can be reported, and nothing is reported that is not registered."""
    told = {"routes": (1, 2), "replicas": ReplicaRecord(rows=((4, 1),), num_bytes=1)}
    launches = [records.record(direction=direction, **told) for direction in DIRECTIONS]
    totals = added_up(*(totals_of(*launches, rank=rank, num_hosts=2) for rank in (0, 1)))
    totals.heap_bytes = totals.routes_chosen = totals.seconds = totals.tokens[3] = 1
    totals.crossing_calls = totals.link_bytes["host"] = totals.link_seconds["host"] = 1
    totals.watched = 1
    for name in ALL - {"overlap_efficiency"}:
        assert compute_metrics(totals, [name]), name
        assert METRICS[name].unit
        assert METRICS[name].definition
        assert METRICS[name].source


def test_choices() -> None:
    default = choose_metrics("default")
    assert "layer_ms" in default
    assert "mib_between" not in default
    assert choose_metrics("all") == ALL
    assert choose_metrics("none") == frozenset()
    assert choose_metrics("default, mib_between") == default | {"mib_between"}
    assert choose_metrics("layer_ms") == {"layer_ms"}


@pytest.mark.parametrize("choice", ["layer_time", "", "default,none", "Layer_ms", "layer_ms,"])
def test_unknown_metrics_are_refused(choice: str) -> None:
    with pytest.raises(ConfigError, match="unknown metric"):
        choose_metrics(choice)


def test_the_nearest_metric_is_named() -> None:
    with pytest.raises(ConfigError, match="the nearest is 'overlap_efficiency'"):
        choose_metrics("overlap_efficency")
    with pytest.raises(ConfigError, match="the nearest is 'heap_mib'"):
        compute_metrics(totals_of(), ["heap_mb"])
    with pytest.raises(ConfigError, match="unknown metric 'gpu': wanted some of "):
        choose_metrics("gpu")
    for former, name in FORMER.items():
        with pytest.raises(ConfigError, match=f"'{former}', which is called '{name}' now: wanted"):
            choose_metrics(former)
        assert choose_metrics(name) == {name}
    assert key_of("mib_between", source=0, target=3) == "flashmoe/mib/rank_0_to_3"


counts = st.integers(0, 10**6)
times = st.floats(0, 1e9)
launches = st.builds(
    records.record,
    direction=st.sampled_from(DIRECTIONS),
    end_ns=st.integers(5_000, 10**12),
    num_ctas=st.integers(1, 132),
    num_tokens=counts,
    num_rows=counts,
    num_row_blocks=counts,
    expert_rows=st.tuples(counts, counts, counts, counts),
    rows_pulled=st.tuples(counts, counts),
    results_pushed=st.tuples(counts, counts),
    phase_ns=st.dictionaries(st.sampled_from(Phase), times),
)


@given(st.lists(launches, max_size=4), st.lists(launches, max_size=4))
def test_totals_of_ranks_add_up(first: list[LaunchRecord], second: list[LaunchRecord]) -> None:
    """Adding vectors is adding launches, and the vectors' length depends on the layout alone."""
    ranks = [totals_of(*first, rank=0), totals_of(*second, rank=1)]
    both = added_up(*ranks)
    for vector in (Totals.sums, Totals.maxima):
        assert len(vector(both)) == len(vector(ranks[0])) == len(vector(totals_of()))
    assert both.rank_launches == {3: [len(first), len(second)]}
    for slot, whole in both.launches.items():
        parts = LaunchTotals.sum(rank.launches[slot] for rank in ranks)
        assert whole.values() == pytest.approx(parts.values())
    assert sum(both.expert_rows[3]) == pytest.approx(
        sum(sum(launch.expert_rows) for launch in [*first, *second])
    )


@given(st.lists(launches, max_size=6), st.lists(launches, max_size=6))
def test_shares_are_shares(first: list[LaunchRecord], second: list[LaunchRecord]) -> None:
    values = compute_metrics(added_up(totals_of(*first), totals_of(*second, rank=1)), ALL)
    for key, value in values.items():
        assert value >= 0, key
        if key.endswith("hidden_communication"):
            assert value <= 1
        if "imbalance" in key:
            assert value >= 1 - 1e-9


def test_rows_of_hosts_are_told_and_those_without_a_name_are_no_expert_s() -> None:
    """Rank 0 computes another host's expert, of which the record does not say which one."""
    guest = records.record(replicas=ReplicaRecord(rows=((UNNAMED, 100),), num_bytes=0))
    other = totals_of(records.RECORD, rank=1, num_hosts=2)
    alike, helped = (
        compute_metrics(added_up(totals_of(first, num_hosts=2), other), ALL)
        for first in (records.RECORD, guest)
    )
    rows = sum(records.RECORD.expert_rows)
    assert alike["flashmoe/host_imbalance"] == pytest.approx(1)
    assert "flashmoe/expert_rows/max" in alike
    assert helped["flashmoe/host_imbalance"] == pytest.approx((rows + 100) / (rows + 50))
    assert helped["flashmoe/layer_3/host_rows/0"] == rows + 100
    assert helped["flashmoe/layer_3/host_rows/1"] == rows
    assert helped["flashmoe/rank_imbalance"] == helped["flashmoe/host_imbalance"]
    assert not any("expert" in key or "before" in key for key in helped)


def test_the_page_lists_every_metric() -> None:
    text = Path(__file__).parents[2].joinpath("flashmoe_megatron/telemetry/README.md").read_text()
    table = text.partition("<!-- metrics: begin -->")[2].partition("<!-- metrics: end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in table.strip().splitlines()[2:]
    ]
    listed = {row[0].strip("`*"): tuple(row[:4]) for row in rows}
    assert listed == {
        metric.name: (
            f"`{metric.name}`" + "*" * metric.is_detail,
            f"`{metric.key}`",
            metric.unit,
            metric.better.replace("neither", ""),
        )
        for metric in METRICS.values()
    }
