"""Lines through timings, their file, and degrees that come from it."""

import functools
import itertools
import json
import math
import random
import runpy
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.config import ALIGNMENT_BYTES, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.measured import __main__ as command
from flashmoe_megatron.measured.clock import CALLS, Clock
from flashmoe_megatron.measured.fit import (
    GATHER,
    HOST,
    SHARED,
    TOGETHER,
    Beside,
    Fit,
    Machine,
    beside_gather,
    fit_line,
    machine_of,
    read_fit,
    write_fit,
)
from flashmoe_megatron.measured.machine import PARTS, Sizes, _groups, _hosts, even_ratios, measure
from flashmoe_megatron.measured.start import RandomLayer
from flashmoe_megatron.measured.trace import trace
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.degree import Stream, best_degree, passes_of, time_of
from flashmoe_megatron.separate.exchange import Kind
from flashmoe_megatron.separate.steps import PLAIN
from tests.distributed import RankPool
from tests.fits import make_fit
from tests.unit import cases
from tests.unit.test_schedule import simulate

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_two_per_cent_leaves_alpha_and_beta(seed: int) -> None:
    """A time is the median of as many turns as are measured, each with its own noise."""
    rng = random.Random(seed)
    sizes = [float(size) for size in even_ratios(2**26, Sizes.points)]
    beta = 10 ** rng.uniform(-11, -9)
    alpha = rng.uniform(1, 8) * beta * sizes[0]
    times = [
        statistics.median((alpha + beta * size) * rng.gauss(1, 0.02) for _ in range(Sizes.turns))
        for size in sizes
    ]
    line = fit_line(sizes, times)
    assert line.alpha_s == pytest.approx(alpha, rel=0.05)
    assert line.beta_s == pytest.approx(beta, rel=0.05)
    assert line.r_squared > 0.999
    late = [time * (3 if i in (2, 5) else 1) for i, time in enumerate(times)]
    line = fit_line(sizes, late)
    assert line.alpha_s == pytest.approx(alpha, rel=0.1), "late times bend the line"
    assert line.beta_s == pytest.approx(beta, rel=0.1)
    assert line.r_squared < 0.95, "and are told"


def test_times_that_bend_are_not_taken_for_late() -> None:
    """NCCL's reduce-scatter between four H100s, whose rate rises with its size."""
    mib = [8.0, 13.125, 21.53, 35.33, 57.97, 95.10, 156.03, 256.0]
    us = [39.78, 53.07, 75.10, 115.10, 173.46, 268.16, 424.51, 663.39]
    line = fit_line([one * 2**20 for one in mib], [one * 1e-6 for one in us])
    assert line.r_squared > 0.999


def test_a_line_that_tells_nothing_has_no_share_of_the_variance() -> None:
    """It is the mean, beside which the share is told."""
    assert fit_line([1, 2, 4], [3, 2.5, 2]).r_squared <= 0


def test_sizes_are_at_even_ratios_from_a_part_to_the_most() -> None:
    assert even_ratios(3200, 6) == [100, 200, 400, 800, 1600, 3200]
    assert even_ratios(64, 4, 8) == [8, 16, 32, 64]
    assert even_ratios(2, 8) == [1, 2]


def test_calls_are_timed_in_turns() -> None:
    called: list[str] = []
    calls = [functools.partial(called.append, name) for name in "ab"]
    taken = Clock(None, CPU, turns=3).seconds(calls)
    assert len(taken) == 2
    assert all(time > 0 for time in taken)
    assert called == ["a", "b", *(["a"] * CALLS + ["b"] * CALLS) * 3]


def test_no_line_has_negative_terms() -> None:
    assert fit_line([1, 2, 4], [1, 3, 7]).alpha_s == 0
    falling = fit_line([1, 2, 4], [3, 2.5, 2])
    assert falling.beta_s == 0
    assert falling.alpha_s > 0
    for sizes, times in (([1, 1], [1, 2]), ([1, 2], [0, 1]), ([1, 2, 3], [1, 2])):
        with pytest.raises(ValueError, match="wanted two sizes"):
            fit_line(sizes, times)


