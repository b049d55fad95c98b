"""The model of streams beside an independent scheduler and FSMoE's closed forms."""

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from flashmoe_megatron.separate.degree import (
    Pass,
    Slowdown,
    Stage,
    best_degree,
    schedule,
    tasks_of,
    time_of,
)

DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)


def simulate(
    degree: int,
    a2a: int,
    gather: int,
    experts: int,
    scatter: int,
    slices: int,
    weights: int,
    host: tuple[int, int],
) -> int:
    """Plays one pass of FSMoE's schedule moment by moment, with a queue for each stream.

    It knows nothing of tasks or of what begins first: streams look, whenever anything ends or is
    issued, at what has arrived for them. Times are whole numbers.
    """
    issued: dict[tuple[str, int], int] = {}
    clock, step = host
    for names in ("DG", "ESC"):
        for part, name in itertools.product(range(degree), names):
            clock += step
            issued[name, part] = clock
        if names == "DG":
            issued["slices", -1] = clock
    issued["weights", -1] = clock
    between = deque([("D", part, a2a) for part in range(degree)])
    if slices:
        between.append(("slices", -1, slices))
    between.extend(("C", part, a2a) for part in range(degree))
    compute = deque([("E", part, experts) for part in range(degree)])
    if weights:
        compute.append(("weights", -1, weights))
    gathers, scatters = (
        deque([(name, part, time) for part in range(degree)] if time else [])
        for name, time in (("G", gather), ("S", scatter))
    )
    needs = {"G": "D", "E": "G" if gather else "D", "S": "E", "C": "S" if scatter else "E"}
    streams = {"between": [between], "compute": [compute], "within": [gathers, scatters]}
    running: dict[str, tuple[int, str, int]] = {}
    done: set[tuple[str, int]] = set()
    now = 0
    while True:
        for stream, queues in streams.items():
            if stream in running:
                continue
            for queue in queues:
                if not queue:
                    continue
                name, part, time = queue[0]
                if issued[name, part] > now:
                    continue
                if name not in needs or (needs[name], part) in done:
                    queue.popleft()
                    running[stream] = (now + time, name, part)
                    break
        left = [queue for queues in streams.values() for queue in queues if queue]
        if not running and not left:
            return max(now, clock)
        moments = [end for end, _, _ in running.values()]
        moments += [time for time in issued.values() if time > now]
        assert moments, f"nothing ends, and {left} are left"
        now = min(moments)
        for stream, (end, name, part) in list(running.items()):
            if end == now:
                done.add((name, part))
                del running[stream]


UNIT = 720720
"""A multiple of every degree up to 16, so that parts are whole numbers, and floats exact."""


@dataclass(frozen=True)
class Layer:
    """One pass of one configuration: alpha and whole time of each stage, and what is behind."""

    a2a: tuple[int, int]
    gather: tuple[int, int]
    experts: tuple[int, int]
    scatter: tuple[int, int]
    slices: int
    weights: int
    host: tuple[int, int] = (0, 0)

    def part(self, name: str, degree: int) -> int:
        alpha, whole = getattr(self, name)
        assert whole % degree == 0
        return alpha + whole // degree

    def simulated(self, degree: int) -> int:
        stages = ("a2a", "gather", "experts", "scatter")
        return simulate(
            degree,
            *(self.part(name, degree) for name in stages),
            self.slices,
            self.weights,
            self.host,
        )

    def as_pass(self) -> Pass:
        dispatch, combine = (Stage(name, "between", *self.a2a) for name in ("dispatch", "combine"))
        gather, scatter = (Stage(name, "within", *getattr(self, name)) for name in WITHIN)
        experts = Stage("experts", "compute", *self.experts)
        there, back = (dispatch, gather), (scatter, combine)
        begin, step = self.host
        return Pass(
            there,
            experts,
            back,
            slices_s=self.slices,
            weights_s=self.weights,
            issue_s=begin,
            part_s=step * (len(there) + 1 + len(back)),
        )


WITHIN = ("gather", "scatter")


def configurations() -> Iterator[tuple[Layer, Layer]]:
    """The forward and the backward of 1,458 layers and machines, in units of a microsecond.

    They are the batches, lengths, widths and capacities of FSMoE's grid on three machines; of every
    three, one has whole experts, and gradients of other sizes are under way in the backwards. Hosts
    take nothing up to longer than the streams.
    """
    grid = itertools.product(
        (1, 2, 4),
        (512, 1024, 2048),
        (1024, 2048, 4096),
        (1, 2, 3.5),
        (1.2, 2.4, 4.8),
        (2, 3),
        (1, 3, 10),
    )
    for place, (batch, length, width, ratio, capacity, products, speed) in enumerate(grid):
        size = capacity * batch * length * width
        flops = size * ratio * width / 4 * products

        def times(alpha_us: float, whole_ms: float) -> tuple[int, int]:
            return round(alpha_us) * UNIT, round(1e3 * whole_ms) * UNIT

        a2a = times(100, size / 4 * 1.85e-6 / speed)
        within = times(50, size * 6.7e-7 / speed) if place % 3 else (0, 0)
        once, twice = (times(30 * n, n * flops * 5.7e-11) for n in (1, 2))
        slices = place % 4 * 150 * UNIT
        host = (place % 5 * 200 * UNIT, place % 7 * 30 * UNIT)
        yield (
            Layer(a2a, within, once, within, 0, 0, host),
            Layer(a2a, within, twice, within, slices, sum(once), host),
        )


