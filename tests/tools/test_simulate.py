"""The model's invariants, against counting by hand, and its comparison with measured times."""

import itertools
import json
import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_megatron.bench.shapes import SHAPES, Shape
from tools.simulate import __main__ as command
from tools.simulate import figures as figures_file
from tools.simulate import predict
from tools.simulate.figures import FigureError, Figures, Fitted
from tools.simulate.fit import Comparison, compare, fit, table
from tools.simulate.measured import FITTED_SHAPES, Measurement, PointError, read_points
from tools.simulate.model import (
    BLOCK_M,
    BLOCK_N,
    FINISHERS_STAGES,
    Unit,
    group_and_lag,
    products_of,
    simulate,
    tickets,
    units_of,
    with_run,
)
from tools.simulate.predict import weak_scaling
from tools.simulate.routing import busiest_rank, hit_probability, maximal_incast_volume

PAPER = SHAPES["paper-8k"]
FIGURES, KEPT = figures_file.load()
FITTED = Fitted(forward_us=100.0, backward_us=30.0, forward_slowing=0.1, backward_slowing=0.2)
IDEAL = Fitted(
    product_efficiency=1.0,
    tile_us=0.0,
    derivative_us=0.0,
    wgrad_efficiency=1.0,
    wgrad_tile_us=0.0,
    link_efficiency=1.0,
    forward_us=0.0,
    backward_us=0.0,
    forward_slowing=0.0,
    backward_slowing=0.0,
)
ENDLESS = 1e12


def forward_us(shape: Shape = PAPER, gpus: int = 4, fitted: Fitted = FITTED, **changes) -> float:
    return simulate(shape, gpus, replace(FIGURES, **changes), fitted).total


# What the kernel does, after csrc/flashmoe/protocol/order.h, ticket by ticket.


def kernels_order(
    units: list[Unit], num_n: tuple[int, int], group_units: int, lag: int
) -> list[tuple[int, int, int]]:
    """(product, unit, n) of every ticket that is not empty."""

    def units_before(group: int) -> int:
        return min(max(group, 0) * group_units, len(units))

    def before(step: int) -> int:
        return units_before(step) * num_n[0] + units_before(step - lag) * num_n[1]

    def in_group(gemm: int, group: int, index: int) -> tuple[int, int, int] | None:
        count = units_before(group + 1) - units_before(group)
        n, unit = index // count, group * group_units + index % count
        return None if units[unit].blocks == 1 and n % 2 else (gemm, unit, n)

    def pair(ticket: int) -> tuple[int, int, int] | None:
        step = next(s for s in itertools.count() if before(s + 1) > ticket)
        ticket -= before(step)
        gemm0 = (units_before(step + 1) - units_before(step)) * num_n[0]
        if ticket < gemm0:
            return in_group(0, step, ticket)
        return in_group(1, step - lag, ticket - gemm0)

    found = (pair(ticket) for ticket in range(len(units) * sum(num_n)))
    return [ticket for ticket in found if ticket is not None]