def test_a_file_is_read_again_and_another_machine_is_refused_by_name(tmp_path: Path) -> None:
    path, fit = tmp_path / "fit.json", make_fit(2, 2)
    write_fit(path, fit)
    assert read_fit(path, fit.machine, torch.float32) == read_fit(path, None) == fit
    other = Machine("NVIDIA A100", 2, 2)
    with pytest.raises(
        ConfigError, match="is of 2 x 2 ranks on a processor .* is 2 x 2 ranks on NV"
    ):
        read_fit(path, other)
    with pytest.raises(ConfigError, match="is of 2 x 2 ranks .* but this group is 1 x 4"):
        read_fit(path, replace(fit.machine, hosts=1, ranks_per_host=4))
    with pytest.raises(ConfigError, match="of float32, but tokens are torch.bfloat16: .* bfloat16"):
        read_fit(path, fit.machine, torch.bfloat16)
    content = json.loads(path.read_text())
    for change, words in (
        ({"version": 1}, "format 'flashmoe-schedule-fit' and version 2; measure again with python"),
        ({"beside": {}}, "a product and all_to_all take None, wanted two factors of at least 1"),
        (
            {"beside": {**content["beside"], "all_to_all_rail": {"product": 0.9, "exchange": 1}}},
            "a product and all_to_all_rail take Beside",
        ),
        ({"lines": {}}, "product is None, wanted an alpha"),
        ({"machine": {"device": "x"}}, "it is not complete: TypeError"),
        ({"dtype": "int8"}, "it is not complete: KeyError"),
        *(
            ({"lines": {**content["lines"], "copy": {**terms, "r_squared": 1}}}, "copy is Line")
            for number in (-1, "1", True, math.nan, math.inf)
            for terms in ({"alpha_s": number, "beta_s": 0}, {"alpha_s": 0, "beta_s": number})
        ),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(ConfigError, match=words):
            read_fit(path, fit.machine)
    for text in ("", "[]", "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="python -m flashmoe_megatron.schedule fit"):
            read_fit(path, fit.machine)


def test_a_machine_has_the_lines_of_what_its_ranks_do() -> None:
    assert machine_of(HostGrid(2, 4, 0), CPU).hosts == 2
    levels = ("all_to_all_within", "all_to_all_rail")
    for hosts, ranks, exchanges in (
        (1, 1, ()),
        (1, 2, ("all_to_all",)),
        (2, 1, ("all_to_all",)),
        (2, 2, ("all_to_all", *levels)),
    ):
        machine = Machine("x", hosts, ranks)
        assert machine.exchanges == exchanges
        together = (*TOGETHER, *HOST) if exchanges else ()
        assert machine.wanted == ("product", "copy", *together, *exchanges[1:])
        assert machine.carriers == exchanges
        sharing = replace(machine, shared=2)
        assert str(sharing) == f"{hosts} x {ranks} ranks, 2 to an expert on x"
        assert set(sharing.wanted) == {*machine.wanted, *HOST, *SHARED}
        assert sharing.carriers == (*exchanges, GATHER, *map(beside_gather, exchanges))


def test_stages_by_hand() -> None:
    """What is multiplied and copied for 128 rows of 192 float32, whose experts have width 64."""
    config = cases.make_config(num_ranks=4, max_tokens=64, hidden=192, intermediate=64)
    size = 128 * 4
    forward, backward = passes_of(config, make_fit(2, 2, copy=(1, 1), product=(0, 0)), "2dh", "all")
    assert (forward.there[0].alpha_s, forward.there[0].whole_s) == (1, size * 192)
    for one, elements, cut in (
        (forward.experts, 2 * 192 + (128 + 64) / 2, 128 + 192),
        (backward.experts, 2 * 192 + (128 + 64), 2 * 128 + 192 + 64),
    ):
        assert (one.alpha_s, one.whole_s, one.cut_s) == (3, size * elements, size * cut)
    assert backward.weights_s == 0
    forward, backward = passes_of(config, make_fit(2, 2, copy=(0, 0), product=(1, 1)), "2dh", "all")
    flops = 2 * 128 * 192 * (128 + 64)
    assert (forward.experts.alpha_s, forward.experts.whole_s) == (2, flops)
    assert backward.weights_s == 2 + flops


@pytest.mark.parametrize(
    ("exchange", "carriers"),
    [("direct", ["between"]), ("2dh", ["between", "within"])],
)
def test_products_and_what_carries_rows_slow_each_other_down(
    exchange: Kind, carriers: list[Stream]
) -> None:
    config = cases.make_config(num_ranks=4, max_tokens=64)
    forward, _ = passes_of(config, make_fit(2, 2, beside=(2, 3)), exchange, "all")
    assert {(one.stream, one.beside, one.factor) for one in forward.slowdowns} == {
        pair for one in carriers for pair in (("compute", one, 2), (one, "compute", 3))
    }


def test_gathers_slow_down_what_is_beside_them() -> None:
    fit = make_fit(1, 2, shared=2)
    names = "all_to_all", GATHER, beside_gather("all_to_all")
    factors = {name: Beside(2 + i, 5 + i) for i, name in enumerate(names)}
    config = cases.make_config(num_ranks=2, max_tokens=64)
    forward, _ = passes_of(config, replace(fit, beside=factors), "direct", "all")
    assert {(one.stream, one.beside, one.factor) for one in forward.slowdowns} == {
        ("compute", "between", 2),
        ("between", "compute", 5),
        ("compute", "within", 3),
        ("within", "compute", 6),
        ("within", "between", 4),
        ("between", "within", 7),
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("speed", [1, 10, 40])
def test_layers_of_ranks_that_share_experts_are_an_independent_schedulers(
    ranks: int, speed: int
) -> None:
    """All-to-alls between, gathers and scatters within, and products of all sharing ranks' rows."""
    config = cases.make_config(num_ranks=ranks, max_tokens=512, hidden=64, intermediate=128)
    lines = {
        "all_to_all": (2e-5, 1e-9 / speed),
        "all_gather_shared": (3e-5, 4e-9 / speed),
        "reduce_scatter_shared": (4e-5, 2e-9 / speed),
        "product": (1e-5, 3e-11),
        "copy": (0, 0),
    }
    rows, num_bytes = 512 * config.topk, 512 * config.topk * 64 * 4
    flops = 2 * 4 * rows * 64 * (config.fc1_rows + 128)

    def part(name: str, size: float, degree: int) -> float:
        alpha, beta = lines[name]
        return alpha + size * beta / degree

    degrees = range(1, 17)
    both = passes_of(config, make_fit(1, ranks, shared=4, **lines), "direct", "all")
    for one, weights in zip(both, (0.0, 2e-5 + flops * 3e-11), strict=True):
        found = {
            degree: simulate(  # type: ignore[call-overload]
                degree,
                part("all_to_all", num_bytes, degree) if ranks > 1 else 0,
                part("all_gather_shared", 4 * num_bytes, degree),
                2e-5 + flops * 3e-11 / degree,
                part("reduce_scatter_shared", 4 * num_bytes, degree),
                0,
                weights,
                (0, 0),
            )
            for degree in degrees
        }
        assert {degree: time_of(one, degree) for degree in degrees} == pytest.approx(found)
        assert best_degree(one, degrees) == min(found, key=lambda degree: (found[degree], degree))


def test_a_layer_is_as_long_as_its_stages() -> None:
    """One part takes what its stages take one after the other, whichever way rows travel."""
    config = cases.make_config(num_ranks=4, max_tokens=64, hidden=64, intermediate=64)
    num_bytes = 64 * config.topk * 64 * 4
    fit = make_fit(2, 2, all_to_all_rail=(2e-6, 3e-9))
    lines = fit.lines
    within, rail = (lines[f"all_to_all_{name}"].time_s(num_bytes) for name in ("within", "rail"))
    ways = {"direct": lines["all_to_all"].time_s(num_bytes), "2dh": within + rail}
    found = {}
    for exchange, way in ways.items():
        forward, backward = passes_of(config, fit, exchange, "all")
        compute = forward.there[0].time_s(1) + forward.experts.time_s(1)
        assert time_of(forward, 1) == pytest.approx(compute + 2 * way), exchange
        found[exchange] = forward
        refetch = passes_of(config, fit, exchange, "preactivations")[1]
        assert refetch.slices_s == pytest.approx(way)
        assert time_of(refetch, 2) > time_of(backward, 2)
    flops = 2 * 64 * config.topk * 64 * (config.fc1_rows + 64)
    products = 2 * 1e-6 + flops * 1e-11
    assert found["direct"].experts.time_s(1) == pytest.approx(products, rel=0.1)
    assert found["2dh"].there[1].stream == "within"


def best_of(config: MoEConfig, fit: Fit) -> tuple[int, int]:
    """The degrees that the model finds best up to 16."""
    forward, backward = passes_of(config, fit, "direct", "all")
    return best_degree(forward, range(1, 17)), best_degree(backward, range(1, 17))


def test_a_slow_host_and_slowed_products_leave_one_part() -> None:
    """Exchanges as long as products want several parts, unless these cost what they hide."""
    config = cases.make_config(num_ranks=2, max_tokens=512, hidden=64)
    free = {"copy": (0, 0), "product": (0, 3e-11), "all_to_all": (1e-6, 1e-9)}
    assert min(best_of(config, make_fit(**free))) > 1
    one = time_of(passes_of(config, make_fit(**free), "direct", "all")[0], 1)
    for part_s, wanted in ((one / 100, False), (one, True)):
        hosts = dict.fromkeys(HOST, (one, part_s))
        assert (best_of(config, make_fit(**free, **hosts)) == (1, 1)) == wanted
    assert best_of(config, make_fit(**free, beside=(2, 2))) == (1, 1), "nothing is hidden"
    assert min(best_of(config, make_fit(**free, beside=(1.2, 1.1)))) > 1, "most is hidden"


def stamps_are_of_every_part(group: dist.ProcessGroup, config: MoEConfig) -> None:
    """On a processor everything happens in the order in which it is issued."""
    backend = ScheduledBackend(config, group, options=BackendOptions(keep="all"), degrees=(3, 2))
    found = trace(backend, group, num_tokens=100, dtype=torch.float32, device=CPU)
    for direction, degree in (("forward", 3), ("backward", 2)):
        spans = sorted(found[direction], key=lambda one: one.begin_us)
        for name in ("dispatch", "experts", "combine"):
            assert [one.part for one in spans if one.name == name] == list(range(degree)), name
        pairs = itertools.pairwise(spans)
        assert all(0 <= one.begin_us <= one.end_us <= other.begin_us for one, other in pairs)
    assert [one.name for one in found["forward"] if one.part < 0] == ["probabilities"]
    assert {one.name for one in found["backward"] if one.part < 0} == {"probabilities", "weights"}
    assert not backend.hooks
    assert all(lane.stamps is None for lane in backend.streams.values())


def streams_over_hosts(group: dist.ProcessGroup) -> None:
    config, grid = cases.make_config(num_ranks=4), HostGrid(2, 2, dist.get_rank(group))
    options = BackendOptions(exchange="2dh")
    backend = ScheduledBackend(config, group, options=options, grid=grid, degrees=(2, 1))
    found = trace(backend, group, num_tokens=64, dtype=torch.float32, device=CPU)
    for spans in found.values():
        assert {one.stream for one in spans} == {"compute", "between", "within"}


def test_a_trace_has_the_streams_of_exchanges_over_hosts(ranks: RankPool) -> None:
    ranks.run(streams_over_hosts, num_ranks=4)


def hosts_in_parts(group: dist.ProcessGroup) -> dict[str, list[tuple[float, float]]]:
    """What is timed of a host, with the experts' products for a clock."""
    made = 0

    def counted(product: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal made
            made += 1
            return product(*args)

        return run

    def seconds(clock: Clock, calls: Any, *, of_host: bool = False) -> list[float]:
        before = [made]
        for call in calls:
            call()
            before.append(made)
        return [after - then for then, after in itertools.pairwise(before)]

    sizes = Sizes(64, 64, 2, rows=64, num_bytes=2**12, points=3, turns=1)
    grid, clock = HostGrid(1, 2, dist.get_rank(group)), Clock(group, CPU, 1)
    with (
        mock.patch.object(Clock, "seconds", seconds),
        mock.patch.object(PLAIN, "product", counted(PLAIN.product)),
        mock.patch.object(PLAIN, "grad_product", counted(PLAIN.grad_product)),
    ):
        return _hosts(clock, group, grid, torch.float32, sizes, "auto")


def test_a_host_is_timed_with_a_layer_in_so_many_parts(ranks: RankPool) -> None:
    """Each part has two products there, and two back."""
    for samples in ranks.run(hosts_in_parts, num_ranks=2):
        wanted = [(parts, 2 * parts) for parts in PARTS]
        assert samples == dict.fromkeys(HOST, wanted)


def slowest(group: dist.ProcessGroup) -> list[float]:
    """What a call takes by clocks of which each rank's goes faster than the last one's."""
    clock = itertools.count(0, (dist.get_rank(group) + 1) * 10**9)
    with mock.patch.object(time, "monotonic_ns", functools.partial(next, clock)):
        return Clock(group, CPU, turns=3).seconds([lambda: None])


def test_routes_to_be_timed_differ_between_ranks() -> None:
    """Else every rank would receive as many rows, which no router has them do."""
    maps = []

    def forward(
        x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, *_: Any, **__: Any
    ):
        maps.append(routing_map.clone())
        return x, None

    config = cases.make_config(num_ranks=2)
    for rank in (0, 1, 0):
        backend: Any = SimpleNamespace(config=config, rank=rank, forward=forward)
        RandomLayer(backend, 40, torch.float32, CPU).forward()
    assert torch.equal(maps[0], maps[2])
    assert not torch.equal(maps[0], maps[1])
    assert all(int(one.sum()) == 40 * config.topk for one in maps)


def degrees_on_ranks(group: dist.ProcessGroup, folder: str) -> Any:
    """Everything that ranks do together."""
    rank = dist.get_rank(group)
    config = cases.make_config(num_ranks=2, max_tokens=512, hidden=64)

    def select(**options: Any) -> tuple[int, int]:
        backend = select_backend(config, group, "cpu", kind="scheduled", **options)
        assert isinstance(backend, ScheduledBackend)
        return backend.degrees

    sizes = Sizes(64, 64, 2, rows=64, num_bytes=2**12, points=3, turns=3)
    found = measure(group, HostGrid(1, 2, rank), CPU, torch.float32, sizes)
    assert set(found.lines) == set(found.machine.wanted)
    (fewest, _), *_, (most, _) = found.samples["product"]
    assert (fewest, most) == (2 * 64 * 64 * 2, 2 * 64 * 64 * 64), "a multiply and an add"
    for name, pairs in found.samples.items():
        assert all(time > 0 for _, time in pairs), name
        if name in TOGETHER:
            assert all(size / 2 % ALIGNMENT_BYTES == 0 for size, _ in pairs), name
            assert pairs[-1][0] == 2**12, "bytes of a buffer"
    assert found.samples["copy"][-1][0] == 64 * 64 * 4, "bytes of rows"
    assert slowest(group) == pytest.approx([2 / CALLS])
    assert found.beside == {"all_to_all": Beside(2, 2)}, "a processor does one after the other"
    good = Path(folder, "good.json")
    if rank == 0:
        write_fit(good, make_fit(copy=(0, 0), product=(0, 3e-11)))
        write_fit(Path(folder, "measured.json"), found)
        write_fit(Path(folder, "other.json"), replace(found, machine=Machine("moon", 1, 2)))
    dist.barrier(group)
    degrees = select(degree="auto", degree_fit=str(good))
    assert min(degrees) > 1, degrees
    assert select(degree="auto", degree_fit=str(Path(folder, "measured.json")))
    assert select(degree="3,2") == (3, 2)
    for options, words in (
        ({}, "rank 0: degree='auto': wanted a degree_fit"),
        ({"degree_fit": str(Path(folder, "none.json"))}, "rank 0: fit .*none.json: cannot be read"),
        ({"degree_fit": str(Path(folder, "other.json"))}, "rank 0: .* 1 x 2 ranks on moon, but"),
    ):
        with pytest.raises(ConfigError, match=words):
            select(degree="auto", **options)
    alone = str(good) if rank == 0 else str(Path(folder, "gone.json"))
    with pytest.raises(ConfigError, match="rank 1: fit .*gone.json: cannot be read"):
        select(degree="auto", degree_fit=alone)
    own = Path(folder, f"own{rank}.json")  # a rank's clock may be off
    write_fit(own, make_fit(copy=(0.1 * rank, 0), product=(0, 3e-11)))
    with pytest.raises(
        ConfigError, match=r"different degrees: \(\d+, \d+\) on rank 0, \(1, 1\) on"
    ):
        select(degree="auto", degree_fit=str(own))
    stamps_are_of_every_part(group, config)
    with pytest.raises(ConfigError, match="rank 0: .* is of float32, but tokens are torch.float64"):
        select(degree="auto", degree_fit=str(good), dtype=torch.float64)
    return degrees


def degrees_of_sharing_ranks(group: dist.ProcessGroup, folder: str) -> Any:
    """Everything that two by two ranks, of which two share each expert, do together."""
    rank = dist.get_rank(group)
    mine, sharing = _groups(group, 2, None)
    assert mine is not None
    assert sharing is not None
    try:
        for given in ((3, None), (2, 3)):
            with pytest.raises(ConfigError, match="on 4 ranks: wanted two numbers whose product"):
                _groups(group, *given)
        assert dist.get_process_group_ranks(mine) == [rank % 2, 2 + rank % 2]
        sizes = Sizes(64, 64, 2, rows=64, num_bytes=2**12, points=3, turns=3)
        grid = HostGrid(1, 2, rank // 2)
        measured = functools.partial(
            measure, mine, grid, CPU, torch.float32, sizes, tensor_group=sharing, everyone=group
        )
        found = measured()
        assert set(found.lines) == set(found.machine.wanted)
        assert set(found.beside) == set(found.machine.carriers)
        assert found.machine.shared == 2
        assert found.samples[GATHER][-1][0] == 2**12, "bytes of what is gathered"
        if rank == 0:
            fit = make_fit(1, 2, shared=2, copy=(0, 0), product=(0, 3e-11))
            write_fit(Path(folder, "good.json"), fit)
            write_fit(Path(folder, "measured.json"), found)
            write_fit(Path(folder, "whole.json"), make_fit(1, 2))
        dist.barrier(group)
        config = cases.make_config(num_ranks=2, max_tokens=512, hidden=64)

        def select(name: str) -> tuple[int, int]:
            path = str(Path(folder, name))
            backend = select_backend(
                config,
                mine,
                "cpu",
                kind="scheduled",
                tensor_group=sharing,
                degree="auto",
                degree_fit=path,
            )
            assert isinstance(backend, ScheduledBackend)
            assert backend.num_sharing == 2
            return backend.degrees

        assert select("measured.json")
        with pytest.raises(ConfigError, match=r"is of 1 x 2 ranks on .* 2 to an expert.*--within"):
            select("whole.json")
        # One rank's own trouble is all four ranks', be they in another group of either kind.
        with pytest.raises(ConfigError, match=r"gone.json: cannot be read"):
            select("good.json" if rank else "gone.json")
        own = make_fit(1, 2, shared=2, copy=(0.1 * (rank == 3), 0), product=(0, 3e-11))
        write_fit(Path(folder, f"own{rank}.json"), own)
        with pytest.raises(ConfigError, match="different degrees"):
            select(f"own{rank}.json")
        return select("good.json")
    finally:
        for one in (mine, sharing):
            dist.destroy_process_group(one)


def test_ranks_that_share_experts_measure_and_choose_degrees(tmp_path: Path) -> None:
    pool = RankPool(4)
    try:
        found = pool.run(degrees_of_sharing_ranks, str(tmp_path))
    finally:
        pool.close()
    assert len(set(found)) == 1
    assert min(found[0]) > 1


def test_ranks_measure_and_choose_degrees(tmp_path: Path) -> None:
    pool = RankPool(2)
    try:
        first, second = pool.run(degrees_on_ranks, str(tmp_path))
    finally:
        pool.close()
    assert first == second


def test_a_degree_beyond_the_rows_is_refused() -> None:
    config = cases.make_config(max_tokens=4, topk=3)
    for degree in ("13", "1,13"):
        with pytest.raises(ConfigError, match=f"'{degree}': wanted at most 12, the routes of max"):
            select_backend(config, None, "cpu", kind="scheduled", degree=degree)
    most = select_backend(config, None, "cpu", kind="scheduled", degree="12")
    assert isinstance(most, ScheduledBackend)
    assert most.degrees == (12, 12)


def test_one_rank_wants_the_fit_that_several_want(tmp_path: Path) -> None:
    """A script that works on one rank goes on working on several."""

    def select(**options: Any) -> tuple[int, int]:
        config = cases.make_config(max_tokens=4, topk=3)
        backend = select_backend(config, None, "cpu", kind="scheduled", degree="auto", **options)
        assert isinstance(backend, ScheduledBackend)
        return backend.degrees

    with pytest.raises(ConfigError, match="^degree='auto': wanted a degree_fit beside it"):
        select()
    with pytest.raises(ConfigError, match=r"^fit .*none.json: cannot be read"):
        select(degree_fit=str(tmp_path / "none.json"))
    fit = tmp_path / "fit.json"
    write_fit(fit, make_fit())
    with pytest.raises(ConfigError, match="is of float32, but tokens are torch.float64"):
        select(degree_fit=str(fit), dtype=torch.float64)
    assert select(degree_fit=str(fit)) == (1, 1), "nothing travels, whatever a fit of ranks says"


def test_the_command_measures_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fit.json"
    small = ("--hidden", "64", "--intermediate", "64", "--rows", "64", "--mib", "0.01")
    assert command.main(["fit", str(path), *small]) == 0
    machine = machine_of(HostGrid(1, 1, 0), CPU)
    assert set(read_fit(path, machine).lines) == {"product", "copy"}
    assert "product: " in capsys.readouterr().out
    layer = ("--hidden", "64", "--intermediate", "64", "--num-experts", "2", "--topk", "1")
    assert command.main(["trace", str(path), *layer, "--tokens", "8"]) == 1
    assert "1 rank, with which nothing travels" in capsys.readouterr().err
    assert command.main(["fit", str(path), "--rows", "0"]) == 1
    assert "--rows 0: wanted more than 0" in capsys.readouterr().err
    assert command.main(["fit", str(path), "--rows", "3", "--experts", "2"]) == 1
    assert "rows=3 for 2 experts: wanted 2 for each at least" in capsys.readouterr().err
    assert command.main(["fit", str(tmp_path / "no" / "fit.json"), *small]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("measured", "{layer,fit,trace}"),
        ("schedule", "{fit,trace}"),
        ("calibrate", "--grads {main_grad,own}"),
    ],
)
def test_commands_have_their_old_names_too(
    name: str, commands: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(f"flashmoe_megatron.{name}", run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith(f"usage: flashmoe_megatron.{name} [-h]")
    assert commands in said
