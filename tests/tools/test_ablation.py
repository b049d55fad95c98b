"""FSMoE's layers by the simulation, beside a scheduler that knows nothing of tasks."""

import itertools

import pytest

from flashmoe_megatron.measured.fit import Line
from tests.unit.test_schedule import simulate
from tools.simulate import __main__ as command
from tools.simulate.ablation import (
    CUTS,
    DEGREES,
    FSMOE,
    MACHINES,
    OURS,
    SCHEDULES,
    Constants,
    Layer,
    layers,
    outcome,
    summarize,
)

SOME = list(layers())[::97]


def expected(layer: Layer, constants: Constants) -> dict[str, float]:
    """Each schedule's seconds, by the moment-by-moment scheduler and the sizes by hand."""
    numbers = layer.factor * layer.batch * layer.length * layer.width
    matrices = 3 if layer.mixtral else 2
    flops = numbers * layer.ratio * layer.width / 8 * matrices
    square = layer.width**2
    attention = (2 + 16 / layer.heads) * square if layer.mixtral else 4 * square
    tokens = layer.batch * layer.length
    dense = (tokens * attention + 2 * tokens * layer.length * layer.width) / 8
    dense_s, reduced = constants.product.time_s(dense), attention / 8

    def part(line: Line, size: float, degree: int, times: int = 1) -> float:
        return times * (line.alpha_s + size * line.beta_s / degree)

    def play(degree: int, *, times: int, slices: float, joined: bool) -> float:
        a2a = part(constants.all_to_all, numbers / 8, degree)
        gather, scatter = (
            part(line, numbers, degree) for line in (constants.all_gather, constants.reduce_scatter)
        )
        experts = part(constants.product, flops, degree, times)
        ways = a2a, gather, experts, scatter
        if not joined:
            return simulate(degree, *ways, slices, 0, (0, 0))  # type: ignore[arg-type]
        # The scheduler has one time for both ways of an exchange; here they differ by a little.
        both = (gather + scatter) / 2
        return simulate(degree, a2a + both, 0, experts, 0, slices, 0, (0, 0))  # type: ignore[arg-type]

    def backward(degree: int, *, joined: bool) -> float:
        taken = []
        for cut in range(CUTS + 1):
            sizes = reduced * cut / CUTS, reduced * (CUTS - cut) / CUTS
            inside, outside = (part(constants.all_reduce, n, 1) if n else 0 for n in sizes)
            one = play(degree, times=2, slices=inside, joined=joined)
            taken.append(one + max(2 * dense_s, outside))
        return min(taken)

    whole_s = part(constants.all_reduce, reduced, 1)
    fixed = dense_s + min(
        sum(play(degree, times=times, slices=0, joined=True) for times in (1, 2))
        for degree in DEGREES
    )
    found = {"fixed": fixed + 2 * dense_s + whole_s, "improved": fixed + max(2 * dense_s, whole_s)}
    for name, joined in (("one stream", True), ("all", False)):
        found[name] = (
            dense_s
            + min(play(degree, times=1, slices=0, joined=joined) for degree in DEGREES)
            + min(backward(degree, joined=joined) for degree in DEGREES)
        )
    return found


@pytest.mark.parametrize("constants", MACHINES, ids=lambda one: one.name)
def test_schedules_are_an_independent_schedulers(constants: Constants) -> None:
    for layer in SOME:
        found, want = outcome(layer, constants).times_s, expected(layer, constants)
        assert found["all"] == pytest.approx(want["all"], rel=1e-9)
        for name in SCHEDULES[:-1]:
            assert found[name] == pytest.approx(want[name], rel=0.01), name


def test_there_are_1458_layers_and_each_schedule_has_all_of_the_one_before() -> None:
    assert len(list(layers())) == len(set(layers())) == 1458
    for layer in SOME:
        times = outcome(layer, FSMOE).times_s
        for slower, faster in itertools.pairwise(SCHEDULES):
            assert times[faster] <= times[slower] * (1 + 1e-9), (layer, faster)


def test_layers_that_are_the_same_to_the_model_count_each() -> None:
    """Heads change a grouped attention alone."""
    of_heads = [Layer(4, 1024, 2048, 2.4, 3, heads, False) for heads in (8, 16, 32)]
    assert len({tuple(outcome(one, OURS).times_s.values()) for one in of_heads}) == 1
    found = summarize(of_heads, OURS)
    assert found.num_layers == 3
    assert found.different == 3 * summarize(of_heads[:1], OURS).different
    grouped = [Layer(4, 1024, 4096, 2.4, 3, heads, True) for heads in (8, 32)]
    fewer, more = (outcome(one, FSMOE).times_s["fixed"] for one in reversed(grouped))
    assert fewer < more


def test_the_command_prints_what_was_published_beside(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fsmoe", "--every", "487"]) == 0
    out = capsys.readouterr().out
    assert "| all | 1.18 | 1.22 | " in out
    assert "of 3 layers have degrees of their own each way (FSMoE: 912 of 1458)" in out