def test_it_is_an_independent_scheduler_and_chooses_the_best() -> None:
    num_layers = different = 0
    for layers in configurations():
        num_layers += 1
        chosen = []
        for layer in layers:
            one = layer.as_pass()
            found = {degree: layer.simulated(degree) for degree in DEGREES}
            assert {degree: time_of(one, degree) for degree in DEGREES} == found
            chosen.append(best_degree(one, DEGREES))
            assert chosen[-1] == min(DEGREES, key=lambda degree: (found[degree], degree))
        different += chosen[0] != chosen[1]
    assert num_layers == 1458
    assert different > num_layers / 10, "forward and backward want degrees of their own"


def test_it_has_the_closed_forms_of_fsmoe_where_their_conditions_hold() -> None:
    """Each is the busiest stream without a gap, and what is before and behind it.

    Where exchanges take longest and no gradients fill their gap, FSMoE takes gather and scatter for
    that gap. This is never too little, and is the gap where experts take as long as the exchanges.
    """
    holds = Counter[str]()
    for layer, r in itertools.product(itertools.chain(*configurations()), DEGREES):
        layer = replace(layer, weights=0, host=(0, 0))
        a, g, e, s = (layer.part(name, r) for name in ("a2a", "gather", "experts", "scatter"))
        taken, slices = time_of(layer.as_pass(), r), layer.slices
        first, last = a + g + e + s, r * a + g + e + s  # a result comes in on its way back
        if max(e, g + s) <= a and first <= r * a + slices and last <= (2 * r - 1) * a + slices:
            holds["between hosts"] += 1
            assert taken == 2 * r * a + slices
        if e >= max(a, g + s) and r * a + slices <= first:
            holds["experts"] += 1
            assert taken == 2 * a + g + s + r * e
        if min(g, s) >= a and e <= min(g, (r - 1) * s) and slices <= r * (g - a) + a:
            holds["within hosts"] += 1
            assert taken == 2 * a + r * (g + s)
        if g <= a and slices <= g + s and r * e <= 2 * (r - 1) * a:
            holds["all-to-all"] += 1
            assert taken <= 2 * r * a + g + s
            full = replace(layer, experts=(2 * (r - 1) * a // r, 0))
            if r == 2 and g + s <= a:
                assert time_of(full.as_pass(), r) == 2 * r * a + g + s
    forms = ("between hosts", "experts", "within hosts", "all-to-all")
    assert all(holds[form] > 100 for form in forms), holds


def test_copies_of_parts_cost_several_parts_alone() -> None:
    stage = Stage("experts", "compute", 1, 8, cut_s=4)
    assert [stage.time_s(degree) for degree in (1, 2, 4)] == [1 + 8, 1 + 6, 1 + 3]


def test_no_task_begins_before_the_host_has_issued_it() -> None:
    """A pass takes as long as a host that is slower than all streams, and its last result's way."""
    stages = [Stage(name, "between", 1, 0) for name in ("dispatch", "combine")]
    layer = Pass((stages[0],), Stage("experts", "compute", 1, 0), (stages[1],), 0, 0, 100, 60)
    for degree in DEGREES:
        spans = schedule(tasks_of(layer, degree))
        assert [span.begin_s for span in spans] == [span.task.issued_s for span in spans]
        assert time_of(layer, degree) == 100 + 60 * degree + 1
    assert best_degree(layer, DEGREES) == 1
    # What takes no time is issued all the same.
    nothing = replace(layer, experts=Stage("experts", "compute", 0, 0), back=())
    assert time_of(nothing, 2) == 100 + 60 * 2


def test_streams_slow_each_other_down_while_both_run() -> None:
    """Two parts of exchanges of 4 and products of 10, moment by moment."""
    ways = [Stage(name, "between", 0, 8) for name in ("dispatch", "combine")]
    layer = Pass((ways[0],), Stage("experts", "compute", 0, 20), (ways[1],))
    assert time_of(layer, 2) == 4 + 10 + 10 + 4
    slowed = replace(layer, slowdowns=(Slowdown("compute", "between", 2),))
    spans = schedule(tasks_of(slowed, 2), slowed.slowdowns)
    found = {(one.task.name, one.task.part): (one.begin_s, one.end_s) for one in spans}
    assert found == {
        ("dispatch", 0): (0, 4),
        ("dispatch", 1): (4, 8),
        ("experts", 0): (4, 16),  # 2 are done when the second part has come
        ("experts", 1): (16, 28),
        ("combine", 0): (16, 20),
        ("combine", 1): (28, 32),
    }
    both = (*slowed.slowdowns, Slowdown("between", "compute", 2))
    for one, degree in itertools.product((layer, replace(layer, weights_s=9, slices_s=5)), DEGREES):
        work = sum(task.time_s for task in tasks_of(one, degree))
        taken = time_of(replace(one, slowdowns=both), degree)
        assert taken == pytest.approx(work), "half as fast both is one after the other"