@given(
    blocks=st.lists(st.integers(1, 2), min_size=1, max_size=40),
    num_n=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    group=st.integers(8, 16),
    lag=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_tickets_are_the_kernels(blocks: list[int], num_n: tuple[int, int], group: int, lag: int):
    units = [Unit(expert, count, 128 * count) for expert, count in enumerate(blocks)]
    ours = list(tickets(units, num_n, group, lag))
    assert [(gemm, unit) for gemm, unit, _, _ in ours] == [
        (gemm, unit) for gemm, unit, _ in kernels_order(units, num_n, group, lag)
    ]
    for gemm in (0, 1):
        for unit, count in enumerate(blocks):
            columns = [c for g, u, c, _ in ours if (g, u) == (gemm, unit)]
            # Two blocks: a ticket per tile along N. One block: two tiles along N per ticket.
            assert sum(columns) == num_n[gemm]
            assert len(columns) == (num_n[gemm] if count == 2 else math.ceil(num_n[gemm] / 2))


def test_the_lag_is_the_kernels():
    """Where a step's GEMM1 is short, two of them are between; after csrc/host/launch.cu."""

    def lag(name: str, *, backward: bool) -> int:
        return group_and_lag(products_of(SHAPES[name], backward=backward), 64)[1]

    assert [lag("paper-8k", backward=b) for b in (False, True)] == [2, 2]
    assert [lag("qwen3-30b", backward=b) for b in (False, True)] == [2, 1]
    assert [lag("mixtral-8x7b", backward=b) for b in (False, True)] == [1, 1]
    source = (command.ROOT / "csrc" / "host" / "launch.cu").read_text()
    assert f"kFinishersStages = {FINISHERS_STAGES};" in source


def test_units_hold_every_row_once():
    load = busiest_rank(SHAPES["qwen3-30b"], 4, 8)
    units = units_of(load)
    for expert, rows in enumerate(load.expert_rows):
        mine = [unit for unit in units if unit.expert == expert]
        assert sum(unit.rows for unit in mine) == rows
        assert sum(unit.blocks for unit in mine) == math.ceil(rows / BLOCK_M)
        assert all(unit.blocks == 2 for unit in mine[:-1])


def test_products_of_a_gated_layer():
    shape = SHAPES["mixtral-8x7b"]
    forward, backward = (products_of(shape, backward=b) for b in (False, True))
    assert forward.num_n == (2 * 14336 // BLOCK_N, 4096 // BLOCK_N)
    assert forward.num_k == (4096 // 64, 14336 // 64)
    assert backward.num_n == (14336 // BLOCK_N, 4096 // BLOCK_N)
    assert backward.num_k == (4096 // 64, 2 * 14336 // 64)


@pytest.mark.parametrize(("experts", "local", "topk"), [(6, 2, 2), (8, 1, 3), (5, 4, 2), (4, 4, 1)])
def test_hit_probability_by_enumeration(experts: int, local: int, topk: int):
    choices = list(itertools.combinations(range(experts), topk))
    hits = sum(any(expert < local for expert in choice) for choice in choices)
    assert hit_probability(experts, local, topk) == pytest.approx(hits / len(choices))


def test_incast_volume_by_hand():
    # The paper's last experiment: 16 experts on 16 GPUs, 4 to a node, so that 12 peers are remote;
    # 2048 tokens of 1024 float32. 2048 / 16 = 128 tokens, 4 KiB each, 12 peers, 2 rounds.
    found = maximal_incast_volume(2048, 16, 1, 1024, 12, element_bytes=4)
    assert found == 128 * 4096 * 12 * 2 == 12_582_912
    # Twice the tokens, twice the volume; no remote peers, none.
    assert maximal_incast_volume(4096, 16, 1, 1024, 12, element_bytes=4) == 2 * found
    assert maximal_incast_volume(4096, 16, 1, 1024, 0) == 0


def test_incast_volume_of_predictions_nears_two_rounds_of_all_tokens():
    predictions = weak_scaling(PAPER, 8, 50.0, FIGURES, FITTED, counts=(8, 64, 4096))
    few, some, many = (p.incast_bytes for p in predictions)
    assert few == 0
    # 64 GPUs with an expert each: 8192 / 64 tokens of 4 KiB from 56 peers, twice.
    assert some == 128 * 4096 * 56 * 2
    every_token = 8192 * 2048 * 2 * 2
    assert many == pytest.approx(every_token * (4096 - 8) / 4096)


@pytest.mark.parametrize("backward", [False, True])
def test_more_tokens_take_longer(backward: bool):
    times = [
        simulate(replace(PAPER, tokens=tokens), 4, FIGURES, FITTED, backward=backward).total
        for tokens in (512, 1024, 2048, 4096, 8192, 16384, 32768)
    ]
    assert times == sorted(times)
    assert times[-1] > 1.9 * times[-2] - FITTED.forward_us


def test_slower_links_take_longer():
    rates = (400.0, 200.0, 100.0, 50.0, 25.0)
    times = [forward_us(nvlink_gbps=rate) for rate in rates]
    assert times == sorted(times)
    network = [forward_us(gpus=16, nic_gbps=rate) for rate in rates]
    assert network == sorted(network)


def test_a_larger_domain_takes_no_longer():
    for count in (16, 64, 128):
        small, large = (
            weak_scaling(PAPER, domain, 50.0, FIGURES, FITTED, counts=(count,))[0].times.total
            for domain in (8, 72)
        )
        assert large <= small


def test_a_network_like_nvlink_is_a_larger_domain():
    one_domain = forward_us(gpus=16, domain=16)
    fast = replace(FITTED, link_efficiency=1.0)
    as_network = forward_us(
        gpus=16,
        fitted=fast,
        domain=1,
        nic_gbps=FIGURES.nvlink_gbps,
        nic_latency_us=FIGURES.nvlink_latency_us,
    )
    assert as_network == pytest.approx(forward_us(gpus=16, fitted=fast, domain=16))
    assert as_network <= one_domain


def test_without_costs_the_products_remain():
    shape = replace(PAPER, tokens=65536, num_experts=8)
    times = simulate(
        shape,
        4,
        replace(FIGURES, nvlink_gbps=ENDLESS, hbm_gbps=ENDLESS, nvlink_latency_us=0.0),
        IDEAL,
    )
    on_all_sms = shape.flops / (FIGURES.cublas_tflops * 1e6)
    floor = on_all_sms * FIGURES.num_sms / FIGURES.num_ctas
    assert floor < times.total < 1.03 * floor  # the rest: the busiest rank, and its last wave
    assert times.links < 1e-3


def test_slow_links_are_the_time():
    slow = replace(FIGURES, nvlink_gbps=1.0, nvlink_latency_us=0.0)
    times = simulate(PAPER, 4, slow, IDEAL)
    load = busiest_rank(PAPER, 4, 8)
    both_ways = 2 * load.domain_rows * PAPER.hidden * 2 / 1e3
    assert times.links == pytest.approx(both_ways)
    assert both_ways < times.total < 1.02 * both_ways


@given(
    tokens=st.sampled_from([256, 1024, 8192]),
    experts=st.sampled_from([8, 64]),
    gpus=st.sampled_from([1, 2, 4, 8]),
    gated=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_nothing_is_faster_than_its_parts(tokens: int, experts: int, gpus: int, gated: bool):
    shape = Shape(tokens, 1024, 512, experts, 2, gated=gated)
    for backward in (False, True):
        times = simulate(shape, gpus, FIGURES, FITTED, backward=backward)
        assert times.total >= times.products
        assert times.total >= times.links
    assert simulate(shape, 1, FIGURES, FITTED).links == 0


def test_one_rank_receives_every_row():
    load = busiest_rank(PAPER, 1, 8)
    assert load.expert_rows.sum() == PAPER.tokens * PAPER.topk
    assert load.domain_rows == load.network_rows == 0
    assert load.imbalance == 1.0


def test_the_busiest_rank_is_a_bit_above_the_mean():
    load = busiest_rank(replace(PAPER, num_experts=1024), 1024, 8)
    # The largest of 1024 binomials of mean 16384: about 3.2 standard deviations of 128.
    assert 1.015 < load.imbalance < 1.04
    assert load.network_rows / load.domain_rows == pytest.approx((1024 - 8) / 7)


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ValueError, match="6 experts on 4 GPUs"):
        simulate(replace(PAPER, num_experts=6), 4, FIGURES, FITTED)
    with pytest.raises(ValueError, match="NIC rate"):
        simulate(PAPER, 16, FIGURES, FITTED)


def test_nothing_fitted_is_an_error(tmp_path: Path, monkeypatch, capsys):
    figures = tmp_path / "figures.json"
    data = json.loads(figures_file.FILE.read_text())
    figures.write_text(json.dumps({**data, "fitted": {}}))
    kept = figures_file.load(figures)
    monkeypatch.setattr(command.figures_file, "load", lambda: kept)
    for arguments in (["compare"], ["predict", "--out", str(tmp_path)]):
        assert command.main(arguments) == 2
        assert "nothing is fitted" in capsys.readouterr().err


def test_long_launches_come_to_the_power_limit():
    free = replace(FIGURES, nvlink_gbps=ENDLESS, hbm_gbps=ENDLESS, nvlink_latency_us=0.0)
    slowing = replace(IDEAL, forward_slowing=0.2)

    def lost(tokens: int) -> float:
        shape = replace(SHAPES["mixtral-8x7b"], tokens=tokens)
        without, slowed = (simulate(shape, 4, free, f).total for f in (IDEAL, slowing))
        return 1.0 - without / slowed

    # One millisecond of 7.7 ms of products is lost; an eighth of them loses half of that.
    assert lost(8192) == pytest.approx(0.2 * 7.8 / 8.8, abs=0.005)
    assert lost(1024) == pytest.approx(0.2 * 1.0 / 2.0, abs=0.01)
    assert lost(65536) == pytest.approx(0.2, abs=0.005)


# Measured times.


def points_of(truth: Fitted, figures: Figures = FIGURES) -> list[Measurement]:
    """Times that the model itself gives, on shapes of both kinds and 1, 2 and 4 GPUs."""
    found = []
    names = ("paper-1k", "paper-4k", "paper-16k-e64", "qwen3-30b", "paper-16k-e8")
    for name, gpus, backward in itertools.product(names, (1, 2, 4), (False, True)):
        times = simulate(SHAPES[name], gpus, figures, truth, backward=backward)
        found.append(
            Measurement("run", name, SHAPES[name], gpus, backward, times.total / 1e3, None, None)
        )
    return found


@pytest.mark.timeout(200)
def test_a_fit_finds_what_made_the_times():
    truth = replace(
        FITTED,
        product_efficiency=0.82,
        tile_us=5.0,
        derivative_us=3.0,
        wgrad_efficiency=0.7,
        wgrad_tile_us=6.0,
        forward_us=60.0,
        backward_us=20.0,
        forward_slowing=0.15,
        backward_slowing=0.1,
    )
    points = points_of(truth)
    found = fit(points, FIGURES)
    for comparison in compare(points, FIGURES, found):
        assert abs(comparison.error) < 0.03
    assert found.product_efficiency == pytest.approx(0.82, rel=0.05)
    assert found.forward_us == pytest.approx(60.0, rel=0.1)
    assert all("paper-4k" not in seen and "paper-16k-e8" not in seen for seen in found.fitted_to)
    assert len(found.fitted_to) == 18


def test_the_table_tells_fitted_from_held_out():
    fitted = Measurement("r", "paper-1k", SHAPES["paper-1k"], 2, False, 1.0, None, None)
    held_out = Measurement("r", "paper-4k", SHAPES["paper-4k"], 4, True, 2.0, None, None)
    lines = table([Comparison(held_out, 2.3), Comparison(fitted, 0.95)], tolerance=0.1)
    assert lines[2] == "| r | paper-1k forward | 2 | 1.000 | 0.950 | -5.0% | fitted |"
    assert lines[3] == "| r | paper-4k backward | 4 | 2.000 | 2.300 | +15.0% | held out |"
    assert lines[-2] == "fitted: 1 of 1 within 10%, mean 5.0%, largest 5.0%"
    assert lines[-1] == "held out: 0 of 1 within 10%, mean 15.0%, largest 15.0%"


def test_a_run_is_judged_by_its_own_ceilings():
    slower = with_run(FIGURES, FIGURES.cublas_tflops / 2, None)
    assert slower.nvlink_gbps == FIGURES.nvlink_gbps
    assert simulate(PAPER, 4, slower, FITTED).total > 1.5 * forward_us()


def test_what_is_kept_reproduces_what_was_measured(capsys):
    """The claim of the README, on the records of this repository."""
    assert command.main(["compare", "--tolerance", "0.10"]) == 0
    assert "held out" in capsys.readouterr().out
    points = command.points_of([command.ROOT / file for file in KEPT.files])
    held_out = [c for c in compare(points, FIGURES, KEPT) if not c.point.is_fitted]
    assert {c.point.num_gpus for c in held_out} == {1, 2, 4}
    errors = np.array([abs(c.error) for c in held_out])
    assert len(errors) >= 40
    assert np.max(errors) <= 0.10
    assert np.mean(errors) <= 0.05


@pytest.mark.parametrize("shapes", [SHAPES, FITTED_SHAPES])
def test_compare_fails_where_the_model_is_wrong(tmp_path: Path, capsys, shapes: Collection[str]):
    source = command.ROOT / next(file for file in KEPT.files if "layer" in file)
    file = tmp_path / "doubled.jsonl"
    with file.open("w") as out:
        for line in source.read_text().splitlines():
            row = json.loads(line)
            if "min_ms" in row:
                row["min_ms"] *= 2
            if row["shape"] in shapes:
                out.write(json.dumps(row) + "\n")
    assert command.main(["compare", str(file)]) == 1
    judged = "fitted" if shapes is FITTED_SHAPES else "held out"
    assert f"{judged}: 0 of" in capsys.readouterr().out


def test_points_of_a_sweep(tmp_path: Path):
    point = {
        "num_gpus": 2,
        "tokens": 4096,
        "num_experts": 64,
        "hidden": 2048,
        "intermediate": 2048,
        "topk": 2,
    }
    times = {"fused": {"forward": {"median_ms": 0.9, "min_ms": 0.8}}}
    kernels = {
        "forward": {"median_ms": 0.75, "min_ms": 0.7},
        "backward": {"median_ms": 2.5, "min_ms": 2.0},
    }
    result = {"times": times, "kernels": kernels, "cublas_tflops": 700.0, "link_gbps": 370.0}
    rows = [
        {"key": "a", "status": "ok", "point": point, "result": result},
        {"key": "b", "status": "failed", "point": point, "reason": "out of memory"},
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    forward, backward = read_points(file)
    assert forward.shape == SHAPES["paper-4k"]
    assert (forward.num_gpus, forward.kernel_ms, forward.backward) == (2, 0.7, False)
    assert (backward.kernel_ms, backward.backward, backward.cublas_tflops) == (2.0, True, 700.0)
    assert not forward.is_fitted
    point["tokens"] = 1024
    file.write_text(json.dumps({**rows[0], "point": point}) + "\n")
    assert all(measured.is_fitted for measured in read_points(file))


def test_points_of_a_bench_are_what_launches_record():
    """Neither gates, baselines, nor times that have the host's calls in them."""
    file = command.ROOT / "tools/bench/results/2026-11-22-layer-4x-own-rows.jsonl"
    taken = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["measurement"] for row in taken} > {"forward from a graph", "backward kernel"}
    found = {(point.name, point.backward): point.kernel_ms for point in read_points(file)}
    assert len(found) == len(read_points(file)) == 2 * len({row["shape"] for row in taken})
    for row in taken:
        if row["implementation"] == "fused" and row["measurement"] == "backward kernel":
            assert found[row["shape"], True] == row["min_ms"]


@pytest.mark.parametrize("apart", [{"zipf": 0.5}, {"locality": 0.5}, {"spare_slots": 2}])
def test_points_that_the_model_does_not_know_are_left_out(tmp_path: Path, apart: dict[str, Any]):
    taken = command.ROOT / "tools/bench/results/2026-11-22-layer-4x-own-rows.jsonl"
    rows = [json.loads(line) for line in taken.read_text().splitlines()]
    file = tmp_path / "results.jsonl"
    same = {"zipf": 0.0, "locality": None, "spare_slots": 0}
    for change, found in ((same, len(read_points(taken))), (apart, 0)):
        file.write_text("".join(json.dumps({**row, **change}) + "\n" for row in rows))
        if found:
            assert len(read_points(file)) == found
        else:
            with pytest.raises(PointError):
                read_points(file)


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"status": "ok"}\n'])
def test_files_without_times_are_refused(tmp_path: Path, text: str, capsys):
    file = tmp_path / "results.jsonl"
    file.write_text(text)
    with pytest.raises(PointError, match=r"results\.jsonl"):
        read_points(file)
    assert command.main(["compare", str(file)]) == 2
    assert "results.jsonl" in capsys.readouterr().err


def test_a_fit_does_not_name_files_that_others_lack(tmp_path: Path, capsys):
    before = figures_file.FILE.read_bytes()
    file = tmp_path / "results.jsonl"
    file.write_text((command.ROOT / KEPT.files[0]).read_text())
    assert command.main(["fit", str(file)]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert figures_file.FILE.read_bytes() == before


def test_figures_are_kept_and_read_back(tmp_path: Path):
    file = tmp_path / "figures.json"
    file.write_text(figures_file.FILE.read_text())
    wanted = replace(FITTED, files=("a.jsonl",), fitted_to=("a: x",), product_efficiency=0.75)
    figures_file.store(wanted, file)
    assert figures_file.load(file) == (FIGURES, wanted)
    data = json.loads(file.read_text())
    for group in ("links", "tiles"):
        for name, figure in data[group].items():
            assert figure["source"], name
            assert figure["unit"], name
    del data["links"]["nvlink_gbps"]
    file.write_text(json.dumps(data))
    with pytest.raises(FigureError, match="nvlink_gbps"):
        figures_file.load(file)


@pytest.mark.parametrize("domain", ["0", "-8", "2.5"])
def test_domains_have_to_be_positive(tmp_path: Path, domain: str, capsys):
    with pytest.raises(SystemExit):
        command.main(["predict", "--out", str(tmp_path), "--domains", domain])
    assert "--domains" in capsys.readouterr().err


def test_all_domains_and_runs_are_drawn(tmp_path: Path, monkeypatch):
    domains, runs = range(2, 8), [f"run{number}" for number in range(7)]
    predictions = weak_scaling(PAPER, 8, 50.0, FIGURES, FITTED, counts=(1, 2, 16))
    measured = [
        Measurement(run, "paper-8k", PAPER, 2, False, 1.0, cublas_tflops=None, link_gbps=None)
        for run in runs
    ]
    figures = []
    monkeypatch.setattr(predict, "save", lambda figure, path: figures.append(figure))
    predict.draw_predictions(
        dict.fromkeys(domains, predictions), measured, PAPER, 50.0, tmp_path, backward=False
    )
    _, labels = figures[0].axes[0].get_legend_handles_labels()
    assert labels == [
        *(f"simulated, domains of {domain}" for domain in domains),
        *(f"measured, run {number}" for number in range(1, len(runs) + 1)),
    ]


def test_predictions_of_a_layer_of_your_own(tmp_path: Path, capsys):
    arguments = ["predict", "--out", str(tmp_path), "--shape", "1024x2048x768x60x4"]
    times = []
    for gated in ([], ["--gated"]):
        assert command.main([*arguments, *gated]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        rows = [line.strip("| ").split(" | ") for line in lines[2:]]
        # 60 experts, or as many as the GPUs can share.
        experts = {int(row[0]): int(row[2]) for row in rows}
        assert (experts[1], experts[4], experts[8], experts[4096]) == (60, 60, 64, 4096)
        times.append(float(rows[0][3]))
    assert times[1] > 1.1 * times[0]
    assert command.main([*arguments[:-1], "1024x2048x768x60"]) == 2
    assert "shape 1024x2048x768x60: wanted TOKENSx" in capsys.readouterr().err


def test_predictions_as_table_and_figures(tmp_path: Path, capsys):
    arguments = ["predict", "--out", str(tmp_path), "--domains", "8", "72", "--nic-gbps", "50"]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    assert rows[0][:3] == ["GPUs", "NVLink domain", "experts"]
    assert {(int(row[0]), int(row[1])) for row in rows[2:]} == {
        (2**power, domain) for power in range(13) for domain in (8, 72)
    }
    for name in ("weak_scaling_paper-8k.png", "weak_scaling_paper-8k.svg"):
        assert (tmp_path / name).stat().st_size > 1000
